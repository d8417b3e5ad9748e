"""Emu3.5 and Emu3.5-Image (arXiv 2510.26583), 34B: Qwen3's layers over text and IBQ's codes of 16 px, in rows that end with a token.

A prompt is <|extra_203|> task and text <|extra_100|> <|image start|> HEIGHT*WIDTH <|image token|>, in codes; the unconditional
branch has no text (baaivision/Emu3.5, configs/example_config_t2i.py, which draws 55 x 73 codes with guidance 5 and top-k 5120).
Its guidance merges log-probabilities, which differ from logits by a constant of each branch alone. Text is read by emu3.tiktoken
of src/tokenizer_emu3_ibq, and pictures by BAAI/Emu3.5-VisionTokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.models.transformers.beside import TokenizerBeside
from lanternpp.models.transformers.format import Raster
from lanternpp.models.transformers.opening import Ranks, Text
from lanternpp.nn.sources import Source
from lanternpp.types import Depicted

BEGIN, ANSWER = "<|extra_203|>", "<|extra_100|>"
IMAGE, CODES, END = "<|image start|>", "<|image token|>", "<|image end|>"
TASK, NO_TASK = "You are a helpful assistant for {task} task. USER: ", "You are a helpful assistant. USER: "
ANSWER_FROM = "ASSISTANT: "
COUNT = 131_072  # codes of the codebook
# of the class that its config.json is written by
USUAL = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "rope_scaling": None, "head_dim": 128}
NORM = "model.layers.0.self_attn.q_norm.weight"
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *(f"<|extra_{n}|>" for n in range(205)),
    *(CODES, IMAGE, END),
)
"""The tokens after those of the ranks; codes follow."""


class Emu35(TokenizerBeside):
    """In `generate`, `prefix_allowed_tokens_fn` says how large the picture is, with a row end after every row."""

    class_name, model_type = "Qwen3ForCausalLM", "Emu3"
    about = "Emu3.5, as its authors publish it or as a Qwen3"
    any_size, by_product, usual, largest = True, True, "1168x880", 16_384
    recommended = {"cfg": 5.0, "top_k": 5120}  # noqa: RUF012
    vq_files = ("Emu3.5-VisionTokenizer", "../Emu3.5-VisionTokenizer")
    vq_hub = "BAAI/Emu3.5-VisionTokenizer"

    def __init__(self, model: Any):
        last, row_end = (getattr(model.config, name, None) for name in ("eoi_token_id", "eol_token_id"))
        if last is None or row_end is None:
            raise InputError(f"this {type(model).__name__} has no image tokens; known is {self.about}")
        codes = range(last + 1, min(model.config.vocab_size, last + 1 + COUNT))
        super().__init__(model, model.model, codes, row_end=row_end)

    @classmethod
    def claims(cls, source: Source) -> bool:
        """Norms of queries and keys, which Emu3 lacks, beside tokens of pictures."""
        return "eoi_token_id" in source.config and NORM in source.metas

    @classmethod
    def fields_of(cls, source: Source) -> Mapping[str, Any]:
        """The defaults of the authors' own class."""
        fields = {name: source.config.get(name, value) for name, value in USUAL.items()}
        return fields | {"model_type": "qwen3", "auto_map": None}

    @staticmethod
    def text_of(folder: Path) -> Text:
        """Its tokenizer.json, or else emu3.tiktoken."""
        text = Text(folder)
        return text if text.path.is_file() else Ranks(folder / "emu3.tiktoken", SPECIAL)

    def conditional(self, text: str) -> list[int]:
        """The task with the pictures that the prompt shows and its text, and the size."""
        task = TASK.format(task="x2i" if isinstance(text, Depicted) else "t2i")
        return self._request(task, text, f"{text} {ANSWER_FROM}")

    def unconditional(self, text: str | None) -> list[int]:
        """The task and the pictures without text, and the size."""
        return self._request(NO_TASK, text, f" {ANSWER_FROM}")

    def _request(self, before: str, prompt: str | None, after: str) -> list[int]:
        text, raster = self.text, self.raster
        if isinstance(prompt, Depicted):
            shown = [token for grid in prompt.pictures for token in self._picture(grid)]
            words = [*text.ids(before), *shown, *text.ids(after)]
        else:
            words = text.ids(before + after)
        return [text.id(BEGIN), *words, text.id(ANSWER), *self._sized(raster.rows, raster.columns)]

    def _sized(self, rows: int, columns: int) -> list[int]:
        """The tokens before the codes of a picture."""
        return [self.text.id(IMAGE), *self.text.ids(f"{rows}*{columns}"), self.text.id(CODES)]

    def _picture(self, grid: Tensor) -> list[int]:
        """A picture of codes [rows, columns] in a prompt."""
        rows, columns = grid.shape
        laid = Raster(rows, columns, True).lay(grid[None], len(self.codes))
        return [*self._sized(rows, columns), *self.token_ids(laid[0]).tolist(), self.text.id(END)]

    def depicted(self, prompt: str, pictures: Sequence[Any], own_shape: bool = True) -> Depicted:
        """Pictures as codes, each of about as many as a picture from text, in its own shape."""
        raster, made = self.raster, Depicted(prompt)
        made.pictures = [self.read_picture(one, raster.rows * raster.columns) for one in pictures]
        if own_shape and not self.fixed_size:
            rows, columns = made.pictures[-1].shape
            raster = Raster(rows, columns, True)
        made.shape = raster, self.room(raster, sum(len(self._picture(grid)) for grid in made.pictures))
        return made
