"""Pictures for a classifier to learn from: with labels and captions, varied from step to step, and as a tokenizer draws them again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autoencoders import redraw
from common import tokenizer_of
from lanternpp.errors import InputError
from lanternpp.evaluation.classifier import ClassifierConfig
from lanternpp.models.vq.autoencoder import Autoencoder, channels_last, read_tokenizer
from lanternpp.models.vq.codes import hashes
from lanternpp.training.codes import Done, Shard, build_shards, generator, read_file
from lanternpp.training.team import compute_dtype
from lanternpp.util.files import digest
from pictures import Pictures, to_bytes
from words import split_words

COMMON = 0.01  # a word is learned where at least this share of the captions says it
PART, BATCH = 512, 32  # pictures drawn again that a file has, and that are drawn at once


class LabelledPictures(NamedTuple):
    """Pictures [M, 3, H, W], their labels [M] and words [M, W] (0 or 1)."""

    pictures: Pictures
    labels: Tensor
    words: Tensor


def vocabulary(texts: list[str], labels: list[str]) -> tuple[str, ...]:
    """The words of captions that many say and no label does."""
    said = Counter(word for text in texts for word in set(split_words(text)))
    label_words = {word for label in labels for word in split_words(label)}
    return tuple(sorted(w for w, n in said.items() if n >= COMMON * len(texts) and w not in label_words))


def label_pictures(pictures: Pictures, config: ClassifierConfig) -> LabelledPictures:
    """Pictures with the words of their captions and their labels. Raises InputError where a label is not known."""
    texts, labels = pictures.texts, pictures.labels
    unknown = sorted(set(labels) - set(config.labels))
    if unknown:
        raise InputError(
            f"val/ has labels that train/ lacks: {', '.join(unknown[:10])}; add pictures of them to train/, or take them out of val/."
        )
    numbers = torch.tensor([config.labels.index(label) for label in labels])
    words = [[float(w in said) for w in config.words] for said in map(split_words, texts)]
    return LabelledPictures(pictures, numbers, torch.tensor(words).view(len(texts), len(config.words)))


def augment(images: Tensor, generator: torch.Generator, side: int) -> Tensor:
    """Images [B, 3, H, H] in [-1, 1], each zoomed in, mirrored, recoloured and blurred a little, at random.

    Returns [B, 3, side, side]. Blur and recolouring are mild: a classifier that ignores them
    entirely could not tell good pictures from bad.
    """
    device, count = images.device, len(images)
    draw = torch.rand(8, count, generator=generator).to(device)
    zoom = 1 - 0.3 * draw[0]  # the side of the crop
    turn = torch.where(draw[1] < 0.5, -zoom, zoom)
    zero = torch.zeros_like(zoom)
    shift = (2 * draw[2:4] - 1) * (1 - zoom)
    theta = torch.stack((turn, zero, shift[0], zero, zoom, shift[1]), -1).view(count, 2, 3)
    grid = F.affine_grid(theta, [count, 3, side, side], align_corners=False)
    images = F.grid_sample(images, grid, "bilinear", "reflection", align_corners=False)
    bright, contrast, colour, soft = ((2 * draw[i] - 1).view(-1, 1, 1, 1) for i in range(4, 8))
    grey = images.mean(1, keepdim=True)
    images = grey + (images - grey) * (1 + 0.3 * colour)
    middle = images.mean((1, 2, 3), keepdim=True)
    images = middle + (images - middle) * (1 + 0.25 * contrast) + 0.2 * bright
    kernel = torch.tensor([1.0, 2.0, 1.0], device=device) / 4
    blurred = F.conv2d(images, (kernel[:, None] * kernel).expand(3, 1, 3, 3), padding=1, groups=3)
    return images.lerp(blurred, soft.clamp_min(0)).clamp(-1, 1)


def redrawn(
    model: Path, pictures: Mapping[str, Pictures], split: str, index: Tensor, device: torch.device
) -> Pictures:
    """Pictures index [M] of a split, random crops (train) or centres (val), as the tokenizer of `model` draws them again.

    They are kept in `model/codes` for the next run. index: evenly over the pictures.
    """
    vq = channels_last(read_tokenizer(tokenizer_of(model), compute_dtype(device), kind=Autoencoder))
    on, size = pictures[split].to(device), vq.config.size
    vq.to(device)

    def compute(parts: Sequence[range], done: Done) -> Iterator[Shard]:
        num_done = 0
        for part in parts:
            pixels = list[Tensor]()
            for which in index[part.start : part.stop].split(BATCH):
                first = part.start + BATCH * len(pixels)
                crops = on.random(generator(0, first), which) if split == "train" else on.centre(which)
                pixels.append(to_bytes(redraw(vq, vq.encode(crops))).permute(0, 3, 1, 2).cpu())
                num_done += len(which)
                done(num_done)
            yield {"pixels": torch.cat(pixels)}, {}

    key = digest([*hashes(vq), *(pictures[name].key for name in ("train", "val")), str(len(index))])
    what = f"{split} pictures drawn again with the tokenizer"
    paths = build_shards(model / "codes" / f"redrawn-{split}-{key}", len(index), PART, compute, what)
    empty = torch.empty(0, 3, size, size, dtype=torch.uint8)
    pixels = torch.cat([empty, *(read_file(path, "pixels")[0]["pixels"] for path in paths)])
    return Pictures(pixels, torch.tensor([size, size]).expand(len(pixels), 2), size, key)
