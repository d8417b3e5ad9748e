"""Joint verification of chains and trees, enumerated: every draft, every node it may end at, every code drawn there, in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.distributions import (
    KINDS,
    Contexts,
    Drafts,
    chi_square,
    contexts,
    distance,
    sequences,
    tally,
    tree_distribution,
    tree_drafts,
)
from helpers.relaxed import RULES, TABLES, distributions_of
from torch import Tensor

from lanternpp.accept.base import Acceptance
from lanternpp.accept.exact import Exact
from lanternpp.accept.mixture import DraftMixture
from lanternpp.accept.neighbours import Lantern
from lanternpp.accept.scaled import Cactus
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify.joint import rejection_tails, verify_joint
from lanternpp.trees.static import Shape, chain
from lanternpp.types import Tree

SHAPES: dict[str, Shape] = {
    **{f"chain of {length}": chain(length) for length in range(1, 5)},
    "two by two": ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)),
    "three by two": tuple((i, *below) for i in range(3) for below in ((), (0,), (1,))),
    "ragged": ((0,), (1,), (2,), (1, 0), (1, 1), (2, 0)),
    "three levels": ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)),
}
CHAINS = [(3, "chain of 1"), (3, "chain of 4"), (4, "chain of 3"), (5, "chain of 2")]
TREES = [(3, "two by two"), (3, "three by two"), (4, "two by two"), (5, "two by two"), (4, "ragged")]
every_case = pytest.mark.parametrize(("vocab", "shape"), [*CHAINS, *TREES, (3, "three levels")])
every_kind = pytest.mark.parametrize("kind", KINDS)


def enumerated(vocab: int, shape: str, kind: str) -> tuple[Drafts, Contexts, Contexts]:
    paths = SHAPES[shape]
    p, q = contexts(vocab, max(map(len, paths)), kind)
    return tree_drafts(paths, p, q), p, q


@every_case
@every_kind
def test_the_distribution_is_the_targets(vocab: int, shape: str, kind: str) -> None:
    drafts, p, _ = enumerated(vocab, shape, kind)
    assert drafts.chance.sum().item() == pytest.approx(1)
    distribution, _, after = tree_distribution(rejection_tails, drafts, drafts.p, p)
    assert distance(distribution, sequences(p)) < 1e-12
    for depth, found in zip(drafts.draft.tree.depth[0].tolist(), after, strict=True):
        assert distance(found, found.sum(-1, keepdim=True) * p[depth]) < 1e-12, "at every node by itself"


@pytest.mark.parametrize("rule", RULES)
@every_kind
@pytest.mark.parametrize(("vocab", "shape"), [(4, "chain of 2"), (3, "three by two"), (4, "ragged")])
def test_under_a_relaxed_rule_the_distribution_is_the_rules(
    rule: str, kind: str, vocab: int, shape: str
) -> None:
    """At a node that has children; elsewhere nothing is drafted and the distribution is the target's."""
    drafts, p, q = enumerated(vocab, shape, kind)
    distributions = distributions_of(p, q, RULES[rule](vocab))
    tree, at = drafts.draft.tree, drafts.at
    inner, depths = (tree.children[0, :, 0] >= 0).tolist(), tree.depth[0].tolist()
    tables = [distributions[depth] if has else p[depth] for has, depth in zip(inner, depths, strict=True)]
    distribution = torch.stack([table[at[:, node]] for node, table in enumerate(tables)], 1)
    total, _, after = tree_distribution(rejection_tails, drafts, distribution, distributions)
    for found, table in zip(after, tables, strict=True):
        assert distance(found, found.sum(-1, keepdim=True) * table) < 1e-12
    if shape != "ragged":
        assert distance(total, sequences(distributions)) < 1e-12
    if kind == "random":
        assert distance(sequences(distributions), sequences(p)) > 1e-3, "the rule changes the distribution"


# A second implementation in plain Python, one node after another.


def reference_tails(
    p: Tensor, q: Tensor, codes: Tensor, tree: Tree, update: str = "the paper's"
) -> tuple[Tensor, Tensor]:
    """`rejection_tails` as the paper walks the tree. update: of a node's weight, when a child is rejected."""
    chances, bonus = torch.zeros(p.shape[:2], dtype=torch.float64), p.clone()
    for draft in range(len(p)):
        reach = 1.0

        def visit(node: int, weight: float, draft: int = draft) -> None:
            nonlocal reach
            left, rest = p[draft, node].tolist(), q[draft, node].tolist()
            for child in tree.children[draft, node].tolist():
                code = int(codes[draft, child])
                if child < 0 or rest[code] == 0:
                    continue
                visit(child, min(weight * left[code] / rest[code], 1.0))
                beyond = [max(weight * a - b, 0.0) for a, b in zip(left, rest, strict=True)]
                if update == "with replacement":
                    without_code = list(rest)
                else:
                    without_code = [0.0 if y == code else b for y, b in enumerate(rest)]
                mass = sum(beyond)
                if update == "a public one":
                    weight = min(mass / sum(without_code), 1.0) if sum(without_code) else 1.0
                elif update == "none":
                    weight = weight if node else 1.0
                else:
                    weight = mass / (mass + 1 - weight) if node and mass + 1 - weight else 1.0
                left = [b / mass for b in beyond] if mass else left
                rest = [b / sum(without_code) for b in without_code] if sum(without_code) else without_code
            weight = weight if node else 1.0
            chances[draft, node], bonus[draft, node] = reach * weight, torch.tensor(left)
            reach *= 1 - weight

        visit(0, 1.0)
    return chances[:, tree.layout.order].cumsum(1)[:, :-1], bonus


@pytest.mark.parametrize(
    ("vocab", "shape"), [(4, "chain of 3"), (3, "two by two"), (4, "ragged"), (3, "three levels")]
)
@pytest.mark.parametrize("kind", ["random", "with zeros", "all of them"])
def test_tails_are_those_of_a_walk_node_by_node(vocab: int, shape: str, kind: str) -> None:
    drafts, _, _ = enumerated(vocab, shape, kind)
    given = drafts.p, drafts.draft.probs, drafts.draft.codes, drafts.draft.tree
    (tails, left), (expected, bonus) = rejection_tails(*given), reference_tails(*given)
    assert distance(tails, expected) < 1e-12
    ends = torch.cat((tails, torch.ones_like(tails[:, :1])), 1).diff(dim=1, prepend=0 * tails[:, :1])
    order = drafts.draft.tree.layout.order
    left, bonus = (left / left.sum(-1, keepdim=True))[:, order], bonus[:, order]
    assert distance(left[ends > 1e-9], bonus[ends > 1e-9]) < 1e-6


def no_residual(p: Tensor, q: Tensor, codes: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """The target itself in place of what is left of it."""
    return rejection_tails(p, q, codes, tree)[0], p


def tokenwise_residual(p: Tensor, q: Tensor, codes: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """The residual of one rejected child, as if nothing had been lost above."""
    return rejection_tails(p, q, codes, tree)[0], (p - q).clamp(min=0)


def each_as_the_last(p: Tensor, q: Tensor, codes: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """Each code on its own weight, as if it were the last one."""
    left = rejection_tails(p, q, codes, tree)[1]
    weight = left.sum(-1) / left.sum(-1).clamp(min=1)
    return (1 - weight[:, 1:]).flip(1).cumprod(1).flip(1), left


CHAIN, TREE = "chain of 3", "two by two"
WRONG = [
    *((shape, wrong) for shape in (CHAIN, TREE) for wrong in (no_residual, tokenwise_residual)),
    (CHAIN, each_as_the_last),
    *((TREE, partial(reference_tails, update=name)) for name in ("a public one", "none", "with replacement")),
]


@pytest.mark.parametrize(("shape", "wrong"), WRONG)
@pytest.mark.parametrize("kind", ["random", "all of them"])
def test_a_wrong_residual_or_weight_is_detected(shape: str, wrong, kind: str) -> None:
    drafts, p, _ = enumerated(4 if shape == CHAIN else 3, shape, kind)
    assert distance(tree_distribution(wrong, drafts, drafts.p, p)[0], sequences(p)) > 1e-3


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_single_precision_follows_the_distribution_too(shape: str) -> None:
    for kind in ("random", "equal", "all of them"):
        drafts, p, _ = enumerated(4, shape, kind)

        def single(p: Tensor, q: Tensor, codes: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
            tails, left = rejection_tails(p.float(), q.float(), codes, tree)
            return tails, left.double()

        assert distance(tree_distribution(single, drafts, drafts.p, p)[0], sequences(p)) < 1e-6


@pytest.mark.parametrize("kind", ["random", "near"])
def test_a_repeated_sibling_does_not_count_as_rejected(kind: str) -> None:
    """Where few distinct codes are drawn, a row ends in repetitions, though its q has more. How soon depends on its codes."""
    drafts, p, _ = enumerated(4, "two by two", kind)
    codes = drafts.draft.codes.clone()
    codes[:, 2] = codes[:, 1]
    missing = 0.3 + 0.1 * codes[:, 1].double()
    repeated = replace(drafts, draft=replace(drafts.draft, codes=codes), chance=drafts.chance * missing)
    found = replace(drafts, chance=drafts.chance * (1 - missing))
    distributions = [tree_distribution(rejection_tails, some, some.p, p)[0] for some in (repeated, found)]
    assert distance(sum(distributions), sequences(p)) < 1e-12


# Through `verify_joint` itself.

VOCAB, DRAWS = 4, 100_000
every_shape = pytest.mark.parametrize("shape", ["chain of 2", TREE])


def drawn(rule: Acceptance, shape: str, kind: str, draws: int, measure_tv: bool = False):
    """Drafts drawn from q and verified: the verdict, and the contexts' p and q. No code is forbidden by the format."""
    p, q = contexts(VOCAB, 2, kind)
    numbers = torch.rand(draws, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    drafts = tree_drafts(SHAPES[shape], p, q, numbers)
    noise = Noise(torch.arange(draws), torch.ones(draws, dtype=torch.int64)).precomputed(2)[0]
    logits = drafts.p.log().clamp(min=-700)
    return verify_joint(drafts.draft, logits, Sampling(), rule, noise, measure_tv), p, q


@every_shape
@pytest.mark.parametrize(
    ("rule", "kind"),
    [("exact", "with zeros"), ("exact", "forced"), *((rule, "random") for rule in ("exact", *RULES))],
)
def test_drawn_codes_follow_the_distribution(rule: str, kind: str, shape: str) -> None:
    made = Exact() if rule == "exact" else RULES[rule](VOCAB)
    verdict, p, q = drawn(made, shape, kind, DRAWS if rule == "exact" else DRAWS // 4)
    tables = distributions_of(p, q, made)
    codes = verdict.next_codes.clone()
    generator = torch.Generator().manual_seed(3)
    for level in range(1, 3):
        missing = verdict.kept <= level
        at = (codes[:, :level] * VOCAB ** torch.arange(level - 1, -1, -1)).sum(1)
        codes[missing, level] = torch.multinomial(tables[level][at[missing]], 1, generator=generator)[:, 0]
    assert chi_square(tally(codes, VOCAB), sequences(tables)) > 1e-3
    drafts = tree_drafts(SHAPES[shape], p, q)
    depth = drafts.draft.tree.depth[0]
    distribution = torch.stack([tables[d][drafts.at[:, i]] for i, d in enumerate(depth.tolist())], 1)
    kept = tree_distribution(rejection_tails, drafts, distribution, tables)[1]
    levels = [kept[depth == level].sum() for level in range(3)]
    lengths = torch.stack((*levels, torch.zeros(()))).double().diff().neg()
    assert chi_square((verdict.kept - 1).bincount(minlength=3), lengths) > 1e-3


@every_shape
@pytest.mark.parametrize("rule", RULES)
def test_the_measured_cost_is_the_distance_at_every_kept_node(rule: str, shape: str) -> None:
    made = RULES[rule](VOCAB)
    verdict, p, q = drawn(made, shape, "random", 2000, measure_tv=True)
    costs = [(one - own).abs().sum(-1) / 2 for one, own in zip(distributions_of(p, q, made), p, strict=True)]
    deeper = verdict.kept > 1
    assert torch.allclose(verdict.tv_cost[:, 0], costs[0][0].expand(2000))
    assert torch.allclose(verdict.tv_cost[deeper, 1], costs[1][verdict.next_codes[deeper, 0]])
    assert verdict.tv_cost[verdict.kept > 2, 2].max() < 1e-12
    assert max(float(one.max()) for one in costs) > 1e-2


@every_shape
def test_a_code_that_the_format_forbids_is_never_accepted_nor_drawn(shape: str) -> None:
    """Though the drafter draws it, and its neighbours have mass."""
    q = [torch.full((VOCAB**level, VOCAB), 1 / VOCAB, dtype=torch.float64) for level in range(3)]
    numbers = torch.rand(2000, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    draft = tree_drafts(SHAPES[shape], q, q, numbers).draft
    logits = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64).log().expand(*draft.codes.shape, -1)
    noise = Noise(torch.arange(2000), torch.ones(2000, dtype=torch.int64))
    for rule in (Exact(), Lantern(TABLES[4], 1.0, "optimal"), Cactus(5.0), DraftMixture(0.9)):
        verdict = verify_joint(draft, logits, Sampling(), rule, noise)
        decided = torch.arange(3) < verdict.kept[:, None]
        assert verdict.next_codes[decided].max() < 2 and verdict.kept.max() == 3


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_improbable_codes_do_not_overflow(shape: str) -> None:
    drafts, _, _ = enumerated(3, shape, "random")
    tiny = torch.tensor([1.0, 1e-30, 1e-30 if shape == CHAIN else 1e-44])
    p, q = tiny.expand_as(drafts.p), tiny.flip(0) * (drafts.draft.tree.children[..., :1] >= 0)
    for one, other in ((p, q), (q, p), (p, p)):
        tails, left = rejection_tails(one, other, drafts.draft.codes, drafts.draft.tree)
        assert left.isfinite().all() and (left >= 0).all()
        assert ((tails >= 0) & (tails <= 1)).all()
