"""A draft without branches is judged all at once; it must come out as if it had been walked."""

import pytest
import torch
from torch import Tensor

from lanternpp.accept.base import Acceptance
from lanternpp.accept.cool import Cool
from lanternpp.accept.exact import Exact
from lanternpp.accept.lantern import Lantern
from lanternpp.accept.lantern_pp import LanternPlusPlus
from lanternpp.engine import verify as module
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify import verify
from lanternpp.types import Draft, Tree

CODES, DEPTH, SAMPLES = 12, 5, 400
NEAR = torch.stack(
    [torch.randperm(CODES, generator=torch.Generator().manual_seed(i))[:4] for i in range(CODES)]
)
RULES: dict[str, Acceptance] = {
    "exact": Exact(),
    "lantern": Lantern(NEAR, 0.3),
    "lantern++": LanternPlusPlus(NEAR, 4.0),
    "lantern++ optimal": LanternPlusPlus(NEAR, 4.0, "optimal"),
    "cool": Cool(2.6, 0.2),
    "cool paper": Cool(2.6, 0.4, "paper"),
    "cool, one weight": Cool(1.5),
}
SAMPLINGS = {"as it is": Sampling(), "few": Sampling(0.7, top_k=5), "greedy": Sampling(0)}


def draft(known: bool) -> tuple[Draft, Tensor]:
    """Chains of which some end early, guess what q gives no chance, or what the format forbids; and logits."""
    torch.manual_seed(5)
    logits = torch.randn(SAMPLES, DEPTH + 1, CODES, dtype=torch.float64)
    q = (logits + torch.randn_like(logits)).softmax(-1)
    q[torch.rand_like(q) < 0.2] = 0
    codes = torch.cat((torch.zeros(SAMPLES, 1, dtype=torch.int64), q[:, :-1].argmax(-1)), 1)
    codes[torch.rand(SAMPLES, DEPTH + 1) < 0.1] = 3
    logits[torch.rand_like(logits) < 0.1] = float("-inf")
    ids = torch.arange(DEPTH + 1).expand(SAMPLES, -1)
    children = (ids + 1).clone()
    children[:, -1] = -1
    for sample, end in enumerate(torch.randint(0, 3 * DEPTH, (SAMPLES,)).tolist()):
        children[sample, end:] = -1
    mask = torch.ones(DEPTH + 1, DEPTH + 1, dtype=torch.bool).tril().expand(SAMPLES, -1, -1)
    return Draft(
        Tree(ids - 1, ids, children[..., None], mask, (1,) * DEPTH), codes, q if known else None
    ), logits


@pytest.mark.parametrize("known", [True, False], ids=["drawn from q", "guessed"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("rule", RULES)
def test_a_chain_is_judged_as_a_walk_would(
    rule: str, sampling: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    guesses, logits = draft(known)
    noise = Noise(torch.arange(SAMPLES), torch.ones(SAMPLES, dtype=torch.int64)).precomputed(DEPTH)[0]
    assert guesses.tree.chain
    swift = verify(guesses, logits, SAMPLINGS[sampling], RULES[rule], noise)
    monkeypatch.setattr(Tree, "chain", False)
    monkeypatch.setattr(module, "_verify_chain", None)
    walked = verify(guesses, logits, SAMPLINGS[sampling], RULES[rule], noise)
    assert {1, 2, 3, 4} <= {*swift.kept.tolist()}, "walks of several lengths"
    for name in ("path", "kept", "next_codes", "bonus"):
        assert torch.equal(getattr(swift, name), getattr(walked, name)), name


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_takes_the_short_way_on_a_chain(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(module, "_verify_chain", lambda *_: taken.append(rule))
    guesses, logits = draft(True)
    verify(guesses, logits, Sampling(), RULES[rule], Noise(torch.arange(SAMPLES), torch.ones(SAMPLES)))
    assert taken == [rule]
    same = [RULES[rule].at(level) is RULES[rule] for level in range(DEPTH)]
    assert same == [True, *([rule not in ("cool", "cool paper")] * (DEPTH - 1))]
