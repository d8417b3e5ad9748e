"""A perceptual loss (LPIPS, arXiv 1801.03924): how far apart two pictures are in the features of a classifier."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lanternpp.evaluation.classifier import Block, Classifier


class Perceptual(nn.Module):
    """Squared distance of unit features, summed over the stages of a classifier and averaged over places.

    Every stage counts as it is, without the learned weights of the paper.
    """

    def __init__(self, classifier: Classifier):
        super().__init__()
        self.classifier = classifier.eval().requires_grad_(False)

    def features(self, images: Tensor) -> list[Tensor]:
        """Images [B, 3, H, W] in [-1, 1] -> the features [B, C, h, w] after the stem and after every stage."""
        x = self.classifier.stem(images.contiguous(memory_format=torch.channels_last))
        found = [x]
        for layer in self.classifier.stages:
            if not isinstance(layer, Block):
                break  # the last norm and activation
            x = layer(x)
            if found[-1].shape[1:] == x.shape[1:]:
                found.pop()  # a later block of the same stage
            found.append(x)
        return found

    def forward(self, images: Tensor, truth: Tensor) -> Tensor:
        """Two batches of images [B, 3, H, W] in [-1, 1] -> their mean distance, with a gradient for the first."""
        with torch.no_grad():
            aims = [unit(x) for x in self.features(truth)]
        pairs = zip(self.features(images), aims, strict=True)
        return torch.stack([(unit(x) - aim).square().sum(1).mean() for x, aim in pairs]).sum()


def unit(features: Tensor) -> Tensor:
    """Features [B, C, H, W] of length 1 at every place."""
    x = features.float()
    return x * (x.square().sum(1, keepdim=True) + 1e-6).rsqrt()
