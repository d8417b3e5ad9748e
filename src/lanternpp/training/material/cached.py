"""A cache on disk of a target's features of all training pictures, computed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from lanternpp.models.base import Target
from lanternpp.training import hardware
from lanternpp.training.features import CaptionPrompts, drafter_inputs
from lanternpp.training.material.codes import Split
from lanternpp.training.material.shards import Shards, parts_of
from lanternpp.util.files import digest

SHARD = 1 << 28  # bytes of a shard, about
BATCH = 8


class FeatureCache:
    """Features of M pictures in their variants, of the conditional and of the unconditional prompt."""

    def __init__(self, shards: Shards, pictures: int):
        self.shards, self.each = shards, pictures
        self._files: dict[int, Any] = {}

    def __call__(self, index: Tensor, variant: Tensor, branches: int, drop: Tensor | None = None) -> Tensor:
        """Of pictures index [B] in variants [B]: [branches * B, S, D] on the CPU; unconditional where drop [B]."""
        rows = [self._one(i, v) for i, v in zip(index.tolist(), variant.tolist(), strict=True)]
        one, other = torch.stack(rows, 1)  # [B, S, D] twice
        if drop is not None:
            one = torch.where(drop[:, None, None], other, one)
        return torch.cat((one, other)) if branches == 2 else one

    def _one(self, index: int, variant: int) -> Tensor:
        number, place = divmod(index, self.each)
        if number not in self._files:
            self._files[number] = safe_open(self.shards.path(number), framework="pt").__enter__()
        piece = self._files[number].get_slice("features")
        found: Tensor = piece[place : place + 1, variant : variant + 1][0, 0]
        return found


def cached_features(
    target: Target, captions: CaptionPrompts, origin: str, codes: Split, name: str, store: Path
) -> FeatureCache:
    """The features of a split, whose codes are called `name`, in `store`; what is missing is made now.

    InputError where the disk has no room for them.
    """
    like, pictures, variants = next(target.parameters()), len(codes), codes.codes.shape[1]
    slots = captions.slots + target.length - 1
    size = variants * 2 * slots * target.decoder.config.dim * like.element_size()  # of a picture
    each = max(min(SHARD // size, pictures), 1)
    key = digest([origin, name, str(like.dtype), str(captions.slots), str(each), *codes.texts])

    def compute() -> None:
        line = f"keeping the target's features of {shards.count} pictures x {variants}: {shards.room}"
        for part in shards.pending(line):
            features = []
            for index in shards.batches(BATCH):
                made = [compute_features(target, captions, codes, index, v) for v in range(variants)]
                features.append(torch.stack(made, 1))
            shards.write({"features": torch.cat(features).to(like.dtype)}, {"pictures": len(part)})

    folder, parts = store / f"features-{key}", parts_of(pictures, each)
    shards = Shards(folder, parts, "features", "the features of all pictures", size)
    return FeatureCache(shards.build(compute), each)


@torch.no_grad()
def compute_features(
    target: Target, captions: CaptionPrompts, codes: Split, index: Tensor, variant: int
) -> Tensor:
    """Features of pictures index [B] in a variant: [B, 2, S, D] on the CPU."""
    drawn = codes.pick(index, torch.full_like(index, variant)).to(target.decoder.rotary_table.device)
    prompts, start = captions(index, 2)
    with hardware.autocast(drawn.device):
        _, features = drafter_inputs(target, prompts, drawn.repeat(2, 1), start)
    return torch.stack(features.chunk(2), 1).cpu()
