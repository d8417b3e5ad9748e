"""The codes that a drafter learns from: of the pictures in a folder, of pictures that the target draws, or from a folder of codes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import groupby, islice
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lanternpp.api.model import pack_target
from lanternpp.api.options import BASELINE
from lanternpp.engine.batching import generate
from lanternpp.engine.decode import Engine
from lanternpp.engine.sampling import Guidance
from lanternpp.errors import InputError
from lanternpp.evaluation.prompts import PROMPTS, read_prompts
from lanternpp.models.base import Target
from lanternpp.models.vq.codes import Reader, storage_dtype
from lanternpp.nn.checkpoints import checksum
from lanternpp.training.material import Done, Shard, build_shards, read_file
from lanternpp.training.pictures import Rows, crop, read_rows
from lanternpp.training.state import Task
from lanternpp.training.teacher import Teacher
from lanternpp.util.files import digest

SHARD_SIZE, BATCH_SIZE = 128, 32  # encoded pictures in a shard, and pictures encoded at once
DRAWN_SHARD_SIZE = 32  # drawn pictures in a shard
HELD_OUT_RATIO = 10  # one prompt of this many is held out for validation
MIN_HELD_OUT, MAX_HELD_OUT = 4, 96  # validation pictures
MIN_PICTURES = 100  # training pictures, where the user gives no number


@dataclass(frozen=True)
class Split:
    """One split: codes [M, variants, length] as `storage_dtype` says, or moments [M, variants, length, 2 C] float16; M captions and labels.

    A label is "" where there is none. runs: the M recorded runs, where the training is on runs.
    """

    codes: Tensor
    texts: tuple[str, ...]
    labels: tuple[str, ...] = ()
    runs: tuple[Any, ...] = ()

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> Self:
        """Return the pictures of all shards, in order; `codes` has a dimension of variants where the shards have one."""
        texts = tuple(text for _, facts in shards for text in facts["texts"])
        labels = tuple(label for _, facts in shards for label in facts.get("labels", ()))
        return cls(torch.cat([tensors["codes"] for tensors, _ in shards]), texts, labels)

    def select(self, indices: Sequence[int]) -> Split:
        """Return a split of some pictures with one variant each, from a split whose `codes` [M, length] have no variants."""
        return Split(self.codes[list(indices), None], tuple(self.texts[i] for i in indices))

    def __len__(self) -> int:
        return self.codes.shape[0]

    def pick(self, index: Tensor, variant: Tensor | None = None) -> Tensor:
        """Return codes [B, length] int64, or moments [B, length, 2 C] float32, of pictures index [B] in variants [B], by default 0."""
        codes = self.codes[index, 0 if variant is None else variant]
        return codes.float() if codes.is_floating_point() else codes.long()


@dataclass(frozen=True)
class Codes:
    """The codes of training pictures in several variants, and of validation pictures in one."""

    train: Split
    val: Split
    data: dict[str, Any]  # for the provenance; "codes" is the key
    initial_drafter: Any = None  # the drafter with whose weights a training begins

    @classmethod
    def of(cls, train: Split, val: Split, key: str, **facts: Any) -> Self:
        """Return codes whose data are the facts, the sizes of both splits and the key."""
        return cls(train, val, data={**facts, "train": len(train), "val": len(val), "codes": key})

    @property
    def key(self) -> str:
        """A hash of all that decides the codes."""
        return str(self.data["codes"])

    def build(self) -> Self:
        """Return these codes. Other material, which must first be encoded or drawn, returns its codes by the same method."""
        return self


class Sampler:
    """The pictures of a step, the variant of each, and a generator for its noise: functions of (seed, step).

    An epoch shows every picture once; all variants of a picture come before any comes again.
    """

    def __init__(self, count: int, variants: int, batch: int, seed: int):
        self.batch, self.seed = min(batch, count), seed
        self.per_epoch = count // self.batch
        order = torch.rand(count, variants, generator=generator(seed, count, variants))
        self.variant_order = order.argsort(1)
        # The order of the last epoch is cached.
        self.order = lru_cache(1)(lambda epoch: torch.randperm(count, generator=generator(seed, epoch, 0)))

    def __call__(self, step: int) -> tuple[Tensor, Tensor, torch.Generator]:
        """Return (pictures [B], their variants [B], generator) of a step."""
        epoch, epoch_step = divmod(step, self.per_epoch)
        index = self.order(epoch)[epoch_step * self.batch :][: self.batch]
        variant = self.variant_order[index, epoch % self.variant_order.shape[1]]
        return index, variant, generator(self.seed, step, 1)


def generator(*parts: int) -> torch.Generator:
    """Return a CPU generator seeded by a tuple of integers."""
    return torch.Generator().manual_seed(int(digest([str(part) for part in parts])[:15], 16))


class CodesTask(Task):
    """A task whose figures are computed on validation pictures: on `check_pictures` of them at a check, on all at the end."""

    codes: Codes
    check_pictures: int

    @abstractmethod
    def validate_on(self, index: Tensor) -> dict[str, float]:
        """Return figures of the average on validation pictures index [M]."""

    def validate(self) -> dict[str, Any]:
        """Return the figures on `check_pictures` validation pictures."""
        return self._figures(evenly_spaced(len(self.codes.val), self.check_pictures))

    def final(self) -> dict[str, Any]:
        """Return the figures on all validation pictures."""
        figures = self._figures(torch.arange(len(self.codes.val)))
        return {**figures, "validation_pictures": len(self.codes.val)}

    @torch.no_grad()
    def _figures(self, index: Tensor) -> dict[str, float]:
        """Return `validate_on` under the same noise in every call, so that figures of two checks differ by the weights alone."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(0)
            return self.validate_on(index)


def evenly_spaced(count: int, max_indices: int) -> Tensor:
    """Return at most `max_indices` of the indices 0 .. count - 1, evenly spaced, [M] int64."""
    return torch.linspace(0, count - 1, min(count, max_indices), dtype=torch.float32).round().long()


class PictureCodes:
    """The codes that a reader encodes from the pictures of an imagefolder, training pictures in 2 x crops variants.

    A variant is a crop, mirrored or not; the first crop is the centre.
    """

    def __init__(self, data: Path, reader: Reader, store: Path, crops: int = 2, limit: int | None = None):
        self.data, self.reader, self.store, self.crops = data, reader, store, crops
        self.rows = {split: read_rows(data, split, limit) for split in ("train", "val")}
        self.key = digest([*reader.key, *(rows.key for rows in self.rows.values()), str(crops)])

    def build(self) -> Codes:
        """Return the codes in `store`, where missing ones are encoded now; leave out unreadable pictures with a warning (`Rows.leave_out`)."""
        splits, skipped = dict[str, Split](), list[str]()
        reader = self.reader
        for split, rows in self.rows.items():
            variants = 2 * self.crops if split == "train" else 1
            picture_bytes = reader.storage_dtype.itemsize * variants * reader.length * prod(reader.item_shape)
            folder, contents = self.store / f"{split}-{self.key}", f"codes of the {split} pictures"
            encode = partial(self._encode, rows, variants)
            paths = build_shards(folder, len(rows.files), SHARD_SIZE, encode, contents, picture_bytes)
            shards = [read_file(path, "codes", "texts", "skipped") for path in paths]
            rows.leave_out(dict(pair for _, facts in shards for pair in facts["skipped"]))
            splits[split] = Split.of(shards)
            skipped += rows.bad
            rows.warn()
        data = self.data.resolve().name
        return Codes.of(**splits, key=self.key, folder=data, skipped=skipped[:20], crops=self.crops)

    def _encode(self, rows: Rows, variants: int, parts: Sequence[range], done: Done) -> Iterator[Shard]:
        """Encode the pictures `parts` of a split, a shard for each part."""
        reader = self.reader
        for part in parts:
            images = rows.decode(part, reader.size)
            codes = torch.empty(
                len(images), variants, reader.length, *reader.item_shape, dtype=reader.storage_dtype
            )
            for variant in range(variants):
                crops = self._crops(list(images.values()), variant, part.start)
                for first in range(0, len(crops), BATCH_SIZE):
                    batch = torch.stack(crops[first : first + BATCH_SIZE]).to(reader.device)
                    codes[first : first + BATCH_SIZE, variant] = (
                        reader.encode(batch).cpu().to(reader.storage_dtype)
                    )
                done(len(part) * (variant + 1) / variants)
            names = rows.files[part.start : part.stop]
            skipped = [(name, rows.bad[name]) for name in names if name in rows.bad]
            facts = {"labels": [rows.labels[i] for i in images], "texts": [rows.texts[i] for i in images]}
            yield {"codes": codes}, {**facts, "skipped": skipped}

    def _crops(self, images: Sequence[Any], variant: int, first: int) -> list[Tensor]:
        """Return a variant of the images of a shard, whose first picture has the index `first`."""
        number, mirror = divmod(variant, 2)
        crops = torch.rand(len(images), 3, generator=generator(number, first))  # across, down and zoom
        if number == 0:
            crops = torch.tensor([0.5, 0.5, 1.0]).expand(len(images), 3)
        return [
            crop(image, self.reader.size, across, down, zoom, bool(mirror))
            for image, (across, down, zoom) in zip(images, crops.tolist(), strict=True)
        ]


Prompts = tuple[tuple[str, ...], tuple[str, ...]]
"""Prompts to train with, and prompts to validate with."""


def hold_out(texts: tuple[str, ...]) -> Prompts:
    """Hold out one of every ten prompts, at least the last; a single prompt both trains and validates."""
    if len(texts) == 1:
        return texts, texts
    held_out = texts[HELD_OUT_RATIO - 1 :: HELD_OUT_RATIO] or texts[-1:]
    return tuple(text for text in texts if text not in held_out), held_out


def choose_prompts(teacher: Teacher, prompts: Path | None, data: Path | None) -> Prompts:
    """Return the prompts of a file, else the captions of `data`, else the model's prompts, else all conditions of the target.

    Raise InputError where there are none, or the file has one that the target cannot follow.
    """
    target, folder = teacher.target, teacher.folder
    if prompts is None and data is not None:
        train, val = (followed(target, read_rows(data, split).texts) for split in ("train", "val"))
        if not (train and val):
            raise InputError(
                f"the target can follow none of the captions of {data}: give it other --prompts."
            )
        return train, val
    if prompts is not None or (folder / PROMPTS).is_file():
        texts = tuple(dict.fromkeys(read_prompts(prompts, folder)))
        for text in texts:
            target.check(text)
        return hold_out(texts)
    if target.conditions:
        return hold_out(tuple(target.conditions))
    raise InputError(
        "--self needs prompts: give --prompts FILE with one a line, or --data DIR with captions."
    )


def followed(target: Target, texts: Sequence[str]) -> tuple[str, ...]:
    """Return the distinct texts that are conditions of a target, in order."""
    conditions = []
    for text in dict.fromkeys(texts):
        with suppress(InputError):
            target.check(text)
            conditions.append(text)
    return tuple(conditions)


class OwnCodes:
    """The codes of pictures that a target draws itself, by plain decoding; picture i has the seed `seed` * 2**32 + i.

    count None: a picture of every prompt, and at least 100. The last pictures, of held-out prompts, validate.
    """

    def __init__(self, teacher: Teacher, prompts: Prompts, count: int | None, batch: int, seed: int):
        self.teacher, self.batch, self.seed = teacher, batch, seed
        train, val = prompts
        self.num_prompts = len(train)
        count = count or max(len(train), MIN_PICTURES)
        self.num_held_out = min(max(count // HELD_OUT_RATIO, MIN_HELD_OUT), MAX_HELD_OUT)
        self.texts = [train[i % len(train)] for i in range(count)]
        self.texts += [val[i % len(val)] for i in range(self.num_held_out)]
        self.key = digest([teacher.origin, *self.texts, f"{Guidance(teacher.cfg)} {teacher.sampling} {seed}"])

    def build(self) -> Codes:
        """Return the codes in the folder of the teacher's store, where missing pictures are drawn now."""
        target, count = self.teacher.target, len(self.texts)
        folder = self.teacher.store / f"self-{self.key}"
        contents = f"codes of the target's own pictures, {self.num_held_out} of them to validate"
        picture_bytes = target.length * max(target.channels, 1) * storage_dtype(target.vocab).itemsize
        paths = build_shards(folder, count, DRAWN_SHARD_SIZE, self._draw, contents, picture_bytes)
        pictures = Split.of([read_file(path, "codes", "texts") for path in paths])
        num_train = count - self.num_held_out
        train, val = pictures.select(range(num_train)), pictures.select(range(num_train, count))
        cfg, sampling = self.teacher.cfg, asdict(self.teacher.sampling)
        return Codes.of(train, val, self.key, self=True, prompts=self.num_prompts, cfg=cfg, sampling=sampling)

    def _draw(self, parts: Sequence[range], done: Done) -> Iterator[Shard]:
        """Draw the pictures `parts`, a shard for each part."""
        target = self.teacher.target
        pack_target(target)
        engine = self.engine()
        target.cache_prompts(len(set(self.texts)))
        # The pictures of several shards are drawn together, so that they fill a large batch.
        group_size = max(4 * self.batch, DRAWN_SHARD_SIZE)
        for _, group in groupby(parts, lambda part: part.start // group_size):
            group_parts = list(group)
            indices = [i for part in group_parts for i in part]
            texts, seeds = [self.texts[i] for i in indices], [(self.seed << 32) + i for i in indices]
            samples = iter(self.draw(engine, texts, seeds, done))
            for part in group_parts:
                yield self.shard(list(islice(samples, len(part))), self.texts[part.start : part.stop])
        target.release_encoder()

    def engine(self) -> Engine:
        """Return the engine that draws, with the packed target."""
        pipe, batch = self.teacher.pipeline(), min(self.batch, len(self.texts))
        return pipe.new_engine(pipe.settings(BASELINE, cfg=self.teacher.cfg, batch_size=batch))

    def draw(self, engine: Engine, texts: Sequence[str], seeds: Sequence[int], done: Done) -> list[Any]:
        """Draw a picture for each text and seed; return the samples in order."""
        return generate(engine, texts, seeds, lambda codes, total: done(codes / total * len(texts)))

    def shard(self, samples: Sequence[Any], texts: Sequence[str]) -> Shard:
        """Return the tensors and facts that a file stores of samples and their texts."""
        codes = torch.stack([sample.codes for sample in samples])
        return {"codes": codes.to(storage_dtype(self.teacher.target.vocab))}, {"texts": texts}


def folder_codes(folder: Path, target: Target) -> Codes:
    """Read the codes in a folder: safetensors files with `codes` [n, length] and, in the header, `facts`, JSON with n `texts`.

    `OwnCodes` writes such files. One picture of ten validates. Raise InputError where a file has codes of another model.
    """
    shards, channels = list[Shard](), target.channels
    shapes: list[tuple[int, ...]] = [(target.length,)]
    if channels:  # latents, as they were drawn or as moments
        shapes = [(target.length, channels), (target.length, 2 * channels)]
    for path in sorted(folder.glob("*.safetensors")):
        tensors, facts = read_file(path, remedy="write it again as safetensors with facts in JSON")
        codes = tensors.get("codes", torch.empty(0))
        texts: Any = facts.get("texts") if isinstance(facts, dict) else None
        fits = codes.shape[1:] in shapes and len(codes) > 0 and isinstance(texts, list)
        if not fits or [type(text) for text in texts] != [str] * len(codes):
            raise InputError(
                f"{path} has no `codes` [n, {target.length}] of this model, or not as many `texts` in its facts."
            )
        if channels:
            if not codes.is_floating_point() or not codes.isfinite().all():
                raise InputError(f"{path} has latents that are not finite floating-point numbers.")
            if shards and codes.shape[2] != shards[0][0]["codes"].shape[2]:
                raise InputError(
                    f"{path} has {codes.shape[2]} numbers a latent, and files before it {shards[0][0]['codes'].shape[2]}: "
                    f"drawn latents ({channels}) and moments ({2 * channels}) go into folders of their own."
                )
        else:
            integers = codes.long()
            integral = not codes.is_floating_point() or torch.equal(integers.to(codes.dtype), codes)
            if not integral or not 0 <= int(integers.min()) <= int(integers.max()) < target.vocab:
                raise InputError(
                    f"{path} has codes that are not of 0 to {target.vocab - 1}, as this model's are."
                )
            codes = integers.to(storage_dtype(target.vocab))
        shards.append(({"codes": codes}, {"texts": texts}))
    if not shards:
        raise InputError(f"{folder} has no codes: --codes takes a folder of safetensors files.")
    split = Split.of(shards)
    key = digest([checksum(split.codes[:, None]), *split.texts])
    num_held_out = min(max(len(split) // HELD_OUT_RATIO, 1), MAX_HELD_OUT)
    val = evenly_spaced(len(split), num_held_out).tolist()
    train = sorted(set(range(len(split))) - set(val)) or val
    return Codes.of(split.select(train), split.select(val), key, folder=folder.resolve().name)
