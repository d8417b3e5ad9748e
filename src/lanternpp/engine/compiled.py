"""Steps through torch.compile: every part of a step is one graph, in which a decoder's layer is compiled once for all layers.

On a GPU a graph is replayed as a CUDA graph (mode "reduce-overhead"). What torch compiles it keeps in the user's cache, by its
own version, the device and the shapes, so that the next process compiles in seconds.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lanternpp.engine.decode import Engine
from lanternpp.errors import InputError
from lanternpp.nn.decoder import Block
from lanternpp.util.files import code_cache

FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # torch's own variable
GUARDED = (
    2  # compiled calls of a part whose guards are checked; torch.compile records a CUDA graph in the second
)
SHAPES = 64  # of one part, each compiled by itself: engines differ in batch size, method and guidance
_turn = threading.RLock()  # whether guards are checked is one switch for all threads


def compiled_folder() -> Path:
    """Where compiled code is kept."""
    return Path(os.environ.get(FOLDER) or code_cache() / "compiled")


def check_compiler(device: torch.device) -> None:
    """InputError that names what torch.compile lacks on this machine."""
    names, language = (
        (("CXX", "g++", "clang++"), "C++") if device.type == "cpu" else (("CC", "gcc", "clang"), "C")
    )
    if not any(map(shutil.which, (os.environ.get(names[0], names[1]), *names[1:]))):
        raise InputError(
            f"--compile needs a {language} compiler and none is installed; install {names[1]} or use --no-compile"
        )


class CompiledParts:
    """Calls the parts of an engine's steps compiled, as its `run`. A part that cannot be compiled is called as it is, with a warning.

    A step first runs as it is, since it may make tensors that are kept, which a graph would write over. After `GUARDED` more
    calls nothing about an engine changes but the values of tensors, so that guards are no longer checked.
    """

    def __init__(self, engine: Engine, **options: Any):
        self.engine, self.options = engine, options
        if not options and engine.codes.device.type == "cuda":
            self.options = {"mode": "reduce-overhead"}
        self.failed: list[str] = []
        self._calls: Counter[str] = Counter()
        self._compiled: dict[str, Callable[..., Any]] = {}
        for network in (engine.target, getattr(engine.proposer, "drafter", None)):
            for block in () if network is None else network.modules():
                if isinstance(block, Block):
                    share_code(block)

    def __call__(self, part: Callable[..., Any], *args: Any) -> Any:
        """What part(*args) returns, a method of the engine or of its proposer."""
        name = part.__name__
        before = self._calls[name]
        self._calls[name] += 1
        if not before or name in self.failed:
            return part(*args)
        from torch._dynamo.exc import TorchDynamoException
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

        if part == self.engine.proposer.propose:
            torch.compiler.cudagraph_mark_step_begin()  # results of the step before may be written over
        if name not in self._compiled:
            # All that the engine holds stays in its place from step to step, except its lists, of noise to come.
            lasting = {key: held for key, held in vars(self.engine).items() if not isinstance(held, list)}
            for tensor in tensors(lasting):
                torch._dynamo.mark_static_address(tensor)
            self._compiled[name] = torch.compile(part, fullgraph=True, dynamic=False, **self.options)
        try:
            with _turn, torch.compiler.set_stance(skip_guard_eval_unsafe=before > GUARDED):
                return self._compiled[name](*args)
        except (TorchDynamoException, GuardOnDataDependentSymNode) as error:
            self.failed.append(name)
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"{name.strip('_')} of a step is not compiled: {reason}", stacklevel=2)
            return part(*args)


def compile_steps(engine: Engine) -> None:
    """Let an engine's steps be compiled from its second one on."""
    os.environ[FOLDER] = str(compiled_folder())
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
    engine.run = CompiledParts(engine)


def warm_up(engine: Engine) -> list[str]:
    """Take a new engine through steps until everything is compiled; the parts that could not be."""
    for slot in range(engine.batch):
        engine.admit(slot, None, slot)
    for _ in range(1 + GUARDED):
        engine.step()
    return engine.run.failed if isinstance(engine.run, CompiledParts) else []


def share_code(block: Block) -> None:
    """Compile the parts of a layer before and after attention once for all layers of its kind. The KV cache is written between."""
    for name, part in _parts().items():
        setattr(block, name, MethodType(part, block))


@cache
def _parts() -> dict[str, Callable[..., Any]]:
    """Methods of `Block` that are nested regions where they are compiled."""

    def contiguous(block: Block, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        # torch 2.13 reads a view into the middle of a region's tensor at a wrong place.
        qk, v = Block.before_attention(block, x, rotation)
        return qk, v.contiguous()

    def either(plain: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
        region = torch.compiler.nested_compile_region(compiled)

        def call(block: Block, *args: Tensor) -> Any:
            return (region if torch.compiler.is_compiling() else plain)(block, *args)

        return call

    return {
        "before_attention": either(Block.before_attention, contiguous),
        "after_attention": either(Block.after_attention, Block.after_attention),
    }


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
