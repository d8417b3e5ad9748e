"""The autoregressive part of GLM-Image: a language model that draws a small picture and then a large one.

The model lies in `vision_language_encoder` of the published repository (zai-org/GLM-Image), beside its `processor`, which encodes
prompts and sizes; positions on the two grids are those of `GlmImageModel.get_rope_index`. The large picture's codes become pixels in
a diffusion decoder, which is a part of diffusers' `GlmImagePipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lanternpp.errors import InputError, one_line
from lanternpp.models.hub import quiet
from lanternpp.models.transformers.adapter import TransformersTarget
from lanternpp.models.transformers.call import Call
from lanternpp.models.transformers.decoder import replica
from lanternpp.models.transformers.format import Format, Raster, TwoPictures
from lanternpp.models.transformers.opening import PROCESSOR
from lanternpp.nn.files import wrong_file
from lanternpp.nn.sources import Source
from lanternpp.types import Depicted


class GlmImage(TransformersTarget):
    """Its `generate` draws any token anywhere until one ends the sequence, with positions on two grids.

    Rotations of codes depend on where their prompt ends, so prompts are padded to all slots. A shape has a third part, for prompts
    that show pictures: the table of their own slots and the codes, as bytes.
    """

    class_name, model_type = "GlmImageForConditionalGeneration", "glm_image"
    about = "the autoregressive part of GLM-Image in transformers' layout"
    any_size = unit = True
    usual, largest, pixels_per_code = "1024", 4096, 32
    unguided = "GLM-Image draws codes without guidance, which its diffusion decoder has"
    without_pixels = (
        'GLM-Image\'s codes become a picture in its diffusion decoder: draw with output_type="codes", and give '
        "pipe.target.prior(result.codes) to diffusers' GlmImagePipeline as prior_token_ids"
    )

    large: Raster  # the large picture's
    table: Tensor  # [n, 3] the positions of codes, less that of the first
    ahead = 0  # entries of the table that are of the prompt's last slots

    def __init__(self, model: Any):
        super().__init__(model, model.model.language_model, range(model.config.text_config.vision_vocab_size))
        names, config = ("temperature", "top_k", "top_p"), model.generation_config
        found = {name: value for name in names if (value := getattr(config, name, None))}
        self.recommended = {"cfg": 1.0, **found}

    def positions(self, slot: Tensor) -> Tensor:
        """Slots [R, N] -> [3, R, N]."""
        at, table = slot - self.slots + self.ahead, self.table.to(slot.device)
        found = table[at.clamp(min=0, max=len(table) - 1)] + self.slots
        return found.where((at >= 0)[..., None], slot[..., None]).permute(2, 0, 1)

    def _lay_out(self, raster: Raster, slots: int, table: bytes = b"") -> None:
        self.large, self.stride = Raster(raster.rows, raster.columns), slots
        # those of the codebook alone
        self.codes = self.codes[: self.model.config.vq_config.num_embeddings]
        if isinstance(raster, TwoPictures):
            grids = torch.tensor([[1, one.rows, one.columns] for one in (raster, raster.small)])
            start = torch.full((1, 1), self.model.config.image_start_token_id)
            _, self.table = self.places(start, grids)
        else:
            self.table = torch.frombuffer(bytearray(table), dtype=torch.int64).view(-1, 3)
            self.ahead = slots
        super()._lay_out(raster, slots)

    def places(self, ids: Tensor, grids: Tensor, *more: Tensor | None) -> tuple[Tensor, Tensor]:
        """The positions, as of `table`, of the first of prompts [B, T] and of n new tokens, [T, 3] and [n, 3]. InputError where samples differ."""
        # it keeps the positions, which another thread's call may be using
        model = replica(self.model.model)
        before, _ = model.get_rope_index(ids, grids, *more)
        after = model._cached_decode_position_ids
        first = after[:, :1, :1]
        if bool((after - first != after[:1] - first[:1]).any()):
            raise InputError("pictures of one batch must have one size; draw others in a call of their own")
        return (before[:, 0] - first[0]).t(), (after[0] - first[0]).t().contiguous()

    def raster_of(self, source: Source, size: str | None) -> TwoPictures:
        """A small picture and a large one of the same shape."""
        pictures = TwoPictures.of(size or self.usual, self.pixels_per_code, False, self.largest)
        if not pictures.small.length:
            raise InputError(f"size {size} is too narrow: its small picture would have no codes")
        return pictures

    def conditional(self, text: str) -> list[int]:
        """The prompt and the sizes of both pictures; after pictures that it shows, of the large one."""
        ids = text.tokens if isinstance(text, Depicted) else self._request(text)["input_ids"][0].tolist()
        return list(ids)

    @cached_property
    def _processor(self) -> Any:
        """The processor beside the tokenizer. InputError."""
        from transformers import GlmImageProcessor

        path = self.text.path
        if not path.is_file():
            raise InputError(
                f"{path} is missing: copy the folder `{PROCESSOR}` of the model's repository there."
            )
        with quiet(), wrong_file(f"{path} cannot be opened"):
            return GlmImageProcessor.from_pretrained(path.parent, local_files_only=True)

    def _request(self, text: str, pictures: Sequence[Any] = ()) -> Any:
        content = [{"type": "image", "image": one} for one in pictures] + [{"type": "text", "text": text}]
        side, large = self.pixels_per_code, self.large
        size = {"target_h": large.rows * side, "target_w": large.columns * side}
        call = {"tokenize": True, "return_dict": True, "return_tensors": "pt", **size}
        with quiet():
            return self._processor.apply_chat_template([{"role": "user", "content": content}], **call)

    def depicted(self, prompt: str, pictures: Sequence[Any], own_shape: bool = True) -> Depicted:
        """Pictures as codes, of the sizes that the processor gives them; the large picture is drawn alone."""
        try:
            found = self._request(prompt, pictures).to(self.device)
        except ValueError as error:
            raise InputError(f"the pictures cannot be shown: {one_line(str(error), 200)}") from None
        ids, grids, made = found["input_ids"], found["image_grid_thw"], Depicted(prompt)
        with torch.no_grad():
            features = self.model.get_image_features(found["pixel_values"], grids[:-1]).pooler_output
            made.pictures = [self.model.get_image_tokens([one]).view(one.shape[1:]) for one in features]
        ids[ids == self.model.config.image_token_id] = torch.cat([grid.flatten() for grid in made.pictures])
        made.tokens = ids[0].tolist()
        self.room(self.large, len(made.tokens) - 1)
        made.shape = self.large, len(made.tokens), torch.cat(self.places(ids, grids)).cpu().numpy().tobytes()
        return made

    def prior(self, codes: Tensor) -> Tensor:
        """codes [B, length] -> `prior_token_ids` of diffusers' GlmImagePipeline: the large picture's, at twice its resolution."""
        grid = self.large.grid(codes[:, -self.large.length :])
        return grid.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)

    @staticmethod
    def asks_for_picture(arguments: Mapping[str, Any]) -> bool:
        """Every call without source pictures; drafts are for text alone."""
        return arguments.get("pixel_values") is None

    def format(self, call: Call) -> Format:
        """Any code anywhere, until a token ends the sequence."""
        if call.processors.allowed is not None:
            raise InputError("prefix_allowed_tokens_fn is not supported for GLM-Image; leave it out")
        grids = call.more.get("image_grid_thw")
        if grids is None:
            self.table = torch.arange(call.room, device=self.device)[:, None].expand(-1, 3)
            return Format.plain(call.room)
        # without the rows that num_return_sequences repeated, of grids too
        every = slice(None, None, call.config.num_return_sequences)
        more = (None if x is None else x[every] for x in (call.more.get("images_per_sample"), call.mask))
        _, self.table = self.places(call.ids[every], grids[every], *more)
        return Format.plain(min(call.room, len(self.table) + 1), int(grids[0, 2]))
