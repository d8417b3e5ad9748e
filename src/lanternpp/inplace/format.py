"""What a call of transformers' `generate` asks for: how codes are sampled, and which tokens may stand at each place.

`generate` says both as a list of logits processors. Those that are known here are read; any other is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

import torch
from torch import Tensor
from transformers import generation
from transformers.generation import logits_process

from lanternpp.errors import InputError

Allowed = Callable[[int, Tensor], Any]  # transformers' prefix_allowed_tokens_fn
REMEMBERED = 16  # returned lists of tokens that are recognised when they are returned again
RESTORE = "leave it out, or undo the acceleration with lanternpp.restore(model)"
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
                    f"the logits processor {kind.__name__} is not supported with drafts; {RESTORE}"
                )
        return cls(**found)

    def greedy(self, greedy: bool) -> Processors:
        """The same, or the most probable code always."""
        return replace(self, temperature=0.0, top_k=0, top_p=1.0) if greedy else self


def check_config(config: Any, criteria: Iterable[Any]) -> None:
    """InputError where a generation config or a stopping criterion asks for what drafts cannot give."""
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


@dataclass(frozen=True)
class Format:
    """The places of a picture, and the tokens that may stand at each.

    sets: the different sets of tokens; kinds: which of them holds at each place. Both are empty where every token of the
    target may stand everywhere. tail: tokens that must follow, each the only one allowed; they are not drawn.
    """

    length: int
    width: int  # places from one code to the one below it; only guesses depend on it
    extras: tuple[int, ...] = ()  # allowed tokens that are no codes of the image, such as a row end
    sets: tuple[frozenset[int], ...] = ()
    kinds: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()

    @classmethod
    def plain(cls, length: int, width: int = 0) -> Format:
        """A picture of codes alone; without a width it is taken for a square."""
        side = isqrt(length)
        return cls(length, width or (side if side * side == length else length))

    def without(self, suppressed: frozenset[int], tokens: Iterable[int]) -> Format:
        """The same, some tokens of those that are drawn being suppressed at every place."""
        if self.kinds or not suppressed:
            return self
        return replace(self, sets=(frozenset(tokens) - suppressed,), kinds=(0,) * self.length)

    @classmethod
    def probed(
        cls,
        processors: Processors,
        prompts: Tensor,
        limit: int,
        codes: Collection[int],
        ends: Collection[int],
    ) -> Format:
        """What `prefix_allowed_tokens_fn` allows behind prompts [B, T], called with every length up to `limit` new tokens.

        codes: the tokens of image codes; ends: those that end a sequence. Raises InputError where no image code is
        allowed, or the prompts of a batch differ.
        """
        assert processors.allowed is not None
        reading = _Reading(processors.allowed, processors.suppressed)
        rows = [reading.places(row, prompt, limit, ends) for row, prompt in enumerate(prompts)]
        if any(row != rows[0] for row in rows):
            raise InputError(
                "prefix_allowed_tokens_fn differs within the batch; draw pictures of one size at once"
            )
        sets, kinds = reading.sets, rows[0]
        free = [place for place, kind in enumerate(kinds) if len(sets[kind]) > 1]
        if not any(not sets[kinds[place]].isdisjoint(codes) for place in free):
            raise InputError(f"prefix_allowed_tokens_fn allows no choice of image tokens; {RESTORE}")
        length = free[-1] + 1
        drawn = dict.fromkeys(kinds[:length])
        extras = dict.fromkeys(token for kind in drawn for token in sorted(sets[kind].difference(codes)))
        end = next((place for place in range(length) if len(sets[kinds[place]]) == 1), None)
        tail = tuple(min(sets[kind]) for kind in kinds[length:])
        width = cls.plain(length).width if end is None else end + 1
        return cls(length, width, tuple(extras), tuple(sets), tuple(kinds[:length]), tail)

    def check(self, processors: Processors, sequences: Tensor, prompt: int) -> None:
        """InputError where `prefix_allowed_tokens_fn` allows something else behind what was drawn than was assumed.

        sequences [B, prompt + n]: with the codes drawn.
        """
        if processors.allowed is None:
            return
        reading = _Reading(processors.allowed, processors.suppressed, self.sets)
        for row, sequence in enumerate(sequences):
            for place, kind in enumerate(self.kinds[: sequences.shape[1] - prompt]):
                if reading.kind(row, sequence[: prompt + place]) != kind:
                    raise InputError(
                        "prefix_allowed_tokens_fn depends on the codes that were drawn, which drafts cannot follow; let it "
                        f"depend on their number alone, or {RESTORE}"
                    )


class _Reading:
    """Calls of `prefix_allowed_tokens_fn`; equal sets of tokens get one number."""

    def __init__(self, allowed: Allowed, suppressed: frozenset[int], sets: Iterable[frozenset[int]] = ()):
        self._allowed, self._suppressed = allowed, suppressed
        self.sets = list(sets)
        self._numbers = {tokens: number for number, tokens in enumerate(self.sets)}
        self._objects: dict[int, tuple[Any, int]] = {}  # most functions return the same list again and again

    def kind(self, row: int, tokens: Tensor) -> int:
        """The number of the set that is allowed behind these tokens."""
        given = self._allowed(row, tokens)
        held = self._objects.get(id(given))
        if held is None:
            listed = given.flatten().tolist() if isinstance(given, Tensor) else given
            found = frozenset(map(int, listed)) - self._suppressed
            if not found:
                raise InputError("prefix_allowed_tokens_fn allows no token at all at some place")
            if found not in self._numbers:
                self._numbers[found] = len(self.sets)
                self.sets.append(found)
            held = self._objects[id(given)] = given, self._numbers[found]
            if len(self._objects) > REMEMBERED:
                del self._objects[next(iter(self._objects))]
        return held[1]

    def places(self, row: int, prompt: Tensor, limit: int, ends: Collection[int]) -> list[int]:
        """The kinds of all places behind a prompt [T], up to the end of the sequence or to `limit`."""
        tokens = torch.cat((prompt, prompt.new_zeros(limit)))
        kinds: list[int] = []
        for place in range(len(prompt), len(tokens)):
            kinds.append(self.kind(row, tokens[:place]))
            allowed = self.sets[kinds[-1]]
            if allowed <= set(ends):
                break
            tokens[place] = next(iter(allowed))
        return kinds


def first_end(tokens: Tensor, ends: Sequence[int]) -> Tensor:
    """tokens [B, n] -> how many are kept of each row, the first token that ends it among them, [B]."""
    final = torch.isin(tokens, torch.tensor(list(ends), dtype=tokens.dtype, device=tokens.device))
    count = final.shape[1]
    return torch.where(final.any(1), final.int().argmax(1) + 1, count)
