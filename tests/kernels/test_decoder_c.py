"""A decoder's passes in C compute what PyTorch computes, up to the rounding of bfloat16."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.stacks import StackPasses, with_biases
from kernels.rounding import attends_with_tiles, groups_inputs
from torch import nn

from lanternpp.engine.cache import Cache
from lanternpp.kernels import loading as native
from lanternpp.kernels.decoder import KernelDecoder
from lanternpp.kernels.linear import ALIGNED, ROOM, LargePages
from lanternpp.nn import checkpoints
from lanternpp.nn.backend import backend
from lanternpp.nn.decoder import Decoder, DecoderConfig, grid_table
from lanternpp.nn.int8 import int8_parts, quantise
from lanternpp.nn.sources import Rename, Source
from lanternpp.types import Nodes

HALF = torch.bfloat16

pytestmark = pytest.mark.skipif(native.library() is None, reason="no kernels here")


def decoder(*sizes: int, **more: object) -> Decoder:
    """Width, layers, heads, hidden."""
    torch.manual_seed(0)
    config = DecoderConfig(*sizes, **more)  # type: ignore[arg-type]
    made = Decoder(config, grid_table(3, 8, config.head_dim).float())
    for name, parameter in made.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return made.to(HALF).eval().requires_grad_(False)


def in_16_bits(network: Decoder) -> Decoder:
    """The same network."""
    return network


def in_8_bits(network: Decoder) -> Decoder:
    """The same network; the test is skipped without torchao."""
    pytest.importorskip("torchao")
    quantise(network)
    return network


def read_in_8_bits(network: Decoder) -> Decoder:
    """The same network, saved in 8 bits and read again."""
    with tempfile.TemporaryDirectory() as place:
        tensors = {f"decoder.{name}": tensor for name, tensor in network.state_dict().items()}
        checkpoints.save(Path(place), {}, tensors, "int8")
        source = Source.open(Path(place))
        source.int8 = True
        source.fill(network, [Rename(r"decoder\.(.+)", r"\1")], HALF)
    return network


def in_float64(network: Decoder) -> Decoder:
    """With the weights that those of `network` stand for."""
    found = copy.deepcopy(network)
    for child, known in zip(found.modules(), network.modules(), strict=True):
        parts = int8_parts(known.weight) if isinstance(known, nn.Linear) else None
        if parts:
            child.weight = nn.Parameter(parts[0].double() * parts[1].double()[:, None], requires_grad=False)
    return found.double()


def in_c(network: Decoder, library: object = None) -> Decoder:
    """Its passes in C, with the 8 bits that weights have."""
    found = copy.deepcopy(network)
    int8 = all(int8_parts(block.wqkv.weight) is not None for block in network.blocks)
    library = library or native.library()
    found.native = KernelDecoder(network.stack(), network.rotary_table, library, int8)  # type: ignore[arg-type]
    return found


@torch.inference_mode()
def features(network: Decoder, x: torch.Tensor, nodes: int, aux_layers: tuple[int, ...] = ()) -> torch.Tensor:
    """x [R, T, D] in a prefill of 3 slots, of which the last row has one of padding; then in chains of so many nodes."""
    rows = len(x)
    cache = Cache(network.config, rows, x.shape[1] + 2, x)
    start = torch.zeros(rows, dtype=torch.int64)
    start[-1] = 1
    prompt = cache.rows(torch.arange(rows), start, 3)
    found = [network(x[:, :3], prompt.nodes(), prompt, aux_layers)]
    for part in x[:, 3:].split(nodes, 1):
        depth = torch.arange(part.shape[1]).expand(rows, -1)
        mask = torch.ones(part.shape[1], part.shape[1], dtype=torch.bool).tril().expand(rows, -1, -1)
        found.append(network(part, cache.nodes(depth, mask), cache, aux_layers))
        cache.used += part.shape[1]
    return torch.cat(found, 1)


Stored = Callable[[Decoder], Decoder]
WEIGHTS = [
    pytest.param(in_16_bits, id="bfloat16"),
    pytest.param(in_8_bits, id="int8"),
    pytest.param(read_in_8_bits, id="read in 8 bits"),
]


@pytest.mark.parametrize("stored", WEIGHTS)
def test_it_is_nearer_to_float64_than_pytorch_is(library: object, stored: Stored):
    """Other shapes are in `test_fuzz_kernels.py`."""
    plain = stored(with_biases(decoder(200, 2, 3, 104, head_dim=100, norm_eps=1e-2)).to(HALF))
    mine = in_c(plain, library)
    x = torch.randn(2, 44, 200).to(HALF)
    exact = features(in_float64(plain), x.double(), 5)
    wrong, usual = ((features(network, x, 5) - exact).abs() for network in (mine, plain))
    coarse = mine.native.int8 and groups_inputs(library)  # type: ignore[union-attr]
    assert wrong.mean() < (4 if coarse else 1) * usual.mean()
    assert wrong.max() < 0.15 * exact.abs().max()


def test_gates_far_below_zero_let_nothing_through(library: object):
    plain = decoder(64, 1, 4, 96)
    with torch.no_grad():
        plain.blocks[0].w13.weight[:96] *= 1000
    x = torch.randn(1, 24, 64).to(HALF)
    exact = features(copy.deepcopy(plain).double(), x.double(), 1)
    wrong, usual = ((features(network, x, 1) - exact).abs() for network in (in_c(plain, library), plain))
    assert wrong.mean() < 1.2 * usual.mean() and wrong.max() < 0.15 * exact.abs().max()


@pytest.mark.parametrize("aux_layers", [(0,), (1, 2)])
def test_so_is_what_it_returns_of_the_layers_below_the_last(library: object, aux_layers: tuple[int, ...]):
    plain = decoder(64, 4, 4, 96)
    mine = in_c(plain, library)
    x = torch.randn(2, 24, 64).to(HALF)
    exact = features(copy.deepcopy(plain).double(), x.double(), 5, aux_layers)
    wrong, usual = ((features(network, x, 5, aux_layers) - exact).abs() for network in (mine, plain))
    for part, other, true in zip(*(each.split(64, -1) for each in (wrong, usual, exact)), strict=True):
        assert part.mean() < other.mean() and part.max() < 0.15 * true.abs().max()
    assert torch.equal(features(mine, x, 5, aux_layers)[..., :64], features(mine, x, 5))


@pytest.mark.parametrize(
    ("stored", "sizes"),
    [
        pytest.param(in_16_bits, (192, 2, 6, 288), id="bfloat16"),
        pytest.param(in_8_bits, (64, 2, 4, 96), id="int8"),
    ],
)
def test_a_row_does_not_depend_on_its_neighbours_nor_on_how_many_there_are(
    library: object, sizes: tuple[int, ...], stored: Stored, threads: Callable[[int], None]
):
    """Up to 300 rows; nor on the number of threads, with heads that they can share evenly and with others."""
    network = in_c(stored(decoder(*sizes)), library)
    x = torch.randn(3, 103, sizes[0]).to(HALF)
    pair, start = x[:1].repeat(2, 1, 1), x[:, :51]
    alone, many = features(network, pair[:, :51], 1)[0], features(network, pair, 5)[0]
    if attends_with_tiles(library):
        # Up to 4 queries of a head attend by vectors and more by tiles, which round the weights before they divide by their sum.
        assert torch.allclose(alone.float(), many[:51].float(), rtol=0.02, atol=0.03)
    else:
        assert torch.equal(alone, many[:51])
    for nodes in (1, 2, 3, 4):
        assert torch.equal(features(network, start, nodes)[0], alone)
    for nodes in (19, 38, 43, 100):
        assert torch.equal(features(network, x, nodes)[0], many)
    for count in (2, 3):
        threads(count)
        assert torch.equal(features(network, start, 2)[0], alone)
        assert torch.equal(features(network, x, 10)[0], many)
        assert torch.equal(features(network, x, 19)[0], many)


def test_weights_in_large_pages_are_copies_one_behind_the_other():
    pages = LargePages()
    given = [torch.randn(3, 5).to(HALF).T, torch.randn(7), torch.randn(ROOM // 4 + 1), torch.ones(2)]
    kept = [pages.put(x) for x in given]
    for x, copied in zip(given, kept, strict=True):
        assert torch.equal(x, copied) and copied.is_contiguous() and copied.data_ptr() % 64 == 0
    assert kept[1].data_ptr() - kept[0].data_ptr() == ALIGNED


def test_sums_of_equal_weights_and_inputs_stay_within_32_bits(library: object):
    plain = decoder(64, 1, 4, 1024, final_norm=False)
    plain.blocks[0].w13.weight.fill_(0.1)
    plain.blocks[0].w2.weight.fill_(-0.1)  # -128 as a whole number
    x = torch.rand(2, 9, 64).to(HALF)
    plain = in_8_bits(plain)
    exact = features(in_float64(plain), x.double(), 3)
    assert torch.allclose(features(in_c(plain, library), x, 3).double(), exact, rtol=0.03)


@torch.inference_mode()
def test_an_idle_row_stays_finite_and_harms_nobody():
    network = in_c(decoder(64, 2, 4, 96))
    x = torch.randn(2, 1, 64).to(HALF)
    cache = Cache(network.config, 2, 4, x)
    nodes = cache.nodes(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1, 1, dtype=torch.bool))
    nodes.mask[1] = False
    both = network(x, nodes, cache)
    assert both.isfinite().all()
    assert torch.equal(network(x, nodes, cache), both)


@pytest.mark.parametrize("stored", WEIGHTS)
@pytest.mark.parametrize("x", [0.0, 1e-30, 1e4, math.nan])
@torch.inference_mode()
def test_small_and_large_inputs(x: float, stored: Stored):
    plain = stored(decoder(64, 2, 4, 96))
    inputs = torch.full((1, 12, 64), x).to(HALF)
    mine, usual = (features(network, inputs, 3).float() for network in (in_c(plain), plain))
    assert torch.allclose(mine, usual, rtol=0.1, atol=0.1, equal_nan=True)


@pytest.mark.parametrize(("qk_norm", "gate"), [("rms", "silu"), ("none", "gelu_tanh"), ("rms", "gelu_tanh")])
@torch.inference_mode()
def test_norms_and_gates_of_other_families(library: object, qk_norm: str, gate: str) -> None:
    """Beside the same `Stack` in PyTorch."""
    network = decoder(64, 2, 4, 96)
    norms = [(torch.rand(4, 16) + 0.5, None) for _ in range(2)] if qk_norm == "rms" else [None, None]
    layers = [replace(layer, q_norm=norms[0], k_norm=norms[1]) for layer in network.stack().layers]
    stack = replace(network.stack(), layers=layers, qk_norm=qk_norm, gate=gate)
    found = KernelDecoder(stack, network.rotary_table, library, False)  # type: ignore[arg-type]
    x = torch.randn(2, 9, 64).to(HALF)
    slot = torch.arange(9).expand(2, -1).contiguous()
    mask = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, -1, -1).contiguous()
    kv = torch.zeros(2, 2, 2, 4, 9, 32, dtype=HALF)
    mine = found(x, Nodes(slot, slot, mask), kv).double()
    by_pytorch = StackPasses(stack, network.rotary_table)
    exact, usual = (
        by_pytorch(x.to(dtype), Nodes(slot, slot, mask), torch.zeros(2, 2, 2, 4, 9, 16, dtype=dtype)).double()
        for dtype in (torch.double, HALF)
    )
    assert (mine - exact).abs().mean() < (usual - exact).abs().mean()


def test_other_dtypes_are_left_to_pytorch():
    network = decoder(64, 1, 4, 96).float()
    backend().pack(network)
    assert network.native is None
