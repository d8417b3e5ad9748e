"""What a drafter learns from: prompts, and a frozen target's features of known codes."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.models.base import PromptWarning, Target
from lanternpp.training.material.codes import Split


class CaptionPrompts:
    """The prompts of a split, padded on the left to one length; a caption that the target cannot follow becomes the null prompt."""

    def __init__(self, target: Target, split: Split):
        self.target = target
        self.known_texts: list[str] = []
        widths, starts = [], []
        target.cache_prompts(len(set(split.texts)))
        for text in (None, *dict.fromkeys(split.texts)):
            try:
                prompt = self._prompt([text], 2)
            except InputError:
                continue
            widths.append(prompt[0].shape[1])
            starts.append(prompt[1])
            if text is not None:
                self.known_texts.append(text)
        target.release_encoder()
        if not self.known_texts:
            raise InputError("the target can follow none of the captions: was it trained on other data?")
        self.slots = max(widths)
        self.padded = any(w < self.slots for w in widths) or bool(torch.cat(starts).any())
        known = set(self.known_texts)
        self.texts = [text if text in known else None for text in split.texts]

    def __call__(
        self, index: Tensor, branches: int, drop: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Prompts of pictures index [B]: [branches * B, T, D], and the slots [branches * B] they begin at.

        The start is None where no prompt is padded. A second branch holds the unconditional prompts, and so does
        the first where drop [B].
        """
        texts = [self.texts[i] for i in index.tolist()]
        embeds, start = self._prompt(texts, branches if drop is None else 2)
        if drop is not None:
            conditional, unconditional = embeds.chunk(2)
            dropped = drop.to(embeds.device)
            kept = torch.where(dropped[:, None, None], unconditional, conditional)
            begins = torch.where(dropped, start.chunk(2)[1], start.chunk(2)[0])
            embeds = kept if branches == 1 else torch.cat((kept, unconditional))
            start = begins if branches == 1 else torch.cat((begins, start.chunk(2)[1]))
        missing = self.slots - embeds.shape[1]
        if missing:
            embeds, start = F.pad(embeds, (0, 0, missing, 0)), start + missing
        return embeds, start if self.padded else None

    def _prompt(self, texts: list[str | None], branches: int) -> tuple[Tensor, Tensor]:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", PromptWarning)
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
    features: Tensor | None = None,
    aux_layers: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """prompts [R, T, D] that begin at start [R], codes [R, length] -> a drafter's inputs and what it should predict.

    Returns next_inputs [R, S - 1, D], the input after each slot, and features [R, S, D], for S = T + length - 1 slots:
    a drafter predicts features[:, t + 1] from next_inputs[:, t] and features[:, t]. If `features` are given, the
    target is not run. With aux_layers features are [R, S, (1 + aux) D], as `Decoder.forward` returns them.
    """
    inputs = slot_inputs(target, prompts, codes)
    if features is not None:
        return inputs[:, 1:], features
    mask = causal_mask(start, inputs.shape[1])
    return inputs[:, 1:], target.decoder.forward_sequence(inputs, seen=mask, aux_layers=aux_layers)


def spread_aux_layers(count: int, layers: int) -> tuple[int, ...]:
    """So many of the layers 0 .. layers - 2, evenly spread. InputError where there are not as many."""
    if count >= layers:
        raise InputError(
            f"--aux-layers {count} is too many: the target has {layers - 1} layers below its last."
        )
    return tuple(layers * (i + 1) // (count + 1) - 1 for i in range(count))
