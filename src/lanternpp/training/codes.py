"""The codes that a drafter learns from: of the pictures in a folder, of the target's own pictures, or as a folder has them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import groupby, islice
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
from lanternpp.models.vq.codes import Reader, stored_as
from lanternpp.nn.checkpoints import checksum
from lanternpp.training.material import Done, Shard, build_shards, read_file
from lanternpp.training.pictures import Rows, crop, read_rows
from lanternpp.training.state import Task
from lanternpp.training.teacher import Teacher
from lanternpp.util.files import digest

PART, BATCH = 128, 32  # pictures in a shard, and pictures encoded at once
DRAWN = 32  # pictures in a shard of those that a target draws
HELD_OUT = 10  # one prompt of this many is held out for validation
MIN_HELD_OUT, MAX_HELD_OUT = 4, 96  # validation pictures
MIN_PICTURES = 100  # training pictures, where the user does not say how many


@dataclass(frozen=True)
class Split:
    """One split: codes [M, variants, length] as `stored_as` says, or moments [M, variants, length, 2 C] float16; M captions and labels.

    A label is "" where there is none. runs: the M runs that were recorded, where the training is on these.
    """

    codes: Tensor
    texts: tuple[str, ...]
    labels: tuple[str, ...] = ()
    runs: tuple[Any, ...] = ()

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> Self:
        """The pictures of all shards, in order; one variant of each where `codes` has no dimension of variants."""
        texts, labels = (
            tuple(text for _, facts in shards for text in facts.get(name, ())) for name in ("texts", "labels")
        )
        return cls(torch.cat([tensors["codes"] for tensors, _ in shards]), texts, labels)

    def at(self, places: Sequence[int]) -> Split:
        """Some of the pictures, as a split; of pictures without variants, each the only one."""
        return Split(self.codes[list(places), None], tuple(self.texts[i] for i in places))

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
    begin: Any = None  # the drafter with whose weights a training begins

    @classmethod
    def of(cls, train: Split, val: Split, key: str, **facts: Any) -> Self:
        """With the sizes of both and the key in the facts."""
        return cls(train, val, data={**facts, "train": len(train), "val": len(val), "codes": key})

    @property
    def key(self) -> str:
        """A hash of all that decides the codes."""
        return str(self.data["codes"])

    def build(self) -> Self:
        """Itself; material that is still to be encoded or drawn builds such codes."""
        return self


class Sampler:
    """The pictures of a step, which variant of each, and a generator for its noise: functions of (seed, step).

    An epoch shows every picture once; all variants of a picture come before any comes again.
    """

    def __init__(self, count: int, variants: int, batch: int, seed: int):
        self.batch, self.seed = min(batch, count), seed
        self.per_epoch = count // self.batch
        order = torch.rand(count, variants, generator=generator(seed, count, variants))
        self.variant_order = order.argsort(1)
        # one epoch's is kept
        self.order = lru_cache(1)(lambda epoch: torch.randperm(count, generator=generator(seed, epoch, 0)))

    def __call__(self, step: int) -> tuple[Tensor, Tensor, torch.Generator]:
        """(pictures [B], their variants [B], generator) of a step."""
        epoch, place = divmod(step, self.per_epoch)
        index = self.order(epoch)[place * self.batch :][: self.batch]
        variant = self.variant_order[index, epoch % self.variant_order.shape[1]]
        return index, variant, generator(self.seed, step, 1)


def generator(*parts: int) -> torch.Generator:
    """A CPU generator seeded by a tuple of integers."""
    return torch.Generator().manual_seed(int(digest([str(part) for part in parts])[:15], 16))


class CodesTask(Task):
    """A task whose figures come from validation pictures: from `check_pictures` of them at a check, from all at the end."""

    codes: Codes
    check_pictures: int

    @abstractmethod
    def validate_on(self, index: Tensor) -> dict[str, float]:
        """Figures of the average on validation pictures [M]."""

    def validate(self) -> dict[str, Any]:
        """Figures on some validation pictures."""
        return self._figures(evenly_spaced(len(self.codes.val), self.check_pictures))

    def final(self) -> dict[str, Any]:
        """The figures on every validation picture."""
        figures = self._figures(torch.arange(len(self.codes.val)))
        return {**figures, "validation_pictures": len(self.codes.val)}

    @torch.no_grad()
    def _figures(self, index: Tensor) -> dict[str, float]:
        """`validate_on`, always with the same noise, so that weights alone decide which are the best."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(0)
            return self.validate_on(index)


def evenly_spaced(count: int, most: int) -> Tensor:
    """At most `most` indices, evenly over `count`."""
    return torch.linspace(0, count - 1, min(count, most), dtype=torch.float32).round().long()


class PictureCodes:
    """The codes that a reader sees in the pictures of an imagefolder: training ones in 2 x crops variants.

    A variant is a crop, the first one the centre, as it is or mirrored.
    """

    def __init__(self, data: Path, reader: Reader, store: Path, crops: int = 2, limit: int | None = None):
        self.data, self.reader, self.store, self.crops = data, reader, store, crops
        self.rows = {split: read_rows(data, split, limit) for split in ("train", "val")}
        self.key = digest([*reader.key, *(rows.key for rows in self.rows.values()), str(crops)])

    def build(self) -> Codes:
        """The codes, from the folder `store` or encoded now into it. Unreadable pictures are named in a warning and left out.

        InputError where they are too many.
        """
        splits, skipped = dict[str, Split](), list[str]()
        for split, rows in self.rows.items():
            variants = 2 * self.crops if split == "train" else 1
            size = self.reader.stored.itemsize * variants * self.reader.length * max(1, *self.reader.each, 1)
            where, compute = self.store / f"{split}-{self.key}", partial(self._encode, rows, variants)
            contents = f"codes of the {split} pictures"
            paths = build_shards(where, len(rows.files), PART, compute, contents, size)
            shards = [read_file(path, "codes", "texts", "skipped") for path in paths]
            rows.leave_out(dict(pair for _, facts in shards for pair in facts["skipped"]))
            splits[split] = Split.of(shards)
            skipped += rows.bad
            rows.warn()
        folder = self.data.resolve().name
        return Codes.of(**splits, key=self.key, folder=folder, skipped=skipped[:20], crops=self.crops)

    def _encode(self, rows: Rows, variants: int, parts: Sequence[range], done: Done) -> Iterator[Shard]:
        """The codes of a split, a part at a time."""
        reader = self.reader
        for part in parts:
            images = rows.decode(part, reader.size)
            skipped = [
                (name, rows.bad[name]) for name in rows.files[part.start : part.stop] if name in rows.bad
            ]
            codes = torch.empty(len(images), variants, reader.length, *reader.each, dtype=reader.stored)
            for variant in range(variants):
                views = self._views(list(images.values()), variant, part.start)
                for first in range(0, len(views), BATCH):
                    batch = torch.stack(views[first : first + BATCH]).to(reader.device)
                    codes[first : first + BATCH, variant] = reader.encode(batch).cpu().to(reader.stored)
                done(len(part) * (variant + 1) / variants)
            facts = {"labels": [rows.labels[i] for i in images], "texts": [rows.texts[i] for i in images]}
            yield {"codes": codes}, {**facts, "skipped": skipped}

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


Prompts = tuple[tuple[str, ...], tuple[str, ...]]
"""Prompts to train with, and others to validate with."""


def hold_out(texts: tuple[str, ...]) -> Prompts:
    """One of every ten prompts held out, and the last one at least; a single prompt serves for both."""
    if len(texts) == 1:
        return texts, texts
    held_out = texts[HELD_OUT - 1 :: HELD_OUT] or texts[-1:]
    return tuple(text for text in texts if text not in held_out), held_out


def choose_prompts(teacher: Teacher, prompts: Path | None, data: Path | None) -> Prompts:
    """The prompts of a file, else the captions of `data`, else the model's own, else all conditions that the target knows.

    InputError where there are none, or the file has one that the target cannot follow.
    """
    target, place = teacher.target, teacher.place
    if prompts is None and data is not None:
        train, val = (followed(target, read_rows(data, split).texts) for split in ("train", "val"))
        if not (train and val):
            raise InputError(
                f"the target can follow none of the captions of {data}: give it other --prompts."
            )
        return train, val
    if prompts is not None or (place / PROMPTS).is_file():
        listed = tuple(dict.fromkeys(read_prompts(prompts, place)))
        for text in listed:
            target.check(text)
        return hold_out(listed)
    if target.conditions:
        return hold_out(tuple(target.conditions))
    raise InputError(
        "--self needs prompts: give --prompts FILE with one a line, or --data DIR with captions."
    )


def followed(target: Target, texts: Sequence[str]) -> tuple[str, ...]:
    """The different ones of some texts that are conditions of a target."""
    found = []
    for text in dict.fromkeys(texts):
        with suppress(InputError):
            target.check(text)
            found.append(text)
    return tuple(found)


class OwnCodes:
    """The codes of pictures that a target draws itself, by plain decoding; picture i has the seed `seed` * 2**32 + i.

    count None: a picture of every prompt, and no fewer than 100. The last pictures, of other prompts, validate.
    """

    def __init__(self, teacher: Teacher, prompts: Prompts, count: int | None, batch: int, seed: int):
        self.teacher, self.batch, self.seed, (train, val) = teacher, batch, seed, prompts
        self.prompts = len(train)
        count = count or max(len(train), MIN_PICTURES)
        self.held_out = min(max(count // HELD_OUT, MIN_HELD_OUT), MAX_HELD_OUT)
        self.texts = [train[i % len(train)] for i in range(count)]
        self.texts += [val[i % len(val)] for i in range(self.held_out)]
        drawn = f"{Guidance(teacher.cfg)} {teacher.sampling} {seed}"
        self.key = digest([teacher.origin, *self.texts, drawn])

    def build(self) -> Codes:
        """The codes, kept beside the model; missing pictures are drawn now."""
        target, count = self.teacher.target, len(self.texts)
        folder, numbers = self.teacher.store / f"self-{self.key}", target.length * max(target.channels, 1)
        contents = f"codes of the target's own pictures, {self.held_out} of them to validate"
        size = numbers * stored_as(target.vocab).itemsize
        paths = build_shards(folder, count, DRAWN, self._draw, contents, size)
        drawn = Split.of([read_file(path, "codes", "texts") for path in paths])
        last = count - self.held_out
        facts: dict[str, Any] = {"self": True, "prompts": self.prompts, "cfg": self.teacher.cfg}
        facts["sampling"] = asdict(self.teacher.sampling)
        return Codes.of(drawn.at(range(last)), drawn.at(range(last, count)), self.key, **facts)

    def _draw(self, parts: Sequence[range], done: Done) -> Iterator[Shard]:
        """Draw some parts of the pictures."""
        target = self.teacher.target
        pack_target(target)
        engine = self.engine()
        target.cache_prompts(len(set(self.texts)))
        # A large batch fills several shards.
        for _, some in groupby(parts, lambda part: part.start // max(4 * self.batch, DRAWN)):
            shards = list(some)
            places = [place for part in shards for place in part]
            texts, seeds = [self.texts[i] for i in places], [(self.seed << 32) + i for i in places]
            drawn = iter(self.draw(engine, texts, seeds, done))
            for part in shards:
                yield self.shard(list(islice(drawn, len(part))), self.texts[part.start : part.stop])
        target.release_encoder()

    def engine(self) -> Engine:
        """The engine that draws, with the packed target."""
        pipe, batch = self.teacher.pipeline(), min(self.batch, len(self.texts))
        return pipe.new_engine(pipe.settings(BASELINE, cfg=self.teacher.cfg, batch_size=batch))

    def draw(self, engine: Engine, texts: Sequence[str], seeds: Sequence[int], done: Done) -> list[Any]:
        """The pictures of some texts, in order."""
        return generate(engine, texts, seeds, lambda now, of: done(now / of * len(texts)))

    def shard(self, drawn: Sequence[Any], texts: Sequence[str]) -> Shard:
        """Pictures that were drawn, of these texts, as a file keeps them."""
        codes = torch.stack([sample.codes for sample in drawn])
        return {"codes": codes.to(stored_as(self.teacher.target.vocab))}, {"texts": texts}


def folder_codes(folder: Path, target: Target) -> Codes:
    """Codes that a folder has: safetensors files with `codes` [n, length] and, in the header, `facts`, JSON with n `texts`.

    Own pictures are kept so. One picture of ten validates. InputError where a file has other codes than the target's.
    """
    shards, channels = list[Shard](), target.channels
    # latents are kept as they were drawn, or as moments
    shapes = [(target.length, *width) for width in ([(channels,), (2 * channels,)] if channels else [()])]
    for path in sorted(folder.glob("*.safetensors")):
        tensors, facts = read_file(path, remedy="write it again as safetensors with facts in JSON")
        codes = tensors.get("codes", torch.empty(0))
        texts: Any = facts.get("texts") if isinstance(facts, dict) else None
        fits = codes.shape[1:] in shapes and len(codes) > 0 and isinstance(texts, list)
        if not fits or [type(text) for text in texts] != [str] * len(codes):
            raise InputError(
                f"{path} has no `codes` [n, {target.length}] of this model, or not as many `texts` in its facts."
            )
        if target.channels:
            if not codes.is_floating_point() or not codes.isfinite().all():
                raise InputError(f"{path} has latents that are not finite floating-point numbers.")
            if shards and codes.shape[2] != shards[0][0]["codes"].shape[2]:
                raise InputError(
                    f"{path} has {codes.shape[2]} numbers a latent, and files before it {shards[0][0]['codes'].shape[2]}: "
                    f"drawn latents ({channels}) and moments ({2 * channels}) go into folders of their own."
                )
        else:
            numbers = codes.long()
            whole = not codes.is_floating_point() or torch.equal(numbers.to(codes.dtype), codes)
            if not whole or not 0 <= int(numbers.min()) <= int(numbers.max()) < target.vocab:
                raise InputError(
                    f"{path} has codes that are not of 0 to {target.vocab - 1}, as this model's are."
                )
            codes = numbers.to(stored_as(target.vocab))
        shards.append(({"codes": codes}, {"texts": texts}))
    if not shards:
        raise InputError(f"{folder} has no codes: --codes takes a folder of safetensors files.")
    split = Split.of(shards)
    key = digest([checksum(split.codes[:, None]), *split.texts])
    val = evenly_spaced(len(split), min(max(len(split) // HELD_OUT, 1), MAX_HELD_OUT)).tolist()
    train = sorted(set(range(len(split))) - set(val)) or val
    return Codes.of(split.at(train), split.at(val), key, folder=folder.resolve().name)
