"""What a step takes on this machine, as a function of its tree: fitted to probes of several trees.

Chains have costs of their own, as all levels of one may be drafted in one call and verified together, in other code than
trees that branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from statistics import median

import torch
from torch import Tensor

from lanternpp.engine.verify.choose import TOKEN
from lanternpp.trees.search import expected, expected_tried, reaches
from lanternpp.trees.shapes import Shape, chain, is_chain
from lanternpp.tuning.probe import Probe

SECONDS = ("plain_begin", "plain_look", "plain_step", "begin", "draft", "look", "judge", "pixels")


@dataclass(frozen=True)
class StepCost:
    """Predicted seconds of the parts of a step: drafting, the target's pass, verification."""

    draft: float
    target_pass: float
    verify: float

    @property
    def step(self) -> float:
        """All of it."""
        return self.draft + self.target_pass + self.verify


@dataclass(frozen=True)
class Curve:
    """A cost measured at several counts; linear between them, constant beyond the last."""

    at: tuple[int, ...]  # ascending
    cost: tuple[float, ...]

    def __call__(self, count: int) -> float:
        """The cost at a count."""
        if count <= self.at[0]:
            return self.cost[0]
        for (a, x), (b, y) in pairwise(zip(self.at, self.cost, strict=True)):
            if count <= b:
                return x + (y - x) * (count - a) / (b - a)
        return self.cost[-1]


@dataclass(frozen=True)
class PartCosts:
    """Drafting and verification, of chains or of trees that branch; the fields are keys of the tuning's report.

    Drafting is linear in the levels, the inner nodes and the nodes. Token verification is linear in the children tried, the codes decided,
    and the sum over the levels of the most children that a node has, which is what a device goes through that does not wait for
    results. Block and traversal verification are linear in the inner nodes, the nodes, and that sum, whatever is kept: both compute
    every node. No coefficient is negative.
    """

    verify: str
    draft: tuple[float, ...]  # of 1, levels, inner nodes, nodes
    judge: tuple[float, ...]  # of `verify_terms`


@dataclass(frozen=True)
class PictureCosts:
    """Seconds of what a picture takes besides its drafted steps, at the speed of the machine at which plain steps take their
    median time. The fields are keys of the tuning's report."""

    length: int  # codes of a picture
    plain: float  # step
    plain_begin: float
    begin: float
    pixels: float

    def gain(self, step: float, codes: float) -> float:
        """Seconds of a picture by plain decoding over those by steps that decide `codes` each: prefill and pixels in both."""
        return self._picture(self.plain_begin, self.plain, 1) / self._picture(self.begin, step, codes)

    def per_pass(self, codes: float) -> float:
        """Codes per pass of whole pictures, the prefill among the passes, where a draft decides `codes`."""
        return self.length / (1 + self._passes(codes))

    def _passes(self, codes: float) -> float:
        """Of the last draft of a picture, half of what it decides beyond a code is cut off, on average."""
        return (self.length - 1 + (codes - 1) / 2) / codes

    def _picture(self, begin: float, step: float, codes: float) -> float:
        return begin + self._passes(codes) * step + self.pixels


@dataclass(frozen=True)
class Costs(PictureCosts):
    """What the steps of a method with a tree take. The target's pass is a curve over the number of nodes, the root included, that never falls."""

    look: Curve
    trees: PartCosts
    chains: PartCosts
    noise: float  # median relative error of this model, over the probes

    def step_cost(self, shape: Shape, table: Tensor) -> StepCost:
        """A step of a tree, for acceptances of `table`."""
        found, parts = reaches(table, shape), self.parts(shape)
        terms = verify_terms(shape, parts.verify, expected_tried(table, shape, found), sum(found.values()))
        return StepCost(
            _dot(parts.draft, draft_terms(shape)), self.look(len(shape) + 1), _dot(parts.judge, terms)
        )

    def parts(self, shape: Shape) -> PartCosts:
        """The costs of drafting and verification that are a shape's."""
        return self.chains if is_chain(shape) else self.trees

    def cut_step(self, depth: int, lengths: Sequence[float], codes: float) -> float:
        """Seconds of a step whose chains of `depth` levels are cut, and have 1, 2 .. guesses with these shares; they decide `codes`."""
        levels, parts, total = chain(depth), self.chains, 0.0
        for length, share in enumerate(lengths, 1):
            verify = verify_terms(chain(length), parts.verify, length, codes)
            draft = draft_terms(levels, length)
            total += share * (_dot(parts.draft, draft) + self.look(length + 1) + _dot(parts.judge, verify))
        return total

    def rate(self, shape: Shape, table: Tensor) -> float:
        """Codes per second of a sample, once it runs."""
        return expected(table, shape) / self.step_cost(shape, table).step

    def speedup(self, shape: Shape, table: Tensor) -> float:
        """`gain` of a tree."""
        return self.gain(self.step_cost(shape, table).step, expected(table, shape))


def draft_terms(shape: Shape, drawn: float | None = None) -> list[float]:
    """The terms of the linear model of drafting: 1, levels, inner nodes, nodes. drawn: the mean guesses of a chain that is cut."""
    depth = max(map(len, shape), default=0)
    if drawn is not None:
        return [1.0, depth, drawn, drawn]
    return [1.0, depth, len({path[:-1] for path in shape}), len(shape)]


def verify_terms(shape: Shape, verify: str, judged: float, codes: float) -> list[float]:
    """The terms of the linear model of verification: 1, what it computes, and the sum over the levels of the most children of a node.

    In between, of token verification the children tried and the codes decided; of the others inner nodes and nodes.
    """
    kids: dict[tuple[int, ...], int] = {}
    for path in shape:
        kids[path[:-1]] = kids.get(path[:-1], 0) + 1
    depth = max(map(len, shape), default=0)
    widths = sum(max(n for above, n in kids.items() if len(above) == d) for d in range(depth))
    work = [judged, codes] if verify == TOKEN else [len(kids), len(shape)]
    return [1.0, *work, widths]


def fit(probes: Sequence[Probe], length: int, rule_probes: Sequence[Probe] | None = None) -> Costs:
    """Costs from probes. rule_probes: those drawn with the rule in question; default: all.

    Every probe's seconds are scaled by what the plain steps beside it took, so that a machine that slows down
    for a while does not bend the curve.
    """
    plain_seconds = median(one.plain_step for one in probes)
    drawn, mine = _scaled(probes, plain_seconds), _scaled(rule_probes or probes, plain_seconds)
    sizes: dict[int, list[float]] = {1: [one.plain_look * plain_seconds / one.plain_step for one in probes]}
    for one in drawn:
        if one.nodes is None:
            sizes.setdefault(len(one.shape) + 1, []).append(one.look)
    at = tuple(sorted(sizes))
    curve = Curve(at, rising([median(sizes[n]) for n in at], [len(sizes[n]) for n in at]))
    trees, chains = (_part_costs(drawn, mine, chained) for chained in (False, True))
    off = []
    for group in _groups([one for one in mine if one.nodes is None]):
        shape = group[0].paths
        parts = chains if is_chain(shape) else trees
        took = median(one.draft + one.look + one.judge for one in group)
        predicted = _dot(parts.draft, draft_terms(shape)) + curve(len(shape) + 1)
        predicted += _dot(parts.judge, _verify_terms(group, parts.verify))
        off.append(abs(predicted - took) / took)
    return Costs(
        length,
        plain_seconds,
        median(one.plain_begin for one in drawn),
        median(one.begin for one in drawn),
        median(one.pixels for one in drawn),
        curve,
        trees,
        chains,
        median(off),
    )


def _part_costs(drawn: Sequence[Probe], mine: Sequence[Probe], chained: bool) -> PartCosts:
    """Drafting, fitted to `drawn`, and verification, to `mine`; of chains, or else of trees, or of all where there are none of a kind."""

    def of_kind(probes: Sequence[Probe]) -> list[list[Probe]]:
        return _groups([one for one in probes if is_chain(one.paths) == chained])

    drafted, verified = of_kind(drawn) or _groups(drawn), of_kind(mine) or of_kind(drawn) or _groups(mine)
    verify = verified[0][0].verify
    draft = nonnegative(
        [draft_terms(group[0].paths, _drawn(group)) for group in drafted],
        [median(one.draft for one in group) for group in drafted],
    )
    judge = nonnegative(
        [_verify_terms(group, verify) for group in verified],
        [median(one.judge for one in group) for group in verified],
    )
    return PartCosts(verify, draft, judge)


def rising(values: Sequence[float], weights: Sequence[float]) -> tuple[float, ...]:
    """The nearest sequence that never falls: neighbours that fall share their weighted mean."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values, weights, strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (x, u, m), (y, v, n) = blocks[-2:]
            blocks[-2:] = [((x * u + y * v) / (u + v), u + v, m + n)]
    return tuple(mean for mean, _, count in blocks for _ in range(count))


def nonnegative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[float, ...]:
    """The non-negative weights of [M, F] features with the least relative error: the best of all subsets."""
    x, y = torch.tensor(rows, dtype=torch.float64), torch.tensor(values, dtype=torch.float64)
    scale = y.clamp(min=1e-9)
    x, y = x / scale[:, None], y / scale
    best, least = torch.zeros(x.shape[1], dtype=torch.float64), float("inf")
    for count in range(1, x.shape[1] + 1):
        for chosen in combinations(range(x.shape[1]), count):
            part = torch.linalg.lstsq(x[:, chosen], y, driver="gelsd").solution
            error = float((x[:, chosen] @ part - y).square().sum())
            if (part >= 0).all() and error < least - 1e-12:
                best, least = torch.zeros_like(best), error
                best[list(chosen)] = part
    return tuple(best.tolist())


def _scaled(probes: Sequence[Probe], plain_seconds: float) -> list[Probe]:
    """Probes whose seconds are those of a machine whose plain step takes so many."""
    found = []
    for one in probes:
        pace = plain_seconds / one.plain_step
        found.append(replace(one, **{name: getattr(one, name) * pace for name in SECONDS}))
    return found


def _groups(probes: Sequence[Probe]) -> list[list[Probe]]:
    """Probes of each shape, those with a cut apart."""
    found: dict[tuple[Shape, float], list[Probe]] = {}
    for one in probes:
        found.setdefault((one.paths, one.min_survival if one.nodes is not None else 0), []).append(one)
    return list(found.values())


def _drawn(group: Sequence[Probe]) -> float | None:
    """The mean guesses of chains that were cut; None where they were not."""
    lengths = [one.nodes for one in group if one.nodes is not None]
    return sum(lengths) / len(lengths) if lengths else None


def _verify_terms(group: Sequence[Probe], verify: str) -> list[float]:
    passes, length = max(sum(one.passes for one in group), 1), _drawn(group)
    tried = sum(one.judged * one.passes for one in group) / passes
    terms = verify_terms(group[0].paths, verify, tried, sum(one.codes for one in group) / passes)
    if length is not None:
        terms[1:] = [length, length, length] if verify != TOKEN else [*terms[1:3], length]
    return terms


def _dot(weights: Sequence[float], values: Sequence[float]) -> float:
    return sum(w * v for w, v in zip(weights, values, strict=True))
