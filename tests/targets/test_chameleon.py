"""Chameleon, Anole and Lumina: the network beside transformers', prompts, row ends, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import write_chameleon
from parity import Peer, gaps

from lanternpp.models import read_target
from lanternpp.targets.chameleon import ChameleonTarget

PROMPTS = ["a photo of the red tulip", "red sea", None]


def peer(model: Any, target: ChameleonTarget) -> Peer:
    """transformers' Chameleon; its head cut to our codes, which its own class masks."""
    table = model.model.embed_tokens
    return Peer(
        tokens=table,
        codes=lambda codes: table(target.code_tokens[codes]),
        body=model.model,
        head=lambda features: model.lm_head(features)[..., target.code_tokens],
    )


@pytest.mark.parametrize(
    ("lumina", "changes"),
    [
        (False, {}),
        (True, {}),
        (False, {"swin_norm": True}),
        (
            False,
            {
                "attention_bias": True,
                "mlp_bias": True,
                "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            },
        ),
    ],
    ids=["anole", "lumina", "norms after", "biases and base"],
)
def test_logits_are_those_of_transformers(tmp_path: Path, lumina: bool, changes: dict[str, Any]) -> None:
    folder = tmp_path / ("Lumina-mGPT-7B-64" if lumina else "anole")
    model = write_chameleon(folder, lumina, **changes)
    target = read_target(folder, torch.float32)
    assert isinstance(target, ChameleonTarget)
    found = gaps(target, peer(model, target), PROMPTS)
    print(found)
    assert max(found.values()) <= 1e-4
