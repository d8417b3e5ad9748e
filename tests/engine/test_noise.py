from __future__ import annotations

import itertools

import pytest
import torch
from helpers.distributions import chi_square, tally

from lanternpp.engine import noise as module
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling

UNLIKELY = 1e-3
PURPOSES = [Noise.ACCEPT, Noise.BONUS, Noise.DRAFT, Noise.DRAFT + 4]


def at(seed, step=1):
    seed = torch.as_tensor(seed).reshape(-1)
    return Noise(seed, torch.full_like(seed, step))


def correlation(a, b):
    """The correlation coefficient, in units of its standard error."""
    a, b = a.flatten().double(), b.flatten().double()
    return (torch.corrcoef(torch.stack((a, b)))[0, 1] * a.numel() ** 0.5).item()


def uniformity(u, cells=256):
    """The p-value of a uniform distribution."""
    counts = torch.bincount((u.flatten() * cells).long(), minlength=cells)
    return chi_square(counts, torch.ones(cells))


MANY = torch.arange(1 << 18)


@pytest.mark.parametrize(
    ("noise", "purpose", "count"),
    [
        *((at([7]), purpose, len(MANY)) for purpose in PURPOSES),
        *((at(MANY), purpose, 1) for purpose in PURPOSES),
        (Noise(torch.full_like(MANY, 3), MANY), Noise.BONUS, 1),
        (at(MANY << 32), Noise.BONUS, 1),
    ],
)
def test_uniform_over_index_seed_step_and_the_high_half_of_the_seed(noise, purpose, count):
    assert uniformity(noise.uniform(purpose, count)) > UNLIKELY


@pytest.mark.parametrize(("a", "b"), [(0, 1), (0, 2), (1, 2), (0, 255), (254, 255)])
def test_pairs_of_indices_fill_the_square(a, b):
    u = at(torch.arange(1 << 15)).uniform(Noise.BONUS, 256)[:, [a, b]]
    assert uniformity(torch.floor(u[:, 0] * 16) / 16 + u[:, 1] / 16) > UNLIKELY


def test_seeds_steps_and_purposes_are_independent():
    n = 1 << 16
    base = at([5], 9).uniform(Noise.BONUS, n)
    others = {
        "next seed": at([6], 9).uniform(Noise.BONUS, n),
        "seed of the other half": at([5 + (1 << 32)], 9).uniform(Noise.BONUS, n),
        "next step": at([5], 10).uniform(Noise.BONUS, n),
        "seed and step exchanged": at([9], 5).uniform(Noise.BONUS, n),
        "accept": at([5], 9).uniform(Noise.ACCEPT, n),
        "draft": at([5], 9).uniform(Noise.DRAFT, n),
        "next level": at([5], 9).uniform(Noise.DRAFT + 1, n),
    }
    for name, other in others.items():
        assert abs(correlation(base, other)) < 4, name
        assert (base == other).double().mean() < 1e-3, name
    assert abs(correlation(base[:, 1:], base[:, :-1])) < 4
    assert abs(correlation(others["draft"], others["next level"])) < 4


def test_the_same_index_is_independent_across_neighbouring_seeds_and_steps():
    u = at(torch.arange(1 << 16)).uniform(Noise.ACCEPT, 2)
    assert abs(correlation(u[1:, 0], u[:-1, 0])) < 4
    assert abs(correlation(u[1:, 0], u[:-1, 1])) < 4
    later = at(torch.arange(1 << 16), 2).uniform(Noise.ACCEPT, 2)
    assert abs(correlation(u, later)) < 4
    assert abs(correlation(u[1:], later[:-1])) < 4


@pytest.mark.parametrize("bits", [0, -1])
def test_noise_is_never_0_nor_1_and_draws_no_code_of_probability_0(monkeypatch, bits):
    """At 1 an exponential is 0, and 0 / 0 would draw a forbidden code."""
    monkeypatch.setattr(module, "_mix", lambda x: torch.full_like(x, bits))
    n = at([1])
    assert 0 < n.uniform(Noise.BONUS, 1) < 1
    assert 0 < -n.fine(Noise.BONUS, 1).log().float() < (1e-12 if bits else float("inf"))
    assert 0 < n.fine(Noise.BONUS, 1) < 1
    p = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    for dtype in (torch.float32, torch.float64):
        assert Sampling().draw(p.to(dtype), n).item() in (1, 3)
        assert Sampling().children(p[None].to(dtype), 1, n, Noise.DRAFT).item() in (1, 3)


def test_fine_noise_is_uniform_to_its_last_bits():
    u = at([3]).fine(Noise.BONUS, 1 << 18)
    assert u.dtype == torch.float64 and uniformity(u) > UNLIKELY
    assert uniformity((u * 2**23).frac()) > UNLIKELY and uniformity((u * 2**38).frac()) > UNLIKELY
    assert abs(correlation(u, (u * 2**23).frac())) < 4


def test_a_tail_of_improbable_codes_keeps_its_share():
    tail = torch.full((16384,), 0.1 / 16384)
    p = torch.cat((torch.tensor([0.9]), tail)).expand(2000, -1)
    draws = torch.cat([Sampling().draw(p, at(torch.arange(i, i + 2000))) for i in range(0, 8000, 2000)])
    cells = torch.tensor([0.9] + [0.1 / 16] * 16)  # code 0, then 1024 codes a cell
    assert chi_square(torch.bincount((draws + 1023) // 1024, minlength=17), cells) > UNLIKELY


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_child_is_drawn_without_the_earlier_ones(count):
    q = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0], dtype=torch.float64)
    rows = q.expand(100_000, 2, -1)
    picked = Sampling().children(rows, count, at(torch.arange(100_000)), Noise.DRAFT)
    assert picked.shape == (100_000, 2, count)
    for picks in picked.unbind(1):
        for earlier in set(itertools.permutations(range(4), count - 1)):
            same = (picks[:, :-1] == torch.tensor(earlier)).all(1)
            left = q.scatter(0, torch.tensor(earlier, dtype=torch.int64), 0)
            last = picks[same, -1]
            distinct = last[left[last] > 0]  # a repetition or a forbidden code is never tried
            assert len(distinct) > 0.5 * same.sum()
            if len(earlier) < 3:
                assert chi_square(torch.bincount(distinct, minlength=5), left) > UNLIKELY / 24


def test_codes_of_probability_0_come_last():
    q = torch.tensor([0.0, 0.6, 0.0, 0.4, 0.0]).expand(1000, 1, -1)
    picks = Sampling().children(q, 4, at(torch.arange(1000)), Noise.DRAFT)[:, 0]
    both = picks[:, :2].sort(-1).values
    assert (both == torch.tensor([1, 3])).all(1).double().mean() > 0.99


def test_the_nodes_of_a_level_draw_their_children_independently():
    rows = torch.tensor([0.5, 0.3, 0.2]).expand(200_000, 2, -1)
    picked = Sampling().children(rows, 1, at(torch.arange(200_000)), Noise.DRAFT)[..., 0]
    distribution = rows[0, 0][:, None] * rows[0, 0]
    assert chi_square(tally(picked, 3), distribution) > UNLIKELY


@pytest.mark.parametrize("samples", [1, 3, 5000])
def test_precomputed_noise_is_that_of_its_step(samples):
    noise = at(torch.arange(samples), 4)
    steps = noise.precomputed(3)
    assert len(steps) == 1 if samples == 5000 else len(steps) > 1
    for ready in (steps[0], steps[-1]):
        for purpose, shape in (
            (Noise.ACCEPT, (3, 2)),
            (Noise.BONUS, (1,)),
            (Noise.DRAFT + 2, (2, 9)),
            (Noise.DRAFT, (99,)),
            (Noise.BONUS + 1, (4,)),  # of none of the purposes that are computed in advance
            (Noise.DRAFT - 1, (4,)),
            (Noise.DRAFT + 3, (4,)),
        ):
            assert torch.equal(ready.fine(purpose, *shape), noise.fine(purpose, *shape))
        for levels in (3, 4):  # one more than was precomputed
            assert torch.equal(ready.draft_uniform(levels), noise.draft_uniform(levels))
            first = [noise.fine(Noise.DRAFT + level, 1) for level in range(levels)]
            assert torch.equal(noise.draft_uniform(levels), torch.cat(first, 1))
        noise.step.add_(len(steps) - 1)
