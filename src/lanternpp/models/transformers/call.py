"""A call of transformers' `generate`: its logits processors as settings, its prompts, and what drafts do not support.

Logits processors that are known here are read; any other is rejected.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import generation
from transformers.generation import logits_process

from lanternpp.errors import InputError
from lanternpp.models.transformers.format import NO_TOKEN, Format

Allowed = Callable[[int, Tensor], Any]
"""transformers' `prefix_allowed_tokens_fn`."""
MODE = "generation_mode"
RESTORE = "leave it out, or undo the acceleration with lanternpp.restore(model)"
REMEMBERED = 16  # returned lists of tokens that are recognised when they are returned again
HARMLESS = (logits_process.LogitNormalization, logits_process.InfNanRemoveLogitsProcessor)
# in this order: the temperature before top-k before top-p
WARPERS: tuple[tuple[type, str], ...] = (
    (logits_process.TemperatureLogitsWarper, "temperature"),
    (logits_process.TopKLogitsWarper, "top_k"),
    (logits_process.TopPLogitsWarper, "top_p"),
)


@dataclass(frozen=True)
class Processors:
    """The logits processors of a call, as settings."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    guidance: float | None = None
    unconditional: Tensor | None = None  # [b, T] tokens; None: the last of each prompt
    unconditional_mask: Tensor | None = None  # [b, T]
    allowed: Allowed | None = None
    suppressed: frozenset[int] = frozenset()

    @classmethod
    def read(cls, processors: Iterable[Any]) -> Processors:
        """From the list that `generate` prepares. Raises InputError for one that is not known."""
        found: dict[str, Any] = {}
        last = -1
        for each in processors:
            kind = type(each)
            place = next((i for i, (warper, _) in enumerate(WARPERS) if kind is warper), None)
            if place is not None:
                if place <= last or getattr(each, "min_tokens_to_keep", 1) > 1:
                    raise InputError(
                        "temperature, top-k and top-p are honoured once each and in this order; give them as arguments of "
                        "generate"
                    )
                found[WARPERS[place][1]], last = getattr(each, WARPERS[place][1]), place
            elif kind is logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor:
                context = each.unconditional_context
                found |= {"guidance": each.guidance_scale, "unconditional": context["input_ids"]}
                found["unconditional_mask"] = context["attention_mask"]
            elif kind is logits_process.PrefixConstrainedLogitsProcessor and "allowed" not in found:
                found["allowed"] = each._prefix_allowed_tokens_fn
            elif kind is logits_process.SuppressTokensLogitsProcessor:
                tokens = frozenset(each.suppress_tokens.tolist())
                found["suppressed"] = found.get("suppressed", frozenset()) | tokens
            elif kind not in HARMLESS:
                raise InputError(
                    f"the logits processor {kind.__name__} is not supported with drafts; the call or model.generation_config asks for it: "
                    f"{RESTORE}"
                )
        return cls(**found)

    def greedy(self, greedy: bool) -> Processors:
        """The same, or the most probable code always."""
        return replace(self, temperature=0.0, top_k=0, top_p=1.0) if greedy else self


def check_config(config: Any, criteria: Iterable[Any]) -> None:
    """InputError where a generation config or a stopping criterion asks for something that drafts cannot give."""
    mode = config.get_generation_mode().value
    if mode not in ("greedy_search", "sample"):
        raise InputError(f"{mode.replace('_', ' ')} is not supported with drafts; sample, or decode greedily")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name):
            raise InputError(f"{name} is not supported with drafts; {RESTORE}")
    for each in criteria:
        if not isinstance(each, generation.MaxLengthCriteria | generation.EosTokenCriteria):
            raise InputError(
                f"the stopping criterion {type(each).__name__} is not supported with drafts; {RESTORE}"
            )


def reject_arguments(names: Sequence[str], given: Mapping[str, Any]) -> None:
    """InputError where one of these arguments of `generate` has a value."""
    for name in names:
        value = given.get(name)
        if value is not None and value is not False and not (hasattr(value, "__len__") and not len(value)):
            raise InputError(
                f"{name} is not supported with drafts; leave it out, or use lanternpp.restore(model)"
            )


@dataclass(frozen=True)
class Call:
    """The parts of a call of `generate`: prompts, generation config and processors, and the model's own arguments."""

    ids: Tensor  # [B, T]
    mask: Tensor | None  # [B, T]
    config: Any
    processors: Processors
    ends: Sequence[int]  # the tokens that end a sequence
    more: Mapping[str, Any]

    @property
    def room(self) -> int:
        """The most new tokens."""
        return int(self.config.max_length) - self.ids.shape[1]

    def probed(self, codes: Collection[int]) -> Format:
        """What `prefix_allowed_tokens_fn` allows after the prompts, called with every length up to `room` new tokens.

        codes: the tokens of image codes. Raises InputError where none of them is allowed, or the prompts of a batch differ.
        """
        reading = _Reading(self.processors)
        rows = [reading.places(row, prompt, self.room, self.ends) for row, prompt in enumerate(self.ids)]
        if any(row != rows[0] for row in rows):
            raise InputError(
                "prefix_allowed_tokens_fn differs within the batch; draw pictures of one size at once"
            )
        places = rows[0]
        coded = [not tokens.isdisjoint(codes) for tokens in places]
        if not any(coded):
            beside = " beside suppress_tokens" if self.processors.suppressed else ""
            raise InputError(f"prefix_allowed_tokens_fn allows no image tokens{beside}; {RESTORE}")
        length = max(n for n, tokens in enumerate(places, 1) if coded[n - 1] or len(tokens) > 1)
        drawn, tail = places[:length], tuple(min(tokens) for tokens in places[length:])
        numbers = {tokens: number for number, tokens in enumerate(dict.fromkeys(drawn))}
        extras = dict.fromkeys(token for tokens in numbers for token in sorted(tokens.difference(codes)))
        width = Format.plain(length).width if all(coded[:length]) else coded.index(False) + 1
        kinds = tuple(numbers[tokens] for tokens in drawn)
        return Format(length, width, tuple(extras), tuple(numbers), kinds, tail)

    def check(self, format: Format, tokens: Tensor) -> None:
        """InputError where `prefix_allowed_tokens_fn` allows something else after drawn tokens [B, n] than `format` has."""
        reading, first = _Reading(self.processors, format.sets), self.ids.shape[1]
        for row, sequence in enumerate(torch.cat((self.ids, tokens), 1)):
            for place, kind in enumerate(format.kinds[: tokens.shape[1]]):
                if reading.after(row, sequence[: first + place]) is not format.sets[kind]:
                    raise InputError(
                        "prefix_allowed_tokens_fn depends on the codes that were drawn, which drafts cannot follow; let it "
                        f"depend on their number alone, or {RESTORE}"
                    )

    def finished(self, tokens: Tensor, tail: Sequence[int]) -> Tensor:
        """Drawn tokens [B, n] -> what `generate` returns: the prompts, the tokens, and as much of `tail` as has room.

        Nothing follows a token that ends its sequence except padding.
        """
        more = tokens.new_tensor(tail)[: max(0, self.room - tokens.shape[1])]
        tokens = torch.cat((tokens, more.expand(len(tokens), -1)), 1)
        if self.ends:
            final = torch.isin(tokens, tokens.new_tensor(self.ends))
            count = torch.where(final.any(1), final.int().argmax(1) + 1, final.shape[1])  # [B]
            places = torch.arange(tokens.shape[1], device=tokens.device)
            pad = self.ends[0] if self.config.pad_token_id is None else self.config.pad_token_id
            tokens = tokens.where(places < count[:, None], pad)[:, : int(count.max())]
        return torch.cat((self.ids, tokens), 1)


class _Reading:
    """Calls of `prefix_allowed_tokens_fn`; equal sets of tokens are one object."""

    def __init__(self, processors: Processors, sets: Iterable[frozenset[int]] = ()):
        assert processors.allowed is not None
        self._allowed, self._suppressed = processors.allowed, processors.suppressed
        self._sets = {tokens: tokens for tokens in sets}
        # most functions return the same list again and again
        self._objects: dict[int, tuple[Any, frozenset[int]]] = {}

    def after(self, row: int, before: Tensor) -> frozenset[int]:
        """The tokens that are allowed after these."""
        given = self._allowed(row, before)
        held = self._objects.get(id(given))
        if held is None:
            listed = given.flatten().tolist() if isinstance(given, Tensor) else given
            allowed = frozenset(map(int, listed))
            found = allowed - self._suppressed
            if not found:
                raise InputError(
                    NO_TOKEN.format("suppress_tokens" if allowed else "prefix_allowed_tokens_fn")
                )
            held = self._objects[id(given)] = given, self._sets.setdefault(found, found)
            if len(self._objects) > REMEMBERED:
                del self._objects[next(iter(self._objects))]
        return held[1]

    def places(self, row: int, prompt: Tensor, limit: int, ends: Collection[int]) -> list[frozenset[int]]:
        """The tokens that are allowed at all places after a prompt [T], up to the end of the sequence or to `limit`."""
        tokens = torch.cat((prompt, prompt.new_zeros(limit)))
        found: list[frozenset[int]] = []
        for place in range(len(prompt), len(tokens)):
            found.append(self.after(row, tokens[:place]))
            if found[-1] <= set(ends):
                break
            tokens[place] = next(iter(found[-1]))
        return found


def token_rows(ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """The tokens of prompts [B, T] without their padding, which must be on the left. InputError."""
    if mask is None:
        return [row.tolist() for row in ids]
    seen = mask.to(torch.bool)
    if mask.shape != ids.shape or bool((seen[:, :-1] & ~seen[:, 1:]).any()) or not bool(seen[:, -1].all()):
        raise InputError("the attention mask must be [batch, tokens] and prompts padded on the left alone")
    return [row[kept].tolist() for row, kept in zip(ids, seen.to(ids.device), strict=True)]


def set_length(arguments: dict[str, Any], count: int) -> None:
    """Make these arguments of `generate` ask for `count` new tokens."""
    arguments.pop("max_length", None)
    config = arguments.get("generation_config")
    if config is None:
        arguments["max_new_tokens"] = count
    else:
        config = arguments["generation_config"] = copy.deepcopy(config)
        config.max_length, config.max_new_tokens = None, count
