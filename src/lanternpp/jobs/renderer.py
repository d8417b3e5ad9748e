"""Drawing the pictures of a job: one engine, and the bytes of a PNG as soon as a picture is finished."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from lanternpp.api.calls import batch_size
from lanternpp.api.options import DrawOptions, Settings
from lanternpp.api.picture import png_bytes
from lanternpp.api.pipeline import Pipeline, versions
from lanternpp.api.results import check_output
from lanternpp.engine.batching import drawing
from lanternpp.engine.decode import FinishedSample
from lanternpp.errors import InputError
from lanternpp.jobs.plan import JobInfo, PlannedImage

# The default batch size, whatever the number of pictures: a job that grows keeps its pictures' bytes.
BATCH = 8
KEPT = 512  # most prompts whose encoding the target keeps between the check and the drawing


class Renderer:
    """Draws pictures with one model and one engine. Raises InputError where `options` are wrong.

    info: what the pictures have in common; None: that follows from the options.
    """

    def __init__(self, options: DrawOptions, info: JobInfo | None = None):
        pipe = self.pipe = Pipeline.from_pretrained(**options.pretrained)
        check_output(pipe.target)
        if info is None:
            settings = self._fitted(
                pipe.settings(options.method, **{"batch_size": BATCH, **options.overrides})
            )
        else:
            settings = info.settings
        effect = None if pipe.effect is None else str(pipe.effect)
        self.info = JobInfo(
            pipe.name,
            settings,
            pipe.describe(settings),
            versions(),
            pipe.target.length,
            pipe.chosen(options.method).why,
            effect,
        )
        self._make_engine(BATCH)  # so that a wrong part is found before anything is drawn

    def _fitted(self, settings: Settings) -> Settings:
        """Settings with a fitted draft, as large as a batch may be before the pictures are known."""
        sane = replace(settings, batch_size=batch_size(settings.batch_size, BATCH))
        return replace(self.pipe.fit(sane), batch_size=settings.batch_size)

    def _make_engine(self, pictures: int) -> None:
        size = batch_size(self.info.settings.batch_size, max(pictures, BATCH))
        self.engine = self.pipe.new_engine(replace(self.info.settings, batch_size=size))

    def adopt(self, info: JobInfo) -> None:
        """Draw what another renderer would draw, which reported this."""
        changed, self.info = info.settings != self.info.settings, info
        if changed:
            self._make_engine(BATCH)

    @torch.inference_mode()
    def check(self, prompts: Sequence[str]) -> tuple[dict[str, str], list[str]]:
        """The prompts that the target refuses, each with the reason, and its warnings about the others, each once."""
        refused = {}
        self.pipe.target.cache_prompts(min(len(prompts), KEPT))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for prompt in prompts:
                try:
                    self.pipe.target.check(prompt)
                except InputError as error:
                    refused[prompt] = str(error)
        return refused, list(dict.fromkeys(str(warning.message) for warning in caught))

    def render(
        self, images: Sequence[PlannedImage], progress: Callable[[int, int], None] | None = None
    ) -> Iterator[tuple[int, bytes, FinishedSample]]:
        """Draw pictures; yields (index in `images`, PNG, sample without its codes) as they finish.

        Warnings, which `check` gives, are ignored. progress: called with (decided codes, all codes).
        """
        if min(len(images), self.info.settings.batch_size) > self.engine.batch:
            self._make_engine(len(images))
        prompts, seeds = [image.prompt for image in images], [image.seed for image in images]
        found = drawing(self.engine, prompts, seeds, progress)
        while True:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                index, sample = next(found, (0, None))
            if sample is None:
                return
            (image,) = self.pipe.images(sample.codes[None])
            yield (
                index,
                png_bytes(image, self.info.notes(images[index])),
                replace(sample, codes=torch.empty(0)),
            )
