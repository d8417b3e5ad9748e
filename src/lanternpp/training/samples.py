"""A target's own pictures as what its drafter learns from: drawn without loss, kept as codes in shards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lanternpp.accept.exact import Exact
from lanternpp.engine.batching import generate
from lanternpp.engine.decode import Engine
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling
from lanternpp.errors import InputError
from lanternpp.evaluation.prompts import PROMPTS, read_prompts
from lanternpp.nn.checkpoints import digest
from lanternpp.proposers.nothing import Nothing
from lanternpp.targets.base import Target
from lanternpp.training.codes import Codes, Split
from lanternpp.training.data import read_rows
from lanternpp.training.report import Report
from lanternpp.training.shards import Shards, check_room, in_bytes

HELD = 10  # of so many prompts one is held out to validate with
LEAST, MOST = 4, 96  # pictures to validate with
FEWEST = 100  # pictures to train with, where nobody says how many


@dataclass(frozen=True)
class Own:
    """Which pictures of its own a target is to draw; count None: one of every prompt, and no fewer than 100."""

    prompts: Path | None = None
    count: int | None = None
    batch: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise InputError(f"--samples {self.count} must be at least 1.")
        if self.batch < 1:
            raise InputError(f"--sample-batch {self.batch} must be at least 1.")


@dataclass(frozen=True)
class Asked:
    """Prompts to train with and others to validate with."""

    train: tuple[str, ...]
    val: tuple[str, ...]


def asked(own: Own, data: Path | None, place: Path, target: Target) -> Asked:
    """The prompts: of the file, else the captions of `data`, else the model's own, else all it knows.

    Raises InputError where there are none, or the file has one that the target cannot follow.
    """
    if own.prompts is None and data is not None:
        train, val = (followed(target, read_rows(data, split).texts) for split in ("train", "val"))
        if not (train and val):
            raise InputError(
                f"the target can follow none of the captions of {data}: give it other --prompts."
            )
        return Asked(train, val)
    if own.prompts is not None or (place / PROMPTS).is_file():
        listed = tuple(dict.fromkeys(read_prompts(own.prompts, place)))
        for text in listed:
            target.prompt([text], 1)
        return parted(listed)
    if target.conditions:
        return parted(tuple(target.conditions))
    raise InputError(
        "--self needs prompts: give --prompts FILE with one a line, or --data DIR with captions."
    )


def followed(target: Target, texts: Sequence[str]) -> tuple[str, ...]:
    """Those of some texts, each once, that a target can follow."""
    kept = []
    for text in dict.fromkeys(texts):
        try:
            target.prompt([text], 1)
        except InputError:
            continue
        kept.append(text)
    return tuple(kept)


def parted(texts: tuple[str, ...]) -> Asked:
    """One of every ten prompts held out, and the last one at least; a single prompt serves for both."""
    if len(texts) == 1:
        return Asked(texts, texts)
    held = texts[HELD - 1 :: HELD] or texts[-1:]
    return Asked(tuple(text for text in texts if text not in held), held)


def own_codes(
    target: Target, key: str, words: Asked, own: Own, guidance: Guidance, sampling: Sampling, store: Path
) -> Codes:
    """The codes of a target's own pictures, kept in `store`; what is missing is drawn now. `key`: the target's."""
    texts, held = wanted(words, own)
    count, size = len(texts) - held, own.batch * 4
    parts = [list(range(first, min(first + size, count + held))) for first in range(0, count + held, size)]
    name = own_key(key, words, own, guidance, sampling)
    shards = Shards(store / f"self-{name}", len(parts))
    missing = shards.missing
    if missing:
        draw(target, texts, [parts[i] for i in missing], missing, shards, own, guidance, sampling)
    codes = torch.cat([shards.read(number)[0]["codes"] for number in range(shards.count)])[:, None]
    splits = [
        Split(codes[part], tuple(texts[part]), ("",) * len(texts[part]))
        for part in (slice(0, count), slice(count, None))
    ]
    facts = {"self": True, "train": count, "val": held, "prompts": len(words.train), "codes": name}
    facts |= {"cfg": guidance.scale, "sampling": vars_of(sampling)}
    return Codes(splits[0], splits[1], facts)


def wanted(words: Asked, own: Own) -> tuple[list[str], int]:
    """A prompt for every picture, those to validate with last, and how many these are."""
    count = own.count or max(len(words.train), FEWEST)
    held = min(max(count // HELD, LEAST), MOST)
    texts = [words.train[i % len(words.train)] for i in range(count)]
    return texts + [words.val[i % len(words.val)] for i in range(held)], held


def own_key(key: str, words: Asked, own: Own, guidance: Guidance, sampling: Sampling) -> str:
    """The name of a target's own pictures."""
    return digest([key, *wanted(words, own)[0], f"{guidance} {sampling} {own.seed} {own.batch}"])


def vars_of(sampling: Sampling) -> dict[str, float]:
    """The dials of a sampling."""
    return {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}


def draw(
    target: Target,
    texts: Sequence[str],
    parts: Sequence[list[int]],
    numbers: Sequence[int],
    shards: Shards,
    own: Own,
    guidance: Guidance,
    sampling: Sampling,
) -> None:
    """Draw the pictures of some shards, by plain AR. Picture i has the seed own.seed * 2**32 + i."""
    if target.vocab > 2**16:
        raise InputError(f"a target of {target.vocab} codes is too large: training takes up to {2**16}.")
    total = sum(map(len, parts))
    room = total * target.length * 2
    check_room(shards.folder, room, "the codes of its own pictures")
    target.pack()
    target.expect(len(set(texts)))
    engine = Engine(target, Nothing(), Exact(), sampling, guidance, min(own.batch, len(texts)))
    report = Report("codes", shards.folder)
    seconds = pace(engine, texts) * target.length * -(-total // engine.batch)
    report.say(
        f"drawing {total} pictures of {target.length} codes, guidance {guidance.scale:g}: {in_bytes(room)} in "
        f"{shards.folder}, about {seconds / 60:.1f} min"
    )
    began, done = time.monotonic(), 0
    with report.bar(0.0):
        for number, part in zip(numbers, parts, strict=True):

            def tell(now: int, of: int, before: int = done, count: int = len(part)) -> None:
                share = (before + now / of * count) / total
                report.advance(time.monotonic() - began, share, f"{share * total:.0f}/{total} pictures")

            harvests = generate(engine, [texts[i] for i in part], [(own.seed << 32) + i for i in part], tell)
            codes = torch.stack([harvest.codes for harvest in harvests])
            shards.write(number, {"codes": codes.to(torch.uint16)}, {"texts": [texts[i] for i in part]})
            done += len(part)
    target.rest()


def pace(engine: Engine, texts: Sequence[str], steps: int = 3) -> float:
    """Seconds of a step of a full batch, from a few of them."""
    for slot in range(engine.batch):
        engine.admit(slot, texts[slot % len(texts)], slot)
    engine.step()
    if engine.codes.is_cuda:
        torch.cuda.synchronize()
    began = time.monotonic()
    for _ in range(steps):
        engine.step()
    engine.done()  # waits for the device
    spent = (time.monotonic() - began) / steps
    engine.count.fill_(engine.target.length)  # nobody wants these pictures
    return spent
