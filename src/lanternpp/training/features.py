"""A drafter's inputs in training: prompts, and a frozen target's features of recorded codes, computed or from a cache on disk."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.models.base import PromptWarning, Target
from lanternpp.nn.files import input_errors
from lanternpp.training.codes import REMEDY, Done, Shard, Split, build_shards
from lanternpp.training.teacher import Teacher
from lanternpp.training.team import autocast
from lanternpp.util.files import digest

SHARD_BYTES = 1 << 28  # of a shard of features, about
BATCH_SIZE = 8  # pictures whose features are computed at once


class CaptionPrompts:
    """The prompts of a split, padded on the left to one length; a caption that the target cannot follow becomes the null prompt."""

    def __init__(self, target: Target, split: Split):
        self.target, self.split = target, split
        sizes: dict[str | None, tuple[int, bool]] = {}  # slots of each prompt, and whether some are padding
        target.cache_prompts(len(set(split.texts)))
        for text in (None, *dict.fromkeys(split.texts)):
            with suppress(InputError):
                embeds, start = self._prompt([text], 2)
                sizes[text] = embeds.shape[1], bool(start.any())
        target.release_encoder()
        if not sizes.keys() - {None}:
            raise InputError("the target can follow none of the captions: was it trained on other data?")
        self.slots = max(slots for slots, _ in sizes.values())
        self.padded = any(padded or slots < self.slots for slots, padded in sizes.values())
        self.texts = [text if text in sizes else None for text in split.texts]

    def __call__(
        self, index: Tensor, branches: int, drop: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the prompts of pictures index [B], [branches * B, T, D], and the slots where they begin, [branches * B].

        The slots are None where no prompt is padded. A second branch is unconditional, and so is a single branch where drop [B].
        """
        texts = [self.texts[i] for i in index.tolist()]
        embeds, start = self._prompt(texts, branches if drop is None else 2)
        if drop is not None:
            embeds, null_embeds = embeds.chunk(2)
            start, null_start = start.chunk(2)
            drop = drop.to(embeds.device)
            embeds = torch.where(drop[:, None, None], null_embeds, embeds)
            start = torch.where(drop, null_start, start)
        if padding := self.slots - embeds.shape[1]:
            embeds, start = F.pad(embeds, (0, 0, padding, 0)), start + padding
        return embeds, start if self.padded else None

    def _prompt(self, texts: list[str | None], branches: int) -> tuple[Tensor, Tensor]:
        with warnings.catch_warnings(action="ignore", category=PromptWarning), torch.no_grad():
            prompt = self.target.prompt(texts, branches)
        return prompt.embeds, prompt.start


def causal_mask(start: Tensor | None, count: int) -> Tensor | None:
    """Return the causal attention mask over `count` slots of rows whose prompts begin at start [R]: [R, 1, count, count] bool.

    None where no row is padded. A padding slot attends to itself alone, since a softmax over no slot would be NaN.
    """
    if start is None:
        return None
    slot = torch.arange(count, device=start.device)
    mask = (slot[:, None] >= slot) & (slot >= start[:, None, None])
    return (mask | (slot[:, None] == slot))[:, None]


def slot_inputs(target: Target, prompts: Tensor, codes: Tensor) -> Tensor:
    """Return the target's inputs, prompts [R, T, D] and all codes [R, length] except the last: [R, T + length - 1, D]."""
    return torch.cat((prompts, target.embed(codes[:, :-1]).to(prompts.dtype)), 1)


def drafter_inputs(
    target: Target,
    prompts: Tensor,
    codes: Tensor,
    start: Tensor | None = None,
    aux_layers: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """Return next_inputs [R, S - 1, D], the input after each slot, and the target's features [R, S, D], for S = T + length - 1 slots.

    prompts [R, T, D] begin at start [R]; codes [R, length]. A drafter predicts features[:, t + 1] from next_inputs[:, t] and
    features[:, t]. With aux_layers features are [R, S, (1 + aux) D], as `Decoder.forward` returns them.
    """
    inputs = slot_inputs(target, prompts, codes)
    mask = causal_mask(start, inputs.shape[1])
    return inputs[:, 1:], target.decoder.forward_sequence(inputs, mask=mask, aux_layers=aux_layers)


def spread_aux_layers(count: int, layers: int) -> tuple[int, ...]:
    """Return `count` of the layers 0 .. layers - 2, evenly spread; raise InputError where there are fewer."""
    if count >= layers:
        raise InputError(
            f"--aux-layers {count} is too many: the target has {layers - 1} layers below its last."
        )
    return tuple(layers * (i + 1) // (count + 1) - 1 for i in range(count))


class FeatureCache:
    """The target's features of all pictures of a split in their variants, with and without caption, on disk; missing ones are computed.

    codes_key: the key of the codes. InputError where the disk lacks room.
    """

    def __init__(self, teacher: Teacher, captions: CaptionPrompts, split: Split, codes_key: str):
        self.target, self.captions, self.split = captions.target, captions, split
        like = next(self.target.parameters())
        slots, dim = captions.slots + self.target.length - 1, self.target.decoder.config.dim
        picture_bytes = split.codes.shape[1] * 2 * slots * dim * like.element_size()
        self.shard_size = max(min(SHARD_BYTES // picture_bytes, len(split)), 1)
        facts = [teacher.origin, codes_key, str(like.dtype), str(captions.slots), str(self.shard_size)]
        folder = teacher.store / f"features-{digest([*facts, *split.texts])}"
        contents = "the features of all pictures"
        paths = build_shards(folder, len(split), self.shard_size, self._compute, contents)
        self.shards = []  # slices [M, variants, 2, S, D] of files, read on access
        for path in paths:
            with input_errors(f"{path} cannot be read", REMEDY):
                self.shards.append(safe_open(path, framework="pt").get_slice("features"))

    def __call__(self, index: Tensor, variant: Tensor, branches: int, drop: Tensor | None = None) -> Tensor:
        """Return the features of pictures index [B] in variants [B], [branches * B, S, D] on the CPU; unconditional where drop [B]."""
        rows = []
        for i, v in zip(index.tolist(), variant.tolist(), strict=True):
            shard, row = divmod(i, self.shard_size)
            rows.append(self.shards[shard][row : row + 1, v : v + 1][0, 0])
        conditional, unconditional = torch.stack(rows, 1)  # [B, S, D] each
        if drop is not None:
            conditional = torch.where(drop[:, None, None], unconditional, conditional)
        return torch.cat((conditional, unconditional)) if branches == 2 else conditional

    @torch.no_grad()
    def _compute(self, parts: Sequence[range], done: Done) -> Iterator[Shard]:
        device, dtype = self.target.decoder.rotary_table.device, next(self.target.parameters()).dtype
        num_done = 0
        for part in parts:
            batches = []
            for index in torch.arange(part.start, part.stop).split(BATCH_SIZE):
                prompts, start = self.captions(index, 2)
                variants = []
                for variant in range(self.split.codes.shape[1]):
                    codes = self.split.pick(index, torch.full_like(index, variant)).to(device)
                    with autocast(device):
                        _, features = drafter_inputs(self.target, prompts, codes.repeat(2, 1), start)
                    variants.append(torch.stack(features.chunk(2), 1).cpu())  # [B, 2, S, D]
                batches.append(torch.stack(variants, 1))
                num_done += len(index)
                done(num_done)
            yield {"features": torch.cat(batches).to(dtype)}, {"pictures": len(part)}
