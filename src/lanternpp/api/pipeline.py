"""Drawing with a loaded model: `Pipeline.from_pretrained("nature-128")("a photo of a red tulip")`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, Unpack, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lanternpp.api import calls
from lanternpp.api.calls import Request
from lanternpp.api.default_method import Chosen, choose
from lanternpp.api.engines import BYTES, Engines
from lanternpp.api.fit.choice import Fit, fit_for
from lanternpp.api.model import MODELS, Model, model_folder, placed, read_defaults
from lanternpp.api.options import AUTO, CallOptions, PictureDials, Prompts, Seeds, Settings, listing
from lanternpp.api.results import Partial, Result, Stats, UnfinishedError, check_output, output, versions
from lanternpp.api.results import images as images_of
from lanternpp.api.settings import fitted, network_needed, suits, typed, with_tree
from lanternpp.api.tuned import CONDITIONS, Tuned, resolve_tuned
from lanternpp.engine.batching import adaptive_threads
from lanternpp.engine.decode import Engine, FinishedSample
from lanternpp.errors import InputError
from lanternpp.nn.int8 import Effect
from lanternpp.util.devices import INT8

__all__ = ["Partial", "Pipeline", "Result", "Stats", "versions"]


class Pipeline:
    """A model that draws: its target, its drafter if it has one, and the engines for the settings used last.

    Several threads may call one pipeline: their calls take turns, each drawing the pictures that it would draw alone,
    and one that ends in an error leaves the others as they are. `progress` and `callback` are called within their call's
    turn, so they must not wait for another thread's call. For drawing at the same time each thread needs a pipeline of its
    own, or an engine (`new_engine`), which belongs to one thread.
    """

    def __init__(self, model: Model, name: str, tuned: bool = True, engine_bytes: int = BYTES):
        self.name, self.folder = name, model.folder
        self.tuned = Tuned.read(model.folder, model.other) if tuned else None
        self.defaults = read_defaults(model.folder) or dict(model.target.defaults)
        self.model, self.target = model, model.target
        self._lock = threading.RLock()  # held while a call draws; its progress may call again
        self._engines = Engines(model, name, engine_bytes, self._count)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "nature-128",
        drafter: str | Path | None = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        size: str | int | tuple[int, int] | None = None,
        tuned: bool = True,
        engine_bytes: int = BYTES,
    ) -> Self:
        """A model by name, path or hub id; `drafter` likewise (default: the model's own).

        size: "768x512" or (768, 512), width first, or 768, in pixels, for models that draw more than one size.
        dtype: float32, bfloat16, float16, float64, or auto, the fastest here; int8 keeps the target's weights in
        8 bits and computes in auto's dtype, which auto does too for a model of codes on a CPU with kernels.
        tuned: whether what `lanternpp tune` found for this model is a default where it was measured.
        engine_bytes: what engines may take that are kept for the next call with the same settings, caches of keys and
        values for the most part. The latest is kept whatever it takes.
        Raises InputError where a name is unknown or a file is missing, truncated or of another model.
        """
        model = calls.text("model", model)
        drafter = None if drafter is None else calls.text("drafter", drafter)
        folder = model_folder(model)
        on, kind, int8 = placed(device, dtype, folder)
        here = folder.resolve().stem if folder.is_file() else folder.name
        name = model if model in MODELS or not Path(model).exists() else here
        read = Model(folder, drafter, on, kind, size=calls.size_text(size), int8=int8)
        return cls(read, name, tuned, engine_bytes)

    def to(
        self,
        device: str | torch.device | torch.dtype | None = None,
        dtype: str | torch.dtype | None = None,
    ) -> Self:
        """Move to another device, to another dtype, or both; returns this pipeline. A dtype alone may be given first.

        The weights are read again from their files, for a moment beside those that are there: nothing is lost by a
        narrower dtype on the way. Both are named as in `from_pretrained`. Raises InputError, and is then as before.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device if dtype is None else dtype
        with self._lock:
            model = self.model
            usual = INT8 if model.int8 else model.dtype
            on, kind, int8 = placed(device or model.device, dtype or usual, model.folder)
            if (on, kind, int8) != (model.device, model.dtype, model.int8):
                moved = model.changed(device=on, dtype=kind, int8=int8)
                self.target, self.model = moved.target, moved
                self._engines = Engines(self.model, self.name, self._engines.most, self._count)
                for kept in ("_auto", "_fit"):
                    self.__dict__.pop(kept, None)
        return self

    @cached_property
    def _fit(self) -> Fit:
        return fit_for(self.model, self._engines.new, self.model.weights, self.dtype)

    def _count(self, settings: Settings, engine: Engine) -> None:
        """Let a new engine count its acceptance where a fit waits for that; nothing is counted before a first fit."""
        if not self.target.channels and "_fit" in vars(self):
            self._fit.count(settings, engine)

    @cached_property
    def _auto(self) -> Chosen:
        return choose(AUTO, self.folder, self.model.other, self.defaults, self.tuned)

    def chosen(self, method: str | None = AUTO) -> Chosen:
        """The method that a name means on this model, which is another where the name is "auto".

        That takes what the model's defaults name, else what was tuned, else the fastest lossless method for the
        drafter that the model has.
        """
        return self._auto if method in (AUTO, None) else Chosen(calls.text("method", method))

    @listing(PictureDials)
    def settings(self, method: str | None = AUTO, **overrides: Unpack[PictureDials]) -> Settings:
        """A method's settings on this model: overrides, what was tuned, the model's defaults, the method's row.

        A draft that is to be fitted to the machine is still the model's own: `fit` fits it.

        Raises InputError, also where an override is a dial that no part of the method reads.
        """
        name, auto = self.chosen(method).method, self.chosen(method).why is not None
        settings = resolve_tuned(name, self.defaults, overrides, auto, self.tuned, self.conditions)
        return fitted(settings, self.target, self.name, overrides)

    def fit(self, settings: Settings) -> Settings:
        """Settings with the draft that is fastest on this machine, or with plain decoding's where that is.

        What is not known of the machine is measured now, which takes at most a second or 5 % of a picture's time. Settings whose
        draft was given or tuned stay as they are, and so do those for which no acceptance rates are known yet. Their `fit` is False.
        """
        if not settings.fit or self.target.channels:
            return replace(settings, fit=False)
        with self._lock:
            return self._fit(settings)

    def bound(self, settings: Settings) -> str | None:
        """One sentence on what bounds passes on this machine; None where `fit` measured nothing for such settings."""
        return None if self.target.channels else self._fit.bound(settings)

    def at_batch(self, settings: Settings, rows: int) -> Settings:
        """These settings for `rows` pictures at once: a draft that was tuned for so many, else a fitted one."""
        one, several = (self.settings(settings.method, batch_size=size) for size in (1, rows))
        made = replace(settings, batch_size=rows)
        if (settings.proposer, settings.tree, settings.fit) == (one.proposer, one.tree, one.fit):
            made = replace(with_tree(made, several.tree), fit=several.fit)
        return self.fit(made)

    @property
    def device(self) -> torch.device:
        """Where the target is."""
        return next(self.target.parameters()).device

    @property
    def dtype(self) -> str:
        """The target's compute dtype, such as "bfloat16"; "int8, bfloat16" where its weights have 8 bits."""
        return self.model.dtype_name

    @property
    def effect(self) -> Effect | None:
        """The change of the target's logits by 8-bit weights; None without them."""
        return self.model.effect

    def conditions(self, settings: Settings) -> dict[str, Any]:
        """The conditions that a tuning is valid for: device type, dtype, batch size, and the method's parts."""
        where = {"device": self.device.type, "dtype": self.dtype}
        return where | {name: getattr(settings, name) for name in CONDITIONS if name not in where}

    def can_draft(self, settings: Settings) -> bool:
        """Whether this model has what the settings need: the network that drafts, a codebook or a diffusion head for some rules.

        No weights are read.
        """
        return suits(settings, self.target) and self.model.holds(network_needed(settings))

    def engine(self, settings: Settings) -> Engine:
        """The cached engine for these settings, which calls use too; `new_engine` makes one of your own."""
        with self._lock:
            return self._engines.get(settings)

    def release(self) -> None:
        """Free the cached engines and the memory of their KV caches."""
        with self._lock:
            self._engines.clear()

    def new_engine(self, settings: Settings) -> Engine:
        """An engine for these settings that no one else has."""
        with self._lock:
            return self._engines.new(settings)

    def warm(self, settings: Settings) -> list[str]:
        """Compile the steps of these settings, for this process and later ones; the parts that could not be compiled.

        On a GPU, calls that leave `compile` out are compiled from then on where all parts are.
        """
        with self._lock:
            return self._engines.warm(compiled := replace(settings, compile=True), self.describe(compiled))

    def is_warm(self, settings: Settings) -> bool:
        """Whether `warm` has compiled these settings, on a GPU; on a CPU the passes in C are faster than what it compiles."""
        return self.device.type == "cuda" and self._engines.mark(settings).is_file()

    def describe(self, settings: Settings) -> dict[str, Any]:
        """Settings as results report them: with the device, the dtype, and the effect of 8-bit weights."""
        where: dict[str, Any] = {"device": str(self.device), "dtype": self.dtype}
        if self.effect:
            where["int8"] = asdict(self.effect)
        where["tuned"] = self.tuned is not None and self.tuned.knows(asdict(settings))
        return asdict(settings) | where

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
        check_output(self.target, output_type)
        request = self._request(prompt, n, seed, generator, method, dials)
        with self._lock, self._engines.taken(request.settings) as engine:
            what = (request.settings, request.prompts, request.seeds)
            return self.draw(engine, *what, progress, request.auto, callback, output_type)

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
        check_output(self.target, "pil")
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
            request = Request(list(prompts), list(seeds), settings, auto)
            try:
                with closing(request.steps(engine, found)) as steps, adaptive_threads(engine) as threads:
                    for batch in steps:
                        threads.update()
                        if progress:
                            progress(batch.decided, len(seeds) * engine.target.length)
                        if callback:
                            callback(request.partial(batch, found))
            except KeyboardInterrupt:
                if not found:
                    raise
            result = self._result(request, found, time.perf_counter() - began, output_type)
        if len(found) < len(seeds):
            raise UnfinishedError(result, result.seeds)
        return result

    def images(self, codes: Tensor) -> list[Image.Image]:
        """codes [n, length] -> n pictures, one at a time: their rounding does not depend on n."""
        return images_of(self.target, codes)

    def _request(
        self,
        prompt: Prompts,
        n: int | None,
        seed: Seeds,
        generator: torch.Generator | None,
        method: str | None,
        dials: PictureDials,
    ) -> Request:
        """The arguments of a call, checked. InputError."""
        prompts, n = calls.prompts(prompt), calls.whole("n", 1 if n is None else n)
        if n < 1:
            raise InputError(f"n {n} is below 1; ask for at least one picture")
        seeds = calls.seeds(seed, generator, len(prompts), n)
        given: dict[str, Any] = {k: v for k, v in dials.items() if v is not None}
        size = given.get("batch_size", min(len(seeds), 8))
        given["batch_size"] = calls.batch_size(typed("batch_size", size), len(seeds))
        settings = self.settings(method, **given)
        if "compile" not in given and self.is_warm(settings):
            settings = replace(settings, compile=True)
        settings = self.fit(settings)
        with self._lock:
            for one in dict.fromkeys(prompts):
                self.target.check(one)  # raise errors of all prompts before drawing any
        return Request([p for p in prompts for _ in range(n)], seeds, settings, self.chosen(method).why)

    def _stream(self, request: Request) -> Iterator[Partial]:
        """What `stream` gives. The lock is held while computing alone, not while the caller looks at a picture."""
        seconds = 0.0
        found: dict[int, FinishedSample] = {}
        with self._lock:
            engines = self._engines
            engine = engines.take(request.settings)
        steps = request.steps(engine, found)
        while True:
            with self._lock:
                began = time.perf_counter()
                batch = next(steps, None)
                seconds += time.perf_counter() - began
                if batch is None:
                    break
                partial = request.partial(batch, found)
            yield partial
        with self._lock:
            result = self._result(request, found, seconds, "pil")
            engines.keep(request.settings, engine)
        yield replace(partial, codes=list(result.codes), result=result)

    def _result(
        self, request: Request, found: dict[int, FinishedSample], seconds: float, output_type: str
    ) -> Result[Any]:
        """The result of the samples that are finished. seconds: computed so far; those of the pixels are added."""
        began = time.perf_counter()
        places = sorted(found)
        codes = torch.stack([found[place].codes for place in places])
        images = output(self.target, codes, output_type)
        seconds += time.perf_counter() - began
        samples = [found[place] for place in places]
        stats = Stats.of(samples, seconds, self.name, self.describe(request.settings), request.auto)
        return Result(images, codes.cpu(), stats, [request.seeds[place] for place in places])
