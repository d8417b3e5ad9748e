"""The codes that a drafter learns from: of the pictures in a folder, of the target's own pictures, or as a folder has them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lanternpp.accept.exact import Exact
from lanternpp.api.model import pack_target
from lanternpp.engine.batching import generate
from lanternpp.engine.decode import engine_class
from lanternpp.engine.guidance import Guidance
from lanternpp.errors import InputError
from lanternpp.evaluation.prompts import PROMPTS, read_prompts
from lanternpp.models.base import Target
from lanternpp.models.vq.reading import Reader
from lanternpp.nn.checkpoints import checksum
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.training.material import Done, Material, Shard, parts_of, read_file
from lanternpp.training.pictures import Rows, crop, decode, read_rows
from lanternpp.training.teacher import Teacher
from lanternpp.util.files import digest

PART, BATCH = 128, 32  # pictures in a shard, and pictures encoded at once
MOST_CODES = 2**16  # of a vocabulary, as codes are kept in 16 bits
CORRUPT = 0.01  # share of unreadable pictures above which a folder is refused
HELD_OUT = 10  # one prompt of this many is held out for validation
MIN_HELD_OUT, MAX_HELD_OUT = 4, 96  # validation pictures
MIN_PICTURES = 100  # training pictures, where the user does not say how many


class DataWarning(UserWarning):
    """A part of the data that is left out."""


@dataclass(frozen=True)
class Split:
    """One split: codes [M, variants, length] uint16, or moments [M, variants, length, 2 C] float16; M captions and labels.

    A label is "" where there is none.
    """

    codes: Tensor
    texts: tuple[str, ...]
    labels: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.codes.shape[0]

    def pick(self, index: Tensor, variant: Tensor | None = None) -> Tensor:
        """Pictures index [B] in variants [B], by default the first -> codes [B, length] int64, or moments [B, length, 2 C] float32."""
        found = self.codes[index, 0 if variant is None else variant]
        return found.float() if found.is_floating_point() else found.long()


@dataclass(frozen=True)
class Codes:
    """Training pictures in some variants, validation ones in one."""

    train: Split
    val: Split
    data: dict[str, Any]  # for the provenance; "codes" is the key


class Sampler:
    """The pictures of a step, which variant of each, and a generator for its noise: functions of (seed, step).

    An epoch shows every picture once; all variants of a picture come before any comes again.
    """

    def __init__(self, count: int, variants: int, batch: int, seed: int):
        self.count, self.batch, self.seed = count, min(batch, count), seed
        self.per_epoch = count // self.batch
        order = torch.rand(count, variants, generator=generator(seed, count, variants))
        self.variant_order = order.argsort(1)
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def __call__(self, step: int) -> tuple[Tensor, Tensor, torch.Generator]:
        """(pictures [B], their variants [B], generator) of a step."""
        epoch, place = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._order = torch.randperm(self.count, generator=generator(self.seed, epoch, 0))
            self._epoch = epoch
        index = self._order[place * self.batch :][: self.batch]
        variant = self.variant_order[index, epoch % self.variant_order.shape[1]]
        return index, variant, generator(self.seed, step, 1)


def generator(*parts: int) -> torch.Generator:
    """A CPU generator seeded by a tuple of integers."""
    return torch.Generator().manual_seed(int(digest([str(part) for part in parts])[:15], 16))


def evenly_spaced(count: int, most: int) -> Tensor:
    """At most `most` indices, evenly over `count`."""
    return torch.linspace(0, count - 1, min(count, most)).round().long()


class PictureCodes:
    """The codes that a reader sees in the pictures of an imagefolder: training ones in 2 x crops variants.

    A variant is a crop, the first one the centre, as it is or mirrored.
    """

    def __init__(self, data: Path, reader: Reader, store: Path, crops: int = 2, limit: int | None = None):
        if reader.codes > MOST_CODES:
            raise InputError(
                f"a tokenizer of {reader.codes} codes is too large: training takes up to {MOST_CODES}."
            )
        self.data, self.reader, self.store, self.crops = data, reader, store, crops
        self.rows = {split: read_rows(data, split, limit) for split in ("train", "val")}
        self.key = digest([*reader.key, *(rows.key for rows in self.rows.values()), str(crops)])

    def build(self) -> Codes:
        """The codes, from the folder `store` or encoded now into it. Unreadable pictures are named in a warning and left out.

        InputError where they are too many.
        """
        splits, skipped = {}, list[str]()
        for split, rows in self.rows.items():
            shards = list(self._material(split, rows).build().read())
            facts = {
                name: [x for _, fact in shards for x in fact[name]] for name in ("texts", "labels", "skipped")
            }
            codes = torch.cat([tensors["codes"] for tensors, _ in shards])
            splits[split] = Split(codes, tuple(facts["texts"]), tuple(facts["labels"]))
            skipped += [name for name, _ in facts["skipped"]]
            if bad := dict(facts["skipped"]):
                said = f"{len(bad)} of {len(rows.files)} pictures skipped in {rows.root}: {listed(bad)}"
                warnings.warn(said, DataWarning, stacklevel=2)
        counts = {split: len(found) for split, found in splits.items()}
        known = {"folder": self.data.resolve().name, **counts, "skipped": skipped[:20]}
        return Codes(splits["train"], splits["val"], {**known, "crops": self.crops, "codes": self.key})

    def _material(self, split: str, rows: Rows) -> Material:
        reader, variants = self.reader, 2 * self.crops if split == "train" else 1
        bad = dict[str, str]()  # why, by file

        def compute(parts: Sequence[range], done: Done) -> Iterator[Shard]:
            with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
                for part in parts:
                    names = rows.files[part.start : part.stop]
                    images = list(pool.map(lambda name: decode(rows.root / name, reader.size), names))
                    new = {n: x for n, x in zip(names, images, strict=True) if isinstance(x, str)}
                    bad.update(new)
                    if len(bad) > CORRUPT * len(rows.files):
                        raise InputError(
                            f"{len(bad)} of {len(rows.files)} pictures in {rows.root} are unreadable, e.g. "
                            f"{listed(bad)}: repair them or take their lines out of metadata.jsonl."
                        )
                    kept = [i for i, image in enumerate(images) if not isinstance(image, str)]
                    codes = torch.empty(len(kept), variants, reader.length, *reader.each, dtype=reader.stored)
                    for variant in range(variants):
                        views = self._views([images[i] for i in kept], variant, part.start)
                        for first in range(0, len(kept), BATCH):
                            batch = torch.stack(views[first : first + BATCH]).to(reader.device)
                            codes[first : first + BATCH, variant] = (
                                reader.encode(batch).cpu().to(reader.stored)
                            )
                        done(len(part) * (variant + 1) / variants)
                    rest = {"labels": rows.labels, "texts": rows.texts}
                    facts = {name: [x[part.start + i] for i in kept] for name, x in rest.items()}
                    yield {"codes": codes}, {**facts, "skipped": list(new.items())}

        folder = self.store / f"{split}-{self.key}"
        size = 2 * variants * reader.length * max(1, *reader.each, 1)
        parts = parts_of(len(rows.files), PART)
        return Material(folder, parts, compute, "codes", f"codes of the {split} pictures", size)

    def _views(self, images: Sequence[Any], variant: int, first: int) -> list[Tensor]:
        """Variant `variant` of the images of a shard, the pictures from `first` on."""
        number, size = variant // 2, self.reader.size
        places = torch.rand(len(images), 3, generator=generator(number, first))
        if number == 0:
            places = torch.tensor([0.5, 0.5, 1.0]).expand(len(images), 3)
        return [
            crop(image, size, across, down, zoom, bool(variant % 2))
            for image, (across, down, zoom) in zip(images, places.tolist(), strict=True)
        ]


def listed(bad: dict[str, str]) -> str:
    """The first unreadable files, each with what is wrong with it."""
    return "; ".join(f"{name} ({why})" for name, why in list(bad.items())[:5])


@dataclass(frozen=True)
class PromptSplit:
    """Prompts to train with and others to validate with."""

    train: tuple[str, ...]
    val: tuple[str, ...]

    @classmethod
    def of(cls, texts: tuple[str, ...]) -> PromptSplit:
        """One of every ten prompts held out, and the last one at least; a single prompt serves for both."""
        if len(texts) == 1:
            return cls(texts, texts)
        held_out = texts[HELD_OUT - 1 :: HELD_OUT] or texts[-1:]
        return cls(tuple(text for text in texts if text not in held_out), held_out)

    def pictures(self, count: int) -> tuple[list[str], int]:
        """A prompt for each of `count` training pictures and of those to validate with, which come last; how many these are."""
        held_out = min(max(count // HELD_OUT, MIN_HELD_OUT), MAX_HELD_OUT)
        texts = [self.train[i % len(self.train)] for i in range(count)]
        return texts + [self.val[i % len(self.val)] for i in range(held_out)], held_out


def choose_prompts(teacher: Teacher, prompts: Path | None, data: Path | None) -> PromptSplit:
    """The prompts of a file, else the captions of `data`, else the model's own, else all conditions that the target knows.

    InputError where there are none, or the file has one that the target cannot follow.
    """
    target, place = teacher.target, teacher.place
    if prompts is None and data is not None:
        every = (dict.fromkeys(read_rows(data, split).texts) for split in ("train", "val"))
        train, val = (tuple(text for text in texts if can_follow(target, text)) for texts in every)
        if not (train and val):
            raise InputError(
                f"the target can follow none of the captions of {data}: give it other --prompts."
            )
        return PromptSplit(train, val)
    if prompts is not None or (place / PROMPTS).is_file():
        listed = tuple(dict.fromkeys(read_prompts(prompts, place)))
        for text in listed:
            target.check(text)
        return PromptSplit.of(listed)
    if target.conditions:
        return PromptSplit.of(tuple(target.conditions))
    raise InputError(
        "--self needs prompts: give --prompts FILE with one a line, or --data DIR with captions."
    )


def can_follow(target: Target, text: str) -> bool:
    """Whether a text is a condition of the target."""
    try:
        target.check(text)
    except InputError:
        return False
    return True


class OwnCodes:
    """The codes of pictures that a target draws itself, by plain decoding; picture i has the seed `seed` * 2**32 + i.

    count None: a picture of every prompt, and no fewer than 100.
    """

    def __init__(self, teacher: Teacher, prompts: PromptSplit, count: int | None, batch: int, seed: int):
        self.teacher, self.prompts, self.batch, self.seed = teacher, prompts, batch, seed
        self.texts, self.held_out = prompts.pictures(count or max(len(prompts.train), MIN_PICTURES))
        if teacher.target.vocab > MOST_CODES:
            raise InputError(
                f"a target of {teacher.target.vocab} codes is too large: training takes up to {MOST_CODES}."
            )
        drawn = f"{Guidance(teacher.cfg)} {teacher.sampling} {seed} {batch}"
        self.key = digest([teacher.origin, *self.texts, drawn])

    def build(self) -> Codes:
        """The codes, kept beside the model; what is missing is drawn now."""
        size = 2 * self.teacher.target.length * max(self.teacher.target.channels, 1)
        parts, contents = parts_of(len(self.texts), self.batch * 4), "codes of the target's own pictures"
        folder = self.teacher.store / f"self-{self.key}"
        material = Material(folder, parts, self._draw, "codes", contents, size).build()
        codes = torch.cat([tensors["codes"] for tensors, _ in material.read()])[:, None]
        count = len(self.texts) - self.held_out
        train, val = (
            Split(codes[part], tuple(self.texts[part])) for part in (slice(count), slice(count, None))
        )
        facts = {"self": True, "train": count, "val": self.held_out, "prompts": len(self.prompts.train)}
        drawn = {"cfg": self.teacher.cfg, "sampling": asdict(self.teacher.sampling), "codes": self.key}
        return Codes(train, val, {**facts, **drawn})

    def _draw(self, parts: Sequence[range], done: Done) -> Iterator[Shard]:
        teacher, target = self.teacher, self.teacher.target
        pack_target(target)
        target.cache_prompts(len(set(self.texts)))
        batch = min(self.batch, len(self.texts))
        engine = engine_class(target)(
            target, NoDraft(), Exact(), teacher.sampling, Guidance(teacher.cfg), batch
        )
        for part in parts:
            texts = self.texts[part.start : part.stop]
            seeds = range((self.seed << 32) + part.start, (self.seed << 32) + part.stop)

            def progress(now: int, of: int, size: int = len(part)) -> None:
                done(now / of * size)

            codes = torch.stack([sample.codes for sample in generate(engine, texts, seeds, progress)])
            yield {"codes": codes.to(torch.float16 if target.channels else torch.uint16)}, {"texts": texts}
        target.release_encoder()


class FolderCodes:
    """Codes that a folder has: safetensors files with `codes` [n, length] and, in the header, `facts`, JSON with n `texts`.

    Own pictures are kept so. One picture of ten validates.
    """

    def __init__(self, folder: Path, target: Target):
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise InputError(f"{folder} has no codes: --codes takes a folder of safetensors files.")
        found, self.texts = list[Tensor](), list[str]()
        for path in paths:
            tensors, facts = read_file(path)
            codes, texts = tensors.get("codes", torch.empty(0)), facts.get("texts")
            fits = codes.ndim == 2 + bool(target.channels) and codes.shape[1] == target.length
            if not fits or not isinstance(texts, list) or len(texts) != len(codes):
                raise InputError(
                    f"{path} has no `codes` [n, {target.length}] of this model, or not as many `texts` in its facts."
                )
            if not target.channels and not (
                0 <= int(codes.long().min()) and int(codes.long().max()) < target.vocab
            ):
                raise InputError(
                    f"{path} has codes that are not of 0 to {target.vocab - 1}, as this model's are."
                )
            found.append(codes if target.channels else codes.to(torch.uint16))
            self.texts += map(str, texts)
        self.folder, self.codes = folder, torch.cat(found)[:, None]
        self.key = digest([checksum(self.codes), *self.texts])

    def build(self) -> Codes:
        """The codes."""
        held_out = min(max(len(self.texts) // HELD_OUT, 1), MAX_HELD_OUT)
        val = evenly_spaced(len(self.texts), held_out).tolist()
        train = sorted(set(range(len(self.texts))) - set(val)) or val
        one, other = (Split(self.codes[part], tuple(self.texts[i] for i in part)) for part in (train, val))
        facts = {
            "folder": self.folder.resolve().name,
            "train": len(train),
            "val": len(val),
            "codes": self.key,
        }
        return Codes(one, other, facts)
