"""A cache of engines by settings, bounded by the memory that they take."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from lanternpp.api.options import Settings
from lanternpp.engine.decode import Engine

BYTES = 1 << 30


class EngineCache:
    """At most `most` bytes of engines; beyond that the least recently used are dropped, but never the latest.

    It is not thread-safe: `Pipeline` has the lock.
    """

    def __init__(self, make: Callable[[Settings], Engine], most: int = BYTES):
        self.make, self.most = make, most
        self._kept: OrderedDict[Settings, Engine] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, settings: Settings) -> Engine:
        """The engine for these settings, made now or before, and kept."""
        engine = self._kept.get(settings) or self.make(settings)
        self.keep(settings, engine)
        return engine

    def take(self, settings: Settings) -> Engine:
        """An engine for exclusive use; it is kept again once it is given to `keep`."""
        return self._kept.pop(settings, None) or self.make(settings)

    @contextmanager
    def lend(self, settings: Settings) -> Iterator[Engine]:
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


def tensor_bytes(*held: object) -> int:
    """Bytes of the tensors that objects of ours hold, as `tensors` gives them; shared memory counts once."""
    storages = (tensor.untyped_storage() for tensor in tensors(*held))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def tensors(*held: object) -> Iterator[Tensor]:
    """The tensors that objects of ours hold, directly or not. Networks are left out."""
    seen: set[int] = set()
    todo = list(held)
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, nn.Module | nn.Parameter | type):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            yield thing
        elif isinstance(thing, dict):
            todo += thing.values()
        elif isinstance(thing, list | tuple):
            todo += thing
        elif dataclasses.is_dataclass(thing):
            todo += [getattr(thing, each.name) for each in dataclasses.fields(thing)]
        elif hasattr(thing, "__dict__"):
            todo += vars(thing).values()
