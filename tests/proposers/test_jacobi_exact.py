"""The distribution of Jacobi decoding, enumerated: every outcome of every random choice of a pass, in float64, pass after pass."""

from __future__ import annotations

from math import prod

import pytest
import torch
from helpers.toys import CHAIN, HOLES, MarkovTarget
from torch import Tensor

from lanternpp.accept.exact import Exact
from lanternpp.engine.decode import Engine
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.engine.verify import VERIFIERS, joint
from lanternpp.engine.verify.tokenwise import without
from lanternpp.proposers import jacobi
from lanternpp.proposers.jacobi import Jacobi

ENGINE = ("codes", "count")  # the state of an engine and of its proposer
PROPOSER = ("root", "count", "codes", "q", "p", "p_place", "code_place", "last_place")
ROWS = 60_000  # samples in an engine


class Outcomes:
    """Sample i takes the outcomes that the digits of its number index; `weight` is their probability."""

    def __init__(self, number: Tensor, weight: Tensor):
        self.number, self.weight = number, weight

    def take(self, distribution: Tensor) -> Tensor:
        """distribution [B, M], normalised here -> an outcome of each sample, [B]."""
        digit = self.number % distribution.shape[-1]
        self.number = self.number // distribution.shape[-1]
        self.weight = (
            self.weight * (distribution / distribution.sum(-1, keepdim=True)).gather(1, digit[:, None])[:, 0]
        )
        return digit

    def draw(self, probs: Tensor, u: Tensor) -> Tensor:
        """In place of `sampling.draw`: probs [B, W, V] -> [B, W, 1]."""
        return torch.stack([self.take(each) for each in probs.unbind(1)], 1)[..., None]

    def all_rejected(self, halt: Tensor) -> Tensor:
        """In place of `joint.all_rejected`: whatever the noise is, the outcome is the one that the sample takes."""
        fewer = ALL_REJECTED(halt)
        edge = torch.zeros_like(fewer[:, :1])
        last = self.take(torch.cat((edge, fewer, edge + 1), 1).diff(dim=1))
        return (torch.arange(fewer.shape[1]) >= last[:, None]).double() * 4 - 2


ALL_REJECTED = joint.all_rejected


class Enumerated(Sampling):
    """Sampling whose draws are outcomes taken one by one."""

    outcomes: Outcomes

    def draw(self, probs, noise):
        return self.outcomes.take(probs)

    def children(self, q, count, noise, purpose):
        left, found = q[:, 0], []
        for _ in range(count):
            found.append(self.outcomes.take(left.where(left.sum(-1, keepdim=True) > 0, 1)))
            left = without(left, found[-1])
        return torch.stack(found, 1)[:, None]

    def accepts(self, relaxed, chance, code, u):
        kept = (relaxed.gather(1, code[:, None])[:, 0] / chance).nan_to_num(1).clamp(max=1)
        levels = kept.view(len(self.outcomes.number), -1)  # all of a chain at once, or one of a tree
        found = [self.outcomes.take(torch.stack((each, 1 - each), 1)) == 0 for each in levels.unbind(1)]
        return torch.stack(found, 1).flatten()


def choices(proposer: Jacobi, verify: str, vocab: int) -> int:
    """Outcomes of a pass at most."""
    window, alternatives = proposer.window, proposer.alternatives
    tests = 2 ** (window + alternatives) if verify == "token" else window + alternatives + 1
    return prod((vocab ** (window * proposer.window_rows + alternatives), tests, vocab))


def distribution_of(monkeypatch, table, proposer, verify, codes, grid) -> Tensor:
    """The distribution of the first `codes` codes of an image, [V ** codes]."""
    target, sampling = MarkovTarget(table, grid), Enumerated()
    vocab, rule = target.vocab, Exact()
    each = choices(proposer, verify, vocab)
    found = torch.zeros(vocab**codes, dtype=torch.float64)
    most = max(1, ROWS // each)
    # Images whose first code is decided, as an admission leaves them.
    engine = Engine(target, proposer, rule, sampling, Guidance(), vocab, verifier=VERIFIERS[verify])
    engine.codes[:, 0] = engine.proposer.root[:] = torch.arange(vocab)
    engine.count[:] = 1
    states, weight = snapshot(engine), target.chain[0]
    while len(weight):
        made: list[tuple[list[Tensor], Tensor]] = []
        for first in range(0, len(weight), most):
            rows = torch.arange(first, min(first + most, len(weight))).repeat_interleave(each)
            outcomes = Outcomes(torch.arange(len(rows)) % each, weight[rows])
            monkeypatch.setattr(joint, "all_rejected", outcomes.all_rejected)
            monkeypatch.setattr(jacobi, "draw", outcomes.draw)
            object.__setattr__(sampling, "outcomes", outcomes)
            engine = Engine(
                target, proposer, rule, sampling, Guidance(), len(rows), verifier=VERIFIERS[verify]
            )
            engine.cache.used.fill_(target.slots)
            for tensor, state in zip(snapshot(engine), states, strict=True):
                tensor.copy_(state[rows])
            engine.step()
            # an outcome of a choice that was not made is no other outcome
            weighed = outcomes.weight * (outcomes.number == 0)
            done = engine.count >= codes
            place = (engine.codes[:, :codes] * vocab ** torch.arange(codes).flip(0)).sum(1)
            found.index_add_(0, place[done], weighed[done])
            going = (weighed > 0) & ~done
            made.append(merged([x[going] for x in snapshot(engine)], weighed[going]))
        states, weight = merged(
            [torch.cat(parts) for parts in zip(*(x for x, _ in made), strict=True)],
            torch.cat([w for _, w in made]),
        )
    return found


def snapshot(engine: Engine) -> list[Tensor]:
    """The tensors of an engine's state, by sample, with entries that are never read again set to 0."""
    jacobi, count = engine.proposer, engine.count[:, None]
    past = jacobi.code_place < count
    above = jacobi.width if jacobi.init in ("above", "mixed") else 0
    last = torch.arange(jacobi.slots) == jacobi.last_place[:, None] % jacobi.slots
    old = (jacobi.p_place < count - above) & ~last
    for owner, outdated, rings in (
        (jacobi.code_place, past, (jacobi.codes, jacobi.q)),
        (jacobi.p_place, old, (jacobi.p,)),
    ):
        owner.masked_fill_(outdated, -1)
        for ring in rings:
            ring[outdated] = 0
    return [getattr(engine, name) for name in ENGINE] + [getattr(engine.proposer, n) for n in PROPOSER]


def merged(states: list[Tensor], weight: Tensor) -> tuple[list[Tensor], Tensor]:
    """Equal states once, with the sum of their weights."""
    flat = torch.cat([x.flatten(1) if x.dim() > 1 else x[:, None] for x in states], 1).double()
    key = (
        flat @ torch.rand(flat.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ).round(decimals=9)
    unique, place = key.unique(return_inverse=True)
    first = torch.full((len(unique),), len(key)).scatter_reduce_(0, place, torch.arange(len(key)), "amin")
    return [x[first] for x in states], torch.zeros(len(unique), dtype=torch.float64).index_add_(
        0, place, weight
    )


CASES = [  # window, coupling, init, alternatives, rows of windows; verifier, codes, side of the image
    ((2, "maximal", "last", 0), "token", 3, 2),
    ((2, "maximal", "last", 0), "block", 3, 2),
    ((3, "maximal", "mixed", 0), "block", 4, 2),
    ((2, "maximal", "last", 1), "token", 3, 2),
    ((2, "maximal", "last", 1), "traversal", 3, 2),
    ((2, "maximal", "mixed", 2), "traversal", 3, 2),
    ((2, "none", "last", 1), "traversal", 3, 2),
    ((1, "maximal", "last", 1), "traversal", 3, 2),
    ((2, "maximal", "above", 1), "traversal", 4, 2),
    ((1, "maximal", "last", 0, 2), "block", 5, 3),  # draft codes that wait in the next rows
    ((1, "maximal", "above", 1, 2), "traversal", 5, 3),
    ((1, "none", "mixed", 0, 3), "token", 4, 3),
]
ALL_CASES = [(CHAIN, *case) for case in CASES] + [(HOLES, *case) for case in CASES if case[-1] == 2]


def gap(monkeypatch, table, dials, verify, codes, grid) -> float:
    """The sum of absolute differences between the distribution of the first codes and the target's."""
    found = distribution_of(monkeypatch, table, Jacobi(*dials), verify, codes, grid=grid)
    return (found - MarkovTarget(table, grid).distribution(codes)).abs().sum()


@pytest.mark.parametrize(("table", "dials", "verify", "codes", "grid"), ALL_CASES)
def test_images_follow_the_targets_distribution(monkeypatch, table, dials, verify, codes, grid):
    assert gap(monkeypatch, table, dials, verify, codes, grid) < 1e-12


def wrong_distribution(monkeypatch):
    """Draft codes after a rejected one are taken to follow their q still."""
    monkeypatch.setattr(jacobi, "rejected_distribution", lambda p, q, codes: q[:, :-1])


def wrong_q(monkeypatch):
    """Siblings are drawn from another distribution than the one that they are tested against."""
    monkeypatch.setattr(jacobi, "without", lambda q, code: without(q.sqrt(), code))


@pytest.mark.parametrize(
    ("wrong", "alternatives", "verify"),
    [
        (wrong_distribution, 0, "block"),
        (wrong_distribution, 1, "traversal"),
        (wrong_q, 1, "token"),
        (wrong_q, 1, "traversal"),
    ],
)
def test_a_wrong_distribution_is_detected(monkeypatch, wrong, alternatives, verify):
    wrong(monkeypatch)
    assert gap(monkeypatch, CHAIN, (2, "maximal", "last", alternatives), verify, 3, 2) > 1e-4


def test_a_wrong_q_of_a_waiting_code_is_detected(monkeypatch):
    put = Jacobi._write

    def wrong(self, ring, place, value):
        if ring is self.q and place.shape[1] > self.window:
            other = value[:, self.window :] * torch.arange(1, 4)
            value = torch.cat((value[:, : self.window], other / other.sum(-1, keepdim=True)), 1)
        put(self, ring, place, value)

    monkeypatch.setattr(Jacobi, "_write", wrong)
    assert gap(monkeypatch, CHAIN, (1, "maximal", "above", 0, 2), "block", 5, 3) > 1e-4
