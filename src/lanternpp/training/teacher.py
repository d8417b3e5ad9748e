"""The frozen target that a drafter learns from, and the folders for its codes, features and drafter."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lanternpp.api.model import MODELS, drawing_dtype, model_folder, read_defaults, read_target
from lanternpp.engine.sampling import Sampling
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.nn.checkpoints import CONFIG, checksum
from lanternpp.training.loop import team
from lanternpp.training.options import TrainingOptions
from lanternpp.util.devices import half_width
from lanternpp.util.files import digest

SAMPLED = 1 << 16  # numbers of a tensor that are hashed to identify it


class Teacher:
    """A target on its device, frozen, with its default sampling and guidance.

    cfg None: the guidance scale of the model's defaults; draws: whether it draws before it is learned from. InputError
    where there is no such model, or its target is still to be trained.
    """

    def __init__(self, model: str | Path, options: TrainingOptions, cfg: float | None, draws: bool = False):
        place = Path(model)
        if (place / "tokenizer" / CONFIG).is_file() and not (place / "target" / CONFIG).is_file():
            raise InputError(
                f"{place / 'target'} holds no target: run recipes/nature/target.py --data DIR --model {model} first."
            )
        self.place, self.device = model_folder(str(model)), team().device(options.device)
        device = self.device
        self.dtype = torch.bfloat16 if half_width(device) is torch.bfloat16 else torch.float32
        # What it draws in, which may be faster there.
        self.drawing_dtype = drawing_dtype("auto", device, self.place) if device.type == "cpu" else self.dtype
        self.target = self._read(self.drawing_dtype if draws else self.dtype)
        # Drawing packs its weights, which then cannot be learned from.
        self._packed = draws and device.type == "cpu" and self.drawing_dtype == torch.bfloat16
        defaults = self.defaults
        self.cfg = float(defaults.get("cfg", 3.0)) if cfg is None else cfg
        self.sampling = Sampling(
            float(defaults.get("temperature", 1.0)),
            int(defaults.get("top_k", 0)),
            float(defaults.get("top_p", 1.0)),
        )
        self.origin = key_of(self.target)
        # Where its codes and features are kept: beside the model where that is the user's, else beside the drafter.
        self.store = (self.place if is_own_folder(model) else options.folder) / "codes"

    def _read(self, dtype: torch.dtype) -> Target:
        return read_target(self.place, dtype, self.device).eval().requires_grad_(False)

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The default settings: the folder's, or else the family's."""
        own = read_defaults(self.place) if self.place.is_dir() else {}
        return own or dict(self.target.defaults)

    def trainable(self) -> Target:
        """The target to learn from: read again where drawing has packed its weights."""
        if self._packed:
            del self.target  # one of them at a time
            self.target, self._packed = self._read(self.dtype), False
        return self.target


def is_own_folder(model: str | Path) -> bool:
    """Whether a model is a folder of the user's, to write into."""
    return str(model) not in MODELS and Path(model).is_dir() and os.access(model, os.W_OK)


def drafter_folder(model: str | Path, out: Path | None, kind: str) -> Path:
    """Where the drafter goes: `out`, or `kind` in the model's own folder. InputError where there is neither."""
    if out is None and Path(model).exists() and not is_own_folder(model):
        raise InputError(f"{model} is no folder to write to: name one for the drafter with -o DIR.")
    if out is None and not Path(model).exists():
        model_folder(str(model))  # the clearer error, where there is no such model
        where = "ships with this package" if str(model) in MODELS else "is kept in the hub's cache"
        raise InputError(f"{model} {where}: name a folder for the drafter with -o DIR.")
    return out or Path(model) / kind


def key_of(target: Target) -> str:
    """A hash of a target's weights and of what it draws, from a part of every tensor."""
    parts = [f"{type(target).__name__} {target.vocab} {target.width} {target.length} {target.slots}"]
    for name, tensor in sorted(target.state_dict().items()):
        parts += [name, str(tuple(tensor.shape)), checksum(sampled_numbers(tensor))]
    return digest(parts)


def sampled_numbers(tensor: Tensor) -> Tensor:
    """At most `SAMPLED` numbers of a tensor, evenly over it."""
    flat = tensor.detach().flatten()
    return flat[:: -(-flat.numel() // SAMPLED) or 1]
