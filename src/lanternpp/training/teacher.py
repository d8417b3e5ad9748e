"""The frozen target that a drafter learns from, the pictures that it draws itself, and the folders for its codes and drafter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lanternpp.api.model import MODELS, Model, model_folder, pack_target, pick_placement, read_target
from lanternpp.api.options import BASELINE, Settings
from lanternpp.api.pipeline import Pipeline
from lanternpp.drafters.base import Drafter
from lanternpp.engine.batching import draw_samples
from lanternpp.engine.decode import Engine
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.errors import InputError
from lanternpp.evaluation.prompts import PROMPTS, read_prompts
from lanternpp.models.base import Target
from lanternpp.models.vq.codes import storage_dtype
from lanternpp.nn.checkpoints import CONFIG, checksum
from lanternpp.training.codes import (
    HELD_OUT_RATIO,
    MAX_HELD_OUT,
    Codes,
    Done,
    Shard,
    Split,
    build_shards,
    read_file,
)
from lanternpp.training.loop import STATE
from lanternpp.training.options import Kind
from lanternpp.training.pictures import read_rows
from lanternpp.training.team import compute_dtype, team
from lanternpp.util.files import digest
from lanternpp.util.jsonfile import read_object

FOLDERS = {"parallel": "parallel", "eagle": "drafter"}  # of drafters in a model's folder, by their kind
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
DRAWN_SHARD_SIZE = 32  # drawn pictures in a shard
MIN_HELD_OUT = 4  # validation pictures
MIN_PICTURES = 100  # training pictures, where the user gives no number
NONE_FOLLOWED = "the target can follow none of the captions of {}: give it others, or --self with --prompts."
MAX_HASHED = 1 << 16  # numbers of a tensor, about, evenly spaced, that are hashed to identify it


class Teacher:
    """A target on its device, frozen, with its default sampling and guidance.

    folder: of the drafter; cfg None: the guidance scale of the model's defaults; draws: whether the target draws pictures before a
    drafter learns from it. InputError where there is no such model, or its target is not trained yet.
    """

    def __init__(
        self, model: str | Path, folder: Path, device_name: str, cfg: float | None, draws: bool = False
    ):
        target_folder = Path(model) / "target"
        if (Path(model) / "tokenizer" / CONFIG).is_file() and not (target_folder / CONFIG).is_file():
            raise InputError(
                f"{target_folder} holds no target: run recipes/nature/target.py --data DIR --model {model} first."
            )
        self.folder, device = model_folder(str(model)), team().device(device_name)
        self.device, self.dtype = device, compute_dtype(device)
        on_cpu = device.type == "cpu"
        # Drawing may be faster in another dtype than training.
        self.drawing_dtype = pick_placement(device, "auto", self.folder)[1] if on_cpu else self.dtype
        self.target = self._read(self.drawing_dtype if draws else self.dtype)
        # Drawing packs the weights, and autograd cannot run through packed weights.
        self._packed = draws and on_cpu and self.drawing_dtype == torch.bfloat16
        settings = self.pipeline().settings(BASELINE, cfg=cfg)
        self.cfg: float = settings.cfg
        self.sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
        target = self.target
        facts = type(target).__name__, target.vocab, target.width, target.length, target.slots
        self.origin = key_of(target, *facts)
        # Codes and features are stored beside the model where its folder is the user's, else beside the drafter.
        self.store = (self.folder if is_own_folder(model) else folder) / "codes"

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


def drafter_folder(
    model: str | Path, out: Path | None, kind: Kind, initial: Path | None, restart: bool
) -> Path:
    """Return the drafter's folder: `out`, or the folder of its kind in the model's own folder.

    Raise InputError where there is neither, or it has a model, the initial drafter, or a drafter that this command did not train.
    """
    if out is None and not is_own_folder(model):
        model_folder(str(model))  # raises the clearer error where there is no such model
        where = "ships with this package" if str(model) in MODELS else "is no folder to write to"
        raise InputError(f"{model} {where}: name a folder for the drafter with -o DIR.")
    folder = out or Path(model) / FOLDERS[kind]
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
    return folder


def key_of(network: nn.Module, *facts: object) -> str:
    """Return a hash of facts and of a part of every tensor of a network, the same in float32 and in bfloat16."""
    parts = [str(fact) for fact in facts]
    for name, tensor in sorted(network.state_dict().items()):
        flat = tensor.detach().flatten()
        step = -(-flat.numel() // MAX_HASHED) or 1  # rounded up; 1 for an empty tensor
        numbers = flat[::step].bfloat16() if flat.is_floating_point() else flat[::step]
        parts += [name, str(tuple(tensor.shape)), checksum(numbers)]
    return digest(parts)


Prompts = tuple[tuple[str, ...], tuple[str, ...]]
"""Prompts to train with, and prompts to validate with."""


def hold_out(texts: tuple[str, ...]) -> Prompts:
    """Hold out one of every ten prompts, at least the last; a single prompt both trains and validates."""
    if len(texts) == 1:
        return texts, texts
    held_out = texts[HELD_OUT_RATIO - 1 :: HELD_OUT_RATIO] or texts[-1:]
    return tuple(text for text in texts if text not in held_out), held_out


def choose_prompts(teacher: Teacher, prompts: Path | None, data: Path | None) -> Prompts:
    """Return the prompts of a file, else the captions of `data`, else the model's prompts, else all conditions of the target.

    Raise InputError where there are none, or the file has one that the target cannot follow.
    """
    target, folder = teacher.target, teacher.folder
    if prompts is None and data is not None:
        train, val = (tuple(followed(target, read_rows(data, split).texts)) for split in ("train", "val"))
        if not (train and val):
            raise InputError(NONE_FOLLOWED.format(data))
        return train, val
    if prompts is not None or (folder / PROMPTS).is_file():
        texts = tuple(dict.fromkeys(read_prompts(prompts, folder)))
        for text in texts:
            target.check(text)
        return hold_out(texts)
    if target.conditions:
        return hold_out(tuple(target.conditions))
    raise InputError(
        "a target that draws needs prompts: give --prompts FILE with one a line, or --data DIR with captions."
    )


def followed(target: Target, texts: Sequence[str]) -> Iterator[str]:
    """Yield the distinct texts that are conditions of a target, in order."""
    for text in dict.fromkeys(texts):
        with suppress(InputError):
            target.check(text)
            yield text


class OwnCodes:
    """The codes of pictures that a target draws itself, by plain decoding; picture i has the seed `seed` * 2**32 + i.

    count None: a picture of every prompt, and at least 100. The last pictures, of held-out prompts, validate.
    """

    draw: Callable[..., Iterator[tuple[int, Any]]] = staticmethod(draw_samples)

    def __init__(self, teacher: Teacher, prompts: Prompts, count: int | None, batch: int, seed: int):
        self.teacher, self.batch, self.seed = teacher, batch, seed
        train, val = prompts
        self.num_prompts = len(train)
        count = count or max(len(train), MIN_PICTURES)
        self.num_held_out = min(max(count // HELD_OUT_RATIO, MIN_HELD_OUT), MAX_HELD_OUT)
        self.texts = [train[i % len(train)] for i in range(count)]
        self.texts += [val[i % len(val)] for i in range(self.num_held_out)]
        self.key = digest([teacher.origin, *self.texts, f"{Guidance(teacher.cfg)} {teacher.sampling} {seed}"])

    def build(self) -> Codes:
        """Return the codes in the folder of the teacher's store, where missing pictures are drawn now."""
        count = len(self.texts)
        folder = self.teacher.store / f"self-{self.key}"
        contents = f"codes of the target's own pictures, {self.num_held_out} of them to validate"
        paths = build_shards(folder, count, DRAWN_SHARD_SIZE, self._draw, contents)
        pictures = Split.of([read_file(path, "codes", "texts") for path in paths])
        num_train = count - self.num_held_out
        train, val = pictures.select(range(num_train)), pictures.select(range(num_train, count))
        facts = {"self": True, "prompts": self.num_prompts, "cfg": self.teacher.cfg}
        return Codes(train, val, self.key, facts | {"sampling": asdict(self.teacher.sampling)})

    def _draw(self, parts: Sequence[range], done: Done) -> Iterator[Shard]:
        """Draw the pictures `parts`, a shard for each part."""
        target = self.teacher.target
        pack_target(target)
        engine = self.engine()
        target.cache_prompts(len(set(self.texts)))
        indices = [i for part in parts for i in part]
        texts, seeds = [self.texts[i] for i in indices], [(self.seed << 32) + i for i in indices]
        samples = self.draw(engine, texts, seeds, lambda codes, _: done(codes / target.length))
        # Samples of shards that are not written yet: samples may finish in any order.
        finished: dict[int, Any] = {}
        for part in parts:
            while not finished.keys() >= set(part):
                number, sample = next(samples)
                finished[indices[number]] = sample
            shard = self.shard([finished.pop(i) for i in part])
            yield shard, {"texts": self.texts[part.start : part.stop]}
        target.release_encoder()

    def engine(self) -> Engine:
        """Return the engine that draws, with the packed target."""
        pipe, batch = self.teacher.pipeline(), min(self.batch, len(self.texts))
        return pipe.new_engine(pipe.settings(BASELINE, cfg=self.teacher.cfg, batch_size=batch))

    def shard(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        """Return the tensors that a file stores of samples."""
        codes = torch.stack([sample.codes for sample in samples])
        return {"codes": codes.to(storage_dtype(self.teacher.target.vocab))}
