"""LlamaGen (arXiv 2406.06525): pictures of a class, or of a text by way of flan-t5-xl."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.models.base import Target, check_codes
from lanternpp.models.conditions import ClassCondition, T5Text, TextCondition, text_of
from lanternpp.models.vq.codes import Reader
from lanternpp.models.vq.layouts import LLAMAGEN, find_tokenizer, read_vqgan, save_tokenizer
from lanternpp.nn import checkpoints
from lanternpp.nn.checkpoints import (
    Codes,
    Epsilon,
    Grid,
    Heads,
    Positions,
    RopeBase,
    Slots,
    Store,
    Width,
    config_as,
)
from lanternpp.nn.decoder import Decoder, DecoderConfig, grid_table
from lanternpp.nn.sources import SAME, Rename, Source, blank, llama_rules
from lanternpp.types import Prompt

KIND = "llamagen"
HEADS = {3200: 32, 4096: 32}  # dims whose heads are not 64 channels wide
DOWN = 16  # pixels of an image's side per code
GRIDS = {"t2i": 16, "t2i2": 32}  # codes of an image's side by the `input_type` of Llama-named copies
OFFICIAL = {"tok_embeddings.weight", "layers.0.attention.wqkv.weight", "output.weight"}
LLAMA = re.compile(r"(?:model\.)?(?:cls_embedding|caption_embedder)\..*")
SKIP = (r"freqs_cis", r".*\.rotary_emb\..*", r".*\.kv_cache\..*")


@dataclass(frozen=True, kw_only=True)
class LlamaGenConfig(DecoderConfig):
    """The shape of a target: of `classes` classes, or of texts whose encoder gives `caption_dim` features."""

    grid: Grid  # codes of an image's side
    vocab: Codes = 16384
    classes: Codes | None = None
    caption_dim: Width | None = None
    slots: Slots = 1
    rope_base: RopeBase = 10000.0


def rotary_table(config: LlamaGenConfig) -> Tensor:
    """The table of rotations, whose rows of prompt slots are zero.

    The published models were trained with it: a zero factor makes queries and keys of prompt slots vanish, so that
    attention to and among prompt slots is uniform.
    """
    table = grid_table(config.slots, config.grid, config.head_dim, config.rope_base)
    table[: config.slots] = 0
    return table.float()


class LlamaGenTarget(Target):
    """Codes in raster order after the slots of a condition."""

    about = "LlamaGen's .pt files (c2i and t2i), or their copies under Llama names"
    head_layer = "codes_out"

    def __init__(self, config: LlamaGenConfig):
        super().__init__()
        self.config, self.vocab = config, config.vocab
        self.width, self.length, self.slots = config.grid, config.grid**2, config.slots
        self.decoder = Decoder(config, rotary_table(config))
        self.codes_in = nn.Embedding(config.vocab, config.dim)
        self.codes_out = nn.Linear(config.dim, config.vocab, bias=False)
        self.condition: ClassCondition | TextCondition
        if config.caption_dim is None:
            self.condition = ClassCondition(config.dim, config.classes or 1000)
        else:
            self.condition = TextCondition(config.dim, config.caption_dim, config.slots)

    @property
    def defaults(self) -> Mapping[str, Any]:  # type: ignore[override]
        """The settings of the authors' own scripts."""
        if self.config.classes is None:
            return {"cfg": 7.5, "top_k": min(1000, self.vocab)}
        return {"cfg": 4.0, "top_k": min(2000, self.vocab)}

    @classmethod
    def claims(cls, source: Source) -> bool:
        """A checkpoint is LlamaGen's by its tensors' names: a condition's beside a decoder's."""
        names = source.metas.keys()
        return names >= OFFICIAL or (
            any(LLAMA.fullmatch(name) for name in names)
            and any(name.endswith("layers.0.self_attn.q_proj.weight") for name in names)
        )

    @classmethod
    def read(cls, source: Source, dtype: torch.dtype, device: torch.device | str = "cpu") -> Self:
        """The target in `source`, with the tokenizer and the text encoder that lie beside it."""
        ours = source.config.get("kind") == KIND
        config = config_as(LlamaGenConfig, source.config, source.path) if ours else shape_of(source)
        beside = source.path if source.path.is_dir() and not ours else source.path.parent
        vq = find_tokenizer(beside, source.given.get("tokenizer"))
        with blank(source.path):
            target = cls(config)
        if isinstance(target.condition, TextCondition):
            target.condition.text = text_of(beside, source.config, source.given.get("text"))
        source.fill(target, [SAME] if ours else rules(config), dtype, () if ours else SKIP, device)
        # not as a part of the module
        vars(target)["vq"] = read_vqgan(vq, dtype, LLAMAGEN, grid=config.grid).to(device)
        check_codes(source.path, config.vocab, vq.path, len(target.vq.codebook))
        return target.to(device)

    def save(self, folder: Path, store: Store) -> list[str]:
        """Write target, tokenizer and, where it lies on this machine, the text encoder."""
        checkpoints.save(folder / "target", {"kind": KIND, **asdict(self.config)}, self.state_dict(), store)
        save_tokenizer(self.vq, folder / "tokenizer", store)
        return ["target", "tokenizer", *(self.text.save(folder) if self.text else ())]

    @property
    def text(self) -> T5Text | None:
        """The features of texts; None of a model of classes."""
        return self.condition.text if isinstance(self.condition, TextCondition) else None

    def prompt(self, conditions: Sequence[str | None], branches: int) -> Prompt:
        """Classes or texts -> [branches * b, T, D]; the unconditional rows are padded like their texts."""
        return self.condition.prompt(conditions, branches)

    def reader(self) -> Reader:
        """The published tokenizers read pictures too."""
        vq = self.vq
        encoder = vq.encoder and vq.encoder().to(vq.codebook.device)
        return Reader.of(
            encoder, vq.codebook, self.width * vq.config.down, self.length, lambda x: x.flatten(1)
        )

    @property
    def conditions(self) -> Sequence[str]:
        """The numbers of the classes; texts cannot be listed."""
        return [str(number) for number in range(self.config.classes or 0)]

    def cache_prompts(self, prompts: int) -> None:
        """Keep the features of so many more texts."""
        if self.text:
            self.text.cache_texts(prompts)

    def release_encoder(self) -> None:
        """Free the text encoder."""
        if self.text:
            self.text.release()


def rules(config: LlamaGenConfig) -> list[Rename]:
    """Official names, then those of Llama; queries and keys come in neighbouring pairs and become halves."""
    queries, keys = config.heads * config.head_dim, config.num_kv_heads * config.head_dim
    rotated, every, halves = queries + keys, queries + 2 * keys, config.head_dim
    layer, block = r"layers\.(\d+)", r"decoder.blocks.\1"
    fused, w13, half = f"{block}.wqkv.weight", f"{block}.w13.weight", config.hidden
    return [
        *llama_rules(config, r"model\.layers\.(\d+)", block, paired=True),
        Rename(rf"{layer}\.attention\.wqkv\.weight", fused, (0, rotated), (0, rotated), halves),
        Rename(rf"{layer}\.attention\.wqkv\.weight", fused, (rotated, every), (rotated, every)),
        Rename(rf"{layer}\.attention\.wo\.weight", f"{block}.wo.weight"),
        Rename(rf"{layer}\.feed_forward\.w1\.weight", w13, part=(0, half)),
        Rename(rf"{layer}\.feed_forward\.w3\.weight", w13, part=(half, 2 * half)),
        Rename(rf"{layer}\.feed_forward\.w2\.weight", f"{block}.w2.weight"),
        Rename(rf"{layer}\.(attention|ffn)_norm\.weight", rf"{block}.\2_norm.weight"),
        Rename(r"(?:model\.)?norm\.weight", "decoder.norm.weight"),
        Rename(r"(?:model\.)?(?:tok_embeddings|embed_tokens)\.weight", "codes_in.weight"),
        Rename(r"output\.weight|lm_head\.weight", "codes_out.weight"),
        Rename(r"(?:model\.)?\w+\.embedding_table\.weight", "condition.table.weight"),
        Rename(r"(?:model\.)?\w+\.cap_proj\.fc([12])\.weight", r"condition.fc\1.weight"),
        Rename(r"(?:model\.)?\w+\.uncond_embedding", "condition.null"),
    ]


def shape_of(source: Source) -> LlamaGenConfig:
    """The shape of a published target, from its tensors, its config.json and its name."""
    published = config_as(Published, source.config, source.path)

    def shape(dims: int, *ends: str) -> tuple[int, ...]:
        """Of the first tensor that is there, by its names under both layouts; one with a dot is how a name ends."""
        for name in source.metas:
            plain = name.removeprefix("model.")
            if any(plain.endswith(end) if end.startswith(".") else plain == end for end in ends):
                return source.shape(name, dims)
        return source.shape(ends[0], dims)

    official = "layers.0.attention.wqkv.weight" in source.metas
    vocab, dim = shape(2, "tok_embeddings.weight", "embed_tokens.weight")
    heads = published.num_attention_heads or HEADS.get(dim, max(dim // 64, 1))
    if official:
        keys = (shape(2, "layers.0.attention.wqkv.weight")[0] - dim) // 2
    else:
        keys = shape(2, "layers.0.self_attn.k_proj.weight")[0]
    texts = any(name.endswith(".uncond_embedding") for name in source.metas)
    slots, caption_dim = shape(2, ".uncond_embedding") if texts else (1, None)
    config = {
        "dim": dim,
        "layers": source.layers(r"(?:model\.)?layers\."),
        "heads": heads,
        "hidden": shape(2, "layers.0.feed_forward.w3.weight", "layers.0.mlp.up_proj.weight")[0],
        "grid": grid_of(source.path, published, source.given.get("size")),
        "kv_heads": keys // max(dim // heads, 1),
        "vocab": vocab,
        "classes": None if texts else shape(2, ".embedding_table.weight")[0] - 1,
        "caption_dim": caption_dim,
        "slots": slots,
        "norm_eps": published.rms_norm_eps,
    }
    return config_as(LlamaGenConfig, config, source.path)


@dataclass(frozen=True)
class Published:
    """Fields that the config.json beside a published target may have."""

    num_attention_heads: Heads | None = None
    rms_norm_eps: Epsilon = 1e-5
    block_size: Positions | None = None
    input_type: str | None = None


def grid_of(path: Path, published: Published, size: str | None = None) -> int:
    """Codes of an image's side, which no tensor has: given, from the config, or from the pixels in the name."""
    if size:
        if not re.fullmatch(r"[0-9]{1,5}", str(size)) or int(size) % DOWN or not int(size):
            raise InputError(
                f"size {size} is not a multiple of {DOWN} pixels; LlamaGen draws 256, 384 or 512"
            )
        return int(size) // DOWN
    if published.block_size:
        return round(published.block_size**0.5)
    if published.input_type in GRIDS:
        return GRIDS[published.input_type]
    for name in (path.name, path.resolve().parent.name):
        found = re.findall(r"(?<!\d)(256|384|512)(?!\d)", name)
        if found:
            return int(found[-1]) // DOWN
    raise InputError(
        f"{path} does not say how large its pictures are; put 256, 384 or 512 into its name, as in "
        "c2i_L_384.pt, or use lanternpp models convert with --size"
    )
