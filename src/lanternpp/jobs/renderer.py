"""Drawing the pictures of a job: one engine, and the bytes of a PNG as soon as a picture is finished."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lanternpp.api.calls import batch_size
from lanternpp.api.options import DrawOptions, Settings
from lanternpp.api.picture import png_bytes
from lanternpp.api.pipeline import Pipeline, versions
from lanternpp.api.results import check_output
from lanternpp.engine.batching import drawing
from lanternpp.engine.decode import FinishedSample
from lanternpp.errors import InputError
from lanternpp.jobs.job import JobInfo, PlannedImage, with_draft_of

# The default batch size, whatever the number of pictures: a job that grows keeps its pictures' bytes.
BATCH = 8
KEPT = 512  # most prompts whose encoding the target keeps between the check and the drawing


class Renderer:
    """Draws pictures with one model and one engine, in this process or as an actor of Ray. InputError where `options` are wrong.

    info: the properties that all pictures share; None: they follow from the options. threads: None: PyTorch's default.
    begun: the settings of a picture that the job has drawn before, whose draft is kept.
    """

    def __init__(
        self,
        options: DrawOptions,
        info: JobInfo | None = None,
        threads: int | None = None,
        begun: Mapping[str, Any] = {},
    ):
        if threads:
            torch.set_num_threads(threads)
        pipe = self.pipe = Pipeline.from_pretrained(**options.pretrained)
        check_output(pipe.target)
        given = {"batch_size": BATCH, **options.overrides}
        settings = info.settings if info else self._fitted(pipe.settings(options.method, **given), begun)
        noted, why = pipe.describe(settings), pipe.chosen(options.method).reason(settings)
        effect = str(pipe.model.effect) if pipe.model.effect else None
        self.info = JobInfo(pipe.name, settings, noted, versions(), pipe.target.length, why, effect)
        self._make_engine(BATCH)  # so that a wrong part is found before anything is drawn

    def _fitted(self, settings: Settings, begun: Mapping[str, Any]) -> Settings:
        """Settings with the draft that the job has begun with, or a fitted one, as large as a batch may be before the pictures are known."""
        if settings.fit and (kept := with_draft_of(settings, begun)):
            return kept
        sane = replace(settings, batch_size=batch_size(settings.batch_size, BATCH))
        return replace(self.pipe.fit(sane), batch_size=settings.batch_size)

    def _make_engine(self, pictures: int) -> None:
        size = batch_size(self.info.settings.batch_size, max(pictures, BATCH))
        self.engine = self.pipe.new_engine(replace(self.info.settings, batch_size=size))

    def report(self) -> JobInfo:
        """`info`; of an actor, attributes cannot be read."""
        return self.info

    @torch.inference_mode()
    def check(self, prompts: Sequence[str]) -> tuple[dict[str, str], list[str]]:
        """As `Drawer.check`."""
        rejected = {}
        self.pipe.target.cache_prompts(min(len(prompts), KEPT))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for prompt in prompts:
                try:
                    self.pipe.target.check(prompt)
                except InputError as error:
                    rejected[prompt] = str(error)
        return rejected, list(dict.fromkeys(str(warning.message) for warning in caught))

    def render(
        self,
        images: Sequence[PlannedImage],
        progress: Callable[[int, int], None] | None = None,
        info: JobInfo | None = None,
    ) -> Iterator[tuple[int, bytes, FinishedSample]]:
        """As `Drawer.render`. info: of another renderer, whose pictures this one draws from now on."""
        drawn, self.info = self.info.settings, info or self.info
        more = min(len(images), self.info.settings.batch_size) > self.engine.batch
        if more or drawn != self.info.settings:
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
            png = png_bytes(image, self.info.notes(images[index]))
            yield index, png, replace(sample, codes=torch.empty(0))
