"""The distribution of what is drawn: the target's own for exact rules, the enumerated one for relaxed rules."""

from __future__ import annotations

import pytest
import torch
from helpers.distributions import (
    additive,
    chi_square,
    drawn,
    multiplicative,
    no_relax,
    point_round_distribution,
    round_distribution,
    tally,
)
from helpers.toys import (
    BUSHY,
    CHAIN,
    FAR,
    HOLES,
    MarkovTarget,
    NoisyMarkovDrafter,
    OtherMarkovDrafter,
    admit_all,
    noise,
    parallel,
)

from lanternpp.accept.exact import Exact
from lanternpp.accept.neighbours import Lantern, LanternPlusPlus
from lanternpp.engine.decode import Engine
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify.choose import VERIFIERS
from lanternpp.engine.verify.tokenwise import verify_tokenwise
from lanternpp.proposers.draft_model import DraftModel
from lanternpp.proposers.jacobi import Jacobi
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.proposers.parallel import Parallel
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees.chain import chain_tree
from lanternpp.trees.shapes import chain
from lanternpp.trees.static import StaticTree
from lanternpp.types import Draft, Tree

DRAWS, FEWER, PICTURES = 400_000, 100_000, 50_000  # fewer: of one of many like it
UNLIKELY = 1e-3  # the seeds are fixed: a test passes always or never

FULL = ((0,), (1,), (2,), (0, 0), (1, 0), (2, 0), (2, 1))

BOTH = ("token", "traversal")
CASES = {  # verifiers, drafts
    "none": (("token",), lambda target: NoDraft()),
    "chain, flatter q": (
        ("token", "block"),
        lambda t: TreeProposer(NoisyMarkovDrafter(t), StaticTree(chain(2))),
    ),
    "tree, flatter q": (("traversal",), lambda t: TreeProposer(NoisyMarkovDrafter(t), StaticTree(BUSHY))),
    "all levels at once": (BOTH, lambda t: Parallel(parallel(t), StaticTree(BUSHY))),
    "fewer codes than children": (
        BOTH,
        lambda t: TreeProposer(OtherMarkovDrafter(t, HOLES), StaticTree(FULL)),
    ),
    "chain, q with holes": (
        ("block",),
        lambda t: TreeProposer(OtherMarkovDrafter(t, HOLES), StaticTree(chain(3))),
    ),
    "chain, all levels at once": (("block",), lambda t: Parallel(parallel(t), StaticTree(chain(3)))),
    "a chain longer than the picture, and layers of the target": (
        ("block",),
        lambda t: Parallel(parallel(t, 4, (0,)), StaticTree(chain(6))),
    ),
    "jacobi": (("block",), lambda t: Jacobi(3, "none", "mixed")),
}


def images(target, proposer, sampling, verifier=verify_tokenwise):
    """Images of the whole loop, [PICTURES, length], each under its own seed."""
    engine = Engine(target, proposer, Exact(), sampling, Guidance(), PICTURES, verifier=verifier)
    admit_all(engine, torch.arange(PICTURES))
    while len(engine.done()) < PICTURES:
        engine.step()
    return engine.codes[:, : target.length]


@pytest.mark.parametrize(
    ("case", "verifier"), [(case, verifier) for case, row in CASES.items() for verifier in row[0]]
)
def test_the_whole_loop_follows_the_targets_distribution_however_a_draft_is_verified(case, verifier):
    target = MarkovTarget(CHAIN)
    made = images(target, CASES[case][1](target), Sampling(), VERIFIERS[verifier])
    assert chi_square(tally(made, 3), target.distribution()) > UNLIKELY


def test_the_whole_loop_follows_the_distribution_that_is_left_after_temperature_and_top_k():
    target, sampling = MarkovTarget(CHAIN), Sampling(0.7, top_k=2)
    warped = MarkovTarget(sampling.probs(CHAIN.log()))
    made = images(target, TreeProposer(NoisyMarkovDrafter(target), StaticTree(BUSHY)), sampling)
    assert chi_square(tally(made, 3), warped.distribution()) > UNLIKELY


ADMITTED = {
    "tree": lambda target: TreeProposer(NoisyMarkovDrafter(target), StaticTree(BUSHY)),
    "independent": lambda target: DraftModel(MarkovTarget(FAR), StaticTree(BUSHY)),
    "jacobi": lambda target: Jacobi(2, "maximal", "mixed"),
}


@pytest.mark.parametrize("proposer", ADMITTED)
def test_the_toy_admission_is_the_engines_own(proposer):
    target, seeds = MarkovTarget(CHAIN), [5, 6, 7, 8]

    def engine():
        return Engine(target, ADMITTED[proposer](target), Exact(), Sampling(), Guidance(), 4)

    ours, theirs = engine(), engine()
    admit_all(ours, torch.tensor(seeds))
    for slot, seed in enumerate(seeds):
        theirs.admit(slot, "sea", seed)
    for _ in range(3):
        ours.step()
        theirs.step()
    assert torch.equal(ours.codes[:, :4], theirs.codes[:, :4])
    assert torch.equal(ours.accepted, theirs.accepted)


# One node and its children, straight through `verify_tokenwise`.

P = [0.41, 0.24, 0.19, 0.16]  # no sums of these meet a budget below
QS = {
    "near": [0.3, 0.3, 0.2, 0.2],
    "far": [0.05, 0.05, 0.1, 0.8],
    "equal": P,
    "with zeros": [0.0, 0.6, 0.4, 0.0],
    "a point": [0.0, 0.0, 1.0, 0.0],
}
NEAR = [[1, 2, 3], [2, 0, 3], [3, 1, 0], [2, 1, 0]]
TABLE = torch.tensor(NEAR, dtype=torch.int32)
RULES = {
    "exact": (Exact(), no_relax),
    "lantern 0.22": (Lantern(TABLE, 0.22), additive(NEAR, 0.22)),
    "lantern 0.5": (Lantern(TABLE, 0.5), additive(NEAR, 0.5)),
    "lantern 0.5 optimal": (Lantern(TABLE, 0.5, "optimal"), additive(NEAR, 0.5)),
    "lantern++ 1.7": (LanternPlusPlus(TABLE, 1.7), multiplicative(NEAR, 1.7)),
    "lantern++ 4": (LanternPlusPlus(TABLE, 4.0), multiplicative(NEAR, 4.0)),
    "lantern++ 4 optimal": (LanternPlusPlus(TABLE, 4.0, "optimal"), multiplicative(NEAR, 4.0)),
}


def star(batch: int, children: int) -> Tree:
    """A root with `children` children."""
    size = children + 1
    kids = torch.full((size, children), -1)
    kids[0] = torch.arange(1, size)
    mask = torch.eye(size, dtype=torch.bool)
    mask[:, 0] = True
    parts = (torch.tensor([-1] + [0] * children), torch.tensor([0] + [1] * children), kids, mask)
    return Tree(*(x.expand(batch, *x.shape) for x in parts), (children,))


def round_codes(rule, p, q, children, draws=DRAWS, dtype=torch.float64):
    """The code a round decides after the root, [draws], its children drawn without replacement."""
    n = noise(draws)
    row = torch.tensor(q, dtype=dtype).expand(draws, 1, -1)
    codes = torch.cat((torch.zeros(draws, 1, dtype=torch.int64), drawn(row[:, 0], children)), 1)
    probs = row.expand(-1, children + 1, -1)
    logits = torch.tensor(p, dtype=dtype).log().expand(draws, children + 1, -1)
    return verify_tokenwise(
        Draft(star(draws, children), codes, probs), logits, Sampling(), rule, n
    ).next_codes[:, :1]


@pytest.mark.parametrize("children", [1, 2, 3])
@pytest.mark.parametrize("q", QS)
@pytest.mark.parametrize("rule", RULES)
def test_a_round_follows_its_enumerated_distribution(rule, q, children):
    ours, written_again = RULES[rule]
    distribution = torch.tensor(
        round_distribution(P, QS[q], children, written_again, ours.optimal_residual), dtype=torch.float64
    )
    assert distribution.sum().item() == pytest.approx(1)
    draws = DRAWS if rule == "exact" and children > 1 else FEWER
    if ours.lossless:
        assert distribution.tolist() == pytest.approx(P)
    assert chi_square(tally(round_codes(ours, P, QS[q], children, draws), 4), distribution) > UNLIKELY


@pytest.mark.parametrize("rule", ["lantern 0.5", "lantern++ 4"])
def test_the_relaxed_rules_under_test_do_bend_the_distribution(rule):
    distribution = round_distribution(P, QS["near"], 2, RULES[rule][1])
    assert max(abs(a - b) for a, b in zip(distribution, P, strict=True)) > 0.01


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("children", [(2,), (3, 0), (1, 0, 2)])
def test_point_mass_drafts_follow_their_enumerated_distribution(rule, children):
    ours, written_again = RULES[rule]
    codes = torch.tensor((0, *children)).expand(FEWER, -1)
    logits = torch.tensor(P).double().log().expand(FEWER, len(children) + 1, -1)
    draft = Draft(star(FEWER, len(children)), codes, None)
    made = verify_tokenwise(draft, logits, Sampling(), ours, noise(FEWER)).next_codes[:, :1]
    distribution = torch.tensor(
        point_round_distribution(P, children, written_again, ours.optimal_residual), dtype=torch.float64
    )
    if ours.lossless:
        assert distribution.tolist() == pytest.approx(P)
    assert chi_square(tally(made, 4), distribution) > UNLIKELY


def test_a_target_with_forbidden_codes_never_draws_one():
    p = [0.7, 0.0, 0.3, 0.0]
    for q in QS.values():
        assert chi_square(tally(round_codes(Exact(), p, q, 2), 4), torch.tensor(p)) > UNLIKELY


def test_single_precision_follows_the_distribution_too():
    made = round_codes(Exact(), P, QS["far"], 3, dtype=torch.float32)
    assert chi_square(tally(made, 4), torch.tensor(P)) > UNLIKELY


def test_a_child_the_drafter_could_not_have_drawn_is_never_kept():
    draws = 1000
    codes = torch.tensor([0, 3]).expand(draws, -1)
    q = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64).expand(draws, 2, -1)
    logits = torch.tensor(P).double().log().expand(draws, 2, -1)
    for sampling in (Sampling(), Sampling(0)):
        verdict = verify_tokenwise(Draft(star(draws, 1), codes, q), logits, sampling, Exact(), noise(draws))
        assert verdict.kept.max() == 1


@pytest.mark.parametrize("verifier", ["token", "traversal"])
@pytest.mark.parametrize("children", [1, 2, 3])
def test_two_levels_follow_the_joint_distribution(children, verifier):
    """p and q depend on the code above; the path and its bonus are completed by the target itself."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(4, 4, dtype=torch.float64, generator=generator).pow(2) + 0.01
    q = torch.rand(4, 4, dtype=torch.float64, generator=generator).pow(2)
    q[q < 0.15] = 0
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    shape = [(rank,) for rank in range(children)]
    shape += [(rank, below) for rank in range(children) for below in range(children - rank)]
    n, tree = noise(FEWER), StaticTree(tuple(shape))
    draft = tree.grow(
        torch.zeros(FEWER, dtype=torch.int64),
        q[:1].expand(FEWER, -1),
        lambda at: q[at.codes],
        lambda rows, count, level: Sampling().children(rows, count, n, Noise.DRAFT + level),
    )
    verdict = VERIFIERS[verifier](draft, p[draft.codes].log(), Sampling(), Exact(), n)
    kept = verdict.kept.bincount(minlength=4)
    assert (kept[1:] > 300).all(), "every length of path must have been seen"
    codes = verdict.next_codes
    for i in range(1, 3):
        missing = verdict.kept <= i
        codes[missing, i] = torch.multinomial(p[codes[missing, i - 1]], 1, generator=generator)[:, 0]
    joint = p[0][:, None, None] * p[:, :, None] * p[None]
    assert chi_square(tally(codes, 4), joint) > UNLIKELY


def test_the_verdict_lists_the_kept_nodes_and_the_code_after_each():
    tree = chain_tree(1, 3, torch.device("cpu"))
    codes = torch.tensor([[2, 1, 0, 3]])
    expected = torch.tensor([[1, 0, 2, 0]])  # what the target says after each node: 1, 0, then 2 and not 3
    logits = torch.nn.functional.one_hot(expected, 4).double()
    verdict = verify_tokenwise(Draft(tree, codes, None), logits, Sampling(0), Exact(), noise(1))
    assert verdict.kept.tolist() == [3]
    assert verdict.path.tolist() == [[0, 1, 2, 2]]
    assert verdict.next_codes[0, :3].tolist() == [1, 0, 2]
    assert verdict.bonus.tolist() == [2]


def test_a_child_that_cannot_be_tried_does_not_hide_the_next_one():
    """Alone, nothing is tried at the first rank; beside a sample that goes down at once, at the second."""
    codes = torch.tensor([[0, 1, 2], [0, 1, 2]])
    q = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 0.5, 0.5, 0.0]], dtype=torch.float64)
    p = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)

    def verified(rows):
        draft = Draft(star(len(rows), 2), codes[rows], q[rows, None].expand(-1, 3, -1))
        n = Noise(torch.tensor(rows), torch.ones(len(rows), dtype=torch.int64))
        return verify_tokenwise(draft, p[rows, None].expand(-1, 3, -1).log(), Sampling(), Exact(), n)

    together = verified([0, 1])
    assert together.path.tolist() == [[0, 2], [0, 1]]
    for i in range(2):
        assert torch.equal(verified([i]).path[0], together.path[i])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0)], ids=["T=1", "greedy"])
@pytest.mark.parametrize("rule", RULES)
def test_leaving_a_loop_early_decides_the_same(rule, sampling):
    """A sample alone leaves `verify_tokenwise` early; among 64 others it rides on to the end."""
    batch = 64
    generator = torch.Generator().manual_seed(1)
    q = torch.rand(4, 4, dtype=torch.float64, generator=generator)
    q = q / q.sum(-1, keepdim=True)
    p = torch.rand(4, 4, dtype=torch.float64, generator=generator)

    def verified(which):
        n = Noise(which, torch.full_like(which, 3))
        tree = StaticTree(BUSHY)
        draft = tree.grow(
            which % 4,
            q[which % 4],
            lambda at: q[at.codes],
            lambda rows, count, level: sampling.children(rows, count, n, Noise.DRAFT + level),
        )
        return verify_tokenwise(draft, p[draft.codes].log(), sampling, RULES[rule][0], n)

    together = verified(torch.arange(batch))
    for i in range(batch):
        alone = verified(torch.tensor([i]))
        assert alone.kept == together.kept[i] and alone.bonus == together.bonus[i]
        assert torch.equal(alone.path[0], together.path[i])
        assert torch.equal(alone.next_codes[0, : alone.kept], together.next_codes[i, : alone.kept])
