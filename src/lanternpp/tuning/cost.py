"""What a step takes on this machine, as a function of its tree: fitted to probes of several trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from statistics import median

import torch
from torch import Tensor

from lanternpp.trees.search import expected, expected_tried, reaches
from lanternpp.trees.shapes import Shape
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
    """What the steps of a method with a tree take.

    The target's pass is a curve over the number of nodes, the root included, that never falls. Drafting is linear in
    the levels, the inner nodes and the nodes. Verification is linear in the children verified, and in the sum over the
    levels of the most children that a node has, which is what a device goes through that does not wait for results, and
    what traversal verification goes through anywhere.
    No coefficient is negative.
    """

    look: Curve
    draft: tuple[float, ...]  # of 1, levels, inner nodes, nodes
    judge: tuple[float, ...]  # of 1, children judged, codes decided, widths
    noise: float  # median relative error of this model, over the probes

    def step_cost(self, shape: Shape, table: Tensor) -> StepCost:
        """A step of a tree, for acceptances of `table`."""
        found = reaches(table, shape)
        terms = linear_terms(shape, expected_tried(table, shape, found), sum(found.values()))
        return StepCost(_dot(self.draft, terms[0]), self.look(len(shape) + 1), _dot(self.judge, terms[1]))

    def rate(self, shape: Shape, table: Tensor) -> float:
        """Codes per second of a sample, once it runs."""
        return expected(table, shape) / self.step_cost(shape, table).step

    def speedup(self, shape: Shape, table: Tensor) -> float:
        """`gain` of a tree."""
        return self.gain(self.step_cost(shape, table).step, expected(table, shape))


def linear_terms(shape: Shape, judged: float, codes: float) -> tuple[list[float], list[float]]:
    """The terms of the linear models of drafting and of verification."""
    kids: dict[tuple[int, ...], int] = {}
    for path in shape:
        kids[path[:-1]] = kids.get(path[:-1], 0) + 1
    depth = max(map(len, shape), default=0)
    widths = [max(n for above, n in kids.items() if len(above) == d) for d in range(depth)]
    return [1.0, depth, len(kids), len(shape)], [1.0, judged, codes, sum(widths)]


def fit(probes: Sequence[Probe], length: int, rule_probes: Sequence[Probe] | None = None) -> Costs:
    """Costs from probes. rule_probes: those drawn with the rule in question; default: all.

    Every probe's seconds are scaled by what the plain steps beside it took, so that a machine that slows down
    for a while does not bend the curve.
    """
    plain_seconds = median(one.plain_step for one in probes)
    drawn, mine = _by_shape(probes, plain_seconds), _by_shape(rule_probes or probes, plain_seconds)
    sizes: dict[int, list[float]] = {1: [one.plain_look * plain_seconds / one.plain_step for one in probes]}
    for shape, group in drawn.items():
        sizes.setdefault(len(shape) + 1, []).extend(one.look for one in group)
    at = tuple(sorted(sizes))
    curve = Curve(at, rising([median(sizes[n]) for n in at], [len(sizes[n]) for n in at]))
    terms = {shape: _linear_terms(shape, group) for shape, group in {**drawn, **mine}.items()}
    draft = nonnegative(
        [terms[shape][0] for shape in drawn], [median(one.draft for one in group) for group in drawn.values()]
    )
    judge = nonnegative(
        [terms[shape][1] for shape in mine], [median(one.judge for one in group) for group in mine.values()]
    )
    off = []
    for shape, group in mine.items():
        took = median(one.draft + one.look + one.judge for one in group)
        predicted = _dot(draft, terms[shape][0]) + curve(len(shape) + 1) + _dot(judge, terms[shape][1])
        off.append(abs(predicted - took) / took)
    every = [one for group in drawn.values() for one in group]
    return Costs(
        length,
        plain_seconds,
        median(one.plain_begin for one in every),
        median(one.begin for one in every),
        median(one.pixels for one in every),
        curve,
        draft,
        judge,
        median(off),
    )


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


def _by_shape(probes: Sequence[Probe], plain_seconds: float) -> dict[Shape, list[Probe]]:
    """Probes of each shape, their seconds those of a machine whose plain step takes `usual`."""
    found: dict[Shape, list[Probe]] = {}
    for one in probes:
        pace = plain_seconds / one.plain_step
        scaled = {name: getattr(one, name) * pace for name in SECONDS}
        found.setdefault(tuple(map(tuple, one.shape)), []).append(replace(one, **scaled))
    return found


def _linear_terms(shape: Shape, group: Sequence[Probe]) -> tuple[list[float], list[float]]:
    passes = max(sum(one.passes for one in group), 1)
    tried = sum(one.judged * one.passes for one in group) / passes
    return linear_terms(shape, tried, sum(one.codes for one in group) / passes)


def _dot(weights: Sequence[float], values: Sequence[float]) -> float:
    return sum(w * v for w, v in zip(weights, values, strict=True))
