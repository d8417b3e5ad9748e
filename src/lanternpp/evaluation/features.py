"""Extractors of the features by which pictures are compared; `EXTRACTORS` lists them by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import torch
from PIL import Image
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.evaluation.classifier import has_classifier, read_classifier
from lanternpp.evaluation.pictures import squares


class Extractor(ABC):
    """Maps pictures to features; similar pictures have features close together."""

    side: int  # pixels of the squares it looks at

    @classmethod
    @abstractmethod
    def open(cls, folder: Path, device: torch.device) -> Self:
        """The extractor for a model folder, on a device. Raises InputError where it cannot be had."""

    @abstractmethod
    def __call__(self, images: Tensor) -> Tensor:
        """Images [B, 3, side, side] uint8 -> features [B, F] float32."""


class ClassifierFeatures(Extractor):
    """The features of the model's own classifier, and the labels it predicts."""

    def __init__(self, folder: Path, device: torch.device):
        self.classifier, self.device = read_classifier(folder, device), device
        self.side = self.classifier.config.size

    @classmethod
    def open(cls, folder: Path, device: torch.device) -> Self:
        """The classifier of a model folder."""
        if not has_classifier(folder):
            raise InputError(
                f"model {folder.name} has no classifier; make one with `python recipes/nature/classifier.py`, "
                "or use --features inception with --reference DIR"
            )
        return cls(folder, device)

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Images [B, 3, side, side] uint8 -> features [B, F]."""
        return self.classifier.features(images.to(self.device).float() / 127.5 - 1)

    @torch.inference_mode()
    def labels(self, features: Tensor) -> Tensor:
        """Features [B, F] -> the most likely label of each, [B]."""
        return self.classifier.labels(features.to(self.device)).argmax(-1).cpu()


EXTRACTORS: dict[str, type[Extractor] | str] = {
    "classifier": ClassifierFeatures,
    "inception": "lanternpp.evaluation.inception:Inception",
}


def extract(
    extractor: Extractor,
    images: Sequence[Image.Image],
    progress: Callable[[int, int], None] | None = None,
    batch: int = 32,
) -> Tensor:
    """The features of pictures of any size, [M, F] float32 on the CPU."""
    found: list[Tensor] = []
    for part in squares(images, extractor.side, batch):
        found.append(extractor(part).float().cpu())
        if progress:
            progress(min(len(found) * batch, len(images)), len(images))
    return torch.cat(found)
