"""A drafter's inputs in training: prompts, and a frozen target's features of known codes, computed or from a cache on disk."""

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
from lanternpp.nn.files import wrong_file
from lanternpp.training.codes import Split
from lanternpp.training.loop import team
from lanternpp.training.material import REMEDY, Done, Shard, build_shards
from lanternpp.training.teacher import Teacher
from lanternpp.util.files import digest

SHARD = 1 << 28  # bytes of a shard of features, about
BATCH = 8


class CaptionPrompts:
    """The prompts of a split, padded on the left to one length; a caption that the target cannot follow becomes the null prompt."""

    def __init__(self, target: Target, split: Split):
        self.target, self.split = target, split
        known: dict[str | None, tuple[int, bool]] = {}  # slots, and whether some are padding
        target.cache_prompts(len(set(split.texts)))
        for text in (None, *dict.fromkeys(split.texts)):
            with suppress(InputError):
                embeds, start = self._prompt([text], 2)
                known[text] = embeds.shape[1], bool(start.any())
        target.release_encoder()
        if not known.keys() - {None}:
            raise InputError("the target can follow none of the captions: was it trained on other data?")
        self.slots = max(slots for slots, _ in known.values())
        self.padded = any(padded or slots < self.slots for slots, padded in known.values())
        self.texts = [text if text in known else None for text in split.texts]

    def __call__(
        self, index: Tensor, branches: int, drop: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Prompts of pictures index [B]: [branches * B, T, D], and the slots [branches * B] they begin at.

        The start is None where no prompt is padded. A second branch holds the unconditional prompts, and so does a single
        one where drop [B].
        """
        texts = [self.texts[i] for i in index.tolist()]
        embeds, start = self._prompt(texts, branches if drop is None else 2)
        if drop is not None:
            (embeds, other), (start, begins) = embeds.chunk(2), start.chunk(2)
            dropped = drop.to(embeds.device)
            embeds = torch.where(dropped[:, None, None], other, embeds)
            start = torch.where(dropped, begins, start)
        missing = self.slots - embeds.shape[1]
        if missing:
            embeds, start = F.pad(embeds, (0, 0, missing, 0)), start + missing
        return embeds, start if self.padded else None

    def _prompt(self, texts: list[str | None], branches: int) -> tuple[Tensor, Tensor]:
        with warnings.catch_warnings(action="ignore", category=PromptWarning), torch.no_grad():
            prompt = self.target.prompt(texts, branches)
        return prompt.embeds, prompt.start


def causal_mask(start: Tensor | None, count: int) -> Tensor | None:
    """Causal attention mask over `count` slots, for rows whose prompts begin at start [R]: [R, 1, count, count] bool.

    None where no row is padded. A padding slot attends to itself alone: a softmax over nothing would be NaN.
    """
    if start is None:
        return None
    slot = torch.arange(count, device=start.device)
    mask = (slot[:, None] >= slot) & (slot >= start[:, None, None])
    return (mask | (slot[:, None] == slot))[:, None]


def slot_inputs(target: Target, prompts: Tensor, codes: Tensor) -> Tensor:
    """The target's inputs: prompts [R, T, D] and all codes [R, length] but the last, [R, T + length - 1, D]."""
    return torch.cat((prompts, target.embed(codes[:, :-1]).to(prompts.dtype)), 1)


def drafter_inputs(
    target: Target,
    prompts: Tensor,
    codes: Tensor,
    start: Tensor | None = None,
    aux_layers: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """prompts [R, T, D] that begin at start [R], codes [R, length] -> a drafter's inputs and its targets.

    Returns next_inputs [R, S - 1, D], the input after each slot, and features [R, S, D], for S = T + length - 1 slots:
    a drafter predicts features[:, t + 1] from next_inputs[:, t] and features[:, t]. With aux_layers features are
    [R, S, (1 + aux) D], as `Decoder.forward` returns them.
    """
    inputs = slot_inputs(target, prompts, codes)
    mask = causal_mask(start, inputs.shape[1])
    return inputs[:, 1:], target.decoder.forward_sequence(inputs, seen=mask, aux_layers=aux_layers)


def spread_aux_layers(count: int, layers: int) -> tuple[int, ...]:
    """So many of the layers 0 .. layers - 2, evenly spread. InputError where there are not as many."""
    if count >= layers:
        raise InputError(
            f"--aux-layers {count} is too many: the target has {layers - 1} layers below its last."
        )
    return tuple(layers * (i + 1) // (count + 1) - 1 for i in range(count))


class FeatureCache:
    """The target's features of all pictures of a split in their variants, under both prompts, on disk; missing ones are computed.

    name: of the codes. InputError where the disk has no room.
    """

    def __init__(self, teacher: Teacher, captions: CaptionPrompts, split: Split, name: str):
        self.target, self.captions, self.split = captions.target, captions, split
        like = next(self.target.parameters())
        slots = captions.slots + self.target.length - 1
        size = split.codes.shape[1] * 2 * slots * self.target.decoder.config.dim * like.element_size()
        self.each = max(min(SHARD // size, len(split)), 1)
        key = digest(
            [teacher.origin, name, str(like.dtype), str(captions.slots), str(self.each), *split.texts]
        )
        where, contents = teacher.store / f"features-{key}", "the features of all pictures"
        paths = build_shards(where, len(split), self.each, self._compute, contents, size)
        self.pieces = []
        for path in paths:
            with wrong_file(f"{path} cannot be read", REMEDY):
                self.pieces.append(safe_open(path, framework="pt").get_slice("features"))

    def __call__(self, index: Tensor, variant: Tensor, branches: int, drop: Tensor | None = None) -> Tensor:
        """Of pictures index [B] in variants [B]: [branches * B, S, D] on the CPU; unconditional where drop [B]."""
        rows = []
        for i, v in zip(index.tolist(), variant.tolist(), strict=True):
            number, place = divmod(i, self.each)
            rows.append(self.pieces[number][place : place + 1, v : v + 1][0, 0])
        one, other = torch.stack(rows, 1)  # [B, S, D] twice
        if drop is not None:
            one = torch.where(drop[:, None, None], other, one)
        return torch.cat((one, other)) if branches == 2 else one

    @torch.no_grad()
    def _compute(self, parts: Sequence[range], done: Done) -> Iterator[Shard]:
        device, dtype = self.target.decoder.rotary_table.device, next(self.target.parameters()).dtype
        for part in parts:
            features = []
            for index in torch.arange(part.start, part.stop).split(BATCH):
                prompts, start = self.captions(index, 2)
                found = []
                for variant in range(self.split.codes.shape[1]):
                    codes = self.split.pick(index, torch.full_like(index, variant)).to(device)
                    with team().autocast(device):
                        _, made = drafter_inputs(self.target, prompts, codes.repeat(2, 1), start)
                    found.append(torch.stack(made.chunk(2), 1).cpu())  # [B, 2, S, D]
                features.append(torch.stack(found, 1))
                done(int(index[-1]) + 1 - part.start)
            yield {"features": torch.cat(features).to(dtype)}, {"pictures": len(part)}
