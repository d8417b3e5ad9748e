"""What pictures are worth: which figures can be given, that they tell good from bad, and what cannot be measured."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError

import pytest
import torch
from helpers.classifiers import CPU, splashes, write_classifier
from helpers.refusals import rejects
from PIL import Image

from lanternpp.errors import InputError
from lanternpp.evaluation.features import Extractor
from lanternpp.evaluation.quality import Quality, label_of


class Colours(Extractor):
    """Somebody's own features: the mean colour."""

    side = 8

    @classmethod
    def open(cls, folder: Path, device: torch.device) -> Colours:
        return cls()

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return images.float().mean((2, 3))


OWN = f"{__name__}:Colours"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_classifier(tmp_path / "tiny")


def saved(folder: Path, images: list[Image.Image]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i, image in enumerate(images):
        image.save(folder / f"{i:02d}.png")
    return folder


def test_pictures_like_the_reference_are_near_it_and_others_far(folder: Path) -> None:
    quality = Quality.for_model(folder, None, None, None, CPU)
    same, like, unlike = (
        quality.measure(images)
        for images in (splashes("red", 24), splashes("red", 24, seed=1), splashes("blue", 24))
    )
    assert same["frechet"] < 1e-3 * unlike["frechet"]
    assert same["frechet"] < like["frechet"] < 0.1 * unlike["frechet"]
    assert same["precision"] == same["recall"] == 1
    assert like["precision"] > 0.5 and unlike["precision"] == unlike["recall"] == 0
    assert 0 <= like["frechet_spread"] < unlike["frechet"]
    assert "prompt_accuracy" not in same  # no prompts were given


def test_a_folder_of_the_same_pictures_is_the_same_reference(folder: Path, tmp_path: Path) -> None:
    pictures = saved(tmp_path / "pictures" / "val", splashes("red", 24)).parent
    images = splashes("red", 12, seed=3)
    own, named = (Quality.for_model(folder, ref, None, None, CPU).measure(images) for ref in (None, pictures))
    assert named == pytest.approx(own, rel=0.01)


def test_prompt_accuracy_counts_prompts_that_name_a_label(folder: Path) -> None:
    quality = Quality.for_model(folder, device=CPU)
    images = splashes("red", 4) + splashes("blue", 4)
    prompts = ["red tulips", "a tulip", "the sea", None, "a sea", "a stone", "the sea", "a tulip in the sea"]
    assert quality.measure(images, prompts)["prompt_accuracy"] == pytest.approx(4 / 6)
    assert "prompt_accuracy" not in quality.measure(images, ["a stone"] * 8)


def test_other_features_by_name_keep_the_classifier_for_the_prompts(folder: Path, tmp_path: Path) -> None:
    pictures = saved(tmp_path / "red", splashes("red", 8))
    quality = Quality.for_model(folder, pictures, OWN, None, CPU)
    figures = quality.measure(splashes("red", 8), ["a tulip"] * 8)
    assert figures["frechet"] == pytest.approx(0, abs=1e-6) and figures["prompt_accuracy"] == 1


def test_a_model_without_a_classifier_has_no_figures_of_it(tmp_path: Path) -> None:
    pictures = saved(tmp_path / "red", splashes("red", 8))
    bare = tmp_path / "bare"
    bare.mkdir()
    for reference in (None, pictures):
        with pytest.raises(InputError, match=r"model bare has no classifier; .*recipes/nature/classifier"):
            Quality.for_model(bare, reference, None, None, CPU)
    quality = Quality.for_model(bare, pictures, OWN, None, CPU)
    figures = quality.measure(splashes("red", 8), ["a tulip"] * 8)
    assert figures.keys() == {"frechet", "frechet_spread", "precision", "recall"}


def test_what_cannot_be_measured_is_rejected_before_anything_is_drawn(folder: Path, tmp_path: Path) -> None:
    few = saved(tmp_path / "few", splashes("red", 3))
    for arguments, names in (
        ((None, "clasifier", None), "did you mean 'classifier'"),
        ((None, OWN, None), "need --reference DIR"),
        ((tmp_path / "none", None, None), "reference .*none is no folder"),
        ((few, None, None), "holds 3 pictures; at least 4 are needed"),
        ((None, None, str(tmp_path)), "cannot be had"),
    ):
        rejects(names, Quality.for_model, folder, *arguments, CPU)
    quality = Quality.for_model(folder, device=CPU)
    rejects("3 pictures are too few to measure; at least 4", quality.measure, splashes("red", 3))
    rejects("2 prompts do not go with 8 pictures", quality.measure, splashes("red", 8), ["a tulip"] * 2)


def test_inception_says_what_it_needs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> None:
        Quality.for_model(folder, tmp_path, "inception", None, CPU)

    monkeypatch.setitem(sys.modules, "torch_fidelity", None)
    rejects(r"pip install torch-fidelity", ask)

    def unreachable(*_: object) -> None:
        raise URLError("no route")

    package = SimpleNamespace(FeatureExtractorInceptionV3=unreachable)
    monkeypatch.setitem(sys.modules, "torch_fidelity", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch_fidelity.feature_extractor_inceptionv3", package)
    rejects(r"weights of features inception cannot be had .*no route.*checkpoints", ask)


LABELS = ("sea", "rose", "polar bear", "bear", "sea lion", "tree_frog")


@pytest.mark.parametrize(
    ("prompt", "label"),
    [
        ("a photo of the Sea, at sunset", "sea"),
        ("three roses by the sea", "rose"),
        ("polar bears", "polar bear"),
        ("a bear that is polar", "bear"),
        ("a sea lion on a rock", "sea lion"),
        ("tree frogs", "tree_frog"),
        ("a research vessel", None),
        ("prose", None),
        ("", None),
    ],
)
def test_the_label_named_first(prompt: str, label: str | None) -> None:
    found = label_of(prompt, LABELS)
    assert (None if found is None else LABELS[found]) == label
