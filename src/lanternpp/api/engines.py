"""The engines of a model: each is made for some settings; those used last are kept, and their steps may be compiled."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from lanternpp.accept import RULES
from lanternpp.accept.base import check_relax
from lanternpp.api.fit import Fit
from lanternpp.api.model import Model
from lanternpp.api.options import Settings
from lanternpp.api.settings import build_proposer, build_rule
from lanternpp.engine.compiled import check_compiler, compile_steps, compiled_folder, tensor_bytes, warm_up
from lanternpp.engine.decode import Engine, engine_class
from lanternpp.engine.proposer import check_first_drafts
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.engine.verify.choose import TOKEN, VERIFIERS, with_native
from lanternpp.errors import InputError
from lanternpp.models.vq.codes import cache_folder, check_neighbours, neighbours
from lanternpp.nn.backend import PYTORCH, backend
from lanternpp.util.devices import device_name
from lanternpp.util.files import digest
from lanternpp.util.jsonfile import write_json

BYTES = 1 << 30
# Neighbours of the tables on disk; others are the first columns of these.
TABLES = [m * 10**e for e in range(5) for m in (1, 2, 5)]


class Engines:
    """Makes the engines of a model, and keeps those used last: at most `most` bytes, and always the latest."""

    def __init__(self, model: Model, name: str, most: int = BYTES):
        self.name, self.most = name, most
        self._lock = threading.RLock()  # held while a call draws; its progress may call again
        self._use(model)

    def _use(self, model: Model) -> None:
        """Make engines of this model from now on."""
        self.model, self.target, self.folder = model, model.target, model.folder
        self._models = {False: model}  # by whether their weights are unpacked, to be compiled on a CPU
        self._kept: OrderedDict[tuple[Settings, Hashable], Engine] = OrderedDict()
        self.__dict__.pop("_fit", None)

    @cached_property
    def _fit(self) -> Fit:
        """The fit of drafts to this machine; engines made after it count what it does not know."""
        return Fit(self.model, partial(self.new_engine, timed=True))

    def _take(self, settings: Settings, shape: Hashable = None) -> Engine:
        """An engine for exclusive use, made now or kept; it is kept again once it is given to `_keep`."""
        return self._kept.pop((settings, shape), None) or self.new_engine(settings, shape)

    def _keep(self, settings: Settings, engine: Engine, shape: Hashable = None) -> None:
        # shaped targets share their weights with the model's
        like = next(engine.target.parameters())
        if all(like is not next(model.target.parameters()) for model in self._models.values()):
            return  # of the model before `to`
        self._kept[settings, shape] = engine
        self._kept.move_to_end((settings, shape))
        while len(self._kept) > 1 and tensor_bytes(list(self._kept.values())) > self.most:
            self._kept.popitem(last=False)

    @contextmanager
    def _taken(self, settings: Settings, shape: Hashable = None) -> Iterator[Engine]:
        """An engine for exclusive use; it is dropped where an error ends its use."""
        with self._lock:
            engine = self._take(settings, shape)
            yield engine
            self._keep(settings, engine, shape)

    def release(self) -> None:
        """Free the kept engines and the memory of their KV caches."""
        with self._lock:
            self._kept.clear()

    def new_engine(self, settings: Settings, shape: Hashable = None, timed: bool = False) -> Engine:
        """An engine for these settings that no one else has; shape: of its prompts. InputError where a part cannot be made.

        timed: it counts no acceptance for the fit, which takes time.
        """
        with self._lock:
            if settings.compile:
                check_compiler(self.model.device)
            model, used = self._model_for(settings), backend(self.model.device)
            target = model.target.shaped(shape)
            proposer = build_proposer(settings, partial(model.network, shape=shape))
            rule = build_rule(settings, self._table)
            if type(rule) not in RULES.values() and not target.channels:
                like = next(target.parameters())
                check_relax(rule, str(settings.accept), target.vocab, proposer.depth, like)
            sampling = Sampling(settings.temperature, settings.top_k, settings.top_p, backend=used)
            verify = settings.verify or TOKEN
            verifier = with_native(VERIFIERS[verify], PYTORCH if target.channels else used)
            parts = (target, proposer, rule, sampling, Guidance(settings.cfg))
            engine = engine_class(target)(*parts, settings.batch_size, settings.measure_tv, verifier)
            if not timed:  # the second draft of compiled steps is traced
                check_first_drafts(proposer, engine.codes, engine.count, 1 if settings.compile else 2)
            if settings.compile:
                compile_steps(engine)
            elif not target.channels:
                engine.fused = used.step(engine, verify)
            if "_fit" in vars(self) and shape is None and not timed:
                self._fit.count(settings, engine)
            return engine

    def _model_for(self, settings: Settings) -> Model:
        """The networks; on a CPU those that are compiled are read again, as their weights must not be packed."""
        unpacked = settings.compile and self.model.device.type == "cpu"
        if unpacked not in self._models:
            self._models[unpacked] = replace(self.model, packed=False, int8=self.model.effect is not None)
        return self._models[unpacked]

    def check(self, settings: Settings) -> None:
        """InputError where `new_engine` cannot make a rule of the package with these settings; nothing is read for it."""
        if settings.accept in RULES:
            rule = build_rule(settings, partial(self._table, read=False))
            engine_class(self.target).check(self.target, rule, VERIFIERS[settings.verify or TOKEN])

    def _table(self, k: int, read: bool = True) -> Tensor:
        """The k nearest codes of every code, [V, k]; without `read`, zeros. InputError where there are none."""
        codebook, folder = self.model.target.codebook, self.model.folder
        if codebook is None:
            target = self.model.target
            other = " or cspd" if hasattr(target, "denoiser") else "" if target.channels else " or cool"
            raise InputError(
                f"{self.name} has no codebook of latents, so no code has neighbours; use the rule exact{other}"
            )
        check_neighbours(k, len(codebook))
        if not read:
            return torch.zeros((), dtype=torch.int32).expand(len(codebook), k)
        kept = min(next(n for n in TABLES if n >= k), len(codebook) - 1) if k <= TABLES[-1] else k
        beside = cache_folder(folder.parent if folder.is_file() else folder)
        table = neighbours(codebook.cpu(), max(k, kept), beside)
        return table[:, :k].contiguous().to(self.model.device)

    def warm(self, settings: Settings) -> list[str]:
        """Compile the steps of these settings, for this process and later ones; the parts that could not be compiled.

        On a GPU, calls that leave `compile` out are compiled from then on where all parts are.
        """
        with self._lock:
            failed = warm_up(self.new_engine(replace(settings, compile=True)))
            if not failed:
                write_json(self._mark(settings), asdict(settings))
            return failed

    def is_warm(self, settings: Settings) -> bool:
        """Whether `warm` has compiled these settings, on a GPU; on a CPU the passes in C are faster than what it compiles."""
        return self.model.device.type == "cuda" and self._mark(settings).is_file()

    def _mark(self, settings: Settings) -> Path:
        """The file that says that these settings are compiled for this device by this version of torch."""
        compiled, device = str(replace(settings, compile=True)), device_name(self.model.device)
        parts = (torch.__version__, device, self.model.dtype_name, self.model.weights, compiled)
        return compiled_folder() / f"warm-{digest(parts)}.json"
