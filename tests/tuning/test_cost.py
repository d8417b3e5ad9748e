"""Costs fitted to made-up probes whose law is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lanternpp.engine.stopwatch import trimmed
from lanternpp.trees.search import expected, expected_tried
from lanternpp.trees.shapes import SHAPES, Shape, chain, is_chain
from lanternpp.tuning.acceptance import Acceptances, CutChains
from lanternpp.tuning.cost import Curve, draft_terms, fit, nonnegative, rising, verify_terms
from lanternpp.tuning.probe import Probe
from lanternpp.tuning.search import best_by_size, best_cut, choose, hand_made_shapes, predict, probe_shapes

TABLE = torch.tensor([[0.8, 0.4, 0.2, 0.1]] * 10, dtype=torch.float64)
TABLES = Acceptances(TABLE, TABLE)


def law(shape: Shape) -> tuple[float, float, float]:
    """Seconds of drafting, a pass, and judging."""
    _, depth, inner, _ = draft_terms(shape)
    judged = expected_tried(TABLE, shape)
    return 1.0 + 2 * depth + 0.1 * inner, 16.0 + 0.5 * (len(shape) + 1), 0.5 + 0.2 * judged


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
    sizes = best_by_size(TABLES, costs, 24, 8)
    assert [len(size.shape) for size in sizes] == list(range(1, 25))
    found = choose(sizes, TABLES, costs, 24, 8)
    hand_made = [predict(shape, TABLES, costs) for shape in hand_made_shapes(10, 4).values()]
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


def test_traversal_costs_what_a_tree_has_and_not_what_it_keeps() -> None:
    """Of probes whose verification takes time by node alone, while what is kept differs from probe to probe."""

    def of_nodes(shape: Shape, codes: int) -> Probe:
        made_probe = made(shape)
        judge = 0.5 + 0.1 * len(shape)
        return replace(made_probe, judge=judge, codes=codes, judged=codes / 50, verify="traversal")

    shapes = [shape for shape in probe_shapes(64, 10) if max(map(max, shape)) < 4]
    costs = fit([of_nodes(shape, 100 + 37 * i % 200) for i, shape in enumerate(shapes)], length=256)
    for shape in (SHAPES["deep-8"], SHAPES["chain-5"]):
        assert costs.step_cost(shape, TABLE).verify == pytest.approx(0.5 + 0.1 * len(shape), rel=0.02)
        assert costs.parts(shape).verify == "traversal"
    assert verify_terms(SHAPES["deep-8"], "traversal", 3.0, 4.0) == [1, 5, 8, 8]
    assert verify_terms(SHAPES["deep-8"], "token", 3.0, 4.0) == [1, 3, 4, 8]


def test_chains_that_are_verified_in_another_way_have_numbers_of_their_own() -> None:
    """A relaxed rule walks trees and verifies chains as a block: these cost less here, and keep more."""
    shapes = probe_shapes(24, 8)
    drawn = [
        replace(made(shape), judge=0.01, draft=0.1 * len(shape), verify="block")
        if is_chain(shape)
        else made(shape)
        for shape in shapes
        if max(map(max, shape)) < 4
    ]
    costs = fit(drawn, length=256)
    step, tree = costs.step_cost(chain(4), TABLE), costs.step_cost(SHAPES["deep-8"], TABLE)
    assert (step.draft, step.verify) == pytest.approx((0.4, 0.01), rel=0.05)
    assert (tree.draft, tree.verify) == pytest.approx(
        (law(SHAPES["deep-8"])[0], law(SHAPES["deep-8"])[2]), rel=0.05
    )
    better = Acceptances(TABLE, TABLE + 0.1)
    found = choose(best_by_size(better, costs, 24, 8), better, costs, 24, 8)
    assert is_chain(found.shape) and found.codes == pytest.approx(expected(TABLE + 0.1, found.shape))


def test_a_cut_is_found_where_guesses_cost_more_than_they_bring() -> None:
    """Half of all drafts are sure for eight levels, the other half for one alone."""
    kept = torch.tensor([[0.9] * 8, [0.9] + [0.45] * 7], dtype=torch.float64).cummin(1).values
    kept[0, 1:] = 0.46
    longest = torch.tensor([[1.0] * 8, [1.0] + [0.5] * 7], dtype=torch.float64)
    costs = fit([made(shape) for shape in probe_shapes(24, 8) if max(map(max, shape)) < 4], length=256)
    chains = CutChains((1e-9, 0.3), kept, longest)
    assert chains.lengths(1, 8) == pytest.approx([0.5] + [0] * 6 + [0.5])
    assert chains.lengths(1, 3) == pytest.approx([0.5, 0, 0.5])
    found = best_cut(chains, costs, 24, 8)
    assert found.min_survival == 0.3 and len(found.shape) > 1
    alone = costs.cut_step(8, [0] * 7 + [1.0], 4.12)
    whole = costs.step_cost(chain(8), TABLE)
    assert alone == pytest.approx(whole.step, rel=0.05), "a chain that never ends early is a chain"
    assert costs.cut_step(8, [0.5] + [0] * 6 + [0.5], 4.05) < alone
