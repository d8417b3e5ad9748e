"""A VQGAN decoder beside the code it comes from.

golden/taming.safetensors holds the pixels that CompVis/taming-transformers' decoder drew (its metadata says how);
the weights are a formula of their names and shapes, so only pixels are kept.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.families import taming
from safetensors.torch import load_file, save_file

from lanternpp.errors import InputError
from lanternpp.models.vq.layouts import read_vqgan
from lanternpp.models.vq.vqgan import VQGAN, VQGANConfig
from lanternpp.nn.sources import Source

CONFIG = VQGANConfig(codes=16, dim=4, latent=8, channels=32, multiples=(1, 2, 2), blocks=2, unit=False)
GOLDEN = Path(__file__).parents[2] / "golden" / "taming.safetensors"
CODES = torch.arange(12).view(1, 3, 4) * 5 % 16


def read(folder: Path, config: VQGANConfig = CONFIG, **tensors: torch.Tensor) -> VQGAN:
    path = folder / "vq.safetensors"
    save_file(taming(CONFIG) | tensors, path)
    return read_vqgan(Source.open(path), config, "", torch.float32)


def test_pixels_are_those_of_taming_transformers(tmp_path: Path) -> None:
    vq = read(tmp_path)
    expected = load_file(GOLDEN)["pixels"].clamp(-1, 1)
    assert expected.shape == (1, 3, 12, 16)
    assert float((vq.draw(CODES) - expected).abs().max()) <= 1e-3


def test_a_normalised_codebook_has_unit_rows(tmp_path: Path) -> None:
    plain, unit = read(tmp_path), read(tmp_path, replace(CONFIG, unit=True))
    assert torch.allclose(unit.codebook.norm(dim=-1), torch.ones(16))
    assert torch.allclose(unit.codebook, torch.nn.functional.normalize(plain.codebook, dim=-1))


def test_what_only_encodes_is_skipped_and_what_is_missing_is_named(tmp_path: Path) -> None:
    read(tmp_path, **{"encoder.conv_in.weight": torch.zeros(1), "loss.discriminator": torch.zeros(1)})
    with pytest.raises(InputError, match=r"codebook|quantize"):
        read(tmp_path, replace(CONFIG, codes=32))
    save_file({"decoder.conv_in.weight": torch.zeros(64, 8, 3, 3)}, tmp_path / "part.safetensors")
    with pytest.raises(InputError, match="missing") as refusal:
        read_vqgan(Source.open(tmp_path / "part.safetensors"), CONFIG, "", torch.float32)
    assert "\n" not in str(refusal.value)
