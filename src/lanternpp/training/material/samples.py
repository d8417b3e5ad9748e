"""Pictures that a target draws itself, by plain decoding, for its drafter to learn from; kept as codes in shards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lanternpp.accept.exact import Exact
from lanternpp.api.model import pack_target
from lanternpp.engine.batching import generate
from lanternpp.engine.decode import Engine, engine_class
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling
from lanternpp.errors import InputError
from lanternpp.evaluation.prompts import PROMPTS, read_prompts
from lanternpp.models.base import Target
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.training.data import read_rows
from lanternpp.training.material.codes import Codes, Split
from lanternpp.training.material.shards import Shards, parts_of
from lanternpp.util.files import digest

HELD_OUT = 10  # one prompt of this many is held out for validation
MIN_HELD_OUT, MAX_HELD_OUT = 4, 96  # validation pictures
MIN_PICTURES = 100  # training pictures, where the user does not say how many


@dataclass(frozen=True)
class SelfSampling:
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
class PromptSplit:
    """Prompts to train with and others to validate with."""

    train: tuple[str, ...]
    val: tuple[str, ...]


def choose_prompts(
    self_sampling: SelfSampling, data: Path | None, place: Path, target: Target
) -> PromptSplit:
    """The prompts: of the file, else the captions of `data`, else the model's own, else all conditions that the target knows.

    Raises InputError where there are none, or the file has one that the target cannot follow.
    """
    if self_sampling.prompts is None and data is not None:
        train, val = (supported_prompts(target, read_rows(data, split).texts) for split in ("train", "val"))
        if not (train and val):
            raise InputError(
                f"the target can follow none of the captions of {data}: give it other --prompts."
            )
        return PromptSplit(train, val)
    if self_sampling.prompts is not None or (place / PROMPTS).is_file():
        listed = tuple(dict.fromkeys(read_prompts(self_sampling.prompts, place)))
        for text in listed:
            target.check(text)
        return split_prompts(listed)
    if target.conditions:
        return split_prompts(tuple(target.conditions))
    raise InputError(
        "--self needs prompts: give --prompts FILE with one a line, or --data DIR with captions."
    )


def supported_prompts(target: Target, texts: Sequence[str]) -> tuple[str, ...]:
    """Those of some texts, each once, that a target can follow."""
    kept = []
    for text in dict.fromkeys(texts):
        try:
            target.check(text)
        except InputError:
            continue
        kept.append(text)
    return tuple(kept)


def split_prompts(texts: tuple[str, ...]) -> PromptSplit:
    """One of every ten prompts held out, and the last one at least; a single prompt serves for both."""
    if len(texts) == 1:
        return PromptSplit(texts, texts)
    held_out = texts[HELD_OUT - 1 :: HELD_OUT] or texts[-1:]
    return PromptSplit(tuple(text for text in texts if text not in held_out), held_out)


def self_sampled_codes(
    target: Target,
    key: str,
    prompts: PromptSplit,
    self_sampling: SelfSampling,
    guidance: Guidance,
    sampling: Sampling,
    store: Path,
) -> Codes:
    """The codes of a target's own pictures, kept in `store`; what is missing is drawn now. `key`: the target's.

    Plain autoregressive decoding draws them; picture i has the seed self_sampling.seed * 2**32 + i.
    """
    texts, held_out = picture_prompts(prompts, self_sampling)
    count, batch = len(texts) - held_out, min(self_sampling.batch, len(texts))
    name = self_samples_key(key, prompts, self_sampling, guidance, sampling)
    kept = torch.float16 if target.channels else torch.uint16

    def compute() -> None:
        if target.vocab > 2**16:
            raise InputError(f"a target of {target.vocab} codes is too large: training takes up to {2**16}.")
        pack_target(target)
        target.cache_prompts(len(set(texts)))
        engine = engine_class(target)(target, NoDraft(), Exact(), sampling, guidance, batch)
        seconds = seconds_per_step(engine, texts) * target.length * -(-shards.count // batch)
        line = f"drawing {shards.count} pictures of {target.length} codes, guidance {guidance.scale:g}: {shards.room}"
        for part in shards.pending(f"{line}, about {seconds / 60:.1f} min"):
            chosen = texts[part.start : part.stop]
            seeds = range((self_sampling.seed << 32) + part.start, (self_sampling.seed << 32) + part.stop)

            def report_progress(now: int, of: int, size: int = len(part)) -> None:
                shards.progress(now / of * size)

            codes = torch.stack(
                [harvest.codes for harvest in generate(engine, chosen, seeds, report_progress)]
            )
            shards.write({"codes": codes.to(kept)}, {"texts": chosen})
        target.release_encoder()

    folder, parts = store / f"self-{name}", parts_of(len(texts), self_sampling.batch * 4)
    shards = Shards(
        folder, parts, "codes", "the codes of its own pictures", target.length * max(target.channels, 1) * 2
    )
    codes = torch.cat([tensors["codes"] for tensors, _ in shards.build(compute).read()])[:, None]
    splits = [
        Split(codes[part], tuple(texts[part]), ("",) * len(texts[part]))
        for part in (slice(0, count), slice(count, None))
    ]
    facts = {"self": True, "train": count, "val": held_out, "prompts": len(prompts.train), "codes": name}
    facts |= {"cfg": guidance.scale, "sampling": asdict(sampling)}
    return Codes(splits[0], splits[1], facts)


def picture_prompts(prompts: PromptSplit, self_sampling: SelfSampling) -> tuple[list[str], int]:
    """A prompt for every picture, those to validate with last, and how many these are."""
    count = self_sampling.count or max(len(prompts.train), MIN_PICTURES)
    held_out = min(max(count // HELD_OUT, MIN_HELD_OUT), MAX_HELD_OUT)
    texts = [prompts.train[i % len(prompts.train)] for i in range(count)]
    return texts + [prompts.val[i % len(prompts.val)] for i in range(held_out)], held_out


def self_samples_key(
    key: str, prompts: PromptSplit, self_sampling: SelfSampling, guidance: Guidance, sampling: Sampling
) -> str:
    """The name of a target's own pictures."""
    return digest(
        [
            key,
            *picture_prompts(prompts, self_sampling)[0],
            f"{guidance} {sampling} {self_sampling.seed} {self_sampling.batch}",
        ]
    )


def seconds_per_step(engine: Engine, texts: Sequence[str], steps: int = 3) -> float:
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
    seconds = (time.monotonic() - began) / steps
    engine.count.fill_(engine.target.length)  # these pictures are not needed: mark them as finished
    return seconds
