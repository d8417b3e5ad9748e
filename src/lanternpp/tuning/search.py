"""From measured acceptances and costs to the tree that draws the most codes per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lanternpp.trees.search import Search, expected, polish
from lanternpp.trees.shapes import SHAPES, Shape, by_levels, chain
from lanternpp.tuning.acceptance import Acceptances, CutChains
from lanternpp.tuning.cost import Costs

RANKS = 16  # children of a node that the search considers
FEW = ((3, 4, 4, 3, 3, 3, 2, 2), (8, 10, 8, 4, 2))  # nodes by level, of the trees that give the most counts
LEVELS = ((2, 2, 2, 1, 1), (4, 3), (4, 8, 4), *FEW, (6, 8, 8, 7, 6, 5, 4, 4), (16, 20, 14, 8, 3, 1, 1, 1))
CHAINS = (1, 3, 6, 12)
CUTS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7)  # that are compared for a chain
CUT_GAIN = 1.01  # codes per second that a cut must bring, relative to the best tree without


@dataclass(frozen=True)
class PredictedTree:
    """A tree and what is expected of it."""

    shape: Shape
    codes: float  # that a draft decides
    per_pass: float  # codes per pass of whole pictures, the prefill among the passes
    rate: float  # codes per second
    speedup: float
    min_survival: float = 0.0  # of a chain; 0: it always has all guesses

    def row(self) -> dict[str, Any]:
        """A plain dictionary."""
        return {
            "nodes": len(self.shape),
            "depth": max(map(len, self.shape)),
            "codes_per_draft": self.codes,
            "codes_per_pass": self.per_pass,
            "codes_per_second": self.rate,
            "speedup": self.speedup,
            "min_survival": self.min_survival,
            "tree": [list(path) for path in self.shape],
        }


def predict(shape: Shape, tables: Acceptances, costs: Costs) -> PredictedTree:
    """What is expected of a shape."""
    table = tables.of(shape)
    codes = expected(table, shape)
    return PredictedTree(
        shape, codes, costs.per_pass(codes), costs.rate(shape, table), costs.speedup(shape, table)
    )


def best_by_size(tables: Acceptances, costs: Costs, nodes: int, depth: int) -> list[PredictedTree]:
    """For every number of nodes the tree with the most codes per second: of each depth the one that keeps most, or a chain."""
    field = [chain(count) for count in range(1, min(nodes, depth) + 1)]
    for deepest in range(1, depth + 1):
        search = Search(tables.trees, nodes, deepest)
        field += [search.shape(count) for count in range(1, nodes + 1) if search.codes(count)]
    best: dict[int, tuple[float, Shape]] = {}
    for shape in field:
        entry = (costs.rate(shape, tables.of(shape)), shape)
        best[len(shape)] = max(best.get(len(shape), (0.0, ())), entry)
    return [predict(shape, tables, costs) for _, (_, shape) in sorted(best.items())]


def choose(
    sizes: Sequence[PredictedTree], tables: Acceptances, costs: Costs, nodes: int, depth: int
) -> PredictedTree:
    """The fastest of all sizes, polished by leaves."""
    first = max(sizes, key=lambda found: found.rate)
    shape = polish(
        first.shape,
        lambda shape: costs.rate(shape, tables.of(shape)),
        min(RANKS, tables.trees.shape[1]),
        depth,
        nodes,
    )
    return predict(shape, tables, costs)


def best_cut(found: CutChains, costs: Costs, nodes: int, depth: int) -> PredictedTree:
    """The chain, and its cut, that decide most codes per second."""
    best: PredictedTree | None = None
    for place, cut in enumerate(found.cuts):
        for guesses in range(1, min(nodes, depth, found.kept.shape[1]) + 1):
            codes = found.codes(place, guesses)
            step = costs.cut_step(guesses, found.lengths(place, guesses), codes)
            if best is None or codes / step > best.rate:
                rates = costs.per_pass(codes), codes / step, costs.gain(step, codes)
                best = PredictedTree(chain(guesses), codes, *rates, cut)
    assert best is not None
    return best


def probe_shapes(nodes: int, depth: int, few: bool = False, ranks: int = RANKS) -> list[Shape]:
    """Trees of several sizes and depths to measure with; few: only those that give the most counts. ranks 1: chains alone."""
    wide = [by_levels(counts) for counts in (FEW if few else LEVELS)] if ranks > 1 else []
    if wide and nodes > max(map(len, wide)) and not few:
        scale = nodes / max(map(len, wide))
        wide.append(by_levels([max(1, int(count * scale)) for count in LEVELS[-1]]))
    found = [chain(min(n, depth, nodes)) for n in (CHAINS[-1:] if few else CHAINS)]
    for shape in wide:
        found.append(tuple(path for path in shape if len(path) <= depth)[:nodes])
    return list(dict.fromkeys(found))


def hand_made_shapes(depth: int, ranks: int) -> dict[str, Shape]:
    """The hand-made shapes that a table [depth, ranks] covers."""
    return {
        name: shape
        for name, shape in SHAPES.items()
        if max(map(len, shape)) <= depth and max(map(max, shape)) < ranks
    }
