"""EAGLE drafters in the layout that EAGLE's code writes (arXiv 2401.15077), as LANTERN's authors publish them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.drafters.base import check_fit
from lanternpp.drafters.eagle import EagleConfig, EagleDrafter
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.nn.checkpoints import Epsilon, Heads, config_as
from lanternpp.nn.sources import Rename, Source, blank, llama_rules

MARKS = {"embed_tokens.weight", "fc.weight", "layers.0.self_attn.q_proj.weight"}
# `input_type` of drafters whose rotary pairs are neighbouring channels, as LlamaGen's are
PAIRED = ("t2i", "t2i2")
NORM = "layers.0.self_attn.q_norm.weight"
ALIKE = 0.9  # least cosine of a code's embedding with the target's


@dataclass(frozen=True)
class Published:
    """What the config.json beside a published drafter may say."""

    num_attention_heads: Heads | None = None
    rms_norm_eps: Epsilon = 1e-6


class PublishedDrafter(EagleDrafter):
    """An EAGLE drafter whose input at prompt positions is the embedding of its vocabulary's entry 0.

    Its authors trained it so, and its accept lengths are reproduced only if it is used so. Of the prompt it has the
    target's features alone.
    """

    about = "config.json and pytorch_model.bin as EAGLE's code writes them"

    def __init__(self, config: EagleConfig, rotary_table: Tensor):
        super().__init__(config, rotary_table)
        self.entry = nn.Parameter(torch.zeros(1, config.decoder.dim))

    @classmethod
    def claims(cls, source: Source) -> bool:
        """By its own embedding beside `fc` and a Llama layer."""
        return source.metas.keys() >= MARKS

    @classmethod
    def read(cls, source: Source, target: Target, dtype: torch.dtype) -> Self:
        """The drafter in `source` for this target."""
        config = shape_of(source, target)
        check_fit(source, config.decoder.dim, target)
        with blank(source.path):
            drafter = cls(config, target.decoder.rotary_table)
        shape, paired = drafter.decoder.config, source.config.get("input_type") in PAIRED
        rules = [
            *llama_rules(shape, r"layers\.(\d+)", r"decoder.blocks.\1", paired, norm_rows(source)),
            Rename(r"fc\.(weight|bias)", r"fc.\1"),
            Rename(r"norm\.weight", "decoder.norm.weight"),
            Rename(r"embed_tokens\.weight", "entry", rows=(0, 1)),
        ]
        source.fill(drafter, rules, dtype, skip=(r".*rotary_emb\..*",))
        if source.shape("embed_tokens.weight", 2)[0] == target.vocab:
            drafter.check(target, source)
        return drafter

    def check(self, target: Target, source: Source) -> None:
        """InputError where the embedding of code 0 is not the target's, of which the drafter has a copy."""
        zero = torch.zeros(1, 1, dtype=torch.int64, device=target.decoder.rotary_table.device)
        theirs = target.embed(zero)[0].detach().to("cpu", torch.float32)
        if F.cosine_similarity(self.entry.detach().cpu().float(), theirs).item() < ALIKE:
            raise InputError(
                f"drafter {source.path} was trained for another target: its embeddings are not this target's"
            )

    def prompt_inputs(self, prompt: Tensor) -> Tensor:
        """prompt [R, T - 1, D] -> entry 0 at every position."""
        return self.entry.to(prompt.dtype).expand_as(prompt)


def norm_rows(source: Source) -> tuple[int, int] | None:
    """Rows of the norms of queries and keys, where a drafter of Chameleon's has them."""
    if NORM not in source.metas:
        return None
    return source.shape(NORM, 2)[0], source.shape(NORM.replace("q_norm", "k_norm"), 2)[0]


def shape_of(source: Source, target: Target) -> EagleConfig:
    """The shape of a published drafter: from its tensors, and what they do not say from config.json or the target."""
    there, published = source.metas, config_as(Published, source.config, source.path)
    dim = source.shape("fc.weight", 2)[0]
    heads = published.num_attention_heads or target.decoder.config.heads
    config = {
        "dim": dim,
        "heads": heads,
        "hidden": source.shape("layers.0.mlp.up_proj.weight", 2)[0],
        "layers": source.layers(),
        "bias": "fc.bias" in there,
        "first_norm": "layers.0.input_layernorm.weight" in there,
        "final_norm": "norm.weight" in there,
        "kv_heads": source.shape("layers.0.self_attn.k_proj.weight", 2)[0] * heads // dim,
        "norm_eps": published.rms_norm_eps,
        "qk_norm": NORM in there,
    }
    return EagleConfig.of(config, source.path)
