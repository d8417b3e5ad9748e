"""Janus and Janus-Pro (arXiv 2410.13848, 2501.17811): a language model with a table and a head of codes beside it.

24 x 24 codes, 384 px. A prompt is <bos> <|User|>: text, a blank line, <|Assistant|>: <begin_of_image>; the unconditional branch is the
same with every token except the first and the last replaced by padding, which is attended to (deepseek-ai/Janus,
generation_inference.py, which draws with guidance 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.models.transformers.adapter import TransformersTarget
from lanternpp.models.transformers.call import MODE, Call, set_length, token_rows
from lanternpp.models.transformers.format import Format
from lanternpp.nn.backend import backend

BEGIN, PAD, DRAW = "<｜begin▁of▁sentence｜>", "<｜▁pad▁｜>", "<begin_of_image>"  # noqa: RUF001
TURN = "<|User|>: {prompt}\n\n<|Assistant|>:"


class Janus(TransformersTarget):
    """A model whose `generate` draws where generation_mode is "image", always with guidance."""

    class_name, model_type = "JanusForConditionalGeneration", "janus"
    about = "Janus and Janus-Pro in transformers' layout, as deepseek-community publishes them"
    request = (BEGIN, TURN, DRAW)
    guidance = 5.0
    defaults = {"cfg": 5.0}  # noqa: RUF012
    unit = True
    by_forward = False

    def __init__(self, model: Any):
        inner = model.model
        codes = range(inner.generation_embeddings.num_embeddings)
        super().__init__(model, inner.language_model, codes)
        self.sides = (isqrt(inner.vision_model.config.num_image_tokens),)

    def conditional(self, text: str) -> list[int]:
        """Return the user's turn of the chat, and the start of the assistant's."""
        return super().conditional(text.strip())

    def unconditional(self, text: str | None) -> list[int]:
        """Return padding tokens, which are attended to, in place of the turns; None: those of an empty prompt."""
        begin, *turn, draw = self.conditional(text or "")
        return [begin, *[self.text.id(PAD)] * len(turn), draw]

    def embed(self, codes: Tensor) -> Tensor:
        """Embed codes [R, N] as [R, N, D]."""
        return self.model.prepare_embeddings_for_image_generation(codes)

    def head(self, features: Tensor) -> Tensor:
        """Return the logits [..., V] of features [..., D]."""
        return self.model.model.generation_head(features)

    def decoded(self, grid: Tensor) -> Tensor:
        """Decode codes [B, rows, columns] by `JanusVQVAE`, whose pictures have one grid: images [B, 3, H, W]."""
        return super().decoded(grid.flatten(1))

    def pack(self) -> None:
        """Pack the weights, and free the modules that no picture needs."""
        self.model.model.vision_model = self.model.model.aligner = None
        super().pack()

    def pack_head(self) -> None:
        """Pack the two layers of the head, and the layers that embed codes."""
        for module in (self.model.model.generation_head, self.model.model.generation_aligner):
            backend().pack(module)

    @staticmethod
    def asks_for_picture(arguments: Mapping[str, Any]) -> bool:
        """Return whether the mode is "image", which alone decides."""
        return arguments.get(MODE) == "image"

    def adjust(self, arguments: dict[str, Any]) -> None:
        """Ask for a whole picture, whatever length the call gives."""
        set_length(arguments, self.num_square_codes)

    def format(self, call: Call) -> Format:
        """Return the format of a whole picture, or the one that `prefix_allowed_tokens_fn` allows."""
        if call.processors.allowed is not None:
            return super().format(call)
        return Format.plain(self.num_square_codes)

    def unconditional_rows(self, call: Call) -> list[list[int]]:
        """Return the prompts, with every token except the begins of text and image replaced by padding."""
        start = (getattr(call.config, "generation_kwargs", None) or {}).get("boi_token_id")
        if start is None or call.config.pad_token_id is None:
            raise InputError(
                "guidance of Janus needs pad_token_id and generation_kwargs={'boi_token_id': ...} in its generation config"
            )
        pad, begins = call.config.pad_token_id, {call.config.bos_token_id, start}
        rows = token_rows(call.ids, call.mask)
        return [[token if token in begins else pad for token in row] for row in rows]

    def sequences(self, codes: Tensor, format: Format, call: Call) -> Tensor:
        """Return the codes alone, as `generate` does."""
        return codes.to(call.ids)
