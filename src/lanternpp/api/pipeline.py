"""Drawing with a loaded model: `Pipeline.from_pretrained("nature-128")("a photo of a red tulip")`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, Self, Unpack, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lanternpp.api import calls
from lanternpp.api.calls import Request
from lanternpp.api.defaults import DRAFT_DIALS, Chosen, Defaults, conditions
from lanternpp.api.engines import ENGINE_BYTES, Engines
from lanternpp.api.model import MODELS, Model, model_folder, pick_placement
from lanternpp.api.options import AUTO, CallOptions, PictureDials, Prompts, Settings, StreamOptions, listing
from lanternpp.api.results import Partial, Result, Setup, Stats, UnfinishedError, check_output, output
from lanternpp.api.results import images as images_of
from lanternpp.api.settings import convert_override, for_target, network_needed, suits, with_tree
from lanternpp.engine.batching import draw_samples
from lanternpp.engine.decode import Engine
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.types import shape_of
from lanternpp.util.devices import STORED

__all__ = ["Partial", "Pipeline", "Result", "Stats"]


class Pipeline(Engines):
    """A model that draws: its target, its drafter if it has one, and the engines for the settings used last.

    Several threads may call one pipeline: their calls take turns, and each draws the pictures that it would draw alone.
    A call that ends in an error does not affect the calls of other threads. `progress` and `callback` are called within
    their call's turn, so they must not wait for another thread's call. To draw at the same time, each thread needs a
    pipeline of its own, or an engine (`new_engine`), which belongs to one thread.
    """

    def __init__(self, model: Model, name: str, tuned: bool = True, engine_bytes: int = ENGINE_BYTES):
        super().__init__(model, name, engine_bytes)
        self.defaults = Defaults.read(model.folder, model.drafter, model.target, tuned)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "nature-128",
        drafter: str | Path | None = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        size: str | int | tuple[int, int] | None = None,
        tuned: bool = True,
        engine_bytes: int = ENGINE_BYTES,
        tensor_parallel: bool = False,
    ) -> Self:
        """Load a model by name, path or hub id, and a drafter that is named likewise (default: the model's own).

        size: "768x512" or (768, 512), width first, or 768, in pixels, for models that draw more than one size.
        dtype: float32, bfloat16, float16, float64, or auto, the fastest here; int8 keeps the target's weights in
        8 bits and computes in auto's dtype, which auto does too for a model of codes on a CPU with kernels; int4 in 4 bits.
        tuned: whether settings that `lanternpp tune` found for this model are defaults under the conditions of the tuning.
        engine_bytes: the most bytes that engines kept for the next call with the same settings take, mostly KV caches.
        The latest engine is kept whatever its size.
        tensor_parallel: divide a target of transformers among the processes that torchrun started, a card for each, by the
        plan of its class; all processes make the same calls, and get the same pictures.
        Raises InputError where a name is unknown or a file is missing, truncated or of another model.
        """
        name = calls.text("model", model)
        drafter_folder = None if drafter is None else model_folder(calls.text("drafter", drafter), "drafter")
        folder = model_folder(name)
        device, compute_dtype, stored = pick_placement(device, dtype, folder)
        if tensor_parallel:
            if dtype in STORED:
                raise InputError(f"dtype {dtype} does not go with tensor_parallel; leave one of them out")
            stored = None
        if name not in MODELS and Path(name).exists():
            name = folder.resolve().stem if folder.is_file() else folder.name
        if size is not None and not isinstance(size, str):
            sides = size if isinstance(size, list | tuple) else (size,)
            size = "x".join(str(calls.integer("size", side)) for side in sides)
        packed = not tensor_parallel
        networks = Model(folder, drafter_folder, device, compute_dtype, packed, size, stored, tensor_parallel)
        return cls(networks, name, tuned, calls.converted(float, "engine_bytes", engine_bytes))

    def to(
        self,
        device: str | torch.device | torch.dtype | None = None,
        dtype: str | torch.dtype | None = None,
    ) -> Self:
        """Move to another device, to another dtype, or both; return this pipeline. A dtype alone may be given first.

        The weights are read again from their files, so a narrower dtype before costs no precision; for a moment both copies
        take memory. `device` and `dtype` are named as in `from_pretrained`.
        Raises InputError, after which the pipeline is as before.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device if dtype is None else dtype
        with self._lock:
            model = self.model
            current_dtype = model.stored or model.dtype
            placement = pick_placement(device or model.device, dtype or current_dtype, model.folder)
            if placement != (model.device, model.dtype, model.stored):
                new_device, new_dtype, stored = placement
                self._set_model(replace(model, device=new_device, dtype=new_dtype, stored=stored))
        return self

    def chosen(self, method: str | None = AUTO) -> Chosen:
        """Return the method that a name means on this model; for "auto", with the reason.

        "auto" takes the method of the model's defaults, else the tuned one, else the fastest lossless method for the
        drafter that the model has.
        """
        return self.defaults.chosen(method)

    @listing(PictureDials)
    def settings(self, method: str | None = AUTO, **overrides: Unpack[PictureDials]) -> Settings:
        """Return a method's settings on this model: overrides, tuned settings, the model's defaults, the method's row.

        Settings whose `fit` is true still have the model's own draft: the method `fit` replaces it.

        Raises InputError, also where an override is a dial that no part of the method reads.
        """
        settings = self.defaults.settings(method, overrides, self._placement)
        return for_target(settings, self.target, self.name, overrides)

    def fit(self, settings: Settings) -> Settings:
        """Return the settings with the draft that is fastest on this machine, or plain decoding's where none is clearly faster.

        Steps that were not measured before are measured now, in at most a second or 5 % of a picture's time. Settings whose
        draft was given or tuned, or whose acceptance rates are not known yet, keep their draft and get `fit` False.
        """
        # Processes that share a target would each time steps, and could choose different drafts.
        if not settings.fit or self.target.channels or self.target.decoder.ranks > 1:
            return replace(settings, fit=False)
        with self._lock:
            return self._fit(settings, self.new_engine)

    def bound(self, settings: Settings) -> str | None:
        """Return a sentence on what bounds passes on this machine; None where `fit` measured nothing for such settings."""
        return None if self.target.channels else self._fit.bound(settings)

    def at_batch(self, settings: Settings, rows: int) -> Settings:
        """Return the settings for `rows` pictures at once: with a draft tuned for this batch size, else a fitted one."""
        single = self.settings(settings.method, batch_size=1)
        batched = self.settings(settings.method, batch_size=rows)
        resized, draft = replace(settings, batch_size=rows), ("proposer", "fit", *DRAFT_DIALS)
        if all(getattr(settings, name) == getattr(single, name) for name in draft):
            others = {name: getattr(batched, name) for name in draft if name != "tree"}
            resized = with_tree(replace(resized, **others), batched.tree)
        return self.fit(resized)

    @property
    def device(self) -> torch.device:
        """The target's device."""
        return next(self.target.parameters()).device

    @property
    def dtype(self) -> str:
        """The target's compute dtype, such as "bfloat16"; "int8, bfloat16" where its weights are stored in int8."""
        return self.model.dtype_name

    def conditions(self, settings: Settings) -> dict[str, Any]:
        """Return the conditions that a tuning is valid for: device type, dtype, batch size, and the method's parts."""
        return conditions(settings, self._placement)

    @property
    def _placement(self) -> dict[str, str]:
        return {"device": self.device.type, "dtype": self.dtype}

    def can_draft(self, settings: Settings) -> bool:
        """Return whether the model has the network, codebook or diffusion head that the settings need. Reads no weights."""
        return suits(settings, self.target) and self.defaults.holds(network_needed(settings))

    def describe(self, settings: Settings, auto: str | None = None) -> Setup:
        """Return settings as results report them: with the device, the dtype, and the effect of 8-bit weights. auto: as `Setup` has it."""
        report = asdict(settings) | {"device": str(self.device), "dtype": self.dtype}
        if self.model.effect:
            report["int8"] = asdict(self.model.effect)
        report["tuned"] = self.defaults.is_tuned(settings)
        return Setup(model=self.name, settings=report, auto=auto)

    @overload
    def __call__(
        self,
        prompt: Prompts,
        n: int | None = 1,
        *,
        output_type: Literal["np"],
        **options: Unpack[CallOptions],
    ) -> Result[np.ndarray[Any, np.dtype[np.float32]]]: ...

    @overload
    def __call__(
        self,
        prompt: Prompts,
        n: int | None = 1,
        *,
        output_type: Literal["pt"],
        **options: Unpack[CallOptions],
    ) -> Result[Tensor]: ...

    @overload
    def __call__(
        self,
        prompt: Prompts,
        n: int | None = 1,
        *,
        output_type: Literal["pil", "codes"] = "pil",
        **options: Unpack[CallOptions],
    ) -> Result[list[Image.Image]]: ...

    @listing(CallOptions)
    def __call__(
        self, prompt: Prompts, n: int | None = 1, *, output_type: str = "pil", **options: Unpack[CallOptions]
    ) -> Result[Any]:
        """Draw n pictures per prompt; picture i of a prompt has seed + i. A list of seeds has one per prompt; default: 0.

        method: a name of `METHODS`, or "auto": see `chosen`; `stats.method` is the method that was taken, `stats.auto` the reason.
        progress: called with (decided codes, all codes) after every prompt and every pass.
        callback: called at the same times with a `Partial`, which has the codes so far and, if its `images` are read,
        the unfinished pictures. An exception that it raises ends the call.
        generator: a torch.Generator that draws a seed for each picture, in place of `seed`; `seeds` of the result has them.
        output_type: the type of the result's `images`: "pil", a list of PIL images; "np", an array [n, H, W, 3] of float32 in 0
        to 1; "pt", a tensor [n, 3, H, W] of the same; "codes", an empty list, where `codes` of the result is enough.
        image: a PIL image or a file, or a list of these, which every prompt refers to; for Emu3.5 and GLM-Image.
        dials: every other field of `Settings`; a dial that is left out or None is the method's or the model's default.
        measure_tv=True reports `tv_cost`, which takes time.
        Raises InputError.
        """
        check_output(self.target, output_type)
        progress, callback = options.pop("progress", None), options.pop("callback", None)
        request = self.request(prompt, n, **options)
        with self._lock, self._engine_in_use(request.settings, request.shape) as engine:
            return self.draw(engine, request, progress, callback, output_type)

    @listing(StreamOptions)
    def stream(
        self, prompt: Prompts, n: int | None = 1, **options: Unpack[StreamOptions]
    ) -> Iterator[Partial]:
        """Draw as a call does, and yield the pictures so far after every prompt and every pass.

        The last `Partial` has the `result` that a call returns, of PIL images. Between two partials other calls may draw. To
        end early, leave the loop. Raises InputError at once, before the first picture.
        """
        check_output(self.target, "pil")
        return self._stream(self.request(prompt, n, **options))

    def draw(
        self,
        engine: Engine,
        request: Request,
        progress: Callable[[int, int], None] | None = None,
        callback: Callable[[Partial], None] | None = None,
        output_type: str = "pil",
    ) -> Result[Any]:
        """Draw a request with an engine of the caller's own, made for its settings.

        An interrupt raises UnfinishedError, which is a KeyboardInterrupt, once a picture is finished.
        """
        for name, function in (("progress", progress), ("callback", callback)):
            if function is not None and not callable(function):
                raise InputError(f"{name} {function!r} is no function; give one, or leave it out")
        with self._lock:
            began = time.perf_counter()
            setup = self.describe(request.settings, request.auto)
            watch = None if callback is None else lambda batch: callback(request.partial(batch))
            try:
                for index, sample in draw_samples(engine, request.prompts, request.seeds, progress, watch):
                    request.samples[index] = sample
            except KeyboardInterrupt:
                if not request.samples:
                    raise
            seconds = time.perf_counter() - began
            result = self._result(request, engine.target, seconds, output_type, setup)
        if len(result.seeds) < len(request.seeds):
            raise UnfinishedError(result)
        return result

    def images(self, codes: Tensor, target: Target | None = None) -> list[Image.Image]:
        """Decode codes [n, length], of the model's target or another, to n pictures, whose rounding does not depend on n."""
        return images_of(target or self.target, codes)

    def request(self, prompt: Any, n: Any, image: Any = None, **options: Any) -> Request:
        """Check the arguments of a call, and return its prompts, seeds and settings, for `draw`; raise InputError."""
        prompts, n = calls.prompts(prompt), calls.integer("n", 1 if n is None else n)
        if not 1 <= n <= calls.MAX_PICTURES:
            raise InputError(f"n {n} is out of range; use 1 to {calls.MAX_PICTURES:,}")
        seeds = calls.seeds(options.pop("seed", None), options.pop("generator", None), len(prompts), n)
        if image is not None:
            images = calls.pictures(image)
            with self._lock:
                prompts = [self.target.depicted(prompt, images) for prompt in prompts]
            if len(set(map(shape_of, prompts))) > 1:
                raise InputError("these prompts differ in length, so each edits in a call of its own")
        method, batch_size = options.pop("method", AUTO), options.get("batch_size")
        batch_size = convert_override("batch_size", min(len(seeds), 8) if batch_size is None else batch_size)
        options["batch_size"] = calls.batch_size(batch_size, len(seeds))
        settings = self.settings(method, **options)
        if options.get("compile") is None and self.is_warm(settings):
            settings = replace(settings, compile=True)
        settings = self.fit(settings)
        reason = self.chosen(method).reason(settings)
        request = Request([prompt for prompt in prompts for _ in range(n)], seeds, settings, reason)
        with self._lock:
            target = self.target.shaped(request.shape)
            # All prompts are checked before the first picture is drawn.
            for prompt in dict.fromkeys(prompts):
                target.check(prompt)
        return request

    def _stream(self, request: Request) -> Iterator[Partial]:
        """Yield the partials of `stream`. The lock is held only while computing, not while the caller has a partial."""
        seconds = 0.0
        with ExitStack() as stack:
            with self._lock:
                engine = stack.enter_context(self._engine_in_use(request.settings, request.shape))
                # The settings are described before drawing, as `to` may be called between two partials.
                setup = self.describe(request.settings, request.auto)
            steps = request.steps(engine)
            while True:
                with self._lock:
                    began = time.perf_counter()
                    batch = next(steps, None)
                    seconds += time.perf_counter() - began
                    if batch is None:
                        break
                    partial = request.partial(batch)
                yield partial
            with self._lock:
                result = self._result(request, engine.target, seconds, "pil", setup)
        yield replace(partial, codes=list(result.codes), result=result)

    def _result(
        self, request: Request, target: Target, seconds: float, output_type: str, setup: Setup
    ) -> Result[Any]:
        """Decode the finished samples and return the result. seconds: without the pixels'."""
        began = time.perf_counter()
        samples = dict(sorted(request.samples.items()))
        codes = torch.stack([sample.codes for sample in samples.values()])
        images = output(target, codes, output_type)
        seconds += time.perf_counter() - began
        stats = Stats.of(setup, [*samples.values()], seconds)
        return Result(images, codes.cpu(), stats, [request.seeds[index] for index in samples])
