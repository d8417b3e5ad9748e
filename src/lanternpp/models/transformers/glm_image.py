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

from lanternpp.errors import InputError
from lanternpp.models.hub import quiet
from lanternpp.models.transformers.adapter import TransformersTarget
from lanternpp.models.transformers.call import Call, reject_arguments
from lanternpp.models.transformers.format import Format, Raster, TwoPictures, grid_positions
from lanternpp.nn.files import input_errors
from lanternpp.nn.sources import Source
from lanternpp.types import Depicted


class GlmImage(TransformersTarget):
    """Its `generate` draws any token anywhere until one ends the sequence, with positions on two grids."""

    class_name, model_type = "GlmImageForConditionalGeneration", "glm_image"
    about = "the autoregressive part of GLM-Image in transformers' layout"
    any_size = unit = True
    default_size, max_codes, pixels_per_code = "1024", 4096, 32
    unguided = "GLM-Image draws codes without guidance, which its diffusion decoder has"
    without_pixels = (
        'GLM-Image\'s codes become a picture in its diffusion decoder: draw with output_type="codes", and give '
        "pipe.target.prior(result.codes) to diffusers' GlmImagePipeline as prior_token_ids"
    )

    def __init__(self, model: Any):
        sampling, dials = vars(model.generation_config), ("temperature", "top_k", "top_p")
        given = {name: sampling[name] for name in dials if sampling.get(name) is not None}
        self.defaults = {"cfg": 1.0, "top_k": 50} | given  # 50 is transformers' own
        super().__init__(model, model.model.language_model, range(model.config.text_config.vision_vocab_size))

    def raster_of(self, source: Source, size: str | None) -> Raster:
        """Return the pictures of a size, by the large one."""
        # The model's own `generate` draws further tokens, which end a picture.
        self.codes = self.codes[: self.model.config.vq_config.num_embeddings]
        large = super().raster_of(source, size)
        return TwoPictures(large.rows, large.columns)

    def conditional(self, text: str) -> list[int]:
        """Return the tokens of the prompt and of the sizes of both pictures; of the large one after pictures shown."""
        tokens = text.tokens if isinstance(text, Depicted) else self._inputs(text)["input_ids"][0].tolist()
        return list(tokens)

    @cached_property
    def _processor(self) -> Any:
        return self.text.processor("GlmImageProcessor")

    def _inputs(self, text: str, pictures: Sequence[Any] = ()) -> Any:
        """Encode a prompt that shows pictures (PIL images, RGB) before its text; InputError where the processor cannot."""
        content = [{"type": "image", "image": picture} for picture in pictures]
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        height, width = (count * self.pixels_per_code for count in (self.raster.rows, self.raster.columns))
        given, remedy = "pictures" if pictures else "prompt", f"or fetch {self.text.path.parent} again"
        with quiet(), input_errors(f"the {given} cannot be encoded", f"change the {given}, {remedy}"):
            return self._processor.apply_chat_template(messages, **options, target_h=height, target_w=width)

    def depicted(self, prompt: str, pictures: Sequence[Any], own_shape: bool = True) -> Depicted:
        """Encode pictures of the sizes that the processor gives them; the large picture is drawn without a small one."""
        inputs = self._inputs(prompt, pictures).to(self.device)
        ids, grids = inputs["input_ids"], inputs["image_grid_thw"]
        model, depicted = self.model, Depicted(prompt)
        with torch.no_grad():
            features = model.get_image_features(inputs["pixel_values"], grids[:-1]).pooler_output
            depicted.pictures = [model.get_image_tokens([grid]).view(grid.shape[1:]) for grid in features]
        ids[ids == model.config.image_token_id] = torch.cat([grid.flatten() for grid in depicted.pictures])
        depicted.tokens = ids[0].tolist()
        large, slots = Raster(self.raster.rows, self.raster.columns), len(depicted.tokens)
        self.prompt_slots(large, slots - 1)  # checks that prompt and picture fit
        prompt_ids, _ = model.model.get_rope_index(ids, grids)  # [3, 1, T]
        prompt_positions = tuple(map(tuple, (prompt_ids[:, 0] - prompt_ids[0, 0, -1] - 1).T.tolist()))
        positions = grid_positions([large])
        format = Format(large.length, large.width, positions=positions, prompt_positions=prompt_positions)
        depicted.shape = large, slots, format
        return depicted

    def prior(self, codes: Tensor) -> Tensor:
        """Return the large picture's codes at twice its resolution, `prior_token_ids` of GlmImagePipeline, of codes [B, length]."""
        large = Raster(self.raster.rows, self.raster.columns)
        grid = large.grid(codes[:, -large.length :])
        return grid.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)

    @staticmethod
    def asks_for_picture(arguments: Mapping[str, Any]) -> bool:
        """Return whether a call has no source pictures, as drafts are for text alone."""
        return arguments.get("pixel_values") is None

    def format(self, call: Call) -> Format:
        """Return the format of any tokens anywhere, at positions on the grids of the call, which must be those of all samples."""
        reject_arguments(["prefix_allowed_tokens_fn"], {"prefix_allowed_tokens_fn": call.processors.allowed})
        grids, counts = call.model_kwargs.get("image_grid_thw"), call.model_kwargs.get("images_per_sample")
        if grids is None or not len(grids):
            return Format.plain(call.max_new_tokens)
        if bool((call.ids == self.model.config.image_end_token_id).any()):
            reason = "the prompt holds codes of a picture, and drafts are for text alone"
            raise InputError(f"{reason}; give pixel_values, with which transformers draws without drafts")
        # For num_return_sequences transformers repeats the rows of every tensor.
        step = call.config.num_return_sequences
        samples = [grids[::step]] if counts is None else grids[::step].split(counts[::step].tolist())
        if not all(torch.equal(sample, samples[0]) for sample in samples):
            raise InputError("pictures of one batch must have one size; draw others in a call of their own")
        # The large picture's grid is the first one, and its codes are drawn last.
        rasters = [Raster(rows, columns) for _, rows, columns in reversed(samples[0].tolist())]
        positions = grid_positions(rasters)
        length = min(call.max_new_tokens, len(positions) + 1)
        return Format(length, rasters[-1].columns, positions=positions)
