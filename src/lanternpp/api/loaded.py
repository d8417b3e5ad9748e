"""A model as it was loaded, the settings that it draws with, and its engines; `Pipeline` draws with them."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, Unpack

import torch
from torch import Tensor

from lanternpp.accept import RULES
from lanternpp.accept.base import check_relax
from lanternpp.api import arguments
from lanternpp.api.compiled import check_compiler, compile_steps, compiled_folder, warm_up
from lanternpp.api.default_method import Chosen, choose
from lanternpp.api.engines import BYTES, EngineCache
from lanternpp.api.fit.choice import Fit, fit_for
from lanternpp.api.model import MODELS, Model, model_folder, placed, read_defaults
from lanternpp.api.options import AUTO, PictureDials, Settings, listing
from lanternpp.api.settings import (
    build_proposer,
    build_rule,
    build_verifier,
    dials_read,
    fitted,
    network_needed,
    resolve,
    suits_latents,
    with_tree,
)
from lanternpp.api.tuned import CONDITIONS, DRAFTED, Tuned, fingerprint, with_tuned
from lanternpp.engine.decode import Engine, engine_class
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify.choose import TOKEN
from lanternpp.errors import InputError
from lanternpp.models.vq.neighbours import cache_folder, neighbours
from lanternpp.nn.backend import PYTORCH, backend
from lanternpp.nn.int8 import Effect
from lanternpp.util.devices import INT8
from lanternpp.util.files import digest, write_text
from lanternpp.util.registry import find

TABLES = [
    m * 10**e for e in range(5) for m in (1, 2, 5)
]  # neighbours of the tables on disk; others are cut from these


class LoadedModel:
    """A target, its drafter if it has one, and a cache of engines for the settings used last."""

    def __init__(self, model: Model, name: str, tuned: bool = True, engine_bytes: int = BYTES):
        self.name, self.folder = name, model.folder
        self.tuned = Tuned.read(model.folder, model.other) if tuned else None
        self.defaults = read_defaults(model.folder) or dict(model.target.defaults)
        self.target = model.target
        self._models = {False: model}  # by whether their weights are unpacked, to be compiled on a CPU
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
        model = arguments.text("model", model)
        drafter = None if drafter is None else arguments.text("drafter", drafter)
        folder = model_folder(model)
        on, kind, int8 = placed(device, dtype, folder)
        named = model in MODELS or not Path(model).exists()
        name = model if named else folder.resolve().stem if folder.is_file() else folder.name
        read = Model(folder, drafter, on, kind, size=arguments.size_text(size), int8=int8)
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
            model = self._models[False]
            on, kind, int8 = placed(
                model.device if device is None else device,
                (INT8 if model.int8 else model.dtype) if dtype is None else dtype,
                model.folder,
            )
            if (on, kind, int8) != (model.device, model.dtype, model.int8):
                moved = model.changed(device=on, dtype=kind, int8=int8)
                self.target = moved.target
                self._models = {False: moved}
                self._engines = EngineCache(self.new_engine, self._engines.most)
                for kept in ("_auto", "_fit"):
                    self.__dict__.pop(kept, None)
        return self

    @cached_property
    def _fit(self) -> Fit:
        return fit_for(self._models[False], self._new_engine, self.weights, self.dtype)

    @cached_property
    def _auto(self) -> Chosen:
        return choose(AUTO, self.folder, self._models[False].other, self.defaults, self.tuned)

    def chosen(self, method: str | None = AUTO) -> Chosen:
        """The method that a name means on this model, which is another where the name is "auto".

        That takes what the model's defaults name, else what was tuned, else the fastest lossless method for the
        drafter that the model has.
        """
        return self._auto if method in (AUTO, None) else Chosen(arguments.text("method", method))

    @listing(PictureDials)
    def settings(self, method: str | None = AUTO, **overrides: Unpack[PictureDials]) -> Settings:
        """A method's settings on this model: overrides, what was tuned, the model's defaults, the method's row.

        A draft that is to be fitted to the machine is still the model's own: `fit` fits it.

        Raises InputError, also where an override is a dial that no part of the method reads.
        """
        chosen = self.chosen(method)
        method, defaults, auto = chosen.method, self.defaults, chosen.why is not None
        settings = resolve(method, defaults, overrides, auto)
        found: dict[str, Any] = {}
        if self.tuned and self.tuned.entries:
            # an override of the tree, or of a window's dial, leaves the other dials that were tuned
            usual = resolve(method, defaults, {k: v for k, v in overrides.items() if k not in DRAFTED}, auto)
            found = self.tuned.settings(method, self.conditions(usual))
        if found:
            settings = resolve(method, with_tuned(defaults, method, found), overrides, auto)
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
        where = {"device": self.device.type, "dtype": self.dtype}
        return where | {name: getattr(settings, name) for name in CONDITIONS if name not in where}

    def can_draft(self, settings: Settings) -> bool:
        """Whether this model has what the settings need: the network that drafts, a codebook or a diffusion head for some rules.

        No weights are read.
        """
        lends = "neighbours" in dials_read(settings.proposer, settings.accept)
        kind = network_needed(settings)
        there = kind is None or self._models[False].holds(kind)
        fits = not self.target.channels or suits_latents(settings)
        rule = find("acceptance rule", settings.accept, RULES)
        able = hasattr(self.target, "denoiser") or not rule.trajectories
        return there and fits and able and not (lends and self.target.codebook is None)

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
        if settings.compile:
            check_compiler(self.device)
        model = self._model(settings.compile and self.device.type == "cpu")
        proposer = build_proposer(settings, model.network)
        used = backend()
        rule = build_rule(settings, self.table)
        if type(rule) not in RULES.values():
            like = next(model.target.parameters())
            check_relax(rule, str(settings.accept), model.target.vocab, proposer.depth, like)
        sampling = Sampling(settings.temperature, settings.top_k, settings.top_p, backend=used)
        parts = (model.target, proposer, rule, sampling, Guidance(settings.cfg))
        codes = not model.target.channels
        verifier = build_verifier(settings, used if codes else PYTORCH)
        engine = engine_class(model.target)(*parts, settings.batch_size, settings.measure_tv, verifier)
        if settings.compile:
            compile_steps(engine)
        elif codes:
            engine.fused = backend().step(engine, settings.verify or TOKEN)
        if codes and "_fit" in vars(self):  # nothing is to be counted before a first fit
            self._fit.count(settings, engine)
        return engine

    def _model(self, unpacked: bool) -> Model:
        """The networks, their weights unpacked or not; unpacked ones are read when first asked for."""
        if unpacked not in self._models:
            model = self._models[False]
            self._models[unpacked] = model.changed(packed=False, int8=model.effect is not None)
        return self._models[unpacked]

    def warm(self, settings: Settings) -> list[str]:
        """Compile the steps of these settings, for this process and later ones; the parts that could not be compiled.

        On a GPU, calls that leave `compile` out are compiled from then on where all parts are.
        """
        with self._lock:
            settings = replace(settings, compile=True)
            failed = warm_up(self.new_engine(settings))
            if not failed:
                write_text(self._mark(settings), json.dumps(self.describe(settings), default=str) + "\n")
        return failed

    def is_warm(self, settings: Settings) -> bool:
        """Whether `warm` has compiled these settings, on a GPU; on a CPU the passes in C are faster than what it compiles."""
        return self.device.type == "cuda" and self._mark(settings).is_file()

    def _mark(self, settings: Settings) -> Path:
        """The file that says that these settings are compiled for this device by this version of torch."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        parts = (torch.__version__, name, self.dtype, self.weights, str(replace(settings, compile=True)))
        return compiled_folder() / f"warm-{digest(parts)}.json"

    def table(self, k: int) -> Tensor:
        """The k nearest codes of every code, [V, k]; InputError where the family has no codebook table."""
        if self.target.codebook is None:
            raise InputError(
                f"{self.name} has no codebook of latents, so no code has neighbours; use the rule exact or cool"
            )
        beside = self.folder.parent if self.folder.is_file() else self.folder
        codebook = self.target.codebook.cpu()
        kept = min(next(n for n in TABLES if n >= k), len(codebook) - 1) if k <= TABLES[-1] else k
        table = neighbours(codebook, max(k, kept), cache_folder(beside))
        return table[:, :k].contiguous().to(self.device)

    def describe(self, settings: Settings) -> dict[str, Any]:
        """Settings as results report them: with the device, the dtype, and the effect of 8-bit weights."""
        where: dict[str, Any] = {"device": str(self.device), "dtype": self.dtype}
        if self.effect:
            where["int8"] = asdict(self.effect)
        where["tuned"] = self.tuned is not None and self.tuned.knows(asdict(settings))
        return asdict(settings) | where
