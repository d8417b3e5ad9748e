"""What a training reads: shards on disk, which are computed where they are missing; codes of pictures, their order, and folders of codes.

Each file is written whole or not at all: a killed run loses only the shards that it is computing, and the next run computes them.
"""

from __future__ import annotations

import json
import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from lanternpp.errors import InputError, counted
from lanternpp.models.base import Target
from lanternpp.models.vq.codes import storage_dtype
from lanternpp.nn.checkpoints import checksum, write_safetensors
from lanternpp.nn.files import input_errors
from lanternpp.training.loop import Task
from lanternpp.training.team import Report, team
from lanternpp.util.files import digest, megabytes, sweep

REMEDY = "delete it to make it again"
SPARE_BYTES = 1 << 28  # of a disk that stay free
Shard = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors, and facts for the header of the file."""
Done = Callable[[float], None]
"""Called with the number of pictures computed so far."""
Compute = Callable[[Sequence[range], Done], Iterator[Shard]]
"""Called with the range of pictures of each missing shard; yields these shards in order."""


def build_shards(folder: Path, count: int, shard_size: int, compute: Compute, contents: str) -> list[Path]:
    """Compute the missing shards of `count` pictures in the first process of the team, and return the files of all shards.

    folder: its name has a hash of all that decides the content; shard_size: pictures in a shard; contents: their name in messages.
    Raise InputError where the disk lacks room.
    """
    parts = [range(first, min(first + shard_size, count)) for first in range(0, count, shard_size)]
    files = {part: folder / f"{number:05d}.safetensors" for number, part in enumerate(parts)}
    accelerator = team().accelerator
    with nullcontext() if accelerator is None else accelerator.main_process_first():
        sweep(folder)
        if missing := {part: path for part, path in files.items() if not path.is_file()}:
            write_shards(missing, compute, contents)
    return list(files.values())


def write_shards(files: Mapping[range, Path], compute: Compute, contents: str) -> None:
    """Compute shards and write each to its file, with progress on stderr; raise InputError where the others would fill the disk."""
    folder, count = next(iter(files.values())).parent, sum(map(len, files))
    report, announced, num_missing = Report("training", folder), False, count

    def done(pictures: float) -> None:
        nonlocal announced
        if not announced:  # only now, so that an error in the first pictures is the only output
            report.say(f"{contents}: {counted(count, 'picture')}, in {folder}")
            announced = True
        report.advance(pictures / count, f"{pictures:.0f}/{count} pictures")

    with report.bar():
        for (part, path), (tensors, facts) in zip(files.items(), compute(list(files), done), strict=True):
            on_host = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
            write_safetensors(path, on_host, {"facts": json.dumps(facts)})
            num_missing -= len(part)
            size, free = path.stat().st_size * num_missing // len(part), shutil.disk_usage(folder).free
            if size and size + SPARE_BYTES > free:
                raise InputError(
                    f"{contents} takes another {megabytes(size)} in {folder} and the disk has {megabytes(free)} free, of which "
                    f"{megabytes(SPARE_BYTES)} stay free: free some, or leave it out."
                )


def read_file(path: Path, *names: str, remedy: str = REMEDY) -> Shard:
    """Read the tensors and facts of a shard; raise InputError, which ends with the remedy, where it is broken or lacks one of the names."""
    with input_errors(f"{path} cannot be read", remedy), safe_open(path, "pt") as file:
        facts = json.loads((file.metadata() or {}).get("facts", "{}"))
        if missing := set(names).difference(file.keys(), facts):
            raise ValueError(f"it has no {', '.join(sorted(missing))}")
        return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118


HELD_OUT_RATIO = 10  # one prompt of this many is held out for validation
MAX_HELD_OUT = 96  # validation pictures, of those that the target drew


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
    key: str  # a hash of all that decides the codes
    facts: dict[str, Any] = field(default_factory=dict)
    initial_drafter: Any = None  # the drafter with whose weights a training begins

    @property
    def data(self) -> dict[str, Any]:
        """The entry in the provenance."""
        return {**self.facts, "train": len(self.train), "val": len(self.val), "codes": self.key}

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


def folder_codes(folder: Path, target: Target) -> Codes:
    """Read the codes in a folder: safetensors files with `codes` [n, length] and, in the header, `facts`, JSON with n `texts`.

    Latents are [n, length, C], or moments [n, length, 2 C] in all files. `OwnCodes` writes such files. One picture of ten
    validates. Raise InputError where a file has codes of another model.
    """
    shards, length, channels = list[Shard](), target.length, target.channels
    expected = f"[n, {length}] of 0 to {target.vocab - 1}"
    shapes: list[tuple[int, ...]] = [(length,)]
    if channels:
        expected = f"[n, {length}, {channels}], latents, or [n, {length}, {2 * channels}], moments"
        shapes = [(length, channels), (length, 2 * channels)]
    for path in sorted(folder.glob("*.safetensors")):
        tensors, facts = read_file(path, remedy="write it again as safetensors with facts in JSON")
        codes = tensors.get("codes", torch.empty(0))
        texts: Any = facts.get("texts") if isinstance(facts, dict) else None
        fits = tuple(codes.shape[1:]) in shapes and len(codes) > 0
        if fits and channels:
            fits = codes.is_floating_point() and bool(codes.isfinite().all())
            shapes = [tuple(codes.shape[1:])]
        elif fits:
            integers = codes.long()
            fits = not codes.is_floating_point() or torch.equal(integers.to(codes.dtype), codes)
            fits = fits and 0 <= int(integers.min()) <= int(integers.max()) < target.vocab
            codes = integers.to(storage_dtype(target.vocab))
        if not (fits and isinstance(texts, list) and [*map(type, texts)] == [str] * len(codes)):
            raise InputError(
                f"{path} is no file of this model's codes: it needs finite `codes` {expected} in all files, and as many "
                "`texts` in its facts."
            )
        shards.append(({"codes": codes}, {"texts": texts}))
    if not shards:
        raise InputError(f"{folder} has no codes: --codes takes a folder of safetensors files.")
    split = Split.of(shards)
    key = digest([checksum(split.codes[:, None]), *split.texts])
    num_held_out = min(max(len(split) // HELD_OUT_RATIO, 1), MAX_HELD_OUT)
    val = evenly_spaced(len(split), num_held_out).tolist()
    train = sorted(set(range(len(split))) - set(val)) or val
    return Codes(split.select(train), split.select(val), key, {"folder": folder.resolve().name})
