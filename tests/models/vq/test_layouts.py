"""VQGAN decoders and encoders beside the code that they come from.

golden/taming.safetensors holds what CompVis/taming-transformers' decoder drew, golden/tokenizers.safetensors what MoVQGAN and IBQ
drew and read (their metadata says how); the weights are a formula of their names and shapes, so only pixels and codes are kept.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.families import taming
from helpers.refusals import rejects
from safetensors.torch import load_file, save_file

from lanternpp.models.vq.codes import nearest
from lanternpp.models.vq.layouts import read_vqgan
from lanternpp.models.vq.vqgan import VQGAN, VQGANConfig
from lanternpp.nn.sources import Source

CONFIG = VQGANConfig(codes=16, dim=4, latent=8, channels=32, multiples=(1, 2, 2), blocks=2, unit=False)
GOLDEN = Path(__file__).parents[2] / "golden"
CODES = torch.arange(12).view(1, 3, 4) * 5 % 16


def read(folder: Path, fields: dict[str, object] | None = None, **tensors: torch.Tensor) -> VQGAN:
    path = folder / "vq.safetensors"
    save_file(taming(CONFIG) | tensors, path)
    return read_vqgan(Source.open(path), torch.float32, **(fields or {}))


def test_pixels_are_those_of_taming_transformers(tmp_path: Path) -> None:
    vq = read(tmp_path)
    expected = load_file(GOLDEN / "taming.safetensors")["pixels"].clamp(-1, 1)
    assert expected.shape == (1, 3, 12, 16)
    assert float((vq.decode(CODES) - expected).abs().max()) <= 1e-3


@pytest.mark.parametrize("name", ["movq", "ibq"])
def test_pixels_and_codes_are_those_of_published_tokenizers(name: str, tmp_path: Path) -> None:
    """IBQ takes the code of the largest product, MoVQ the nearest one. The shapes are read from the tensors."""
    config = replace(CONFIG, spatial=name == "movq")
    save_file(taming(config, encoder=True), tmp_path / "vq.safetensors")
    vq = read_vqgan(Source.open(tmp_path / "vq.safetensors"), torch.float32)
    golden = load_file(GOLDEN / "tokenizers.safetensors")
    assert vq.config == config and vq.encoder is not None
    assert float((vq.decode(CODES) - golden[f"{name}.pixels"].clamp(-1, 1)).abs().max()) <= 1e-4
    images = torch.sin(torch.arange(2 * 3 * 12 * 16).view(2, 3, 12, 16) * 0.37)
    with torch.no_grad():
        latents = vq.encoder()(images)
    found = [nearest(latents, vq.codebook, by_product) for by_product in (False, True)]
    assert torch.equal(found[name == "ibq"], golden[f"{name}.codes"])
    assert not torch.equal(*found)


def test_a_normalised_codebook_has_unit_rows(tmp_path: Path) -> None:
    plain, unit = read(tmp_path), read(tmp_path, {"unit": True})
    assert torch.allclose(unit.codebook.norm(dim=-1), torch.ones(16))
    assert torch.allclose(unit.codebook, torch.nn.functional.normalize(plain.codebook, dim=-1))


def test_what_only_encodes_is_skipped_and_what_is_missing_is_named(tmp_path: Path) -> None:
    read(tmp_path, **{"encoder.conv_in.weight": torch.zeros(1), "loss.discriminator": torch.zeros(1)})
    rejects(r"codebook|quantize", read, tmp_path, {"codes": 32})
    save_file({"decoder.conv_in.weight": torch.zeros(64, 8, 3, 3)}, tmp_path / "part.safetensors")
    rejects("lacks decoder", read_vqgan, Source.open(tmp_path / "part.safetensors"), torch.float32)
