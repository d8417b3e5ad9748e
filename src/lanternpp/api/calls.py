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
from lanternpp.engine.batching import ContinuousBatch, open_batch
from lanternpp.engine.decode import Engine, FinishedSample
from lanternpp.errors import InputError, counted
from lanternpp.types import shape_of

MAX_PICTURES = 2**20  # of a prompt in one call
MAX_FREE_BATCH = 64  # the largest batch size that may exceed the number of pictures

# By the type of an argument: the conversion of a value, also of NumPy or PyTorch, and the description of a wrong value.
TYPES: dict[type, tuple[Callable[[Any], Any], str]] = {
    int: (operator.index, "no whole number; give one such as 1"),
    float: (float, "no number; give one such as 1.5"),
    bool: (bool, "neither True nor False"),
    str: (os.fspath, "no text; give a name"),
}


def converted(kind: type, name: str, value: Any) -> Any:
    """Convert a value to a type of `TYPES`; a bool or a text is no number, a path is text, and "" is none. Raises InputError."""
    convert, fault = TYPES[kind]
    try:
        wrong = bytes if kind is str else str | bytes
        if isinstance(value, bool) != (kind is bool) or isinstance(value, wrong) or value == "":
            raise TypeError
        return convert(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise InputError(f"{name} {value!r} is {fault}") from None


integer, text = partial(converted, int), partial(converted, str)


def batch_size(size: int, num_pictures: int) -> int:
    """Limit a batch size above `MAX_FREE_BATCH` to the number of pictures."""
    # Rounding depends on the batch size: as smaller sizes stay, a picture of a batch can be drawn again alone.
    return size if size <= MAX_FREE_BATCH else min(size, num_pictures)


def is_list(value: Any) -> bool:
    """Return whether a value is a list or another iterable; a text is none, nor is an array without dimensions."""
    return (
        isinstance(value, Iterable) and not isinstance(value, str | bytes) and getattr(value, "ndim", 1) != 0
    )


def prompts(value: Any) -> list[str]:
    """Check a prompt or several, and return them as a list; raise InputError."""
    texts = list(value) if is_list(value) else [value]
    if not texts:
        raise InputError("the list of prompts is empty; give at least one")
    for prompt in texts:
        if not isinstance(prompt, str):
            raise InputError(f"prompt {prompt!r} is no text; give a text or a list of texts")
        check_prompt(prompt)
    return texts


def seeds(value: Any, generator: Any, num_prompts: int, n: int) -> list[int]:
    """Return the seeds of n pictures per prompt, those of one prompt in a row; raise InputError.

    value: the first seed of each prompt, which consecutive seeds follow; None is 0, unless a generator draws all seeds.
    """
    if generator is not None:
        if value is not None:
            raise InputError("seed and generator both say how pictures are seeded; give one of them")
        return random_seeds(num_prompts * n, generator)
    if is_list(value):
        prompt_seeds = [integer("seed", seed) for seed in value]
    else:
        prompt_seeds = [integer("seed", 0 if value is None else value)] * num_prompts
    if len(prompt_seeds) != num_prompts:
        raise InputError(
            f"seed has {len(prompt_seeds)} for {counted(num_prompts, 'prompt')}; give one for each"
        )
    for seed in prompt_seeds:
        if not 0 <= seed < 2**63 - n:
            raise InputError(f"seed {seed} is out of range; use 0 to 2**63 - {n + 1}")
    return [seed + i for seed in prompt_seeds for i in range(n)]


def random_seeds(num_seeds: int, generator: torch.Generator | None = None) -> list[int]:
    """Draw seeds from a torch.Generator, or from torch's own; raise InputError."""
    if not isinstance(generator, torch.Generator | None):
        raise InputError(f"generator {generator!r} is no torch.Generator; give one, or a seed")
    device = "cpu" if generator is None else generator.device
    return torch.randint(2**63 - 1, (num_seeds,), generator=generator, device=device).tolist()


def pictures(value: Any) -> list[Image.Image]:
    """Read a picture or several, PIL images or files, and return them as RGB; raise InputError."""
    images, sources = [], value if isinstance(value, list | tuple) else [value]
    if not sources:
        raise InputError("image is an empty list; give a picture, or leave it out")
    for number, source in enumerate(sources, 1):
        is_path = isinstance(source, str | Path)
        image = as_rgb(source) if isinstance(source, Image.Image) else source
        if is_path or hasattr(source, "read"):
            image = open_image(Path(source) if is_path else source)
        if isinstance(image, str):
            raise InputError(f"image {source if is_path else number} cannot be read: {image}")
        if not isinstance(image, Image.Image):
            kind = type(source).__name__
            raise InputError(f"image {number} of type {kind} is no picture; give a PIL image or a file")
        images.append(image)
    return images


@dataclass(frozen=True)
class Request:
    """The content of a call: a prompt and a seed for each picture, and their settings."""

    prompts: Sequence[str]
    seeds: Sequence[int]
    settings: Settings
    auto: str | None = None  # the reason why "auto" took the method
    samples: dict[int, FinishedSample] = field(default_factory=dict)  # finished samples by picture

    @property
    def shape(self) -> Hashable:
        """The shape that all prompts have."""
        return shape_of(self.prompts[0])

    def steps(self, engine: Engine) -> Generator[ContinuousBatch, None, None]:
        """Draw, and yield the batch after every admission and every step."""
        with open_batch(engine, self.prompts, self.seeds) as batch:
            for finished in batch.run():
                if finished is None:
                    yield batch
                else:
                    index, sample = finished
                    self.samples[index] = sample

    def partial(self, batch: ContinuousBatch) -> Partial:
        """Return the codes that all pictures have so far."""
        target, no_codes = batch.engine.target, torch.zeros(0, dtype=torch.int64, device="cpu")
        by_index = batch.codes | {index: sample.codes.clone() for index, sample in self.samples.items()}
        codes = [by_index.get(index, no_codes) for index in range(len(self.seeds))]
        return Partial(codes, len(codes) * target.length, target)
