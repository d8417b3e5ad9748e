"""Emu3.5 and Emu3.5-Image (arXiv 2510.26583), 34B: Qwen3's layers over text and IBQ's codes of 16 px, in rows that end with a token.

A prompt is <|extra_203|> task and text <|extra_100|> <|image start|> HEIGHT*WIDTH <|image token|>, in codes; the unconditional
branch has no text (baaivision/Emu3.5, configs/example_config_t2i.py, which draws 55 x 73 codes with guidance 5 and top-k 5120).
Its guidance merges log-probabilities, which differ from logits by a constant of each branch alone. Text is read by emu3.tiktoken
of src/tokenizer_emu3_ibq, and pictures by BAAI/Emu3.5-VisionTokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from pathlib import Path
from typing import Any

from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.models.transformers.beside import TokenizerBeside
from lanternpp.models.transformers.format import Raster
from lanternpp.models.transformers.opening import Ranks, Text
from lanternpp.nn.sources import Source
from lanternpp.types import Depicted

BEGIN, IMAGE, CODES, END = "<|extra_203|>", "<|image start|>", "<|image token|>", "<|image end|>"
TASK, NO_TASK = "You are a helpful assistant for {task} task. USER: ", "You are a helpful assistant. USER: "
NUM_CODES = 131_072  # of the codebook
# Defaults of the authors' class, which writes no field that has its default.
DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "rope_scaling": None, "head_dim": 128}
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
    any_size, by_product, default_size, max_codes = True, True, "1168x880", 16_384
    defaults = {"cfg": 5.0, "top_k": 5120}  # noqa: RUF012
    vq_files = ("Emu3.5-VisionTokenizer", "../Emu3.5-VisionTokenizer")
    vq_hub = "BAAI/Emu3.5-VisionTokenizer"

    def __init__(self, model: Any):
        last, row_end = (getattr(model.config, name, None) for name in ("eoi_token_id", "eol_token_id"))
        if last is None or row_end is None:
            raise InputError(f"this {type(model).__name__} has no image tokens; known is {self.about}")
        codes = range(last + 1, min(model.config.vocab_size, last + 1 + NUM_CODES))
        super().__init__(model, model.model, codes, row_end)

    @classmethod
    def claims(cls, source: Source) -> bool:
        """Return whether a checkpoint has tokens of pictures, and norms of queries and keys, which Emu3 lacks."""
        return "eoi_token_id" in source.config and NORM in source.metas

    @classmethod
    def fields_of(cls, source: Source) -> Mapping[str, Any]:
        """Return fields with the defaults of the authors' own class."""
        fields = {name: source.config.get(name, value) for name, value in DEFAULTS.items()}
        return fields | {"model_type": "qwen3", "auto_map": None}

    @staticmethod
    def text_of(folder: Path) -> Text:
        """Return the tokenizer of tokenizer.json, or else of emu3.tiktoken."""
        text, source = Text(folder), "src/tokenizer_emu3_ibq of github.com/baaivision/Emu3.5"
        return text if text.path.is_file() else Ranks(folder / "emu3.tiktoken", SPECIAL, source)

    def conditional(self, text: str) -> list[int]:
        """Return the task, the pictures that the prompt shows, its text, and the size."""
        task = TASK.format(task="x2i" if isinstance(text, Depicted) else "t2i")
        return self._request(task, "{prompt} ASSISTANT: ", text)

    def unconditional(self, text: str | None) -> list[int]:
        """Return the task, the pictures that the prompt shows, and the size, without text."""
        return self._request(NO_TASK, " ASSISTANT: ", text)

    def _request(self, task: str, words: str, prompt: str | None) -> list[int]:
        end, text = ("<|extra_100|>", IMAGE, "{rows}*{columns}", CODES), prompt or ""
        if not isinstance(prompt, Depicted):
            return self.filled((BEGIN, task + words, *end), text)
        shown = [token for grid in prompt.pictures for token in self._picture(grid)]
        return [*self.filled((BEGIN, task), text), *shown, *self.filled((words, *end), text)]

    def _picture(self, grid: Tensor) -> list[int]:
        """Return the tokens of a picture of codes [rows, columns] in a prompt."""
        rows, columns = grid.shape
        codes = Raster(rows, columns, True).lay(grid[None], len(self.codes))[0]
        begin = self.text.filled((IMAGE, f"{rows}*{columns}", CODES))
        return [*begin, *self.token_ids(codes).tolist(), self.text.id(END)]

    def depicted(self, prompt: str, pictures: Sequence[Any], own_shape: bool = True) -> Depicted:
        """Encode pictures, each in its own shape as about as many codes as a square with those of a picture from text."""
        raster, depicted = self.raster, Depicted(prompt)
        side = isqrt(raster.rows * raster.columns - 1) + 1  # 64 for all sizes of the authors
        grids = [self.read_picture(picture, side * side) for picture in pictures]
        if own_shape and not self.fixed_size:
            rows, columns = grids[-1].shape
            raster = Raster(rows, columns, True)
        num_tokens = sum(len(self._picture(grid)) for grid in grids)
        depicted.pictures = grids
        depicted.shape = raster, self.prompt_slots(raster, num_tokens)
        return depicted
