"""Tiny models of transformers that draw pictures, and calls of their `generate` that ask for one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import ChameleonForConditionalGeneration, GenerationConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from helpers.families import (
    CODES,
    write_chameleon,
    write_emu3,
    write_emu35,
    write_glm_image,
    write_janus,
    write_liquid,
    write_lumina2,
    write_simplear,
)
from lanternpp.models.transformers.janus import BEGIN, PAD

HEIGHT = WIDTH = 4


class DrawingChameleon(ChameleonForConditionalGeneration):
    """transformers' Chameleon without the line that forbids image tokens, so that its `generate` can draw."""

    def forward(self, input_ids: Any = None, logits_to_keep: int = 0, **more: Any) -> CausalLMOutputWithPast:
        out = dict(self.model(input_ids=input_ids, **more))
        logits = self.lm_head(out.pop("last_hidden_state")[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, **out)


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Rows of tokens, padded on the left, and their mask."""
    width = max(map(len, rows))
    ids = torch.tensor([[1] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


@dataclass
class Case:
    """A tiny model, the arguments of a call of three prompts that draws a picture, and those that add guidance."""

    model: Any
    arguments: dict[str, Any]
    guidance: dict[str, Any] = field(default_factory=dict)
    rows: list[list[int]] = field(default_factory=list)

    def inputs(self, count: int) -> dict[str, Any]:
        """The arguments for the first `count` prompts."""
        ids, mask = padded(self.rows[:count])
        cut = {
            k: v[: 2 * count] if k == "image_grid_thw" else v[:count] if isinstance(v, Tensor) else v
            for k, v in self.arguments.items()
        }
        return {"input_ids": ids, "attention_mask": mask, **cut}

    def negative(self, count: int) -> dict[str, Any]:
        """The arguments of guidance for `count` prompts."""
        return {k: v[:count] if isinstance(v, Tensor) else v for k, v in self.guidance.items()}

    def call(self, target: Any, texts: list[str], scale: float) -> dict[str, Any]:
        """The arguments that draw what a pipeline's target, read from the same files, draws of these texts."""
        ids, mask = padded([target.conditional(text) for text in texts])
        given = self.inputs(len(texts)) | {"input_ids": ids, "attention_mask": mask}
        if "guidance_scale" in given:  # Janus, which has it in every call
            config = self.model.generation_config
            config.pad_token_id, config.bos_token_id = target.text.id(PAD), target.text.id(BEGIN)
            config.generation_kwargs = {"boi_token_id": int(ids[0, -1])}
        elif scale > 1:
            negative, seen = padded([target.unconditional(text) for text in texts])
            given |= {"negative_prompt_ids": negative, "negative_prompt_attention_mask": seen}
        return given | {"guidance_scale": scale}

    def tokens(self, drawn: Tensor, given: dict[str, Any], target: Any) -> Tensor:
        """The codes of a call's pictures, as tokens where the model has tokens for them."""
        start = 0 if "generation_mode" in given else given["input_ids"].shape[1]
        return drawn[:, start : start + target.length]


def rows_of(
    codes: Any, row_end: int, start: int, first: int, after: tuple[int, ...] = ()
) -> Callable[[int, Tensor], Any]:
    """A `prefix_allowed_tokens_fn` of rows of codes with row ends.

    first: places from the token `start` to the first code. after: the tokens that follow the last code, the last of them repeated.
    """

    def allowed(batch: int, tokens: Tensor) -> Any:
        place = len(tokens) - int(torch.nonzero(tokens == start)[0][0]) - first
        last = place - (WIDTH + 1) * HEIGHT + 1
        if last >= 0 and after:
            return (after[min(last, len(after) - 1)],)
        return (row_end,) if place % (WIDTH + 1) == WIDTH else codes

    return allowed


def in_format(
    model: Any, rows: list[list[int]], allowed: Any, length: int, negative: list[int], **more: Any
) -> Case:
    """A case of `prefix_allowed_tokens_fn` and guidance with the same negative prompt for each row; more: arguments of the call."""
    arguments = {"prefix_allowed_tokens_fn": allowed, "max_new_tokens": length}
    arguments |= {"eos_token_id": None, "pad_token_id": 1} | more
    guidance = {"guidance_scale": 3.0, "negative_prompt_ids": torch.tensor([negative] * 3)}
    return Case(model, arguments, guidance, rows)


def emu3(folder: Path) -> Case:
    """Rows of 4 codes with a row end after each, then three tokens that end the picture, as its documentation has it."""
    model = write_emu3(folder).double()
    vocab = model.model.vocabulary_mapping.vocab_map
    visual = model.vocabulary_mapping.image_tokens
    start = vocab["<|image token|>"]
    row_end, eof, end, eos, pad = (
        vocab[token]
        for token in ("<|extra_200|>", "<|extra_201|>", "<|image end|>", "<|extra_204|>", "<|endoftext|>")
    )
    tail = [vocab["<|image start|>"], vocab["4*4"], start]
    rows = [[vocab["<|extra_203|>"], *(vocab[word] for word in text.split()), *tail] for text in PROMPTS]
    allowed, negative = rows_of(visual, row_end, start, 1, (row_end, eof, end, eos, pad)), vocab["lowres"]
    case = in_format(model, rows, allowed, 500, [negative, *tail], eos_token_id=eos, pad_token_id=pad)
    case.guidance["negative_prompt_attention_mask"] = torch.ones_like(case.guidance["negative_prompt_ids"])
    return case


PROMPTS = ("a photo of the red tulip", "red sea", "the sea at sunset")


def emu35(folder: Path) -> Case:
    """Rows of 4 codes with a row end after each except the last, then the token that ends the picture."""
    model = write_emu35(folder).double()
    config = model.config
    codes, end = range(config.eoi_token_id + 1, config.vocab_size), config.eoi_token_id
    allowed = rows_of(codes, config.eol_token_id, config.img_token_id, 1, (end,))
    tail = [config.boi_token_id, *b"4*4", config.img_token_id]
    rows = [[*text.encode(), *tail] for text in PROMPTS]
    ends = {"eos_token_id": end, "pad_token_id": 0}
    return in_format(model, rows, allowed, (WIDTH + 1) * HEIGHT, [*b"no", *tail], **ends)


def chameleon(folder: Path) -> Case:
    """Anole: 16 codes."""
    model = write_chameleon(folder).double()
    model.__class__ = DrawingChameleon
    vocab = model.model.vocabulary_mapping.vocab_map
    codes = model.model.vocabulary_mapping.image_tokens
    rows = [
        [vocab["<s>"], *(vocab[word] for word in text.split()), vocab["<racm3:break>"]] for text in PROMPTS
    ]
    negative = [vocab[word] for word in ("<s>", "sea", "at", "<racm3:break>")]
    return in_format(model, rows, lambda batch, tokens: codes, 16, negative)


def lumina2(folder: Path) -> Case:
    """Rows of 4 codes with a row end after each except the last."""
    model = write_lumina2(folder).double()
    model.__class__ = DrawingChameleon
    vocab = model.model.vocabulary_mapping.vocab_map
    begin, row_end = (vocab[token] for token in ("<racm3:break>", "<reserved08799>"))
    codes = sorted(token for name, token in vocab.items() if name.startswith("<MOVQGAN"))

    tail = [begin, vocab["<reserved08801>"], vocab["<reserved08801>"]]
    rows = [[vocab["<|endoftext|>"], *(vocab[word] for word in text.split()), *tail] for text in PROMPTS]
    return in_format(model, rows, rows_of(codes, row_end, begin, 3), (WIDTH + 1) * HEIGHT - 1, tail)


def language(folder: Path, write: Callable[[Path], Any], begin: int, end: int, negative: list[int]) -> Case:
    """A language model whose last tokens are codes: 16 of them after a token that ends the prompt."""
    model = write(folder).double()
    codes = range(model.config.vocab_size - CODES, model.config.vocab_size)
    words = [6 + n for n in range(8)]
    rows = [[begin, *words[:size], end] for size in (6, 2, 4)]
    return in_format(model, rows, lambda batch, tokens: codes, 16, negative)


def janus(folder: Path) -> Case:
    """Its own image mode, which always guides."""
    model = write_janus(folder).double()
    rows = [[0, *(5 + n for n in range(size)), 2] for size in (6, 2, 4)]
    model.generation_config = GenerationConfig(
        bos_token_id=0, pad_token_id=1, generation_kwargs={"boi_token_id": 2}, max_length=64
    )
    return Case(model, {"generation_mode": "image", "guidance_scale": 5.0}, {}, rows)


def glm_image(folder: Path) -> Case:
    """A small picture of 2 x 3 codes, then one of 4 x 3, any token anywhere until one ends the sequence."""
    model = write_glm_image(folder).double()
    rows = [[70 + n for n in range(size)] + [CODES] for size in (6, 2, 4)]
    grids = torch.tensor([[1, 4, 3], [1, 2, 3]] * 3)
    arguments = {"image_grid_thw": grids, "images_per_sample": torch.tensor([2, 2, 2]), "max_new_tokens": 19}
    return Case(model, arguments, {}, rows)


CASES: dict[str, Callable[[Path], Case]] = {
    "janus": janus,
    "emu3": emu3,
    "chameleon": chameleon,
    "lumina2": lumina2,
    "emu3.5": emu35,
    "glm-image": glm_image,
    "liquid": lambda folder: language(folder, write_liquid, 2, 3, [2, 5, 3]),
    "simplear": lambda folder: language(folder, write_simplear, 2, 3, [2, 7, 9, 3]),
}
