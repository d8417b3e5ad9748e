"""The transformers models that can be drawn with in place, by the name of their class.

A family knows where its model keeps layers, embeddings, head and codebook, when a call of `generate` asks for a picture,
which rows and places that picture has, and what `generate` returns for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.inplace.decoder import replica
from lanternpp.inplace.format import Format, Processors, first_end
from lanternpp.inplace.target import InPlaceTarget, TokenHead, token_rows
from lanternpp.util.registry import unknown

MODE = "generation_mode"


@dataclass(frozen=True)
class Call:
    """What `generate` hands over: prompts, generation config and processors, and the model's own arguments."""

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


def set_length(arguments: dict[str, Any], count: int) -> None:
    """Make these arguments of `generate` ask for `count` new tokens."""
    arguments.pop("max_length", None)
    config = arguments.get("generation_config")
    if config is None:
        arguments["max_new_tokens"] = count
    else:
        config = arguments["generation_config"] = copy.deepcopy(config)
        config.max_length, config.max_new_tokens = None, count


class Family(InPlaceTarget):
    """A target in place, and how its model's `generate` is read and answered."""

    guidance: ClassVar[float] = 1.0  # where the call names none

    @staticmethod
    def asks_for_picture(arguments: Mapping[str, Any]) -> bool:
        """Whether these arguments of `generate` ask for a picture; other calls are the model's own."""
        return arguments.get("prefix_allowed_tokens_fn") is not None or arguments.get(MODE) == "image"

    def adjust(self, arguments: dict[str, Any]) -> None:
        """Change arguments of `generate` before transformers prepares them."""

    def format(self, call: Call) -> Format:
        """The places of the pictures of a call. InputError where it does not say."""
        if call.processors.allowed is None:
            raise InputError(
                f"{type(self).__name__} needs prefix_allowed_tokens_fn, which says where codes and row ends stand"
            )
        return Format.probed(call.processors, call.ids, call.room, set(self.codes), call.ends)

    def unconditional(self, call: Call) -> list[list[int]]:
        """The unconditional rows of guidance: `negative_prompt_ids`, or the last token of each prompt."""
        ids = call.processors.unconditional
        if ids is None:
            return [[row[-1]] for row in call.ids.tolist()]
        rows = token_rows(ids, call.processors.unconditional_mask)
        if len(call.ids) % len(rows):
            raise InputError(
                f"{len(rows)} negative prompts do not go with {len(call.ids)} prompts; give one for each"
            )
        return [row for row in rows for _ in range(len(call.ids) // len(rows))]

    def sequences(self, codes: Tensor, format: Format, call: Call) -> Tensor:
        """What `generate` returns for codes [B, length]: the prompts, and the tokens behind them."""
        tokens = self.token_ids(codes).to(call.ids)
        format.check(call.processors, torch.cat((call.ids, tokens), 1), call.ids.shape[1])
        tail = tokens.new_tensor(format.tail)[: max(0, call.room - tokens.shape[1])]
        tokens = torch.cat((tokens, tail.expand(len(tokens), -1)), 1)
        if call.ends:
            kept = first_end(tokens, call.ends)
            places = torch.arange(tokens.shape[1], device=tokens.device)
            pad = call.ends[0] if call.config.pad_token_id is None else call.config.pad_token_id
            tokens = tokens.where(places < kept[:, None], pad)[:, : int(kept.max())]
        return torch.cat((call.ids, tokens), 1)


class Janus(Family):
    """Janus and Janus-Pro: a table and a head of codes beside the vocabulary; `generation_mode="image"`."""

    guidance = 5.0

    def __init__(self, model: Any):
        inner = model.model
        super().__init__(
            inner.language_model,
            model.get_input_embeddings(),
            range(inner.generation_embeddings.num_embeddings),
        )
        self.image, self.output, self.vq = (
            model.prepare_embeddings_for_image_generation,
            inner.generation_head,
            inner.vqmodel,
        )
        self.count = int(inner.vision_model.config.num_image_tokens)

    @staticmethod
    def asks_for_picture(arguments: Mapping[str, Any]) -> bool:
        """By the mode alone."""
        return arguments.get(MODE) == "image"

    def adjust(self, arguments: dict[str, Any]) -> None:
        """Its pictures have one length, whatever the call says."""
        set_length(arguments, self.count)

    def format(self, call: Call) -> Format:
        """A square of codes."""
        return Format.plain(self.count)

    def unconditional(self, call: Call) -> list[list[int]]:
        """The prompt with every token but the begin of the text and of the image replaced by padding."""
        start = (getattr(call.config, "generation_kwargs", None) or {}).get("boi_token_id")
        if start is None or call.config.pad_token_id is None:
            raise InputError(
                "guidance of Janus needs pad_token_id and generation_kwargs={'boi_token_id': ...} in its generation config"
            )
        kept = {call.config.bos_token_id, start}
        rows = token_rows(call.ids, call.mask)
        return [[token if token in kept else call.config.pad_token_id for token in row] for row in rows]

    def sequences(self, codes: Tensor, format: Format, call: Call) -> Tensor:
        """The codes alone."""
        return codes.to(call.ids)

    def embed(self, codes: Tensor) -> Tensor:
        """codes [R, N] -> [R, N, D]."""
        embedded: Tensor = self.image(codes)
        return embedded

    def head(self, features: Tensor) -> Tensor:
        """features [..., D] -> logits [..., V]."""
        logits: Tensor = self.output(features)
        return logits

    @property
    def latents(self) -> Tensor:
        """l2-normalised."""
        return F.normalize(self.vq.quantize.embedding.weight, dim=-1)


class _OneVocabulary(Family):
    """Codes are tokens of the language model."""

    def __init__(self, model: Any, body: Any, extras: Sequence[int] = (), qk_norm: bool = False):
        mapping = model.model.vocabulary_mapping
        codes = [mapping.img2bpe[code] for code in sorted(mapping.img2bpe)]
        super().__init__(body, model.get_input_embeddings(), codes, extras, qk_norm)
        self.cut, self.vq = TokenHead(model.lm_head), model.model.vqmodel

    def head(self, features: Tensor) -> Tensor:
        """features [..., D] -> logits [..., V]."""
        return self.cut(features, self._code_ids)

    @property
    def latents(self) -> Tensor:
        """As they are."""
        weight: Tensor = self.vq.quantize.embedding.weight
        return weight


class Emu3(_OneVocabulary):
    """Emu3-Gen: `prefix_allowed_tokens_fn` says how large the picture is, with a row end behind every row."""

    def __init__(self, model: Any):
        super().__init__(model, model.model.text_model, [model.model.vocabulary_mapping.eol_token_id])


class Chameleon(_OneVocabulary):
    """Chameleon finetuned to draw (Anole, Lumina-mGPT).

    transformers' own class forbids image tokens, so that its `generate` writes text alone. Here `generation_mode="image"`
    draws a square of codes, and `prefix_allowed_tokens_fn` any other format.
    """

    def __init__(self, model: Any):
        super().__init__(model, model.model, qk_norm=True)
        down = 2 ** (len(model.config.vq_config.channel_multiplier) - 1)
        self.count = (model.config.vq_config.resolution // down) ** 2

    def adjust(self, arguments: dict[str, Any]) -> None:
        """A whole picture where the call names no other length."""
        given = (arguments, vars(arguments.get("generation_config") or object))
        if not any(each.get(name) for each in given for name in ("max_length", "max_new_tokens")):
            set_length(arguments, self.count)

    def format(self, call: Call) -> Format:
        """A square of codes, unless the call says otherwise."""
        return (
            Format.plain(min(self.count, call.room))
            if call.processors.allowed is None
            else super().format(call)
        )


class GlmImage(Family):
    """The autoregressive part of GLM-Image: a small picture and a large one in one sequence, with positions on two grids."""

    def __init__(self, model: Any):
        body, config = model.model.language_model, model.config.text_config
        super().__init__(
            body, model.get_input_embeddings(), range(config.vision_vocab_size), positions=self._positions
        )
        self.model, self.cut = [model.model], TokenHead(model.lm_head)  # in a list: not a module of this one
        self.table = torch.zeros(0, 3, dtype=torch.int64)

    @staticmethod
    def asks_for_picture(arguments: Mapping[str, Any]) -> bool:
        """It draws nothing else; only from text with drafts."""
        return arguments.get("pixel_values") is None

    def format(self, call: Call) -> Format:
        """Any code anywhere, as the model itself draws them, until a token ends the sequence."""
        grids = call.more.get("image_grid_thw")
        self.table = self._grid(call)
        room = call.room if grids is None else min(call.room, len(self.table) + 1)
        if call.processors.allowed is not None:
            raise InputError("prefix_allowed_tokens_fn is not supported for GLM-Image; leave it out")
        return Format.plain(room, 0 if grids is None else int(grids[0, 2]))

    def _grid(self, call: Call) -> Tensor:
        """The positions of new tokens, less those of the prompt, [n, 3]; InputError where samples differ."""
        grids = call.more.get("image_grid_thw")
        if grids is None:
            return torch.arange(call.room, device=self.device)[:, None].expand(-1, 3)
        model = replica(self.model[0])  # it keeps the positions, which another thread's call may be using
        model.get_rope_index(call.ids, grids, call.more.get("images_per_sample"), call.mask)
        lengths = torch.tensor([len(row) for row in token_rows(call.ids, call.mask)], device=self.device)
        tables = model._cached_decode_position_ids - lengths[:, None, None]
        if bool((tables != tables[:1]).any()):
            raise InputError("pictures of one batch must have one size; draw others in a call of their own")
        return tables[0].t().contiguous()

    def _positions(self, position: Tensor) -> Tensor:
        """Slots [R, N] -> positions [3, R, N]: a prompt's are its slots, a code's are on a grid behind it."""
        behind = position - self.slots
        place = behind.clamp(min=0, max=len(self.table) - 1)
        grid = self.table[place] + self.slots
        return grid.where((behind >= 0)[..., None], position[..., None]).permute(2, 0, 1)

    def head(self, features: Tensor) -> Tensor:
        """features [..., D] -> logits [..., V]."""
        return self.cut(features, self._code_ids)

    @property
    def latents(self) -> Tensor:
        """l2-normalised."""
        return F.normalize(self.model[0].vqmodel.quantize.embedding.weight, dim=-1)


KNOWN: dict[str, Callable[[Any], Family]] = {
    "JanusForConditionalGeneration": Janus,
    "Emu3ForConditionalGeneration": Emu3,
    "ChameleonForConditionalGeneration": Chameleon,
    "GlmImageForConditionalGeneration": GlmImage,
}


def family_of(model: Any) -> Family:
    """A model's family. InputError where it has none, or lies on several devices."""
    made = next((KNOWN[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in KNOWN), None)
    if made is None:
        raise InputError(unknown("a transformers model of class", type(model).__name__, KNOWN))
    places = {str(parameter.device) for parameter in model.parameters()}
    if len(places) > 1:
        raise InputError(f"the model lies on {', '.join(sorted(places))}; load it on one device")
    return made(model)
