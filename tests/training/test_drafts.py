"""How much of a draft block verification keeps: the estimate that is trained by, and the measurement behind held-out codes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from laws import Contexts, chain_law, contexts
from toys import ToyTarget, parallel

from lanternpp.engine.block import stops
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling
from lanternpp.training.drafts import DraftBatch, DraftMeasure, gather_slots, keep_chances
from lanternpp.training.features import drafter_inputs


def mean_estimate(p: Contexts, q: Contexts) -> torch.Tensor:
    """The estimate over all chains, each as often as the target draws it."""
    vocab, depth = p[0].shape[-1], len(q)
    mean = torch.zeros(depth, dtype=torch.float64)
    for chain in itertools.product(range(vocab), repeat=depth):
        at, often, rows = 0, 1.0, []
        for level, code in enumerate(chain):
            rows.append((p[level][at], q[level][at]))
            often *= float(p[level][at, code])
            at = at * vocab + code
        if often:
            ps, qs = (torch.stack(each) for each in zip(*rows, strict=True))
            reach, kept = keep_chances(ps, qs.log(), torch.tensor(chain))
            mean += often * reach * kept
    return mean


@pytest.mark.parametrize(("vocab", "depth"), [(3, 1), (3, 4), (4, 3)])
@pytest.mark.parametrize("kind", ["random", "near", "equal", "forced"])
def test_the_estimate_from_the_targets_own_chains_is_what_drafts_keep(
    kind: str, vocab: int, depth: int
) -> None:
    p, q = contexts(vocab, depth, kind)
    _, kept = chain_law(stops, p, q)
    assert mean_estimate(p, q).tolist() == pytest.approx(kept.tolist(), abs=1e-12)


def test_its_gradient_is_that_of_the_codes_that_drafts_keep() -> None:
    """At a random drafter, in a random direction: against a difference of the enumerated codes."""
    p, q = contexts(3, 3, "random")
    logits = [table.log().requires_grad_() for table in q]
    mean_estimate(p, [x.softmax(-1) for x in logits]).sum().backward()
    generator = torch.Generator().manual_seed(1)
    step = [torch.randn(x.shape, dtype=torch.float64, generator=generator) for x in logits]

    def codes(size: float) -> float:
        moved = [(x.detach() + size * d).softmax(-1) for x, d in zip(logits, step, strict=True)]
        return float(chain_law(stops, p, moved)[1].sum())

    slope = sum(float((x.grad * d).sum()) for x, d in zip(logits, step, strict=True) if x.grad is not None)
    assert slope == pytest.approx((codes(1e-6) - codes(-1e-6)) / 2e-6, rel=1e-5)


def test_a_ratio_beyond_all_bounds_leaves_the_gradient_finite() -> None:
    p = torch.tensor([[1e-30, 1.0], [0.5, 0.5]])
    logits = torch.tensor([[80.0, -80.0], [0.0, 0.0]], requires_grad=True)
    reach, chance = keep_chances(p, logits.log_softmax(-1), torch.tensor([0, 1]))
    kept = reach * chance
    kept.sum().backward()
    assert kept.isfinite().all() and logits.grad is not None and logits.grad.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("cfg", [1.0, 3.0])
def test_a_draft_is_measured_by_the_target_behind_its_own_codes(
    cfg: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every ratio again: the target run over the codes before the anchor and the draft's own, the drafter over the same."""
    target, guidance, sampling, levels = ToyTarget(), Guidance(cfg), Sampling(0.8, 8), 4
    drafter, seen = parallel(target), []
    prompt = target.prompt(["sea", "hill"], guidance.branches)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(target.vocab, (2, target.length), generator=generator)
    rows = guidance.rows(codes)
    next_inputs, features = drafter_inputs(target, prompt.embeds, rows, prompt.start)
    anchors = (prompt.embeds.shape[1] - 1 + torch.tensor([0, 5, 13])).expand(2, -1)
    batch = DraftBatch(prompt.embeds, prompt.start, codes, next_inputs[:2], guidance.merge(features), anchors)
    first, further = drafter.forward_sequence(
        batch.next_inputs, batch.features[:, :-1], anchors, levels - 1, batch.drafter_start
    )
    every = torch.cat((gather_slots(first, anchors[..., None]), further), 2)
    measure = DraftMeasure(target, guidance, sampling)
    draw = measure._draw

    def spy(*args: Any) -> Any:
        seen.append(draw(*args))
        return seen[-1]

    monkeypatch.setattr(measure, "_draw", spy)
    weights, survival = measure.weights(drafter, every, batch, torch.Generator().manual_seed(1))
    ((drafted, chance),) = seen
    in_picture = batch.level_slots(levels)[1]
    assert in_picture[0].tolist() == [[1] * 4, [1] * 4, [1, 1, 0, 0]]
    for picture, place in itertools.product(range(2), range(3)):
        root = int(anchors[picture, place]) - prompt.embeds.shape[1] + 1
        weight = survived = 1.0
        for level in range(int(in_picture[picture, place].sum())):
            before = torch.cat((codes[picture, : root + 1], drafted[picture, place, :level]))
            known = torch.cat((before, before[:1])).expand(guidance.branches, -1)
            own = slice(picture, None, 2)
            behind = drafter_inputs(target, prompt.embeds[own], known, prompt.start[own])[1][:, -1:]
            code = int(drafted[picture, place, level])
            p = sampling.probs(guidance.merge(target.head(behind)))[0, 0]
            here = every[picture, place, level]
            if level:
                here = drafter.condition_on(here, target.embed(drafted[picture, place, level - 1]))
            q = sampling.probs(target.head(here))
            assert float(q[code]) == pytest.approx(float(chance[picture, place, level]), rel=1e-9)
            weight = min(weight * float(p[code] / q[code]), 1.0)
            assert float(weights[picture, place, level]) == pytest.approx(weight, rel=1e-6, abs=1e-12)
            survived *= float(drafter.confidence(here).sigmoid())
            assert float(survival[picture, place, level]) == pytest.approx(survived, rel=1e-6)
