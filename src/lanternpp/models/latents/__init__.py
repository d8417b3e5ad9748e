"""Models of continuous latents: a mixture of Gaussians at every place, or a diffusion head."""
