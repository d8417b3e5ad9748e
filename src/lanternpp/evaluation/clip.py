"""CLIP score (arXiv 2104.08718): how well pictures agree with their prompts, by a CLIP of the caller's choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image

from lanternpp.errors import InputError
from lanternpp.models.hub import quiet
from lanternpp.nn.files import wrong_file
from lanternpp.util.progress import Progress

EXAMPLE = "openai/clip-vit-base-patch32"


class Clip:
    """A CLIP model and its processor, from a folder or a hub id."""

    def __init__(self, model: Any, processor: Any, device: torch.device):
        self.model, self.processor, self.device = model, processor, device

    @classmethod
    def open(cls, name: str, device: torch.device) -> Clip:
        """Read or fetch them. Raises InputError where `name` is no CLIP or cannot be had."""
        from transformers import AutoConfig, CLIPModel, CLIPProcessor

        remedy = f"give the folder of a CLIP model with its processor, or a hub id such as {EXAMPLE}"
        with quiet(), wrong_file(f"--clip {name} cannot be had", remedy):
            kind = AutoConfig.from_pretrained(name, trust_remote_code=False).model_type
            if kind != "clip":
                raise InputError(
                    f"--clip {name} holds a model of type {kind}; give a CLIP, such as {EXAMPLE}"
                )
            model = CLIPModel.from_pretrained(name, dtype=torch.float32, trust_remote_code=False)
            processor = CLIPProcessor.from_pretrained(name, trust_remote_code=False)
        return cls(model.eval().requires_grad_(False).to(device), processor, device)

    @torch.inference_mode()
    def score(
        self,
        images: Sequence[Image.Image],
        prompts: Sequence[str | None],
        progress: Progress | None = None,
        batch: int = 32,
    ) -> float | None:
        """100 x the mean cosine between a picture and its prompt, below 0 counted as 0 (equation 1, w = 100).

        Pictures without a prompt are left out; None where no picture has one.
        """
        with_prompt = [i for i, prompt in enumerate(prompts) if prompt]
        total = 0.0
        for start in range(0, len(with_prompt), batch):
            part = with_prompt[start : start + batch]
            inputs = self.processor(
                text=[prompts[i] for i in part],
                images=[images[i].convert("RGB") for i in part],
                return_tensors="pt",
                padding=True,
                truncation=True,
            ).to(self.device)
            outputs = self.model(**inputs)
            total += F.cosine_similarity(outputs.image_embeds, outputs.text_embeds).clamp_min(0).sum().item()
            if progress:
                progress(start + len(part), len(with_prompt))
        return 100 * total / len(with_prompt) if with_prompt else None
