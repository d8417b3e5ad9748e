"""LlamaGen (arXiv 2406.06525): pictures of a class, or of a text that flan-t5-xl encodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.models.base import Target, check_codes
from lanternpp.models.conditions import ClassCondition, T5Text, TextCondition, find_text_encoder
from lanternpp.models.vq.codes import Reader
from lanternpp.models.vq.layouts import LLAMAGEN, find_tokenizer, read_vqgan, save_tokenizer
from lanternpp.nn import checkpoints
from lanternpp.nn.checkpoints import Codes, Epsilon, Grid, Heads, Positions, Slots, Width, config_as
from lanternpp.nn.decoder import Decoder, DecoderConfig, grid_table
from lanternpp.nn.sources import SAME, Rename, Source, blank, llama_rules
from lanternpp.types import Prompt

KIND = "llamagen"
HEADS_BY_DIM = {3200: 32, 4096: 32}  # heads of other dims are 64 channels wide
DOWN = 16  # pixels of an image's side per code
GRIDS = {"t2i": 16, "t2i2": 32}  # codes of an image's side by the `input_type` of Llama-named copies
OFFICIAL_TENSORS = {"tok_embeddings.weight", "layers.0.attention.wqkv.weight", "output.weight"}
LLAMA_CONDITION = re.compile(r"(?:model\.)?(?:cls_embedding|caption_embedder)\..*")
SKIPPED_TENSORS = (r"freqs_cis", r".*\.rotary_emb\..*", r".*\.kv_cache\..*")


@dataclass(frozen=True, kw_only=True)
class LlamaGenConfig(DecoderConfig):
    """The shape of a target of `classes` classes, or of texts whose features have `caption_dim` channels."""

    grid: Grid  # codes of an image's side
    vocab: Codes = 16384
    classes: Codes | None = None
    caption_dim: Width | None = None
    slots: Slots = 1


def rotary_table(config: LlamaGenConfig) -> Tensor:
    """Return the table of rotations, in which the rows of prompt slots are zero.

    The published models were trained with such a table: queries and keys of prompt slots are multiplied by zero, so that
    attention to and among prompt slots is uniform.
    """
    table = grid_table(config.slots, config.grid, config.head_dim)
    table[: config.slots] = 0
    return table.float()


class LlamaGenTarget(Target):
    """A decoder of codes in raster order after the slots of a condition."""

    about = "LlamaGen's .pt files (c2i and t2i), or their copies under Llama names"

    def __init__(self, config: LlamaGenConfig):
        super().__init__()
        self.config, self.vocab = config, config.vocab
        self.width, self.length, self.slots = config.grid, config.grid**2, config.slots
        self.decoder = Decoder(config, rotary_table(config))
        self.codes_in = nn.Embedding(config.vocab, config.dim)
        self.codes_out = nn.Linear(config.dim, config.vocab, bias=False)
        self.condition: ClassCondition | TextCondition
        # The defaults are the settings of the authors' own scripts.
        if config.caption_dim is None:
            self.condition = ClassCondition(config.dim, config.classes or 1000)
            self.defaults = {"cfg": 4.0, "top_k": 2000}
        else:
            self.condition = TextCondition(config.dim, config.caption_dim, config.slots)
            self.defaults = {"cfg": 7.5, "top_k": 1000}

    @classmethod
    def claims(cls, source: Source) -> bool:
        """Return whether a checkpoint is LlamaGen's: it has the tensors of a condition and of a decoder."""
        names = source.metas.keys()
        return names >= OFFICIAL_TENSORS or (
            any(LLAMA_CONDITION.fullmatch(name) for name in names)
            and any(name.endswith("layers.0.self_attn.q_proj.weight") for name in names)
        )

    @classmethod
    def read(cls, source: Source, dtype: torch.dtype, device: torch.device | str = "cpu") -> Self:
        """Read the target in `source`, with the tokenizer and the text encoder in the same folder."""
        ours = source.config.get("kind") == KIND
        config = config_as(LlamaGenConfig, source.config, source.path) if ours else shape_of(source)
        folder = source.folder.parent if ours else source.folder
        vq = find_tokenizer(folder, source.given.pop("vq", None))
        with blank(source.path):
            target = cls(config)
        if isinstance(target.condition, TextCondition):
            target.condition.text = find_text_encoder(folder, source.config, source.given.pop("text", None))
        source.fill(
            target, [SAME] if ours else rename_rules(config), dtype, () if ours else SKIPPED_TENSORS, device
        )
        # The tokenizer is no submodule, as it has its own folder.
        vars(target)["vq"] = read_vqgan(vq, dtype, LLAMAGEN).to(device)
        check_codes(source.path, config.vocab, vq.path, len(target.vq.codebook))
        return target.to(device)

    def save(self, folder: Path, store: checkpoints.Store) -> list[str]:
        """Write target, tokenizer and, if it is a folder, the text encoder; return the names of the written parts."""
        checkpoints.save(folder / "target", {"kind": KIND, **asdict(self.config)}, self.state_dict(), store)
        save_tokenizer(self.vq, folder / "tokenizer", store)
        return ["target", "tokenizer", *(self.text.save(folder) if self.text else ())]

    @property
    def text(self) -> T5Text | None:
        """The source of the features of texts; None for a model of classes."""
        return self.condition.text if isinstance(self.condition, TextCondition) else None

    def prompt(self, conditions: Sequence[str | None], branches: int) -> Prompt:
        """Embed b classes or texts as [branches * b, T, D]; raise InputError for an unknown class."""
        return self.condition.prompt(conditions, branches)

    def pixels(self, codes: Tensor) -> Tensor:
        """Decode codes [B, length] to images [B, 3, H, W] in [-1, 1]."""
        return super().pixels(codes.unflatten(1, (self.width, self.width)))

    def reader(self) -> Reader:
        """Return the reader of the tokenizer. Raise InputError if the tokenizer has no encoder."""
        vq = self.vq
        encoder = vq.encoder().to(vq.codebook.device)
        side = self.width * vq.config.down
        return Reader.of(encoder, vq.codebook, side, self.length, lambda codes: codes.flatten(1))

    @property
    def conditions(self) -> Sequence[str]:
        """The numbers of the classes; empty for a model of texts."""
        return [str(number) for number in range(self.config.classes or 0)]

    def cache_prompts(self, prompts: int) -> None:
        """Let the cache hold the features of `prompts` more texts."""
        if self.text:
            self.text.max_cached += prompts

    def release_encoder(self) -> None:
        """Free the text encoder."""
        if self.text:
            self.text.release()


def rename_rules(config: LlamaGenConfig) -> list[Rename]:
    """Return the renames of both layouts, Llama's and the official one; pairs of channels of queries and keys become halves."""
    query_rows, key_rows = config.heads * config.head_dim, config.num_kv_heads * config.head_dim
    rotary_part = (0, query_rows + key_rows)
    value_part = (query_rows + key_rows, query_rows + 2 * key_rows)
    layer, block = r"layers\.(\d+)", r"decoder.blocks.\1"
    wqkv, w13, hidden = f"{block}.wqkv.weight", f"{block}.w13.weight", config.hidden
    return [
        *llama_rules(config, r"model\.layers\.(\d+)", block, paired=True),
        Rename(rf"{layer}\.attention\.wqkv\.weight", wqkv, rotary_part, rotary_part, config.head_dim),
        Rename(rf"{layer}\.attention\.wqkv\.weight", wqkv, value_part, value_part),
        Rename(rf"{layer}\.attention\.wo\.weight", f"{block}.wo.weight"),
        Rename(rf"{layer}\.feed_forward\.w1\.weight", w13, part=(0, hidden)),
        Rename(rf"{layer}\.feed_forward\.w3\.weight", w13, part=(hidden, 2 * hidden)),
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
    """Return the config of a published target, from its tensors, its config.json and its name. Raise InputError."""
    published = config_as(PublishedConfig, source.config, source.path)

    def shape(dims: int, *names: str) -> tuple[int, ...]:
        """Return the shape of the first tensor with one of the names; a name that begins with a dot is the end of a name."""
        for tensor in source.metas:
            plain = tensor.removeprefix("model.")
            if any(plain.endswith(name) if name.startswith(".") else plain == name for name in names):
                return source.shape(tensor, dims)
        return source.shape(names[0], dims)

    official = "layers.0.attention.wqkv.weight" in source.metas
    vocab, dim = shape(2, "tok_embeddings.weight", "embed_tokens.weight")
    heads = published.num_attention_heads or HEADS_BY_DIM.get(dim, max(dim // 64, 1))
    if official:
        key_rows = (shape(2, "layers.0.attention.wqkv.weight")[0] - dim) // 2
    else:
        key_rows = shape(2, "layers.0.self_attn.k_proj.weight")[0]
    reads_texts = any(name.endswith(".uncond_embedding") for name in source.metas)
    slots, caption_dim = shape(2, ".uncond_embedding") if reads_texts else (1, None)
    config = {
        "dim": dim,
        "layers": source.layers(r"(?:model\.)?layers\."),
        "heads": heads,
        "hidden": shape(2, "layers.0.feed_forward.w3.weight", "layers.0.mlp.up_proj.weight")[0],
        "grid": grid_of(source.path, published, source.given.pop("size", None)),
        "kv_heads": key_rows // max(dim // heads, 1),
        "vocab": vocab,
        "classes": None if reads_texts else shape(2, ".embedding_table.weight")[0] - 1,
        "caption_dim": caption_dim,
        "slots": slots,
        "norm_eps": published.rms_norm_eps,
    }
    return config_as(LlamaGenConfig, config, source.path)


@dataclass(frozen=True)
class PublishedConfig:
    """The fields that are read from a published target's config.json."""

    num_attention_heads: Heads | None = None
    rms_norm_eps: Epsilon = 1e-5
    block_size: Positions | None = None
    input_type: str | None = None


def grid_of(path: Path, published: PublishedConfig, size: str | None = None) -> int:
    """Return the codes of an image's side, from the given size, the config, or the size in the name. Raise InputError."""
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
        sizes = re.findall(r"(?<!\d)(256|384|512)(?!\d)", name)
        if sizes:
            return int(sizes[-1]) // DOWN
    raise InputError(
        f"{path} does not say how large its pictures are; put 256, 384 or 512 into its name, as in "
        "c2i_L_384.pt, or use lanternpp models convert with --size"
    )
