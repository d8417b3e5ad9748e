"""Drawing the pictures of a job: one engine, and the bytes of a PNG as soon as a picture is finished."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lanternpp.api.calls import batch_size
from lanternpp.api.options import DrawOptions
from lanternpp.api.picture import png_bytes
from lanternpp.api.pipeline import Pipeline
from lanternpp.api.results import check_output
from lanternpp.engine.batching import draw_samples
from lanternpp.engine.decode import FinishedSample
from lanternpp.errors import InputError
from lanternpp.jobs.job import JobInfo, PlannedImage, with_draft_of

# The default does not depend on the number of pictures, so that pictures keep their bytes when a job grows.
DEFAULT_BATCH_SIZE = 8
MAX_CACHED_PROMPTS = 512  # prompts whose encodings the target keeps between the check and the drawing


class Renderer:
    """Draws pictures with one model and one engine, in this process or as an actor of Ray.

    info: the properties that all pictures share; None: they follow from the options. threads: None: PyTorch's default.
    drawn_settings: the settings of a picture that the job has drawn before, whose draft is used again. Raises InputError.
    """

    def __init__(
        self,
        options: DrawOptions,
        info: JobInfo | None = None,
        threads: int | None = None,
        drawn_settings: Mapping[str, Any] = {},
    ):
        if threads:
            torch.set_num_threads(threads)
        pipe = self.pipe = Pipeline.from_pretrained(**options.pretrained)
        check_output(pipe.target)
        overrides = {"batch_size": DEFAULT_BATCH_SIZE, **options.overrides}
        if info:
            settings = info.settings
        else:
            settings = pipe.settings(options.method, **overrides)
            # The draft of the job's earlier pictures, or one fitted to the batch size of a small job.
            resumed = with_draft_of(settings, drawn_settings) if settings.fit else None
            size = batch_size(settings.batch_size, DEFAULT_BATCH_SIZE)  # the pictures are not known yet
            fitted = resumed or pipe.fit(replace(settings, batch_size=size))
            settings = replace(fitted, batch_size=settings.batch_size)
        setup = pipe.describe(settings, pipe.chosen(options.method).reason(settings))
        self.info = JobInfo(settings, setup, str(pipe.model.effect) if pipe.model.effect else None)
        self._make_engine(DEFAULT_BATCH_SIZE)  # so that a wrong part is found before a picture is drawn

    def _make_engine(self, num_pictures: int) -> None:
        size = batch_size(self.info.settings.batch_size, max(num_pictures, DEFAULT_BATCH_SIZE))
        self.engine = self.pipe.new_engine(replace(self.info.settings, batch_size=size))

    def report(self) -> JobInfo:
        """Return `info`: attributes of a Ray actor cannot be read."""
        return self.info

    @torch.inference_mode()
    def check(self, prompts: Sequence[str]) -> tuple[dict[str, str], list[str]]:
        """As `Drawer.check`."""
        rejected = {}
        self.pipe.target.cache_prompts(min(len(prompts), MAX_CACHED_PROMPTS))
        with warnings.catch_warnings(record=True, action="always") as caught:
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
        """As `Drawer.render`. info: of the renderer whose pictures this renderer draws from now on; None: its own."""
        old_settings = self.info.settings
        self.info = info or self.info
        needs_larger = min(len(images), self.info.settings.batch_size) > self.engine.batch
        if needs_larger or old_settings != self.info.settings:
            self._make_engine(len(images))
        prompts, seeds = [image.prompt for image in images], [image.seed for image in images]
        samples = draw_samples(self.engine, prompts, seeds, progress)
        while True:
            with warnings.catch_warnings(action="ignore"):
                index, sample = next(samples, (0, None))
            if sample is None:
                return
            (image,) = self.pipe.images(sample.codes[None])
            png = png_bytes(image, self.info.notes(images[index]))
            yield index, png, replace(sample, codes=torch.empty(0))
