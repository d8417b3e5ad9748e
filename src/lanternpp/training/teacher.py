"""The frozen target that a drafter learns from, and the folders for its codes, features and drafter."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from lanternpp.api.model import MODELS, Model, model_folder, placed, read_target
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
SAMPLED = 1 << 16  # numbers of a tensor, evenly over it, that are hashed to identify it


class Teacher:
    """A target on its device, frozen, with its default sampling and guidance.

    cfg None: the guidance scale of the model's defaults; draws: whether it draws pictures before a drafter learns from it. InputError
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
        self.dtype = compute_dtype(device)
        # The dtype of drawing, which may be faster than that of training.
        self.drawing_dtype = placed(device, "auto", self.place)[1] if device.type == "cpu" else self.dtype
        self.target = self._read(self.drawing_dtype if draws else self.dtype)
        # Drawing packs the weights, and autograd cannot run through packed ones.
        self._packed = draws and device.type == "cpu" and self.drawing_dtype == torch.bfloat16
        usual = self.pipeline().settings(BASELINE, cfg=cfg)
        self.cfg: float = usual.cfg
        self.sampling = Sampling(usual.temperature, usual.top_k, usual.top_p)
        made = self.target
        self.origin = key_of(made, type(made).__name__, made.vocab, made.width, made.length, made.slots)
        # Where its codes and features are kept: beside the model where that is the user's, else beside the drafter.
        self.store = (self.place if is_own_folder(model) else options.folder) / "codes"

    def _read(self, dtype: torch.dtype) -> Target:
        return read_target(self.place, dtype, self.device).eval().requires_grad_(False)

    def pipeline(self, **drafters: Drafter) -> Pipeline:
        """A pipeline of the target and of drafters, by their kind; the target is not packed for it yet."""
        return Pipeline(Model.of(self.target, self.place, None, **drafters), self.place.name, tuned=False)

    def trainable(self) -> Target:
        """The target to learn from: read again where drawing has packed its weights."""
        if self._packed:
            del self.target  # one of them at a time
            self.target, self._packed = self._read(self.dtype), False
        return self.target


def warping(drawn: Sampling | Settings) -> dict[str, float] | None:
    """Temperature, top-k and top-p by their names; None where they change nothing."""
    found = {name: getattr(drawn, name) for name in NEUTRAL}
    return None if found == NEUTRAL else found


def is_own_folder(model: str | Path) -> bool:
    """Whether a model is a folder of the user's, to write into."""
    return str(model) not in MODELS and Path(model).is_dir() and os.access(model, os.W_OK)


def drafter_folder(model: str | Path, out: Path | None, kind: str) -> Path:
    """Where the drafter goes: `out`, or `kind` in the model's own folder. InputError where there is neither."""
    if out is not None:
        return out
    if is_own_folder(model):
        return Path(model) / kind
    if Path(model).exists():
        raise InputError(f"{model} is no folder to write to: name one for the drafter with -o DIR.")
    model_folder(str(model))  # the clearer error, where there is no such model
    where = "ships with this package" if str(model) in MODELS else "is kept in the hub's cache"
    raise InputError(f"{model} {where}: name a folder for the drafter with -o DIR.")


def check_folder(folder: Path, model: str | Path, kind: Kind, begin: Path | None, restart: bool) -> None:
    """InputError where a drafter of this kind in the folder would replace what this command did not train, or begins with."""
    if begin is not None and begin.resolve() == folder.resolve():
        raise InputError(f"{begin} holds the drafter that it begins with: name another folder with -o DIR.")
    config = folder / CONFIG
    held = str(read_object(config).get("kind")) if config.is_file() else ""
    whole = folder.resolve() == Path(model).resolve() or (folder / "target" / CONFIG).is_file()
    if whole or (held and not held.startswith(kind)):
        raise InputError(
            f"{folder} holds something other than a drafter of --kind {kind}: name another folder with -o DIR."
        )
    if held and not restart and not (folder / STATE).is_file():
        raise InputError(
            f"{folder} holds a drafter without the state of its training: pass --restart to replace it, or name another "
            "folder with -o DIR."
        )


def key_of(network: nn.Module, *facts: object) -> str:
    """A hash of facts and of a network's weights, a part of every tensor, the same in float32 and in bfloat16."""
    parts = [str(fact) for fact in facts]
    for name, tensor in sorted(network.state_dict().items()):
        flat = tensor.detach().flatten()
        some = flat[:: -(-flat.numel() // SAMPLED) or 1]
        parts += [name, str(tuple(tensor.shape))]
        parts += [checksum(some.bfloat16() if some.is_floating_point() else some)]
    return digest(parts)
