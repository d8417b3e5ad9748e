"""The loop over latents: that of `engine/decode.py`, with vectors of C numbers in the place of codes."""

from __future__ import annotations

import torch

from lanternpp.accept.base import Acceptance
from lanternpp.continuous.denoiser import Denoiser
from lanternpp.continuous.diffusion import (
    DiffusionGuidance,
    DiffusionSampling,
    DiffusionTarget,
    check_pair,
)
from lanternpp.continuous.mixture import MixtureGuidance, MixtureSampling
from lanternpp.continuous.trajectories import TrajectoryProposer, verify_trajectories
from lanternpp.continuous.verify import verify_latents
from lanternpp.engine.decode import Engine
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.proposer import Proposer
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verifiers import Verifier
from lanternpp.engine.verify import verify
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.proposers.network import NetworkProposer
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.proposers.tree import TreeProposer


class LatentEngine(Engine):
    """Decodes latents. Its `codes` are [B, length, C] float32, and so are those of the samples that it finishes."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer,
        rule: Acceptance,
        sampling: MixtureSampling,
        guidance: Guidance,
        batch: int,
        verifier: Verifier = verify_latents,
    ):
        super().__init__(target, proposer, rule, sampling, guidance, batch, verifier=verifier)
        self.codes = torch.zeros(*self.codes.shape, target.channels, device=self.codes.device)
        proposer.root = self.codes[:, 0].clone()


def check(target: Target, proposer: Proposer, rule: Acceptance) -> None:
    """InputError where drafts of latents are not a chain by an EAGLE drafter, or nothing, under a rule that they have."""
    diffusion = isinstance(target, DiffusionTarget)
    if diffusion and isinstance(proposer, NetworkProposer):
        check_pair(target, proposer.drafter)
    kind = TrajectoryProposer if diffusion else TreeProposer
    chain = isinstance(proposer, kind) and proposer.builder.chain and proposer.builder.drawn
    if not (isinstance(proposer, NoDraft) or chain):
        raise InputError(
            "this model draws continuous latents, which are drafted in a chain by an EAGLE drafter or not at all: use "
            "--method eagle --tree chain-4 --verify token, or --method ar"
        )
    if not (rule.lossless or (rule.trajectories and diffusion)):
        other = " or cspd" if diffusion else ""
        raise InputError(
            f"this model draws continuous latents, for which there is no such relaxed rule: use --accept exact{other}"
        )


def engine_for(
    target: Target,
    proposer: Proposer,
    rule: Acceptance,
    sampling: Sampling,
    guidance: Guidance,
    batch: int,
    measure_tv: bool = False,
    verifier: Verifier = verify,
) -> Engine:
    """The engine that decodes what a target predicts, codes or latents; arguments as of `Engine`. InputError."""
    if not target.channels:
        if rule.trajectories:
            raise InputError(
                "this model draws codes, and the rule cspd is for latents of a diffusion head: use --accept exact"
            )
        return Engine(target, proposer, rule, sampling, guidance, batch, measure_tv, verifier)
    check(target, proposer, rule)
    if verifier is not verify and not isinstance(proposer, NoDraft):
        raise InputError(
            "drafts of continuous latents are verified one by one, as verifying several together takes an integral: use "
            "--verify token"
        )
    shared = (sampling.temperature, sampling.top_k, sampling.top_p, target.channels)
    if isinstance(target, DiffusionTarget):
        return diffusion_engine(target, proposer, rule, shared, guidance, batch)
    latent_guidance = MixtureGuidance(guidance.scale, target.channels)
    return LatentEngine(target, proposer, rule, MixtureSampling(*shared), latent_guidance, batch)


def diffusion_engine(
    target: DiffusionTarget,
    proposer: Proposer,
    rule: Acceptance,
    sampling: tuple[float, int, float, int],
    guidance: Guidance,
    batch: int,
) -> LatentEngine:
    """The engine of a target with a diffusion head; sampling: the first fields of `DiffusionSampling`."""

    def drawing_with(denoiser: Denoiser) -> DiffusionSampling:
        return DiffusionSampling(*sampling, target.config.denoising_steps, guidance.scale, denoiser=denoiser)

    latent_guidance = DiffusionGuidance(guidance.scale)
    ours = drawing_with(target.denoiser)
    engine = LatentEngine(target, proposer, rule, ours, latent_guidance, batch, verify_trajectories)
    if isinstance(proposer, TrajectoryProposer):
        proposer.sampling = drawing_with(proposer.drafter.denoiser)
    return engine
