"""Tiny targets over latents, drafters that know nothing of them, and the distance between two samples of pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lanternpp.drafters.diffusion import DRAFTER, DiffusionDrafter
from lanternpp.drafters.eagle import EagleDrafter
from lanternpp.engine.latent_decode import LatentEngine
from lanternpp.models.latents import DIFFUSION, DiffusionTarget, LatentTarget
from lanternpp.models.vq.autoencoder import KL, KLConfig
from lanternpp.nn import checkpoints
from lanternpp.nn.decoder import DecoderConfig

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


def tiny(kind: type[Kind], strong: str, **fields: Any) -> Kind:
    """A target of random weights, strong enough for the context to matter: 2 x 2 latents of 2 channels.

    strong: where the names of the weights of its head begin.
    """
    torch.manual_seed(0)
    kl = KL(KLConfig(4, 2, (16,), (1,), (1,), 16))
    target = kind(kind.config_class(("red", "tulip"), ("tulip",), **SMALL, **fields), kl)  # type: ignore[arg-type]
    for name, weight in target.named_parameters():
        weight.data.normal_(std=0.2 if name.startswith(strong) else 0.5 if weight.dim() == 2 else 0.1)
        if name.endswith("norm.weight"):
            weight.data.fill_(1)
    return frozen(target)


def frozen(network: Network) -> Network:
    """In float64, for inference."""
    return network.double().eval().requires_grad_(False)


def eagle(target: LatentTarget, kind: type[EagleDrafter] = EagleDrafter, **fields: Any) -> EagleDrafter:
    """A drafter of random weights, which knows nothing of the target."""
    torch.manual_seed(1)
    shape = target.decoder.config
    config = kind.config_class.like(DecoderConfig(shape.dim, 1, shape.heads, shape.hidden), **fields)
    return frozen(kind(config, target.decoder.rotary_table))


def write_diffusion(folder: Path) -> Path:
    """A model whose latents are drawn by a diffusion head of three steps, with a drafter; of random weights."""
    target = tiny(DiffusionTarget, "denoiser", denoiser_width=16, denoiser_blocks=1, denoising_steps=3)
    drafter = eagle(target, DiffusionDrafter, channels=2, denoiser_width=8)
    kinds = {"tokenizer": "kl", "target": DIFFUSION, "drafter": DRAFTER}
    configs = {
        "tokenizer": asdict(target.vq.config),
        "target": asdict(target.config),
        "drafter": drafter.config.flat(),
    }
    for part, network in (("tokenizer", target.vq), ("target", target), ("drafter", drafter)):
        checkpoints.save(folder / part, {"kind": kinds[part], **configs[part]}, network.float().state_dict())
    return folder


def first_latents(engine: LatentEngine, first: int) -> Tensor:
    """The first three latents of a batch of pictures with seeds from `first` on, flat: [batch, 3 C]."""
    prompt = engine.target.prompt(["red tulip"], 2)
    for slot in range(engine.batch):
        engine.admit(slot, "red tulip", first + slot, prompt)
    while (engine.count < 3).any():
        engine.step()
    return engine.codes[:, :3].flatten(1)


def energies(a: Tensor, b: Tensor, times: int = 100) -> tuple[float, list[float]]:
    """The energy distance of two samples [n, d], and sorted those of the same latents in random halves."""
    n, far = len(a), torch.cdist(torch.cat((a, b)), torch.cat((a, b)))
    generator = torch.Generator().manual_seed(0)
    signs = torch.ones(times + 1, 2 * n)
    signs[0, n:] = -1
    for row in signs[1:]:
        row[torch.randperm(2 * n, generator=generator)[:n]] = -1
    first, *rest = (-((signs @ far) * signs).sum(1) / n**2).tolist()  # up to a constant
    return first, sorted(rest)


def same_in_any_batch(made: Callable[[int], LatentEngine]) -> bool:
    """Whether a picture is the same alone and between two others; `made`: an engine for so many."""
    wide, alone = made(3), made(1)
    for slot, seed in ((0, 4), (1, 5), (2, 6)):
        wide.admit(slot, "tulip", seed)
    alone.admit(0, "tulip", 5)
    for engine in (wide, alone):
        while engine.done() != list(range(engine.batch)):
            engine.step()
    assert sum(wide.collect(1).accepted) == wide.target.length
    return torch.allclose(wide.collect(1).codes, alone.collect(0).codes, atol=1e-5)
