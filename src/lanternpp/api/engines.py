"""The engines of a model: each is made for some settings; those used last are kept, and their steps may be compiled."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lanternpp.accept import RULES
from lanternpp.accept.base import check_relax
from lanternpp.api.model import Model
from lanternpp.api.options import Settings
from lanternpp.api.settings import build_proposer, build_rule, build_verifier
from lanternpp.engine.compiled import check_compiler, compile_steps, compiled_folder, tensor_bytes, warm_up
from lanternpp.engine.decode import Engine, engine_class
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify.choose import TOKEN
from lanternpp.errors import InputError
from lanternpp.models.vq.neighbours import cache_folder, neighbours
from lanternpp.nn.backend import PYTORCH, backend
from lanternpp.util.files import digest, write_text

BYTES = 1 << 30
# Neighbours of the tables on disk; others are cut from these.
TABLES = [m * 10**e for e in range(5) for m in (1, 2, 5)]


class Engines:
    """Makes engines, and keeps at most `most` bytes of them; beyond that the least recently used are dropped, but never the latest.

    made: called with settings and every new engine. It is not thread-safe: `Pipeline` has the lock.
    """

    def __init__(self, model: Model, name: str, most: int, made: Callable[[Settings, Engine], None]):
        self.model, self.name, self.most, self.made = model, name, most, made
        self._models = {False: model}  # by whether their weights are unpacked, to be compiled on a CPU
        self._kept: OrderedDict[Settings, Engine] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, settings: Settings) -> Engine:
        """The engine for these settings, made now or before, and kept."""
        engine = self._kept.get(settings) or self.new(settings)
        self.keep(settings, engine)
        return engine

    def take(self, settings: Settings) -> Engine:
        """An engine for exclusive use; it is kept again once it is given to `keep`."""
        return self._kept.pop(settings, None) or self.new(settings)

    @contextmanager
    def taken(self, settings: Settings) -> Iterator[Engine]:
        """An engine for exclusive use; it is dropped where an error ends its use."""
        engine = self.take(settings)
        yield engine
        self.keep(settings, engine)

    def clear(self) -> None:
        """Drop all engines."""
        self._kept.clear()

    @property
    def bytes(self) -> int:
        """Bytes of tensors that the cached engines hold, without the networks."""
        return tensor_bytes(list(self._kept.values()))

    def keep(self, settings: Settings, engine: Engine) -> None:
        """Keep an engine as the one used last."""
        self._kept[settings] = engine
        self._kept.move_to_end(settings)
        while len(self._kept) > 1 and self.bytes > self.most:
            self._kept.popitem(last=False)

    def new(self, settings: Settings) -> Engine:
        """An engine for these settings that nobody else has. InputError where a part cannot be made."""
        if settings.compile:
            check_compiler(self.model.device)
        model = self._model_for(settings)
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
        self.made(settings, engine)
        return engine

    def _model_for(self, settings: Settings) -> Model:
        """The networks; on a CPU those that are compiled are read again, as their weights must not be packed."""
        unpacked = settings.compile and self.model.device.type == "cpu"
        if unpacked not in self._models:
            self._models[unpacked] = self.model.changed(packed=False, int8=self.model.effect is not None)
        return self._models[unpacked]

    def table(self, k: int) -> Tensor:
        """The k nearest codes of every code, [V, k]; InputError where the family has no codebook table."""
        codebook, folder = self.model.target.codebook, self.model.folder
        if codebook is None:
            raise InputError(
                f"{self.name} has no codebook of latents, so no code has neighbours; use the rule exact or cool"
            )
        kept = min(next(n for n in TABLES if n >= k), len(codebook) - 1) if k <= TABLES[-1] else k
        beside = cache_folder(folder.parent if folder.is_file() else folder)
        table = neighbours(codebook.cpu(), max(k, kept), beside)
        return table[:, :k].contiguous().to(self.model.device)

    def warm(self, settings: Settings, described: Mapping[str, Any]) -> list[str]:
        """Compile the steps of these settings and write down that they are; the parts that could not be compiled."""
        failed = warm_up(self.new(settings))
        if not failed:
            write_text(self.mark(settings), json.dumps(described, default=str) + "\n")
        return failed

    def mark(self, settings: Settings) -> Path:
        """The file that says that these settings are compiled for this device by this version of torch."""
        device = self.model.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        compiled = str(replace(settings, compile=True))
        parts = (torch.__version__, name, self.model.dtype_name, self.model.weights, compiled)
        return compiled_folder() / f"warm-{digest(parts)}.json"
