"""A tokenizer from its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from lanternpp.errors import InputError
from lanternpp.models.vq.kl import KL, KLConfig
from lanternpp.models.vq.model import MOVING, VQ, VQConfig
from lanternpp.nn import checkpoints
from lanternpp.nn.configs import config_as
from lanternpp.nn.sources import SAME, Source, blank

KIND = "kl"  # a config's `kind`, where the tokenizer is one of latents


@dataclass(frozen=True)
class _Kind:
    """The part of a config that says which class reads the rest."""

    kind: Literal["vq", "kl"] = "vq"


def read_vq(folder: Path, dtype: torch.dtype = torch.float32) -> VQ:
    """The tokenizer of codes in `folder`, on the CPU; its convolutions in `dtype`, its codebook in float32. InputError."""
    found = read_tokenizer(folder, dtype)
    if not isinstance(found, VQ):
        raise InputError(
            f"{folder} is a tokenizer of continuous latents and has no codes: a target over it has --head mixture or diffusion."
        )
    return found


def read_kl(folder: Path, dtype: torch.dtype = torch.float32) -> KL:
    """The tokenizer of latents in `folder`, on the CPU, in `dtype`. InputError."""
    found = read_tokenizer(folder, dtype)
    if not isinstance(found, KL):
        raise InputError(
            f"{folder} is a tokenizer of codes: for latents, train one with `train tokenizer --kind {KIND}`."
        )
    return found


def read_tokenizer(folder: Path, dtype: torch.dtype = torch.float32) -> VQ | KL:
    """The tokenizer in `folder`, of codes or of latents, on the CPU."""
    given = checkpoints.load_config(folder)
    made: VQ | KL
    if config_as(_Kind, given, folder).kind == KIND:
        shape = config_as(KLConfig, given, folder)
        with blank(folder):
            made = KL(shape)
    else:
        config = config_as(VQConfig, given, folder)
        with blank(folder):
            made = VQ(config)
    Source.open(folder / checkpoints.WEIGHTS).fill(made, [SAME], dtype, lacking=MOVING)
    if isinstance(made, VQ):
        made.quantiser.restart()
    return made.eval().requires_grad_(False)
