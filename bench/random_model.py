"""Models with random weights in LlamaGen's shapes, to measure what its sizes cost where no weights are at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from lanternpp.drafters.eagle import EagleConfig, EagleDrafter
from lanternpp.drafters.parallel import ParallelConfig, ParallelDrafter
from lanternpp.errors import InputError
from lanternpp.models.llamagen import KIND, LlamaGenConfig, LlamaGenTarget
from lanternpp.models.vq.layouts import save_tokenizer
from lanternpp.models.vq.vqgan import VQGAN, VQGANConfig
from lanternpp.nn.checkpoints import save
from lanternpp.nn.sources import blank
from lanternpp.util.registry import unknown

SIZES = {  # width, layers, heads, hidden width, side of the grid of codes, codes (arXiv 2406.06525, table 1)
    "B": (768, 12, 12, 2048, 16, 16384),
    "L": (1024, 24, 16, 2816, 16, 16384),
    "XL": (1280, 36, 20, 3584, 16, 16384),
    "tiny": (32, 2, 2, 48, 4, 64),  # for tests
}
CLASSES = 1000
STD = 0.02  # of the weights, as trained ones have it


def check_size(name: str) -> str:
    """A name of SIZES; InputError lists them."""
    if name not in SIZES:
        raise InputError(unknown("size", name, SIZES))
    return name


@contextmanager
def random_model(name: str) -> Iterator[Path]:
    """A folder with a class-conditional target of this size and both kinds of drafter for it; it is removed at the end.

    InputError where there is no room for it.
    """
    with TemporaryDirectory() as room:
        folder = Path(room) / f"llamagen-{check_size(name)}-random"
        write_random(folder, name)
        yield folder


def write_random(folder: Path, name: str) -> None:
    """Write the model of a size of SIZES."""
    dim, layers, heads, hidden, grid, codes = SIZES[name]
    torch.manual_seed(0)
    config = LlamaGenConfig(dim, layers, heads, hidden, grid=grid, vocab=codes, classes=CLASSES)
    eagle, parallel = EagleConfig.like(config), ParallelConfig.like(config)
    small: dict[str, Any] = {} if name != "tiny" else {"channels": 32, "latent": 32, "blocks": 1}
    with blank():
        target = LlamaGenTarget(config)
        table = target.decoder.rotary_table
        vq = VQGAN(VQGANConfig(grid, codes, **small))
        drafters = {"drafter": EagleDrafter(eagle, table), "parallel": ParallelDrafter(parallel, table)}
    for part, kind, flat in (("drafter", "eagle", eagle.flat()), ("parallel", "parallel", parallel.flat())):
        save(folder / part, {"kind": kind, **flat}, drawn(drafters[part]), "bfloat16")
    vq.load_state_dict(drawn(vq), assign=True)
    save_tokenizer(vq, folder / "tokenizer", "bfloat16")
    save(folder / "target", {"kind": KIND, **asdict(config)}, drawn(target), "bfloat16")


def drawn(module: nn.Module) -> dict[str, torch.Tensor]:
    """Random tensors for all that a module keeps; the weights of norms are 1 and biases 0."""
    made = {}
    for name, like in module.state_dict().items():
        tensor = torch.zeros(like.shape, dtype=torch.bfloat16)
        if not name.endswith("bias"):
            tensor = tensor.fill_(1) if like.dim() == 1 else tensor.normal_(0, STD)
        made[name] = tensor
    return made
