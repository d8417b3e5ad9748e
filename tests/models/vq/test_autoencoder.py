"""The tokenizer's encoder and decoder, and its folder."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from lanternpp.models.vq.autoencoder import VQ, VQConfig, read_vq
from lanternpp.nn import checkpoints

TINY = VQConfig(size=32, codes=64, channels=(16, 32), encoder_blocks=(1, 1), decoder_blocks=(1, 1), thin=16)


def test_a_code_changes_the_pixels_of_its_own_place() -> None:
    torch.manual_seed(0)
    model = VQ(TINY).eval()
    codes = torch.zeros(2, 64, dtype=torch.int64)
    codes[1, 8 * 6 + 2] = 1  # row 6, column 2 of 8
    change = (model.decode(codes)[0] - model.decode(codes)[1]).abs().sum(0)
    assert change[6 * 4 : 7 * 4, 2 * 4 : 3 * 4].mean() > 3 * change[:16, 16:].mean()


@pytest.mark.parametrize("store", ["float32", "int8"])
def test_a_loaded_tokenizer_draws_the_same(tmp_path: Path, store: checkpoints.Store) -> None:
    model = VQ(TINY).eval()
    keep = ["quantiser.codebook"]
    checkpoints.save(tmp_path, {"kind": "vq", **asdict(TINY)}, model.state_dict(), store, keep)
    loaded = read_vq(tmp_path)
    assert loaded.config == TINY
    assert torch.equal(loaded.codebook, model.codebook)
    codes = torch.randint(64, (2, 64))
    gap = (loaded.decode(codes) - model.decode(codes)).abs().max()
    assert gap <= (0 if store == "float32" else 0.05)
    half = read_vq(tmp_path, dtype=torch.bfloat16)
    assert half.decode(codes).dtype == torch.float32
    assert half.codebook.dtype == torch.float32
