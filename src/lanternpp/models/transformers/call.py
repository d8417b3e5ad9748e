"""A call of transformers' `generate`: its logits processors as settings, its prompts, and checks of what drafts support."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import generation
from transformers.generation import logits_process

from lanternpp.errors import InputError
from lanternpp.models.transformers.format import NO_TOKEN, Format

MODE = "generation_mode"
RESTORE = "leave it out, or undo the acceleration with lanternpp.restore(model)"
STRIDE = 32  # prompts are padded to a multiple of this number of slots, so that few shapes are compiled
IGNORED = (logits_process.LogitNormalization, logits_process.InfNanRemoveLogitsProcessor)
# The setting of each class, in the order in which samplers apply them.
WARPERS: dict[type, str] = {
    logits_process.TemperatureLogitsWarper: "temperature",
    logits_process.TopKLogitsWarper: "top_k",
    logits_process.TopPLogitsWarper: "top_p",
}


@dataclass(frozen=True)
class Processors:
    """The logits processors of a call, as settings."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    guidance: float | None = None
    unconditional: Tensor | None = None  # [b, T] tokens; None: the last token of each prompt
    unconditional_mask: Tensor | None = None  # [b, T]
    allowed: Callable[[int, Tensor], Any] | None = None  # transformers' `prefix_allowed_tokens_fn`
    suppressed: frozenset[int] = frozenset()

    @classmethod
    def read(cls, processors: Iterable[Any], greedy: bool) -> Processors:
        """Read the list that `generate` prepares; raise InputError for a processor that is not supported.

        greedy: always draw the most probable code, whatever the list has.
        """
        settings: dict[str, Any] = {}
        names = list(WARPERS.values())
        for processor in processors:
            kind, name = type(processor), WARPERS.get(type(processor))
            in_order = name is not None and settings.keys().isdisjoint(names[names.index(name) :])
            if name and in_order and getattr(processor, "min_tokens_to_keep", 1) == 1:
                settings[name] = getattr(processor, name)
            elif kind is logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor:
                context = processor.unconditional_context
                settings["guidance"] = processor.guidance_scale
                settings["unconditional"] = context["input_ids"]
                settings["unconditional_mask"] = context["attention_mask"]
            elif kind is logits_process.PrefixConstrainedLogitsProcessor and "allowed" not in settings:
                settings["allowed"] = processor._prefix_allowed_tokens_fn
            elif kind is logits_process.SuppressTokensLogitsProcessor:
                tokens = frozenset(processor.suppress_tokens.tolist())
                settings["suppressed"] = settings.get("suppressed", frozenset()) | tokens
            elif kind not in IGNORED:
                again = (
                    " a second time, with min_tokens_to_keep, or out of the order temperature, top-k, top-p,"
                )
                raise InputError(
                    f"the logits processor {kind.__name__}{again if name else ''} is not supported with drafts; the call or "
                    f"model.generation_config asks for it: {RESTORE}"
                )
        return cls(**settings | ({"temperature": 0.0, "top_k": 0, "top_p": 1.0} if greedy else {}))


def check_config(config: Any, criteria: Iterable[Any]) -> None:
    """Check that drafts support a generation config and stopping criteria; raise InputError otherwise."""
    mode = config.get_generation_mode().value
    if mode not in ("greedy_search", "sample"):
        raise InputError(f"{mode.replace('_', ' ')} is not supported with drafts; sample, or decode greedily")
    outputs = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    reject_arguments(outputs, vars(config))
    for criterion in criteria:
        if not isinstance(criterion, generation.MaxLengthCriteria | generation.EosTokenCriteria):
            raise InputError(
                f"the stopping criterion {type(criterion).__name__} is not supported with drafts; {RESTORE}"
            )


def reject_arguments(names: Sequence[str], arguments: Mapping[str, Any]) -> None:
    """Check that none of the named arguments of `generate`, or fields of its config, has a value; raise InputError otherwise."""
    for name in names:
        value = arguments.get(name)
        empty = isinstance(value, Sized) and not len(value)
        if value is not None and value is not False and not empty:
            raise InputError(f"{name} is not supported with drafts; {RESTORE}")


@dataclass(frozen=True)
class Call:
    """The parts of a call of `generate`: prompts, generation config and processors, and the model's own arguments."""

    ids: Tensor  # [B, T]
    mask: Tensor | None  # [B, T]
    config: Any
    processors: Processors
    ends: Sequence[int]  # the tokens that end a sequence
    model_kwargs: Mapping[str, Any]

    @property
    def max_new_tokens(self) -> int:
        """New tokens up to the end of the longest sequence that the call allows."""
        return int(self.config.max_length) - self.ids.shape[1]

    def probed(self, codes: Collection[int]) -> Format:
        """Return the format that `prefix_allowed_tokens_fn` allows after the prompts, at every place up to `max_new_tokens`.

        codes: the tokens of image codes. Raises InputError where none of them is allowed, or the prompts of a batch differ.
        """
        allowed_after = _allowed_tokens(self.processors)
        rows: list[list[frozenset[int]]] = []
        for row, prompt in enumerate(self.ids):
            rows.append(places := [])
            tokens = torch.cat((prompt, prompt.new_zeros(self.max_new_tokens)))
            for place in range(len(prompt), len(tokens)):
                places.append(allowed := allowed_after(row, tokens[:place]))
                if allowed <= set(self.ends):
                    break
                tokens[place] = next(iter(allowed))
        if any(places != rows[0] for places in rows):
            raise InputError(
                "prefix_allowed_tokens_fn differs within the batch; draw pictures of one size at once"
            )
        has_codes = [not tokens.isdisjoint(codes) for tokens in places]
        if not any(has_codes):
            beside = " beside suppress_tokens" if self.processors.suppressed else ""
            raise InputError(f"prefix_allowed_tokens_fn allows no image tokens{beside}; {RESTORE}")
        # Drawn places end with the last one that has a choice or a code.
        length = max(n for n, tokens in enumerate(places, 1) if has_codes[n - 1] or len(tokens) > 1)
        tail = tuple(min(tokens) for tokens in places[length:])
        places, has_codes = places[:length], has_codes[:length]
        kind_of = {tokens: kind for kind, tokens in enumerate(dict.fromkeys(places))}
        kinds = tuple(kind_of[tokens] for tokens in places)
        extras = dict.fromkeys(token for tokens in kind_of for token in sorted(tokens.difference(codes)))
        width = Format.plain(length).width if all(has_codes) else has_codes.index(False) + 1
        return Format(length, width, tuple(extras), tuple(kind_of), kinds, tail)

    def check(self, format: Format, tokens: Tensor) -> None:
        """Check that `prefix_allowed_tokens_fn` allows the tokens of a format after drawn tokens [B, n] too; raise InputError."""
        allowed_after, start = _allowed_tokens(self.processors, format.sets), self.ids.shape[1]
        for row, sequence in enumerate(torch.cat((self.ids, tokens), 1)):
            for place, kind in enumerate(format.kinds[: tokens.shape[1]]):
                if allowed_after(row, sequence[: start + place]) is not format.sets[kind]:
                    raise InputError(
                        "prefix_allowed_tokens_fn depends on the codes that were drawn, which drafts cannot follow; let it "
                        f"depend on their number alone, or {RESTORE}"
                    )

    def finished(self, tokens: Tensor, tail: Sequence[int]) -> Tensor:
        """Return prompts, drawn tokens [B, n] and as many tokens of `tail` as the call allows, as `generate` returns them.

        Only padding follows a token that ends its sequence.
        """
        end = tokens.new_tensor(tail)[: max(0, self.max_new_tokens - tokens.shape[1])]
        tokens = torch.cat((tokens, end.expand(len(tokens), -1)), 1)
        if self.ends:
            ends = torch.isin(tokens, tokens.new_tensor(self.ends))  # [B, n]
            lengths = torch.where(ends.any(1), ends.int().argmax(1) + 1, ends.shape[1])  # [B]
            places = torch.arange(tokens.shape[1], device=tokens.device)
            pad = self.ends[0] if self.config.pad_token_id is None else self.config.pad_token_id
            tokens = tokens.where(places < lengths[:, None], pad)[:, : int(lengths.max())]
        return torch.cat((self.ids, tokens), 1)


def _allowed_tokens(
    processors: Processors, sets: Iterable[frozenset[int]] = ()
) -> Callable[[int, Tensor], frozenset[int]]:
    """Return the function of a row and its tokens [n] that returns the set allowed after them; equal sets are one object."""
    function, distinct = processors.allowed, {tokens: tokens for tokens in sets}
    assert function is not None
    # Most functions return the same list again and again, so the last one of each length is kept with its set.
    last: dict[int, tuple[Any, frozenset[int]]] = {}

    def allowed_after(row: int, tokens: Tensor) -> frozenset[int]:
        result = function(row, tokens)
        if not isinstance(result, Tensor | Collection):
            result = list(result)
        previous, remaining = last.get(len(result), (None, frozenset()))
        if result is previous:
            return remaining
        allowed = frozenset(map(int, result.flatten().tolist() if isinstance(result, Tensor) else result))
        remaining = allowed - processors.suppressed
        if not remaining:
            raise InputError(NO_TOKEN.format("suppress_tokens" if allowed else "prefix_allowed_tokens_fn"))
        last[len(result)] = result, distinct.setdefault(remaining, remaining)
        return last[len(result)][1]

    return allowed_after


def token_rows(ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Return the tokens of prompts [B, T] without their padding; raise InputError unless it is on the left."""
    if mask is None:
        return ids.tolist()
    attended = mask.to(torch.bool)
    # A row that is padded on the left alone never falls from 1 to 0, and ends with 1.
    rising = mask.shape == ids.shape and bool((attended[:, :-1] <= attended[:, 1:]).all())
    if not rising or not bool(attended[:, -1].all()):
        raise InputError("the attention mask must be [batch, tokens] and prompts padded on the left alone")
    return [row[tokens].tolist() for row, tokens in zip(ids, attended.to(ids.device), strict=True)]


def padded(rows: Iterable[Sequence[int]]) -> int:
    """Return the slots of prompts of these tokens: those of the longest, rounded up."""
    return -(-max(map(len, rows)) // STRIDE) * STRIDE


def set_length(arguments: dict[str, Any], count: int) -> None:
    """Change arguments of `generate` to ask for `count` new tokens."""
    arguments.pop("max_length", None)
    config = arguments.get("generation_config")
    if config is None:
        arguments["max_new_tokens"] = count
    else:
        config = arguments["generation_config"] = copy.deepcopy(config)
        config.max_length, config.max_new_tokens = None, count
