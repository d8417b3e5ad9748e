"""The loop over latents: that of `engine/decode.py`, with vectors of C numbers in the place of codes."""

from __future__ import annotations

import torch

from lanternpp.accept.base import Acceptance
from lanternpp.continuous.mixture import MixtureGuidance, MixtureSampling
from lanternpp.continuous.verify import verify_latents
from lanternpp.engine.decode import Engine
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.proposer import Proposer
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verifiers import Verifier
from lanternpp.engine.verify import verify
from lanternpp.errors import InputError
from lanternpp.proposers.network import NetworkProposer
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.proposers.tree import TreeProposer
from lanternpp.targets.base import Target


class LatentEngine(Engine):
    """Decodes latents. Its `codes` are [B, length, C] float32, and so are those of the samples that it finishes."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer,
        rule: Acceptance,
        sampling: MixtureSampling,
        guidance: MixtureGuidance,
        batch: int,
    ):
        super().__init__(target, proposer, rule, sampling, guidance, batch, verifier=verify_latents)
        self.codes = torch.zeros(*self.codes.shape, target.channels, device=self.codes.device)
        proposer.root = self.codes[:, 0].clone()


def check(proposer: Proposer, rule: Acceptance) -> None:
    """InputError where drafts of latents are not a chain by an EAGLE drafter, or nothing, under the exact rule."""
    chain = isinstance(proposer, NetworkProposer) and proposer.builder.chain and proposer.builder.drawn
    if not (isinstance(proposer, NoDraft) or (isinstance(proposer, TreeProposer) and chain)):
        raise InputError(
            "this model draws continuous latents, which are drafted in a chain by an EAGLE drafter or not at all: use "
            "--method eagle --tree chain-4 --verify token, or --method ar"
        )
    if not rule.lossless:
        raise InputError(
            "this model draws continuous latents, for which there is no relaxed rule: use --accept exact"
        )


def engine_for(
    target: Target,
    proposer: Proposer,
    rule: Acceptance,
    sampling: Sampling,
    guidance: Guidance,
    batch: int,
    measure: bool = False,
    verifier: Verifier = verify,
) -> Engine:
    """The engine that decodes what a target predicts, codes or latents; arguments as of `Engine`. InputError."""
    if not target.channels:
        return Engine(target, proposer, rule, sampling, guidance, batch, measure, verifier)
    check(proposer, rule)
    if verifier is not verify and not isinstance(proposer, NoDraft):
        raise InputError(
            "drafts of continuous latents are verified one by one, as verifying several together takes an integral: use "
            "--verify token"
        )
    latent_sampling = MixtureSampling(sampling.temperature, sampling.top_k, sampling.top_p, target.channels)
    latent_guidance = MixtureGuidance(guidance.scale, target.channels)
    return LatentEngine(target, proposer, rule, latent_sampling, latent_guidance, batch)
