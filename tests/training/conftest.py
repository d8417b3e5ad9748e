"""A tiny imagefolder of coloured shapes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from lanternpp.training.pictures import to_bytes


def draw(folder: Path, count: int, size: tuple[int, int] = (40, 36)) -> None:
    """`count` pictures, red or blue squares on a gradient, with metadata.jsonl."""
    generator = torch.Generator().manual_seed(count)
    rows = []
    for number in range(count):
        colour = ("red", "blue")[number % 2]
        height, width = size
        image = torch.linspace(-1, 1, width).expand(1, 3, height, width).clone() * 0.5
        row, column = torch.randint(4, 20, (2,), generator=generator).tolist()
        image[0, :, row : row + 12, column : column + 12] = -0.8
        image[0, 0 if colour == "red" else 2, row : row + 12, column : column + 12] = 0.9
        name = f"{colour}/{number:03d}.png"
        (folder / colour).mkdir(parents=True, exist_ok=True)
        Image.fromarray(to_bytes(image)[0].numpy()).save(folder / name)
        rows.append({"file_name": name, "text": f"a photo of a {colour} square", "label": colour})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def paint() -> Callable[[Path, int], None]:
    """Writes a folder of that many captioned pictures."""
    return draw


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """train/ with 12 pictures, val/ with 4."""
    draw(tmp_path / "data" / "train", 12)
    draw(tmp_path / "data" / "val", 4)
    return tmp_path / "data"
