"""Packing of linear layers in bfloat16 and of convolutions, on CPUs with and without bfloat16."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from helpers.processes import python
from torch import nn

from lanternpp import Pipeline
from lanternpp.api.model import ASSETS, pack_target, read_target
from lanternpp.api.results import images
from lanternpp.kernels import loading as native
from lanternpp.kernels.linear import KernelLinear
from lanternpp.kernels.packing import PackedConvolution, SerialGroupNorm, pack, supports
from lanternpp.nn.backend import backend

# The instructions that oneDNN and PyTorch may use.
WITHOUT_BFLOAT16 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
SCRIPT = """
import torch
from lanternpp.api.model import ASSETS, read_target
target = read_target(ASSETS / "nature-128", torch.bfloat16)
target.pack()
assert target.head(torch.ones(1, 1, 384, dtype=torch.bfloat16)).isfinite().all()
"""


def test_only_bfloat16_on_a_cpu_is_packed() -> None:
    layer = nn.Linear(32, 32, bias=False).requires_grad_(False)
    layer.weight.fill_(1)
    plain = nn.Sequential(layer, copy.deepcopy(layer).bfloat16().to("meta"))
    pack(plain, native.library())
    assert all(type(each) is nn.Linear for each in plain)
    made = nn.Sequential(copy.deepcopy(layer).bfloat16())
    pack(made, native.library())
    assert type(made[0]) is (nn.Linear if native.library() is None else KernelLinear)
    assert made(torch.ones(1, 32, dtype=torch.bfloat16)).eq(32).all()
    if library := native.library():
        in_a_subclass = layer.weight.detach().bfloat16().as_subclass(type("Own", (torch.Tensor,), {}))
        with pytest.raises(AssertionError, match="subclass"):
            KernelLinear(library, [(in_a_subclass, None)])
    pack(plain := nn.Sequential(layer.bfloat16()), None)
    assert type(plain[0]) is nn.Linear, "without kernels"


def test_without_bfloat16_in_onednn_and_without_kernels_layers_are_not_packed() -> None:
    env = {**os.environ, **WITHOUT_BFLOAT16, native.SWITCH: "0"}
    done = python("-c", SCRIPT, env=env)
    assert done.returncode == 0, done.stderr


CONVOLUTIONS = {
    "3 x 3": nn.Conv2d(8, 24, 3, padding=1),
    "1 x 1, no bias": nn.Conv2d(16, 5, 1, bias=False),
    "every second": nn.Conv2d(6, 12, 3, stride=2, padding=1),
    "padding by name": nn.Conv2d(4, 4, 3, padding="same"),
    "mirrored": nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    "in groups": nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_packed_convolution_is_the_same_for_pictures_of_any_size(name: str, dtype: torch.dtype) -> None:
    plain = copy.deepcopy(CONVOLUTIONS[name]).requires_grad_(False).to(dtype)
    made = copy.deepcopy(plain)
    pack(nn.Sequential(made), None)
    assert type(made) is (PackedConvolution if supports(plain) else nn.Conv2d)
    assert dtype != torch.float32 or supports(plain) != (name in ("padding by name", "mirrored"))
    assert [*made.state_dict()] == [*plain.state_dict()]
    with torch.inference_mode():
        for size in ((1, 16, 16), (4, 16, 16), (2, 9, 31)):
            x = torch.randn(size[0], plain.in_channels, *size[1:]).to(dtype)
            for laid in (x, x.contiguous(memory_format=torch.channels_last)):
                close = {"atol": 0.01, "rtol": 0.01} if dtype == torch.bfloat16 else {"atol": 1e-5}
                assert torch.allclose(made(laid), plain(x), **close)


def test_the_shipped_tokenizer_draws_the_same_with_packed_weights() -> None:
    packed_one, plain = (read_target(ASSETS / "nature-128", torch.float32) for _ in range(2))
    pack_target(packed_one)
    assert any(isinstance(part, PackedConvolution) for part in packed_one.vq.modules())
    codes = torch.randint(plain.vocab, (1, plain.length), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.allclose(packed_one.pixels(codes), plain.pixels(codes), atol=1e-4)


def test_group_norms_do_not_depend_on_the_number_of_threads(
    threads: Callable[[int], None],
) -> None:
    """Of PyTorch, with kernels that have threads of their own."""
    x = torch.randn(1, 64, 96, 96, generator=torch.Generator().manual_seed(0))
    x, norm = x.contiguous(memory_format=torch.channels_last), nn.GroupNorm(4, 64)
    expected, found = norm.double()(x.double()).float(), []
    norm.float().__class__, norm.library = SerialGroupNorm, SimpleNamespace(use_threads=lambda count: 0)
    for count in (1, 2, 3):
        threads(count)
        found.append(norm(x))
    assert all(torch.equal(each, found[0]) for each in found) and torch.allclose(
        found[0], expected, atol=1e-5
    )
    assert found[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.skipif(native.library() is None, reason="no kernels here")
def test_pictures_have_the_same_bytes_for_any_number_of_threads(
    nature: Pipeline, threads: Callable[[int], None]
) -> None:
    """Which changes during a call while other work uses the cores."""
    if backend().gemm_dtype(next(nature.target.parameters())) != torch.bfloat16:
        pytest.skip("pixels are decoded in float32 here, whose rounding does depend on it")
    codes = torch.randint(4096, (1, 256), generator=torch.Generator().manual_seed(0))
    drawn = []
    for count in (1, 3, 8):
        threads(count)
        drawn.append(images(nature.target, codes)[0].tobytes())
        assert torch.get_num_threads() == count
    assert len(set(drawn)) == 1
