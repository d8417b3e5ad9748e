"""EAGLE (arXiv 2401.15077): one decoder layer over [embedding of the next code ; target feature].

A drafter of continuous latents has a diffusion head of its own (arXiv 2411.11925). A published drafter has the layout that EAGLE's
code writes, as LANTERN's authors publish theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.drafters.base import Drafter, DrafterConfig, check_fit
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.models.latents import Denoiser
from lanternpp.nn.checkpoints import Epsilon, Heads, Width, config_as
from lanternpp.nn.decoder import AttentionCache, Decoder
from lanternpp.nn.sources import Rename, Source, blank, llama_rules
from lanternpp.types import Nodes
from lanternpp.util.jsonfile import Between

REQUIRED_TENSORS = {"embed_tokens.weight", "fc.weight", "layers.0.self_attn.q_proj.weight"}
LLAMAGEN = ("c2i", "t2i", "t2i2")  # `input_type` of LlamaGen's drafters
Q_NORM, K_NORM = "layers.0.self_attn.q_norm.weight", "layers.0.self_attn.k_norm.weight"
MIN_COSINE = 0.9  # between products with embeddings of the drafter and of its target


@dataclass(frozen=True)
class EagleConfig(DrafterConfig):
    """The shape of an EAGLE drafter, whose layers are like its target's."""

    bias: bool = True

    chosen: ClassVar[dict[str, Any]] = {"layers": 1, "first_norm": True, "final_norm": False}


class EagleDrafter(Drafter):
    """fc(2D -> D), then the layer; embedding and head are the target's own, frozen."""

    kind = "eagle"
    config_class = EagleConfig
    about = "folders written by lanternpp train --kind eagle"

    def __init__(self, config: EagleConfig, rotary_table: Tensor):
        super().__init__()
        self.config = config
        dim = config.decoder.dim
        self.fc = nn.Linear(2 * dim, dim, bias=config.bias)
        self.decoder = Decoder(config.decoder, rotary_table)

    def forward(self, next_embeds: Tensor, features: Tensor, nodes: Nodes, cache: AttentionCache) -> Tensor:
        """next_embeds [R, N, D], features [R, N, D] -> the features at the next positions, [R, N, D]."""
        return self.decoder(self.fc(torch.cat((next_embeds, features), -1)), nodes, cache)

    def forward_sequence(self, next_embeds: Tensor, features: Tensor, *layout: Any, **past: Any) -> Tensor:
        """next_embeds [B, T, D], features [B, T, D] -> [B, T, D]; layout: positions and mask of `Decoder.forward_sequence`; its `past`."""
        return self.decoder.forward_sequence(self.fc(torch.cat((next_embeds, features), -1)), *layout, **past)


@dataclass(frozen=True)
class DiffusionDrafterConfig(EagleConfig):
    """The shape of an EAGLE drafter with a diffusion head of its own."""

    channels: Width = 16  # C
    denoiser_width: Width = 128
    denoiser_blocks: Annotated[int, Between(1, 64)] = 1


class DiffusionDrafter(EagleDrafter):
    """EAGLE's drafter, with a smaller diffusion head that reads the predicted features."""

    kind = "eagle-diffusion"
    config_class = DiffusionDrafterConfig
    proposer = "lanternpp.proposers.tree:TrajectoryProposer"
    config: DiffusionDrafterConfig

    def __init__(self, config: DiffusionDrafterConfig, rotary_table: Tensor):
        super().__init__(config, rotary_table)
        sizes = config.denoiser_width, config.denoiser_blocks
        self.denoiser = Denoiser(config.decoder.dim, config.channels, *sizes)

    @classmethod
    def read(cls, source: Source, target: Target, dtype: torch.dtype) -> Self:
        """Read the drafter, its head in float32 or more. InputError where the target has no such head, or other latents."""
        drafter = super().read(source, target, dtype)
        check_heads(target, drafter, source.path)
        drafter.denoiser.to(torch.promote_types(dtype, torch.float32))
        return drafter


def check_heads(target: Target, drafter: Any, name: Path | str = "the drafter") -> None:
    """Check that a target and its drafter both have diffusion heads, over latents of the same size, or neither; raise InputError otherwise."""
    has_head = hasattr(drafter, "denoiser")
    if has_head != hasattr(target, "denoiser"):
        fault = "has a diffusion head, which this model has not" if has_head else "has no diffusion head"
        raise InputError(
            f"{name} {fault}; use one that `lanternpp train --kind eagle` trained for this model"
        )
    if has_head and drafter.config.channels != target.channels:
        raise InputError(
            f"{name} draws latents of {drafter.config.channels} channels and the target of {target.channels}; use a "
            "drafter trained for this target"
        )


@dataclass(frozen=True)
class PublishedConfig:
    """The fields that are read from the config.json beside a published drafter."""

    num_attention_heads: Heads | None = None
    rms_norm_eps: Epsilon = 1e-6


class PublishedDrafter(EagleDrafter):
    """An EAGLE drafter that others trained; a Chameleon's reads prompts as any does, by the target's embeddings.

    LlamaGen's has a table of its own, which its authors' training copies from the target's embeddings or from its head. It reads
    code 0 at every prompt slot, padding included, and rotates by the places of the codes that it reads.
    """

    about = "config.json and pytorch_model.bin as EAGLE's code writes them"

    def __init__(self, config: EagleConfig, rotary_table: Tensor, codes: int = 0):
        # The place of the code after a slot; of the last slot there is none, nor is there a rotation.
        super().__init__(config, rotary_table.roll(-1, 0) if codes else rotary_table)
        self.attends_to_padding = codes > 0
        self.table = nn.Parameter(torch.zeros(codes, config.decoder.dim)) if codes else None

    @classmethod
    def claims(cls, source: Source) -> bool:
        """Whether a checkpoint has an embedding of its own beside `fc` and a Llama layer."""
        return source.metas.keys() >= REQUIRED_TENSORS

    @classmethod
    def read(cls, source: Source, target: Target, dtype: torch.dtype) -> Self:
        """Read the drafter in `source` for a target; InputError where it was trained for another target."""
        config = published_shape(source, target)
        check_fit(source, config.decoder.dim, target)
        own_table = source.config.get("input_type") in LLAMAGEN
        with blank(source.path):
            drafter = cls(config, target.decoder.rotary_table, target.vocab if own_table else 0)
        norm_rows = None
        if Q_NORM in source.metas:  # drafters of Chameleon
            norm_rows = source.shape(Q_NORM, 2)[0], source.shape(K_NORM, 2)[0]
        rules = [
            *llama_rules(config.decoder, r"layers\.(\d+)", r"decoder.blocks.\1", own_table, norm_rows),
            Rename(r"fc\.(weight|bias)", r"fc.\1"),
            Rename(r"norm\.weight", "decoder.norm.weight"),
            Rename(r"embed_tokens\.weight", "table"),
        ]
        skipped = (r".*rotary_emb\..*", "" if own_table else r"embed_tokens\.weight")
        source.fill(drafter, rules, dtype, skipped)
        if drafter.table is not None:
            codes = target.examples(8)
            embeds = target.embed(codes[None]).detach()
            products = embeds @ drafter.table[codes.cpu()].detach().to(embeds).T
            expected = embeds @ embeds[0].T, target.head(embeds)[..., codes]
            cosines = [F.cosine_similarity(products.flatten(), x.detach().flatten(), 0) for x in expected]
            if max(cosines) < MIN_COSINE:
                raise InputError(
                    f"drafter {source.path} was trained for another target: its embeddings are not this target's"
                )
        return drafter

    def embed(self, target: Target, codes: Tensor) -> Tensor:
        """Embed codes [B, N] by the drafter's own table, if it has one."""
        return super().embed(target, codes) if self.table is None else F.embedding(codes, self.table)

    def prompt_inputs(self, prompt: Tensor) -> Tensor:
        """Return code 0 of the own table, if there is one, at every position of a prompt [R, T - 1, D]; the same shape."""
        return prompt if self.table is None else self.table[:1].to(prompt.dtype).expand_as(prompt)


def published_shape(source: Source, target: Target) -> EagleConfig:
    """Return the shape of a published drafter, from its tensors, its config.json and the target."""
    published = config_as(PublishedConfig, source.config, source.path)
    dim = source.shape("fc.weight", 2)[0]
    heads = published.num_attention_heads or target.decoder.config.heads
    config = {
        "dim": dim,
        "heads": heads,
        "hidden": source.shape("layers.0.mlp.up_proj.weight", 2)[0],
        "layers": source.layers(),
        "bias": "fc.bias" in source.metas,
        "first_norm": "layers.0.input_layernorm.weight" in source.metas,
        "final_norm": "norm.weight" in source.metas,
        "kv_heads": source.shape("layers.0.self_attn.k_proj.weight", 2)[0] * heads // dim,
        "norm_eps": published.rms_norm_eps,
        "qk_norm": Q_NORM in source.metas,
    }
    return EagleConfig.of(config, source.path)
