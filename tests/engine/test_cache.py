from __future__ import annotations

import runpy

import pytest
import torch
import torch.nn.functional as F
from helpers.steps import parts
from helpers.toys import ToyTarget, codes_of, eagle, engine_of

from lanternpp.engine import cache
from lanternpp.engine.cache import Cache
from lanternpp.engine.decode import Engine
from lanternpp.engine.sampling import Sampling
from lanternpp.nn.decoder import Decoder, DecoderConfig, grid_table
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees.static import EAGLE, StaticTree

DEEP = DecoderConfig(dim=16, layers=3, heads=4, kv_heads=2, hidden=24)  # grouped heads
ROWS, SLOTS = 2, 40


def network(seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    decoder = Decoder(DEEP, grid_table(4, 5, DEEP.head_dim)).double().requires_grad_(False)
    for weight in decoder.parameters():
        weight.data *= 3 if weight.dim() == 2 else 1
    return decoder


def prefilled(decoder: Decoder, start=(0, 0), seed: int = 1) -> tuple[Cache, torch.Tensor]:
    """A cache after a prompt of four slots, and the features of the prompt."""
    torch.manual_seed(seed)
    cache = Cache(DEEP, ROWS, SLOTS, decoder.norm.weight)
    memory = cache.rows(torch.arange(ROWS), torch.tensor(start), 4)
    return cache, decoder(torch.randn(ROWS, 4, 16).double(), memory.nodes(), memory)


def decode_one_by_one(decoder: Decoder, cache: Cache, x: torch.Tensor) -> torch.Tensor:
    """Codes one by one, each committed before the next."""
    out = []
    for i in range(x.shape[1]):
        one = torch.ones(ROWS, 1, 1, dtype=torch.bool)
        nodes = cache.nodes(torch.zeros(ROWS, 1, dtype=torch.int64), one)
        out.append(decoder(x[:, i : i + 1], nodes, cache))
        cache.commit(torch.zeros(ROWS, 1, dtype=torch.int64), torch.ones(ROWS, dtype=torch.int64))
    return torch.cat(out, 1)


def eagle_tree():
    tree = StaticTree(EAGLE)
    draft = tree.grow(
        torch.zeros(ROWS, dtype=torch.int64),
        torch.ones(ROWS, 5) / 5,
        lambda at: torch.ones(*at.codes.shape, 5) / 5,
        lambda q, count, level: torch.zeros(*q.shape[:2], count, dtype=torch.int64),
    )
    return draft.tree, tree.paths


@pytest.mark.parametrize("start", [(0, 0), (2, 0), (1, 3)])
def test_every_path_of_a_tree_has_the_features_of_the_path_alone(start):
    decoder = network()
    tree, paths = eagle_tree()
    x = torch.randn(ROWS, len(paths), 16).double()
    cache, _ = prefilled(decoder, start)
    together = decoder(x, cache.nodes(tree.depth, tree.mask), cache)
    for node, path in enumerate(paths):
        along = [paths.index(path[:d]) for d in range(len(path) + 1)]
        alone = decode_one_by_one(decoder, prefilled(decoder, start)[0], x[:, along])
        assert torch.allclose(alone[:, -1], together[:, node], atol=1e-12)


@pytest.mark.parametrize("kept_paths", [[(1, 0, 0), (3,)], [None, (0, 1)]])
def test_committing_a_path_equals_decoding_its_codes_one_by_one(kept_paths):
    """Each row commits its own path, of its own length; a finished sample (None) commits nothing."""
    decoder = network()
    tree, paths = eagle_tree()
    x, later = torch.randn(ROWS, len(paths), 16).double(), torch.randn(ROWS, 3, 16).double()
    # the last one repeated as padding
    path = torch.tensor(
        [[paths.index(p[: min(d, len(p))]) for d in range(6)] for p in (p or (1, 1) for p in kept_paths)]
    )
    kept = torch.tensor([0 if p is None else len(p) + 1 for p in kept_paths])
    scattered, _ = prefilled(decoder)
    decoder(x, scattered.nodes(tree.depth, tree.mask), scattered)
    scattered.commit(path, kept)
    assert scattered.used.tolist() == (4 + kept).tolist()
    after = decode_one_by_one(decoder, scattered, later)
    for row in range(ROWS):
        plain, _ = prefilled(decoder)
        if kept[row]:
            decode_one_by_one(decoder, plain, x[:, path[row, : kept[row]]])
        assert torch.allclose(decode_one_by_one(decoder, plain, later)[row], after[row], atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_padding_slot_gives_no_nan_and_does_not_count(dtype):
    decoder = network().to(dtype)
    torch.manual_seed(2)
    x, later = torch.randn(ROWS, 4, 16).to(dtype), torch.randn(ROWS, 2, 16).to(dtype)
    other = x.clone()
    other[0, :2], other[1, :3] = 100.0, -50.0  # in the padding
    ends = []
    for embeds in (x, other):
        cache = Cache(DEEP, ROWS, SLOTS, decoder.norm.weight)
        memory = cache.rows(torch.arange(ROWS), torch.tensor([2, 3]), 4)
        features = decoder(embeds, memory.nodes(), memory)
        assert features.isfinite().all()
        memory = Cache(DEEP, 1, SLOTS, decoder.norm.weight).rows(torch.arange(1), torch.tensor([0]), 3)
        padding = decoder(embeds[1:, :3], memory.nodes(), memory)  # as LANTERN's drafters read it
        assert torch.allclose(features[1:, :3], padding, rtol=0.05)
        ends.append((features[:, -1], decode_one_by_one(decoder, cache, later)))
    assert torch.equal(ends[0][0], ends[1][0]) and torch.equal(ends[0][1], ends[1][1])


@pytest.mark.parametrize("name", ["parallel", "tree", "independent"])
def test_a_prompt_in_several_passes_draws_the_same(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    drawn = []
    for chunk in (cache.CHUNK, 2, 1):
        monkeypatch.setattr(cache, "CHUNK", chunk)
        engine = Engine(*parts(name))
        sizes: list[int] = []
        engine.target.register_forward_pre_hook(lambda _, given, sizes=sizes: sizes.append(given[0].shape[1]))
        # the second prompt is padded
        drawn.append(codes_of(engine, ["hill", "sea"], [1, 2]))
        assert sizes[: -(-6 // min(chunk, 3))] == {1: [1] * 6, 2: [2, 1, 2]}.get(chunk, [3, 3])
    assert drawn[0] == drawn[1] == drawn[2]


def test_grouped_attention_is_that_of_pytorch() -> None:
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 16, 8), torch.randn(2, 2, 16, 8)
    mask = torch.zeros(2, 1, 5, 16).masked_fill_(torch.rand(2, 1, 5, 16) < 0.4, float("-inf"))
    expected = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    assert torch.allclose(cache.grouped(F.scaled_dot_product_attention, q, k, v, mask), expected, atol=1e-5)


def test_the_loop_draws_the_argmax_of_the_causal_pass():
    target = ToyTarget()
    engine = engine_of(target, TreeProposer(eagle(target), StaticTree(EAGLE)), 1, Sampling(0))
    codes = torch.tensor(codes_of(engine, ["hill"], [0]))
    prompt = target.prompt(["hill"], 1)
    assert prompt.start.tolist() == [0]  # `forward_sequence` knows no padding
    assert torch.equal(target.head(target.forward_sequence(prompt.embeds, codes)).argmax(-1), codes)


def test_a_torch_without_its_private_function_can_be_used(monkeypatch) -> None:
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    assert runpy.run_path(cache.__file__)["TILES"] is False
