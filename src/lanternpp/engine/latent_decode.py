"""The decoding loop over latents: the loop of `decode.py`, with vectors of C numbers in the place of codes."""

from __future__ import annotations

from typing import Any

import torch

from lanternpp.accept.base import Acceptance
from lanternpp.engine.decode import Engine
from lanternpp.engine.latents import DiffusionGuidance, DiffusionSampling, MixtureGuidance, MixtureSampling
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.engine.verify.choose import Verifier
from lanternpp.engine.verify.latents import verify_latents
from lanternpp.engine.verify.tokenwise import verify_tokenwise
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.models.latents import DiffusionTarget


class LatentEngine(Engine):
    """Decodes latents, drawn from mixtures or by a diffusion head. `codes` [B, length, C], a finished sample's too, are float32."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.codes = self.codes.new_zeros(*self.codes.shape, self.target.channels, dtype=torch.float32)
        self.proposer.root = self.codes[:, 0].clone()

    @classmethod
    def check(cls, target: Target, rule: Acceptance, verifier: Verifier) -> None:
        """Check that the rule and the verifier are for these latents; raise InputError if not."""
        diffusion = isinstance(target, DiffusionTarget)
        if not (rule.lossless or (rule.trajectories and diffusion)):
            alternative = " or cspd" if diffusion else ""
            raise InputError(
                "this model draws continuous latents, for which there is no such relaxed rule: use --accept "
                f"exact{alternative}"
            )
        if verifier is not verify_tokenwise:
            raise InputError(
                "drafts of continuous latents are verified one by one, as verifying several together takes an integral: "
                "use --verify token"
            )

    def parts(
        self, target: Target, sampling: Sampling, guidance: Guidance, verifier: Verifier
    ) -> tuple[MixtureSampling, Guidance, Verifier]:
        """Return sampling, guidance and verifier of latents; with a diffusion head guidance is part of every step."""
        warp = (*sampling.warp, target.channels)
        if not isinstance(target, DiffusionTarget):
            return MixtureSampling(*warp), MixtureGuidance(guidance.scale, target.channels), verify_latents
        steps = target.config.denoising_steps
        diffusion = DiffusionSampling(*warp, steps, guidance.scale, denoiser=target.denoiser)
        return diffusion, DiffusionGuidance(guidance.scale), verify_latents
