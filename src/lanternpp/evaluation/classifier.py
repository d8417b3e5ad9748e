"""A model's own classifier of the labels of its data, whose features stand in for Inception's.

The classifier is a residual network with pre-activation blocks (arXiv 1603.05027). It also predicts the words of the
caption, so that its features describe colours, skies and backgrounds, which do not matter for the label alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.nn import checkpoints
from lanternpp.nn.checkpoints import StageBlocks, Stages, Width, Words, config_as
from lanternpp.nn.sources import SAME, Source, blank
from lanternpp.util import files
from lanternpp.util.jsonfile import Between

CLASSIFIER = "classifier"  # the part of a model folder
REFERENCE = "reference.safetensors"


@dataclass(frozen=True)
class ClassifierConfig:
    """Shape of a classifier. The stem and every stage halve the sides of their input."""

    labels: Words
    words: Words = ()  # of the captions
    size: Annotated[int, Between(1, 1 << 12)] = 128  # pixels of a picture's side
    stem: Width = 24  # channels
    channels: Stages = (48, 96, 128)  # of the stages; the last is the number of features
    blocks: StageBlocks = (1, 2, 2)

    def __post_init__(self) -> None:
        if len(self.channels) != len(self.blocks):
            raise InputError("a classifier's channels and blocks need one entry per stage each.")
        if len(self.labels) < 2:
            raise InputError(
                f"a classifier distinguishes labels and there are {len(self.labels)}; give 2 or more."
            )


def norm(channels: int) -> nn.Module:
    """Return a group normalisation with 16 channels a group."""
    return nn.GroupNorm(max(channels // 16, 1), channels)


class Block(nn.Module):
    """A residual block: norm, SiLU, 3x3, norm, SiLU, 3x3."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.norm1, self.norm2 = norm(inputs), norm(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        same_shape = inputs == outputs and stride == 1
        self.skip = None if same_shape else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, outputs, H / stride, W / stride]."""
        h = F.silu(self.norm1(x))
        residual = x if self.skip is None else self.skip(h)
        return residual + self.conv2(F.silu(self.norm2(self.conv1(h))))


class Classifier(nn.Module):
    """A network that maps pictures to features, and features to the logits of labels and words."""

    def __init__(self, config: ClassifierConfig):
        super().__init__()
        self.config = config
        self.stem = nn.Conv2d(3, config.stem, 5, 2, 2, bias=False)
        layers: list[nn.Module] = []
        inputs = config.stem
        for channels, blocks in zip(config.channels, config.blocks, strict=True):
            layers.append(Block(inputs, channels, stride=2))
            layers += [Block(channels, channels, stride=1) for _ in range(blocks - 1)]
            inputs = channels
        self.stages = nn.Sequential(*layers, norm(inputs), nn.SiLU())
        self.labels = nn.Linear(inputs, len(config.labels))
        self.words = nn.Linear(inputs, len(config.words)) if config.words else None

    def features(self, images: Tensor) -> Tensor:
        """Return the features [B, F] of images [B, 3, H, W] in [-1, 1]: the mean of the last stage over its positions."""
        x = images.contiguous(memory_format=torch.channels_last)
        return self.stages(self.stem(x)).float().mean((2, 3))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the labels [B, L] and of the words [B, W] for images [B, 3, H, W] in [-1, 1]."""
        features = self.features(images)
        words = features[:, :0] if self.words is None else self.words(features)
        return self.labels(features), words


def has_classifier(folder: Path) -> bool:
    """Return whether a model folder holds a classifier."""
    return (folder / CLASSIFIER / checkpoints.CONFIG).is_file()


def read_classifier(folder: Path, device: torch.device | str = "cpu") -> Classifier:
    """Read the classifier of a model folder, in float32; raise InputError, which names the wrong file."""
    source = folder / CLASSIFIER
    config = config_as(ClassifierConfig, checkpoints.load_config(source), source)
    with blank(source):
        classifier = Classifier(config)
    Source.open(source / checkpoints.WEIGHTS).fill(classifier, [SAME], torch.float32)
    classifier.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return classifier.eval().requires_grad_(False).to(device)


def fingerprint(classifier: nn.Module) -> str:
    """Return a hash of a classifier's weights, by which features are known to be of the same classifier."""
    tensors = sorted(classifier.state_dict().items())
    return files.digest(f"{name} {checkpoints.checksum(tensor)}" for name, tensor in tensors)
