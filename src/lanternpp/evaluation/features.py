"""Networks that measure pictures: extractors of features, by name in `EXTRACTORS`, and CLIP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.evaluation.classifier import has_classifier, read_classifier
from lanternpp.evaluation.pictures import square, to_pixels
from lanternpp.models.hub import quiet
from lanternpp.nn.files import input_errors
from lanternpp.util.terminal import track

CLIP_EXAMPLE = "openai/clip-vit-base-patch32"


class Extractor(ABC):
    """A network that maps pictures to features; similar pictures have features close together."""

    side: int  # pixels of the square pictures it takes

    def __init__(self, folder: Path, device: torch.device):
        """Make the extractor for a model folder, on a device; raise InputError if it cannot be had."""
        self.device = device

    @abstractmethod
    def __call__(self, images: Tensor) -> Tensor:
        """Compute the features [B, F] float32 of images [B, 3, side, side] uint8."""


class ClassifierFeatures(Extractor):
    """The features of the model's own classifier, and the labels it predicts."""

    def __init__(self, folder: Path, device: torch.device):
        """Read the classifier of a model folder; raise InputError if there is none."""
        super().__init__(folder, device)
        if not has_classifier(folder):
            raise InputError(
                f"model {folder.name} has no classifier; make one with `python recipes/nature/classifier.py`, "
                "or use --features inception with --reference DIR"
            )
        self.classifier = read_classifier(folder, device)
        self.side = self.classifier.config.size

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Compute the features [B, F] of images [B, 3, side, side] uint8."""
        return self.classifier.features(images.to(self.device).float() / 127.5 - 1)

    @torch.inference_mode()
    def labels(self, features: Tensor) -> Tensor:
        """Return the indices [B] of the most likely labels of features [B, F]."""
        return self.classifier.labels(features.to(self.device)).argmax(-1).cpu()


class Inception(Extractor):
    """The 2,048 features of the last pooling layer of FID's InceptionV3 (weights of 2015-12-05), from torch-fidelity.

    `extract` resizes pictures by an antialiased bicubic filter, as in clean-fid (arXiv 2104.11222).
    """

    side = 299

    def __init__(self, folder: Path, device: torch.device):
        """Read the network, which is the same for every model folder; its weights are fetched once. Raise InputError."""
        super().__init__(folder, device)
        try:
            package = import_module("torch_fidelity.feature_extractor_inceptionv3")
        # A torchvision made for another torch ends in a RuntimeError.
        except (ImportError, RuntimeError) as error:
            raise InputError(
                f"features inception need a package ({error}); pip install torch-fidelity and the torchvision "
                f"for torch {torch.__version__}, or use --features classifier"
            ) from None
        remedy = (
            "put weights-inception-2015-12-05-6726825d.pth of torch-fidelity's release v0.2.0 into "
            f"{Path(torch.hub.get_dir()) / 'checkpoints'}, or use --features classifier"
        )
        with input_errors("the weights of features inception cannot be had", remedy):
            network = package.FeatureExtractorInceptionV3("inception-v3-compat", ["2048"])
        self.network = network.eval().requires_grad_(False).to(device)

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Compute the features [B, 2048] of images [B, 3, 299, 299] uint8."""
        return self.network(images.to(self.device))[0]


EXTRACTORS: dict[str, type[Extractor]] = {"classifier": ClassifierFeatures, "inception": Inception}


def extract(
    extractor: Extractor, images: Sequence[Image.Image], label: str = "measuring", batch: int = 32
) -> Tensor:
    """Compute the features [M, F] float32, on the CPU, of pictures of any size. label: of the progress bar."""
    features = []
    for start in track(label, range(0, len(images), batch)):
        indices = range(len(images))[start : start + batch]
        squares = torch.stack([to_pixels(square(images[i], extractor.side)) for i in indices])
        features.append(extractor(squares).float().cpu())
    return torch.cat(features)


class Clip:
    """A CLIP from a folder or a hub id, and its score (arXiv 2104.08718): how well pictures agree with their prompts."""

    def __init__(self, name: str, device: torch.device):
        """Read or fetch the model and its processor; raise InputError if `name` is no CLIP or cannot be had."""
        remedy = f"give the folder of a CLIP model with its processor, or a hub id such as {CLIP_EXAMPLE}"
        with quiet(), input_errors(f"--clip {name} cannot be had", remedy):
            from transformers import AutoConfig, CLIPModel, CLIPProcessor

            kind = AutoConfig.from_pretrained(name, trust_remote_code=False).model_type
            if kind != "clip":
                raise InputError(
                    f"--clip {name} holds a model of type {kind}; give a CLIP, such as {CLIP_EXAMPLE}"
                )
            model = CLIPModel.from_pretrained(name, dtype=torch.float32, trust_remote_code=False)
            self.processor = CLIPProcessor.from_pretrained(name, trust_remote_code=False)
        self.model: Any = model.eval().requires_grad_(False).to(device)
        self.device = device

    @torch.inference_mode()
    def score(
        self,
        images: Sequence[Image.Image],
        prompts: Sequence[str | None],
        label: str = "measuring",
        batch: int = 32,
    ) -> float | None:
        """Return 100 x the mean cosine between a picture and its prompt, a negative cosine counted as 0 (equation 1, w = 100).

        Pictures without a prompt are left out; without any prompt the score is None.
        """
        with_prompt = [i for i, prompt in enumerate(prompts) if prompt]
        total = 0.0
        for start in track(label, range(0, len(with_prompt), batch)):
            indices = with_prompt[start : start + batch]
            inputs = self.processor(
                text=[prompts[i] for i in indices],
                images=[images[i].convert("RGB") for i in indices],
                return_tensors="pt",
                padding=True,
                truncation=True,
            ).to(self.device)
            outputs = self.model(**inputs)
            total += F.cosine_similarity(outputs.image_embeds, outputs.text_embeds).clamp_min(0).sum().item()
        return 100 * total / len(with_prompt) if with_prompt else None
