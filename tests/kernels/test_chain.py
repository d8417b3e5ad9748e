"""The codes of a chain, the distributions of neighbours and block verification in C, beside PyTorch in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.distributions import KINDS, chain_distribution, contexts, distance, sequences
from helpers.relaxed import RULES as SMALL_RULES
from helpers.relaxed import distributions_of
from kernels.drafting import HALF, TAIL, Turn, drafter_of, empty_chain, jointly
from torch import Tensor

from lanternpp import Pipeline
from lanternpp.accept.base import Acceptance
from lanternpp.accept.exact import Exact
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify.joint import chain_tails, node_weights
from lanternpp.kernels import Kernels
from lanternpp.kernels import loading as native
from lanternpp.kernels.linear import KernelLinear
from lanternpp.kernels.packing import KernelDrafter
from lanternpp.trees.static import chain_tree
from lanternpp.types import Draft

pytestmark = [
    pytest.mark.skipif(native.library() is None, reason="no kernels here"),
    pytest.mark.usefixtures("without_gradients"),
]

Threads = Callable[[int], None]
DIM, HIDDEN, LEVELS = 64, 32, 4  # of a `Turn`


def logits_in_c(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [LEVELS, V] -> distributions, by a head of zeros."""
    turn = Turn(logits.shape[1], 1, 0.0)
    turn.forbidden = logits[None]
    return turn.drawn(native.library(), sampling).probs[0, :-1].double()


@pytest.mark.parametrize("vocab", [64, 130, 1025])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0), Sampling(1, 9)], ids=["all", "greedy", "top-k"]
)
def test_nan_and_infinite_logits_give_a_valid_code(vocab: int, wrong: float, sampling: Sampling) -> None:
    turn = Turn(vocab, 2, 0.0)
    turn.forbidden = torch.full((2, LEVELS, vocab), wrong)
    assert turn.drawn(native.library(), sampling).codes.max() < vocab


def test_of_equal_codes_top_k_keeps_all_and_top_p_the_first() -> None:
    logits = torch.zeros(LEVELS, 100)
    logits[:, 70:] = 1
    for sampling, first in ((Sampling(1, 10), 70), (Sampling(1, 40), 0)):
        assert logits_in_c(logits, sampling)[0].nonzero()[:, 0].tolist() == [*range(first, 100)]
    assert logits_in_c(logits, Sampling(1, 0, 0.02))[0].nonzero()[:, 0].tolist() == [70, 71]  # 0.0182 each


def test_improbable_codes_keep_their_share() -> None:
    """One code has nearly all, and the other 40,000 together one in a million."""
    vocab, count = 40_001, 40_000
    logits = torch.zeros(LEVELS, vocab)
    logits[:, 0] = torch.tensor(4e10).log()
    turn = Turn(vocab, 1, 0.0)
    turn.forbidden = logits[None]
    for share in (0.25, 0.5, 0.75):
        turn.u[:] = 1 - 1e-6 * (1 - share)
        codes = turn.drawn(native.library(), Sampling()).codes[0, 1:]
        assert (codes - share * count).abs().max() < 100


def test_a_sample_does_not_depend_on_the_batch_nor_on_the_threads(library: object, threads: Threads) -> None:
    turn = Turn(300, 9)
    complete = turn.drawn(library, Sampling(0.9, 50, 0.9))
    for count, rows in ((1, slice(2, 3)), (2, slice(1, 6)), (3, slice(0, 9))):
        threads(count)
        part = turn.drawn(library, Sampling(0.9, 50, 0.9), rows)
        assert torch.equal(part.probs, complete.probs[rows]) and torch.equal(part.codes, complete.codes[rows])


def in_c(p: Tensor, q: Tensor, codes: Tensor, rule: Acceptance) -> tuple[Tensor, Tensor]:
    """`chain_tails` of chains, as C verifies them under a rule, for tests in float64; p, q [B, g + 1, V], q 0 after the last draft code."""
    budget = rule.as_numbers(p.shape[1] - 1)
    draft = Draft(chain_tree(len(p), p.shape[1] - 1, p.device), codes, q.float())
    u = torch.full((len(p), 1), 0.5, dtype=torch.float64)
    logits = p.log().clamp(min=-200).float()  # below -87 a probability is 0, and yet not forbidden
    found = jointly(native.library(), draft, logits, budget, u, u)
    distribution = found.distribution.double()
    left = distribution * node_weights(distribution, q, codes)[..., None] - q
    return found.node[:, 1:, TAIL], left.clamp_(min=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "vocab", "depth"),
    [("exact", 3, 4), ("exact", 5, 2), ("lantern", 4, 3), ("lantern++", 3, 3), ("lantern++, falling", 4, 3)],
)
def test_the_enumerated_distribution_is_that_of_the_rule(
    kind: str, name: str, vocab: int, depth: int
) -> None:
    """Of the exact rule the target's own."""
    p, q = contexts(vocab, depth, kind)
    rule, targets = Exact() if name == "exact" else SMALL_RULES[name](vocab), list[Tensor]()

    def recorded(p: Tensor, q: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        targets.append(p)
        return chain_tails(p, q, codes)

    # records the target's rows of every draft, in the order in which C gets them
    chain_distribution(recorded, p, q)
    distribution = distributions_of(p, q, rule)
    found, _ = chain_distribution(lambda _, q, codes: in_c(targets[0], q, codes, rule), distribution, q)
    assert distance(found, sequences(distribution)) < 1e-6


def test_unsupported_drafters_are_left_to_pytorch() -> None:
    library = native.library()
    turn, head = Turn(40, 17), KernelLinear(library, [(torch.randn(40, DIM).to(HALF), None)])
    kernels = Kernels(library)
    linear, other = (SimpleNamespace(native_head=x, head_linear=None) for x in (head.logits, None))
    made, headless = (kernels.drafter(turn.drafter, target) for target in (linear, other))
    inputs = {name: getattr(turn, name) for name in ("features", "query", "u", "prev")} | {"bias": None}
    for each, drawn in ((made, True), (headless, False)):
        assert each.sample(empty_chain(17, LEVELS, 40), (1.0, 0, 1.0), **inputs) == drawn
    assert made.inputs(torch.zeros(1, 1, DIM), torch.zeros(1, 1, DIM), 1, None) is None
    assert kernels.drafter(drafter_of(DIM, HIDDEN).float(), linear) is None
    assert kernels.drafter(drafter_of(DIM, 24), linear) is None, "an odd width"


def test_the_inputs_of_a_drafter_are_those_of_pytorch(library: object) -> None:
    """Layers below the target's last, hints, and more queries than were trained."""
    torch.manual_seed(0)
    drafter = drafter_of(DIM, HIDDEN, aux_layers=(0, 1))
    torch.nn.init.normal_(drafter.queries)
    embeds, hints = torch.randn(3, 5, DIM).to(HALF), torch.randn(3, 9, DIM).to(HALF)
    features = torch.cat((torch.randn(3, 5, DIM), 9 * torch.randn(3, 5, 2 * DIM)), -1).to(HALF)
    found = KernelDrafter(drafter, None, library).inputs(embeds, features, 4, hints)
    usual = drafter.inputs(embeds, features, 4, 1, hints)
    assert found is not None and torch.allclose(found, usual, rtol=0.02, atol=0.03)


def test_the_shipped_model_drafts_what_pytorch_drafts(
    nature: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to rounding, after the same draft codes; hints of rejected codes are read."""
    engine = nature.new_engine(nature.settings("lantern++", batch_size=2))
    for slot in (0, 1):
        engine.admit(slot, "a photo of a red tulip", 3 + slot)
    proposer: Any = engine.proposer
    assert proposer.drafter.native is not None
    while not proposer.hints.any():
        engine.step()
    one = proposer.propose(engine.noise)
    one = replace(one, probs=one.probs.clone())
    proposer.cache.used -= proposer.waiting  # to run it again
    monkeypatch.setattr(proposer.drafter, "native", None)
    other = proposer.propose(engine.noise)
    same = (one.codes == other.codes).cumprod(1)[:, :-1]
    assert same[:, 1].any() and ((one.probs - other.probs)[:, :-1].abs().sum(-1) * same).max() < 0.08
    for name in ("parent", "depth", "children", "mask", "widths"):
        assert torch.equal(*(torch.as_tensor(getattr(draft.tree, name)) for draft in (one, other)))


def test_drafter_and_target_share_the_packed_head(nature: Pipeline) -> None:
    """In memory once."""
    drafter: Any = nature.model.network("parallel")
    assert drafter.native.head is nature.target.native_head.__self__
