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
from lanternpp.models.llamagen import KIND, LlamaGenConfig, LlamaGenTarget
from lanternpp.models.vq.layouts import save_tokenizer
from lanternpp.models.vq.vqgan import VQGAN, VQGANConfig
from lanternpp.nn.checkpoints import save
from lanternpp.nn.sources import blank

SIZES = {  # width, layers, heads, hidden width, side of the grid of codes, codes (arXiv 2406.06525, table 1)
    "B": (768, 12, 12, 2048, 16, 16384),
    "L": (1024, 24, 16, 2816, 16, 16384),
    "XL": (1280, 36, 20, 3584, 16, 16384),
    "tiny": (32, 2, 2, 48, 4, 64),  # for tests
}
CLASSES = 1000
STD = 0.02  # of the weights, as trained ones have it


@contextmanager
def random_model(name: str) -> Iterator[Path]:
    """Write a class-conditional target of a size, with both kinds of drafters, into a temporary folder, and yield its path."""
    with TemporaryDirectory() as parent:
        folder = Path(parent) / f"llamagen-{name}-random"
        write_random(folder, name)
        yield folder


def write_random(folder: Path, name: str) -> None:
    """Write a model of a size of SIZES into a folder."""
    dim, layers, heads, hidden, grid, codes = SIZES[name]
    torch.manual_seed(0)
    config = LlamaGenConfig(dim, layers, heads, hidden, grid=grid, vocab=codes, classes=CLASSES)
    eagle, parallel = EagleConfig.like(config), ParallelConfig.like(config)
    small: dict[str, Any] = {} if name != "tiny" else {"channels": 32, "latent": 32, "blocks": 1}
    with blank():
        target = LlamaGenTarget(config)
        table = target.decoder.rotary_table
        vq = VQGAN(VQGANConfig(codes, **small))
        drafters = {"drafter": EagleDrafter(eagle, table), "parallel": ParallelDrafter(parallel, table)}
    for part, kind, flat in (("drafter", "eagle", eagle.flat()), ("parallel", "parallel", parallel.flat())):
        save(folder / part, {"kind": kind, **flat}, random_state(drafters[part]), "bfloat16")
    vq.load_state_dict(random_state(vq), assign=True)
    save_tokenizer(vq, folder / "tokenizer", "bfloat16")
    save(folder / "target", {"kind": KIND, **asdict(config)}, random_state(target), "bfloat16")


def random_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return random tensors for the state dict of a module; the weights of norms are 1, and biases 0."""
    state = {}
    for name, weight in module.state_dict().items():
        tensor = torch.zeros(weight.shape, dtype=torch.bfloat16)
        if not name.endswith("bias"):
            tensor = tensor.fill_(1) if weight.dim() == 1 else tensor.normal_(0, STD)
        state[name] = tensor
    return state
