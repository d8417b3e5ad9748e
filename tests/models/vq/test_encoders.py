"""Pictures as codes by published encoders, beside transformers; and what is said where there is none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import write_llamagen
from helpers.families import CODES, rewrite, write_chameleon, write_emu3, write_janus
from helpers.refusals import rejects
from safetensors.torch import load_file, save_file

from lanternpp.api.model import read_target
from lanternpp.models.vq.layouts import LLAMAGEN, read_vqgan
from lanternpp.nn.sources import Source

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


PEERS: dict[str, Callable[[Path], Any]] = {"janus": janus, "emu3": emu3}


@torch.no_grad()
@pytest.mark.parametrize("name", PEERS)
def test_latents_and_codes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    peer, sizes = PEERS[name](tmp_path)
    target = read_target(tmp_path, torch.float32)
    reader = target.reader()
    assert (reader.size, reader.codes, reader.length) == (64, CODES, target.length)
    hidden = peer.encoder(IMAGES if sizes is None else IMAGES[:, None].repeat(1, 4, 1, 1, 1))
    hidden = hidden if sizes is None else hidden.transpose(1, 2)
    expected = peer.quant_conv(hidden)
    expected = expected if sizes is None else expected[:, :, 0]
    assert expected.std() > 0.05
    assert (target.encoder()(IMAGES) - expected).abs().max() < 1e-3
    out = peer.encode(IMAGES) if sizes is None else peer.encode(IMAGES, sizes)
    grid = out.image_tokens.view(2, 4, 4) if sizes is None else torch.stack(list(out.image_tokens))
    assert len(grid.unique()) > 3
    codes = reader.encode(IMAGES)
    assert codes.shape == (2, target.length)
    assert torch.equal(target.raster.grid(codes), grid)
    ends = codes[:, target.width - 1 :: target.width]
    assert not target.raster.ends or (ends == CODES).all()


def test_llamagens_published_tokenizer_reads_the_same(tmp_path: Path) -> None:
    """Janus's weights, under the names of LlamaGen's authors."""
    vq, _ = janus(tmp_path)
    rewrite(tmp_path, LLAMAGEN_NAMES)
    tensors, part = load_file(tmp_path / "model.safetensors"), "model.vqmodel."
    found = {k.removeprefix(part): v for k, v in tensors.items() if k.startswith(part)}
    save_file(found | {"quantize.codebook_used": torch.zeros(4)}, tmp_path / "vq_ds16.safetensors")
    ours = read_vqgan(Source.open(tmp_path / "vq_ds16.safetensors"), torch.float32, LLAMAGEN, grid=4)
    assert ours.encoder is not None
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


def test_a_tokenizer_without_an_encoder_names_the_other_way(tmp_path: Path) -> None:
    write_llamagen(tmp_path / "llamagen")  # the first layer of an encoder is all it has
    target = read_target(tmp_path / "llamagen", torch.float32)
    rejects("is without its encoder.*--self instead of --data", target.reader)
    write_chameleon(tmp_path / "Lumina-mGPT-7B-64", lumina=True)
    rewrite(tmp_path / "Lumina-mGPT-7B-64", {r"model\.vqmodel\.encoder": "other"})
    target = read_target(tmp_path / "Lumina-mGPT-7B-64", torch.float32)
    rejects("is without its encoder.*--self instead of --data", target.reader)
    write_janus(tmp_path / "janus")
    rewrite(tmp_path / "janus", {r"vqmodel\.encoder\.conv_out": "vqmodel.encoder.other"})
    rejects(r"missing model\.vqmodel\.encoder\.conv_out", read_target, tmp_path / "janus", torch.float32)
