"""The target's training and its cache of codes."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.photos import random_codes
from helpers.refusals import rejects
from helpers.stages import SHAPE, provenance
from helpers.stages import target as train

from common import read_codes
from lanternpp.api.model import read_target
from lanternpp.models.vq.autoencoder import read_vq
from lanternpp.models.words import WordsConfig, WordsTarget
from lanternpp.training.codes import Codes
from pictures import Pictures
from weights import SHAPE as FIELDS
from weights import init_weights
from words import (
    TargetSettings,
    TargetTask,
    code_logits,
    corrupt_codes,
    unigram,
    vocabulary,
    word_ids,
)

CPU = torch.device("cpu")


def test_cached_codes_are_the_tokenizers_and_written_once(data: Path, model: Path) -> None:
    codes = read_codes(data, model, 2, CPU)
    assert (codes.train.codes.shape, codes.val.codes.shape) == ((12, 4, 16), (4, 1, 16))
    assert codes.train.labels[0] in codes.train.texts[0]
    (path,) = (model / "codes").glob("train-*/*.safetensors")
    before = path.stat().st_mtime_ns
    again = read_codes(data, model, 2, CPU)
    assert path.stat().st_mtime_ns == before and torch.equal(again.train.codes, codes.train.codes)
    assert (again.train.texts, again.data) == (codes.train.texts, codes.data)
    read_codes(data, model, 1, CPU)
    assert len(list((model / "codes").glob("train-*"))) == 2
    vq = read_vq(model / "tokenizer")
    centres = Pictures.read(data, "train", vq.config.size).centre(torch.arange(12))
    for variant, images in enumerate((centres, centres.flip(3))):
        agree = (vq.encode(images) == codes.train.codes[:, variant].long()).double().mean()
        assert agree > 0.9  # the cache is encoded in bfloat16 where that is fast


def task(model: Path, codes: Codes, **settings: Any) -> TargetTask:
    vq = read_vq(model / "tokenizer")
    shape = {name: getattr(SHAPE, name) for name in FIELDS}
    config = WordsConfig(**vocabulary(codes, 4), **shape, grid=4, vocab=64)
    return TargetTask(config, TargetSettings(**settings), codes, vq, CPU)


def test_words_and_subjects_come_from_captions_and_labels() -> None:
    texts = ("a photo of the sea at night", "a photo of a red tulip", "a photo of a red rose", "a photo")
    found = vocabulary(random_codes(texts, ("sea", "tulip", "rose", "")), 8)
    assert found == {
        "words": ("red", "at", "night", "rose", "sea", "tulip"),
        "subjects": ("rose", "sea", "tulip"),
        "slots": 8,
    }
    assert vocabulary(random_codes(texts), 8)["subjects"] == found["words"]  # no labels: any word will do
    assert vocabulary(random_codes(texts, ("sea", "", "", "")), 2)["subjects"] == found["words"]
    assert vocabulary(random_codes(texts), 2)["slots"] == 3
    rejects("no caption says anything", vocabulary, random_codes(("a photo",)), 8)


def test_it_overfits_six_pictures(model: Path) -> None:
    texts = "a red square", "a blue square", "a red tulip", "a blue tulip", "a rose", "a photo"
    codes = random_codes(texts)
    made = task(model, codes, batch_size=6, drop_captions=0.0, lr=1e-2, muon_lr=1e-2)
    assert "a photo" not in made.prompts, "it names no subject"
    before = made.validate_on(torch.arange(6))
    assert before["nll"] == pytest.approx(torch.tensor(64.0).log().item(), abs=0.05)
    for step in range(80):
        made.step(step, 0.0)
    made.average.load_state_dict(made.model.state_dict())
    after = made.validate_on(torch.arange(6))
    assert after["nll"] < 0.5 < after["unigram"]
    assert after["top1"] > 0.5
    assert after["ambiguous"] == 0


def test_logits_depend_on_captions_that_are_not_dropped(model: Path) -> None:
    codes = random_codes(("a red square", "a blue square"))
    made = task(model, codes)
    torch.nn.init.normal_(made.model.codes_out.weight)
    for block in made.model.decoder.blocks:
        torch.nn.init.normal_(block.wo.weight, std=0.3)
    picture = codes.train.codes[:1, 0].long().expand(2, -1)
    for null, same in ((False, False), (True, True)):
        logits = code_logits(made.model, made.words, torch.tensor([null, null]), picture, torch.float32)
        assert torch.allclose(logits[0], logits[1]) == same


def test_a_tenth_of_the_captions_is_dropped(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = task(model, random_codes(("a red square",) * 50), batch_size=50)
    shares = []

    def loss(words: Any, null: Any, input_codes: Any, codes: Any) -> Any:
        shares.append(null.double().mean())
        assert torch.equal(input_codes, codes)
        return made.model.null_prefix.sum() * 0

    monkeypatch.setattr(made, "loss", loss)
    monkeypatch.setattr(made, "optimizers", {})
    for step in range(80):
        made.step(step, 0.0)
    assert torch.stack(shares).mean().item() == pytest.approx(0.1, abs=0.02)


def test_corruption_replaces_a_share_of_the_codes() -> None:
    codes = torch.zeros(64, 100, dtype=torch.int64)
    corrupted = corrupt_codes(codes, 0.25, 1000, torch.Generator().manual_seed(0))
    assert (corrupted != codes).double().mean().item() == pytest.approx(0.25, abs=0.02)
    assert corrupt_codes(codes, 0.0, 1000, torch.Generator()) is codes


def test_the_exported_weights_have_the_validated_loss(data: Path, model: Path) -> None:
    assert train(data, model, steps=4)
    folder = model / "target"
    assert len(list((folder / "samples").glob("*.png"))) == 2
    target = read_target(model, torch.float32).eval()
    assert type(target) is WordsTarget
    assert target.config.subjects == ("blue", "red")
    codes = read_codes(data, model, 1, CPU)
    words, null = word_ids(target, codes.val), torch.zeros(4, dtype=torch.bool)
    with torch.no_grad():
        logits = code_logits(target, words, null, codes.val.codes[:, 0].long(), torch.float32)
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), codes.val.codes.flatten().long())
    found = provenance(model, "target")["validation"]
    assert found["nll"] == pytest.approx(nll.item(), abs=0.02) and found["validation_pictures"] == 4


def test_unigram_is_the_loss_of_code_frequencies() -> None:
    codes = random_codes(("a b",) * 200, vocab=8)
    assert unigram(codes, 8) == pytest.approx(torch.tensor(8.0).log().item(), abs=0.01)
    other = replace(codes.val, codes=torch.zeros(1, 1, 16, dtype=torch.uint16))
    p = (codes.train.codes.flatten().long() == 0).double().mean()
    assert unigram(replace(codes, val=other), 8) == pytest.approx(-p.log().item(), abs=0.02)


def test_training_begins_with_the_weights_of_another_model(data: Path, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model / "tokenizer", other / "tokenizer")
    assert train(data, model, steps=4)
    start = {"weights_of": str(model)}
    assert train(data, other, steps=1, **start, lr=1e-6, muon_lr=1e-6)  # learns very little
    first, then, random = (read_target(folder, torch.float32) for folder in (model, other, model))
    init_weights(random)
    words, null = torch.ones(1, first.slots, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
    codes = torch.arange(16)[None]
    targets = first, then, random
    mine, same, other_logits = (code_logits(x, words, null, codes, torch.float32) for x in targets)
    assert (mine - same).abs().max() < 1e-3 * (mine - other_logits).abs().max()
    shape = "--dim 32 --layers 2 --heads 2 --hidden 48"
    rejects(shape, train, data, other, **start, shape=replace(SHAPE, layers=1))
