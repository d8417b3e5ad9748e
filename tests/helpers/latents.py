"""Tiny targets over latents, random drafters, engines of both, and the distance between two samples of pictures."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from helpers.distributions import chi_square
from lanternpp.accept.base import Acceptance
from lanternpp.accept.exact import Exact
from lanternpp.drafters.eagle import DiffusionDrafter, EagleDrafter
from lanternpp.engine.latent_decode import LatentEngine, draw_residual
from lanternpp.engine.latents import GaussianMixture
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.models.latents import DIFFUSION, ContinuousTarget, DiffusionTarget, LatentTarget
from lanternpp.models.vq.autoencoder import KL, KLConfig
from lanternpp.nn import checkpoints
from lanternpp.nn.decoder import DecoderConfig
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.proposers.tree import TrajectoryProposer, TreeProposer
from lanternpp.trees.static import StaticTree, chain

Kind = TypeVar("Kind", bound=LatentTarget)
Network = TypeVar("Network", bound=nn.Module)
SMALL: dict[str, Any] = {
    "dim": 16,
    "layers": 1,
    "heads": 2,
    "hidden": 24,
    "grid": 2,
    "slots": 2,
    "channels": 2,
}


def tiny_target(kind: type[Kind], strong: str, **fields: Any) -> Kind:
    """A target of random weights, strong enough for the context to matter: 2 x 2 latents of 2 channels.

    strong: where the names of the weights of its head begin.
    """
    torch.manual_seed(0)
    kl = KL(KLConfig(4, 2, (16,), (1,), (1,), 16))
    target = kind(kind.config_class(("red", "tulip"), ("tulip",), **SMALL, **fields), kl)
    for name, weight in target.named_parameters():
        weight.data.normal_(std=0.2 if name.startswith(strong) else 0.5 if weight.dim() == 2 else 0.1)
        if name.endswith("norm.weight"):
            weight.data.fill_(1)
    return frozen(target)


def frozen(network: Network) -> Network:
    """In float64, for inference."""
    return network.double().eval().requires_grad_(False)


def eagle(target: LatentTarget, kind: type[EagleDrafter] = EagleDrafter, **fields: Any) -> EagleDrafter:
    """A drafter of random weights."""
    torch.manual_seed(1)
    shape = target.decoder.config
    config = kind.config_class.like(DecoderConfig(shape.dim, 1, shape.heads, shape.hidden), **fields)
    return frozen(kind(config, target.decoder.rotary_table))


def small_diffusion(steps: int = 3) -> tuple[DiffusionTarget, EagleDrafter]:
    """A target whose latents are drawn by a diffusion head of so many steps, and a drafter."""
    target = tiny_target(
        DiffusionTarget, "denoiser", denoiser_width=16, denoiser_blocks=1, denoising_steps=steps
    )
    return target, eagle(target, DiffusionDrafter, channels=2, denoiser_width=8)


def write_diffusion(folder: Path) -> Path:
    """A model of `small_diffusion`."""
    target, drafter = small_diffusion()
    kinds = {"tokenizer": "kl", "target": DIFFUSION, "drafter": DiffusionDrafter.kind}
    configs = {
        "tokenizer": asdict(target.vq.config),
        "target": asdict(target.config),
        "drafter": drafter.config.flat(),
    }
    for part, network in (("tokenizer", target.vq), ("target", target), ("drafter", drafter)):
        checkpoints.save(folder / part, {"kind": kinds[part], **configs[part]}, network.float().state_dict())
    return folder


def mixture_parts(drafted: bool, batch: int = 2, rule: Acceptance | None = None) -> tuple[Any, ...]:
    """The arguments of an engine whose latents are drawn from mixtures of Gaussians."""
    target = tiny_target(ContinuousTarget, "latent_out", components=3)
    proposer = TreeProposer(eagle(target), StaticTree(chain(2))) if drafted else NoDraft()
    return target, proposer, rule or Exact(), Sampling(0.9), Guidance(2.0), batch


def diffusion_parts(drafted: bool, batch: int = 2, rule: Acceptance | None = None) -> tuple[Any, ...]:
    """The arguments of an engine whose latents are drawn by a diffusion head, with a drafter whose head is similar."""
    target, drafter = small_diffusion(2)
    for weight in target.denoiser.parameters():
        weight.data /= 2
    for weight in drafter.denoiser.parameters():
        weight.data.normal_(std=0.1)
    proposer = TrajectoryProposer(drafter, StaticTree(chain(2))) if drafted else NoDraft()
    return target, proposer, rule or Exact(), Sampling(0.9), Guidance(2.0), batch


def agreement(drawn: Tensor, params: Tensor, edges: Tensor) -> float:
    """The p-value of latents [n] of one channel under a mixture's parameters [P], over the cells between edges."""
    distribution = GaussianMixture.of(params, 1)
    z = (edges[:, None] - distribution.mean[:, 0]) / distribution.log_std[:, 0].exp()
    below = (torch.special.ndtr(z) * distribution.log_weight.exp()).sum(-1)
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    counts = torch.bincount(torch.bucketize(drawn.double(), edges), minlength=len(edges) + 1)
    return chi_square(counts, torch.cat((ends[:1], below, ends[1:])).diff())


def wrong_residual(p: Tensor, q: Tensor, rejected: Tensor, noise: Noise, channels: int) -> Tensor:
    """In place of `draw_residual`: a draw from the target's own distribution."""
    return draw_residual(p, q, torch.zeros_like(rejected), noise, channels)


def next_latents(engine: LatentEngine, first: int) -> Tensor:
    """The second and third latents of a batch of pictures that have the first in common, with seeds from `first` on, flat: [batch, 2 C].

    One picture is admitted, and its state is every picture's.
    """
    engine.admit(0, "red tulip", 0)
    caches = [holder.cache for holder in (engine, engine.proposer) if hasattr(holder, "cache")]
    for holder in (engine, engine.proposer, *caches):
        for name in ("codes", "count", "passes", "accepted", "root", "features", "start", "used", "kv"):
            if (state := getattr(holder, name, None)) is not None:
                slots = state.unflatten(2 if name == "kv" else 0, (-1, engine.batch))
                slots.copy_(slots.narrow(3 if name == "kv" else 1, 0, 1).clone())
    engine.noise.seed.copy_(torch.arange(first, first + engine.batch))
    while (engine.count < 3).any():
        engine.step()
    return engine.codes[:, 1:3].flatten(1)


def energies(a: Tensor, b: Tensor, times: int = 100) -> tuple[float, list[float]]:
    """The energy distance of two samples [n, d], and those of random halves of the same latents, sorted."""
    n, far = len(a), torch.cdist(torch.cat((a, b)), torch.cat((a, b)))
    generator = torch.Generator().manual_seed(0)
    signs = torch.ones(times + 1, 2 * n)
    signs[0, n:] = -1
    for row in signs[1:]:
        row[torch.randperm(2 * n, generator=generator)[:n]] = -1
    first, *rest = (-((signs @ far) * signs).sum(1) / n**2).tolist()  # up to a constant
    return first, sorted(rest)
