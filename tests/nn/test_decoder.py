from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lanternpp.engine.cache import Cache
from lanternpp.nn.decoder import Decoder, DecoderConfig, Norm
from lanternpp.nn.rope import angle_table, grid_table, line_table, rotate

PREFIX, GRID, HEAD = 3, 6, 8


def turned(x: torch.Tensor, slot: int) -> torch.Tensor:
    return rotate(x.view(1, 1, 1, -1), grid_table(PREFIX, GRID, HEAD)[slot][None, None, :, None]).flatten()


def at(row: int, column: int) -> int:
    return PREFIX + row * GRID + column


def score(q: torch.Tensor, k: torch.Tensor, here: int, there: int) -> float:
    return (turned(q, here) @ turned(k, there)).item()


def vectors(count: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return list(torch.randn(count, HEAD, dtype=torch.float64))


@pytest.mark.parametrize("shift", [(1, 0), (0, 1), (2, 3)])
def test_scores_on_the_grid_depend_on_the_shift_alone(shift):
    q, k = vectors()
    down, right = shift
    for (r1, c1), (r2, c2) in [((0, 0), (0, 1)), ((2, 1), (0, 2)), ((3, 0), (1, 1))]:
        before = score(q, k, at(r1, c1), at(r2, c2))
        assert score(q, k, at(r1 + down, c1 + right), at(r2 + down, c2 + right)) == pytest.approx(before)


def test_rows_and_columns_are_told_apart():
    q, k = vectors()
    same, right, down = (score(q, k, at(0, 0), at(*to)) for to in ((0, 0), (0, 1), (1, 0)))
    assert len({round(s, 6) for s in (same, right, down)}) == 3


def test_a_row_ends_where_the_next_begins():
    """The last code of a row and the first of the next are not neighbours, as they would be on a line."""
    q, k = vectors()
    assert score(q, k, at(0, GRID - 1), at(1, 0)) != pytest.approx(score(q, k, at(0, 0), at(0, 1)))


def test_the_prefix_is_not_turned_and_turning_keeps_lengths():
    x = vectors(1)[0]
    assert all(torch.equal(turned(x, slot), x) for slot in range(PREFIX))
    assert torch.equal(turned(x, at(0, 0)), x)
    assert all(turned(x, at(r, c)).norm() == pytest.approx(x.norm()) for r in range(3) for c in range(3))


def test_scores_on_the_line_depend_on_the_distance_alone():
    """So a prompt may be padded on its left by any number of slots."""
    q, k = vectors()
    table = line_table(32, HEAD, 100.0)

    def turned(x, slot):
        return rotate(x.view(1, 1, 1, -1), table[slot][None, None, :, None]).flatten()

    near, far, shifted = (turned(q, a) @ turned(k, b) for a, b in ((5, 3), (9, 3), (25, 23)))
    assert near.item() == pytest.approx(shifted.item())
    assert near.item() != pytest.approx(far.item())
    angle = torch.tensor([1.0, 100**-0.25, 100**-0.5, 100**-0.75], dtype=torch.float64)
    assert torch.allclose(table, angle_table(torch.arange(32)[:, None] * angle))


def test_the_table_has_a_row_for_every_slot():
    assert grid_table(PREFIX, GRID, HEAD).shape == (PREFIX + GRID * GRID, 2, HEAD)


def test_rotation_pairs_channel_i_with_i_plus_half():
    angle = torch.tensor([[0.3, 1.1]], dtype=torch.float64)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    out = rotate(x.view(1, 1, 1, 4), angle_table(angle)[0][None, None, :, None]).flatten()
    pair = torch.complex(x[:2], x[2:]) * torch.exp(1j * angle[0])
    assert torch.allclose(out, torch.cat((pair.real, pair.imag)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_norm_divides_by_the_root_mean_square(dtype):
    torch.manual_seed(0)
    norm = Norm(16, 1e-5)
    norm.weight.data.uniform_(0.5, 2)
    x = (torch.randn(4, 16) * 30).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    out = norm(x)
    assert out.dtype == dtype
    assert torch.allclose(out.double(), expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5)


SHAPES = {
    "plain": DecoderConfig(dim=16, layers=2, heads=2, hidden=24),
    "grouped": DecoderConfig(dim=32, layers=2, heads=4, kv_heads=2, hidden=24),
    "one group": DecoderConfig(dim=32, layers=1, heads=4, kv_heads=1, hidden=24),
    "no norms": DecoderConfig(dim=16, layers=2, heads=2, hidden=24, first_norm=False, final_norm=False),
    "normed heads": DecoderConfig(dim=16, layers=2, heads=2, hidden=24, qk_norm=True),
    "wide heads": DecoderConfig(dim=16, layers=2, heads=4, kv_heads=2, hidden=24, head_dim=8),
    "biases": DecoderConfig(dim=16, layers=2, heads=2, hidden=24, attention_bias=True, ffn_bias=True),
    "norms after": DecoderConfig(dim=16, layers=2, heads=2, hidden=24, norm_after=True, qk_norm=True),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def network(shape: DecoderConfig) -> Decoder:
    torch.manual_seed(1)
    decoder = Decoder(shape, grid_table(PREFIX, GRID, shape.head_dim)).double().requires_grad_(False)
    for weight in decoder.parameters():
        weight.data = weight.data * 3 if weight.dim() == 2 else weight.data.uniform_(0.5, 2)
    for block in decoder.blocks:
        if shape.qk_norm:
            block.qk_norm.weight.data.uniform_(0.5, 2)
            block.qk_norm.bias.data.uniform_(-1, 1)
    return decoder


def by_hand(decoder: Decoder, x: torch.Tensor) -> torch.Tensor:
    """The same network, one position and one head at a time: x [T, D]."""
    shape = decoder.config

    def norm(x, layer):
        if isinstance(layer, torch.nn.Identity):
            return x
        return x / (x.square().mean(-1, keepdim=True) + shape.norm_eps).sqrt() * layer.weight

    def before(x, layer):
        return x if shape.norm_after else norm(x, layer)

    def after(x, layer):
        return norm(x, layer) if shape.norm_after else x

    def of_heads(x, layer, first):
        if not shape.qk_norm:
            return x
        unit = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
        rows = slice(first, first + x.shape[1])
        return unit * layer.weight[rows] + layer.bias[rows]

    for block in decoder.blocks:
        qkv = F.linear(before(x, block.attention_norm), block.wqkv.weight, block.wqkv.bias)
        q, k, v = qkv.view(len(x), -1, shape.head_dim).split(
            (shape.heads, shape.num_kv_heads, shape.num_kv_heads), 1
        )
        q, k = of_heads(q, block.qk_norm, 0), of_heads(k, block.qk_norm, shape.heads)
        table = decoder.rotary_table[: len(x)]
        q, k = (t * table[:, 0, None] + t.roll(shape.head_dim // 2, -1) * table[:, 1, None] for t in (q, k))
        y = torch.zeros_like(q)
        for t in range(len(x)):
            for h in range(shape.heads):
                g = h // (shape.heads // shape.num_kv_heads)
                weight = (k[: t + 1, g] @ q[t, h] / shape.head_dim**0.5).softmax(-1)
                y[t, h] = weight @ v[: t + 1, g]
        x = x + after(F.linear(y.flatten(1), block.wo.weight, block.wo.bias), block.attention_norm)
        gate, up = F.linear(before(x, block.ffn_norm), block.w13.weight, block.w13.bias).chunk(2, -1)
        x = x + after(F.linear(gate * gate.sigmoid() * up, block.w2.weight, block.w2.bias), block.ffn_norm)
    return norm(x, decoder.norm)


@every_shape
def test_the_network_is_the_one_written_by_hand(shape):
    decoder = network(shape)
    x = torch.randn(2, 9, shape.dim, dtype=torch.float64)
    expected = torch.stack([by_hand(decoder, one) for one in x])
    assert torch.allclose(decoder.forward_sequence(x), expected, atol=1e-10)


@every_shape
def test_a_pass_into_the_cache_is_the_causal_pass(shape):
    decoder = network(shape)
    x = torch.randn(2, 9, shape.dim, dtype=torch.float64)
    cache = Cache(shape, 2, 16, x)
    memory = cache.rows(torch.arange(2), torch.zeros(2, dtype=torch.int64), 5)
    first = decoder(x[:, :5], memory.nodes(), memory)
    count = torch.arange(4).expand(2, -1)
    rest = decoder(
        x[:, 5:], cache.nodes(count, torch.ones(4, 4, dtype=torch.bool).tril().expand(2, -1, -1)), cache
    )
    assert torch.allclose(torch.cat((first, rest), 1), decoder.forward_sequence(x), atol=1e-10)


@every_shape
def test_layers_below_the_last_are_returned_as_they_leave_them(shape):
    """By a pass over the whole sequence and by one into the cache; the features are the same with and without."""
    decoder = network(replace(shape, layers=3))
    x, features = torch.randn(2, 5, shape.dim, dtype=torch.float64), []
    lower = copy.deepcopy(decoder)
    lower.norm = torch.nn.Identity()
    for count in (1, 2):
        lower.blocks = decoder.blocks[:count]
        features.append(lower.forward_sequence(x))
    expected = torch.cat((decoder.forward_sequence(x), *features), -1)
    assert torch.equal(decoder.forward_sequence(x, aux_layers=(0, 1)), expected)
    memory = Cache(decoder.config, 2, 8, x).rows(torch.arange(2), torch.zeros(2, dtype=torch.int64), 5)
    assert torch.allclose(decoder(x, memory.nodes(), memory, (0, 1)), expected, atol=1e-10)
    top = torch.cat((expected[..., : shape.dim], expected[..., 2 * shape.dim :]), -1)
    assert torch.equal(decoder.forward_sequence(x, aux_layers=(1,)), top)


def test_what_comes_later_does_not_change_what_came_before():
    decoder = network(SHAPES["plain"])
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    other = x.clone()
    other[:, 5:] += 1
    assert torch.equal(decoder.forward_sequence(x)[:, :5], decoder.forward_sequence(other)[:, :5])
    assert not torch.allclose(decoder.forward_sequence(x)[:, 5:], decoder.forward_sequence(other)[:, 5:])


def test_a_position_beyond_the_grid_is_the_last_one():
    decoder = network(SHAPES["plain"])
    x = torch.randn(1, 1, 16, dtype=torch.float64)
    last = PREFIX + GRID * GRID - 1
    outs = []
    for used in (last, last + 3):
        cache = Cache(SHAPES["plain"], 1, last + 8, x)
        cache.start += used
        cache.used += used
        nodes = cache.nodes(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, 1, dtype=torch.bool))
        outs.append(decoder(x, nodes, cache))
    assert torch.equal(*outs)


def test_dropout_is_for_training_alone():
    decoder = network(DecoderConfig(dim=16, layers=1, heads=2, hidden=24, dropout=0.5))
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    decoder.train()
    assert not torch.equal(decoder.forward_sequence(x), decoder.forward_sequence(x))
    decoder.eval()
    assert torch.equal(decoder.forward_sequence(x), decoder.forward_sequence(x))
