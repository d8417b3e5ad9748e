"""The classifier's training: what it learns, that it resumes, and the reference it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from helpers.refusals import rejects
from helpers.stages import classifier as train
from helpers.stages import provenance

from classifier import augment, redrawn, vocabulary
from lanternpp.evaluation.classifier import read_classifier
from lanternpp.evaluation.features import ClassifierFeatures, extract
from lanternpp.evaluation.pictures import Gallery
from lanternpp.evaluation.quality import Quality, read_reference
from lanternpp.nn import checkpoints
from pictures import Pictures


def test_it_learns_red_and_blue_squares_and_writes_its_reference(data: Path, model: Path) -> None:
    """By the stored weights, on the validation pictures."""
    assert train(data, model, steps=40, redrawn=0)
    found = provenance(model, "classifier")
    assert found["validation"]["accuracy_of_each_label"] == {"blue": 1, "red": 1}
    assert found["data"]["train"] == 12 and found["store"] == "int8"
    assert list((model / "classifier" / "samples").glob("*.png"))
    features, photos = ClassifierFeatures(model, torch.device("cpu")), Gallery.read(data / "val")
    seen = extract(features, photos)
    taken = [features.classifier.config.labels[i] for i in features.labels(seen).tolist()]
    assert taken == [str(prompt).split()[4] for prompt in photos.prompts]  # a photo of a RED square
    torch.testing.assert_close(read_reference(model, read_classifier(model)), seen, rtol=2e-3, atol=1e-4)
    figures = Quality.for_model(model, device="cpu").measure(photos, photos.prompts)
    assert figures["frechet"] < 1e-3 and figures["precision"] == figures["recall"] == 1


def test_pictures_are_redrawn_once_and_another_tokenizer_needs_restart(data: Path, model: Path) -> None:
    assert not train(data, model, stop=1)
    kept = {path: path.stat().st_mtime_ns for path in (model / "codes").glob("redrawn-*/*.safetensors")}
    assert not train(data, model, stop=3)
    assert len(kept) == 2 and all(path.stat().st_mtime_ns == changed for path, changed in kept.items())
    photos = Pictures.read(data, "train", 32)
    same, cpu = {"train": photos, "val": photos}, torch.device("cpu")
    assert [len(redrawn(model, same, "val", torch.arange(n), cpu)) for n in (5, 3)] == [5, 3]
    crops, centres = (redrawn(model, same, split, torch.arange(5), cpu) for split in same)
    assert not crops.pixels.equal(centres.pixels), "those of the other split"
    config, weights = checkpoints.load(model / "tokenizer")
    checkpoints.save(model / "tokenizer", config, {name: x * 1.01 for name, x in weights.items()})
    rejects(r"as its tokenizer draws them\): pass --restart to start over", train, data, model)


def test_labels_that_it_cannot_learn_from_are_rejected(data: Path, model: Path) -> None:
    path = data / "val" / "metadata.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "label": "green"}) + "\n" for row in rows))
    rejects("labels that train/ lacks: green; add pictures of them to train/, or take", train, data, model)
    path.write_text("".join(json.dumps({**row, "label": ""}) + "\n" for row in rows))
    rejects(r"4 pictures have none, e.g. blue/001.png", train, data, model)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if row["label"] == "red"))
    assert train(data, model, share=0.95, redrawn=12)  # one picture of a step is no redrawn one
    assert provenance(model, "classifier")["validation"]["accuracy_of_each_label"].keys() == {"red"}


def test_words_are_those_of_many_captions_and_of_no_label() -> None:
    texts = ["a photo of a red rose under a blue sky"] * 99 + ["a photo of a green rose"]
    assert vocabulary(texts, ["rose"]) == ("blue", "green", "red", "sky", "under")
    assert vocabulary([*texts, "a purple rose"], ["rose"]) == ("blue", "red", "sky", "under")


def test_augmentations_depend_on_their_seed_and_keep_contrast() -> None:
    images = torch.linspace(-1, 1, 32).expand(6, 3, 32, 32)
    one, again, other = (augment(images, torch.Generator().manual_seed(seed), 24) for seed in (0, 0, 1))
    assert one.shape == (6, 3, 24, 24) and torch.equal(one, again) and not torch.equal(one, other)
    assert one.abs().max() <= 1
    rising = (one[..., -1] - one[..., 0]).mean((1, 2)) > 0
    assert rising.any() and not rising.all()  # some are mirrored
    assert (one.std((1, 2, 3)) > 0.2).all()
