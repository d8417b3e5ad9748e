"""What pictures are compared by: extractors of features, one a row of a dict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import torch
from PIL import Image
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.evaluation.judge import has_judge, read_judge
from lanternpp.evaluation.pictures import squares


class Extractor(ABC):
    """Pictures -> features, in which alike pictures are near."""

    side: int  # pixels of the squares it looks at

    @classmethod
    @abstractmethod
    def open(cls, folder: Path, device: torch.device) -> Self:
        """The extractor for a model folder, on a device. Raises InputError where it cannot be had."""

    @abstractmethod
    def __call__(self, images: Tensor) -> Tensor:
        """Images [B, 3, side, side] uint8 -> features [B, F] float32."""


class JudgeFeatures(Extractor):
    """The features of the model's own judge, and what it takes pictures for."""

    def __init__(self, folder: Path, device: torch.device):
        self.judge, self.device = read_judge(folder, device), device
        self.side = self.judge.config.size

    @classmethod
    def open(cls, folder: Path, device: torch.device) -> Self:
        """The judge of a model folder."""
        if not has_judge(folder):
            raise InputError(
                f"model {folder.name} has no judge; make one with `lanternpp train judge`, "
                "or use --features inception with --reference DIR"
            )
        return cls(folder, device)

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Images [B, 3, side, side] uint8 -> features [B, F]."""
        return self.judge.features(images.to(self.device).float() / 127.5 - 1)

    @torch.inference_mode()
    def labels(self, features: Tensor) -> Tensor:
        """Features [B, F] -> the most likely label of each, [B]."""
        return self.judge.labels(features.to(self.device)).argmax(-1).cpu()


EXTRACTORS: dict[str, type[Extractor] | str] = {
    "judge": JudgeFeatures,
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
