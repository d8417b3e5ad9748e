"""A decoder's passes in C compute what PyTorch computes, up to the rounding of bfloat16."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from kernels.rounding import attends_with_tiles
from torch import nn

from lanternpp.engine.cache import Cache
from lanternpp.kernels import loading as native
from lanternpp.kernels.packing import KernelDecoder
from lanternpp.nn.decoder import Decoder, DecoderConfig, grid_table
from lanternpp.nn.int8 import int8_parts, quantise

HALF = torch.bfloat16

pytestmark = pytest.mark.skipif(native.library() is None, reason="no kernels here")


def decoder(*sizes: int, **more: object) -> Decoder:
    """Width, layers, heads, hidden."""
    torch.manual_seed(0)
    config = DecoderConfig(*sizes, **more)
    made = Decoder(config, grid_table(3, 8, config.head_dim).float())
    for name, parameter in made.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return made.to(HALF).eval().requires_grad_(False)


def in_8_bits(network: Decoder) -> Decoder:
    """The same network; the test is skipped without torchao."""
    pytest.importorskip("torchao")
    quantise(network)
    return network


def in_float64(network: Decoder) -> Decoder:
    """With the weights that 8 bits stand for."""
    found = copy.deepcopy(network)
    for child, known in zip(found.modules(), network.modules(), strict=True):
        if isinstance(known, nn.Linear):
            child.weight = nn.Parameter(known.weight.dequantize(), requires_grad=False)
    return found.double()


def in_c(network: Decoder, library: object = None) -> Decoder:
    """Its passes in C, with the 8 bits that weights have."""
    found = copy.deepcopy(network)
    dtype = "int8" if all(int8_parts(block.wqkv.weight) for block in network.blocks) else "bfloat16"
    library = library or native.library()
    found.native = KernelDecoder(network.stack(), network.rotary_table, library, dtype)
    return found


@torch.inference_mode()
def features(network: Decoder, x: torch.Tensor, nodes: int) -> torch.Tensor:
    """x [R, T, D] in a prefill of 3 slots, of which the last row has one of padding; then in chains of so many nodes."""
    rows = len(x)
    cache = Cache(network.config, rows, x.shape[1] + 2, x)
    start = torch.zeros(rows, dtype=torch.int64)
    start[-1] = 1
    prompt = cache.rows(torch.arange(rows), start, 3)
    found = [network(x[:, :3], prompt.nodes(), prompt)]
    for part in x[:, 3:].split(nodes, 1):
        depth = torch.arange(part.shape[1]).expand(rows, -1)
        mask = torch.ones(part.shape[1], part.shape[1], dtype=torch.bool).tril().expand(rows, -1, -1)
        found.append(network(part, cache.nodes(depth, mask), cache))
        cache.used += part.shape[1]
    return torch.cat(found, 1)


def test_very_negative_gates_give_zero(library: object):
    plain = decoder(64, 1, 4, 96)
    with torch.no_grad():
        plain.blocks[0].w13.weight[:96] *= 1000
    x = torch.randn(1, 24, 64).to(HALF)
    exact = features(copy.deepcopy(plain).double(), x.double(), 1)
    wrong, usual = ((features(network, x, 1) - exact).abs() for network in (in_c(plain, library), plain))
    assert wrong.mean() < 1.2 * usual.mean() and wrong.max() < 0.15 * exact.abs().max()


@pytest.mark.parametrize(
    ("int8", "sizes"), [(False, (192, 1, 6, 288)), (True, (64, 1, 4, 96))], ids=["bfloat16", "int8"]
)
def test_a_row_does_not_depend_on_the_other_rows_or_their_number(
    library: object, int8: bool, sizes: tuple[int, ...], threads: Callable[[int], None]
):
    """Up to 300 rows; nor on the number of threads, with heads that they can share evenly and with others."""
    network = in_c(in_8_bits(decoder(*sizes)) if int8 else decoder(*sizes), library)
    x = torch.randn(3, 103, sizes[0]).to(HALF)
    pair, start = x[:1].repeat(2, 1, 1), x[:, :38]
    alone, many = features(network, pair[:, :38], 1)[0], features(network, pair, 5)[0]
    if attends_with_tiles(library):
        # Up to 4 queries of a head attend by vectors and more by tiles, which round the weights before they divide by their sum.
        assert torch.allclose(alone.float(), many[:38].float(), rtol=0.02, atol=0.03)
    else:
        assert torch.equal(alone, many[:38])
    for nodes in (1, 2, 3, 4):
        assert torch.equal(features(network, start, nodes)[0], alone)
    for nodes in (19, 38, 43, 100):
        assert torch.equal(features(network, x, nodes)[0], many)
    for count in (2, 3, 5):
        threads(count)
        for inputs, nodes, found in ((x[:, :15], 2, alone), (x[:, :33], 10, many), (x[:, :41], 19, many)):
            assert torch.equal(features(network, inputs, nodes)[0], found[: inputs.shape[1]])


def test_sums_of_equal_weights_and_inputs_stay_within_32_bits(library: object):
    plain = decoder(64, 1, 4, 1024, final_norm=False)
    plain.blocks[0].w13.weight.fill_(0.1)
    plain.blocks[0].w2.weight.fill_(-0.1)  # -128 as a whole number
    x = torch.rand(2, 9, 64).to(HALF)
    plain = in_8_bits(plain)
    exact = features(in_float64(plain), x.double(), 3)
    assert torch.allclose(features(in_c(plain, library), x, 3).double(), exact, rtol=0.03)


@torch.inference_mode()
def test_an_idle_row_is_finite_and_does_not_affect_others():
    network = in_c(decoder(64, 2, 4, 96))
    x = torch.randn(2, 1, 64).to(HALF)
    cache = Cache(network.config, 2, 4, x)
    nodes = cache.nodes(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1, 1, dtype=torch.bool))
    nodes.mask[1] = False
    both = network(x, nodes, cache)
    assert both.isfinite().all()
    assert torch.equal(network(x, nodes, cache), both)


@pytest.mark.parametrize("int8", [False, True], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("x", [0.0, 1e-30, 1e4, math.nan])
@torch.inference_mode()
def test_small_and_large_inputs(x: float, int8: bool):
    plain = in_8_bits(decoder(64, 2, 4, 96)) if int8 else decoder(64, 2, 4, 96)
    inputs = torch.full((1, 12, 64), x).to(HALF)
    mine, usual = (features(network, inputs, 3).float() for network in (in_c(plain), plain))
    assert torch.allclose(mine, usual, rtol=0.1, atol=0.1, equal_nan=True)
