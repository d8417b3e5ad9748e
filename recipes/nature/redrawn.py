"""Pictures as a model's tokenizer draws them again, so that a classifier learns from them beside photos."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lanternpp.models.vq.folder import read_tokenizer
from lanternpp.models.vq.model import Autoencoder, channels_last
from lanternpp.nn.checkpoints import checksum
from lanternpp.training.data import Pictures, evenly_spaced, generator
from lanternpp.training.material.codes import PART, tokenizer_of
from lanternpp.training.material.shards import Shards, file_of, join, parts_of
from lanternpp.training.pictures import to_bytes
from lanternpp.util.devices import half_width
from lanternpp.util.files import digest


def redrawn(
    model: Path, train: Pictures, val: Pictures, count: int, device: torch.device
) -> tuple[Tensor, Pictures, Pictures]:
    """(index [M] of training pictures, those drawn again, all validation pictures drawn again).

    M is at most `count`, evenly over the split. What is drawn is kept in `model/codes` for the next run.
    Raises InputError where `model` has no tokenizer.
    """
    vq = read_tokenizer(tokenizer_of(model), torch.bfloat16 if half_width(device) else torch.float32)
    index = evenly_spaced(len(train), count) if count else torch.empty(0, dtype=torch.int64)
    parts = [checksum(tensor.float()) for tensor in vq.weights().values()]
    key = digest([*parts, train.key, val.key, str(len(train)), str(len(index))])
    path = model / "codes" / f"redrawn-{key}.safetensors"
    return file_of(
        path,
        lambda: draw_again(path, channels_last(vq).to(device), train, val, index),
        lambda tensors, _: (index, as_pictures(tensors["train"], key), as_pictures(tensors["val"], key)),
    )


def as_pictures(pixels: Tensor, key: str) -> Pictures:
    """Squares [M, 3, H, H] uint8 as pictures."""
    sizes = torch.tensor(pixels.shape[2:]).expand(len(pixels), 2)
    return Pictures(pixels, sizes, (), (), key, pixels.shape[2])


def draw_again(
    path: Path, vq: Autoencoder, train: Pictures, val: Pictures, index: Tensor, batch: int = 32
) -> None:
    """Random crops of the training pictures index [M] and the centres of the others, drawn again."""
    chosen, size = {"train": index, "val": torch.arange(len(val))}, vq.config.size
    shapes = {split: (len(which), 3, size, size) for split, which in chosen.items()}

    def compute() -> None:
        device = next(vq.parameters()).device
        ready = {"train": train.to(device), "val": val.to(device)}
        for part in shards.pending(
            f"drawing {shards.count} pictures again with the tokenizer, {shards.room}"
        ):
            pixels, on = [], ready[part.split]
            for rows in shards.batches(batch):
                which = chosen[part.split][rows]
                if part.split == "train":
                    images = on.random(generator(0, int(rows[0]) // batch), which)
                else:
                    images = on.centre(which)
                pixels.append(to_bytes(vq.redraw(vq.encode(images))).permute(0, 3, 1, 2).cpu())
            shards.write({"pixels": torch.cat(pixels)})

    parts = [part for split, shape in shapes.items() for part in parts_of(shape[0], batch * PART, split)]
    shards = Shards(path.with_suffix(""), parts, "redrawn", "the pictures drawn again", 3 * size**2)
    shards.fill(compute)
    join(path, shards, shapes, torch.uint8, {})
