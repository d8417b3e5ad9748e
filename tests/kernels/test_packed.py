"""Packed linear layers and convolutions: the same products, on CPUs with bfloat16 and without."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
from helpers.toys import stored_in_8_bits
from kernels.rounding import multiplied
from torch import nn

from lanternpp import Pipeline
from lanternpp.api.model import ASSETS, pack_target, read_target
from lanternpp.api.results import images
from lanternpp.kernels import loading as native
from lanternpp.kernels.linear import KernelLinear, kernel_linear
from lanternpp.kernels.packed import (
    PackedConvolution,
    pack,
    packed_convolution,
    supports,
)
from lanternpp.nn.backend import backend

LESS = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}  # what oneDNN and PyTorch may use
NO_BFLOAT16 = """
import torch
from lanternpp.api.model import ASSETS, read_target
target = read_target(ASSETS / "nature-128", torch.bfloat16)
target.pack()
assert target.head(torch.ones(1, 1, 384, dtype=torch.bfloat16)).isfinite().all()
"""


@pytest.mark.skipif(native.library() is None, reason="no kernels here")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 8, 21, 200])
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("inputs", [288, 272, 45])
def test_a_layer_in_c_rounds_once_and_its_rows_are_independent(
    library: object, inputs: int, bits: int, rows: int, bias: bool
) -> None:
    torch.manual_seed(rows)
    layer = nn.Linear(inputs, 70, bias=bias).bfloat16().requires_grad_(False)
    weight = layer.weight.double()
    if bits == 8:
        weight = stored_in_8_bits(layer.weight)
    made = kernel_linear(layer, library, bits == 8)  # type: ignore[arg-type]
    x = torch.randn(2, rows, inputs).bfloat16()
    given = multiplied(x, library) if bits == 8 else x.double()
    exact = given @ weight.T + (layer.bias.double() if bias else 0)
    found = made(x)
    assert found.dtype == torch.bfloat16 and found.shape == exact.shape
    far = 1e-4 if bits == 16 else 1e-3
    assert ((found - exact).abs() <= exact.abs() / 255 + far).all(), "rounded more than once"
    assert torch.equal(made(x[1:, -1:]), found[1:, -1:])
    assert torch.equal(made.weight, layer.weight)
    assert made(x[:, :0]).shape == (2, 0, 70)


def test_only_bfloat16_on_a_cpu_is_packed() -> None:
    layer = nn.Linear(32, 32, bias=False).requires_grad_(False)
    layer.weight.fill_(1)
    plain = nn.Sequential(layer, copy.deepcopy(layer).bfloat16().to("meta"))
    pack(plain, native.library(), False)
    assert all(type(each) is nn.Linear for each in plain)
    made = nn.Sequential(copy.deepcopy(layer).bfloat16())
    pack(made, native.library(), False)
    assert type(made[0]) is (nn.Linear if native.library() is None else KernelLinear)
    assert made(torch.ones(1, 32, dtype=torch.bfloat16)).eq(32).all()
    pack(plain := nn.Sequential(layer.bfloat16()), None, False)
    assert type(plain[0]) is nn.Linear, "without kernels"


def test_where_onednn_has_no_bfloat16_and_there_is_no_compiler_layers_stay_as_they_are() -> None:
    less = {**os.environ, **LESS, native.SWITCH: "0"}
    done = subprocess.run([sys.executable, "-c", NO_BFLOAT16], env=less, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


CONVOLUTIONS = {
    "3 x 3": nn.Conv2d(8, 24, 3, padding=1),
    "1 x 1, no bias": nn.Conv2d(16, 5, 1, bias=False),
    "every second": nn.Conv2d(6, 12, 3, stride=2, padding=1),
    "in groups": nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_packed_convolution_is_the_same_for_pictures_of_any_size(name: str, dtype: torch.dtype) -> None:
    plain = copy.deepcopy(CONVOLUTIONS[name]).requires_grad_(False).to(dtype)
    made = packed_convolution(plain)
    if not supports(dtype):
        assert made is None
        return
    assert made is not None and [*made.state_dict()] == [*plain.state_dict()]
    with torch.inference_mode():
        for size in ((1, 16, 16), (4, 16, 16), (2, 9, 31)):
            x = torch.randn(size[0], plain.in_channels, *size[1:]).to(dtype)
            for laid in (x, x.contiguous(memory_format=torch.channels_last)):
                close = {"atol": 1e-5} if dtype == torch.float32 else {"atol": 0.01, "rtol": 0.01}
                assert torch.allclose(made(laid), plain(x), **close)


def test_convolutions_that_onednn_does_not_know_stay_as_they_are() -> None:
    assert packed_convolution(nn.Conv2d(4, 4, 3, padding="same")) is None
    assert packed_convolution(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")) is None
    assert packed_convolution(nn.Conv2d(4, 4, 3).double()) is None
    odd = nn.Sequential(nn.Conv1d(4, 4, 3), nn.Conv2d(4, 4, 3).double())
    pack(odd, native.library(), False)
    assert type(odd[0]) is nn.Conv1d and type(odd[1]) is nn.Conv2d


def test_the_shipped_tokenizer_draws_the_same_with_packed_weights() -> None:
    packed_one, plain = (read_target(ASSETS / "nature-128", torch.float32) for _ in range(2))
    pack_target(packed_one)
    assert any(isinstance(part, PackedConvolution) for part in packed_one.vq.modules())
    codes = torch.randint(plain.vocab, (1, plain.length), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.allclose(packed_one.pixels(codes), plain.pixels(codes), atol=1e-4)


@pytest.mark.skipif(native.library() is None, reason="no kernels here")
def test_pictures_have_the_same_bytes_for_any_number_of_threads() -> None:
    """As other work leaves the drawing thread fewer while it draws."""
    pipe = Pipeline.from_pretrained("nature-128", device="cpu", dtype="bfloat16")
    if backend().gemm_dtype(next(pipe.target.parameters())) != torch.bfloat16:
        pytest.skip("pixels are decoded in float32 here, whose rounding does depend on it")
    codes = torch.randint(4096, (1, 256), generator=torch.Generator().manual_seed(0))
    before, drawn = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5, 8, 64):
            torch.set_num_threads(threads)
            drawn.append(images(pipe.target, codes)[0].tobytes())
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert len(set(drawn)) == 1
