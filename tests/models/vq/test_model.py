"""The tokenizer's two directions, its quantiser and its folder."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from lanternpp.errors import InputError
from lanternpp.models.vq.folder import read_vq
from lanternpp.models.vq.model import VQ, VQConfig
from lanternpp.models.vq.quantiser import Quantiser
from lanternpp.nn import checkpoints

TINY = VQConfig(size=32, codes=64, channels=(16, 32), encoder_blocks=(1, 1), decoder_blocks=(1, 1), thin=16)


def test_codes_are_raster_order_int64_and_pictures_lie_in_range() -> None:
    model = VQ(TINY).eval()
    images = torch.rand(2, 3, 32, 32) * 2 - 1
    codes = model.encode(images)
    assert (codes.shape, codes.dtype) == ((2, 64), torch.int64)
    pictures = model.decode(codes)
    assert pictures.shape == images.shape
    assert pictures.abs().max() <= 1


def test_a_code_paints_its_own_place_in_the_raster() -> None:
    torch.manual_seed(0)
    model = VQ(TINY).eval()
    codes = torch.zeros(2, 64, dtype=torch.int64)
    codes[1, 8 * 6 + 2] = 1  # row 6, column 2 of 8
    change = (model.decode(codes)[0] - model.decode(codes)[1]).abs().sum(0)
    assert change[6 * 4 : 7 * 4, 2 * 4 : 3 * 4].mean() > 3 * change[:16, 16:].mean()


def test_wrong_shapes_are_named() -> None:
    model = VQ(TINY)
    with pytest.raises(InputError, match=r"\(1, 3, 16, 16\)"):
        model.encode(torch.zeros(1, 3, 16, 16))
    with pytest.raises(InputError, match=r"\(1, 9\)"):
        model.decode(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(InputError, match="multiple of 8"):
        VQConfig(size=100)


def test_quantiser_takes_the_nearest_row_and_passes_the_gradient() -> None:
    torch.manual_seed(0)
    quantiser = Quantiser(32, 4).eval()
    latents = torch.randn(3, 5, 4, requires_grad=True)
    quantised, codes, loss = quantiser(latents)
    unit = torch.nn.functional.normalize(latents, dim=-1)
    assert torch.equal(codes, torch.cdist(unit, quantiser.codebook[None]).argmin(-1))
    assert torch.allclose(quantised, quantiser.codebook[codes], atol=1e-6)
    (quantised.sum() + loss).backward()
    assert latents.grad is not None
    assert latents.grad.abs().sum() > 0


def test_dead_codes_are_revived() -> None:
    torch.manual_seed(0)
    quantiser = Quantiser(64, 8).train()
    quantiser.codebook.copy_(torch.eye(8)[:1].expand(64, 8))  # all codes in one place
    latents = torch.randn(4096, 8)
    assert len(quantiser(latents)[1].unique()) < 4
    for _ in range(20):
        quantiser(latents)
    assert len(quantiser.nearest(latents).unique()) == 64
    assert torch.allclose(quantiser.codebook.norm(dim=-1), torch.ones(64), atol=1e-5)


@pytest.mark.parametrize("store", ["float32", "int8"])
def test_a_loaded_tokenizer_draws_the_same(tmp_path: Path, store: checkpoints.Store) -> None:
    model = VQ(TINY).eval()
    keep = ["quantiser.codebook"]
    checkpoints.save(tmp_path, {"kind": "vq", **asdict(TINY)}, model.weights(), store, keep)
    loaded = read_vq(tmp_path)
    assert loaded.config == TINY
    assert torch.equal(loaded.codebook, model.codebook)
    codes = torch.randint(64, (2, 64))
    gap = (loaded.decode(codes) - model.decode(codes)).abs().max()
    assert gap <= (0 if store == "float32" else 0.05)
    half = read_vq(tmp_path, dtype=torch.bfloat16)
    assert half.decode(codes).dtype == torch.float32
    assert half.codebook.dtype == torch.float32
