"""Janus: the network and the VQ decoder beside transformers', prompts, both published layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import write_janus
from helpers.parity import Peer, gaps
from transformers import GenerationConfig

from lanternpp import Pipeline
from lanternpp.api.model import read_target
from lanternpp.errors import InputError
from lanternpp.models.janus import BEGIN, DRAW, PAD, JanusTarget


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
        expected = model.model.vqmodel.decode(codes).clamp(-1, 1)
    assert expected.std() > 0.2
    found["pixels"] = float((target.pixels(codes) - expected).abs().max())
    print(found)
    assert max(found[x] for x in ("prefill", "steps", "tree")) <= 1e-4
    assert found["pixels"] <= 1e-3


def test_guidance_leads_away_from_the_padded_prompt_as_transformers_pads_it(tmp_path: Path) -> None:
    """transformers' own generation, greedy and guided, gives the codes of ours."""
    model = write_janus(tmp_path).double()
    pipe = Pipeline.from_pretrained(str(tmp_path), device="cpu", dtype="float64")
    target = pipe.target
    ids = target.conditional(" a photo of the red tulip ")
    first, pad, draw = (target.text.id(token) for token in (BEGIN, PAD, DRAW))
    assert (ids[0], ids[-1]) == (first, draw) and ids == target.conditional("a photo of the red tulip")
    assert target.unconditional("a photo of the red tulip") == [first, *[pad] * (len(ids) - 2), draw]
    assert target.unconditional(None) == target.unconditional("")
    expected = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        generation_mode="image",
        generation_config=GenerationConfig(
            do_sample=False,
            guidance_scale=5.0,
            max_length=64,
            bos_token_id=first,
            pad_token_id=pad,
            generation_kwargs={"boi_token_id": draw},
        ),
    )
    drawn = pipe("a photo of the red tulip", method="ar", temperature=0.0)
    assert drawn.stats.settings["cfg"] == 5.0
    assert torch.equal(drawn.codes, expected)


def test_a_table_of_codes_alone_makes_no_janus(tmp_path: Path) -> None:
    write_janus(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="lacks text_config"):
        read_target(tmp_path, torch.float32)
    with pytest.raises(InputError, match=r"48x48 cannot be drawn.*64x64"):
        write_janus(tmp_path)
        read_target(tmp_path, torch.float32, given={"size": "48x48"})
