"""Janus: the network and the VQ decoder beside transformers', prompts, both published layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import write_janus
from parity import Peer, gaps

from lanternpp.models import read_target
from lanternpp.targets.janus import JanusTarget


def peer(model: Any) -> Peer:
    """transformers' Janus with its head and table of codes."""
    return Peer(
        tokens=model.get_input_embeddings(),
        codes=model.prepare_embeddings_for_image_generation,
        body=model.model.language_model,
        head=model.model.generation_head,
    )


@pytest.mark.parametrize("authors", [False, True], ids=["transformers", "authors"])
def test_logits_and_pixels_are_those_of_transformers(tmp_path: Path, authors: bool) -> None:
    model = write_janus(tmp_path, authors)
    target = read_target(tmp_path, torch.float32)
    assert isinstance(target, JanusTarget)
    found = gaps(target, peer(model), ["a photo of the red tulip", "red sea", None])
    codes = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model.model.vqmodel.decode(codes).clamp(-1, 1)
    assert wanted.std() > 0.2
    found["pixels"] = float((target.pixels(codes) - wanted).abs().max())
    print(found)
    assert max(found[x] for x in ("prefill", "steps", "tree")) <= 1e-4
    assert found["pixels"] <= 1e-3
