"""A classifier with random weights, small enough to be written in a moment, and pictures for it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
from PIL import Image

from classifier import write_reference
from lanternpp.evaluation.classifier import (
    CLASSIFIER,
    Classifier,
    ClassifierConfig,
    read_classifier,
)
from lanternpp.evaluation.features import ClassifierFeatures, extract
from lanternpp.nn import checkpoints

LABELS = ("tulip", "sea")
CPU = torch.device("cpu")


def write_classifier(folder: Path, side: int = 16, captions: tuple[str, ...] = ("a red tulip",)) -> Path:
    """A classifier of reds and blues in a model folder, with 24 reddish pictures as its reference.

    Its features are random; its labels follow the features of plain red and plain blue.
    """
    torch.manual_seed(0)
    config = ClassifierConfig(LABELS, ("red",), side, stem=8, channels=(16, 16), blocks=(1, 1))
    classifier = Classifier(config)
    red, blue = (
        torch.tensor(x).view(1, 3, 1, 1).expand(1, 3, side, side) for x in ((0.8, -1, -1), (-1, -1, 0.8))
    )
    with torch.no_grad():
        difference = classifier.features(red) - classifier.features(blue)
        middle = (classifier.features(red) + classifier.features(blue)) / 2
        classifier.labels.weight.copy_(torch.cat((difference, -difference)))
        classifier.labels.bias.copy_(-classifier.labels.weight @ middle[0])
    checkpoints.save(folder / CLASSIFIER, {"kind": CLASSIFIER, **asdict(config)}, classifier.state_dict())
    stored = ClassifierFeatures(folder, CPU)
    features = extract(stored, noisy_pictures("red", 24))
    write_reference(folder, read_classifier(folder), features, captions * (24 // len(captions)))
    return folder


def noisy_pictures(colour: str, count: int, seed: int = 0, side: int = 16) -> list[Image.Image]:
    """Pictures mostly red or mostly blue, all different."""
    noise = torch.randint(0, 60, (count, side, side, 3), generator=torch.Generator().manual_seed(seed))
    noise[..., 0 if colour == "red" else 2] += torch.linspace(120, 190, count).long().view(-1, 1, 1)
    return [Image.fromarray(x.byte().numpy()) for x in noise]
