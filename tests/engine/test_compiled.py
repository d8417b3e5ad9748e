"""Steps through torch.compile: every part is one graph of one shape, and draws the same codes. Traced on a CPU, without Inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import write_model
from helpers.toys import ToyTarget, eagle, neighbours, parallel
from torch import Tensor

from lanternpp.accept.base import Acceptance
from lanternpp.accept.exact import Exact
from lanternpp.accept.neighbours import Lantern, LanternPlusPlus
from lanternpp.api.pipeline import Pipeline
from lanternpp.engine import compiled
from lanternpp.engine.compiled import GUARDED, CompiledParts
from lanternpp.engine.decode import Engine
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify.choose import VERIFIERS
from lanternpp.errors import InputError
from lanternpp.proposers.jacobi import Jacobi
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.proposers.parallel import Parallel
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees.dynamic import DynamicTree
from lanternpp.trees.shapes import chain
from lanternpp.trees.static import StaticTree

BUSHY = StaticTree(((0,), (1,), (0, 0), (0, 1)))
TARGET = ToyTarget()
TABLE = neighbours(TARGET.codebook, 5)
METHODS = {
    "ar": (NoDraft, Exact(), "token"),
    "eagle": (lambda: TreeProposer(eagle(TARGET), BUSHY), Exact(), "traversal"),
    "eagle2": (lambda: TreeProposer(eagle(TARGET), DynamicTree(3, 2, 8)), Exact(), "token"),
    "lantern": (lambda: TreeProposer(eagle(TARGET), BUSHY), Lantern(TABLE, 0.3), "token"),
    "parallel": (lambda: Parallel(parallel(TARGET), StaticTree(chain(3))), Exact(), "block"),
    "lantern++": (
        lambda: Parallel(parallel(TARGET), StaticTree(chain(3))),
        LanternPlusPlus(TABLE, 2.0, "optimal"),
        "block",
    ),
    "jacobi-coupled": (lambda: Jacobi(3, "maximal", "mixed", 2), Exact(), "traversal"),
}
PARTS = 5  # draft, pass, verification, commit, what the proposer observes


def engine(method: str, rule: Acceptance | None = None, cfg: float = 3.0) -> Engine:
    """An engine in the middle of two samples, one of whose prompts is padded."""
    proposer, own, verify = METHODS[method]
    parts = proposer(), rule or own, Sampling(), Guidance(cfg)
    made = Engine(TARGET, *parts, 2, False, VERIFIERS[verify])
    made.admit(0, "a", 3)
    made.admit(1, "bcd", 4)
    return made


class Graphs:
    """A backend that runs what is traced as it is, and looks for what CUDA graphs do not allow."""

    def __init__(self) -> None:
        self.count = 0
        self.faults: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.count += 1
        made = {torch.tensor, torch.as_tensor, torch.from_numpy}
        self.faults += [
            f"{node} is copied from the host" for node in graph.graph.nodes if node.target in made
        ]
        kept = [hasattr(x, "_dynamo_static_input_type") for x in inputs]

        def run(*given: Any) -> Any:
            before = [x.clone() if isinstance(x, Tensor) else x for x in given]
            out = graph.forward(*given)
            for i, (old, new) in enumerate(zip(before, given, strict=True)):
                if isinstance(new, Tensor) and not torch.equal(old, new) and not kept[i]:
                    self.faults.append(f"input {i} is written to, and may be somewhere else in the next step")
            return out

        return run


@pytest.fixture(autouse=True)
def nothing_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without what earlier tests compiled, in memory and on disk."""
    monkeypatch.setenv(compiled.FOLDER, str(tmp_path / "compiled"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("method", METHODS)
def test_every_part_of_a_step_is_one_graph_that_serves_all_steps(method):
    plain, traced, graphs, seen = engine(method), engine(method), Graphs(), []
    traced.run = run = CompiledParts(traced, backend=graphs)
    for _ in range(GUARDED + 3):
        plain.step()
        traced.step()
        seen.append(graphs.count)
    assert run.failed == graphs.faults == []
    assert seen == [0] + [PARTS] * (GUARDED + 2)
    assert torch.equal(plain.codes, traced.codes) and torch.equal(plain.count, traced.count)


def test_engines_that_differ_do_not_share_graphs_once_guards_are_off():
    scales, graphs = (3.0, 5.0, 1.0), Graphs()
    pairs = [(engine("ar", cfg=cfg), engine("ar", cfg=cfg)) for cfg in scales]
    for plain, traced in pairs:
        traced.run = CompiledParts(traced, backend=graphs)
        for _ in range(GUARDED + 2):
            plain.step()
            traced.step()
    before = graphs.count
    for _ in range(3):
        for plain, traced in pairs:
            plain.step()
            traced.step()
    assert graphs.count == before
    for plain, traced in pairs:
        assert torch.equal(plain.codes, traced.codes) and int(plain.count.min()) == GUARDED + 6


class Reader(Exact):
    """A rule of a user's own that looks at a value."""

    lossless = False

    def relax(self, p: Tensor, code: Tensor) -> Tensor:
        return p / p.sum() if float(p.sum()) != 1 else p


def test_a_part_that_cannot_be_traced_is_called_as_it_is():
    plain, traced = engine("lantern", Reader()), engine("lantern", Reader())
    traced.run = run = CompiledParts(traced, backend=Graphs())
    plain.step()
    traced.step()
    with pytest.warns(UserWarning, match="verify of a step is not compiled") as said:
        for _ in range(2):
            plain.step()
            traced.step()
    assert run.failed == ["_verify"] and sum("not compiled" in str(each.message) for each in said) == 1
    assert torch.equal(plain.codes, traced.codes)


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = write_model(tmp_path_factory.mktemp("tiny") / "model")
    return Pipeline.from_pretrained(folder, device="cpu", dtype="float64")


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile without Inductor."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


@pytest.mark.usefixtures("traced_only")
def test_warm_settings_are_remembered_and_are_the_default_on_a_gpu(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
):
    settings = pipe.settings("parallel", tree="chain-2")
    assert not pipe._engines.mark(settings).exists() and pipe.warm(settings) == []
    assert pipe._engines.mark(settings).exists() and not pipe._engines.mark(pipe.settings("ar")).exists()
    plain = pipe("a tulip", method="parallel", tree="chain-2", output_type="codes")
    assert plain.stats.settings["compile"] is False  # a CPU
    monkeypatch.setattr(type(pipe), "is_warm", lambda self, settings: self._engines.mark(settings).exists())
    made = pipe("a tulip", method="parallel", tree="chain-2", output_type="codes")
    assert made.stats.settings["compile"] is True and torch.equal(made.codes, plain.codes)
    eager = pipe("a tulip", method="parallel", tree="chain-2", output_type="codes", compile=False)
    assert eager.stats.settings["compile"] is False


def test_a_compiler_that_is_missing_is_named(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(InputError, match=r"needs a C\+\+ compiler and none is installed"):
        pipe("a tulip", compile=True)


def test_the_pass_of_a_training_is_one_graph():
    codes = torch.arange(32).view(2, 16) % TARGET.vocab
    prompt = TARGET.prompt(["a", "bcd"], 1).embeds
    traced = torch.compile(TARGET.forward_sequence, fullgraph=True, backend="eager")
    assert torch.allclose(traced(prompt, codes), TARGET.forward_sequence(prompt, codes), atol=1e-10)
