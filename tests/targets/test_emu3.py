"""Emu3-Gen: the network and the VQ decoder beside transformers', prompts, sizes, row ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import write_emu3
from parity import Peer, gaps

from lanternpp.nn.sources import Source
from lanternpp.targets.emu3 import Emu3Target


def peer(model: Any, target: Emu3Target) -> Peer:
    """transformers' Emu3, its head cut to our codes."""
    table = model.get_input_embeddings()
    return Peer(
        tokens=table,
        codes=lambda codes: table(target.code_tokens[codes]),
        body=model.model.text_model,
        head=lambda features: model.lm_head(features)[..., target.code_tokens],
    )


@pytest.mark.parametrize("hub", [False, True], ids=["saved", "hub"])
def test_logits_and_pixels_are_those_of_transformers(tmp_path: Path, hub: bool) -> None:
    model = write_emu3(tmp_path, hub)
    target = Emu3Target.read(Source.open(tmp_path), torch.float32, size="24x16")
    found = gaps(target, peer(model, target), ["a photo of the red tulip", "red sea", None])
    codes = torch.randint(64, (2, target.length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model.model.vqmodel.decode(target.raster.grid(codes)).clamp(-1, 1)
    assert wanted.std() > 0.2
    found["pixels"] = float((target.pixels(codes) - wanted).abs().max())
    print(found)
    assert max(found[x] for x in ("prefill", "steps", "tree")) <= 1e-4
    assert found["pixels"] <= 1e-3
