"""Drawing the pictures of a job: one engine, and the bytes of a PNG as soon as a picture is finished."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from lanternpp.api.arguments import DrawOptions, batch_size
from lanternpp.api.picture import png_bytes
from lanternpp.api.pipeline import Pipeline, versions
from lanternpp.api.pixels import check_output
from lanternpp.api.settings import Settings
from lanternpp.engine.batching import drawing
from lanternpp.engine.decode import Engine
from lanternpp.errors import InputError
from lanternpp.jobs.planned_images import JobInfo, PlannedImage

BATCH = (
    8  # the default batch size, whatever the number of pictures: a job that grows keeps its pictures' bytes
)
KEPT = 512  # most prompts whose encoding the target keeps between the check and the drawing


@dataclass(frozen=True)
class FinishedPng:
    """A finished picture as the bytes of a PNG."""

    png: bytes
    accepted: list[int]  # codes decided by each pass, the prefill first
    tv_cost: float | None


@dataclass(frozen=True)
class RefusedPrompt:
    """A prompt that the target refuses, and the reason."""

    prompt: str
    why: str


class Renderer:
    """Draws pictures with one model and one engine. Raises InputError where `options` are wrong.

    settings: the settings to draw with; None: they follow from the options.
    """

    def __init__(self, options: DrawOptions, settings: Settings | None = None):
        self.pipe = Pipeline.from_pretrained(**options.pretrained)
        check_output(self.pipe.target)
        given = {"batch_size": BATCH, **options.overrides}
        self.settings = settings or self._fitted(self.pipe.settings(options.method, **given))
        self.engine = self._engine(0)  # so that a wrong part is found before anything is drawn
        noted = self.pipe.describe(self.settings)
        why, length = self.pipe.chosen(options.method).why, self.pipe.target.length
        self.info = JobInfo(self.settings.method, self.pipe.name, noted, versions(), length, auto=why)

    def _fitted(self, settings: Settings) -> Settings:
        """Settings with a fitted draft, as large as a batch may be before the pictures are known."""
        sane = replace(settings, batch_size=batch_size(settings.batch_size, BATCH))
        return replace(self.pipe.fit(sane), batch_size=settings.batch_size)

    def _engine(self, pictures: int) -> Engine:
        size = batch_size(self.settings.batch_size, max(pictures, BATCH))
        return self.pipe.new_engine(replace(self.settings, batch_size=size))

    @property
    def effect(self) -> str | None:
        """A sentence on the effect of weights in 8 bits; None: they are not in 8 bits."""
        return None if self.pipe.effect is None else str(self.pipe.effect)

    @torch.inference_mode()
    def check(self, prompts: Sequence[str]) -> tuple[list[RefusedPrompt], list[str]]:
        """The prompts that the target refuses, and its warnings about the others, each once."""
        refused = []
        self.pipe.target.cache_prompts(min(len(prompts), KEPT))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for prompt in prompts:
                try:
                    self.pipe.target.check(prompt)
                except InputError as error:
                    refused.append(RefusedPrompt(prompt, str(error)))
        return refused, list(dict.fromkeys(str(warning.message) for warning in caught))

    def render(
        self, images: Sequence[PlannedImage], progress: Callable[[int, int], None] | None = None
    ) -> Iterator[tuple[int, FinishedPng]]:
        """Draw pictures; yields (index in `images`, picture) as they finish. Warnings, which `check` gives, are ignored.

        progress: called with (decided codes, all codes).
        """
        if min(len(images), self.settings.batch_size) > self.engine.batch:
            self.engine = self._engine(len(images))
        prompts, seeds = [image.prompt for image in images], [image.seed for image in images]
        found = drawing(self.engine, prompts, seeds, progress)
        while True:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                index, harvest = next(found, (0, None))
            if harvest is None:
                return
            (image,) = self.pipe.images(harvest.codes[None])
            png = png_bytes(image, self.info.notes(images[index]))
            yield index, FinishedPng(png, harvest.accepted, harvest.tv_cost)
