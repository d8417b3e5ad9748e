"""What a drafter learns from: a frozen target, and the codes of pictures or of what the target draws itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.training.material.codes import Codes, codes_key, codes_of, splits_of
from lanternpp.training.material.samples import (
    SelfSampling,
    choose_prompts,
    self_sampled_codes,
    self_samples_key,
)
from lanternpp.training.state import check_resumable
from lanternpp.training.task import TrainingOptions
from lanternpp.training.teacher import Teacher, key_of, read_teacher


@dataclass(frozen=True)
class LoadedTarget:
    """A target on its device, where it came from, and its default sampling and guidance."""

    teacher: Teacher
    target: Target
    origin: str  # a hash of the target's weights
    sampling: Sampling
    cfg: float


@dataclass(frozen=True)
class Material(LoadedTarget):
    """A target and the codes that its drafter learns from."""

    codes: Codes


def load_target(
    model: str | Path, out: Path, device: torch.device, cfg: float | None, draws: bool = False
) -> LoadedTarget:
    """A model's target; cfg None: the guidance scale of the model's defaults; draws: as `Teacher.read` has it."""
    teacher = read_teacher(model, out, device)
    target = teacher.read(draws)
    if cfg is None:
        cfg = float(teacher.defaults(target).get("cfg", 3.0))
    return LoadedTarget(teacher, target, key_of(target), teacher.sampling(target), cfg)


def gather(
    model: str | Path,
    options: TrainingOptions,
    data: Path | None,
    self_sampling: SelfSampling | None,
    settings: Mapping[str, Any],
    follow: bool,
    crops: int,
    limit: int | None,
    check: Callable[[Target], object] | None = None,
    latents: bool = False,
) -> Material:
    """The codes of the pictures in `data` or, with `self_sampling`, of pictures that the target draws with `cfg`.

    settings: of the training, `cfg` among them; follow: take `cfg` from the model's defaults instead; check: raises an
    InputError where the settings do not suit the target; latents: whether the drafter can learn from continuous latents.
    InputError where there is nothing to learn from, or the folder of `options` was trained with other settings: that is
    found before anything is drawn or encoded.
    """
    if data is not None:
        splits_of(data)
    early = {name: value for name, value in settings.items() if name != "cfg"}
    check_resumable(options, early)
    scale = None if follow else settings["cfg"]
    found = load_target(model, options.folder, options.device, scale, self_sampling is not None)
    teacher, target = found.teacher, found.target
    if check is not None:
        check(target)
    if target.channels and not latents:
        raise InputError(f"{model} draws continuous latents, which drafters of --kind eagle alone predict.")
    known = {"cfg": found.cfg, "target": found.origin}
    if self_sampling is not None:
        prompts = choose_prompts(self_sampling, data, teacher.place, target)
        guidance = Guidance(found.cfg)
        check_resumable(
            options,
            known
            | {"data": self_samples_key(found.origin, prompts, self_sampling, guidance, found.sampling)},
        )
        codes = self_sampled_codes(
            target, found.origin, prompts, self_sampling, guidance, found.sampling, teacher.store
        )
        if teacher.packs:
            del target  # before it is read again: one of them at a time
            target = teacher.read()
    elif data is not None:
        reader = target.reader()
        check_resumable(options, known | {"data": codes_key(splits_of(data), reader, crops, limit)})
        codes = codes_of(data, teacher.store, reader, crops, limit)
    else:
        raise InputError("a drafter learns from pictures, --data DIR, or from the target's own, --self.")
    return Material(teacher, target, found.origin, found.sampling, found.cfg, codes)
