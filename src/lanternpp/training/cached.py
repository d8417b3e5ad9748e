"""A target's features of all training pictures, made once and kept in shards on disk."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from lanternpp.nn.checkpoints import digest
from lanternpp.targets.base import Target
from lanternpp.training import hardware
from lanternpp.training.codes import Split
from lanternpp.training.features import Captions, lessons
from lanternpp.training.report import Report
from lanternpp.training.shards import Shards, check_room, in_bytes

SHARD = 1 << 28  # bytes of a shard, about
BATCH = 8


class Features:
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


def features_of(
    target: Target, captions: Captions, origin: str, codes: Split, name: str, store: Path
) -> Features:
    """The features of a split, whose codes are called `name`, in `store`; what is missing is made now.

    InputError where the disk has no room for them.
    """
    like, pictures, variants = next(target.parameters()), len(codes), codes.codes.shape[1]
    slots = captions.slots + target.length - 1
    size = variants * 2 * slots * target.decoder.config.dim * like.element_size()  # of a picture
    each = max(min(SHARD // size, pictures), 1)
    key = digest([origin, name, str(like.dtype), str(captions.slots), str(each), *codes.texts])
    shards = Shards(store / f"features-{key}", -(-pictures // each))
    missing = shards.missing
    if not missing:
        return Features(shards, each)
    total = sum(min(each, pictures - number * each) for number in missing)
    check_room(shards.folder, total * size, "the features of all pictures")
    report = Report("features", store)
    report.say(
        f"keeping the target's features of {total} pictures x {variants}: {in_bytes(total * size)} in {shards.folder}"
    )
    began, done = time.monotonic(), 0
    with report.bar(0.0):
        for number in missing:
            index = torch.arange(number * each, min((number + 1) * each, pictures))
            parts = []
            for part in index.split(BATCH):
                parts.append(
                    torch.stack([made(target, captions, codes, part, v) for v in range(variants)], 1)
                )
                done += len(part)
                report.advance(time.monotonic() - began, done / total, f"{done}/{total} pictures")
            shards.write(number, {"features": torch.cat(parts).to(like.dtype)}, {"pictures": len(index)})
    return Features(shards, each)


@torch.no_grad()
def made(target: Target, captions: Captions, codes: Split, index: Tensor, variant: int) -> Tensor:
    """Features of pictures index [B] in a variant: [B, 2, S, D] on the CPU."""
    drawn = codes.pick(index, torch.full_like(index, variant)).to(target.decoder.turns.device)
    prompts, start = captions(index, 2)
    with hardware.autocast(drawn.device):
        _, features = lessons(target, prompts, drawn.repeat(2, 1), start)
    return torch.stack(features.chunk(2), 1).cpu()
