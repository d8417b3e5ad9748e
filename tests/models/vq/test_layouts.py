"""VQGAN decoders and encoders beside the authors' code and transformers.

golden/taming.safetensors holds what CompVis/taming-transformers' decoder drew, golden/tokenizers.safetensors what MoVQGAN and IBQ
drew and read (their metadata says how); the weights are a formula of their names and shapes, so only pixels and codes are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import write_llamagen
from helpers.families import CODES as NUM_CODES
from helpers.families import rename_tensors, taming, write_chameleon, write_emu3, write_janus
from helpers.refusals import rejects
from safetensors.torch import load_file, save_file

from lanternpp.api.model import read_target
from lanternpp.models.vq.codes import nearest
from lanternpp.models.vq.layouts import LLAMAGEN, TAMING, Names, read_vqgan
from lanternpp.models.vq.vqgan import VQGAN, VQGANConfig
from lanternpp.nn.sources import Source

CONFIG = VQGANConfig(codes=16, dim=4, latent=8, channels=32, multiples=(1, 2, 2), blocks=2, unit=False)
GOLDEN = Path(__file__).parents[2] / "golden"
CODES = torch.arange(12).view(1, 3, 4) * 5 % 16


def read(folder: Path, names: Names = TAMING, **tensors: torch.Tensor) -> VQGAN:
    path = folder / "vq.safetensors"
    save_file(taming(CONFIG) | tensors, path)
    return read_vqgan(Source.open(path), torch.float32, names)


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
    plain, unit = read(tmp_path), read(tmp_path, replace(TAMING, unit=True))
    assert torch.allclose(unit.codebook.norm(dim=-1), torch.ones(16))
    assert torch.allclose(unit.codebook, torch.nn.functional.normalize(plain.codebook, dim=-1))


def test_unused_tensors_are_skipped_and_missing_ones_named(tmp_path: Path) -> None:
    read(tmp_path, **{"encoder.conv_in.weight": torch.zeros(1), "loss.discriminator": torch.zeros(1)})
    tensors = taming(CONFIG)
    del tensors["decoder.conv_out.bias"]
    save_file(tensors, tmp_path / "less.safetensors")
    rejects("missing exit.2.bias", read_vqgan, Source.open(tmp_path / "less.safetensors"), torch.float32)
    save_file({"decoder.conv_in.weight": torch.zeros(64, 8, 3, 3)}, tmp_path / "part.safetensors")
    rejects("lacks decoder", read_vqgan, Source.open(tmp_path / "part.safetensors"), torch.float32)


# Pictures as codes by published encoders, beside transformers.

IMAGES = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1)) * 2 - 1


def janus(folder: Path) -> Any:
    model = write_janus(folder)
    book = model.model.vqmodel.quantize.embedding.weight  # as its authors look it up: of unit length
    book.data = torch.nn.functional.normalize(book, dim=-1)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.vqmodel.quantize.embedding.weight"] = book.detach().clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model.model.vqmodel, None


def emu3(folder: Path) -> Any:
    model = write_emu3(folder, size="64")
    return model.model.vqmodel, torch.tensor([[64, 64]] * 2)


MODELS: dict[str, Callable[[Path], Any]] = {"janus": janus, "emu3": emu3}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_latents_and_codes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs, sizes = MODELS[name](tmp_path)
    target = read_target(tmp_path, torch.float32)
    reader = target.reader()
    assert (reader.size, reader.codes, reader.length) == (64, NUM_CODES, target.length)
    hidden = theirs.encoder(IMAGES if sizes is None else IMAGES[:, None].repeat(1, 4, 1, 1, 1))
    hidden = hidden if sizes is None else hidden.transpose(1, 2)
    expected = theirs.quant_conv(hidden)
    expected = expected if sizes is None else expected[:, :, 0]
    assert expected.std() > 0.05
    assert (target.encoder()(IMAGES) - expected).abs().max() < 1e-3
    out = theirs.encode(IMAGES) if sizes is None else theirs.encode(IMAGES, sizes)
    grid = out.image_tokens.view(2, 4, 4) if sizes is None else torch.stack(list(out.image_tokens))
    assert len(grid.unique()) > 3
    codes = reader.encode(IMAGES)
    assert codes.shape == (2, target.length)
    assert torch.equal(target.raster.grid(codes), grid)
    ends = codes[:, target.width - 1 :: target.width]
    assert not target.raster.ends or (ends == NUM_CODES).all()


def test_the_published_tokenizer_of_llamagen_encodes_the_same(tmp_path: Path) -> None:
    """Janus's weights, under the names of LlamaGen's authors."""
    vq, _ = janus(tmp_path)
    rename_tensors(tmp_path, LLAMAGEN_NAMES)
    tensors, part = load_file(tmp_path / "model.safetensors"), "model.vqmodel."
    found = {k.removeprefix(part): v for k, v in tensors.items() if k.startswith(part)}
    save_file(found | {"quantize.codebook_used": torch.zeros(4)}, tmp_path / "vq_ds16.safetensors")
    ours = read_vqgan(Source.open(tmp_path / "vq_ds16.safetensors"), torch.float32, LLAMAGEN)
    with torch.no_grad():
        expected = vq.quant_conv(vq.encoder(IMAGES))
        assert (ours.encoder()(IMAGES) - expected).abs().max() < 1e-3


LLAMAGEN_NAMES = {
    r"mid\.block_1": "mid.0",
    r"mid\.attn_1": "mid.1",
    r"mid\.block_2": "mid.2",
    r"\.(up|down)\.(\d+)\.block": r".conv_blocks.\2.res",
    r"\.(up|down)\.(\d+)": r".conv_blocks.\2",
}


def test_a_tokenizer_without_an_encoder_names_the_option_self(tmp_path: Path) -> None:
    write_llamagen(tmp_path / "llamagen")  # the first layer of an encoder is all it has
    target = read_target(tmp_path / "llamagen", torch.float32)
    rejects("is without its encoder.*--self instead of --data", target.reader)
    write_chameleon(tmp_path / "Lumina-mGPT-7B-64", lumina=True)
    rename_tensors(tmp_path / "Lumina-mGPT-7B-64", {r"model\.vqmodel\.encoder": "other"})
    target = read_target(tmp_path / "Lumina-mGPT-7B-64", torch.float32)
    rejects("is without its encoder.*--self instead of --data", target.reader)
    write_janus(tmp_path / "janus")
    rename_tensors(tmp_path / "janus", {r"vqmodel\.encoder\.conv_out": "vqmodel.encoder.other"})
    rejects(r"missing model\.vqmodel\.encoder\.conv_out", read_target, tmp_path / "janus", torch.float32)
