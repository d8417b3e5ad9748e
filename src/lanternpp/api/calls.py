"""A call of `Pipeline`: its arguments, which raise InputError where they cannot be converted, and its steps."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from lanternpp.api.options import Settings, check_prompt
from lanternpp.api.picture import as_rgb, open_image
from lanternpp.api.results import Partial
from lanternpp.engine.batching import ContinuousBatch, opened
from lanternpp.engine.decode import Engine, FinishedSample
from lanternpp.errors import InputError
from lanternpp.types import shape_of

MOST_PICTURES = 2**20  # of a prompt in one call
FREE = 64  # batch sizes that may be larger than the number of pictures


# By the type of an argument: the conversion of a value, also of NumPy or PyTorch, and the description of a wrong one.
TYPES: dict[type, tuple[Callable[[Any], Any], str]] = {
    int: (operator.index, "no whole number; give one such as 1"),
    float: (float, "no number; give one such as 1.5"),
    bool: (bool, "neither True nor False"),
    str: (os.fspath, "no text; give a name"),
}


def converted(kind: type, name: str, value: Any) -> Any:
    """A value as a type of `TYPES`; a bool or a text is no number, and a path is text. Raises InputError."""
    convert, wrong = TYPES[kind]
    try:
        if isinstance(value, bool) != (kind is bool) or isinstance(
            value, bytes if kind is str else str | bytes
        ):
            raise TypeError
        return convert(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise InputError(f"{name} {value!r} is {wrong}") from None


integer, text = partial(converted, int), partial(converted, str)


def batch_size(given: int, pictures: int) -> int:
    """A batch size for so many pictures. Above `FREE` it is at most their number.

    Up to `FREE` it is as it is given: rounding depends on it, and a picture of a batch can be drawn again alone.
    """
    return given if given <= FREE else min(given, pictures)


def is_several(value: Any) -> bool:
    """Whether a value is a list or its like; a text is one, and so is an array without dimensions."""
    return isinstance(value, Iterable) and not isinstance(value, str) and getattr(value, "ndim", 1) != 0


def prompts(value: Any) -> list[str]:
    """One prompt or several as a list. Raises InputError."""
    found = list(value) if is_several(value) else [value]
    if not found:
        raise InputError("the list of prompts is empty; give at least one")
    for one in found:
        if not isinstance(one, str):
            raise InputError(f"prompt {one!r} is no text; give a text or a list of texts")
        check_prompt(one)
    return found


def seeds(value: Any, generator: Any, count: int, n: int) -> list[int]:
    """The seed of each of n pictures of `count` prompts, those of one prompt in a row. Raises InputError.

    value: the first seed of each prompt, whose other pictures have those that follow; None is 0, unless a generator draws
    all of them.
    """
    if generator is not None:
        if value is not None:
            raise InputError("seed and generator both say how pictures are seeded; give one of them")
        return random_seeds(count * n, generator)
    if value is None:
        value = 0
    one_each = is_several(value)
    found = [integer("seed", one) for one in value] if one_each else [integer("seed", value)] * count
    if len(found) != count:
        raise InputError(f"{len(found)} seeds do not go with {count} prompts; give one for each")
    for first in found:
        if not 0 <= first < 2**63 - n:
            raise InputError(f"seed {first} is out of range; use 0 to 2**63 - {n + 1}")
    return [first + i for first in found for i in range(n)]


def random_seeds(count: int, generator: torch.Generator | None = None) -> list[int]:
    """Seeds from a torch.Generator, or from torch's own. Raises InputError."""
    if not isinstance(generator, torch.Generator | None):
        raise InputError(f"generator {generator!r} is no torch.Generator; give one, or a seed")
    where = "cpu" if generator is None else generator.device
    return torch.randint(2**63 - 1, (count,), generator=generator, device=where).tolist()


def pictures(value: Any) -> list[Image.Image]:
    """One picture or several, PIL images or files, as RGB. Raises InputError."""
    found, given = [], value if isinstance(value, list | tuple) else [value]
    if not given:
        raise InputError("image is an empty list; give a picture, or leave it out")
    for number, one in enumerate(given, 1):
        path = isinstance(one, str | Path)
        image = as_rgb(one) if isinstance(one, Image.Image) else one
        if path or hasattr(one, "read"):
            image = open_image(Path(one) if path else one)
        if isinstance(image, str):
            raise InputError(f"image {one if path else number} cannot be read: {image}")
        if not isinstance(image, Image.Image):
            kind = type(one).__name__
            raise InputError(f"image {number} of type {kind} is no picture; give a PIL image or a file")
        found.append(image)
    return found


def size_text(value: Any) -> str | None:
    """A size in pixels as "768x512" or "768": a text, a number, or width and height. Raises InputError."""
    if value is None or isinstance(value, str):
        return value
    sides: Sequence[Any] = value if isinstance(value, list | tuple) else (value,)
    return "x".join(str(integer("size", side)) for side in sides)


@dataclass(frozen=True)
class Request:
    """The content of a call: a prompt and a seed for each picture, and their settings."""

    prompts: Sequence[str]
    seeds: Sequence[int]
    settings: Settings
    auto: str | None = None  # why the method was taken
    found: dict[int, FinishedSample] = field(default_factory=dict)  # finished samples by their place

    @property
    def shape(self) -> Hashable:
        """The shape of its pictures, which is one."""
        return shape_of(self.prompts[0])

    def steps(self, engine: Engine) -> Generator[ContinuousBatch, None, None]:
        """Draw: the batch after every admission and every step."""
        with opened(engine, self.prompts, self.seeds) as batch:
            for sample in batch.run():
                if sample:
                    self.found[sample[0]] = sample[1]
                else:
                    yield batch

    def partial(self, batch: ContinuousBatch) -> Partial:
        """The pictures as they are now."""
        target, none = batch.engine.target, torch.zeros(0, dtype=torch.int64)
        known = batch.codes | {place: sample.codes.clone() for place, sample in self.found.items()}
        codes = [known.get(place, none) for place in range(len(self.seeds))]
        return Partial(codes, len(codes) * target.length, target)
