"""Logits and pixels of LlamaGen's checkpoints are those of the authors' code (see `golden/make_llamagen.py`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import checkpoints
from helpers.checkpoints import CODES, PARENTS, TREE_CODES
from helpers.refusals import rejects
from safetensors.torch import load_file, save_file
from torch import Tensor

from lanternpp.api.model import read_target
from lanternpp.engine.cache import Cache
from lanternpp.models.base import Target

GOLDEN = load_file(Path(__file__).parent.parent / "golden" / "llamagen.safetensors")
TEXT = "a text"
CASES = [("c2i", "official", 1), ("c2i heads", "official", 4), ("c2i heads", "llama", 4), ("t2i", "llama", 1)]


def opened(name: str, layout: str, heads: int, folder: Path) -> Target:
    """The target of a golden case, with the features of its text in a file."""
    checkpoints.write_llamagen(folder, "t2i" in name, layout)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": heads}))
    save_file({TEXT: checkpoints.numbers(TEXT, (6, 24))[2:].contiguous()}, folder / "embeddings.safetensors")
    return read_target(folder, torch.float32).requires_grad_(False)


def prefilled(target: Target, condition: str) -> tuple[Cache, Tensor]:
    """A cache after the prompt, and the logits there, [R, V]."""
    prompt = target.prompt([condition], 2)
    cache = Cache(target.decoder.config, 2, target.slots + target.length + 8, prompt.embeds)
    memory = cache.rows(torch.arange(2), prompt.start, target.slots)
    return cache, target.head(target(prompt.embeds, memory.nodes(), memory)[:, -1])


@pytest.mark.parametrize(("name", "layout", "heads"), CASES)
def test_logits_are_the_authors(name: str, layout: str, heads: int, tmp_path: Path) -> None:
    target = opened(name, layout, heads, tmp_path)
    condition = TEXT if "t2i" in name else "7"
    cache, logits = prefilled(target, condition)
    steps = [logits]
    for code in CODES:
        nodes = cache.nodes(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1, 1, dtype=torch.bool))
        steps.append(target.head(target(target.embed(code.expand(2, 1)), nodes, cache))[:, 0])
        cache.used += 1
    assert (torch.stack(steps) - GOLDEN[f"{name} steps"]).abs().max() < 1e-4

    x = torch.randn(3, target.decoder.config.dim)
    assert torch.equal(target.head(x), target.head_linear(x))

    cache, _ = prefilled(target, condition)
    count = len(PARENTS)
    mask, depth = torch.eye(count, dtype=torch.bool), torch.zeros(count, dtype=torch.int64)
    for node in range(1, count):
        mask[node] |= mask[PARENTS[node]]
        depth[node] = depth[PARENTS[node]] + 1
    nodes = cache.nodes(depth.expand(2, -1), mask.expand(2, -1, -1))
    tree = target.head(target(target.embed(TREE_CODES.expand(2, -1)), nodes, cache))
    assert (tree.transpose(0, 1) - GOLDEN[f"{name} tree"]).abs().max() < 1e-4


def test_pixels_are_the_authors(tmp_path: Path) -> None:
    checkpoints.write_llamagen(tmp_path, grid=2)
    codes = torch.arange(2 * 4).view(2, 4) * 5 % checkpoints.VOCAB
    pixels = read_target(tmp_path, torch.float32).pixels(codes)
    expected = GOLDEN["vq pixels"].clamp(-1, 1)
    assert pixels.shape == (2, 3, 32, 32)
    assert expected.std() > 0.1
    assert (pixels[:, :, ::2] - expected).abs().max() < 1e-3


def test_a_damaged_tokenizer_is_not_taken_for_a_missing_one(tmp_path: Path) -> None:
    folder = checkpoints.write_llamagen(tmp_path / "model")
    content = (folder / "vq_ds16.pt").read_bytes()
    (folder / "vq_ds16.pt").write_bytes(content[: len(content) // 2])
    rejects(r"vq_ds16\.pt is truncated", read_target, folder, torch.float32)
