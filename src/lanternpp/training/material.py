"""What a drafter learns from: a frozen target, and the codes of pictures or of what the target draws itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling
from lanternpp.errors import InputError
from lanternpp.targets.base import Target
from lanternpp.training.codes import Codes, codes_of
from lanternpp.training.samples import Own, asked, own_codes
from lanternpp.training.teacher import Teacher, key_of, read_teacher
from lanternpp.training.team import team


@dataclass(frozen=True)
class Taught:
    """A target on its device, where it came from, and how it draws."""

    teacher: Teacher
    target: Target
    origin: str  # a hash of the target's weights
    sampling: Sampling
    cfg: float


@dataclass(frozen=True)
class Material(Taught):
    """A target and the codes that its drafter learns from."""

    codes: Codes


def taught(model: str | Path, out: Path, device: torch.device, cfg: float | None) -> Taught:
    """A model's target; cfg None: the guidance that the model draws best with."""
    teacher = read_teacher(model, out, device)
    target = teacher.read()
    if cfg is None:
        cfg = float(teacher.defaults(target).get("cfg", 3.0))
    return Taught(teacher, target, key_of(target), teacher.sampling(target), cfg)


def gather(
    model: str | Path,
    out: Path,
    device: torch.device,
    data: Path | None,
    own: Own | None,
    cfg: float | None,
    crops: int,
    limit: int | None,
) -> Material:
    """The codes of the pictures in `data` or, where `own` says so, of pictures that the target draws at `cfg`.

    cfg None: the guidance that the model draws best with. InputError where there is nothing to learn from.
    """
    found = taught(model, out, device, cfg)
    teacher, target = found.teacher, found.target
    if own is not None:
        words = asked(own, data, teacher.place, target)
        guidance = Guidance(found.cfg)
        with team().leader_first():
            codes = own_codes(target, found.origin, words, own, guidance, found.sampling, teacher.store)
        if teacher.packs:
            del target  # before it is read again: one of them at a time
            target = teacher.read()
    elif data is not None:
        with team().leader_first():
            codes = codes_of(data, teacher.store, target.reader(), crops, limit)
    else:
        raise InputError("a drafter learns from pictures, --data DIR, or from the target's own, --self.")
    return Material(teacher, target, found.origin, found.sampling, found.cfg, codes)
