"""The engines of a model: each is made for some settings. Engines used last are kept, and their steps may be compiled."""

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
from lanternpp.engine.compiled import check_compiler, compiled_folder, graph_steps, tensor_bytes, warm_up
from lanternpp.engine.decode import Engine, engine_class
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.engine.verify import TOKEN, VERIFIERS
from lanternpp.errors import InputError
from lanternpp.models.vq.codes import cache_folder, check_neighbours, neighbours
from lanternpp.nn.backend import backend
from lanternpp.util.devices import device_name, own_devices
from lanternpp.util.files import digest
from lanternpp.util.jsonfile import write_json

ENGINE_BYTES = 1 << 30
# Numbers of neighbours of the tables on disk; a table of another number is the first columns of the next larger one.
TABLE_WIDTHS = [m * 10**e for e in range(5) for m in (1, 2, 5)]


class Engines:
    """Maker of a model's engines, which keeps the engines used last: at most `max_bytes`, and always the latest."""

    def __init__(self, model: Model, name: str, max_bytes: int = ENGINE_BYTES):
        self.name, self.max_bytes = name, max_bytes
        self._lock = threading.RLock()  # held while a call draws; its progress may call again
        self._set_model(model)

    def __reduce__(self) -> tuple[object, ...]:
        """Refuse to be pickled or copied."""
        raise InputError("a pipeline cannot be pickled or copied; call from_pretrained in each process")

    def _set_model(self, model: Model) -> None:
        """Make engines of this model from now on; engines of the model before are not kept."""
        self.model, self.target, self.folder = model, model.target, model.folder
        self._idle_engines = OrderedDict[tuple[Settings, Hashable], Engine]()
        self.__dict__.pop("_fit", None)

    @cached_property
    def _fit(self) -> Fit:
        """The fit of drafts to this machine; engines made after it count the acceptance rates that it lacks."""
        return Fit(self.model)

    @contextmanager
    def _engine_in_use(self, settings: Settings, shape: Hashable = None) -> Iterator[Engine]:
        """Take an engine, or make one, for exclusive use, and keep it after use; an error drops it."""
        key = settings, shape
        with self._lock:
            idle_engines = self._idle_engines  # of this model: `to` replaces them
            engine = idle_engines.pop(key, None) or self.new_engine(settings, shape)
        yield engine
        with self._lock:
            idle_engines[key] = engine
            idle_engines.move_to_end(key)
            while len(idle_engines) > 1 and tensor_bytes([*idle_engines.values()]) > self.max_bytes:
                idle_engines.popitem(last=False)

    def release(self) -> None:
        """Free the kept engines and the memory of their KV caches."""
        with self._lock:
            self._idle_engines.clear()

    @own_devices()
    def new_engine(self, settings: Settings, shape: Hashable = None, timed: bool = False) -> Engine:
        """Make an engine for these settings; raise InputError where a part cannot be made. shape: of the engine's prompts.

        timed: the engine counts no acceptance for the fit, as counting takes time.
        """
        with self._lock:
            if settings.compile:
                check_compiler(self.model.device)
            # Packed weights cannot be compiled on a CPU.
            unpacked = settings.compile and self.model.device.type == "cpu"
            model = self.model.unpacked if unpacked else self.model
            device_backend = backend(model.device)
            target = model.target.shaped(shape)
            proposer = build_proposer(settings, partial(model.network, shape=shape))
            rule = build_rule(settings, self._table)
            if type(rule) not in RULES.values() and not target.channels:
                like = next(target.parameters())
                check_relax(rule, str(settings.accept), target.vocab, proposer.depth, like)
            sampling = Sampling(settings.temperature, settings.top_k, settings.top_p, backend=device_backend)
            verify = settings.verify or TOKEN
            parts = (target, proposer, rule, sampling, Guidance(settings.cfg))
            engine = engine_class(target)(*parts, settings.batch_size, settings.measure_tv, VERIFIERS[verify])
            engine.drafts_to_check = 0 if timed else 2
            graph_steps(engine, bool(settings.compile))
            if not (settings.compile or target.channels):
                engine.fused = device_backend.step(engine, verify)
            if "_fit" in vars(self) and shape is None and not timed:
                self._fit.count(settings, engine)
            return engine

    def check(self, settings: Settings) -> None:
        """Check that `new_engine` can make the settings' rule, if it is the package's; raise InputError. Reads no file."""
        if settings.accept in RULES:
            rule = build_rule(settings, partial(self._table, read=False))
            engine_class(self.target).check(self.target, rule, VERIFIERS[settings.verify or TOKEN])

    def _table(self, k: int, read: bool = True) -> Tensor:
        """Return the k nearest codes of every code, [V, k], or zeros without `read`; raise InputError without a codebook."""
        target, folder = self.model.target, self.model.folder
        codebook = target.codebook  # read once: a family may compute it
        if codebook is None:
            raise InputError(
                f"{self.name} has no codebook of latents, so no code has neighbours; use a rule that needs none, such as exact"
            )
        vocab = len(codebook)
        check_neighbours(k, vocab)
        if not read:
            return torch.zeros((), dtype=torch.int32).expand(vocab, k)
        width = min(next((width for width in TABLE_WIDTHS if width >= k), k), vocab - 1)
        table_folder = cache_folder(folder.parent if folder.is_file() else folder)
        table = neighbours(codebook, width, table_folder)
        return table[:, :k].contiguous().to(self.model.device)

    def warm(self, settings: Settings) -> list[str]:
        """Compile the steps of these settings, for this process and later ones; return the parts that could not be compiled.

        On a GPU, calls that leave `compile` out are compiled from then on, provided that all parts could be.
        """
        with self._lock:
            failed = warm_up(self.new_engine(replace(settings, compile=True)))
            if not failed:
                write_json(self._mark(settings), asdict(settings))
            return failed

    def is_warm(self, settings: Settings) -> bool:
        """Return whether `warm` has compiled these settings on a GPU. On a CPU the passes in C are faster than compiled ones."""
        return self.model.device.type == "cuda" and self._mark(settings).is_file()

    def _mark(self, settings: Settings) -> Path:
        """Return the path of the file that exists once this version of torch has compiled these settings for this device."""
        compiled, device = str(replace(settings, compile=True)), device_name(self.model.device)
        parts = (torch.__version__, device, self.model.dtype_name, self.model.weights, compiled)
        return compiled_folder() / f"warm-{digest(parts)}.json"
