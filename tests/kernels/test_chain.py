"""The guesses of a chain, the distributions of neighbours and block verification in C, beside PyTorch in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.distributions import KINDS, chain_distribution, contexts, distance, sequences
from helpers.relaxed import RULES as SMALL_RULES
from helpers.relaxed import distributions_of
from helpers.toys import stored_in_8_bits
from kernels.rounding import multiplied
from torch import Tensor

from lanternpp import Pipeline
from lanternpp.accept.base import Acceptance
from lanternpp.accept.exact import Exact
from lanternpp.accept.neighbours import Lantern, LanternPlusPlus, NeighbourAcceptance
from lanternpp.api.model import Model, model_folder
from lanternpp.drafters.parallel import ParallelDrafter
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling, draw
from lanternpp.engine.verify.choose import with_native
from lanternpp.engine.verify.joint import chain_tails, node_weights, verify_joint
from lanternpp.kernels import loading as native
from lanternpp.kernels.chain import NativeChain, native_chain
from lanternpp.kernels.sampling import NativeVerifier
from lanternpp.kernels.structs import Node
from lanternpp.nn.backend import backend
from lanternpp.proposers.parallel import Parallel, _masked
from lanternpp.trees.chain import chain_tree
from lanternpp.trees.shapes import chain
from lanternpp.trees.static import StaticTree
from lanternpp.types import Draft

pytestmark = pytest.mark.skipif(native.library() is None, reason="no kernels here")

HALF, NEVER = torch.bfloat16, float("-inf")
DIM, HIDDEN, LEVELS = 64, 32, 4
BEHIND = [name for name, _ in Node._fields_].index("tail")
SAMPLINGS = [
    Sampling(),
    Sampling(0.7),
    Sampling(1, 9),
    Sampling(1.3, 0, 0.6),
    Sampling(0.8, 40, 0.8),
    Sampling(0),
]


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Case:
    """Random weights and inputs of a drafter's turn."""

    def __init__(self, vocab: int, batch: int, strong: float = 1.0):
        torch.manual_seed(vocab + batch)
        self.up, self.bias = (torch.randn(*size).to(HALF) / 4 for size in ((DIM, HIDDEN), (DIM,)))
        self.head = (torch.randn(vocab, DIM) * strong / 3).to(HALF)
        self.features = torch.randn(batch, LEVELS, DIM).to(HALF)
        self.query = torch.randn(batch, LEVELS, HIDDEN).to(HALF)
        self.prev = torch.randn(vocab, HIDDEN).to(HALF)
        self.u = torch.rand(batch, LEVELS, dtype=torch.float64)
        self.sure = torch.randn(1, DIM).to(HALF) / 4, torch.tensor([0.5]).to(HALF)
        self.forbidden: Tensor | None = None
        # what the kernels keep in place of `up`, rounded to 8 bits as they do
        self.turn = stored_in_8_bits((self.head.double() @ self.up.double()).float())

    def chain(self, library: object) -> NativeChain:
        up, head = (self.up, self.bias), (self.head, None)
        return NativeChain(up, head, library, self.sure)  # type: ignore[arg-type]

    def drawn(
        self, library: object, sampling: Sampling, rows: slice = slice(None), min_survival: float = 0.0
    ) -> Draft:
        u = self.u[rows]
        vocab, count = len(self.head), len(u)
        codes = torch.full((count, LEVELS + 1), vocab - 1)
        draft = Draft(
            chain_tree(count, LEVELS, torch.device("cpu")),
            codes,
            torch.zeros(count, LEVELS + 1, vocab),
            torch.zeros(count, LEVELS) if min_survival else None,
        )
        forbidden = None if self.forbidden is None else self.forbidden[rows]
        warp = (sampling.temperature, sampling.top_k, sampling.top_p)
        chain = self.chain(library)
        chain(self.features[rows], self.query[rows], self.prev, forbidden, u, warp, draft, min_survival)
        return draft

    def act(self, codes: Tensor) -> Tensor:
        """Behind codes [B, LEVELS + 1] -> [B, LEVELS, HIDDEN] in bfloat16, 0 at the first level."""
        act = F.silu(self.query.double() + self.prev[codes[:, :-1]].double()).to(HALF)
        act[:, 0] = 0
        return act

    def logits_of(self, act: Tensor, weight: Tensor, turn: Tensor) -> Tensor:
        """In float64, of `act`: what a layer of weight [n, D] gives, [B, LEVELS, n]; turn: weight times `up`."""
        behind = torch.arange(LEVELS)[:, None] > 0
        logits = self.features.double() @ weight.T + act.double() @ turn.T
        return logits + behind * (weight @ self.bias.double())

    def probs(self, codes: Tensor, sampling: Sampling, library: object) -> Tensor:
        """In float64, behind codes [B, LEVELS + 1] -> [B, LEVELS, V]."""
        act = multiplied(self.act(codes), library)
        logits = self.logits_of(act, self.head.double(), self.turn)
        return sampling.probs(logits if self.forbidden is None else logits + self.forbidden)


@pytest.mark.parametrize("batch", [1, 4, 7])
@pytest.mark.parametrize("vocab", [40, 300])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_guess_is_drawn_from_the_head_of_the_feature_behind_the_guess_before(
    library: object, sampling: Sampling, vocab: int, batch: int
) -> None:
    case = Case(vocab, batch)
    draft = case.drawn(library, sampling)
    probs, codes = draft.probs[:, :-1], draft.codes[:, 1:]
    expected = case.probs(draft.codes, sampling, library)
    assert (probs.double() - expected).abs().sum(
        -1
    ).median() < 2e-4  # of inputs to 16 bits; one is farther where a rounding differs
    assert (probs.double() - expected).abs().sum(-1).max() < 0.02
    if sampling.greedy:
        assert torch.equal(codes, probs.argmax(-1))
    else:
        assert torch.equal(codes, draw(probs, case.u[..., None])[..., 0])
    assert (draft.codes[:, 0] == vocab - 1).all() and not draft.probs[:, -1].any(), "what is the caller's"


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_chain_ends_where_none_of_the_batch_survives(library: object, batch: int, threads: int) -> None:
    """What is drawn until then is the same as without a cut."""
    case, before = Case(300, batch), torch.get_num_threads()
    whole = case.drawn(library, Sampling())
    weight, bias = (x.double() for x in case.sure)
    logits = case.logits_of(case.act(whole.codes), weight, weight @ case.up.double()) + bias
    expected = logits[..., 0].sigmoid().cumprod(1)
    cuts = [0.0] + [float(expected[:, level].amax()) + 2e-4 for level in range(1, LEVELS)]
    torch.set_num_threads(threads)
    try:
        for level, cut in enumerate(cuts):
            draft = case.drawn(library, Sampling(), min_survival=cut or 1e-9)
            drawn = level or LEVELS
            assert torch.allclose(draft.survival[:, :drawn].double(), expected[:, :drawn], atol=1e-4)
            assert not draft.survival[:, drawn:].any() and not draft.probs[:, drawn:].any()
            assert torch.equal(draft.codes[:, : drawn + 1], whole.codes[:, : drawn + 1])
            assert torch.equal(draft.probs[:, :drawn], whole.probs[:, :drawn])
    finally:
        torch.set_num_threads(before)


def logits_in_c(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [LEVELS, V] -> distributions, by a head of zeros."""
    case = Case(logits.shape[1], 1, 0.0)
    case.forbidden = logits[None]
    probs = case.drawn(native.library(), sampling).probs
    assert probs is not None
    return probs[0, :-1].double()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_forced_and_forbidden_codes(sampling: Sampling) -> None:
    logits = torch.randn(LEVELS, 100, generator=torch.Generator().manual_seed(0)) * 4
    logits[0, 1:] = NEVER  # forced
    logits[1, ::2] = NEVER
    logits[2, 5:] = NEVER  # fewer than top-k codes
    logits[3] *= 100
    probs, expected = logits_in_c(logits, sampling), sampling.probs(logits.double())
    assert (probs - expected).abs().max() < 1e-5 and probs[0, 0] == 1
    assert not probs[logits == NEVER].any()
    assert torch.allclose(probs.sum(-1), torch.ones(()).double(), atol=1e-5)


def test_of_equal_codes_the_first_are_kept() -> None:
    logits = torch.zeros(LEVELS, 100)
    logits[:, 70:] = 1
    for sampling, kept in (
        (Sampling(1, 10), range(70, 80)),
        (Sampling(1, 40), [*range(10), *range(70, 100)]),
    ):
        assert logits_in_c(logits, sampling)[0].nonzero()[:, 0].tolist() == list(kept)
    assert logits_in_c(logits, Sampling(1, 0, 0.02))[0].nonzero()[:, 0].tolist() == [70, 71]  # 0.0182 each


def test_improbable_codes_keep_their_share() -> None:
    """One code has nearly all, and the other 40,000 together one in a million."""
    vocab, count = 40_001, 40_000
    logits = torch.zeros(LEVELS, vocab)
    logits[:, 0] = torch.tensor(4e10).log()
    case = Case(vocab, 1, 0.0)
    case.forbidden = logits[None]
    for share in (0.25, 0.5, 0.75):
        case.u[:] = 1 - 1e-6 * (1 - share)
        codes = case.drawn(native.library(), Sampling()).codes[0, 1:]
        assert (codes - share * count).abs().max() < 100


def test_a_sample_does_not_depend_on_the_batch_nor_on_the_threads(library: object) -> None:
    case, before = Case(300, 9), torch.get_num_threads()
    whole = case.drawn(library, Sampling(0.9, 50, 0.9))
    try:
        for threads, rows in ((1, slice(2, 3)), (2, slice(1, 6)), (3, slice(0, 9))):
            torch.set_num_threads(threads)
            part = case.drawn(library, Sampling(0.9, 50, 0.9), rows)
            assert torch.equal(part.probs, whole.probs[rows]) and torch.equal(part.codes, whole.codes[rows])
    finally:
        torch.set_num_threads(before)


def rules(table: Tensor) -> list[NeighbourAcceptance]:
    return [
        Lantern(table, 0.0, "optimal"),
        Lantern(table, 0.2, "optimal"),
        Lantern(table, 1.0, "optimal", nu=0.4),
        LanternPlusPlus(table, 1.0, "optimal"),
        LanternPlusPlus(table, 2.0, "optimal"),
        LanternPlusPlus(table, 20.0, "optimal", nu=0.7),
    ]


def rows_of(vocab: int, batch: int) -> tuple[Tensor, Tensor]:
    """p and q [batch, 5, V]: flat, sharp, with zeros, forced; q is 0 behind the last guess."""
    generator = torch.Generator().manual_seed(vocab)
    p, q = (torch.randn(2, batch, 5, vocab, generator=generator) * 2).softmax(-1)
    p[:, 1] = (p[:, 1].log() * 3).softmax(-1)
    p[:, 2, ::3] = 0
    q[:, 2, 1::3] = 0
    p[:, 3] = F.one_hot(torch.tensor(7), vocab).float()
    q[:, 4] = 0
    return p, q


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(("vocab", "k"), [(40, 12), (300, 90), (9, 8)])
def test_distributions_of_neighbours(library: object, vocab: int, k: int, batch: int) -> None:
    torch.manual_seed(0)
    table = torch.stack([torch.randperm(vocab - 1)[:k] for _ in range(vocab)])
    table = (table + (table >= torch.arange(vocab)[:, None])).int()
    p, q = rows_of(vocab, batch)
    p = p / p.sum(-1, keepdim=True)
    depth = torch.arange(5).expand(batch, -1)
    draft = Draft(chain_tree(batch, 4, p.device), torch.zeros(batch, 5).long(), q)
    u, logits = torch.full((batch, 1), 0.5).double(), p.log().clamp(min=-200)  # of 0, and yet not forbidden
    for rule in rules(table):
        budget = rule.as_numbers(4)
        assert budget is not None
        verdict, _ = NativeVerifier(library)(draft, logits, Sampling().warp, budget, False, u, u)  # type: ignore[arg-type]
        exact = rule.output_distributions(p.double(), q.double(), depth, 4)
        assert verdict.distribution is not None
        far = (
            (verdict.distribution - exact).abs().sum(-1)
        )  # a neighbour whose sum is the limit may fall either way
        assert (far < 1e-5).float().mean() > 0.9 and far.max() < 0.01


def in_c(
    p: Tensor, q: Tensor, codes: Tensor, rule: Acceptance | None = None, library: object = None
) -> tuple[Tensor, Tensor]:
    """`chain_tails` of chains, as C verifies them under a rule, for tests in float64; p, q [B, g + 1, V], q 0 behind the last guess."""
    budget = (rule or Exact()).as_numbers(p.shape[1] - 1)
    verifier = NativeVerifier(library or native.library())  # type: ignore[arg-type]
    assert budget is not None
    draft = Draft(chain_tree(len(p), p.shape[1] - 1, p.device), codes, q.float())
    u = torch.full((len(p), 1), 0.5, dtype=torch.float64)
    logits = p.log().clamp(min=-200).float()  # below -87 a probability is 0, and yet not forbidden
    verdict, nodes = verifier(draft, logits, Sampling().warp, budget, False, u, u)
    assert verdict.distribution is not None
    distribution = verdict.distribution.double()
    return nodes[:, 1:, BEHIND], (distribution * node_weights(distribution, q, codes)[..., None] - q).clamp_(
        min=0
    )


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("vocab", [9, 300])
def test_where_a_chain_ends(library: object, vocab: int, batch: int) -> None:
    p, q = rows_of(vocab, batch)
    p = p / p.sum(-1, keepdim=True)
    codes = torch.randint(vocab, (batch, 5), generator=torch.Generator().manual_seed(1))
    for first in (0, 1):  # a code of no chance, one of ratio 0, or neither
        codes[0, 3] = first
        behind, left = in_c(p, q, codes, library=library)
        exact = chain_tails(p.double(), q.double(), codes)
        assert torch.allclose(behind, exact[0], atol=1e-5) and torch.allclose(left, exact[1], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "depth"), [(3, 4), (4, 3), (5, 2)])
def test_enumerated_the_distribution_is_the_targets(kind: str, vocab: int, depth: int) -> None:
    p, q = contexts(vocab, depth, kind)
    assert distance(chain_distribution(in_c, p, q)[0], sequences(p)) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["lantern", "lantern++", "lantern++, falling"])
def test_enumerated_the_distribution_is_that_of_the_rule(kind: str, name: str) -> None:
    p, q = contexts(4, 3, kind)
    rule, targets = SMALL_RULES[name](4), list[Tensor]()

    def recorded(p: Tensor, q: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        targets.append(p)
        return chain_tails(p, q, codes)

    chain_distribution(recorded, p, q)  # the target's rows of every draft, in the order in which C gets them
    distribution = distributions_of(p, q, rule)
    found, _ = chain_distribution(lambda _, q, codes: in_c(targets[0], q, codes, rule), distribution, q)
    assert distance(found, sequences(distribution)) < 1e-6


class Own(LanternPlusPlus):
    """A rule of a user's own."""

    def budget(self, p: Tensor) -> Tensor:
        return p.square()


def drafts(draws: int, depth: int, vocab: int) -> tuple[Draft, Tensor, Noise]:
    """Chains whose guesses were drawn from what they are offered with, the target's logits, and noise."""
    generator = torch.Generator().manual_seed(depth)
    logits, near = torch.randn(2, draws, depth + 1, vocab, generator=generator)
    q = (logits + near / 2).softmax(-1)
    codes = torch.cat((torch.zeros(draws, 1).long(), draw(q[:, :-1], torch.rand(draws, depth, 1))[..., 0]), 1)
    logits[: draws // 4, 1, vocab // 2 :] = NEVER
    q[:, -1] = 0
    tree = chain_tree(draws, depth, torch.device("cpu"))
    return Draft(tree, codes, q), logits, Noise(torch.arange(draws), torch.ones(draws, dtype=torch.int64))


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("name", ["exact", "lantern", "lantern++", "lantern++, falling", "own"])
def test_a_verdict_is_the_same_by_either(name: str, ended: bool) -> None:
    """Also in float64, with codes that the format forbids, and where chains of a batch end at different places."""
    torch.manual_seed(0)
    draws, vocab = 600, 60
    table = torch.stack([torch.randperm(vocab)[:9] for _ in range(vocab)]).int()
    rule = {
        "exact": Exact(),
        "lantern": Lantern(table, 0.3, "optimal"),
        "lantern++": LanternPlusPlus(table, 2.0, "optimal"),
        "lantern++, falling": LanternPlusPlus(table, 3.0, "optimal", nu=0.4),
        "own": Own(table, 2.0, "optimal"),
    }[name]
    draft, logits, noise = drafts(draws, 4, vocab)
    if ended:
        lengths = 1 + torch.arange(draws) % 4
        draft = replace(draft, tree=_masked(draft.tree, lengths, torch.arange(5)))
    warped = Sampling(0.9, 0, 0.98)
    usual = verify_joint(draft, logits, warped, rule, noise)
    by_c = with_native(verify_joint, backend().verifier())
    found = by_c(draft, logits, warped, rule, noise, False)
    same = (found.kept == usual.kept) & (found.bonus == usual.bonus)
    assert same.float().mean() > 0.98, "a number may fall on the other side of its bound by rounding"
    decided = same[:, None] & (torch.arange(5) < usual.kept[:, None])
    assert torch.equal(found.next_codes[decided], usual.next_codes[decided])
    assert torch.equal(found.path[same], usual.path[same]) and found.kept.float().mean() > 1.5
    assert found.distribution is not None and usual.distribution is not None
    far = (found.distribution - usual.distribution).abs().sum(-1)
    assert (far < 1e-4).float().mean() > 0.98 and far.max() < 0.05
    fine = replace(draft, probs=None if draft.probs is None else draft.probs.double())
    exact = [each(fine, logits.double(), warped, rule, noise, False) for each in (verify_joint, by_c)]
    assert torch.equal(exact[0].next_codes, exact[1].next_codes), "float64 is PyTorch's"


def test_what_it_does_not_know_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(40, 1)
    up, head = (case.up, case.bias), (case.head, None)
    assert native_chain(up, head) is not None
    assert native_chain(up, None) is None, "a head that is not linear"
    assert native_chain(up, (case.head.float(), None)) is None
    assert native_chain((case.up[:, :24], case.bias), head) is None, "an odd width"
    assert not case.chain(native.library()).takes(torch.zeros(17, LEVELS, DIM, dtype=HALF)), (
        "many pictures at once"
    )
    monkeypatch.setenv(native.SWITCH, "0")
    assert native_chain(up, head) is None and backend().verifier() is None


def test_the_shipped_model_drafts_what_pytorch_drafts() -> None:
    """Up to rounding, a guess behind the same guesses."""
    pipe = Pipeline.from_pretrained("nature-128", device="cpu", dtype="bfloat16")
    engine = pipe.new_engine(pipe.settings("lantern++", batch_size=2))
    for slot in (0, 1):
        engine.admit(slot, "a photo of a red tulip", 3 + slot)
    proposer = engine.proposer
    assert isinstance(proposer, Parallel) and proposer.drafter.native is not None
    levels = proposer._drafter_forward()
    drafter, cache = proposer.drafter, proposer.cache
    cache.used -= proposer.waiting  # to run it again
    draft = proposer.propose(engine.noise)
    assert draft.probs is not None
    after = drafter.combine(
        levels, drafter.level_query(levels), proposer.prev_code_table[draft.codes[:, :-1]]
    )
    expected = proposer._probs(torch.cat((levels[:, :1], after[:, 1:]), 1), proposer._index())
    assert (draft.probs[:, :-1] - expected).abs().sum(-1).max() < 0.05
    tree = (
        StaticTree(chain(proposer.depth))
        .grow(proposer.root, expected[:, 0], lambda _: expected[:, :1], lambda q, n, _: q.topk(n).indices)
        .tree
    )
    for name in ("parent", "depth", "children", "mask"):
        assert torch.equal(getattr(draft.tree, name), getattr(tree, name))
    assert draft.tree.widths == tree.widths


def test_the_head_that_is_read_is_the_targets() -> None:
    target = Pipeline.from_pretrained("nature-128", device="cpu", dtype="bfloat16").target
    x = torch.randn(2, 3, target.decoder.config.dim).to(HALF)
    layer = target.head_linear
    assert layer is not None
    assert torch.allclose(target.head(x), F.linear(x, layer.weight), atol=0.1, rtol=0.02)  # type: ignore[arg-type]


@pytest.mark.parametrize("int8", [False, True])
def test_drafter_and_target_share_the_packed_head(int8: bool) -> None:
    """One copy, which does not change what is drafted; a target that has none packed leaves the drafter its own."""
    if int8:
        pytest.importorskip("torchao")
    model = Model(model_folder("nature-128"), None, torch.device("cpu"), HALF, int8=int8)
    target, drafter = model.target, model.network("parallel")
    assert target.native_head is not None and isinstance(drafter, ParallelDrafter)
    shared = drafter.native
    assert isinstance(shared, NativeChain) and shared.head is target.native_head.packed
    assert shared.heads.head.weight == target.native_head.packed.weight.data_ptr()
    target.native_head = None
    drafter.pack(target)
    own = drafter.native
    assert isinstance(own, NativeChain) and own.heads.head.weight != shared.heads.head.weight
    assert torch.equal(own.head.weight, shared.head.weight)
