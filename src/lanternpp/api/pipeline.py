"""Drawing with a loaded model: `Pipeline.from_pretrained("nature-128")("a photo of a red tulip")`."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal, Unpack, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lanternpp.api import arguments, pixels
from lanternpp.api.loaded import LoadedModel
from lanternpp.api.options import AUTO, CallOptions, PictureDials, Prompts, Seeds, Settings, listing
from lanternpp.api.results import Partial, Result, Stats, UnfinishedError, versions
from lanternpp.engine.batching import ContinuousBatch, adaptive_threads, opened
from lanternpp.engine.decode import Engine, FinishedSample
from lanternpp.errors import InputError

__all__ = ["Partial", "Pipeline", "Result", "Stats", "versions"]


@dataclass(frozen=True)
class _Request:
    """What a call asks for: a prompt and a seed for each picture, and their settings."""

    prompts: list[str]
    seeds: list[int]
    settings: Settings
    auto: str | None  # why the method was taken


class Pipeline(LoadedModel):
    """A loaded model that draws.

    Several threads may call one pipeline: their calls take turns, each drawing the pictures that it would draw alone,
    and one that ends in an error leaves the others as they are. `progress` and `callback` are called within their call's
    turn, so they must not wait for another thread's call. For drawing at the same time each thread needs a pipeline of its
    own, or an engine (`new_engine`), which belongs to one thread.
    """

    @overload
    def __call__(
        self, prompt: Prompts, n: int = 1, *, output_type: Literal["np"], **options: Unpack[CallOptions]
    ) -> Result[np.ndarray[Any, np.dtype[np.float32]]]: ...

    @overload
    def __call__(
        self, prompt: Prompts, n: int = 1, *, output_type: Literal["pt"], **options: Unpack[CallOptions]
    ) -> Result[Tensor]: ...

    @overload
    def __call__(
        self,
        prompt: Prompts,
        n: int | None = 1,
        seed: Seeds = None,
        method: str | None = AUTO,
        progress: Callable[[int, int], None] | None = None,
        callback: Callable[[Partial], None] | None = None,
        generator: torch.Generator | None = None,
        output_type: Literal["pil", "codes"] = "pil",
        **dials: Unpack[PictureDials],
    ) -> Result[list[Image.Image]]: ...

    @listing(PictureDials)
    def __call__(
        self,
        prompt: Prompts,
        n: int | None = 1,
        seed: Seeds = None,
        method: str | None = AUTO,
        progress: Callable[[int, int], None] | None = None,
        callback: Callable[[Partial], None] | None = None,
        generator: torch.Generator | None = None,
        output_type: str = "pil",
        **dials: Unpack[PictureDials],
    ) -> Result[Any]:
        """Draw n pictures per prompt; picture i of a prompt has seed + i. Several seeds: one for each prompt; default: 0.

        method: a name of `METHODS`, or "auto": see `chosen`; `stats.method` says which was taken, `stats.auto` why.
        progress: called with (decided codes, all codes) after every prompt and every pass.
        callback: called with a `Partial` at the same times, which has the codes so far and, where you look at its `images`,
        the unfinished pictures. What it raises ends the call.
        generator: a torch.Generator that draws a seed for each picture, in place of `seed`; `seeds` of the result has them.
        output_type: what `images` of the result is: "pil", a list of PIL images; "np", an array [n, H, W, 3] of float32 in 0 to
        1; "pt", a tensor [n, 3, H, W] of the same; "codes", empty, as `codes` of the result is all that you want.
        dials: every other field of `Settings`; what is left out or None is the method's or the model's default.
        measure_tv=True reports `tv_cost`, which takes time.
        Raises InputError.
        """
        pixels.check_output(self.target, output_type)
        request = self._request(prompt, n, seed, generator, method, dials)
        with self._lock, self._engines.lend(request.settings) as engine:
            return self.draw(
                engine,
                request.settings,
                request.prompts,
                request.seeds,
                progress,
                request.auto,
                callback,
                output_type,
            )

    @listing(PictureDials)
    def stream(
        self,
        prompt: Prompts,
        n: int | None = 1,
        seed: Seeds = None,
        method: str | None = AUTO,
        generator: torch.Generator | None = None,
        **dials: Unpack[PictureDials],
    ) -> Iterator[Partial]:
        """Draw as a call does, and give the pictures so far after every prompt and every pass.

        The last `Partial` has the `result` that a call returns, of PIL images. Between two of them other calls may draw. To end
        early, leave the loop. Raises InputError at once, before the first is asked for.
        """
        pixels.check_output(self.target, "pil")
        return self._stream(self._request(prompt, n, seed, generator, method, dials))

    def draw(
        self,
        engine: Engine,
        settings: Settings,
        prompts: Sequence[str],
        seeds: Sequence[int],
        progress: Callable[[int, int], None] | None = None,
        auto: str | None = None,
        callback: Callable[[Partial], None] | None = None,
        output_type: str = "pil",
    ) -> Result[Any]:
        """Draw a picture per prompt and seed with an engine of the caller's own, made for these settings.

        An interrupt raises UnfinishedError, which is a KeyboardInterrupt, once a picture is finished.
        """
        with self._lock:
            began = time.perf_counter()
            found: dict[int, FinishedSample] = {}
            request = _Request(list(prompts), list(seeds), settings, auto)
            try:
                with closing(_steps(engine, request, found)) as steps, adaptive_threads(engine) as threads:
                    for batch in steps:
                        threads.update()
                        if progress:
                            progress(batch.decided, len(seeds) * engine.target.length)
                        if callback:
                            callback(_partial(batch, found, request))
            except KeyboardInterrupt:
                if not found:
                    raise
            result = self._result(request, found, time.perf_counter() - began, output_type)
        if len(found) < len(seeds):
            raise UnfinishedError(result, result.seeds)
        return result

    def images(self, codes: Tensor) -> list[Image.Image]:
        """codes [n, length] -> n pictures, one at a time: their rounding does not depend on n."""
        return pixels.images(self.target, codes)

    def _request(
        self,
        prompt: Prompts,
        n: int | None,
        seed: Seeds,
        generator: torch.Generator | None,
        method: str | None,
        dials: PictureDials,
    ) -> _Request:
        """The arguments of a call, checked. InputError."""
        prompts, n = arguments.prompts(prompt), arguments.whole("n", 1 if n is None else n)
        if n < 1:
            raise InputError(f"n {n} is below 1; ask for at least one picture")
        seeds = arguments.seeds(seed, generator, len(prompts), n)
        given: dict[str, Any] = {k: v for k, v in dials.items() if v is not None}
        settings = self.settings(method, **{"batch_size": min(len(seeds), 8)} | given)
        if (size := arguments.batch_size(settings.batch_size, len(seeds))) < settings.batch_size:
            settings = self.settings(method, **given | {"batch_size": size})
        if "compile" not in given and self.is_warm(settings):
            settings = replace(settings, compile=True)
        settings = self.fit(settings)
        with self._lock:
            for one in dict.fromkeys(prompts):
                self.target.check(one)  # raise errors of all prompts before drawing any
        return _Request([p for p in prompts for _ in range(n)], seeds, settings, self.chosen(method).why)

    def _stream(self, request: _Request) -> Iterator[Partial]:
        """What `stream` gives. The lock is held while computing alone, not while the caller looks at a picture."""
        seconds = 0.0
        found: dict[int, FinishedSample] = {}
        with self._lock:
            engines = self._engines
            engine = engines.take(request.settings)
        steps = _steps(engine, request, found)
        while True:
            with self._lock:
                began = time.perf_counter()
                batch = next(steps, None)
                seconds += time.perf_counter() - began
                if batch is None:
                    break
                partial = _partial(batch, found, request)
            yield partial
        with self._lock:
            result = self._result(request, found, seconds, "pil")
            engines.keep(request.settings, engine)
        yield replace(partial, codes=list(result.codes), result=result)

    def _result(
        self, request: _Request, found: dict[int, FinishedSample], seconds: float, output_type: str
    ) -> Result[Any]:
        """The result of the samples that are finished. seconds: computed so far; those of the pixels are added."""
        began = time.perf_counter()
        places = sorted(found)
        codes = torch.stack([found[place].codes for place in places])
        images = pixels.output(self.target, codes, output_type)
        seconds += time.perf_counter() - began
        samples = [found[place] for place in places]
        stats = Stats.of(samples, seconds, self.name, self.describe(request.settings), request.auto)
        return Result(images, codes.cpu(), stats, [request.seeds[place] for place in places])


def _steps(
    engine: Engine, request: _Request, found: dict[int, FinishedSample]
) -> Generator[ContinuousBatch, None, None]:
    """Draw a request: its batch after every admission and every step. Finished samples enter `found`, by their place."""
    with opened(engine, request.prompts, request.seeds) as batch:
        for sample in batch.run():
            if sample:
                found[sample[0]] = sample[1]
            else:
                yield batch


def _partial(batch: ContinuousBatch, found: dict[int, FinishedSample], request: _Request) -> Partial:
    """The pictures of a request as they are now."""
    target, none = batch.engine.target, torch.zeros(0, dtype=torch.int64)
    known = batch.codes | {place: sample.codes for place, sample in found.items()}
    codes = [known.get(place, none) for place in range(len(request.seeds))]
    return Partial(codes, len(codes) * target.length, target)
