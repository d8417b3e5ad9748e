"""Kernels beside PyTorch over odd shapes: 1 to 3 codes and 100,000, one head, 1 to 300 rows, widths that are no multiple of anything."""

from __future__ import annotations

import copy
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.stacks import StackPasses, with_biases
from helpers.toys import fits_4_bits, neighbours, noise, stored_in_8_bits
from kernels.drafting import Turn, drafted
from kernels.rounding import groups_inputs, multiplied
from torch import Tensor, nn

from lanternpp.accept.base import Acceptance
from lanternpp.accept.exact import Exact
from lanternpp.accept.neighbours import Lantern, LanternPlusPlus
from lanternpp.engine.cache import Cache
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Sampling, draw
from lanternpp.engine.verify.joint import verify_joint
from lanternpp.engine.verify.tokenwise import verify_tokenwise
from lanternpp.kernels import Kernels
from lanternpp.kernels import loading as native
from lanternpp.kernels.packing import KernelDecoder
from lanternpp.nn.checkpoints import quantised
from lanternpp.nn.decoder import Decoder, DecoderConfig, Stack, grid_table
from lanternpp.trees.dynamic import DynamicTree
from lanternpp.trees.static import EAGLE, SHAPES, StaticTree, chain

pytestmark = [
    pytest.mark.skipif(native.library() is None, reason="no kernels here"),
    pytest.mark.usefixtures("without_gradients"),
]

SEEDS = range(14)
VOCABS = [1, 2, 3, 7, 63, 64, 65, 1000, 4097]
MOST_CODES = 100_000
HALF, NEVER = torch.bfloat16, float("-inf")


@pytest.fixture(params=SEEDS)
def seed(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture
def rng(seed: int) -> Random:
    torch.manual_seed(seed)
    return Random(seed)


@pytest.fixture
def vocab(seed: int, rng: Random) -> int:
    return rng.choice(VOCABS) if seed else MOST_CODES


def near(found: Tensor, usual: Tensor, exact: Tensor, times: float = 1) -> None:
    """Assert that `found` is so many times as far from `exact` as `usual`, the same in bfloat16, with a margin for few numbers."""
    wrong, other = (found - exact).abs(), (usual - exact).abs()
    assert wrong.mean() <= 1.2 * times * other.mean() + 1e-4 * exact.abs().mean()
    assert wrong.max() <= 2 * times * other.max() + 0.01 * exact.abs().max()


def shape_of(rng: Random) -> DecoderConfig:
    """The shape of a decoder."""
    heads, head_dim = rng.choice([1, 1, 2, 3, 6]), rng.choice([16, 32, 32, 48, 64, 80, 100, 128, 8, 24])
    width = rng.choice([1, 2, 3, 5, 7]) * 32 + rng.choice([0, 0, 0, 0, 8])
    hidden = rng.choice([1, 2, 3, 6, 11]) * 32 + rng.choice([0, 0, 0, 0, 16, 4])
    kv_heads = rng.choice([n for n in (1, 2, 3, 6) if heads % n == 0])
    flags = {name: rng.random() < 0.5 for name in ("qk_norm", "first_norm", "final_norm")}
    eps = rng.choice([1e-5, 1e-2])
    return DecoderConfig(width, 2, heads, hidden, kv_heads, head_dim=head_dim, norm_eps=eps, **flags)


def tree_pass(network: Decoder, x: Tensor, parent: list[int], aux_layers: tuple[int, ...]) -> Tensor:
    """x [R, 3 + N, D] in a prefill of 3 slots, then as the nodes of a tree -> [R, 1 + N, (1 + aux) D]."""
    rows, count = len(x), len(parent)
    cache = Cache(network.config, rows, x.shape[1], x)
    prompt = cache.rows(torch.arange(rows), torch.arange(rows) % 2, 3)
    first = network(x[:, :3], prompt.nodes(), prompt, aux_layers)
    depth, mask = [0] * count, torch.eye(count, dtype=torch.bool)
    for i, above in enumerate(parent):
        if above >= 0:
            depth[i], mask[i] = depth[above] + 1, mask[i] | mask[above]
    nodes = cache.nodes(torch.tensor(depth).expand(rows, -1), mask.expand(rows, -1, -1))
    return torch.cat((first[:, 2:], network(x[:, 3:], nodes, cache, aux_layers)), 1)


def test_passes(library: object, rng: Random) -> None:
    config = shape_of(rng)
    plain = Decoder(config, grid_table(3, 8, config.head_dim).float())
    if rng.random() < 0.5:
        with_biases(plain)
    plain = plain.to(HALF).eval().requires_grad_(False)
    exact = copy.deepcopy(plain).double()
    kept = rng.choices(["bfloat16", "int8", "int4"], [3, 2, 2])[0]
    store = stored_in_8_bits if kept == "int8" else fits_4_bits
    if kept != "bfloat16":
        for child, same in zip(plain.modules(), exact.modules(), strict=True):
            if isinstance(child, nn.Linear):
                same.weight = nn.Parameter(store(child.weight), requires_grad=False)
    mine, only_after = copy.deepcopy(plain), rng.random() < 0.5
    norms = [torch.rand(config.dim) + 0.5 for _ in range(4)] if rng.random() < 0.4 else []
    heads = torch.rand(config.heads + config.num_kv_heads, config.head_dim) + 0.5
    gate, rms = rng.choice(["silu", "gelu_tanh"]), not config.qk_norm and rng.random() < 0.5

    def stack(network: Decoder) -> Stack:
        """As some models have it: norms of what sublayers return, in the place of their inputs' or beside these, or of heads."""
        found, left = network.stack(), iter(norms)
        given: dict[str, Any] = {"attention_norm": None, "ffn_norm": None} if norms and only_after else {}
        given |= {"qk_norm": (heads, None)} if rms else {}
        layers = [
            replace(layer, attention_out_norm=next(left, None), ffn_out_norm=next(left, None), **given)
            for layer in found.layers
        ]
        return replace(found, layers=layers, gate=gate, **({"qk_norm": "rms"} if rms else {}))

    mine.native = KernelDecoder(stack(plain), plain.rotary_table, library, kept)
    if norms or rms or gate != "silu":
        plain.native, exact.native = (StackPasses(stack(x), x.rotary_table) for x in (plain, exact))
    rows, nodes = rng.choice([(1, 1), (1, 300), (300, 1), (2, 8), (3, 43), (10, 13), (17, 1), (5, 26)])
    parent = [rng.randint(max(-1, i - 5), i - 1) for i in range(nodes)]
    x, aux_layers = torch.randn(rows, 3 + nodes, config.dim).to(HALF), rng.choice([(), (0,)])
    found, usual = (tree_pass(network, x, parent, aux_layers).double() for network in (mine, plain))
    expected, times = (
        tree_pass(exact, x.double(), parent, aux_layers),
        4 if kept != "bfloat16" and groups_inputs(library) else 1,
    )
    for part in zip(*(each.split(config.dim, -1) for each in (found, usual, expected)), strict=True):
        near(*part, times)


def warp_of(rng: Random, vocab: int) -> tuple[float, int, float]:
    """Temperature, top-k, which may be more than there are codes, and top-p."""
    return (
        rng.choice([0.0, 0.7, 1.0, 1.6]),
        rng.choice([0, 1, vocab // 2, vocab - 1, vocab, 5000]),
        rng.choice([1.0, 0.9, 0.3]),
    )


def test_probabilities_and_children(library: object, rng: Random, vocab: int) -> None:
    warp = warp_of(rng, vocab)
    plain, made = Sampling(*warp), Sampling(*warp, backend=Kernels(library))
    logits = torch.randn(1 if vocab == MOST_CODES else rng.choice([1, 3, 100]), rng.choice([1, 3]), vocab) * 3
    logits[0, 0, 1:] = NEVER  # forced
    logits[0, -1, 1::2] = NEVER
    p, exact = made.probs(logits), plain.probs(logits.double())
    # At the last code of top-p, rounding may keep the next one too.
    assert ((p - exact).abs().sum(-1) < 1e-4).float().mean() > 0.98 and not p[logits == NEVER].any(), warp
    hot = Sampling(1e6, vocab // 2, backend=made.backend)
    assert torch.equal(hot.probs(logits) > 0, hot.probs(logits.double()) > 0), "the codes of top-k"
    assert Kernels(library).probs(logits.double(), warp) is None, "float64 is PyTorch's"
    for count in (1, 3, 10):
        likely, usual = made.likeliest(p, count), plain.likeliest(p, count)
        assert torch.equal(p.gather(-1, likely), p.gather(-1, usual))
        assert (likely[..., :vocab].sort().values.diff() > 0).all(), (
            "different codes, as long as there are enough"
        )
        if warp[0]:
            assert torch.equal(*(x.children(p, count, noise(len(p)), Noise.DRAFT) for x in (made, plain)))


def test_chains(library: object, rng: Random, vocab: int) -> None:
    dim, hidden, batch = (
        rng.choice([32, 64, 160, 2, 45, 130]),
        rng.choice([16, 48, 80]),
        rng.choice([1, 2, 9, 16]),
    )
    if vocab == MOST_CODES:
        dim, batch = 30, 2
    levels = 3
    turn = Turn(vocab, batch, 0.5, dim, hidden, levels)
    sampling = Sampling(rng.choice([0.0, 0.7, 1.0]), rng.choice([0, 0, 1, 50]), rng.choice([1.0, 1.0, 0.6]))
    turn.forbidden = torch.zeros(batch, levels, vocab)
    turn.forbidden[:, rng.randrange(levels), vocab // 2 + 1 :] = NEVER
    turn.forbidden[0, -1, 1:] = NEVER  # forced
    draft, drafter, head = turn.drawn(library, sampling), turn.drafter, turn.head.double()
    assert draft.probs is not None and not draft.probs[:, -1].any(), "the caller's part"
    probs, codes = draft.probs[:, :-1], draft.codes
    drawn = probs.argmax(-1) if sampling.greedy else draw(probs, turn.u[..., None])[..., 0]
    assert (codes[:, 0] == vocab - 1).all() and torch.equal(codes[:, 1:], drawn)
    up, bias = drafter.up.weight.double(), drafter.up.bias.double()
    numbers, scale = quantised((head @ up).float(), 8)
    active = F.silu(turn.query.double() + turn.prev[codes[:, :-1]].double()).to(HALF)
    more = multiplied(active, library) @ (numbers.double() * scale.double()[:, None]).T + head @ bias
    more[:, 0] = 0
    exact = sampling.probs(turn.features.double() @ head.T + more + turn.forbidden)
    far, cut = (probs - exact).abs().sum(-1), sampling.top_k or sampling.top_p < 1
    assert far.median() < 2e-3 and far.max() < (2.1 if cut else 0.05), "top-k and top-p may keep another code"


def rule_of(rng: Random, vocab: int) -> Acceptance:
    """The exact rule, or one with up to 90 neighbours of every code, which are slow to find for many codes."""
    if vocab == 1 or vocab > 1000 or rng.random() < 0.3:
        return Exact()
    table = neighbours(torch.randn(vocab, 3), rng.randint(1, min(rng.choice([9, 90]), vocab - 1)))
    kind, residual = rng.choice([Lantern, LanternPlusPlus]), rng.choice(["paper", "optimal"])
    most = rng.choice([0.0, 0.3, 1.0]) + (kind is LanternPlusPlus)
    return kind(table, most, residual, nu=rng.choice([0.0, 0.0, 0.4]))


def builder_of(rng: Random, vocab: int) -> StaticTree | DynamicTree:
    """A chain, a tree of a paper, one that is grown by probability, or one of up to 30 nodes and up to 5 children of each."""
    if rng.random() < 0.4 and vocab > 3:
        known = (
            StaticTree(chain(4)),
            StaticTree(EAGLE),
            StaticTree(SHAPES["lantern-57"]),
            StaticTree(SHAPES["deep-8"]),
            DynamicTree(4, 3, 12),
        )
        return rng.choice(known)
    paths: list[tuple[int, ...]] = [()]
    while len(paths) < rng.choice([2, 6, 30]):
        above = rng.choice(paths[-8:])
        rank = sum(path[:-1] == above for path in paths if path)
        if rank < 5 and len(above) < 6:
            paths.append((*above, rank))
    return StaticTree(tuple(paths[1:]))


def test_verification(library: object, rng: Random, vocab: int) -> None:
    rule, batch = rule_of(rng, vocab), 2 if vocab > 1000 else 100
    builder = StaticTree(chain(1)) if vocab == MOST_CODES else builder_of(rng, vocab)
    draft, logits = drafted(builder, batch, vocab)
    sampling, budget = Sampling(rng.choice([0.9, 1.0]), rng.choice([0, 0, 50])), rule.as_numbers(6)
    assert budget is not None
    joint = (rule.lossless or budget.optimal) and draft.probs is not None
    for verifier in (verify_tokenwise, verify_joint) if joint else (verify_tokenwise,):
        usual, found = (
            verifier(draft, logits, replace(sampling, backend=used), rule, noise(batch))
            for used in (None, Kernels(library))
        )
        same = (found.path == usual.path).all(1) & (found.kept == usual.kept) & (found.bonus == usual.bonus)
        assert same.float().mean() > 0.95, (vocab, rule, verifier)
        decided = same[:, None] & (torch.arange(usual.path.shape[1]) < usual.kept[:, None])
        assert torch.equal(found.next_codes[decided], usual.next_codes[decided])
        if verifier is verify_joint:
            far = (found.distribution - usual.distribution).abs().sum(-1)
            assert (far < 1e-4).float().mean() > 0.98 and far.max() < 0.05
