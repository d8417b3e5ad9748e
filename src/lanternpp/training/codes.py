"""The pictures as codes: every training picture in several crops and both ways round, encoded once."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lanternpp.devices import half_width
from lanternpp.errors import InputError
from lanternpp.nn.checkpoints import CONFIG, digest, replacing, sweep
from lanternpp.training.data import Order, Pictures, Rows, generator, read_rows
from lanternpp.training.report import Report
from lanternpp.training.shards import Shards
from lanternpp.vq.folder import read_vq
from lanternpp.vq.reading import Reader

PART = 16  # batches of pictures in a shard


@dataclass(frozen=True)
class Split:
    """One split: codes [M, variants, length] uint16; M captions and labels ("" where there is none)."""

    codes: Tensor
    texts: tuple[str, ...]
    labels: tuple[str, ...]

    def __len__(self) -> int:
        return self.codes.shape[0]

    def pick(self, index: Tensor, variant: Tensor) -> Tensor:
        """Pictures index [B] in variants [B] -> codes [B, length] int64."""
        return self.codes[index, variant].long()


@dataclass(frozen=True)
class Codes:
    """Training pictures in 2 x crops variants (crop by crop, as it is then mirrored), validation ones in one."""

    train: Split
    val: Split
    data: dict[str, Any]  # for the provenance


class Variants:
    """Which variant of each picture an epoch shows: all of them once before any comes again."""

    def __init__(self, order: Order, variants: int):
        generator_ = generator(order.seed, order.count, variants)
        self.order = order
        self.turns = torch.rand(order.count, variants, generator=generator_).argsort(1)

    def __call__(self, step: int) -> tuple[Tensor, Tensor, torch.Generator]:
        """(pictures [B], their variants [B], generator) of a step."""
        index, generator_ = self.order(step)
        epoch = step // self.order.per_epoch
        return index, self.turns[index, epoch % self.turns.shape[1]], generator_


def tokenizer_of(model: Path) -> Path:
    """The tokenizer's folder; an error that names the command to run first where there is none yet."""
    folder = model / "tokenizer"
    if not (folder / CONFIG).is_file():
        raise InputError(
            f"{folder} holds no tokenizer: run `lanternpp train tokenizer --data DIR --model {model}` first."
        )
    return folder


def read_codes(
    data: Path, model: Path, crops: int, device: torch.device, limit: int | None = None, batch: int = 32
) -> Codes:
    """The codes of `data` under the tokenizer of `model`, from `model/codes` or encoded now into it."""
    vq = read_vq(
        tokenizer_of(model), torch.bfloat16 if half_width(device) is torch.bfloat16 else torch.float32
    )
    return codes_of(data, model / "codes", vq.to(device).reader(), crops, limit, batch)


def codes_of(
    data: Path, store: Path, reader: Reader, crops: int, limit: int | None = None, batch: int = 32
) -> Codes:
    """The codes that `reader` sees in the pictures of `data`, from the folder `store` or encoded now into it."""
    rows = splits_of(data)
    path = store / f"{codes_key(rows, reader, crops, limit)}.safetensors"
    if not path.is_file():
        encode(data, rows, path, reader, crops, limit, batch)
    return load(path)


def splits_of(data: Path) -> dict[str, Rows]:
    """The rows of both splits. InputError as `read_rows`."""
    return {split: read_rows(data, split) for split in ("train", "val")}


def codes_key(rows: Mapping[str, Rows], reader: Reader, crops: int, limit: int | None) -> str:
    """The name of what a reader sees in pictures. InputError where there is nothing to see."""
    for name, value in (("--crops", crops), ("--limit", limit)):
        if value is not None and value < 1:
            raise InputError(f"{name} {value} must be at least 1.")
    return digest([*reader.key, *(part.key for part in rows.values()), f"{crops} {limit}"])


def load(path: Path) -> Codes:
    """A cache file."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["facts"])
            splits = {
                name: Split(file.get_tensor(name), tuple(facts[name]["texts"]), tuple(facts[name]["labels"]))
                for name in ("train", "val")
            }
    except Exception as error:  # whatever is wrong with a cache, the cure is the same
        raise InputError(
            f"{path} cannot be read ({error}): delete it to encode the pictures again."
        ) from None
    return Codes(splits["train"], splits["val"], facts["data"])


def encode(
    data: Path, rows: dict[str, Rows], path: Path, reader: Reader, crops: int, limit: int | None, batch: int
) -> None:
    """Encode both splits and write them as one file; until it is whole, what is done is kept in shards beside it."""
    if reader.codes > 2**16:
        raise InputError(f"a tokenizer of {reader.codes} codes is too large: training takes up to {2**16}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    report = Report("codes", path.parent)
    pictures = {split: Pictures.read(data, split, reader.size, limit) for split in rows}
    train, val = pictures["train"], pictures["val"]
    total = len(train) * crops * 2 + len(val)
    report.say(
        f"encoding {len(train)} pictures x {crops} crops x 2 ways, and {len(val)} to validate: "
        f"{total} x {reader.length} codes, {total * reader.length * 2 / 2**20:.0f} MiB in {path}"
    )
    began, tally, spoken = time.monotonic(), 0, False
    sweep(path.parent)
    pieces = [
        (name, variant, index)
        for name, split in pictures.items()
        for variant in range(1 if name == "val" else 2 * crops)
        for index in torch.arange(len(split)).split(batch * PART)
    ]
    shards = Shards(path.with_name(f"{path.stem}-{len(train)}-{len(val)}"), len(pieces))
    missing = set(shards.missing)
    left = total - sum(len(index) for i, (_, _, index) in enumerate(pieces) if i not in missing)
    tensors = {
        "train": torch.empty(len(train), 2 * crops, reader.length, dtype=torch.uint16),
        "val": torch.empty(len(val), 1, reader.length, dtype=torch.uint16),
    }
    ready = {name: split.to(reader.device) for name, split in pictures.items()}
    with report.bar(0.0):
        for place, (name, variant, piece) in enumerate(pieces):
            into = tensors[name][piece[0] : piece[-1] + 1, variant]
            if place not in missing:
                into.copy_(shards.read(place)[0]["codes"])
                continue
            for index, part in zip(piece.split(batch), into.split(batch), strict=True):
                on, number = ready[name], int(index[0]) // batch
                images = on.centre(index) if name == "val" else view(on, index, variant, number)
                part.copy_(reader.encode(images))
                tally += len(index)
                gone = time.monotonic() - began
                if not spoken and gone > 3:
                    spoken = True
                    report.say(
                        f"{tally / gone:.0f} pictures a second: about {left / tally * gone / 60:.1f} min"
                    )
                report.advance(gone, (total - left + tally) / total, f"{total - left + tally}/{total}")
            shards.write(place, {"codes": into}, {})
    facts: dict[str, Any] = {name: named(rows[name], pictures[name], limit) for name in pictures}
    facts["data"] = {
        "folder": data.resolve().name,
        "train": len(train),
        "val": len(val),
        "crops": crops,
        "skipped": [*train.skipped, *val.skipped][:20],
        "hash": digest([train.key, val.key]),
        "codes": path.stem,
    }
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"facts": json.dumps(facts)})
    shutil.rmtree(shards.folder)


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
