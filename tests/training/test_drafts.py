"""How much of a draft block verification accepts: the estimate for training and validation."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.distributions import Contexts, chain_distribution, contexts

from lanternpp.engine.verify.joint import chain_tails
from lanternpp.training.parallel import chain_acceptance, chain_gain


def estimates(p: Contexts, q: Contexts) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all chains, each as often as the target draws it: the estimated w_1 .. w_g and the last draft code's own chances, [chains, g]."""
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
            reach, keep = chain_acceptance(ps, qs.log(), torch.tensor(chain))
            found.append((often * reach * keep, keep))
    kept, keep = (torch.stack(each) for each in zip(*found, strict=True))
    return kept, keep


@pytest.mark.parametrize(("vocab", "depth"), [(3, 1), (3, 4), (4, 3)])
@pytest.mark.parametrize("kind", ["random", "near", "equal", "forced"])
def test_the_estimate_from_the_targets_own_chains_is_the_acceptance_of_drafts(
    kind: str, vocab: int, depth: int
) -> None:
    p, q = contexts(vocab, depth, kind)
    _, kept = chain_distribution(chain_tails, p, q)
    assert estimates(p, q)[0].sum(0).tolist() == pytest.approx(kept.tolist(), abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_along_its_gradient_acceptance_rises(seed: int) -> None:
    """The codes enumerated before and after small steps from a random drafter."""
    p, q = contexts(3, 3, "random", seed)
    logits = [table.log().requires_grad_() for table in q]
    found = []
    for _ in range(5):
        probs = [x.softmax(-1) for x in logits]
        found.append(float(chain_distribution(chain_tails, p, [x.detach() for x in probs])[1].sum()))
        grads = torch.autograd.grad(chain_gain(*estimates(p, probs)), logits)
        with torch.no_grad():
            for x, slope in zip(logits, grads, strict=True):
                x += 0.3 * slope
    assert found == sorted(found) and found[-1] > found[0] + 0.01


def test_the_gradient_does_not_depend_on_the_recorded_code() -> None:
    """Otherwise it would overfit, and drafts would be accepted no more often."""
    p, q = contexts(4, 2, "random")
    slopes = []
    for code in range(4):
        logits = q[0][0].log().requires_grad_()
        ps, log_q = torch.stack((p[0][0], p[1][code])), q[1][code].log()
        reach, keep = chain_acceptance(
            ps, torch.stack((logits.log_softmax(-1), log_q)), torch.tensor([code, 0])
        )
        (slope,) = torch.autograd.grad(chain_gain(reach * keep, keep), logits)
        slopes.append(slope / slope.norm())
    for slope in slopes[1:]:
        assert torch.allclose(slope, slopes[0])


def test_an_extreme_ratio_has_a_finite_gradient() -> None:
    p = torch.tensor([[1e-30, 1.0], [0.5, 0.5]])
    logits = torch.tensor([[80.0, -80.0], [0.0, 0.0]], requires_grad=True)
    reach, chance = chain_acceptance(p, logits.log_softmax(-1), torch.tensor([0, 1]))
    kept = reach * chance
    chain_gain(kept, chance).backward()
    assert kept.isfinite().all() and logits.grad is not None and logits.grad.isfinite().all()
