"""A tiny imagefolder of coloured shapes, and a tokenizer for it."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from lanternpp.engine.sampling import Sampling
from lanternpp.models.base import Target
from lanternpp.models.vq.autoencoder import VQ, VQConfig, read_vq
from lanternpp.models.words import WordsConfig, WordsTarget
from lanternpp.nn import checkpoints
from lanternpp.training.codes import Codes, Split
from pictures import to_bytes

NEUTRAL = Sampling()
CONFIG = WordsConfig(("red", "blue", "square"), ("square",), 32, 2, 2, 48, grid=4, vocab=64, slots=3)


def write_photos(folder: Path, count: int, subject: str = "square") -> None:
    """`count` pictures, red or blue squares on a gradient, with metadata.jsonl, in which they are called `subject`."""
    generator = torch.Generator().manual_seed(count)
    rows = []
    for number in range(count):
        colour = ("red", "blue")[number % 2]
        image = torch.linspace(-1, 1, 36).expand(1, 3, 40, 36).clone() * 0.5
        row, column = torch.randint(4, 20, (2,), generator=generator).tolist()
        image[0, :, row : row + 12, column : column + 12] = -0.8
        image[0, 0 if colour == "red" else 2, row : row + 12, column : column + 12] = 0.9
        name = f"{colour}/{number:03d}.png"
        (folder / colour).mkdir(parents=True, exist_ok=True)
        Image.fromarray(to_bytes(image)[0].numpy()).save(folder / name)
        rows.append({"file_name": name, "text": f"a photo of a {colour} {subject}", "label": colour})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """train/ with 12 pictures, val/ with 4."""
    write_photos(tmp_path / "data" / "train", 12)
    write_photos(tmp_path / "data" / "val", 4)
    return tmp_path / "data"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained tokenizer's folder: 4 x 4 codes of 64, untrained in fact."""
    torch.manual_seed(0)
    config = VQConfig(
        size=32, codes=64, channels=(16, 16, 32), encoder_blocks=(1,) * 3, decoder_blocks=(1,) * 3
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    checkpoints.save(folder, {"kind": "vq", **asdict(config)}, VQ(config).state_dict())
    return folder


@pytest.fixture
def model(tokenizer: Path, tmp_path: Path) -> Path:
    """A model folder with a tokenizer and nothing else."""
    shutil.copytree(tokenizer, tmp_path / "model" / "tokenizer")
    return tmp_path / "model"


@pytest.fixture
def ready(model: Path) -> Path:
    """The same with a target of random weights."""
    torch.manual_seed(1)
    target = WordsTarget(CONFIG, read_vq(model / "tokenizer"))
    for name, parameter in target.named_parameters():
        if "table" in name or "prefix" in name or "codes_" in name:
            torch.nn.init.normal_(parameter, std=0.4)
    checkpoints.save(model / "target", {"kind": "words", **vars(CONFIG)}, target.state_dict())
    return model


def teacher_of(target: Target, store: Path = Path(), sampling: Sampling = NEUTRAL) -> Any:
    """What a task asks of a `Teacher`, of a target that is there."""
    device, frozen = torch.device("cpu"), target.eval().requires_grad_(False)
    known = {"device": device, "target": frozen, "origin": "made", "sampling": sampling, "store": store}
    return SimpleNamespace(**known, cfg=3.0, trainable=lambda: frozen)


def random_codes(texts: tuple[str, ...], labels: tuple[str, ...] | None = None, vocab: int = 64) -> Codes:
    """Random codes of a picture for each caption, the same to train and to validate."""
    codes = torch.randint(vocab, (len(texts), 1, 16), generator=torch.Generator().manual_seed(1))
    split = Split(codes.to(torch.uint16), texts, labels or ("",) * len(texts))
    return Codes(split, split, "made")


def made_codes(count: int) -> Codes:
    """Random codes of pictures of red and blue squares."""
    return random_codes(("a red square", "a blue square", "a photo") * (count // 3))
