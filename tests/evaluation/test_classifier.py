"""The classifier's files: its weights, and the reference that belongs to them alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.classifiers import CPU, splashes, write_classifier

from lanternpp.errors import InputError
from lanternpp.evaluation.classifier import (
    Classifier,
    ClassifierConfig,
    has_classifier,
    read_classifier,
    read_reference,
    write_reference,
)
from lanternpp.evaluation.features import ClassifierFeatures, extract


def test_features_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    classifier = ClassifierFeatures.open(write_classifier(tmp_path), CPU)
    images = splashes("red", 5) + splashes("blue", 4, side=40)  # any size
    one, many = (extract(classifier, images, batch=batch) for batch in (1, 64))
    assert one.shape == (9, 16)
    torch.testing.assert_close(one, many, rtol=1e-4, atol=1e-5)


def test_the_reference_comes_back_with_its_captions(tmp_path: Path) -> None:
    classifier = read_classifier(write_classifier(tmp_path))
    features = torch.randn(6, 16)
    write_reference(tmp_path, classifier, features, ["a"] * 6)
    own = read_reference(tmp_path, classifier)
    assert own.texts == ("a",) * 6
    torch.testing.assert_close(own.features, features, rtol=1e-3, atol=1e-6)  # 16 bits


def test_the_reference_of_other_weights_is_refused(tmp_path: Path) -> None:
    classifier = read_classifier(write_classifier(tmp_path))
    with torch.no_grad():
        classifier.stem.weight[0, 0, 0, 0] += 1e-3
    with pytest.raises(InputError, match=r"reference.safetensors was made by other weights"):
        read_reference(tmp_path, classifier)


def test_a_missing_and_a_broken_reference_are_refused(tmp_path: Path) -> None:
    classifier = read_classifier(write_classifier(tmp_path))
    path = tmp_path / "classifier" / "reference.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InputError, match="cannot be read"):
        read_reference(tmp_path, classifier)
    path.unlink()
    with pytest.raises(InputError, match="--reference DIR"):
        read_reference(tmp_path, classifier)


def test_a_classifier_needs_something_to_tell_apart(tmp_path: Path) -> None:
    assert not has_classifier(tmp_path)
    with pytest.raises(InputError, match="2 or more"):
        ClassifierConfig(("rose",))
    with pytest.raises(InputError, match="one entry per stage"):
        ClassifierConfig(("rose", "sea"), blocks=(1,))


def test_a_classifier_without_words_judges_labels(tmp_path: Path) -> None:
    classifier = Classifier(ClassifierConfig(("rose", "sea"), size=32, stem=8, channels=(16,), blocks=(1,)))
    labels, words = classifier(torch.zeros(3, 3, 32, 32))
    assert labels.shape == (3, 2) and words.shape == (3, 0)
