from __future__ import annotations

import copy

import pytest
import torch
from helpers.stacks import StackPasses

from lanternpp.engine.cache import Cache
from lanternpp.nn.decoder import Decoder, DecoderConfig, angle_table, grid_table, line_table

PREFIX, GRID = 3, 6


def test_rotary_tables_are_of_places_on_a_line_and_of_rows_and_columns_on_a_grid():
    """Weights were trained with these angles; prompts are not rotated on a grid."""
    line, grid = line_table(32, 8, 100.0), grid_table(PREFIX, GRID, 8, 100.0)
    powers = torch.tensor([1.0, 100**-0.25, 100**-0.5, 100**-0.75], dtype=torch.float64)
    assert torch.allclose(line[9:10], angle_table(9 * powers[None]))
    place = PREFIX + 2 * GRID + 5
    angles = torch.cat((2 * powers[::2], 5 * powers[::2]))
    assert torch.allclose(grid[place : place + 1], angle_table(angles[None]))
    assert torch.equal(grid[:PREFIX], angle_table(torch.zeros(PREFIX, 4, dtype=torch.float64)))


SHAPES = {
    "plain": DecoderConfig(dim=16, layers=3, heads=2, hidden=24),
    "one group": DecoderConfig(dim=32, layers=3, heads=4, kv_heads=1, hidden=24),
    "a drafter": DecoderConfig(dim=16, layers=3, heads=2, hidden=24, first_norm=False, final_norm=False),
    "normed heads": DecoderConfig(dim=32, layers=3, heads=4, kv_heads=2, hidden=24, qk_norm=True),
    "wide heads": DecoderConfig(dim=16, layers=3, heads=4, kv_heads=2, hidden=24, head_dim=8),
    "another epsilon": DecoderConfig(dim=16, layers=3, heads=2, hidden=24, norm_eps=0.1),
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


@every_shape
def test_a_pass_into_the_cache_is_the_causal_pass(shape):
    """By the modules, by plain operations on the decoder's `Stack`, which kernels compute, and without a cache in two parts."""
    decoder = network(shape)
    x = torch.randn(2, 9, shape.dim, dtype=torch.float64)
    expected = decoder.forward_sequence(x, aux_layers=(0, 1))
    for native in (None, StackPasses(decoder.stack(), decoder.rotary_table)):
        decoder.native = native
        cache = Cache(shape, 2, 16, x)
        memory = cache.rows(torch.arange(2), torch.zeros(2, dtype=torch.int64), 5)
        first = decoder(x[:, :5], memory.nodes(), memory, (0, 1))
        count, mask = torch.arange(4).expand(2, -1), torch.ones(4, 4, dtype=torch.bool).tril()
        rest = decoder(x[:, 5:], cache.nodes(count, mask.expand(2, -1, -1)), cache, (0, 1))
        assert torch.allclose(torch.cat((first, rest), 1), expected, atol=1e-10)
    assert native.passes == 2
    past: list[tuple[torch.Tensor, torch.Tensor]] = []
    slot, mask = torch.arange(9)[None], torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    parts = [
        decoder.forward_sequence(x[:, part], slot[:, part], mask[:, :, part, : part.stop], (0, 1), past)
        for part in (slice(0, 5), slice(5, 9))
    ]
    assert torch.allclose(torch.cat(parts, 1), expected, atol=1e-10)


@every_shape
def test_layers_below_the_last_are_returned_as_they_leave_them(shape):
    decoder = network(shape)
    x = torch.randn(2, 5, shape.dim, dtype=torch.float64)
    features = [decoder.forward_sequence(x)]
    lower = copy.deepcopy(decoder)
    lower.norm = torch.nn.Identity()
    for count in (1, 2):
        lower.blocks = decoder.blocks[:count]
        features.append(lower.forward_sequence(x))
    assert torch.equal(decoder.forward_sequence(x, aux_layers=(0, 1)), torch.cat(features, -1))
    assert torch.equal(decoder.forward_sequence(x, aux_layers=(1,)), torch.cat(features[::2], -1))


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
