"""Steps through torch.compile: every part is one graph of one shape, and draws the same codes. Traced on a CPU, without Inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import with_drafters, write_emu3
from helpers.models import write_model
from helpers.refusals import rejects
from helpers.toys import ToyTarget
from torch import Tensor
from torch._dynamo import lookup_backend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lanternpp.accept.exact import Exact
from lanternpp.api.options import METHODS
from lanternpp.api.pipeline import Pipeline
from lanternpp.engine import compiled
from lanternpp.engine.compiled import WARM_UP_STEPS, GraphedParts
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
    engine.run = lambda part, *args: (traced if part.__name__ in parts else call)(part, *args)
    return traced


def call(part: Callable[..., Any], *args: Any) -> Any:
    """The part as it is."""
    return part(*args)


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


class Operations(TorchDispatchMode):
    """A recorder as that of CUDA graphs, on a CPU: a replay computes the same operations again, on tensors at the same addresses."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine, self.operations = engine, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::_local_scalar_dense":
            raise RuntimeError("operation not permitted when stream is capturing")
        results = func(*args, **(kwargs or {}))
        inputs = {
            x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)
        }
        new = [x for x in tree_leaves(results) if x.untyped_storage().data_ptr() not in inputs]
        self.operations.append((func, args, kwargs or {}, new))
        return results

    def __call__(self, part: Callable[..., Any], *args: Any) -> tuple[Callable[[], None], Any]:
        state = compiled.tensors([self.engine, self.engine.proposer, args])
        before = [(x, x.clone()) for x in state if 0 not in x.stride()]  # constants are expanded
        self.operations = operations = []
        try:
            with self:
                result = part(*args)
        finally:
            for x, values in before:
                x.copy_(values)
        return partial(self.replay, operations), result

    @staticmethod
    def replay(operations: list[Any]) -> None:
        for func, args, kwargs, new in operations:
            results = tree_leaves(func(*args, **kwargs))
            for old, result in zip(new, results, strict=bool(new)):
                old.copy_(result)


@pytest.fixture(autouse=True)
def reset_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without graphs of earlier tests, in memory and on disk."""
    monkeypatch.setenv(compiled.FOLDER_VARIABLE, str(tmp_path / "compiled"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("case", CASES)
def test_every_part_of_a_step_is_one_graph_that_serves_all_steps(pipe: Pipeline, case: str) -> None:
    method, more = CASES[case]
    plain, traced = (engine(pipe, method, **more) for _ in range(2))
    parts = PARTS if case in DRAFTS.values() else ("_verify",)
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
    pipe: Pipeline, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # as on a GPU
    method, more = CASES[case]
    plain, recorded, timed = (idle_engine(pipe, method, **more) for _ in range(3))
    for each in (recorded, timed):
        each.run = GraphedParts(each, False, Operations(each))
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


def test_a_step_is_compiled_again_for_another_number_of_threads(
    pipe: Pipeline, threads: Callable[[int], None]
) -> None:
    plain, traced = (engine(pipe, "ar") for _ in range(2))
    run = trace(traced, Graphs())
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


def test_engines_that_differ_do_not_share_graphs_once_guards_are_off(pipe: Pipeline) -> None:
    scales, graphs = (3.0, 5.0, 1.0), Graphs()
    pairs = [(engine(pipe, "ar", cfg=cfg), engine(pipe, "ar", cfg=cfg)) for cfg in scales]
    for plain, traced in pairs:
        traced.run = GraphedParts(traced, True, None, backend=graphs)
        for _ in range(WARM_UP_STEPS + 2):
            plain.step()
            traced.step()
    before = graphs.count
    for _ in range(3):
        for plain, traced in pairs:
            plain.step()
            traced.step()
    assert graphs.count == before
    for plain, traced in pairs:
        assert torch.equal(plain.codes, traced.codes) and int(plain.count.min()) == WARM_UP_STEPS + 6


class HostReader(Exact):
    """A custom rule that reads a value on the host."""

    lossless = False

    def relax(self, p: Tensor, code: Tensor) -> Tensor:
        return p / p.sum() if float(p.sum()) == 0 else p


def test_a_part_that_cannot_be_traced_is_not_compiled(pipe: Pipeline) -> None:
    plain, traced = (engine(pipe, "lantern-static", accept=HostReader()) for _ in range(2))
    traced.run = run = GraphedParts(traced, True, None, backend=Graphs())
    plain.step()
    traced.step()
    with pytest.warns(UserWarning, match="verify of a step runs without a graph") as said:
        for _ in range(2):
            plain.step()
            traced.step()
    assert run.failed == ["_verify"] and sum("without a graph" in str(each.message) for each in said) == 1
    assert torch.equal(plain.codes, traced.codes)


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile without Inductor."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


@pytest.mark.usefixtures("traced_only")
def test_warm_settings_are_remembered_and_are_the_default_on_a_gpu(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
):
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
