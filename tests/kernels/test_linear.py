"""Packed weights: unpacking, and layers that multiply with them, for odd sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from ctypes import CDLL

import pytest
import torch
import torch.nn.functional as F
from helpers.stacks import with_biases
from helpers.toys import fits_4_bits, stored_in_8_bits
from kernels.rounding import multiplied
from torch import Tensor, nn

from lanternpp.engine.sampling import Guidance
from lanternpp.kernels import loading
from lanternpp.kernels.linear import KernelLinear
from lanternpp.kernels.packing import KernelDecoder, pack
from lanternpp.nn.decoder import Block, Decoder, DecoderConfig, grid_table
from lanternpp.nn.int8 import int8_parts

pytestmark = pytest.mark.skipif(loading.library() is None, reason="no kernels here")

HALF = torch.bfloat16
Threads = Callable[[int], None]
SIZES = [(1, 1), (7, 33), (70, 45), (33, 65), (5, 1100)]  # outputs, inputs
DTYPES = ["bfloat16", "int8", "int4"]


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def layer_of(outputs: int, inputs: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias).to(HALF).requires_grad_(False)


def stored(weight: Tensor, dtype: str) -> Tensor:
    """Change a weight to numbers that `dtype` stores exactly; return it in float64."""
    change = {"bfloat16": Tensor.double, "int8": stored_in_8_bits, "int4": fits_4_bits}[dtype]
    return change(weight)


def packed(
    library: CDLL, weights: list[Tensor], dtype: str = "bfloat16", order: Tensor | None = None
) -> KernelLinear:
    return KernelLinear(library, [(weight, None) for weight in weights], dtype, order)


def together(inputs: int) -> tuple[list[Tensor], Tensor]:
    """Three weights with the same inputs, and an order of all their outputs with zeros between some."""
    weights = [torch.randn(outputs, inputs).to(HALF) for outputs in (5, 1, 40)]
    order = torch.cat((torch.randperm(46)[:20], torch.full((3,), -1), torch.randperm(46)[:30]))
    return weights, order


def ordered(rows: Tensor, order: Tensor) -> Tensor:
    return torch.where((order < 0)[:, None], 0, rows[order.clamp(min=0)])


@pytest.mark.parametrize("inputs", [1, 45, 130])
def test_weights_in_bfloat16_are_unpacked_as_they_were(library: CDLL, inputs: int, threads: Threads) -> None:
    weights, order = together(inputs)
    for count in (1, 3):
        threads(count)
        assert torch.equal(packed(library, weights).unpacked(), torch.cat(weights))
        found = packed(library, weights, order=order)
        assert torch.equal(found.unpacked(), ordered(torch.cat(weights), order))


@pytest.mark.parametrize("inputs", [1, 45, 130])
def test_the_error_of_weights_rounded_to_8_bits_is_at_most_half_a_step(library: CDLL, inputs: int) -> None:
    weights, order = together(inputs)
    weights[2][7] = 0
    stored_in_8_bits(weights[0])  # if only some have 8 bits already, all are rounded again
    exact = ordered(torch.cat(weights), order).double()
    found = packed(library, weights, "int8", order)
    step = exact.abs().amax(1) / 127
    assert torch.allclose(found.scale[: len(order)].double(), step)
    # They are returned in bfloat16, which has 8 significant bits.
    far = (found.unpacked().double() - exact).abs()
    assert (far <= 0.501 * step[:, None] + exact.abs() / 256).all()
    if inputs > 1:
        assert far.max() > 0.2 * step.max(), "they were rounded"


@pytest.mark.parametrize("inputs", [1, 45, 130])
def test_8_bits_of_a_checkpoint_are_kept(library: CDLL, inputs: int) -> None:
    weights, order = together(inputs)
    for weight in weights:
        stored_in_8_bits(weight)
        numbers, scale = weight.int8_weight
        weight.int8_weight = numbers, 2 * scale  # no longer the largest weight over 127
    parts = [int8_parts(weight) for weight in weights]
    numbers, scale = (torch.cat([part[i] for part in parts if part]) for i in range(2))
    found = packed(library, weights, "int8", order)
    assert torch.equal(found.scale[: len(order)], torch.where(order < 0, 0, scale[order.clamp(min=0)]))
    expected = (numbers.float() * scale[:, None]).to(HALF)
    assert torch.equal(found.unpacked(), ordered(expected, order))


@pytest.mark.parametrize("inputs", [1, 45, 130])
def test_weights_that_4_bits_store_exactly_are_kept(library: CDLL, inputs: int) -> None:
    weights, order = together(inputs)
    exact = torch.cat([fits_4_bits(weight) for weight in weights])
    assert torch.equal(packed(library, weights, "int4", order).unpacked().double(), ordered(exact, order))


def test_the_error_of_weights_rounded_to_4_bits(library: CDLL) -> None:
    """At most half a step of 4 bits, but for the furthest 32nd and those near its negative, which may have a step."""
    weight = torch.randn(300, 320).to(HALF)
    weight[7], weight[8, :32] = 0, 0
    weight[9, 40] = 100
    error = (packed(library, [weight], "int4").unpacked() - weight).float().unflatten(1, (-1, 32))
    groups = weight.float().unflatten(1, (-1, 32))
    assert not error[7].any() and not error[8, 0].any()
    usual = torch.arange(300) != 9
    step = groups.abs().amax(-1, keepdim=True)[usual] / 8
    assert (error[usual].abs() <= 1.5 * step).all()
    assert error[usual].square().mean() < 0.011 * groups[usual].square().mean()
    assert error[9, 1, 8].abs() <= 100 / 256, "the largest weight of a row"
    stored_in_8_bits(weight)
    again = packed(library, [weight], "int4").unpacked() - weight
    assert again[usual].square().mean() < 0.011 * weight[usual].square().mean()


@pytest.mark.parametrize("kept", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_layer_rounds_once(library: CDLL, size: tuple[int, int], bias: bool, kept: str) -> None:
    layer = layer_of(*size, bias=bias)
    weight = stored(layer.weight, kept)
    made = KernelLinear(library, [(layer.weight, layer.bias)], kept)
    assert torch.equal(made.weight, layer.weight)
    assert made.bias is layer.bias or torch.equal(made.bias, layer.bias)
    for rows in (0, 1, 5, 17, 300):
        x = torch.randn(rows, size[1]).to(HALF)
        given = x.double() if kept == "bfloat16" else multiplied(x, library)
        exact = F.linear(given, weight, None if layer.bias is None else layer.bias.double())
        for dtype, digits in ((HALF, 255), (torch.float32, 1 << 20)):
            found = made.product(x, dtype)
            assert found.dtype == dtype and found.shape == exact.shape
            assert ((found - exact).abs() <= exact.abs() / digits + 1e-3).all(), rows
        assert torch.equal(made(x[None, None]), made.product(x)[None, None])


@pytest.mark.parametrize("kept", DTYPES)
@pytest.mark.parametrize("size", [(70, 45), (300, 200), (5, 1100)], ids=str)
def test_a_row_has_the_same_bits_for_any_number_of_rows_and_threads(
    library: CDLL, size: tuple[int, int], kept: str, threads: Threads
) -> None:
    layer = layer_of(*size)
    made = KernelLinear(library, [(layer.weight, layer.bias)], kept)
    x = torch.randn(300, size[1]).to(HALF) * 10 ** torch.randn(300, 1).to(HALF)
    pairs = x.view(2, 150, -1)
    alone, guided = made.product(x, torch.float32), made.logits(pairs, 3.0, 2)
    merged = Guidance(3.0).merge(pairs.double()).to(HALF)
    assert torch.allclose(guided, made.product(merged, torch.float32), rtol=1e-3, atol=1e-2)
    for count in (1, 2, 3):
        threads(count)
        for rows in (1, 2, 4, 6, 16, 17, 33, 127, 129, 300):
            assert torch.equal(made.product(x[-rows:], torch.float32), alone[-rows:]), (count, rows)
        assert torch.equal(made.logits(pairs[:, -7:], 3.0, 2), guided[:, -7:])


@pytest.mark.parametrize("kept", DTYPES)
@pytest.mark.parametrize("hidden", [1, 16, 44, 96])
def test_a_block_whose_gate_and_up_alternate_returns_them_in_order(
    library: CDLL, hidden: int, kept: str
) -> None:
    plain = with_biases(Block(DecoderConfig(40, 1, 2, hidden))).to(HALF).requires_grad_(False)
    stored(plain.w13.weight, kept)
    block, x = copy.deepcopy(plain), torch.randn(3, 40).to(HALF)
    block.w13.weight.__dict__.update(plain.w13.weight.__dict__)
    pack(block, library, kept)
    assert type(block.w13) is KernelLinear and torch.equal(block.w13.weight, plain.w13.weight)
    assert torch.equal(block.w13.bias, plain.w13.bias)
    assert torch.allclose(block.w13(x), plain.w13(x), rtol=0.02, atol=0.01 if kept == "bfloat16" else 0.05)


@pytest.mark.parametrize("kept", DTYPES)
def test_a_packed_decoder_keeps_no_other_copy_of_its_weights(library: CDLL, kept: str) -> None:
    config = DecoderConfig(96, 2, 4, 100)
    network = (
        with_biases(Decoder(config, grid_table(3, 8, config.head_dim).float())).to(HALF).requires_grad_(False)
    )
    pack(network, library, kept)
    assert isinstance(network.native, KernelDecoder)
    assert all(tensor.ndim == 1 for tensor in network.state_dict().values()), "only norms"
    for block, struct in zip(network.blocks, network.native.layer_structs, strict=True):
        for name in ("wqkv", "wo", "w13", "w2"):
            layer = getattr(block, name)
            assert struct.alive[name] is layer.struct, "passes and modules share them"
            assert layer.packed.dtype == (HALF if kept == "bfloat16" else torch.uint8)
