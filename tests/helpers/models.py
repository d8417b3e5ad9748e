"""Model folders with random weights, small enough to be written in a moment."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from lanternpp.drafters.eagle import EagleConfig, EagleDrafter
from lanternpp.drafters.parallel import ParallelConfig, ParallelDrafter
from lanternpp.models.vq.autoencoder import VQ, VQConfig
from lanternpp.models.words import WordsConfig, WordsTarget
from lanternpp.nn import checkpoints
from lanternpp.nn.decoder import DecoderConfig

VOCAB, LENGTH, SIDE = 32, 16, 16
SMALLER = {
    "words": ("red", "tulip"),
    "subjects": ("tulip",),
    "dim": 16,
    "layers": 1,
    "heads": 2,
    "hidden": 24,
    "grid": 4,
    "vocab": VOCAB,
    "slots": 4,
}


def update_json(path: Path, **fields: object) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder and of those in it, hidden ones too."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def save_words(folder: Path, target: WordsTarget) -> None:
    """A target and its tokenizer."""
    vq = target.vq
    checkpoints.save(folder / "tokenizer", {"kind": "vq", **asdict(vq.config)}, vq.state_dict())
    checkpoints.save(folder / "target", {"kind": "words", **asdict(target.config)}, target.state_dict())


def write_model(folder: Path, grid: int = 4, layers: int = 2) -> Path:
    """A model of 32 codes on a grid of 4 x 4, 16 px, whose words are red and tulip. A larger grid takes longer to draw."""
    torch.manual_seed(0)
    vq_shape = VQConfig(
        SIDE * grid // 4, 4, codes=VOCAB, channels=(16, 16), encoder_blocks=(1, 1), decoder_blocks=(1, 1)
    )
    vq = VQ(vq_shape)
    words = WordsConfig(**SMALLER | {"dim": 32, "layers": layers, "hidden": 48, "grid": grid})
    target = WordsTarget(words, vq)
    save_words(folder, target)
    save_words(folder / "independent", WordsTarget(WordsConfig(**SMALLER | {"grid": grid}), vq))
    eagle = EagleConfig.like(DecoderConfig(32, 1, 2, 48))
    drafter = EagleDrafter(eagle, target.decoder.rotary_table)
    checkpoints.save(folder / "drafter", {"kind": "eagle", **eagle.flat()}, drafter.state_dict())
    shape = ParallelConfig.like(DecoderConfig(32, 1, 2, 48), queries=3, turn=16)
    parallel = ParallelDrafter(shape, target.decoder.rotary_table)
    checkpoints.save(folder / "parallel", {"kind": "parallel", **shape.flat()}, parallel.state_dict())
    (folder / "defaults.json").write_text(
        '{"cfg": 2.0, "method": "lantern++", "methods": {"lantern": {"neighbours": 8}, "lantern++": {"neighbours": 8},'
        ' "lantern-static": {"neighbours": 8}, "lantern-jacobi": {"neighbours": 8}}}'
    )
    return folder
