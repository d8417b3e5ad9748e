"""The command line, run in this process, and a tiny model folder with random weights for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch

from lanternpp.cli import main
from lanternpp.drafters.eagle import EagleConfig, EagleDrafter
from lanternpp.nn import checkpoints
from lanternpp.targets.words import WordsConfig, WordsTarget
from lanternpp.vq.folder import read_vq
from lanternpp.vq.model import VQ, VQConfig

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
    "code_dim": 4,
    "slots": 4,
}


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every command runs in an empty folder of its own, with a cache of its own."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `lanternpp` with these arguments."""

    def command(*args: object) -> Outcome:
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
        captured = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return Outcome(end.value.code, captured.out, captured.err)

    return command


def write_smaller(folder: Path, words: WordsConfig, vq: VQ) -> Path:
    """Another target of the same codes, to draft with."""
    checkpoints.save(folder / "tokenizer", {"kind": "vq", **asdict(vq.config)}, vq.weights())
    weights = WordsTarget(words, vq).folded()[1]
    checkpoints.save(folder / "target", {"kind": "words", **asdict(words)}, weights)
    return folder


def write_model(folder: Path) -> Path:
    """A model of 32 codes on a grid of 4 x 4, 16 px, that knows a red tulip."""
    torch.manual_seed(0)
    vq_shape = VQConfig(SIDE, VOCAB, 4, channels=(16, 16), encoder_blocks=(1, 1), decoder_blocks=(1, 1))
    vq = VQ(vq_shape)
    checkpoints.save(folder / "tokenizer", {"kind": "vq", **asdict(vq_shape)}, vq.weights())
    words = WordsConfig(
        words=("red", "tulip"),
        subjects=("tulip",),
        dim=32,
        layers=2,
        heads=2,
        hidden=48,
        grid=4,
        vocab=VOCAB,
        code_dim=4,
        slots=4,
    )
    target = WordsTarget(words, vq)
    checkpoints.save(folder / "target", {"kind": "words", **asdict(words)}, target.folded()[1])
    write_smaller(folder / "independent", WordsConfig(**SMALLER), vq)
    eagle = EagleConfig(dim=32, heads=2, hidden=48)
    drafter = EagleDrafter(eagle, target.decoder.turns)
    checkpoints.save(folder / "drafter", {"kind": "eagle", **asdict(eagle)}, drafter.state_dict())
    (folder / "defaults.json").write_text(
        '{"cfg": 2.0, "methods": {"lantern": {"neighbours": 8}, "lantern++": {"neighbours": 8},'
        ' "lantern-static": {"neighbours": 8}, "lantern-jacobi": {"neighbours": 8}}}'
    )
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's folder."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def smaller(tmp_path: Path) -> Callable[..., Path]:
    """Writes another target, of this shape: over the tokenizer in a folder, or over one of its own."""

    def write(tokenizer: Path | None = None, **shape: object) -> Path:
        words = WordsConfig(**{**SMALLER, **shape})
        if tokenizer is None:
            vq = VQ(VQConfig(4 * words.grid, words.vocab, 4, (16, 16), (1, 1), (1, 1)))
        else:
            vq = read_vq(tokenizer, torch.float32)
        return write_smaller(tmp_path / "other", words, vq)

    return write


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A copy of the tiny model, for breaking."""
    return write_model(tmp_path / "broken")
