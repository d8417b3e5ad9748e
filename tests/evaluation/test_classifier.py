"""The classifier's files: its weights, and the reference that belongs to them alone."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers.classifiers import CPU, splashes, write_classifier
from helpers.refusals import rejects

from classifier import write_reference
from lanternpp.evaluation.classifier import ClassifierConfig, read_classifier
from lanternpp.evaluation.features import ClassifierFeatures, extract
from lanternpp.evaluation.quality import read_reference


def test_features_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    classifier = ClassifierFeatures.open(write_classifier(tmp_path), CPU)
    images = splashes("red", 5) + splashes("blue", 4, side=40)  # any size
    one, many = (extract(classifier, images, batch=batch) for batch in (1, 64))
    assert one.shape == (9, 16)
    torch.testing.assert_close(one, many, rtol=1e-4, atol=1e-5)


def test_wrong_references_are_rejected(tmp_path: Path) -> None:
    classifier = read_classifier(write_classifier(tmp_path))
    path = tmp_path / "classifier" / "reference.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    rejects("cannot be read", read_reference, tmp_path, classifier)
    path.unlink()
    rejects("--reference DIR", read_reference, tmp_path, classifier)
    write_reference(tmp_path, classifier, torch.rand(3, 16), [])
    rejects("3 pictures and at least 4 are needed", read_reference, tmp_path, classifier)
    path.write_bytes(content)
    with torch.no_grad():
        classifier.stem.weight[0, 0, 0, 0] += 1e-3
    rejects(r"reference.safetensors was made by other weights", read_reference, tmp_path, classifier)


def test_a_classifier_needs_two_labels() -> None:
    rejects("2 or more", ClassifierConfig, ("rose",))
    rejects("one entry per stage", ClassifierConfig, ("rose", "sea"), blocks=(1,))
