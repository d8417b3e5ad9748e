"""Extractors of the features by which pictures are compared; `EXTRACTORS` lists them by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch
from PIL import Image
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.evaluation.classifier import has_classifier, read_classifier
from lanternpp.evaluation.pictures import squares
from lanternpp.nn.files import wrong_file
from lanternpp.util.progress import Progress


class Extractor(ABC):
    """Maps pictures to features; similar pictures have features close together."""

    side: int  # pixels of the squares it is given

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


class Inception(Extractor):
    """The 2,048 features of the last pooling layer of FID's InceptionV3 (weights of 2015-12-05), from torch-fidelity.

    Pictures come resized by an antialiased bicubic filter, as in clean-fid (arXiv 2104.11222).
    """

    side = 299

    def __init__(self, network: Any, device: torch.device):
        self.network, self.device = network, device

    @classmethod
    def open(cls, folder: Path, device: torch.device) -> Self:
        """The network; its weights are fetched when first used. It is the same for every model folder."""
        try:
            package = import_module("torch_fidelity.feature_extractor_inceptionv3")
        except ImportError as error:
            raise InputError(
                f"features inception need a package ({error}); "
                "pip install torch-fidelity torchvision, or use --features classifier"
            ) from None
        remedy = (
            "put weights-inception-2015-12-05-6726825d.pth of torch-fidelity's release v0.2.0 into "
            f"{Path(torch.hub.get_dir()) / 'checkpoints'}, or use --features classifier"
        )
        with wrong_file("the weights of features inception cannot be had", remedy):
            network = package.FeatureExtractorInceptionV3("inception-v3-compat", ["2048"])
        return cls(network.eval().requires_grad_(False).to(device), device)

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Images [B, 3, 299, 299] uint8 -> features [B, 2048]."""
        return self.network(images.to(self.device))[0]


EXTRACTORS: dict[str, type[Extractor]] = {"classifier": ClassifierFeatures, "inception": Inception}


def extract(
    extractor: Extractor,
    images: Sequence[Image.Image],
    progress: Progress | None = None,
    batch: int = 32,
) -> Tensor:
    """The features of pictures of any size, [M, F] float32 on the CPU."""
    parts = squares(images, extractor.side, batch, progress)
    return torch.cat([extractor(part).float().cpu() for part in parts])
