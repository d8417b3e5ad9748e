"""Janus and Janus-Pro (arXiv 2410.13848, 2501.17811): a language model with a table and a head of codes beside it.

24 x 24 codes, 384 px. Two layouts are published: transformers' `JanusForConditionalGeneration`
(deepseek-community/Janus-Pro-1B) and its authors' `MultiModalityCausalLM` (deepseek-ai/Janus-Pro-1B). A prompt is
<bos> <|User|>: text, a blank line, <|Assistant|>: <begin_of_image>; the unconditional branch is the same with
every token but the first and the last replaced by padding, which is attended to (deepseek-ai/Janus,
generation_inference.py, which draws with guidance 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.models.base import check_codes
from lanternpp.models.language import LanguageTarget, Raster, language_rules
from lanternpp.models.tokens import Text
from lanternpp.models.vq.layouts import LLAMAGEN, TRANSFORMERS, Names, read_vqgan
from lanternpp.models.vq.llamagen import read_tokenizer, save_tokenizer
from lanternpp.models.vq.vqgan import VQGAN, PublishedVQ, VQGANConfig
from lanternpp.nn import llama
from lanternpp.nn.configs import Codes, Grid, Positions, RopeBase, config_as
from lanternpp.nn.decoder import DecoderConfig
from lanternpp.nn.sources import SAME, Rename, Source, blank
from lanternpp.nn.stores import Store
from lanternpp.util.schema import Between

BEGIN, PAD, DRAW = "<｜begin▁of▁sentence｜>", "<｜▁pad▁｜>", "<begin_of_image>"  # noqa: RUF001
TURN = "<|User|>: {prompt}\n\n<|Assistant|>:"


@dataclass(frozen=True)
class Layout:
    """Where a published checkpoint keeps the parts that draw; regular expressions."""

    language: str
    table: str
    aligner: tuple[str, ...]
    head: tuple[str, str]
    vq: str
    vq_names: Names
    config: str  # the language model's part of config.json
    others: str  # what reads images and writes text


LAYOUTS = (
    Layout(
        r"model\.language_model\.",
        "model.generation_embeddings.weight",
        (r"model\.generation_aligner\.fc1", r"model\.generation_aligner\.hidden_layers\.0"),
        (r"model\.generation_head\.proj_out", r"model\.generation_head\.vision_head"),
        r"model\.vqmodel\.",
        TRANSFORMERS,
        "text_config",
        r"(lm_head|model\.(vision_model|aligner|vqmodel))\..*",
    ),
    Layout(
        r"language_model\.model\.",
        "gen_embed.weight",
        (r"gen_aligner\.layers\.0", r"gen_aligner\.layers\.2"),
        (r"gen_head\.output_mlp_projector", r"gen_head\.vision_head"),
        r"gen_vision_model\.",
        LLAMAGEN,
        "language_config",
        r"(language_model\.lm_head|vision_model|aligner|gen_vision_model)\..*",
    ),
)


@dataclass(frozen=True)
class JanusConfig:
    """The shape of a Janus."""

    shape: DecoderConfig
    vq: VQGANConfig
    tokens: Codes  # of the text vocabulary
    positions: Positions
    base: RopeBase  # of the rotations
    grid: Grid = 24  # codes of an image's side
    head_width: Annotated[int, Between(0, 1 << 16)] = (
        0  # between the two layers of the head; 0: the width of the model
    )


@dataclass(frozen=True)
class Vision:
    """The `vision_config` of a published config.json: pixels."""

    image_size: Annotated[int, Between(1, 1 << 12)] = 384
    patch_size: Annotated[int, Between(1, 1 << 10)] = 16


@dataclass(frozen=True)
class Published:
    """The parts of a published config.json."""

    text_config: Mapping[str, Any] | None = None
    language_config: Mapping[str, Any] | None = None
    vision_config: Vision | None = None
    vq_config: PublishedVQ | None = None


class JanusTarget(LanguageTarget):
    """A Janus, drawing."""

    kind = "janus"
    about = "Janus and Janus-Pro, in transformers' layout or their authors'"

    def __init__(self, config: JanusConfig, text: Text, vq: VQGAN):
        raster, shape = Raster(config.grid, config.grid), config.shape
        slots = self.slots_within(config.positions, raster)
        rotary_table = self.rotary_table(slots, raster, shape, config.base)
        super().__init__(shape, rotary_table, config.vq.codes, raster, config.tokens)
        self.config, self.text = config, text
        self.defaults = {"cfg": 5.0}
        width = config.head_width or shape.dim
        self.code_table = nn.Parameter(torch.empty(config.vq.codes, config.vq.dim))
        self.aligner = nn.Sequential(
            nn.Linear(config.vq.dim, shape.dim), nn.GELU(), nn.Linear(shape.dim, shape.dim)
        )
        self.output = nn.Sequential(nn.Linear(shape.dim, width), nn.GELU(), nn.Linear(width, config.vq.codes))
        self._vq = [vq]  # in a list: not among this module's weights

    @classmethod
    def claims(cls, source: Source) -> bool:
        """By the table of codes that both layouts have."""
        return layout_of(source) is not None and not source.kinds.isdisjoint({"janus", "multi_modality"})

    @classmethod
    def read(cls, source: Source, dtype: torch.dtype, device: torch.device | str = "cpu") -> Self:
        """The target; tokenizer.json lies beside the checkpoint."""
        if cls.is_ours(source):
            config = config_as(JanusConfig, source.config, source.path)
            vq = read_tokenizer(Source.open(cls.beside(source) / "tokenizer"), config.grid, dtype, device)
            mapped, skip = [SAME], []
        else:
            layout = layout_of(source)
            if layout is None:
                raise InputError(f"{source.path} has no table of image codes: it is no Janus that draws")
            config = read_config(source, layout)
            vq = read_vqgan(source, config.vq, layout.vq_names, layout.vq, dtype, device)
            mapped, skip = rules(layout, config), [layout.others, r".*\.inv_freq"]
        side = config.grid * config.vq.down
        if source.given.get("size") not in (None, side, str(side)):
            raise InputError(
                f"size {source.given['size']} cannot be drawn; this model draws {side}x{side} pixels"
            )
        check_codes(source.path, config.vq.codes, cls.beside(source), len(vq.codebook))
        with blank(source.path):
            target = cls(config, cls.text_of(source), vq)
        source.fill(target, mapped, dtype, skip, device)
        return target.to(device)

    def save_vq(self, folder: Path, store: Store) -> None:
        """Write the VQ decoder into a tokenizer folder."""
        save_tokenizer(self._vq[0], folder, store)

    @property
    def codebook(self) -> Tensor:
        """[V, C] l2-normalised latents."""
        return self._vq[0].codebook

    def conditional(self, text: str) -> list[int]:
        """The user's turn of the chat, and the start of the assistant's."""
        turn = self.text.ids(TURN.format(prompt=text.strip()))
        return [self.text.id(BEGIN), *turn, self.text.id(DRAW)]

    def unconditional(self, text: str | None) -> list[int]:
        """The same length of padding tokens, which are attended to; without a prompt, that of an empty one."""
        first, *turn, last = self.conditional(text or "")
        return [first, *[self.text.id(PAD)] * len(turn), last]

    def embed(self, codes: Tensor) -> Tensor:
        """codes [R, N] -> [R, N, D]."""
        return self.aligner(self.code_table[codes])

    def head(self, features: Tensor) -> Tensor:
        """features [..., D] -> logits [..., V]."""
        return self.output(features)

    def pixels(self, codes: Tensor) -> Tensor:
        """codes [B, length] -> images [B, 3, H, W] in [-1, 1]."""
        return self._vq[0].draw(self.raster.grid(codes))


def layout_of(source: Source) -> Layout | None:
    """The layout of a checkpoint, by the name of its table of codes."""
    return next((layout for layout in LAYOUTS if layout.table in source.shapes()), None)


def read_config(source: Source, layout: Layout) -> JanusConfig:
    """The config of a published checkpoint; what its authors' config leaves to defaults is read off the tensors."""
    where, published = source.path, config_as(Published, source.config, source.path)
    language = published.text_config if layout.config == "text_config" else published.language_config
    if language is None:
        raise InputError(
            f"{where}: config.json lacks {layout.config}; fetch it again from the model's repository"
        )
    given = llama.fields(language, where, rms_norm_eps=1e-6, max_position_embeddings=16384)
    seen, vq = published.vision_config or Vision(), published.vq_config or PublishedVQ()
    codes, dim = source.shape(layout.table, 2)
    head = source.shapes().get(layout.head[0].replace("\\", "") + ".weight") or (0,)
    config = {
        "shape": given.decoder(where),
        "vq": vq.shape(codes=codes, dim=dim, attention=True),
        "tokens": given.vocab_size,
        "positions": given.max_position_embeddings,
        "base": given.rope_base(where),
        "grid": seen.image_size // seen.patch_size,
        "head_width": head[0],
    }
    return config_as(JanusConfig, config, where)


def rules(layout: Layout, config: JanusConfig) -> list[Rename]:
    """A layout's names as ours."""
    sides = r"\.(weight|bias)"
    return [
        Rename(layout.table.replace(".", r"\."), "code_table"),
        *(Rename(name + sides, rf"aligner.{2 * i}.\1") for i, name in enumerate(layout.aligner)),
        *(Rename(name + sides, rf"output.{2 * i}.\1") for i, name in enumerate(layout.head)),
        *language_rules(layout.language, config.shape),
    ]
