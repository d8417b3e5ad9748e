"""Steps through torch.compile: every part is one graph of one shape, and draws the same codes. Traced on a CPU, without Inductor."""

from __future__ import annotations

import gc
import operator
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakSet, ref

import pytest
import torch
from helpers.cases import CASES as CALLS
from helpers.fake_cuda import READS
from helpers.families import with_drafters, write_emu3
from helpers.models import write_model
from helpers.refusals import rejects
from helpers.toys import HostReader, ToyTarget
from torch import Tensor
from torch._dynamo import lookup_backend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lanternpp
from lanternpp.api import accelerate
from lanternpp.api.options import METHODS
from lanternpp.api.pipeline import Pipeline
from lanternpp.engine import compiled
from lanternpp.engine.compiled import WARM_UP_STEPS, CudaGraphs, GraphedParts
from lanternpp.engine.decode import Engine
from lanternpp.engine.observers import TimedEngine
from lanternpp.trees.dynamic import DynamicTree

TREES: dict[str, Any] = {
    "eagle2": DynamicTree(2, 2, 5),
    "ddd": DynamicTree(2, 2, 5, 1, -3.0),
    "chain": "chain-2",
}
SMALL_TREE = [[0], [1], [0, 0]]
# On a chain of the parallel drafter, LANTERN++ is verified as a block.
CHAIN = {"proposer": "parallel", "tree": "chain-2", "residual": "optimal"}
CASES = {name: (name, {}) for name in METHODS} | {"lantern++ parallel": ("lantern++", CHAIN)}
PARTS_OF_DRAFTS = ("proposer", "coupling", "init", "alternatives", "window_rows")
PARTS = ("propose", "_target_forward", "_verify", "_commit", "observe")


def small(tree: str | None) -> Any:
    """A small tree of the same kind."""
    return tree and next((made for name, made in TREES.items() if tree.startswith(name)), SMALL_TREE)


def draft_of(method: str) -> str:
    """What the draft of a method depends on."""
    dials = METHODS[method].dials
    return str([dials.get(name) for name in PARTS_OF_DRAFTS] + [small(dials.get("tree"))])


# A method of each draft. Only verification depends on the rule, so that methods of the same draft share the other graphs.
DRAFTS = {draft_of(method): method for method in METHODS}
# Of a method of each shape of drafts, which is all that passes of the target and commits depend on, all parts are traced.
SHAPES = ("ar", "cool", "lantern", "lantern-jacobi")


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = write_model(tmp_path_factory.mktemp("tiny") / "model", layers=1)
    return Pipeline.from_pretrained(folder, device="cpu", dtype="float64")


@pytest.fixture(scope="module")
def emu3(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A model of transformers, whose rows of codes have ends."""
    folder = tmp_path_factory.mktemp("families") / "emu3"
    write_emu3(folder)
    write_emu3(folder / "independent")
    return Pipeline.from_pretrained(with_drafters(folder), device="cpu", dtype="float64")


def trace(engine: Engine, backend: Graphs, parts: Sequence[str] = PARTS) -> GraphedParts:
    """Trace these parts of an engine's steps."""
    traced = GraphedParts(engine, True, None, backend=backend)
    engine.run = lambda part, *args: (traced if part.__name__ in parts else operator.call)(part, *args)
    return traced


def idle_engine(pipe: Pipeline, method: str, **more: Any) -> Engine:
    """An engine for two samples, whose draft is small."""
    usual = pipe.settings(method, **more)
    more |= {"tree": usual.tree and small(usual.tree), "window": usual.window and 3, "batch_size": 2}
    return pipe.new_engine(pipe.settings(method, **more))


def admitted(made: Engine) -> Engine:
    """The engine in the middle of two samples, one of whose prompts is padded."""
    made.admit(0, "tulip", 3)
    made.admit(1, "a red tulip", 4)
    return made


def engine(pipe: Pipeline, method: str, **more: Any) -> Engine:
    """An engine in the middle of two samples, whose draft is small."""
    return admitted(idle_engine(pipe, method, **more))


class Graphs:
    """A backend that calls another one and records what CUDA graphs do not allow; "aot_eager" splits graphs as Inductor does."""

    def __init__(self, backend: str = "eager") -> None:
        self.count = 0
        self.backend = lookup_backend(backend)
        self.faults: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.count += 1
        made = {torch.tensor, torch.as_tensor, torch.from_numpy}
        self.faults += [
            f"{node} is copied from the host" for node in graph.graph.nodes if node.target in made
        ]
        return self.backend(graph, inputs)


class Graph(TorchDispatchMode):
    """In the place of `torch.cuda.CUDAGraph`, on a CPU: a replay computes the operations again, on tensors at the same addresses."""

    stream = threading.Lock()  # which records one graph at a time
    pools: ClassVar = defaultdict[int, WeakSet[Any]](WeakSet)  # the graphs of each
    new_pool = partial(next, iter(range(1 << 20)))

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        if pool in self.pools and not self.pools[pool]:
            raise RuntimeError("the pool was freed with its last graph")
        assert self.stream.acquire(blocking=False)
        self.pools[pool].add(self)
        self.operations: list[Any] = []
        self.before: dict[int, Any] = {}  # by address: memory that was written to, and its values
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        self.stream.release()
        for memory, values in self.before.values():
            memory.copy_(values)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::").startswith(READS):
            raise RuntimeError("operation not permitted when stream is capturing")
        given = [x.untyped_storage() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for memory in given if func._schema.is_mutable else ():
            self.before.setdefault(memory.data_ptr(), (memory, memory.clone()))
        results, addresses = func(*args, **(kwargs or {})), {memory.data_ptr() for memory in given}
        new = [x for x in tree_leaves(results) if x.untyped_storage().data_ptr() not in addresses]
        self.operations.append((func, args, kwargs or {}, new))
        return results

    def replay(self) -> None:
        for func, args, kwargs, new in self.operations:
            results = tree_leaves(func(*args, **kwargs))
            for old, result in zip(new, results, strict=bool(new)):
                old.copy_(result)


@pytest.fixture
def cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], CudaGraphs]:
    """Makes the recorder of an engine as if its CPU were a GPU."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", Graph.new_pool)
    monkeypatch.setattr(compiled, "_recording_stream", lambda device: SimpleNamespace(device=device))
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, nullcontext)
    return lambda engine: CudaGraphs(engine.codes.device)


@pytest.fixture(autouse=True)
def reset_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without graphs of earlier tests, in memory and on disk."""
    monkeypatch.setenv(compiled.FOLDER_VARIABLE, str(tmp_path / "compiled"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Others have the verification of the two that are left out.
@pytest.mark.parametrize("case", sorted(CASES.keys() - {"eagle2", "lantern-static"}))
def test_every_part_of_a_step_is_one_graph_that_serves_all_steps(pipe: Pipeline, case: str) -> None:
    method, more = CASES[case]
    plain, traced = (engine(pipe, method, **more) for _ in range(2))
    parts = ("propose", "_verify", "observe") if case in DRAFTS.values() else ("_verify",)
    parts = PARTS if case in SHAPES else parts
    graphs, seen = Graphs("aot_eager"), []
    run = trace(traced, graphs, parts)
    for _ in range(WARM_UP_STEPS + 3):
        plain.step()
        traced.step()
        seen.append(graphs.count)
    assert run.failed == graphs.faults == []
    assert seen == [0] + [len(parts)] * (WARM_UP_STEPS + 2)
    assert torch.equal(plain.codes, traced.codes) and torch.equal(plain.count, traced.count)


@pytest.mark.parametrize("case", CASES)
def test_recorded_parts_draw_the_same_codes(
    pipe: Pipeline, case: str, cuda_graphs: Callable[[Engine], CudaGraphs]
) -> None:
    method, more = CASES[case]
    plain, recorded, timed = (idle_engine(pipe, method, **more) for _ in range(3))
    for each in (recorded, timed):
        each.run = GraphedParts(each, False, cuda_graphs(each))
    TimedEngine(timed).engine.observers.clear()  # its parts are recorded before a sample is admitted
    for each in (plain, recorded, timed):
        admitted(each)
    for step in range(8):
        for each in (plain, recorded, timed):
            if step == 4:
                each.admit(1, "a tulip", 9)
            each.step()
            codes, plain_codes = (x.codes[:, : x.target.length] for x in (each, plain))
            assert torch.equal(plain_codes, codes) and torch.equal(plain.count, each.count)
    for run in (recorded.run, timed.run):
        assert isinstance(run, GraphedParts) and run.failed == [] and set(run._recorded) == set(PARTS)


def test_a_model_of_the_callers_is_recorded_again_at_every_call(
    tmp_path: Path, cuda_graphs: Callable[[Engine], CudaGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CALLS["emu3"](tmp_path)
    model, given = case.model, case.inputs(2) | {"do_sample": False}
    expected = [model.generate(**given)]
    weight = model.get_output_embeddings().weight
    weight.data = -weight.data
    expected.append(model.generate(**given))
    for module in (compiled, accelerate):
        monkeypatch.setattr(module, "recorder_of", cuda_graphs)
    lanternpp.accelerate(model, method="jacobi", window=5)
    for sequences in reversed(expected):
        drawn = model.generate(**given)
        assert torch.equal(drawn, sequences) and model.generate.codes_per_pass > 1
        weight.data = -weight.data
    (engine,) = vars(model)[accelerate.HELD]._idle_engines.values()
    assert engine.run.failed == [] and set(engine.run._recorded) == set(PARTS)


def test_one_thread_records_at_a_time(cuda_graphs: Callable[[Engine], CudaGraphs], pipe: Pipeline) -> None:
    records, recorded, x = [cuda_graphs(idle_engine(pipe, "ar")) for _ in range(2)], [], torch.ones(2)
    other = threading.Thread(target=lambda: recorded.append(records[1](torch.neg, x)))

    def meanwhile(x: Tensor) -> Tensor:
        other.start()
        other.join(0.2)
        return x + 1

    recorded.append(records[0](meanwhile, x))
    other.join()
    for replay, _ in recorded:
        replay()
    assert [result.tolist() for _, result in recorded] == [[2, 2], [-1, -1]]


def test_a_step_is_compiled_again_for_another_number_of_threads(
    pipe: Pipeline, threads: Callable[[int], None]
) -> None:
    plain, traced = (engine(pipe, "ar") for _ in range(2))
    run = trace(traced, Graphs(), ("_target_forward",))
    for count in (1,) * (WARM_UP_STEPS + 2) + (2, 1):
        threads(count)
        plain.step()
        traced.step()
    assert run.failed == [] and torch.equal(plain.codes, traced.codes)


# A pass over one node, a tree that the drafter's probabilities shape, a window of codes, and a chain. Verification and the commit
# do not depend on the target.
@pytest.mark.parametrize("method", ["ar", "ddd", "jacobi", "parallel"])
def test_the_passes_of_a_model_of_transformers_are_one_graph(emu3: Pipeline, method: str) -> None:
    plain, traced, graphs = engine(emu3, method), engine(emu3, method), Graphs()
    parts = ("propose", "_target_forward", "observe")
    run = trace(traced, graphs, parts)
    for _ in range(2):
        plain.step()
        traced.step()
    assert run.failed == graphs.faults == [] and graphs.count == len(parts)
    assert torch.equal(plain.codes, traced.codes)


def test_a_compiled_engine_is_freed_with_its_last_reference(pipe: Pipeline) -> None:
    made = engine(pipe, "parallel")
    made.run = GraphedParts(made, True, None, backend="eager")
    for _ in range(WARM_UP_STEPS):
        made.step()
    gc.collect()  # what the compiler leaves
    reference = ref(made)
    del made
    assert reference() is None


def test_a_part_that_cannot_be_traced_is_not_compiled(pipe: Pipeline) -> None:
    plain, traced = (engine(pipe, "lantern-static", accept=HostReader()) for _ in range(2))
    run = trace(traced, Graphs(), ("_verify",))
    plain.step()
    traced.step()
    with pytest.warns(UserWarning, match="verify of a step runs without a graph") as said:
        for _ in range(2):
            plain.step()
            traced.step()
    assert run.failed == ["_verify"] and sum("without a graph" in str(each.message) for each in said) == 1
    assert torch.equal(plain.codes, traced.codes)


def test_warm_settings_are_remembered_and_are_the_default_on_a_gpu(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # without Inductor
    settings = pipe.settings("parallel", tree="chain-2")
    assert not pipe._mark(settings).exists() and pipe.warm(settings) == []
    assert pipe._mark(settings).exists() and not pipe._mark(pipe.settings("ar")).exists()
    plain = pipe("a tulip", method="parallel", tree="chain-2", output_type="codes")
    assert plain.stats.settings["compile"] is False  # a CPU
    monkeypatch.setattr(type(pipe), "is_warm", lambda self, settings: self._mark(settings).exists())
    made = pipe("a tulip", method="parallel", tree="chain-2", output_type="codes")
    assert made.stats.settings["compile"] is True and torch.equal(made.codes, plain.codes)
    eager = pipe("a tulip", method="parallel", tree="chain-2", output_type="codes", compile=False)
    assert eager.stats.settings["compile"] is False


def test_a_compiler_that_is_missing_is_named(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    rejects(r"needs a C\+\+ compiler and none is installed", pipe, "a tulip", compile=True)


def test_the_pass_of_a_training_is_one_graph() -> None:
    target = ToyTarget()
    codes = torch.arange(32).view(2, 16) % target.vocab
    prompt = target.prompt(["a", "bcd"], 1).embeds
    traced = torch.compile(target.forward_sequence, fullgraph=True, backend="eager")
    assert torch.allclose(traced(prompt, codes), target.forward_sequence(prompt, codes), atol=1e-10)
