"""Block verification enumerated: every draft, every place it may end, every code drawn there, in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.laws import KINDS, Contexts, chain_law, chi_square, contexts, distance, kept_of, sequences, tally
from helpers.relaxed import RULES, TABLES, laws_of
from torch import Tensor

from lanternpp.accept.base import Acceptance
from lanternpp.accept.cactus import Cactus
from lanternpp.accept.exact import Exact
from lanternpp.accept.lantern import Lantern
from lanternpp.accept.mixture import DraftMixture
from lanternpp.engine.block import stops, verify_block
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.trees.chain import chain_tree
from lanternpp.types import Draft

CASES = [(3, 1), (3, 2), (3, 3), (3, 4), (4, 2), (4, 3), (5, 1), (5, 2), (5, 3)]
every_case = pytest.mark.parametrize(("vocab", "depth"), CASES)
every_kind = pytest.mark.parametrize("kind", KINDS)
every_rule = pytest.mark.parametrize("rule", RULES)


@every_case
@every_kind
def test_the_law_is_the_targets(vocab: int, depth: int, kind: str) -> None:
    p, q = contexts(vocab, depth, kind)
    law, _ = chain_law(stops, p, q)
    assert distance(law, sequences(p)) < 1e-12


def weights(p: Contexts, q: Contexts, draft: tuple[int, ...]) -> list[float]:
    """w_1 .. w_g of a draft, written again from the paper."""
    found, at = [1.0], 0
    for level, code in enumerate(draft):
        chance = float(q[level][at, code])
        found.append(min(found[-1] * float(p[level][at, code]) / chance, 1.0) if chance else 0.0)
        at = at * len(q[level][at]) + code
    return found[1:]


@every_case
@pytest.mark.parametrize("kind", ["random", "near", "with zeros", "forced"])
def test_a_guess_is_kept_with_its_weight_whatever_stands_behind_it(vocab: int, depth: int, kind: str) -> None:
    """So a draft decides 1 + sum E[w_i] codes, and a longer one keeps no fewer of its first guesses."""
    p, q = contexts(vocab, depth, kind)
    mean = [0.0] * depth
    for draft in itertools.product(range(vocab), repeat=depth):
        at, chance = 0, 1.0
        for level, code in enumerate(draft):
            chance *= float(q[level][at, code])
            at = at * vocab + code
        for i, weight in enumerate(weights(p, q, draft)):
            mean[i] += chance * weight
    for shorter in range(1, depth + 1):
        _, kept = chain_law(stops, p[: shorter + 1], q[:shorter])
        assert kept.tolist() == pytest.approx(mean[:shorter], abs=1e-12)


@every_case
def test_it_keeps_no_less_than_a_walk(vocab: int, depth: int) -> None:
    p, q = contexts(vocab, depth, "random")
    _, kept = chain_law(stops, p, q)
    assert (kept >= kept_of(p, q) - 1e-12).all()
    if depth > 1:
        assert kept.sum() > kept_of(p, q).sum() + 1e-3


@every_rule
@every_kind
@pytest.mark.parametrize(("vocab", "depth"), [(3, 3), (4, 2), (5, 2)])
def test_under_a_relaxed_rule_it_is_that_rules(rule: str, kind: str, vocab: int, depth: int) -> None:
    p, q = contexts(vocab, depth, kind)
    law = laws_of(p, q, RULES[rule](vocab))
    assert all(distance(one.sum(-1), torch.ones(len(one))) < 1e-12 and (one >= 0).all() for one in law)
    assert distance(chain_law(stops, law, q)[0], sequences(law)) < 1e-12
    if kind == "random":
        assert distance(sequences(law), sequences(p)) > 1e-3, "the rule does bend the law"


def unweighted(p: Tensor, q: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """What a walk would draw after a refusal: as if nothing had been lost on the way."""
    behind, _ = stops(p, q, codes)
    return behind, (p - q).clamp(min=0)


def no_mass(p: Tensor, q: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The target itself in place of what is left of it."""
    behind, _ = stops(p, q, codes)
    return behind, p


def stopping_early(p: Tensor, q: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Each guess on its own weight, as the last one."""
    _, left = stops(p, q, codes)
    weight = left.sum(-1) / left.sum(-1).clamp(min=1)
    return (1 - weight[:, 1:]).flip(1).cumprod(1).flip(1), left


@pytest.mark.parametrize("wrong", [unweighted, no_mass, stopping_early])
@pytest.mark.parametrize("kind", ["random", "with zeros"])
def test_a_wrong_residual_or_stop_would_be_seen(wrong, kind: str) -> None:
    p, q = contexts(4, 3, kind)
    assert distance(chain_law(wrong, p, q)[0], sequences(p)) > 1e-3


# Through `verify_block` itself.

VOCAB, DRAWS = 4, 400_000


def drawn(rule: Acceptance, kind: str, depth: int, draws: int = DRAWS, measure_tv: bool = False):
    """Drafts drawn from q and verified: the verdict, and the contexts' p and q. No code is forbidden by the format."""
    p, q = contexts(VOCAB, depth, kind)
    generator = torch.Generator().manual_seed(2)
    codes, at = torch.zeros(draws, depth + 1, dtype=torch.int64), torch.zeros(draws, dtype=torch.int64)
    ps, qs = torch.zeros(2, draws, depth + 1, VOCAB, dtype=torch.float64)
    for level in range(depth + 1):
        ps[:, level] = p[level][at]
        if level < depth:
            qs[:, level] = q[level][at]
            codes[:, level + 1] = torch.multinomial(qs[:, level], 1, generator=generator)[:, 0]
            at = at * VOCAB + codes[:, level + 1]
    draft = Draft(chain_tree(draws, depth, torch.device("cpu")), codes, qs)
    noise = Noise(torch.arange(draws), torch.ones(draws, dtype=torch.int64)).precomputed(depth)[0]
    return verify_block(draft, ps.log().clamp(min=-700), Sampling(), rule, noise, measure_tv), p, q


@pytest.mark.parametrize("kind", ["random", "with zeros", "forced"])
@pytest.mark.parametrize("rule", ["exact", *RULES])
def test_what_is_drawn_follows_the_law(rule: str, kind: str) -> None:
    made = Exact() if rule == "exact" else RULES[rule](VOCAB)
    draws = DRAWS if rule == "exact" else DRAWS // 4
    verdict, p, q = drawn(made, kind, 2, draws)
    law, kept = chain_law(stops, laws_of(p, q, made), q)
    codes = verdict.next_codes.clone()
    generator = torch.Generator().manual_seed(3)
    tables = laws_of(p, q, made)
    for level in range(1, 3):
        open_ = verdict.kept <= level
        at = (codes[:, :level] * VOCAB ** torch.arange(level - 1, -1, -1)).sum(1)
        codes[open_, level] = torch.multinomial(tables[level][at[open_]], 1, generator=generator)[:, 0]
    assert chi_square(tally(codes, VOCAB), law) > 1e-3
    lengths = 1 - torch.cat((kept, torch.zeros(1).double()))
    lengths = lengths.diff(prepend=torch.zeros(1).double())
    assert chi_square((verdict.kept - 1).bincount(minlength=3), lengths) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_what_is_spent_is_the_distance_of_the_law_at_every_kept_node(rule: str) -> None:
    made = RULES[rule](VOCAB)
    verdict, p, q = drawn(made, "random", 2, 2000, measure_tv=True)
    laws = laws_of(p, q, made)
    spent = [(one - own).abs().sum(-1) / 2 for one, own in zip(laws, p, strict=True)]
    first = verdict.next_codes[:, 0]
    deeper = verdict.kept > 1
    assert torch.allclose(verdict.tv_cost[:, 0], spent[0][0].expand(2000))
    assert torch.allclose(verdict.tv_cost[deeper, 1], spent[1][first[deeper]])
    assert verdict.tv_cost[:, 2].max() < 1e-12
    assert max(float(one.max()) for one in spent) > 1e-2


def test_what_the_format_forbids_is_never_kept_nor_drawn() -> None:
    """Though the drafter offers it, and neighbours would lend it all they have."""
    draws, depth = 2000, 2
    p = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64)
    q = torch.full((draws, depth + 1, VOCAB), 0.25, dtype=torch.float64)
    codes = torch.randint(VOCAB, (draws, depth + 1), generator=torch.Generator().manual_seed(0))
    draft = Draft(chain_tree(draws, depth, torch.device("cpu")), codes, q)
    noise = Noise(torch.arange(draws), torch.ones(draws, dtype=torch.int64))
    for rule in (Lantern(TABLES[4], 1.0, "optimal"), Cactus(5.0), DraftMixture(0.9)):
        verdict = verify_block(draft, p.log().expand(draws, depth + 1, -1), Sampling(), rule, noise)
        decided = torch.arange(depth + 1) < verdict.kept[:, None]
        assert verdict.next_codes[decided].max() < 2 and verdict.kept.max() == depth + 1


def test_a_chain_that_ends_early_ends_with_the_targets_own_law() -> None:
    """As one that is cut where a drafter is unsure: missing guesses are no refused ones."""
    p, q = contexts(3, 2, "random")
    whole, _ = chain_law(stops, p[:2], q[:1])
    gone = [q[0], torch.zeros_like(q[1])]
    drafted = [q[0], torch.full_like(q[1], 1 / 3)]  # what lies in the buffer of a guess that is not there
    law, kept = chain_law(stops, p, gone, drafted)
    assert distance(law.view(3, 3, 3).sum(-1), whole.view(3, 3)) < 1e-12 and kept[1] < 1e-12


def test_the_ratio_of_a_rare_code_does_not_overflow() -> None:
    p = torch.tensor([[[1.0, 1e-30], [0.5, 0.5]], [[1e-30, 1.0], [0.5, 0.5]]])
    q = torch.tensor([[[1e-30, 1.0], [0.0, 0.0]], [[1e-30, 1.0], [0.0, 0.0]]])
    behind, left = stops(p, q, torch.tensor([[0, 0], [0, 1]]))
    assert behind[0, 0] == 0 and behind[1, 0] < 1e-6
    assert left.isfinite().all() and math.isfinite(float(behind.sum()))
