"""The floor of a step: what is recorded, what it counts, and that the parts add up to the step."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from models import write_model
from torch.utils.flop_counter import FlopCounterMode
from toys import ToyTarget, eagle

from lanternpp.accept.exact import Exact
from lanternpp.engine import cache
from lanternpp.engine.decode import Engine
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.stopwatch import TimedEngine
from lanternpp.errors import InputError
from lanternpp.evaluation import floor
from lanternpp.evaluation.floor import PARTS, Limits, measure_floors, measure_limits
from lanternpp.evaluation.recorded import ATTENTION, LINEARS, OTHERS, RecordedStep, Replay
from lanternpp.evaluation.speed import parse_methods
from lanternpp.pipeline import Pipeline
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees.static import StaticTree

DIM, HIDDEN, VOCAB, LAYERS = 16, 24, 12, 2  # of the toy
SHAPE = ((0,), (1,), (0, 0))


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    return Pipeline.from_pretrained(
        str(write_model(tmp_path_factory.mktemp("floor") / "tiny")), dtype="bfloat16"
    )


def engine(dtype: torch.dtype, drafted: bool, batch: int = 2, cfg: float = 2.0) -> Engine:
    target = ToyTarget(VOCAB, layers=LAYERS)
    drafter = eagle(target).to(dtype)
    proposer = TreeProposer(drafter, StaticTree(SHAPE)) if drafted else NoDraft()
    made = Engine(target.to(dtype), proposer, Exact(), Sampling(), Guidance(cfg), batch)
    for slot in range(batch):
        made.admit(slot, "a", slot)
    return made


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("cfg", [1.0, 2.0])
def test_the_arithmetic_is_that_of_torchs_own_counter(drafted, cfg, monkeypatch):
    monkeypatch.setattr(
        cache, "TILES", False
    )  # attention as products, as the counter knows no fused one of a CPU
    recorded = RecordedStep(engine(torch.bfloat16, drafted, cfg=cfg))
    made = engine(torch.bfloat16, drafted, cfg=cfg)
    with FlopCounterMode(display=False) as counter:
        made.step()
    assert recorded.flops == counter.get_total_flops() > 0
    fused = RecordedStep(engine(torch.float64, drafted, cfg=cfg))
    assert fused.flops == recorded.flops


def test_the_bytes_of_a_plain_step_are_those_of_its_operands_and_results():
    made = engine(torch.float64, drafted=False)
    recorded = RecordedStep(made)
    rows, slots, size = 4, made.cache.kv.shape[-2], 8
    linears = ((DIM, 3 * DIM), (DIM, DIM), (DIM, 2 * HIDDEN), (HIDDEN, DIM))
    numbers = sum(rows * (i + o) + i * o for i, o in linears)
    numbers += rows * (2 * DIM + 2 * slots * DIM)  # queries and results, keys and values
    head = rows * (DIM + VOCAB) + DIM * VOCAB
    mask = rows * slots
    assert recorded.rows == rows
    assert recorded.bytes == size * (LAYERS * (numbers + mask) + head)


def test_the_calls_are_those_of_the_targets_own_layers_in_their_order():
    made = engine(torch.float64, drafted=True)
    recorded = RecordedStep(made)
    blocks = made.target.decoder.blocks
    expected = [w.weight for b in blocks for w in (b.wqkv, b.wo, b.w13, b.w2)]
    assert [call.args[1] for call in recorded.calls[LINEARS]] == expected
    keys = [call.args[1] for call in recorded.calls[ATTENTION]]
    assert len({x.data_ptr() for x in keys}) == len(keys) == LAYERS  # every layer reads its own
    assert {x.untyped_storage().data_ptr() for x in keys} == {made.cache.kv.untyped_storage().data_ptr()}
    assert len(recorded.calls[OTHERS]) > 10
    inputs = [call.args[0] for call in recorded.calls[LINEARS]]
    assert all(x.shape[:2] == (4, 4) for x in inputs)  # rows, nodes
    assert (
        inputs[0].data_ptr() != inputs[4].data_ptr() or inputs[1] is inputs[5]
    )  # the second layer's are the first's
    for calls in recorded.calls.values():
        assert Replay(calls, torch.device("cpu")).seconds() > 0


def test_weights_that_were_packed_are_timed_packed(pipe):
    made = pipe.new_engine(pipe.settings("ar", batch_size=1))
    made.admit(0, "a red tulip", 0)
    names = {call.func.__name__.split(".")[0] for call in RecordedStep(made).calls[LINEARS]}
    packed = any("Packed" in type(module).__name__ for module in pipe.target.decoder.modules())
    assert names == {"_linear_pointwise" if packed else "linear"}


@pytest.mark.parametrize("method", ["ar", "eagle", "parallel", "independent", "jacobi-coupled"])
def test_a_timed_engine_moves_its_own_cache_and_the_drafters_together(pipe, method):
    settings = pipe.settings(method, batch_size=2)
    timed = TimedEngine(pipe.new_engine(settings))
    timed.admit(["a red tulip"] * 2, range(2))
    made, at = timed.engine, []
    for _ in range(3):
        timed.move_to(torch.full_like(made.count, 8))
        own = getattr(made.proposer, "cache", None)
        waiting = getattr(made.proposer, "waiting", 0)  # codes that the parallel drafter has not run yet
        at.append((made.count.tolist(), made.proposer.count.tolist(), made.cache.used.tolist()))
        at[-1] += () if own is None else ((own.used[:2] + waiting).tolist(),)
        timed.step()
        assert (made.count > 8).all()
    assert at[0] == at[1] == at[2] and at[0][0] == at[0][1] == [8, 8]


def test_the_parts_add_up_to_the_step_for_every_method_and_batch_size(pipe):
    seen = []
    field = parse_methods("eagle tree=chain-2, jacobi")
    rows = measure_floors(pipe, field, [1, 2], ["a tulip"], {"cfg": 3.0}, 2, lambda *at: seen.append(at))
    labels = ("ar", "eagle tree=chain-2", "jacobi")
    assert [(row.batch_size, row.method) for row in rows] == list(product((1, 2), labels))
    assert [row.rows for row in rows] == [2, 6, 34, 4, 12, 68]
    assert seen == [(i, 8) for i in range(8)]
    limits = Limits(1e9, 1e12)
    for row, figures in zip(rows, floor.figures(rows, limits), strict=True):
        assert sum(figures[part] for part in PARTS) == pytest.approx(row.step)
        assert figures["floor"] == row.linears + row.attention > 0
        assert figures["ratio"] == pytest.approx(row.step / figures["floor"])
        assert figures["read"] == row.bytes / 1e9 and figures["compute"] == row.flops / 1e12
        assert len(floor.cells(figures)) == len(floor.HEADINGS)
    assert rows[0].draft < rows[1].draft and rows[0].flops < rows[1].flops < rows[4].flops
    with pytest.raises(InputError, match="neighbours"):
        measure_floors(pipe, parse_methods("lantern++ k=99"), [1], ["a tulip"], {}, 1)


def test_of_a_compiled_step_the_parts_are_those_of_the_one_that_is_not(pipe, monkeypatch):
    monkeypatch.setattr("lanternpp.loaded.compile_steps", lambda engine: None)
    recorded, timed = [], []
    record, step = floor.RecordedStep, TimedEngine.step
    monkeypatch.setattr(floor, "RecordedStep", lambda made: recorded.append(made.target) or record(made))
    monkeypatch.setattr(TimedEngine, "step", lambda self: timed.append(self.engine.target) or step(self))
    measure_floors(pipe, parse_methods("ar"), [1], ["a tulip"], {"compile": True}, 1)
    assert recorded == [pipe.target] and pipe.target not in timed and len(timed) == 3


def test_the_limits_of_a_machine_are_measured(monkeypatch):
    monkeypatch.setattr(floor, "BUFFER", 1 << 16)
    monkeypatch.setattr(floor, "SIDES", {"cpu": 64})
    limits = measure_limits(torch.device("cpu"), torch.float32)
    assert limits.bandwidth > 1e6 and limits.rate > 1e6
