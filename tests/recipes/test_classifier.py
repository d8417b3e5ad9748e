"""The classifier's training: what it learns, that it resumes, and the reference it leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from classifier import ClassifierSettings, train
from labelled import augment, vocabulary
from lanternpp.errors import InputError
from lanternpp.evaluation.classifier import read_classifier, read_reference
from lanternpp.evaluation.features import ClassifierFeatures, extract
from lanternpp.evaluation.pictures import Gallery
from lanternpp.evaluation.quality import Quality
from lanternpp.training.options import TrainingOptions

CPU = torch.device("cpu")
SHAPE = {"stem": 16, "channels": (32, 48), "blocks": (1, 1)}


def go(data: Path, model: Path, steps: int = 8, stop: int | None = None, **settings: Any) -> bool:
    options = TrainingOptions(
        model / "classifier", steps, stop_after=stop, log_steps=1, checks=2, store="int8"
    )
    return train(
        data, model, SHAPE, ClassifierSettings(**{"batch_size": 6, "redrawn": 5, **settings}), options
    )


def weights(model: Path) -> dict[str, torch.Tensor]:
    return read_classifier(model).state_dict()


def test_it_tells_red_squares_from_blue_ones_and_says_how_it_came_about(data: Path, model: Path) -> None:
    assert go(data, model, steps=60, redrawn=0)
    facts = json.loads((model / "classifier" / "provenance.json").read_text())
    assert facts["validation"]["accuracy"] == 1
    assert facts["validation"]["accuracy_of_each_label"] == {"blue": 1, "red": 1}
    assert facts["data"]["train"] == 12 and facts["store"] == "int8"
    assert list((model / "classifier" / "samples").glob("*.png"))
    classifier = ClassifierFeatures.open(model, CPU)
    photos = Gallery.read(data / "val")
    taken = [
        classifier.classifier.config.labels[i]
        for i in classifier.labels(extract(classifier, photos)).tolist()
    ]
    assert taken == [str(prompt).split()[4] for prompt in photos.prompts]  # a photo of a RED square


def test_the_reference_is_what_the_stored_weights_see_in_the_validation_pictures(
    data: Path, model: Path
) -> None:
    assert go(data, model)
    own = read_reference(model, read_classifier(model))
    photos = Gallery.read(data / "val")
    assert list(own.texts) == photos.prompts
    seen = extract(ClassifierFeatures.open(model, CPU), photos)
    torch.testing.assert_close(own.features, seen, rtol=2e-3, atol=1e-4)
    figures = Quality.for_model(model, device="cpu").measure(photos, photos.prompts)
    assert figures["frechet"] < 1e-3 and figures["precision"] == figures["recall"] == 1


def test_a_stopped_and_resumed_run_repeats_the_unbroken_one(data: Path, model: Path, twin: Path) -> None:
    assert go(data, model)
    assert not go(data, twin, stop=5)
    assert not (twin / "classifier" / "config.json").exists()
    assert go(data, twin)
    one, two = weights(model), weights(twin)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_pictures_are_drawn_again_once(data: Path, model: Path) -> None:
    assert not go(data, model, stop=1)
    (kept,) = (model / "codes").glob("redrawn-train-*/*.safetensors")
    changed = kept.stat().st_mtime_ns
    assert go(data, model)
    assert kept.stat().st_mtime_ns == changed
    kept.write_bytes(kept.read_bytes()[:100])
    with pytest.raises(InputError, match=r"cannot be read .*delete it to make it again"):
        go(data, model)


def test_what_it_cannot_learn_from_is_refused(data: Path, model: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "none", ignore_errors=True)
    with pytest.raises(InputError, match=r"nature/tokenizer\.py"):
        go(data, tmp_path / "none")
    path = data / "val" / "metadata.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "label": "green"}) + "\n" for row in rows))
    with pytest.raises(InputError, match="labels that train/ lacks: green"):
        go(data, model)
    path.write_text("".join(json.dumps({**row, "label": ""}) + "\n" for row in rows))
    with pytest.raises(InputError, match=r"4 pictures have none, e.g. blue/001.png"):
        go(data, model)
    with pytest.raises(InputError, match="--lr 2 is out of range"):
        go(data, model, lr=2)


def test_words_are_those_that_many_captions_say_and_no_label_does() -> None:
    texts = ["a photo of a red rose under a blue sky"] * 99 + ["a photo of a green rose"]
    assert vocabulary(texts, ["rose"]) == ("blue", "green", "red", "sky", "under")
    assert vocabulary([*texts, "a purple rose"], ["rose"]) == ("blue", "red", "sky", "under")


def test_variations_stay_recognisable_and_follow_their_seed() -> None:
    images = torch.linspace(-1, 1, 32).expand(6, 3, 32, 32)
    one, again, other = (augment(images, torch.Generator().manual_seed(seed), 24) for seed in (0, 0, 1))
    assert one.shape == (6, 3, 24, 24) and torch.equal(one, again) and not torch.equal(one, other)
    assert one.abs().max() <= 1
    rising = (one[..., -1] - one[..., 0]).mean((1, 2)) > 0
    assert rising.any() and not rising.all()  # some are mirrored
    assert (one.std((1, 2, 3)) > 0.2).all()
