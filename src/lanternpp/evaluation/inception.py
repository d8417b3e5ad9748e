"""The Inception network that published FIDs are measured with, from the package torch-fidelity."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.evaluation.features import Extractor


class Inception(Extractor):
    """The 2,048 features of the last pooling layer of FID's InceptionV3 (weights of 2015-12-05).

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
        try:
            network = package.FeatureExtractorInceptionV3("inception-v3-compat", ["2048"])
        except (OSError, RuntimeError) as error:  # no network, no room, a broken file
            where = Path(torch.hub.get_dir()) / "checkpoints"
            raise InputError(
                f"the weights of features inception cannot be had ({error}); put "
                f"weights-inception-2015-12-05-6726825d.pth of torch-fidelity's release v0.2.0 into {where}, "
                "or use --features classifier"
            ) from None
        return cls(network.eval().requires_grad_(False).to(device), device)

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Images [B, 3, 299, 299] uint8 -> features [B, 2048]."""
        return self.network(images.to(self.device))[0]
