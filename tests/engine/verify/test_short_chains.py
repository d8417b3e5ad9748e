"""Chains that end where the drafter is unsure: every draft, every outcome and every code, in float64, and draws of an engine."""

from __future__ import annotations

import pytest
import torch
from helpers.distributions import ChainStops, chain_distribution, chi_square, contexts, distance, sequences
from helpers.relaxed import RULES, distributions_of
from helpers.toys import CHAIN, MarkovTarget, Outputs, ToyTarget, counts, engine_of, parallel
from torch import Tensor

from lanternpp.accept.base import Acceptance
from lanternpp.accept.exact import Exact
from lanternpp.engine.batching import generate
from lanternpp.engine.decode import Engine
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify import joint
from lanternpp.engine.verify.joint import rejection_tails, verify_joint
from lanternpp.proposers.parallel import Parallel, _masked
from lanternpp.trees.static import StaticTree, chain, chain_tree
from lanternpp.types import Draft, TargetOutput, Tree

CASES = [(3, 1), (3, 2), (3, 3), (4, 2)]
KINDS = ["random", "near", "with zeros", "a point", "forced", "all of them"]
# by number of draft codes, from 1 on: whether a chain ends after these codes, [V ** number]
Ends = list[Tensor]


def ends_of(vocab: int, depth: int, seed: int = 0, peek: int = 0) -> Ends:
    """A random rule that ends a chain by the codes drafted so far. peek: by so many later codes too, which would be wrong."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(vocab ** (level + peek), generator=generator) < 0.4 for level in range(1, depth)]


def lengths_of(codes: Tensor, vocab: int, ends: Ends, peek: int = 0) -> Tensor:
    """How many draft codes chains of codes [D, g + 1] have."""
    depth = codes.shape[1] - 1
    lengths = torch.full((len(codes),), depth)
    for level in range(depth - 1 - peek, 0, -1):
        at = torch.zeros(len(codes), dtype=torch.int64)
        for code in codes[:, 1 : 1 + level + peek].T:
            at = at * vocab + code
        lengths = lengths.where(~ends[level - 1][at], level)
    return lengths


def jointly(ends: Ends, peek: int = 0, rule: Acceptance | None = None) -> ChainStops:
    """Where `verify_joint` ends chains that are cut, and the weights of the code drawn there.

    Chains are masked as the proposer masks them; codes drawn after their ends are still there.
    """

    def found(ps: Tensor, qs: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        seen, lengths = list[tuple[Tensor, Tensor]](), lengths_of(codes, ps.shape[-1], ends, peek)

        def recorded(p: Tensor, q: Tensor, codes: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
            seen.append(rejection_tails(p, q, codes, tree))
            return seen[-1]

        noise = Noise(torch.arange(len(ps)), torch.ones(len(ps), dtype=torch.int64))
        depth = codes.shape[1] - 1
        tree = _masked(chain_tree(len(codes), depth, codes.device), lengths, torch.arange(depth + 1))
        draft = Draft(tree, codes, qs + 0.5 * (qs.sum(-1, keepdim=True) == 0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(joint, "rejection_tails", recorded)
            verify_joint(draft, ps.log().clamp(min=-700), Sampling(), rule or Exact(), noise)
        return seen[0]

    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "depth"), CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_chain_that_ends_by_what_was_drafted_keeps_the_targets_distribution(
    vocab: int, depth: int, kind: str, seed: int
) -> None:
    (p, q), ends = contexts(vocab, depth, kind), ends_of(vocab, depth, seed)
    assert distance(chain_distribution(jointly(ends), p, q)[0], sequences(p)) < 1e-12


@pytest.mark.parametrize("kind", ["random", "with zeros"])
def test_a_chain_that_ends_by_a_code_which_it_drops_is_detected(kind: str) -> None:
    """So the test above can fail: the code that decides must be verified too."""
    p, q = contexts(3, 3, kind)
    distribution, _ = chain_distribution(jointly(ends_of(3, 3, peek=1), peek=1), p, q)
    assert distance(distribution, sequences(p)) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_under_a_relaxed_rule_the_distribution_is_the_rules_within_the_draft(rule: str) -> None:
    """And the target's after its end: a shorter chain relaxes less."""
    (p, q), ends = contexts(3, 3, "random"), ends_of(3, 3)
    made, every = RULES[rule](3), torch.cartesian_prod(*[torch.arange(3)] * 3)
    lengths = lengths_of(torch.cat((torch.zeros_like(every[:, :1]), every), 1), 3, ends)
    drafted = [table * (lengths > level).view(3**level, -1)[:, :1] for level, table in enumerate(q)]
    distribution = distributions_of(p, drafted, made)

    def of_the_target(distribution: Tensor, qs: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        at, ps = torch.zeros(len(codes), dtype=torch.int64), [p[0].expand(len(codes), -1)]
        for level in range(1, 4):
            at = at * 3 + codes[:, level]
            ps.append(p[level][at])
        return jointly(ends, rule=made)(torch.stack(ps, 1), qs, codes)

    assert distance(chain_distribution(of_the_target, distribution, q)[0], sequences(distribution)) < 1e-12


# Through the proposer and the engine.


def engine(target: ToyTarget, batch: int, cut: float, verify: str) -> tuple[Engine, Outputs]:
    drafter = parallel(target)
    drafter.confidence.weight.mul_(3)
    proposer = Parallel(drafter, StaticTree(chain(4)))
    proposer.min_survival = cut
    loop, outputs = engine_of(target, proposer, batch, verify=verify), Outputs()
    loop.observers.append(outputs)
    return loop, outputs


def lengths(output: TargetOutput) -> Tensor:
    """How many draft codes the chains of a pass had."""
    return (output.draft.tree.children[..., 0] >= 0).sum(1)


def nodes(outputs: Outputs) -> list[int]:
    """The nodes of every pass."""
    return [output.draft.codes.shape[1] for output in outputs.seen]


@pytest.mark.parametrize("verify", ["block", "token"])
def test_an_engine_with_short_chains_draws_the_targets_distribution(verify: str) -> None:
    target = MarkovTarget(CHAIN)
    loop, outputs = engine(target, 20_000, 0.3, verify)
    found = counts(loop, 4, 40_000)
    seen = torch.cat([lengths(output) for output in outputs.seen]).bincount(minlength=5)[1:]
    assert (seen[:2] > 500).all() and not seen[2:].any(), (
        "chains of one code and of two, as three codes are left"
    )
    assert chi_square(found, target.distribution()) > 1e-3


@pytest.mark.parametrize("verify", ["block", "token"])
@torch.inference_mode()
def test_a_picture_is_the_same_alone_with_shorter_passes_and_in_a_batch(verify: str) -> None:
    target = ToyTarget()
    together, outputs = engine(target, 3, 0.25, verify)
    pictures = generate(together, ["sea", "hill", "a"], [1, 2, 3])
    short, alone = [], []
    for condition, seed in (("sea", 1), ("hill", 2), ("a", 3)):
        loop, own = engine(target, 1, 0.25, verify)
        alone += generate(loop, [condition], [seed])
        assert nodes(own) == [1 + int(lengths(output)) for output in own.seen]
        short += nodes(own)
    assert [one.codes.tolist() for one in pictures] == [one.codes.tolist() for one in alone]
    assert [one.accepted for one in pictures] == [one.accepted for one in alone]
    assert min(short) < 5 and len(set(short)) > 2 and max(nodes(outputs)) == 5
    uncut, _ = engine(target, 1, 0.0, verify)
    assert sum(short) < 3 * 5 * sum(len(one.accepted) for one in generate(uncut, ["sea"], [1]))
