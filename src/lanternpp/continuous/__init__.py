"""Targets over continuous latents: a mixture of Gaussians at every place, or a diffusion head, drawn and verified exactly.

The loop, its cache, its noise and its proposers are those of `engine/`; what differs between a code and a latent is here.
"""
