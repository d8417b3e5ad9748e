"""Observers: what they are shown, which children they count, what the counts predict, and timed steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers.models import write_model
from helpers.toys import BRANCHING, CHAIN, FAR, MarkovTarget, OtherMarkovDrafter, admit_all, engine_of

from lanternpp.api.pipeline import Pipeline
from lanternpp.engine.batching import generate
from lanternpp.engine.decode import Observer
from lanternpp.engine.observers import AcceptanceByRank, Stopwatch, TimedEngine
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees.search import expected_codes
from lanternpp.trees.static import Shape, StaticTree
from lanternpp.types import Admission, Draft, TargetOutput, Tree, Verdict

# A root with four children, the second of which repeats the first's code; the third has two children, the other leaves.
PARENT = [-1, 0, 0, 0, 0, 3, 3]
CODES = [9, 4, 4, 5, 6, 7, 8]
CHILDREN = [[1, 2, 3, 4], *[[-1] * 4] * 2, [5, 6, -1, -1], *[[-1] * 4] * 3]


def output(path: list[int], kept: int) -> TargetOutput:
    """A pass over that draft, of which the first `kept` nodes of a path were accepted."""
    none = torch.zeros(1, 7, 1)
    depth = torch.tensor([[0, 1, 1, 1, 1, 2, 2]])
    tree = Tree(torch.tensor([PARENT]), depth, torch.tensor([CHILDREN]), none.bool(), (4, 2))
    nodes = torch.tensor([path])
    verdict = Verdict(nodes, torch.tensor([kept]), nodes, nodes[:, 0])
    return TargetOutput(Draft(tree, torch.tensor([CODES]), None), none, none, verdict)


def test_rejected_children_are_counted_from_the_accepted_path() -> None:
    counts = AcceptanceByRank(10)
    counts.verified(output([0, 3, 3], 2), torch.tensor([1]))  # then both children of node 3 are rejected
    assert counts.tried.tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]], "the child that repeats a code was rejected"
    assert counts.kept.tolist() == [[0, 0, 1, 0], [0] * 4]
    counts.verified(output([0, 3, 6], 3), torch.tensor([7]))
    counts.verified(output([0, 0, 0], 1), torch.tensor([7]))
    assert counts.tried.tolist() == [[3, 3, 3, 1], [2, 2, 0, 0]]
    assert counts.kept.tolist() == [[0, 0, 2, 0], [0, 1, 0, 0]]
    before = counts.tried.tolist()
    counts.verified(output([0, 3, 3], 2), torch.tensor([8]))  # no room for a complete draft
    counts.verified(output([0, 0, 0], 0), torch.tensor([10]))  # a finished sample
    assert counts.tried.tolist() == before and (int(counts.passes), int(counts.codes)) == (3, 2 + 3 + 1)


def counted(shape: Shape, grid: int, batch: int, verify: str, complete: bool = False) -> AcceptanceByRank:
    """The counts of one step of a batch, or of complete pictures."""
    target = MarkovTarget(CHAIN, grid)
    proposer = TreeProposer(OtherMarkovDrafter(target, FAR), StaticTree(shape))
    engine = engine_of(target, proposer, batch, verify=verify)
    counts = AcceptanceByRank(target.length)
    engine.observers.append(counts)
    admit_all(engine, torch.arange(batch))
    engine.step()
    while complete and min(engine.decided()) < target.length:
        engine.step()
    return counts


@pytest.mark.parametrize("verify", ["token", "traversal"])
@torch.inference_mode()
def test_counts_of_one_tree_predict_another(verify: str) -> None:
    wide = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0))
    counts = counted(wide, 4, 10_000, verify)
    table = (counts.kept / counts.tried.clamp(min=1)).double()
    for shape in (wide, ((0,), (1,)), ((0,), (0, 0), (1,))):
        measured = int(counted(shape, 4, 10_000, verify).codes) / 10_000
        assert expected_codes(table, shape) == pytest.approx(measured, abs=0.03)


@torch.inference_mode()
def test_the_end_of_a_picture_is_not_counted_as_a_rejection() -> None:
    counts = counted(((0,), (1,), (0, 0), (1, 0)), 3, 1, "token", complete=True)
    assert int(counts.codes) == int(counts.passes) + int(counts.kept.sum()) <= 9 - 1


class Log(Observer):
    """Everything that an engine reports."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def entered(self, phase: str) -> None:
        self.seen.append(phase)

    def admitted(self, new: Admission) -> None:
        self.seen.append((new.slot, new.condition))

    def verified(self, output: TargetOutput, count: torch.Tensor) -> None:
        self.seen.append((int(count[0]), int(output.verdict.kept[0])))


def test_an_observer_sees_every_admission_and_every_pass_and_changes_nothing() -> None:
    target, log = MarkovTarget(CHAIN), Log()
    proposer = TreeProposer(OtherMarkovDrafter(target, FAR), StaticTree(BRANCHING))
    plain, watched = (engine_of(target, proposer) for _ in range(2))
    watched.observers += [log, AcceptanceByRank(watched.target.length)]
    (alone,), (seen,) = (generate(one, ["a"], [3]) for one in (plain, watched))
    assert torch.equal(alone.codes, seen.codes) and alone.accepted == seen.accepted
    assert log.seen[:3] == ["draft", "rest", (0, "a")]
    decided = 1
    for i, kept in enumerate(seen.accepted[1:]):
        step = ["draft", "pass", "verify", "observe", (decided, kept), "rest", "draft", "rest"]
        assert log.seen[3 + 8 * i : 11 + 8 * i] == step
        decided += kept
    assert decided == watched.target.length and len(log.seen) == 3 + 8 * (len(seen.accepted) - 1)


def test_the_time_of_observers_is_not_part_of_a_step(monkeypatch) -> None:
    watch = Stopwatch(engine_of(MarkovTarget(CHAIN), NoDraft()))
    phases = "draft", "pass", "verify", "observe", "rest", "draft", "rest"
    for phase, seconds in zip(phases, (0, 1, 3, 6, 10, 15, 21), strict=True):
        monkeypatch.setattr("time.perf_counter", lambda seconds=seconds: seconds)
        watch.entered(phase)
    assert watch.take(30.0) == {"draft": 7, "pass": 2, "verify": 3, "rest": 14}


def test_the_card_of_the_engine_is_timed_where_another_one_is_current(monkeypatch) -> None:
    timed, event = [], SimpleNamespace(record=lambda stream="current": timed.append(stream))
    event.elapsed_time = lambda end: 1000.0
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device="current": timed.append(device))
    codes = SimpleNamespace(device=torch.device("cuda:1"))
    watch = Stopwatch(SimpleNamespace(codes=codes, observers=[]))
    for phase in ("pass", "rest"):
        watch.entered(phase)
    assert watch.take(3.0)["pass"] == 1 and timed == [codes.device] * 3


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = write_model(tmp_path_factory.mktemp("observers") / "tiny")
    return Pipeline.from_pretrained(str(folder), dtype="bfloat16")


@pytest.mark.parametrize("method", ["ar", "eagle", "parallel", "independent", "jacobi-coupled"])
def test_a_timed_engine_moves_its_own_cache_and_the_drafters_together(pipe, method):
    timed = TimedEngine(pipe.new_engine(pipe.settings(method, batch_size=2)))
    timed.admit(["a red tulip"] * 2, range(2))
    made = timed.engine
    half, caches = made.target.length // 2, [made.cache, getattr(made.proposer, "cache", made.cache)]
    for _ in range(3):
        timed.move_midway()
        assert made.count.tolist() == made.proposer.count.tolist() == [half, half]
        assert all((cache.used == made.target.slots + half).all() for cache in caches)
        timed.step()
        assert (made.count > half).all()
