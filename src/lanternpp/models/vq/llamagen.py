"""LlamaGen's tokenizer (arXiv 2406.06525, section 2.1) from the files its authors publish."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from lanternpp.errors import InputError
from lanternpp.models.vq.layouts import LLAMAGEN, read_encoder, rules
from lanternpp.models.vq.vqgan import VQGAN, VQGANConfig
from lanternpp.nn.checkpoints import save
from lanternpp.nn.configs import config_as
from lanternpp.nn.shards import PICKLED, SAFE
from lanternpp.nn.sources import SAME, Source, blank
from lanternpp.nn.stores import Store

MARKS = {"quantize.embedding.weight", "post_quant_conv.weight", "decoder.mid.1.proj_out.weight"}
SKIP = (r"encoder\..*", r"quant_conv\..*", r"quantize\.codebook_used")
KIND = "vqgan"
MOST_STAGES = 8


def shape_of(source: Source, grid: int) -> VQGANConfig:
    """The shape of a published tokenizer, from its tensors; the grid is the target's to say."""
    shapes, stages = source.shapes(), min(source.layers(r"decoder\.conv_blocks\."), MOST_STAGES + 1)
    names = (f"decoder.conv_blocks.{i}.res.0.conv1.weight" for i in reversed(range(max(stages, 1))))
    widths = [source.shape(name, 4)[0] for name in names]
    codes, dim = source.shape("quantize.embedding.weight", 2)
    config = {
        "grid": grid,
        "codes": codes,
        "dim": dim,
        "channels": widths[0],
        "multiples": tuple(width // widths[0] for width in widths),
        "blocks": sum(f"decoder.conv_blocks.0.res.{i}.conv1.weight" in shapes for i in range(9)),
        "latent": source.shape("post_quant_conv.weight", 4)[0],
        "attention": "decoder.conv_blocks.0.attn.0.q.weight" in shapes,
    }
    return config_as(VQGANConfig, config, source.path)


def is_tokenizer(source: Source) -> bool:
    """Whether a checkpoint is a published tokenizer, or one of ours that draws with the same decoder."""
    return source.config.get("kind") == KIND or source.metas.keys() >= MARKS


def find_tokenizer(folder: Path, given: Path | None = None) -> Source:
    """The tokenizer that is given, or the one in `folder`: its `tokenizer/`, or the file that is one.

    Raises InputError that says what to put there.
    """
    sure = given or folder / "tokenizer"
    for path in [sure] if given or sure.is_dir() else checkpoints_in(folder):
        try:
            source = Source.open(path)
            if is_tokenizer(source):
                return source
        except InputError:
            if path == sure:
                raise
    if given:
        raise InputError(
            f"{given} is no image tokenizer of LlamaGen's; name vq_ds16_c2i.pt or vq_ds16_t2i.pt"
        )
    raise InputError(
        f"{folder} holds no image tokenizer; put vq_ds16_c2i.pt or vq_ds16_t2i.pt, from the authors of "
        "LlamaGen, beside the target, or use lanternpp models convert TARGET OUT --vq FILE, where both may be hub ids"
    )


def checkpoints_in(folder: Path) -> Iterable[Path]:
    """The files of tensors in a folder, those with "vq" in their name first."""
    files = [path for path in folder.iterdir() if path.suffix in (SAFE, *PICKLED)]
    return sorted(files, key=lambda path: ("vq" not in path.name.lower(), path.name))


def save_tokenizer(vq: VQGAN, folder: Path, store: Store) -> None:
    """Write a decoder as a tokenizer folder of ours."""
    config = asdict(vq.config) | {"unit": False}  # its codebook is normalised, and would round anew
    save(folder, {"kind": KIND, **config}, vq.state_dict(), store, ["codebook"])


def read_tokenizer(source: Source, grid: int, dtype: torch.dtype, device: torch.device | str) -> VQGAN:
    """The decoder in `source` for images of grid x grid codes; its codebook in float32."""
    ours = source.config.get("kind") == KIND
    if ours:
        config = config_as(VQGANConfig, source.config | {"grid": grid}, source.path)
    else:
        config = shape_of(source, grid)
    with blank(source.path):
        vq = VQGAN(config)
    source.fill(vq, [SAME] if ours else rules(config, LLAMAGEN), dtype, () if ours else SKIP, device)
    vq.prepare_for_inference()
    if not ours:
        vq.encoder = partial(read_encoder, source, config, dtype, device)
    return vq
