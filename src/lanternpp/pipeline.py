"""A loaded model: `Pipeline.from_pretrained("nature-128")("a photo of a red tulip")`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from lanternpp import arguments
from lanternpp.accept import RULES
from lanternpp.accept.base import check_relax
from lanternpp.continuous.engine import engine_for
from lanternpp.default_method import Chosen, choose
from lanternpp.devices import INT8, pick_device, pick_dtype
from lanternpp.engine.batching import drawing
from lanternpp.engine.decode import Engine, FinishedSample
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling
from lanternpp.engines import BYTES, EngineCache
from lanternpp.errors import InputError
from lanternpp.methods import AUTO
from lanternpp.models import MODELS, Model, model_folder, read_defaults
from lanternpp.nn.draws import native_laws, native_stops
from lanternpp.nn.int8 import Effect
from lanternpp.nn.threads import FittedThreads
from lanternpp.results import Result, Stats, UnfinishedError, versions
from lanternpp.settings import (
    Settings,
    build_proposer,
    build_rule,
    build_verifier,
    dials_read,
    fitted,
    network_needed,
    resolve,
    suits_latents,
)
from lanternpp.tuned import CONDITIONS, Tuned, fingerprint
from lanternpp.vq.neighbours import cache_folder, neighbours

__all__ = ["Pipeline", "Result", "Stats", "versions"]

TABLES = [
    m * 10**e for e in range(5) for m in (1, 2, 5)
]  # neighbours of the tables on disk; others are cut from these


class Pipeline:
    """A target, its drafter if it has one, and a cache of engines for the settings used last.

    Several threads may call one pipeline: their calls take turns, each drawing the pictures that it would draw alone,
    and one that ends in an error leaves the others as they are. `progress` is called within its call's turn, so it must
    not wait for another thread's call. For drawing at the same time each thread needs a pipeline of its own, or an
    engine (`new_engine`), which belongs to one thread.
    """

    def __init__(self, model: Model, name: str, tuned: bool = True, engine_bytes: int = BYTES):
        self.name, self.folder = name, model.folder
        self.tuned = Tuned.read(model.folder, model.other) if tuned else None
        self.defaults = read_defaults(model.folder) or dict(model.target.defaults)
        self.target = model.target
        self._models = {False: model}  # compiled or not
        self._lock = threading.RLock()  # held while a call draws; its progress may call again
        self._engines = EngineCache(self.new_engine, engine_bytes)

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
    ) -> Pipeline:
        """A model by name, path or hub id; `drafter` likewise (default: the model's own).

        size: "768x512" or (768, 512), width first, or 768, in pixels, for models that draw more than one size.
        dtype: float32, bfloat16, float16, float64, or auto, the fastest here; int8 keeps the target's weights in
        8 bits and computes in auto's dtype.
        tuned: whether what `lanternpp tune` found for this model is a default where it was measured.
        engine_bytes: what engines may take that are kept for the next call with the same settings, caches of keys and
        values for the most part. The latest is kept whatever it takes.
        Raises InputError where a name is unknown or a file is missing, truncated or of another model.
        """
        model = arguments.text("model", model)
        drafter = None if drafter is None else arguments.text("drafter", drafter)
        dtype = str(dtype).removeprefix("torch.")
        folder, on = model_folder(model), pick_device(str(device))
        named = model in MODELS or not Path(model).exists()
        name = model if named else folder.resolve().stem if folder.is_file() else folder.name
        kind = pick_dtype(dtype, on)
        read = Model(folder, drafter, on, kind, size=arguments.size_text(size), int8=dtype == INT8)
        return cls(read, name, tuned, engine_bytes)

    def __call__(
        self,
        prompt: str | Sequence[str],
        n: int = 1,
        seed: int | Iterable[int] | None = 0,
        method: str | None = AUTO,
        progress: Callable[[int, int], None] | None = None,
        **overrides: Any,
    ) -> Result:
        """Draw n pictures per prompt; picture i of a prompt has seed + i. Several seeds: one for each prompt.

        method: a name of `METHODS`, or "auto": see `chosen`; `stats.method` says which was taken, `stats.auto` why.
        overrides: any field of `Settings` besides method; what is left out or None is the method's or the
        model's default. measure=True reports `tv_spent`, which takes time. Raises InputError.
        """
        prompts, n = arguments.prompts(prompt), arguments.whole("n", 1 if n is None else n)
        if n < 1:
            raise InputError(f"n {n} is below 1; ask for at least one picture")
        seeds = [first + i for first in arguments.seeds(seed, len(prompts), n) for i in range(n)]
        given = {"batch_size": min(len(seeds), 8)} | {k: v for k, v in overrides.items() if v is not None}
        settings, why = self.settings(method, **given), self.chosen(method).why
        with self._lock:
            for one in dict.fromkeys(prompts):
                self.target.check(one)  # raise errors of all prompts before drawing any
            with self._engines.lend(settings) as engine:
                return self.draw(
                    engine, settings, [p for p in prompts for _ in range(n)], seeds, progress, why
                )

    def draw(
        self,
        engine: Engine,
        settings: Settings,
        prompts: Sequence[str],
        seeds: Sequence[int],
        progress: Callable[[int, int], None] | None = None,
        auto: str | None = None,
    ) -> Result:
        """Draw a picture per prompt and seed with an engine of the caller's own, made for these settings.

        An interrupt raises UnfinishedError, which is a KeyboardInterrupt, once a picture is finished.
        """
        with self._lock:
            began = time.perf_counter()
            found: dict[int, FinishedSample] = {}
            try:
                found.update(drawing(engine, prompts, seeds, progress))
            except KeyboardInterrupt:
                if not found:
                    raise
            places = sorted(found)
            codes = torch.stack([found[place].codes for place in places])
            images = self.images(codes)
            seconds = time.perf_counter() - began
            stats = Stats.of(
                [found[place] for place in places], seconds, self.name, self.describe(settings), auto
            )
            result = Result(images, codes.cpu(), stats)
        if len(places) < len(seeds):
            raise UnfinishedError(result, [seeds[place] for place in places])
        return result

    @cached_property
    def _auto(self) -> Chosen:
        model = self._models[False]
        return choose(AUTO, self.folder, model.other, self.defaults, self.tuned, model.device.type)

    def chosen(self, method: str | None = AUTO) -> Chosen:
        """The method that a name means on this model, which is another where the name is "auto".

        That takes what the model's defaults name, else what was tuned, else the fastest lossless method for the
        drafter that the model has.
        """
        return self._auto if method in (AUTO, None) else Chosen(arguments.text("method", method))

    def settings(self, method: str | None = AUTO, **overrides: Any) -> Settings:
        """A method's settings on this model: overrides, what was tuned, the model's defaults, the method's row.

        Raises InputError, also where an override is a dial that no part of the method reads.
        """
        chosen = self.chosen(method)
        method, defaults, auto = chosen.method, chosen.defaults(self.defaults), chosen.why is not None
        settings = resolve(method, defaults, overrides, auto)
        found: dict[str, Any] = {}
        if self.tuned and self.tuned.entries:
            # an override of the tree leaves the other dials that were tuned
            usual = resolve(method, defaults, {k: v for k, v in overrides.items() if k != "tree"}, auto)
            found = self.tuned.settings(method, self.conditions(usual))
        if found:
            rows = defaults.get("methods", {})
            own = {**rows, method: {**rows.get(method, {}), **found}}
            settings = resolve(method, {**defaults, "methods": own}, overrides, auto)
        return fitted(settings, self.target, self.name, overrides)

    @property
    def dtype(self) -> str:
        """The target's compute dtype, such as "bfloat16"; "int8, bfloat16" where its weights have 8 bits."""
        model = self._models[False]
        computed = str(model.dtype).removeprefix("torch.")
        return f"{INT8}, {computed}" if model.int8 else computed

    @property
    def weights(self) -> str:
        """A hash of the weights of model and drafter, to which measurements belong."""
        model = self._models[False]
        return fingerprint(model.folder, model.other)

    @property
    def effect(self) -> Effect | None:
        """The change of the target's logits by 8-bit weights; None without them."""
        return self._models[False].effect

    def conditions(self, settings: Settings) -> dict[str, Any]:
        """The conditions that a tuning is valid for: device type, dtype, batch size, and the method's parts."""
        where = {"device": next(self.target.parameters()).device.type, "dtype": self.dtype}
        return where | {name: getattr(settings, name) for name in CONDITIONS if name not in where}

    def can_draft(self, settings: Settings) -> bool:
        """Whether this model has what the settings need: the network that drafts, a codebook for rules with neighbours.

        No weights are read.
        """
        lends = "neighbours" in dials_read(settings.proposer, settings.accept)
        kind = network_needed(settings)
        there = kind is None or self._models[False].holds(kind)
        fits = not self.target.channels or suits_latents(settings)
        return there and fits and not (lends and self.target.codebook is None)

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
            return self._new_engine(settings)

    def _new_engine(self, settings: Settings) -> Engine:
        model = self._model(settings.compile)
        proposer = build_proposer(settings, model.network)
        rule = build_rule(settings, self.table, native_laws)
        if type(rule) not in RULES.values():
            like = next(model.target.parameters())
            check_relax(rule, str(settings.accept), model.target.vocab, proposer.depth, like)
        sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
        parts = (model.target, proposer, rule, sampling, Guidance(settings.cfg))
        verifier = build_verifier(settings, native_stops())
        return engine_for(*parts, settings.batch_size, settings.measure, verifier)

    def _model(self, compiled: bool) -> Model:
        """The networks, compiled or not; the compiled ones are read when first asked for."""
        if compiled not in self._models:
            self._models[compiled] = self._models[False].compile()
        return self._models[compiled]

    def table(self, k: int) -> Tensor:
        """The k nearest codes of every code, [V, k]; InputError where the family has no codebook table."""
        if self.target.codebook is None:
            raise InputError(
                f"{self.name} has no codebook of latents, so no code has neighbours; use the rule exact or cool"
            )
        device = next(self.target.parameters()).device
        beside = self.folder.parent if self.folder.is_file() else self.folder
        codebook = self.target.codebook.cpu()
        kept = min(next(n for n in TABLES if n >= k), len(codebook) - 1) if k <= TABLES[-1] else k
        table = neighbours(codebook, max(k, kept), cache_folder(beside))
        return table[:, :k].contiguous().to(device)

    @torch.inference_mode()
    def images(self, codes: Tensor) -> list[Image.Image]:
        """codes [n, length] -> n pictures, one at a time: their rounding does not depend on n."""
        with FittedThreads(self.target.decoder):
            unit = (self.target.pixels(one)[0].float().clamp(-1, 1) for one in codes.split(1))
            levels = [((one + 1) * 127.5).round().byte().permute(1, 2, 0).cpu().numpy() for one in unit]
        return [Image.fromarray(one) for one in levels]

    def describe(self, settings: Settings) -> dict[str, Any]:
        """Settings as results report them: with the device, the dtype, and the effect of 8-bit weights."""
        where: dict[str, Any] = {"device": str(next(self.target.parameters()).device), "dtype": self.dtype}
        if self.effect:
            where["int8"] = asdict(self.effect)
        where["tuned"] = self.tuned is not None and self.tuned.knows(settings.method, settings.tree)
        return asdict(settings) | where
