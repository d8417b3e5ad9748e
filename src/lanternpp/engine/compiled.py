"""The parts of steps as graphs: compiled by torch.compile on request, and on a GPU recorded as CUDA graphs.

A decoder's layer is compiled once for all layers. Torch keeps compiled code in the user's cache, by torch's version, the device and
the shapes, so that the next process compiles in seconds.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lanternpp.engine.decode import Engine
from lanternpp.errors import InputError
from lanternpp.nn.decoder import Block, is_hooked
from lanternpp.util.files import code_cache

FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # of torch
GRAPHS_VARIABLE = "LANTERNPP_GRAPHS"  # 0: no CUDA graphs
MAX_VARIANTS = 64  # graphs of one part: engines differ in batch size, method and guidance
WARM_UP_STEPS = 3  # until all parts are compiled and recorded


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


def recorder_of(engine: Engine) -> Recorder | None:
    """Return a recorder of the parts of an engine's steps; None unless all weights are on one GPU and all code is the library's.

    A caller's own proposer or tree, and hooks on modules of the model, may keep state in Python or replace tensors. Chains that end
    early and latents are drawn with host reads.
    """
    device, target = engine.codes.device, engine.target
    if device.type != "cuda" or target.channels or getattr(engine.proposer, "min_survival", 0):
        return None
    parts = engine.proposer, getattr(engine.proposer, "builder", engine.proposer)
    own = all(type(part).__module__.startswith("lanternpp.") for part in parts)
    own = own and not any(map(is_hooked, target.modules()))
    one_gpu = {weight.device for weight in target.parameters()} == {device}
    enabled = target.decoder.ranks == 1 and os.environ.get(GRAPHS_VARIABLE) != "0"
    return CudaGraphs(device) if own and one_gpu and enabled else None


class GraphedParts:
    """An engine's `run`, which compiles the parts of steps, records them as CUDA graphs, or both.

    The first call of a part does neither, since it may allocate tensors of the engine's state; they keep their addresses from then
    on. The next call compiles the part. The call after it records the operations of a call, and all later calls replay them: their
    results have the same addresses in every step. A part for which this fails is called as it is, with a warning, and no part is
    recorded after it.
    """

    def __init__(self, engine: Engine, compile: bool, record: Recorder | None, **options: Any):
        """record: None for no CUDA graphs. options: of torch.compile."""
        self.compile, self.record, self.options = compile, record, options
        self.failed: list[str] = []  # names of parts that cannot be compiled or recorded
        self._num_calls: Counter[str] = Counter()  # by the part's name
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._recorded: dict[str, tuple[Callable[[], None], Any]] = {}
        for network in (engine.target, getattr(engine.proposer, "drafter", None)) if compile else ():
            for block in () if network is None else network.modules():
                if isinstance(block, Block):
                    for name, method in _block_methods().items():
                        setattr(block, name, MethodType(method, block))

    def forget(self, record: Recorder | None) -> None:
        """Record the parts again by another recorder, as weights may have been replaced; None: record no part from now on."""
        self.record = None if self.failed else record
        self._recorded.clear()
        self._num_calls.clear()

    def __call__(self, part: MethodType, *args: Any) -> Any:
        """Call part(*args), a method of the engine or of its proposer."""
        name = part.__name__
        if name in self._recorded:
            replay, result = self._recorded[name]
            replay()
            return result
        self._num_calls[name] += 1
        if self._num_calls[name] == 1 or name in self.failed:
            return part(*args)
        run: Callable[..., Any] = part
        if self.compile:
            if name not in self._compiled:
                function = part.__func__  # as a compiled method would keep the engine in memory
                self._compiled[name] = torch.compile(function, fullgraph=True, dynamic=False, **self.options)
            run = partial(self._compiled[name], part.__self__)
        try:
            if self.record is None or (self.compile and self._num_calls[name] == 2):
                return run(*args)
            replay, result = self.record(run, *args)
        except RuntimeError as error:  # errors of torch.compile and of CUDA are RuntimeErrors
            self.failed.append(name)
            self.record = None  # later parts get its results, whose addresses change
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"{name.strip('_')} of a step runs without a graph: {reason}", stacklevel=2)
            return part(*args)
        replay()
        self._recorded[name] = replay, result
        return result


Recorder = Callable[..., tuple[Callable[[], None], Any]]
"""record(part, *args) -> replay, result: the operations of part(*args) are recorded, and each replay() computes the result."""


_recording_stream = cache(torch.cuda.Stream)  # one a device, as cuBLAS keeps a workspace for each stream
_recording = threading.Lock()  # as a stream records for one thread at a time


class CudaGraphs:
    """The `Recorder` of an engine on a GPU. All its graphs share one pool of memory, as they are replayed in the order of a step."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _recording_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, part: Callable[..., Any], *args: Any) -> tuple[Callable[[], None], Any]:
        """Record part(*args), without computing it. Other threads may use the GPU meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with _recording, torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                result = part(*args)
            finally:
                graph.capture_end()
        return graph.replay, result


def graph_steps(engine: Engine, compile: bool) -> None:
    """Let an engine run the parts of its steps as graphs, from the second step on, where they can be."""
    if compile:
        os.environ[FOLDER_VARIABLE] = str(compiled_folder())
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_VARIANTS)
    record = recorder_of(engine)
    if compile or record:
        engine.run = GraphedParts(engine, compile, record)


def warm_up(engine: Engine) -> list[str]:
    """Take steps of a new engine until its parts are compiled and recorded; return the names of parts for which this fails."""
    if not isinstance(engine.run, GraphedParts):
        return []
    for _ in range(WARM_UP_STEPS):
        engine.step()  # of no sample
    return engine.run.failed


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
    """Return the bytes of the tensors below an object: in its attributes, containers, and so on. Networks are left out."""
    sizes, visited, stack = dict[int, int](), set[int](), [root]  # sizes by address, as tensors share memory
    while stack:
        item = stack.pop()
        if id(item) in visited or isinstance(item, nn.Module | nn.Parameter | type):
            continue
        visited.add(id(item))
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, list | tuple):
            stack += item
        elif dataclasses.is_dataclass(item):
            stack += [getattr(item, field.name) for field in dataclasses.fields(item)]
        elif hasattr(item, "__dict__"):
            stack += vars(item).values()
    return sum(sizes.values())
