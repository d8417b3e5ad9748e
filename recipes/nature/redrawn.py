"""Pictures as a model's tokenizer draws them again, so that a classifier learns from them beside photos."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from autoencoders import redraw
from common import tokenizer_of
from lanternpp.models.vq.autoencoder import Autoencoder, channels_last, read_tokenizer
from lanternpp.models.vq.codes import hashes
from lanternpp.training.codes import evenly_spaced, generator
from lanternpp.training.loop import compute_dtype
from lanternpp.training.material import Done, Material, Shard
from lanternpp.util.files import digest
from pictures import Pictures, to_bytes

PART, BATCH = 512, 32  # pictures in a file, and pictures drawn at once


def redrawn(
    model: Path, train: Pictures, val: Pictures, count: int, device: torch.device
) -> tuple[Tensor, Pictures, Pictures]:
    """(index [M] of training pictures, those drawn again, all validation pictures drawn again).

    M is at most `count`, evenly over the split. The pictures are kept in `model/codes` for the next run.
    InputError where `model` has no tokenizer.
    """
    dtype = compute_dtype(device)
    vq = channels_last(read_tokenizer(tokenizer_of(model), dtype, kind=Autoencoder)).to(device)
    index = evenly_spaced(len(train), count) if count else torch.empty(0, dtype=torch.int64)
    key = digest([*hashes(vq), train.key, val.key, str(len(index))])

    def draw(split: str, pictures: Pictures, chosen: Tensor) -> Pictures:
        def compute(parts: Sequence[range], done: Done) -> Iterator[Shard]:
            on = pictures.to(device)
            for part in parts:
                pixels = []
                for first in range(part.start, part.stop, BATCH):
                    which = chosen[first : min(first + BATCH, part.stop)]
                    crops = on.random(generator(0, first), which) if split == "train" else on.centre(which)
                    pixels.append(to_bytes(redraw(vq, vq.encode(crops))).permute(0, 3, 1, 2).cpu())
                    done(first + len(which) - part.start)
                yield {"pixels": torch.cat(pixels)}, {}

        folder, size = model / "codes" / f"redrawn-{split}-{key}", vq.config.size
        what = f"{split} pictures drawn again with the tokenizer"
        material = Material(folder, len(chosen), PART, compute, what, 3 * size**2).build()
        empty = torch.empty(0, 3, size, size, dtype=torch.uint8)
        pixels = torch.cat([empty, *(tensors["pixels"] for tensors, _ in material.read())])
        return Pictures(pixels, torch.tensor([size, size]).expand(len(pixels), 2), size, key)

    return index, draw("train", train, index), draw("val", val, torch.arange(len(val)))
