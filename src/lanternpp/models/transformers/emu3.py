"""Emu3-Gen (arXiv 2409.18869): one language model over text and codes, in rows that end with a token.

The layout is that of BAAI/Emu3-Gen-hf. A prompt is <|extra_203|> text <|image start|> HEIGHT*WIDTH <|image token|>, in codes; the
unconditional branch has a negative prompt in its place (both texts, guidance 3 and top-k 2048 are from baaivision/Emu3,
image_generation.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lanternpp.models.transformers.adapter import TransformersTarget
from lanternpp.models.transformers.opening import Text
from lanternpp.nn.sources import Source

BEGIN = "<|extra_203|>"
REQUEST = "{prompt} masterpiece, film grained, best quality."
NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, "
    "worst quality, low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)
SIZE = ("<|image start|>", "{rows}*{columns}", "<|image token|>")


class Emu3(TransformersTarget):
    """In `generate`, `prefix_allowed_tokens_fn` says how large the picture is, with a row end after every row."""

    class_name, model_type = "Emu3ForConditionalGeneration", "emu3"
    about = "Emu3-Gen in transformers' layout"
    request, null_request = (BEGIN, REQUEST, *SIZE), (BEGIN, NEGATIVE, *SIZE)
    any_size, default_size, max_codes = True, "720", 8192
    defaults = {"cfg": 3.0, "top_k": 2048}  # noqa: RUF012

    def __init__(self, model: Any):
        mapping = model.model.vocabulary_mapping
        codes = [mapping.img2bpe[code] for code in sorted(mapping.img2bpe)]
        super().__init__(model, model.model.text_model, codes, mapping.eol_token_id)
        # Every stage except the first halves the size.
        self.pixels_per_code = 1 << len(self.vq.config.channel_multiplier) - 1

    @classmethod
    def fields_of(cls, source: Source) -> Mapping[str, Any]:
        """Return the vocabulary of the checkpoint's config, or else of its tokenizer."""
        return {"vocabulary_map": source.config.get("vocabulary_map") or Text(source.folder).vocabulary()}

    def encoder(self) -> nn.Module:
        """Return the encoder, which reads a picture as a video of equal frames."""
        return _Frames(self.vq)


class _Frames(nn.Module):
    """The encoder of `Emu3VQVAE` for pictures."""

    def __init__(self, vq: Any):
        super().__init__()
        self.encoder, self.quant_conv = vq.encoder, vq.quant_conv
        self.num_frames = vq.config.temporal_downsample_factor

    def forward(self, images: Tensor) -> Tensor:
        """Encode images [B, 3, H, W] in [-1, 1] as latents [B, C, rows, columns]."""
        frames = self.encoder(images[:, None].repeat(1, self.num_frames, 1, 1, 1))
        latents: Tensor = self.quant_conv(frames.transpose(1, 2))
        return latents[:, :, 0]
