"""The pictures as codes: every training picture in several crops and both ways round, encoded once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.models.vq.folder import read_tokenizer
from lanternpp.models.vq.reading import Reader
from lanternpp.nn.checkpoints import CONFIG
from lanternpp.training.data import BatchSampler, Pictures, Rows, describe, generator, read_rows
from lanternpp.training.material.shards import Facts, Shards, Tensors, file_of, join, parts_of
from lanternpp.util.devices import half_width
from lanternpp.util.files import digest

PART = 16  # batches of pictures in a shard


@dataclass(frozen=True)
class Split:
    """One split: codes [M, variants, length] uint16, or moments [M, variants, length, 2 C] float16; M captions and labels.

    A label is "" where there is none.
    """

    codes: Tensor
    texts: tuple[str, ...]
    labels: tuple[str, ...]

    def __len__(self) -> int:
        return self.codes.shape[0]

    def pick(self, index: Tensor, variant: Tensor) -> Tensor:
        """Pictures index [B] in variants [B] -> codes [B, length] int64, or moments [B, length, 2 C] float32."""
        found = self.codes[index, variant]
        return found.float() if found.is_floating_point() else found.long()


@dataclass(frozen=True)
class Codes:
    """Training pictures in 2 x crops variants (each crop as it is, then mirrored), validation ones in one."""

    train: Split
    val: Split
    data: dict[str, Any]  # for the provenance


class VariantSampler:
    """Which variant of each picture an epoch shows: all of them once before any comes again."""

    def __init__(self, sampler: BatchSampler, variants: int):
        generator_ = generator(sampler.seed, sampler.count, variants)
        self.sampler = sampler
        self.variant_order = torch.rand(sampler.count, variants, generator=generator_).argsort(1)

    def __call__(self, step: int) -> tuple[Tensor, Tensor, torch.Generator]:
        """(pictures [B], their variants [B], generator) of a step."""
        index, generator_ = self.sampler(step)
        epoch = step // self.sampler.per_epoch
        return index, self.variant_order[index, epoch % self.variant_order.shape[1]], generator_


def tokenizer_of(model: Path) -> Path:
    """The tokenizer's folder; an error that names the command to run first where there is none yet."""
    folder = model / "tokenizer"
    if not (folder / CONFIG).is_file():
        raise InputError(
            f"{folder} holds no tokenizer: run recipes/nature/tokenizer.py --data DIR --model {model} first."
        )
    return folder


def read_codes(
    data: Path, model: Path, crops: int, device: torch.device, limit: int | None = None, batch: int = 32
) -> Codes:
    """The codes of `data` under the tokenizer of `model`, from `model/codes` or encoded now into it."""
    vq = read_tokenizer(
        tokenizer_of(model), torch.bfloat16 if half_width(device) is torch.bfloat16 else torch.float32
    )
    return codes_of(data, model / "codes", vq.to(device).reader(), crops, limit, batch)


def codes_of(
    data: Path, store: Path, reader: Reader, crops: int, limit: int | None = None, batch: int = 32
) -> Codes:
    """The codes that `reader` sees in the pictures of `data`, from the folder `store` or encoded now into it."""
    rows = splits_of(data)
    path = store / f"{codes_key(rows, reader, crops, limit)}.safetensors"

    def parse(tensors: Tensors, facts: Facts) -> Codes:
        train, val = (
            Split(tensors[name], tuple(facts[name]["texts"]), tuple(facts[name]["labels"]))
            for name in ("train", "val")
        )
        return Codes(train, val, facts["data"])

    return file_of(path, lambda: encode(data, rows, path, reader, crops, limit, batch), parse)


def splits_of(data: Path) -> dict[str, Rows]:
    """The rows of both splits. InputError as `read_rows`."""
    return {split: read_rows(data, split) for split in ("train", "val")}


def codes_key(rows: Mapping[str, Rows], reader: Reader, crops: int, limit: int | None) -> str:
    """The name of what a reader sees in pictures. InputError where crops or limit is below 1."""
    for name, value in (("--crops", crops), ("--limit", limit)):
        if value is not None and value < 1:
            raise InputError(f"{name} {value} must be at least 1.")
    return digest([*reader.key, *(part.key for part in rows.values()), f"{crops} {limit}"])


def encode(
    data: Path,
    rows: Mapping[str, Rows],
    path: Path,
    reader: Reader,
    crops: int,
    limit: int | None,
    batch: int,
) -> None:
    """Encode both splits and write them as one file: training pictures in all variants, the others in one."""
    if reader.codes > 2**16:
        raise InputError(f"a tokenizer of {reader.codes} codes is too large: training takes up to {2**16}.")
    pictures = {split: Pictures.read(data, split, reader.size, limit) for split in rows}
    train, val = pictures["train"], pictures["val"]
    places = (reader.length, *reader.each)
    shapes = {"train": (len(train), 2 * crops, *places), "val": (len(val), 1, *places)}
    about = f"encoding {len(train)} pictures x {crops} crops x 2 ways, and {len(val)} to validate"

    def compute() -> None:
        ready = {split: on_host.to(reader.device) for split, on_host in pictures.items()}
        for part in shards.pending(f"{about}: {shards.count} x {reader.length} codes, {shards.room}"):
            codes, on = [], ready[part.split]
            for index in shards.batches(batch):
                if part.split == "val":
                    images = on.centre(index)
                else:
                    images = view(on, index, part.variant or 0, int(index[0]) // batch)
                codes.append(reader.encode(images).cpu().to(reader.stored))
            shards.write({"codes": torch.cat(codes)})

    facts: Facts = {split: named(rows[split], pictures[split], limit) for split in rows}
    facts["data"] = describe(train, val, data) | {"crops": crops, "codes": path.stem}
    parts = [
        part
        for split, (count, variants, *_) in shapes.items()
        for variant in range(variants)
        for part in parts_of(count, batch * PART, split, variant)
    ]
    folder = path.with_name(f"{path.stem}-{len(train)}-{len(val)}")
    shards = Shards(folder, parts, "codes", "the codes of the pictures", 2 * math.prod(places))
    shards.fill(compute)
    join(path, shards, shapes, reader.stored, facts)


def view(pictures: Pictures, index: Tensor, variant: int, number: int) -> Tensor:
    """Variant `variant` of pictures index [B]: the first crop is the centre; odd variants are mirrored."""
    count, crop = len(index), variant // 2
    draw = torch.rand(3, count, generator=generator(crop, number))
    if crop == 0:
        draw = torch.tensor([0.5, 0.5, 1.0])[:, None].expand(3, count)
    return pictures.crops(index, draw[:2].t(), torch.full((count,), bool(variant % 2)), draw[2])


def named(rows: Rows, pictures: Pictures, limit: int | None) -> dict[str, list[str]]:
    """Captions and labels of the pictures that could be read."""
    skipped = set(pictures.skipped)
    kept = [i for i, name in enumerate(rows.files[:limit]) if name not in skipped]
    return {"texts": [rows.texts[i] for i in kept], "labels": [rows.labels[i] for i in kept]}


def unigram(codes: Codes, vocab: int) -> float:
    """Nats per validation code under the smoothed frequencies of the training codes: what context must beat."""
    train, val = (
        torch.bincount(split.codes.flatten().long(), minlength=vocab).double()
        for split in (codes.train, codes.val)
    )
    p = (train + 1) / (train + 1).sum()
    return -(val / val.sum() * p.log()).sum().item()
