"""The autoregressive part of GLM-Image: a language model that draws a small picture and then a large one.

The model lies in `vision_language_encoder` of the published repository (zai-org/GLM-Image), beside its `processor`, which encodes
prompts and sizes; positions on the two grids are those of `GlmImageModel.get_rope_index`. The large picture's codes become pixels in
a diffusion decoder, which is a part of diffusers' `GlmImagePipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp.errors import InputError, one_line
from lanternpp.models.base import Target
from lanternpp.models.text import quiet
from lanternpp.models.transformers.adapter import OneVocabulary
from lanternpp.models.transformers.call import Call, token_rows
from lanternpp.models.transformers.decoder import replica
from lanternpp.models.transformers.format import Format, Raster
from lanternpp.models.transformers.opening import TOKENIZER, Text
from lanternpp.models.vq.reading import Reader
from lanternpp.nn.sources import Source
from lanternpp.nn.stores import Store
from lanternpp.types import Prompt

SIZE, MOST = "1024", 4096  # pixels of a square; codes of the largest picture
PATCH, SMALL = 32, 16  # pixels of a code's side; codes of a square small picture's side


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

    def positions(self) -> Tensor:
        """Time, row and column of every code, less the length of the prompt, [length, 3]."""
        found, start = [], 0
        for one in (self.small, self):
            row = torch.arange(one.rows).repeat_interleave(one.columns)
            column = torch.arange(one.columns).repeat(one.rows)
            found.append(start + torch.stack((torch.zeros_like(row), row, column), 1))
            start += max(one.rows, one.columns)
        return torch.cat(found)


class PromptText(Text):
    """The processor of a checkpoint, which lies beside it, in it, or in a folder `processor`: prompts with their size as tokens."""

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
            with quiet():
                return GlmImageProcessor.from_pretrained(self.path.parent, local_files_only=True)
        except Exception as error:  # whatever a wrong file makes transformers raise
            raise InputError(f"{self.path.parent} is no processor ({one_line(str(error), 200)})") from None

    def request(self, prompt: str, raster: Raster) -> list[int]:
        """The tokens of a prompt for a size, up to where the first code is drawn."""
        content = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
        size = {"target_h": raster.rows * PATCH, "target_w": raster.columns * PATCH}
        with quiet():
            encoded = self._processor.apply_chat_template(content, tokenize=True, return_dict=True, **size)
        ids: list[int] = torch.as_tensor(encoded["input_ids"]).flatten().tolist()
        return ids


class GlmImage(OneVocabulary):
    """Its `generate` draws any token anywhere until one ends the sequence, with positions on two grids."""

    class_name, model_type = "GlmImageForConditionalGeneration", "glm_image"
    about = "the autoregressive part of GLM-Image in transformers' layout"
    any_size = True
    unused = ("visual",)
    vq = None
    without_pixels = (
        'GLM-Image\'s codes become a picture in its diffusion decoder: draw with output_type="codes", and give '
        "pipe.target.prior(result.codes) to diffusers' GlmImagePipeline as prior_token_ids"
    )

    def __init__(self, model: Any):
        config = model.config.text_config
        self.table = torch.zeros(0, 3, dtype=torch.int64)
        super().__init__(
            model, model.model.language_model, range(config.vision_vocab_size), positions=self._positions
        )

    def draw_size(self, source: Source, size: object) -> None:
        """Codes are those of the codebook alone."""
        self.codes = self.codes[: self.model.config.vq_config.num_embeddings]
        self.table = self.raster_of(source, None if size is None else str(size)).positions()
        super().draw_size(source, size)

    def raster_of(self, source: Source, size: str | None) -> TwoPictures:
        """A small picture and a large one."""
        return TwoPictures.sized(size or str(source.config.get("size") or SIZE))

    @property
    def defaults(self) -> Mapping[str, Any]:  # type: ignore[override]
        """How its generation_config.json samples."""
        config = self.model.generation_config
        found = {name: getattr(config, name, None) for name in ("temperature", "top_k", "top_p")}
        return {"cfg": 1.0} | {name: value for name, value in found.items() if value}

    @property
    def stride(self) -> int:
        """The rotations of codes depend on where the prompt ends, so that all prompts are padded alike."""
        return self.slots

    def text_of(self, folder: Path) -> Text:  # type: ignore[override]
        """Its processor."""
        return PromptText(folder)

    def conditional(self, text: str) -> list[int]:
        """The prompt and the sizes of both pictures."""
        assert isinstance(self.text, PromptText) and self.raster is not None
        return self.text.request(text, self.raster)

    def unconditional(self, text: str | None) -> list[int]:
        """An empty prompt."""
        return self.conditional("")

    def prompt(self, conditions: Sequence[str | None], branches: int) -> Prompt:
        """InputError where `Pipeline` asks for guidance."""
        if branches > 1 and self.raster is not None:
            raise InputError(
                "cfg above 1 is not supported: GLM-Image draws codes without guidance, which its diffusion decoder has"
            )
        return super().prompt(conditions, branches)

    def prior(self, codes: Tensor) -> Tensor:
        """codes [B, length] -> `prior_token_ids` of diffusers' GlmImagePipeline: the large picture's, at twice its resolution."""
        assert self.raster is not None
        return self.raster.grid(codes).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)

    @property
    def latents(self) -> Tensor:
        """l2-normalised."""
        return F.normalize(self.model.model.vqmodel.quantize.embedding.weight, dim=-1)

    def decoded(self, grid: Tensor) -> Tensor:
        """InputError that says how codes become pixels."""
        raise InputError(self.without_pixels)

    def reader(self) -> Reader:
        """InputError: what reads pictures is another network."""
        return Target.reader(self)

    def save(self, folder: Path, store: Store) -> list[str]:
        """InputError: its diffusion decoder needs the checkpoint as it is."""
        return Target.save(self, folder, store)

    @staticmethod
    def asks_for_picture(arguments: Mapping[str, Any]) -> bool:
        """It draws nothing else; only from text with drafts."""
        return arguments.get("pixel_values") is None

    def format(self, call: Call) -> Format:
        """Any code anywhere, until a token ends the sequence."""
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
        # it keeps the positions, which another thread's call may be using
        model = replica(self.model.model)
        model.get_rope_index(call.ids, grids, call.more.get("images_per_sample"), call.mask)
        lengths = torch.tensor([len(row) for row in token_rows(call.ids, call.mask)], device=self.device)
        tables = model._cached_decode_position_ids - lengths[:, None, None]
        if bool((tables != tables[:1]).any()):
            raise InputError("pictures of one batch must have one size; draw others in a call of their own")
        return tables[0].t().contiguous()

    def _positions(self, position: Tensor) -> Tensor:
        """Slots [R, N] -> positions [3, R, N]: a prompt's are its slots, a code's are on a grid after it."""
        after = position - self.slots
        table = self.table.to(position.device)
        grid = table[after.clamp(min=0, max=len(table) - 1)] + self.slots
        return grid.where((after >= 0)[..., None], position[..., None]).permute(2, 0, 1)
