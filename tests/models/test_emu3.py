"""Emu3-Gen: the network and the VQ decoder beside transformers', prompts, sizes, row ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import write_emu3
from helpers.parity import Peer, gaps
from tokenizers import Tokenizer

from lanternpp.api.model import read_target
from lanternpp.errors import InputError
from lanternpp.models.emu3 import Emu3Target


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
    model = write_emu3(tmp_path, hub, size="24x16")
    target = read_target(tmp_path, torch.float32)
    assert isinstance(target, Emu3Target)
    found = gaps(target, peer(model, target), ["a photo of the red tulip", "red sea", None])
    codes = torch.randint(64, (2, target.length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.model.vqmodel.decode(target.raster.grid(codes)).clamp(-1, 1)
    assert expected.std() > 0.2
    found["pixels"] = float((target.pixels(codes) - expected).abs().max())
    print(found)
    assert max(found[x] for x in ("prefill", "steps", "tree")) <= 1e-4
    assert found["pixels"] <= 1e-3


def test_it_is_asked_for_a_size_in_codes_and_led_away_from_the_unwanted(tmp_path: Path) -> None:
    write_emu3(tmp_path)
    target = read_target(tmp_path, torch.float32)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))

    def names(ids: list[int]) -> str:
        return " ".join(str(tokenizer.id_to_token(i)) for i in ids)

    size = "<|image start|> 4*4 <|image token|>"
    other = "<|endoftext|>"  # what this tokenizer makes of words it does not know
    assert names(target.conditional("red sea")) == f"<|extra_203|> red sea {' '.join([other] * 5)} {size}"
    assert names(target.unconditional("red sea")).startswith(f"<|extra_203|> {other} {other}")
    assert names(target.unconditional(None)).endswith(size)
    assert "quality" in target.config.wanted and "lowres" in target.config.unwanted
    assert target.unconditional("red sea") == target.unconditional(None)


def test_images_of_other_shapes_have_rows_of_their_own(tmp_path: Path) -> None:
    write_emu3(tmp_path)
    target = read_target(tmp_path, torch.float32, given={"size": "24x16"})
    assert (target.raster.rows, target.raster.columns, target.length) == (2, 3, 7)
    index = torch.arange(7)[None]
    allowed = target.constrain(torch.zeros(1, 7, target.vocab), index) > float("-inf")
    assert allowed[0].sum(-1).tolist() == [64, 64, 64, 1, 64, 64, 64]
    assert allowed[0, 3, 64] and not allowed[0, 2, 64]
    assert target.pixels(torch.zeros(2, 7, dtype=torch.int64)).shape == (2, 3, 16, 24)
    with pytest.raises(InputError, match=r"20x16.*multiples of 8"):
        read_target(tmp_path, torch.float32, given={"size": "20x16"})
