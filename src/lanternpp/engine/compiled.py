"""Steps through torch.compile: every part of a step is one graph, in which a decoder's layer is compiled once for all layers.

On a GPU a graph is replayed as a CUDA graph (mode "reduce-overhead"). Torch keeps compiled code in the user's cache, by torch's
version, the device and the shapes, so that the next process compiles in seconds.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
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

FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # of torch
GUARDED_CALLS = 2  # compiled calls whose guards are checked; the second call records a CUDA graph
MAX_VARIANTS = 64  # graphs of one part: engines differ in batch size, method and guidance
_guard_lock = threading.RLock()  # whether guards are checked is one switch for all threads


def compiled_folder() -> Path:
    """Return the folder of compiled code."""
    return Path(os.environ.get(FOLDER_VARIABLE) or code_cache() / "compiled")


def check_compiler(device: torch.device) -> None:
    """Check that the compiler that torch.compile calls is installed; raise InputError if not."""
    if device.type == "cpu":
        names = ("cl", "g++", "clang++") if sys.platform == "win32" else ("g++", "clang++")
        language, variable = "C++", "CXX"
    else:
        language, variable, names = "C", "CC", ("gcc", "clang")
    if not any(map(shutil.which, (os.environ.get(variable, names[0]), *names))):
        raise InputError(
            f"--compile needs a {language} compiler and none is installed; install {names[0]} or use --no-compile"
        )


class CompiledParts:
    """An engine's `run` that compiles the parts of steps. A part that cannot be compiled is called uncompiled, with a warning.

    The first step is not compiled, since it may allocate tensors of the engine's state, which a graph would write over. After
    `GUARDED_CALLS` more calls only values of tensors change in an engine, so that guards are no longer checked.
    """

    def __init__(self, engine: Engine, **options: Any):
        self.engine, self.options = engine, options
        if not options and engine.codes.device.type == "cuda":
            self.options = {"mode": "reduce-overhead"}
        self.failed: list[str] = []  # names of parts that cannot be compiled
        self._num_calls: Counter[str] = Counter()  # by the part's name
        self._compiled: dict[str, Callable[..., Any]] = {}
        for network in (engine.target, getattr(engine.proposer, "drafter", None)):
            for block in () if network is None else network.modules():
                if isinstance(block, Block):
                    for name, method in _block_methods().items():
                        setattr(block, name, MethodType(method, block))

    def __call__(self, part: Callable[..., Any], *args: Any) -> Any:
        """Call part(*args), a method of the engine or of its proposer."""
        name = part.__name__
        self._num_calls[name] += 1
        if self._num_calls[name] == 1 or name in self.failed:
            return part(*args)
        from torch._dynamo.exc import TorchDynamoException
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

        if part == self.engine.proposer.propose:
            torch.compiler.cudagraph_mark_step_begin()  # results of the previous step may be written over
        if name not in self._compiled:
            # All tensors of an engine keep their addresses, except in lists, which hold the noise of later steps.
            state = [value for value in vars(self.engine).values() if not isinstance(value, list)]
            for tensor in tensors(state):
                torch._dynamo.mark_static_address(tensor)
            self._compiled[name] = torch.compile(part, fullgraph=True, dynamic=False, **self.options)
        skip_guards = self._num_calls[name] > 1 + GUARDED_CALLS
        try:
            with _guard_lock, torch.compiler.set_stance(skip_guard_eval_unsafe=skip_guards):
                return self._compiled[name](*args)
        except (TorchDynamoException, GuardOnDataDependentSymNode) as error:
            self.failed.append(name)
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"{name.strip('_')} of a step is not compiled: {reason}", stacklevel=2)
            return part(*args)
        except RuntimeError as error:
            # A setting of PyTorch that graphs depend on has changed, such as the number of threads.
            if not (skip_guards and "skip_guard_eval_unsafe" in str(error)):
                raise
        self._num_calls[name] = 1
        return self(part, *args)


def compile_steps(engine: Engine) -> None:
    """Let an engine compile its steps from the second step on."""
    os.environ[FOLDER_VARIABLE] = str(compiled_folder())
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_VARIANTS)
    engine.run = CompiledParts(engine)


def warm_up(engine: Engine) -> list[str]:
    """Take steps of a new engine until all parts are compiled; return the names of parts that cannot be compiled."""
    for slot in range(engine.batch):
        engine.admit(slot, None, slot)
    for _ in range(1 + GUARDED_CALLS):
        engine.step()
    return engine.run.failed if isinstance(engine.run, CompiledParts) else []


@cache
def _block_methods() -> dict[str, Callable[..., Any]]:
    """Return methods of `Block` that are compiled once for all layers. The KV cache is written in between."""

    @torch.compiler.nested_compile_region
    def before_region(block: Block, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        qk, v = Block.before_attention(block, x, rotation)
        return qk, v.contiguous()  # torch 2.13 misreads a view into the middle of a region's tensor

    after_region = torch.compiler.nested_compile_region(Block.after_attention)

    def before_attention(block: Block, *args: Tensor) -> tuple[Tensor, Tensor]:
        return (before_region if torch.compiler.is_compiling() else Block.before_attention)(block, *args)

    def after_attention(block: Block, *args: Tensor) -> Tensor:
        return (after_region if torch.compiler.is_compiling() else Block.after_attention)(block, *args)

    return {"before_attention": before_attention, "after_attention": after_attention}


def tensor_bytes(root: object) -> int:
    """Return the bytes of the tensors below an object, as `tensors` finds them; shared memory counts once."""
    storages = (tensor.untyped_storage() for tensor in tensors(root))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def tensors(root: object) -> Iterator[Tensor]:
    """Yield the tensors below an object: in its attributes, containers, and so on. Networks are left out."""
    visited: set[int] = set()
    stack = [root]
    while stack:
        item = stack.pop()
        if id(item) in visited or isinstance(item, nn.Module | nn.Parameter | type):
            continue
        visited.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, list | tuple):
            stack += item
        elif dataclasses.is_dataclass(item):
            stack += [getattr(item, field.name) for field in dataclasses.fields(item)]
        elif hasattr(item, "__dict__"):
            stack += vars(item).values()
