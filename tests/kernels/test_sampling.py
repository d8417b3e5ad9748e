"""Heads, probabilities, draws and the verification of trees in C, beside PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple

import pytest
import torch
from torch import Tensor, nn

from lanternpp import Pipeline
from lanternpp.accept.base import Acceptance
from lanternpp.accept.exact import Exact
from lanternpp.accept.neighbours import Lantern, LanternPlusPlus
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify.choose import with_native
from lanternpp.engine.verify.joint import tree_tails, verify_joint
from lanternpp.engine.verify.tokenwise import verify_tokenwise
from lanternpp.kernels import loading as native
from lanternpp.kernels.linear import native_head
from lanternpp.kernels.structs import Node
from lanternpp.nn.backend import backend
from lanternpp.trees.dynamic import DynamicTree
from lanternpp.trees.shapes import EAGLE, SHAPES, chain
from lanternpp.trees.static import StaticTree
from lanternpp.types import Draft, Tree

pytestmark = pytest.mark.skipif(native.library() is None, reason="no kernels here")

BEHIND = [name for name, _ in Node._fields_].index("tail")
NEVER = float("-inf")
SAMPLINGS = [(1.0, 0, 1.0), (0.7, 9, 1.0), (1.3, 0, 0.6), (0.8, 40, 0.8), (0.0, 0, 1.0)]


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def both(warp: tuple[float, int, float]) -> tuple[Sampling, Sampling]:
    """By PyTorch, and in C."""
    return Sampling(*warp), Sampling(*warp, backend=backend())


def noise(batch: int) -> Noise:
    return Noise(torch.arange(batch), torch.ones(batch, dtype=torch.int64))


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("nodes", [1, 7, 20, 31])
@pytest.mark.parametrize("vocab", [40, 300])
def test_a_head_gives_the_logits_of_guided_features(vocab: int, nodes: int, scale: float) -> None:
    torch.manual_seed(nodes)
    guidance, dim = Guidance(scale), 96
    layer = nn.Linear(dim, vocab).bfloat16().requires_grad_(False)
    weight, bias = layer.weight.normal_().div_(10), layer.bias.normal_()
    head = native_head(layer)
    assert head is not None
    features = torch.randn(guidance.branches * 2, nodes, dim).bfloat16()
    assert head(features.float(), 1.0, 1) is None
    found = head(features, scale, guidance.branches)
    guided = guidance.merge(features.double())
    exact = guided.bfloat16().double() @ weight.double().T + bias.double()
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() < 0.05, "a feature that is rounded otherwise"
    assert (found - exact).abs().median() < 1e-5
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(head(features, scale, guidance.branches), found)
        one = head(features[:, :1], scale, guidance.branches)
        assert torch.equal(one, found[:, :1]), "a row does not depend on the others"
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("warp", SAMPLINGS, ids=str)
@pytest.mark.parametrize("vocab", [9, 300, 4096])
def test_probabilities_and_children_are_those_of_pytorch(vocab: int, warp: tuple[float, int, float]) -> None:
    plain, made = both(warp)
    logits = torch.randn(3, 5, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    logits[0, 0, 1:] = NEVER  # forced
    logits[0, 1, ::2] = NEVER
    p, exact = made.probs(logits), plain.probs(logits.double())
    assert (p - exact).abs().sum(-1).max() < 1e-5 and not p[logits == NEVER].any()
    for count in (1, 4, 8):
        drawn = made.children(p, count, noise(3), Noise.DRAFT)
        assert torch.equal(drawn, plain.children(p, count, noise(3), Noise.DRAFT)) or plain.greedy
        likely = made.likeliest(p, count)
        assert torch.equal(p.gather(-1, likely), p.topk(count).values)
        assert (likely.sort().values.diff() > 0).all(), "different codes"
    assert made.backend.probs(logits.double(), made.warp) is None, "float64 is PyTorch's"


def test_of_equal_codes_the_first_are_likeliest() -> None:
    found = both((1.0, 0, 1.0))[1].likeliest(torch.ones(1, 200), 70)
    assert found[0].tolist() == list(range(70))


@pytest.mark.parametrize("vocab", [1, 2, 3])
def test_where_there_are_fewer_codes_the_likeliest_are_repeated(vocab: int) -> None:
    q = torch.rand(2, 3, vocab, generator=torch.Generator().manual_seed(vocab))
    expected = q.argsort(-1, descending=True).repeat(1, 1, 8)[..., :8]
    for sampling in both((0.0, 0, 1.0)):
        assert torch.equal(sampling.children(q, 8, noise(2), Noise.DRAFT), expected)


class OwnBudget(LanternPlusPlus):
    """A rule of a user's own."""

    def budget(self, p: Tensor) -> Tensor:
        return p.square()


def rules(table: Tensor) -> dict[str, Acceptance]:
    return {
        "exact": Exact(),
        "lantern": Lantern(table, 0.3),
        "lantern, optimal": Lantern(table, 0.3, "optimal"),
        "lantern, falling": Lantern(table, 0.5, nu=0.5),
        "lantern++": LanternPlusPlus(table, 3.0),
        "lantern++, optimal": LanternPlusPlus(table, 3.0, "optimal", nu=0.4),
    }


def table_of(vocab: int, near: int) -> Tensor:
    """[V, near] other codes."""
    torch.manual_seed(0)
    table = torch.stack([torch.randperm(vocab - 1)[:near] for _ in range(vocab)])
    return (table + (table >= torch.arange(vocab)[:, None])).int()


def drafted(builder: StaticTree | DynamicTree, batch: int, vocab: int) -> tuple[Draft, Tensor]:
    """A draft, and the target's logits at its nodes; some codes are forbidden at some nodes, and one node is forced."""
    generator = torch.Generator().manual_seed(vocab)
    common = torch.randn(batch, builder.size, vocab, generator=generator) * 1.5
    logits = common + 0.7 * torch.randn(batch, builder.size, vocab, generator=generator)
    logits[: batch // 4, 1, ::2] = NEVER
    logits[: batch // 8, 0, 1:] = NEVER
    q = common.softmax(-1)

    def children(rows: Tensor, count: int, level: int) -> Tensor:
        if not builder.drawn:
            return rows.topk(count).indices
        return Sampling().children(rows, count, noise(batch), Noise.DRAFT + level)

    rows = torch.arange(batch)[:, None]
    draft = builder.grow(
        torch.zeros(batch).long(), q[:, 0], lambda at: q[rows, at.node % builder.size], children
    )
    return draft, logits


BUILDERS = {
    "eagle": lambda: StaticTree(EAGLE),
    "lantern": lambda: StaticTree(SHAPES["lantern-57"]),
    "chain": lambda: StaticTree(chain(4)),
    "dynamic": lambda: DynamicTree(4, 3, 12),
}


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("name", rules(table_of(9, 2)))
def test_a_walk_ends_where_that_of_pytorch_does(name: str, builder: str) -> None:
    vocab, batch = 60, 600
    rule = rules(table_of(vocab, 12))[name]
    draft, logits = drafted(BUILDERS[builder](), batch, vocab)
    warp = (0.9, 50, 1.0)
    usual = verify_tokenwise(draft, logits, both(warp)[0], rule, noise(batch))
    walk = with_native(verify_tokenwise, backend().verifier())
    found = walk(draft, logits, both(warp)[1], rule, noise(batch), False)
    same = (found.path == usual.path).all(1) & (found.kept == usual.kept) & (found.bonus == usual.bonus)
    assert same.float().mean() > 0.99, "a number may fall on the other side of its bound by rounding"
    assert torch.equal(found.next_codes[same], usual.next_codes[same])
    assert found.kept.float().mean() > 1.3
    fine = Draft(draft.tree, draft.codes, None if draft.probs is None else draft.probs.double())
    pair = [walk(fine, logits.double(), each, rule, noise(batch), False) for each in both(warp)]
    assert torch.equal(pair[0].next_codes, pair[1].next_codes), "float64 is PyTorch's"


def test_a_walk_without_a_draft_draws_a_code() -> None:
    """Of the target's distribution."""
    batch, vocab = 40_000, 7
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(0)).expand(batch, 1, vocab)
    tree = StaticTree(chain(1))
    draft = tree.grow(
        torch.zeros(batch).long(),
        logits[:, 0].softmax(-1),
        lambda at: None,
        lambda q, n, _: q.topk(n).indices,
    )  # type: ignore[arg-type, return-value]
    root = draft.tree.__class__(
        draft.tree.parent[:, :1],
        draft.tree.depth[:, :1],
        draft.tree.children[:, :1, :0],
        draft.tree.mask[:, :1, :1],
        (),
    )
    walk = with_native(verify_tokenwise, backend().verifier())
    verdict = walk(Draft(root, draft.codes[:, :1], None), logits, Sampling(), Exact(), noise(batch), False)
    assert (verdict.kept == 1).all() and not verdict.path.any()
    share = verdict.bonus.bincount(minlength=vocab) / batch
    assert (share - logits[0, 0].softmax(-1)).abs().max() < 0.01


def test_a_rule_of_ones_own_is_left_to_pytorch() -> None:
    table = table_of(60, 9)
    assert OwnBudget(table, 2.0).as_numbers(3) is None
    assert LanternPlusPlus(table.long(), 2.0).as_numbers(3) is None
    budget = LanternPlusPlus(table, 2.0, nu=0.5).as_numbers(3)
    assert (
        budget is not None
        and budget.limits[0] == (0, 1)
        and budget.limits[2] == (0, pytest.approx(0.36788, rel=1e-4))
    )
    draft, logits = drafted(StaticTree(EAGLE), 50, 60)
    rule = OwnBudget(table, 2.0)
    usual, found = (
        each(draft, logits, Sampling(), rule, noise(50), False)
        for each in (verify_tokenwise, with_native(verify_tokenwise, backend().verifier()))
    )
    assert torch.equal(usual.next_codes, found.next_codes)


@pytest.mark.parametrize("vocab", [9, 300])
@pytest.mark.parametrize("shape", ["eagle-25", "lantern-57", "deep-8"])
def test_where_the_traversal_of_a_tree_ends(shape: str, vocab: int) -> None:
    """And which codes are drawn there: at every node, as many as its share of evenly spread numbers."""
    each = 1 if vocab > 9 else 5
    draft, logits = drafted(StaticTree(SHAPES[shape]), each, vocab)
    tree, verifier = draft.tree, backend().verifier()
    assert draft.probs is not None and tree.layout is not None and verifier is not None
    exact, left = tree_tails(logits.double().softmax(-1), draft.probs.double(), draft.codes, tree)
    budget, points = Exact().as_numbers(len(tree.widths)), 500
    assert budget is not None
    bound = torch.cat((torch.zeros(each, 1), exact, torch.ones(each, 1)), 1)
    last = ((torch.arange(points) + 0.5) / points)[:, None].double()
    for sample in range(each):
        same = [
            x[sample].expand(points, *x.shape[1:])
            for x in (*astuple(tree)[:4], draft.codes, draft.probs, logits)
        ]
        many = Draft(Tree(*same[:4], tree.widths, tree.layout), *same[4:6])
        for at, node in enumerate(tree.layout.order.tolist()):
            low, high = bound[sample, at : at + 2].tolist()
            if high - low < 1e-4:
                continue
            u = torch.full((points, 1), (low + high) / 2, dtype=torch.float64)
            verdict, nodes = verifier(many, same[6], Sampling().warp, budget, False, u, last)
            behind = nodes[0, tree.layout.order[1:], BEHIND]
            assert torch.allclose(behind, exact[sample], atol=1e-4)
            depth = int(tree.depth[0, node])
            assert (verdict.kept == depth + 1).all() and (verdict.path[:, depth:] == node).all()
            above = torch.where(tree.mask[0, node])[0]
            assert torch.equal(verdict.path[0, : depth + 1], above[tree.depth[0, above].argsort()])
            decided = draft.codes[sample, verdict.path[0, 1 : depth + 1]]
            assert torch.equal(verdict.next_codes[0, :depth], decided)
            assert torch.equal(verdict.next_codes[:, depth], verdict.bonus)
            weights = left[sample, node]
            if weights.sum() > 1e-6:
                share = verdict.bonus.bincount(minlength=vocab) / points
                assert (share - weights / weights.sum()).abs().max() < 1.1 / points + 1e-4


@pytest.mark.parametrize("name", ["exact", "lantern++, optimal", "own"])
def test_traversal_keeps_what_that_of_pytorch_keeps(name: str) -> None:
    vocab, batch, table = 60, 300, table_of(60, 9)
    rule = {
        "exact": Exact(),
        "lantern++, optimal": LanternPlusPlus(table, 2.0, "optimal", nu=0.3),
        "own": OwnBudget(table, 2.0, "optimal"),
    }[name]
    draft, logits = drafted(StaticTree(EAGLE), batch, vocab)
    usual, found = (
        each(draft, logits, Sampling(0.9, 50), rule, noise(batch), False)
        for each in (verify_joint, with_native(verify_joint, backend().verifier()))
    )
    same = (found.path == usual.path).all(1) & (found.bonus == usual.bonus)
    assert same.float().mean() > 0.98 and found.kept.float().mean() > 1.3
    assert torch.equal(found.kept[same], usual.kept[same])
    assert found.distribution is not None and usual.distribution is not None
    far = (found.distribution - usual.distribution).abs().sum(-1)
    assert (far < 1e-4).float().mean() > 0.98 and far.max() < 0.05


@pytest.mark.parametrize("method", ["eagle", "eagle2", "lantern"])
def test_the_shipped_model_draws_the_same_for_any_number_of_threads(method: str) -> None:
    pipe = Pipeline.from_pretrained("nature-128", device="cpu", dtype="bfloat16")
    assert pipe.target.native_head is not None
    before, drawn = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            engine = pipe.new_engine(pipe.settings(method))
            engine.admit(0, "a photo of a red tulip", 3)
            for _ in range(6):
                engine.step()
            drawn.append(engine.codes[0, : int(engine.count[0])].clone())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*drawn)


def test_without_kernels_pytorch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(32, 40)
    assert native_head(None) is None and native_head(nn.Identity()) is None and native_head(layer) is None
    layer = layer.bfloat16()
    assert native_head(layer) is not None
    monkeypatch.setenv(native.SWITCH, "0")
    assert native_head(layer) is None and backend().verifier() is None
    assert backend().probs(torch.zeros(1, 40), (1.0, 0, 1.0)) is None
