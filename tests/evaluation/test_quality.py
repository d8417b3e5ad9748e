"""Measures of quality: that they tell good pictures from bad ones, and what cannot be measured.

The Fréchet distance is compared with a second implementation, precision and recall with brute force.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
from urllib.error import URLError

import numpy as np
import pytest
import torch
from helpers.classifiers import CPU, noisy_pictures, write_classifier
from helpers.refusals import rejects
from PIL import Image
from torch import Tensor

from classifier import write_reference
from lanternpp.accept.exact import Exact
from lanternpp.evaluation import quality as measures
from lanternpp.evaluation.classifier import ClassifierConfig, read_classifier
from lanternpp.evaluation.features import ClassifierFeatures, Extractor, extract
from lanternpp.evaluation.quality import Quality, frechet, gaussian, label_of, precision_recall


class Colours(Extractor):
    """Custom features: the mean colour."""

    side = 8

    def __call__(self, images: Tensor) -> Tensor:
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


def test_pictures_like_the_reference_have_a_small_distance_and_others_a_large_one(folder: Path) -> None:
    quality = Quality.for_model(folder, None, None, None, CPU)
    pictures = noisy_pictures("red", 24), noisy_pictures("red", 24, seed=1), noisy_pictures("blue", 24)
    same, like, unlike = map(quality.measure, pictures)
    assert same["frechet"] < 1e-3 * unlike["frechet"]
    assert same["frechet"] < like["frechet"] < 0.1 * unlike["frechet"]
    assert same["precision"] == same["recall"] == 1
    assert like["precision"] > 0.5 and unlike["precision"] == unlike["recall"] == 0
    assert 0 <= like["frechet_spread"] < unlike["frechet"]
    assert "prompt_accuracy" not in same  # no prompts were given


def test_a_folder_of_the_same_pictures_is_the_same_reference(folder: Path, tmp_path: Path) -> None:
    pictures = saved(tmp_path / "pictures" / "val", noisy_pictures("red", 24)).parent
    images = noisy_pictures("red", 12, seed=3)
    own, named = (Quality.for_model(folder, ref, None, None, CPU).measure(images) for ref in (None, pictures))
    assert named == pytest.approx(own, rel=0.01)


def test_prompt_accuracy_counts_prompts_that_name_a_label(folder: Path) -> None:
    quality = Quality.for_model(folder, device=CPU)
    images = noisy_pictures("red", 4) + noisy_pictures("blue", 4)
    prompts = ["red tulips", "a tulip", "the sea", None, "a sea", "a stone", "the sea", "a tulip in the sea"]
    assert quality.measure(images, prompts)["prompt_accuracy"] == pytest.approx(4 / 6)
    assert "prompt_accuracy" not in quality.measure(images, ["a stone"] * 8)


@pytest.mark.parametrize(
    ("features", "said"),
    [
        (Exact, "no class of that kind"),
        (type("NoSide", (Colours,), {"side": None}), "whole numbers as its side"),
        (
            type("Mean", (Colours,), {"__call__": lambda self, x: x.float().mean((1, 2, 3))}),
            "a tensor .B, F.",
        ),
        (type("Nan", (Colours,), {"__call__": lambda self, x: x[..., 0, 0] * torch.nan}), "finite numbers"),
    ],
)
def test_custom_features_are_checked_before_anything_is_drawn(
    folder: Path, tmp_path: Path, features: type, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Own", features, raising=False)
    rejects(said, Quality.for_model, folder, tmp_path, f"{__name__}:Own", None, CPU)


def test_custom_features_need_no_classifier(folder: Path, tmp_path: Path) -> None:
    pictures = saved(tmp_path / "red", noisy_pictures("red", 8))
    (bare := tmp_path / "bare").mkdir()
    for model, more in (folder, {"prompt_accuracy": 1}), (bare, {}):
        quality = Quality.for_model(model, pictures, OWN, None, CPU)
        figures = quality.measure(noisy_pictures("red", 8), ["a tulip"] * 8)
        assert figures.pop("frechet") == pytest.approx(0, abs=1e-6) and figures.pop("frechet_spread") > 0
        assert figures == {"precision": 1, "recall": 1} | more
    rejects("bare has no classifier; .*recipes/nature", Quality.for_model, bare, pictures, device=CPU)


def test_missing_and_small_references_are_rejected_before_anything_is_drawn(
    folder: Path, tmp_path: Path
) -> None:
    few = saved(tmp_path / "few", noisy_pictures("red", 3))
    rejects("need --reference DIR", Quality.for_model, folder, None, OWN, None, CPU)
    rejects("holds 3 pictures; at least 4 are needed", Quality.for_model, folder, few, None, None, CPU)
    quality = Quality.for_model(folder, device=CPU)
    rejects("3 pictures cannot be measured; at least 4", quality.measure, noisy_pictures("red", 3))


def test_inception_needs_packages(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> None:
        Quality.for_model(folder, tmp_path, "inception", None, CPU)

    (tmp_path / "torch_fidelity.py").write_text("raise RuntimeError('torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    rejects(r"torchvision::nms does not exist.*pip install torch-fidelity", ask)
    monkeypatch.setitem(sys.modules, "torch_fidelity", None)
    rejects(r"pip install torch-fidelity", ask)
    package = SimpleNamespace(FeatureExtractorInceptionV3=Mock(side_effect=URLError("no route")))
    monkeypatch.setitem(sys.modules, "torch_fidelity", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch_fidelity.feature_extractor_inceptionv3", package)
    rejects(r"weights of features inception cannot be had .*no route.*checkpoints", ask)


def test_features_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    classifier = ClassifierFeatures(write_classifier(tmp_path), CPU)
    images = noisy_pictures("red", 5) + noisy_pictures("blue", 4, side=40)  # any size
    one, many = (extract(classifier, images, batch=batch) for batch in (1, 64))
    assert one.shape == (9, 16)
    torch.testing.assert_close(one, many, rtol=1e-4, atol=1e-5)


def test_wrong_references_are_rejected(tmp_path: Path) -> None:
    classifier = read_classifier(write_classifier(tmp_path))
    path = tmp_path / "classifier" / "reference.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    rejects("cannot be read", measures.read_reference, tmp_path, classifier)
    path.unlink()
    rejects("--reference DIR", measures.read_reference, tmp_path, classifier)
    write_reference(tmp_path, classifier, torch.rand(3, 16), [])
    rejects("3 pictures and at least 4 are needed", measures.read_reference, tmp_path, classifier)
    path.write_bytes(content)
    with torch.no_grad():
        classifier.stem.weight[0, 0, 0, 0] += 1e-3
    rejects(r"reference.safetensors was made by other weights", measures.read_reference, tmp_path, classifier)


def test_a_classifier_needs_two_labels() -> None:
    rejects("2 or more", ClassifierConfig, ("rose",))
    rejects("one entry per stage", ClassifierConfig, ("rose", "sea"), blocks=(1,))


LABELS = ("sea", "rose", "polar bear", "bear", "sea lion", "tree_frog", "daisy")


@pytest.mark.parametrize(
    ("prompt", "label"),
    [
        ("a photo of the Sea, at sunset", "sea"),
        ("three roses by the sea", "rose"),
        ("polar bears", "polar bear"),
        ("a bear that is polar", "bear"),
        ("a sea lion on a rock", "sea lion"),
        ("tree frogs", "tree_frog"),
        ("daisies by the sea", "daisy"),
        ("a research vessel", None),
        ("prose", None),
        ("", None),
    ],
)
def test_the_label_of_a_prompt_is_the_one_named_first(prompt: str, label: str | None) -> None:
    found = label_of(prompt, LABELS)
    assert (None if found is None else LABELS[found]) == label


def draws(count: int, dims: int, seed: int) -> Tensor:
    return torch.randn(count, dims, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference_frechet(one: Tensor, other: Tensor) -> float:
    """The formula itself in NumPy, by the eigenvalues of the unsymmetric product."""
    a, b = one.numpy(), other.numpy()
    product = np.cov(a, rowvar=False) @ np.cov(b, rowvar=False)
    roots = np.sqrt(np.linalg.eigvals(product).astype(complex)).real.sum()
    trace = a.var(0, ddof=1).sum() + b.var(0, ddof=1).sum()
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + trace - 2 * roots)


@pytest.mark.parametrize(("count", "dims"), [(500, 16), (40, 24), (9, 32)])
def test_frechet_is_that_of_a_second_implementation(count: int, dims: int) -> None:
    one = draws(count, dims, 1) @ draws(dims, dims, 2) + 1
    other = draws(300, dims, 3) @ draws(dims, dims, 4)
    assert frechet(gaussian(one), gaussian(other)) == pytest.approx(reference_frechet(one, other), rel=1e-6)


def test_the_spread_is_the_standard_deviation_over_new_pictures() -> None:
    reference = gaussian(draws(400, 6, 9) + 0.7)
    sets = [draws(160, 6, seed) for seed in range(100, 160)]
    real = torch.tensor([frechet(gaussian(points), reference) for points in sets]).std().item()
    reported = torch.tensor([measures.standard_error(points, reference) for points in sets]).mean().item()
    assert reported == pytest.approx(real, rel=0.3)


def brute_force(points: Tensor, manifold: Tensor) -> float:
    """The definition, one pair at a time."""
    inside = 0
    for point in points:
        for i, centre in enumerate(manifold):
            others = sorted((centre - x).norm().item() for j, x in enumerate(manifold) if j != i)
            if (point - centre).norm().item() <= others[2] + 1e-12:
                inside += 1
                break
    return inside / len(points)


@pytest.mark.parametrize("chunk", [7, 1000])
def test_precision_and_recall_are_those_of_brute_force(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the three neighbours of the paper."""
    monkeypatch.setattr(measures, "CHUNK", chunk)
    random = torch.Generator().manual_seed(7)
    generated = torch.randn(40, 3, generator=random).double() * 1.6
    reference = torch.randn(30, 3, generator=random).double()
    precision, recall = precision_recall(generated, reference)
    assert precision == pytest.approx(brute_force(generated, reference))
    assert recall == pytest.approx(brute_force(reference, generated))
    assert 0.1 < precision < 0.95 and precision != recall  # a case in which a mistake would show
