"""The decoder of single pictures beside NVIDIA's decoder of videos: golden/cosmos.safetensors has the pixels that it drew."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import cosmos
from helpers.refusals import rejects
from safetensors.torch import load_file, save_file

from lanternpp.models.transformers.simplear import fsq_points
from lanternpp.models.vq.cosmos import read_cosmos
from lanternpp.models.vq.layouts import save_tokenizer
from lanternpp.nn import checkpoints
from lanternpp.nn.sources import Source

GOLDEN = Path(__file__).parents[2] / "golden" / "cosmos.safetensors"
CODES = ((torch.arange(6) * 23 + 5) % 64).view(1, 2, 3)
BOOK = fsq_points((4, 4, 4))


def read(path: Path, **changes: torch.Tensor | None) -> Any:
    """The decoder in a file of tiny weights; None removes a tensor."""
    tensors = cosmos((64, 3)) | changes
    save_file({name: x for name, x in tensors.items() if x is not None}, path / "vq_cosmos.safetensors")
    return read_cosmos(Source.open(path / "vq_cosmos.safetensors"), BOOK, torch.float32)


def test_a_picture_is_the_one_frame_of_nvidias_video_decoder(tmp_path: Path) -> None:
    more = {
        "inv_quant.quantizer._levels": torch.tensor([4, 4, 4]),
        "decoder.unpatcher3d.wavelets": torch.ones(2),
    }
    vq = read(tmp_path, **more)
    expected = load_file(GOLDEN)["pixels"].clamp(-1, 1)
    pixels = vq.decode(CODES)
    assert pixels.shape == expected.shape == (1, 3, 32, 48)
    assert float(expected.std()) > 0.1 and float((pixels - expected).abs().max()) <= 1e-5
    save_tokenizer(vq, tmp_path / "tokenizer", "float32")
    kept = read_cosmos(Source.open(tmp_path / "tokenizer"), BOOK, torch.float32)
    assert torch.equal(kept.decode(CODES), pixels)


def test_codes_are_grid_points_with_the_first_number_changing_fastest() -> None:
    levels, points = (8, 8, 8, 5, 5, 5), fsq_points((8, 8, 8, 5, 5, 5))
    assert points.shape == (64_000, 6) and len(points.unique(dim=0)) == 64_000
    code = 3 + 8 * (7 + 8 * (0 + 8 * (4 + 5 * (2 + 5 * 1))))
    assert points[code].tolist() == [-0.25, 0.75, -1.0, 1.0, 0.0, -0.5]
    assert fsq_points(levels[3:])[7].tolist() == [0.0, -0.5, -1.0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"decoder.mid.attn_1.1.v.conv3d.bias": None}, r"no decoder of Cosmos.*attn_1\.1\.v"),
        ({"decoder.up.1.block.0.norm1.norm.weight": torch.ones(3)}, r"no decoder of Cosmos.*norm1"),
        ({"decoder.conv_out.1.conv3d.weight": torch.ones(7, 7, 3, 1, 1)}, "no decoder of Cosmos"),
        ({"decoder.conv_in.0.conv3d.weight": torch.ones(7)}, "no decoder of Cosmos"),
        ({"decoder.up.0.block.0.conv1.1.conv3d.weight": torch.ones(5, 5)}, "5 dimensions are expected"),
        ({"post_quant_conv.conv3d.weight": None}, "lacks post_quant_conv"),
        ({"decoder.norm_out.norm.bias": torch.full((16,), float("nan"))}, "holds NaN"),
    ],
)
def test_a_file_that_does_not_fit_is_rejected(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    rejects(said, read, tmp_path, **changes)


def test_a_config_of_another_shape_is_rejected(tmp_path: Path) -> None:
    vq = read(tmp_path)
    for changes in ({"spatial": True, "channels": 8}, {"multiples": [1]}, {"blocks": 1}):
        config = {"kind": "cosmos", **asdict(vq.config), **changes}
        checkpoints.save(tmp_path / "tokenizer", config, vq.state_dict())
        rejects("does not fit Cosmos", read_cosmos, Source.open(tmp_path / "tokenizer"), BOOK, torch.float32)
