"""The frozen target that a drafter learns from, and the folders for its codes, features and drafter."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lanternpp.api.model import MODELS, drawing_dtype, model_folder, read_defaults, read_target
from lanternpp.engine.sampling import Sampling
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.nn.checkpoints import CONFIG, checksum
from lanternpp.util.devices import half_width
from lanternpp.util.files import digest

SAMPLED = 1 << 16  # numbers of a tensor that are hashed to identify it


@dataclass(frozen=True)
class Teacher:
    """A model to train a drafter for."""

    model: str  # as it was named
    place: Path  # its folder or file
    out: Path  # of the drafter
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """What the target computes in."""
        return torch.bfloat16 if half_width(self.device) is torch.bfloat16 else torch.float32

    @cached_property
    def drawing_dtype(self) -> torch.dtype:
        """What the target computes in while it draws, which may be faster there."""
        return drawing_dtype("auto", self.device, self.place) if self.device.type == "cpu" else self.dtype

    def read(self, draws: bool = False) -> Target:
        """The target on the device, frozen; `draws`: to draw with it first."""
        target = read_target(self.place, self.drawing_dtype if draws else self.dtype, self.device)
        return target.eval().requires_grad_(False)

    def unpacked(self, target: Target) -> Target:
        """A target for training after it has drawn: read again if drawing has packed its weights."""
        return self.read() if self.packs else target

    @property
    def packs(self) -> bool:
        """Whether drawing packs the target's weights, which then cannot be learned from."""
        return self.device.type == "cpu" and self.drawing_dtype == torch.bfloat16

    @cached_property
    def folder_defaults(self) -> dict[str, Any]:
        """The default settings in the model's folder; empty if it has none."""
        return read_defaults(self.place) if self.place.is_dir() else {}

    def defaults(self, target: Target) -> Mapping[str, Any]:
        """The default settings: the folder's, or else the family's."""
        return self.folder_defaults or dict(target.defaults)

    def sampling(self, target: Target) -> Sampling:
        """Temperature, top-k and top-p of the default settings."""
        defaults = self.defaults(target)
        return Sampling(
            float(defaults.get("temperature", 1.0)),
            int(defaults.get("top_k", 0)),
            float(defaults.get("top_p", 1.0)),
        )

    @property
    def store(self) -> Path:
        """Where codes and features of it are kept: beside it where that is the user's, else beside the drafter."""
        return (self.place if is_own_folder(self.model) else self.out) / "codes"


def read_teacher(model: str | Path, out: Path, device: torch.device) -> Teacher:
    """The model by name, path or hub id. InputError where there is none, or its own target is still to train."""
    place = Path(model)
    if (place / "tokenizer" / CONFIG).is_file() and not (place / "target" / CONFIG).is_file():
        raise InputError(
            f"{place / 'target'} holds no target: run recipes/nature/target.py --data DIR --model {model} first."
        )
    return Teacher(str(model), model_folder(str(model)), out, device)


def is_own_folder(model: str | Path) -> bool:
    """Whether a model is a folder of the user's, to write into."""
    return str(model) not in MODELS and Path(model).is_dir() and os.access(model, os.W_OK)


def drafter_folder(model: str | Path, out: Path | None, kind: str = "drafter") -> Path:
    """Where the drafter goes: `out`, or `kind` in the model's own folder. InputError where there is neither."""
    if out is None and Path(model).exists() and not is_own_folder(model):
        raise InputError(f"{model} is no folder to write to: name one for the drafter with --out DIR.")
    if out is None and not Path(model).exists():
        model_folder(str(model))  # the clearer error, where there is no such model
        where = "ships with this package" if str(model) in MODELS else "is kept in the hub's cache"
        raise InputError(f"{model} {where}: name a folder for the drafter with --out DIR.")
    return out or Path(model) / kind


def key_of(target: Target) -> str:
    """A hash of a target's weights and of what it draws, from a part of every tensor."""
    parts = [f"{type(target).__name__} {target.vocab} {target.width} {target.length} {target.slots}"]
    for name, tensor in sorted(target.state_dict().items()):
        parts += [name, str(tuple(tensor.shape)), checksum(sampled_numbers(tensor))]
    return digest(parts)


def sampled_numbers(tensor: Tensor) -> Tensor:
    """At most `SKETCH` numbers of a tensor, evenly over it."""
    flat = tensor.detach().flatten()
    return flat[:: -(-flat.numel() // SAMPLED) or 1]
