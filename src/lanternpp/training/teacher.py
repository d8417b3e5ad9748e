"""The frozen target that a drafter learns from, and the folders for its codes, features and drafter."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from lanternpp.api.model import MODELS, Model, model_folder, pick_placement, read_target
from lanternpp.api.options import BASELINE, Settings
from lanternpp.api.pipeline import Pipeline
from lanternpp.drafters.base import Drafter
from lanternpp.engine.sampling import Sampling
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.nn.checkpoints import CONFIG, checksum
from lanternpp.training.loop import compute_dtype, team
from lanternpp.training.options import Kind, TrainingOptions
from lanternpp.training.state import STATE
from lanternpp.util.files import digest
from lanternpp.util.jsonfile import read_object

NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
MAX_HASHED = 1 << 16  # numbers of a tensor, about, evenly spaced, that are hashed to identify it


class Teacher:
    """A target on its device, frozen, with its default sampling and guidance.

    cfg None: the guidance scale of the model's defaults; draws: whether the target draws pictures before a drafter learns from it.
    InputError where there is no such model, or its target is not trained yet.
    """

    def __init__(self, model: str | Path, options: TrainingOptions, cfg: float | None, draws: bool = False):
        target_folder = Path(model) / "target"
        if (Path(model) / "tokenizer" / CONFIG).is_file() and not (target_folder / CONFIG).is_file():
            raise InputError(
                f"{target_folder} holds no target: run recipes/nature/target.py --data DIR --model {model} first."
            )
        self.folder, device = model_folder(str(model)), team().device(options.device)
        self.device, self.dtype = device, compute_dtype(device)
        # Drawing may be faster in another dtype than training.
        self.drawing_dtype = (
            pick_placement(device, "auto", self.folder)[1] if device.type == "cpu" else self.dtype
        )
        self.target = self._read(self.drawing_dtype if draws else self.dtype)
        # Drawing packs the weights, and autograd cannot run through packed weights.
        self._packed = draws and device.type == "cpu" and self.drawing_dtype == torch.bfloat16
        settings = self.pipeline().settings(BASELINE, cfg=cfg)
        self.cfg: float = settings.cfg
        self.sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
        target = self.target
        facts = type(target).__name__, target.vocab, target.width, target.length, target.slots
        self.origin = key_of(target, *facts)
        # Codes and features are stored beside the model where its folder is the user's, else beside the drafter.
        self.store = (self.folder if is_own_folder(model) else options.folder) / "codes"

    def _read(self, dtype: torch.dtype) -> Target:
        return read_target(self.folder, dtype, self.device).eval().requires_grad_(False)

    def pipeline(self, **drafters: Drafter) -> Pipeline:
        """Return a pipeline of the target, which is not packed yet, and of drafters by their kind."""
        return Pipeline(Model.of(self.target, self.folder, None, **drafters), self.folder.name, tuned=False)

    def trainable(self) -> Target:
        """Return the target to learn from, which is read again where drawing has packed its weights."""
        if self._packed:
            del self.target  # memory may not have room for two
            self.target, self._packed = self._read(self.dtype), False
        return self.target


def warping(sampling: Sampling | Settings) -> dict[str, float] | None:
    """Return temperature, top-k and top-p by their names; None where they change nothing."""
    values = {name: getattr(sampling, name) for name in NEUTRAL}
    return None if values == NEUTRAL else values


def is_own_folder(model: str | Path) -> bool:
    """Return whether a model is a folder of the user that can be written to."""
    return str(model) not in MODELS and Path(model).is_dir() and os.access(model, os.W_OK)


def drafter_folder(model: str | Path, out: Path | None, kind: str) -> Path:
    """Return the drafter's folder, `out` or `kind` in the model's own folder; raise InputError where there is neither."""
    if out is not None:
        return out
    if is_own_folder(model):
        return Path(model) / kind
    if Path(model).exists():
        raise InputError(f"{model} is no folder to write to: name one for the drafter with -o DIR.")
    model_folder(str(model))  # raises the clearer error where there is no such model
    location = "ships with this package" if str(model) in MODELS else "is kept in the hub's cache"
    raise InputError(f"{model} {location}: name a folder for the drafter with -o DIR.")


def check_folder(folder: Path, model: str | Path, kind: Kind, initial: Path | None, restart: bool) -> None:
    """Check that the folder has no initial drafter, model, or drafter that this command did not train; raise InputError if it has."""
    if initial is not None and initial.resolve() == folder.resolve():
        raise InputError(f"{initial} holds the drafter that it begins with: name another folder with -o DIR.")
    config = folder / CONFIG
    old_kind = str(read_object(config).get("kind")) if config.is_file() else ""
    holds_model = folder.resolve() == Path(model).resolve() or (folder / "target" / CONFIG).is_file()
    if holds_model or (old_kind and not old_kind.startswith(kind)):
        raise InputError(
            f"{folder} holds something other than a drafter of --kind {kind}: name another folder with -o DIR."
        )
    if old_kind and not restart and not (folder / STATE).is_file():
        raise InputError(
            f"{folder} holds a drafter without the state of its training: pass --restart to replace it, or name another "
            "folder with -o DIR."
        )


def key_of(network: nn.Module, *facts: object) -> str:
    """Return a hash of facts and of a part of every tensor of a network, the same in float32 and in bfloat16."""
    parts = [str(fact) for fact in facts]
    for name, tensor in sorted(network.state_dict().items()):
        flat = tensor.detach().flatten()
        step = -(-flat.numel() // MAX_HASHED) or 1  # rounded up; 1 for an empty tensor
        numbers = flat[::step].bfloat16() if flat.is_floating_point() else flat[::step]
        parts += [name, str(tuple(tensor.shape)), checksum(numbers)]
    return digest(parts)
