"""How much of a draft block verification keeps: the estimate that is trained by, and the measurement behind held-out codes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers.distributions import Contexts, chain_distribution, contexts
from helpers.toys import ToyTarget, parallel

from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify.joint import chain_tails
from lanternpp.training.drafts import DraftBatch, DraftMeasure, chain_gain, gather_slots, keep_chances
from lanternpp.training.features import drafter_inputs


def estimates(p: Contexts, q: Contexts) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all chains, each as often as the target draws it: the estimated w_1 .. w_g and the last guess's own chances, [chains, g]."""
    vocab, depth = p[0].shape[-1], len(q)
    found = []
    for chain in itertools.product(range(vocab), repeat=depth):
        at, often, rows = 0, 1.0, []
        for level, code in enumerate(chain):
            rows.append((p[level][at], q[level][at]))
            often *= float(p[level][at, code])
            at = at * vocab + code
        if often:
            ps, qs = (torch.stack(each) for each in zip(*rows, strict=True))
            reach, keep = keep_chances(ps, qs.log(), torch.tensor(chain))
            found.append((often * reach * keep, keep))
    kept, keep = (torch.stack(each) for each in zip(*found, strict=True))
    return kept, keep


@pytest.mark.parametrize(("vocab", "depth"), [(3, 1), (3, 4), (4, 3)])
@pytest.mark.parametrize("kind", ["random", "near", "equal", "forced"])
def test_the_estimate_from_the_targets_own_chains_is_what_drafts_keep(
    kind: str, vocab: int, depth: int
) -> None:
    p, q = contexts(vocab, depth, kind)
    _, kept = chain_distribution(chain_tails, p, q)
    assert estimates(p, q)[0].sum(0).tolist() == pytest.approx(kept.tolist(), abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_along_its_gradient_drafts_keep_more(seed: int) -> None:
    """The codes enumerated before and after small steps from a random drafter."""
    p, q = contexts(3, 3, "random", seed)
    logits = [table.log().requires_grad_() for table in q]
    found = []
    for _ in range(5):
        laws = [x.softmax(-1) for x in logits]
        found.append(float(chain_distribution(chain_tails, p, [x.detach() for x in laws])[1].sum()))
        grads = torch.autograd.grad(chain_gain(*estimates(p, laws)), logits)
        with torch.no_grad():
            for x, slope in zip(logits, grads, strict=True):
                x += 0.3 * slope
    assert found == sorted(found) and found[-1] > found[0] + 0.01


def test_a_guess_does_not_learn_which_code_was_recorded() -> None:
    """It would know its pictures by heart, and drafts keep no more for it."""
    p, q = contexts(4, 2, "random")
    ways = []
    for code in range(4):
        logits = q[0][0].log().requires_grad_()
        ps, log_q = torch.stack((p[0][0], p[1][code])), q[1][code].log()
        reach, keep = keep_chances(ps, torch.stack((logits.log_softmax(-1), log_q)), torch.tensor([code, 0]))
        (slope,) = torch.autograd.grad(chain_gain(reach * keep, keep), logits)
        ways.append(slope / slope.norm())
    for way in ways[1:]:
        assert torch.allclose(way, ways[0])


def test_a_ratio_beyond_all_bounds_leaves_the_gradient_finite() -> None:
    p = torch.tensor([[1e-30, 1.0], [0.5, 0.5]])
    logits = torch.tensor([[80.0, -80.0], [0.0, 0.0]], requires_grad=True)
    reach, chance = keep_chances(p, logits.log_softmax(-1), torch.tensor([0, 1]))
    kept = reach * chance
    chain_gain(kept, chance).backward()
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
