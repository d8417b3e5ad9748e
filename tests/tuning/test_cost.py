"""Costs fitted to made-up probes whose law is known."""

from __future__ import annotations

import pytest
import torch

from lanternpp.evaluation.stopwatch import trimmed
from lanternpp.trees.search import expected, expected_tried
from lanternpp.trees.shapes import SHAPES, Shape, chain
from lanternpp.tuning.cost import Curve, fit, linear_terms, nonnegative, rising
from lanternpp.tuning.probe import Probe
from lanternpp.tuning.search import best_by_size, choose, hand_made_shapes, predict, probe_shapes

TABLE = torch.tensor([[0.8, 0.4, 0.2, 0.1]] * 10, dtype=torch.float64)


def law(shape: Shape) -> tuple[float, float, float]:
    """Seconds of drafting, a pass, and judging."""
    seen = linear_terms(shape, expected_tried(TABLE, shape), expected(TABLE, shape))
    depth, inner = seen[0][1], seen[0][2]
    return 1.0 + 2 * depth + 0.1 * inner, 16.0 + 0.5 * (len(shape) + 1), 0.5 + 0.2 * seen[1][1]


def made(shape: Shape, slow: float = 1.0) -> Probe:
    draft, look, judge = law(shape)
    times = {"plain_begin": 10.0, "plain_look": 16.5, "plain_step": 17.0, "begin": 12.0, "pixels": 30.0}
    times |= {"draft": draft, "look": look, "judge": judge}
    return Probe(
        [list(path) for path in shape],
        passes=100,
        codes=round(100 * expected(TABLE, shape)),
        judged=expected_tried(TABLE, shape),
        tried=[[0.0]],
        kept=[[0.0]],
        **{name: value * slow for name, value in times.items()},
    )


def test_costs_are_found_again_and_a_slow_moment_does_not_bend_them() -> None:
    shapes = [tuple(s) for s in probe_shapes(64, 10) if max(map(max, s)) < 4]
    assert len(shapes) > 5
    drawn = [made(shape, slow) for i, shape in enumerate(shapes) for slow in (1.0, 1.0, 4.0 + i)]
    costs = fit(drawn, length=256)
    assert costs.plain == 17.0 and costs.begin == 12.0 and costs.noise < 0.01
    for shape in (chain(2), SHAPES["deep-8"], chain(5)):
        step, (draft, look, judge) = costs.step_cost(shape, TABLE), law(shape)
        assert (step.draft, step.target_pass, step.verify) == pytest.approx((draft, look, judge), rel=0.03)
    shape = SHAPES["deep-8"]
    passes = (255 + (expected(TABLE, shape) - 1) / 2) / expected(TABLE, shape)
    whole = 12 + passes * sum(law(shape)) + 30
    assert costs.speedup(shape, TABLE) == pytest.approx((10 + 255 * 17 + 30) / whole, rel=0.02)


def test_the_tree_chosen_is_no_slower_than_any_other_looked_at() -> None:
    costs = fit([made(shape) for shape in probe_shapes(24, 8) if max(map(max, shape)) < 4], length=256)
    sizes = best_by_size(TABLE, costs, 24, 8)
    assert [len(size.shape) for size in sizes] == list(range(1, 25))
    found = choose(sizes, TABLE, costs, 24, 8)
    hand_made = [predict(shape, TABLE, costs) for shape in hand_made_shapes(10, 4).values()]
    assert found.rate >= max(size.rate for size in [*sizes, *hand_made] if len(size.shape) <= 24)
    assert found.row()["nodes"] == len(found.shape) and found.row()["speedup"] == found.speedup


def test_every_probing_tree_fits_the_limits() -> None:
    for nodes, depth in ((1, 1), (2, 8), (5, 2), (64, 10), (300, 6)):
        shapes = probe_shapes(nodes, depth)
        assert len(set(shapes)) == len(shapes) >= 1
        assert all(len(shape) <= nodes and max(map(len, shape)) <= depth for shape in shapes)
    assert max(map(len, probe_shapes(300, 6))) > 200


def test_curves_rise_and_weights_are_not_negative() -> None:
    assert rising([1, 3, 2, 5, 4, 4], [1, 1, 1, 2, 1, 1]) == pytest.approx((1, 2.5, 2.5, 4.5, 4.5, 4.5))
    curve = Curve((1, 5), (10.0, 14.0))
    assert [curve(n) for n in (1, 2, 5, 9)] == [10, 11, 14, 14]
    assert nonnegative([[1, 1], [1, 2], [1, 3]], [3, 2, 1]) == pytest.approx((1.31, 0), abs=0.1)
    assert trimmed([1, 1, 1, 1, 100]) == 1 and trimmed([2]) == 2
