from __future__ import annotations

import json

import pytest
import torch
from helpers.toys import ToyTarget

from lanternpp.api.model import ASSETS
from lanternpp.drafters.base import DrafterConfig
from lanternpp.drafters.eagle import EagleConfig, EagleDrafter
from lanternpp.drafters.parallel import ParallelConfig
from lanternpp.nn import checkpoints
from lanternpp.nn.decoder import DecoderConfig


def test_bias_layers_and_norms_are_options():
    rotary_table = ToyTarget().decoder.rotary_table
    bare = EagleDrafter(EagleConfig(DecoderConfig(16, 2, 2, 24, first_norm=False), bias=False), rotary_table)
    assert bare.fc.bias is None and len(bare.decoder.blocks) == 2
    assert isinstance(bare.decoder.blocks[0].attention_norm, torch.nn.Identity)
    assert not isinstance(bare.decoder.blocks[1].attention_norm, torch.nn.Identity)
    assert not isinstance(bare.decoder.norm, torch.nn.Identity)


@pytest.mark.parametrize(("part", "kind"), [("drafter", EagleConfig), ("parallel", ParallelConfig)])
def test_a_config_on_disk_is_flat_and_read_back(part: str, kind: type[DrafterConfig]) -> None:
    folder = ASSETS / "nature-128" / part
    saved = checkpoints.load_config(folder)
    flat = json.loads(json.dumps(kind.of(saved, folder).flat()))
    assert all(flat[name] == saved[name] for name in flat.keys() & saved.keys())
    assert json.loads(json.dumps(kind.of(flat, folder).flat())) == flat
