"""What draws the pictures of a job: a pipeline, its engine and a PNG's bytes, as each picture finishes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from lanternpp.arguments import DrawOptions
from lanternpp.engine.batching import drawing
from lanternpp.errors import InputError
from lanternpp.many.orders import Facts, Order
from lanternpp.picture import png_bytes
from lanternpp.pipeline import Pipeline, versions
from lanternpp.settings import Settings

BATCH = 8  # pictures at once, however many there are: a job that grows keeps its bytes
KEPT = 512  # prompts whose features are worth keeping between their check and their picture


@dataclass(frozen=True)
class Drawn:
    """A finished picture."""

    png: bytes
    accepted: list[int]  # codes decided by each pass, the prefill first
    tv_spent: float | None


@dataclass(frozen=True)
class Refusal:
    """A prompt that the target cannot follow."""

    prompt: str
    why: str


class Painter:
    """A model with one engine. Raises InputError where `options` are wrong.

    settings: those to draw with, where they are known; else they follow from the options.
    """

    def __init__(self, options: DrawOptions, settings: Settings | None = None):
        self.pipe = Pipeline.from_pretrained(**options.pretrained)
        given = {"batch_size": BATCH, **options.overrides}
        self.settings = settings or self.pipe.settings(options.method, **given)
        self.engine = self.pipe.new_engine(self.settings)
        told = self.pipe.told(self.settings)
        why, length = self.pipe.chosen(options.method).why, self.pipe.target.length
        self.facts = Facts(self.settings.method, self.pipe.name, told, versions(), length, auto=why)

    @property
    def effect(self) -> str | None:
        """What weights in 8 bits did, where they have 8 bits."""
        return None if self.pipe.effect is None else str(self.pipe.effect)

    @torch.inference_mode()
    def check(self, prompts: Sequence[str]) -> tuple[list[Refusal], list[str]]:
        """The prompts that the target cannot follow, and its warnings of the others, each once."""
        refused = []
        self.pipe.target.expect(min(len(prompts), KEPT))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for prompt in prompts:
                try:
                    self.pipe.target.check(prompt)
                except InputError as error:
                    refused.append(Refusal(prompt, str(error)))
        return refused, list(dict.fromkeys(str(one.message) for one in told))

    def paint(
        self, orders: Sequence[Order], progress: Callable[[int, int], None] | None = None
    ) -> Iterator[tuple[int, Drawn]]:
        """(place in the list, picture), as they finish. progress is told of codes. What `check` warned of is not repeated."""
        prompts, seeds = [order.prompt for order in orders], [order.seed for order in orders]
        found = drawing(self.engine, prompts, seeds, progress)
        while True:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                place, harvest = next(found, (0, None))
            if harvest is None:
                return
            (image,) = self.pipe.images(harvest.codes[None])
            order = orders[place]
            png = png_bytes(image, self.facts.notes(order))
            yield place, Drawn(png, harvest.accepted, harvest.tv_spent)
