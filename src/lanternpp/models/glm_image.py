"""The autoregressive part of GLM-Image: a language model that draws a small picture and then a large one.

The layout is transformers' `GlmImageForConditionalGeneration`, which lies in `vision_language_encoder` of the published
repository (zai-org/GLM-Image), beside its `processor`. That processor encodes prompts and sizes; positions on the two grids
are those of transformers' `GlmImageModel.get_rope_index`. The large picture's codes become pixels in a diffusion decoder,
which is a part of diffusers' `GlmImagePipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from pathlib import Path
from typing import Annotated, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.errors import InputError, one_line
from lanternpp.models.base import Target
from lanternpp.models.language import SLOTS, Raster, TokenTarget, language_rules
from lanternpp.models.tokens import TOKENIZER, Text
from lanternpp.models.vq.reading import Reader
from lanternpp.nn import llama
from lanternpp.nn.configs import Codes, Positions, RopeBase, Share, Size, Width, config_as
from lanternpp.nn.decoder import DecoderConfig
from lanternpp.nn.int8 import hushed
from lanternpp.nn.rope import angle_table
from lanternpp.nn.sources import Rename, Source, blank
from lanternpp.nn.stores import Store
from lanternpp.types import Prompt
from lanternpp.util.jsonfile import read_object
from lanternpp.util.schema import Between

SIZE, MOST = "1024", 4096  # pixels of a square; codes of the largest picture
PATCH, SMALL = 32, 16  # pixels of a code's side; codes of a square small picture's side
LANGUAGE, LATENTS = r"model\.language_model\.", r"model\.vqmodel\.quantize\.embedding\.weight"
SKIPPED = (r"model\.visual\..*", r"model\.vqmodel\.(?!quantize\.embedding\.).*", r".*\.inv_freq")


@dataclass(frozen=True)
class TwoPictures(Raster):
    """A small picture, then the large one, whose rows and columns these are."""

    small: Raster = Raster(1, 1)  # noqa: RUF009 (it is frozen)

    @classmethod
    def sized(cls, size: str) -> TwoPictures:
        """A size in pixels; the small picture is of the same shape. InputError where it cannot be drawn."""
        large = Raster.of(size, PATCH, False, MOST)
        ratio = large.rows / large.columns
        small = Raster(int(sqrt(ratio) * SMALL), int(sqrt(1 / ratio) * SMALL))
        if not small.length:
            raise InputError(f"size {size} is too narrow: its small picture would have no codes")
        return cls(large.rows, large.columns, small=small)

    @property
    def length(self) -> int:
        """Codes of both."""
        return self.small.length + self.rows * self.columns

    def grid(self, codes: Tensor) -> Tensor:
        """codes [B, length] -> those of the large picture, [B, rows, columns]."""
        return codes[:, self.small.length :].unflatten(1, (self.rows, self.columns))

    def positions(self, slots: int) -> Tensor:
        """Time, row and column of every slot, [slots + length, 3]: a prompt's are its slots, a picture's begin behind."""
        found, start = [torch.arange(slots, device="cpu")[:, None].expand(-1, 3)], slots
        for one in (self.small, self):
            row = torch.arange(one.rows, device="cpu").repeat_interleave(one.columns)
            column = torch.arange(one.columns, device="cpu").repeat(one.rows)
            found.append(start + torch.stack((torch.zeros_like(row), row, column), 1))
            start += max(one.rows, one.columns)
        return torch.cat(found)


@dataclass(frozen=True)
class Rotations:
    """`rope_parameters`: which channels of a head are rotated, and by which of time, row and column."""

    partial_rotary_factor: Share = 1.0
    mrope_section: tuple[Annotated[int, Between(0, 512)], ...] = (8, 12, 12)  # frequencies of each, in turn

    def table(self, positions: Tensor, head_dim: int, base: float) -> Tensor:
        """positions [P, 3] -> [P, 2, head_dim], as `Decoder` rotates: channels that are not rotated have angle 0."""
        half = self.rotated(head_dim) // 2
        kind = torch.arange(len(self.mrope_section), device="cpu") % 3
        kind = kind.repeat_interleave(torch.tensor(self.mrope_section, device="cpu"))
        freq = base ** -(torch.arange(half, dtype=torch.float64, device="cpu") / half)
        return angle_table(F.pad(positions.double()[:, kind] * freq, (0, head_dim // 2 - half)))

    def rotated(self, head_dim: int) -> int:
        """How many channels of a head are rotated."""
        return int(head_dim * self.partial_rotary_factor)


@dataclass(frozen=True)
class Embedding:
    """The parts of `vq_config` that the codebook has."""

    num_embeddings: Codes = 16384
    embed_dim: Width = 2048


@dataclass(frozen=True)
class Published:
    """The parts of a config.json in transformers' layout."""

    text_config: Mapping[str, Any]
    vq_config: Embedding = Embedding()
    size: Size = SIZE


@dataclass(frozen=True)
class GlmImageConfig:
    """The shape of a GLM-Image."""

    shape: DecoderConfig
    vq: Embedding
    rotations: Rotations
    tokens: Codes  # of the vocabulary that codes are part of
    positions: Positions
    base: RopeBase
    size: Size


class PromptText(Text):
    """The processor of a checkpoint: prompts with their size as tokens."""

    def __init__(self, folder: Path):
        places = (folder, folder / "processor", folder.parent / "processor")
        super().__init__(next((place for place in places if (place / TOKENIZER).is_file()), folder))

    @cached_property
    def _processor(self) -> Any:
        if not self.path.is_file():
            raise InputError(
                f"{self.path} is missing: copy the folder `processor` of the model's repository there."
            )
        from transformers import GlmImageProcessor

        try:
            with hushed():
                return GlmImageProcessor.from_pretrained(self.path.parent, local_files_only=True)
        except Exception as error:  # whatever a wrong file makes transformers raise
            raise InputError(f"{self.path.parent} is no processor ({one_line(str(error), 200)})") from None

    def request(self, prompt: str, raster: Raster) -> list[int]:
        """The tokens of a prompt for a size, up to where the first code is drawn."""
        content = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
        size = {"target_h": raster.rows * PATCH, "target_w": raster.columns * PATCH}
        with hushed():
            encoded = self._processor.apply_chat_template(content, tokenize=True, return_dict=True, **size)
        ids: list[int] = torch.as_tensor(encoded["input_ids"]).flatten().tolist()
        return ids


class GlmImageTarget(TokenTarget):
    """The part of a GLM-Image that draws codes."""

    kind = "glm-image"
    any_size = True
    about = "the autoregressive part of GLM-Image in transformers' layout"
    stride = (
        SLOTS  # the rotations of codes depend on where the prompt ends, so that all prompts are padded alike
    )
    without_pixels = (
        'GLM-Image\'s codes become a picture in its diffusion decoder: draw with output_type="codes", and give '
        "pipe.target.prior(result.codes) to diffusers' GlmImagePipeline as prior_token_ids"
    )
    text: PromptText

    def __init__(self, config: GlmImageConfig, text: PromptText):
        raster, shape = TwoPictures.sized(config.size), config.shape
        slots = self.slots_within(config.positions, raster)
        table = config.rotations.table(raster.positions(slots), shape.head_dim, config.base).float()
        codes = config.vq.num_embeddings
        super().__init__(shape, table, self.tokens_of(0, codes, None), raster, config.tokens)
        self.config, self.text = config, text
        self.defaults = {"cfg": 1.0}
        self.latents = nn.Parameter(torch.empty(codes, config.vq.embed_dim))

    @classmethod
    def claims(cls, source: Source) -> bool:
        """transformers' model type."""
        return "glm_image" in source.kinds

    @classmethod
    def read(cls, source: Source, dtype: torch.dtype, device: torch.device | str = "cpu") -> Self:
        """The target; its processor lies beside the checkpoint, in it, or in a folder `processor`."""
        folder = source.path if source.path.is_dir() else source.path.parent
        config = read_config(source)
        with blank(source.path):
            target = cls(config, PromptText(folder))
        source.fill(target, rules(config), dtype, SKIPPED, device)
        target.defaults = {**target.defaults, **sampling(folder)}
        return target.to(device)

    def save(self, folder: Path, store: Store) -> list[str]:
        """InputError: its diffusion decoder needs the checkpoint as it is."""
        return Target.save(self, folder, store)

    def save_vq(self, folder: Path, store: Store) -> None:
        """As `save`."""
        self.save(folder, store)

    def reader(self) -> Reader:
        """InputError: what reads pictures is another network, which is not read."""
        return Target.reader(self)

    @property
    def codebook(self) -> Tensor:
        """[V, C] l2-normalised latents."""
        return F.normalize(self.latents.detach(), dim=-1)

    def conditional(self, text: str) -> list[int]:
        """The prompt and the sizes of both pictures."""
        return self.text.request(text, self.raster)

    def unconditional(self, text: str | None) -> list[int]:
        """An empty prompt."""
        return self.conditional("")

    def prompt(self, conditions: Sequence[str | None], branches: int) -> Prompt:
        """As of every language model; InputError where guidance is asked for."""
        if branches > 1:
            raise InputError(
                "cfg above 1 is not supported: GLM-Image draws codes without guidance, which its diffusion decoder has"
            )
        return super().prompt(conditions, branches)

    def prior(self, codes: Tensor) -> Tensor:
        """codes [B, length] -> `prior_token_ids` of diffusers' GlmImagePipeline: the large picture's, at twice its resolution."""
        return self.raster.grid(codes).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)

    def pixels(self, codes: Tensor) -> Tensor:
        """InputError that says how codes become pixels."""
        raise InputError(self.without_pixels)


def sampling(folder: Path) -> dict[str, Any]:
    """How codes are sampled, as a checkpoint's generation_config.json says; {} where it does not."""
    path = folder / "generation_config.json"
    content = read_object(path) if path.is_file() else {}
    return {name: content[name] for name in ("temperature", "top_k", "top_p") if content.get(name)}


def read_config(source: Source) -> GlmImageConfig:
    """The config of a checkpoint. InputError where its rotations do not fit its heads."""
    where = source.path
    published = config_as(Published, source.config, where)
    given = llama.fields(published.text_config, where, attention_bias=True)
    rotations = config_as(Rotations, published.text_config.get("rope_parameters") or {}, where)
    bias = {"attention_bias": False, "qkv_bias": bool(given.attention_bias)}
    shape = given.decoder(where, norm_both=True, **bias)
    rotated = rotations.rotated(shape.head_dim)
    if rotated % 2 or sum(rotations.mrope_section) * 2 != rotated:
        raise InputError(
            f"{where}: mrope_section {list(rotations.mrope_section)} does not add up to half of the {rotated} channels that are "
            "rotated"
        )
    return GlmImageConfig(
        shape,
        published.vq_config,
        rotations,
        given.vocab_size,
        given.max_position_embeddings,
        given.rope_base(where),
        str(source.given.get("size") or published.size),
    )


def rules(config: GlmImageConfig) -> list[Rename]:
    """transformers' names as ours."""
    layer, block = LANGUAGE + r"layers\.(\d+)\.", r"decoder.blocks.\1."
    return [
        Rename(LATENTS, "latents"),
        Rename(r"lm_head\.weight", "output.weight", rows=(0, config.vq.num_embeddings)),
        Rename(layer + r"mlp\.gate_up_proj\.weight", block + "w13.weight"),
        Rename(layer + r"post_self_attn_layernorm\.weight", block + "attention_out_norm.weight"),
        Rename(layer + r"post_mlp_layernorm\.weight", block + "ffn_out_norm.weight"),
        *language_rules(LANGUAGE, config.shape, rotated=config.rotations.rotated(config.shape.head_dim)),
    ]
