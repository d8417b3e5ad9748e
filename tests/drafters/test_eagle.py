from __future__ import annotations

import json

import pytest
import torch
from helpers.toys import ToyTarget, eagle

from lanternpp.api.model import ASSETS
from lanternpp.drafters.base import DrafterConfig
from lanternpp.drafters.eagle import EagleConfig, EagleDrafter
from lanternpp.drafters.parallel import ParallelConfig
from lanternpp.engine.cache import Cache
from lanternpp.nn import checkpoints
from lanternpp.nn.decoder import DecoderConfig


def pair(count: int = 10):
    torch.manual_seed(0)
    target = ToyTarget()
    return eagle(target), *torch.randn(2, 2, count, 16, dtype=torch.float64)


def test_teaching_is_drafting():
    drafter, next_embeds, features = pair()
    cache = Cache(drafter.decoder.config, 2, 20, next_embeds)
    memory = cache.rows(torch.arange(2), torch.zeros(2, dtype=torch.int64), 4)
    out = [drafter(next_embeds[:, :4], features[:, :4], memory.nodes(), memory)]
    for i in range(4, 10):
        nodes = cache.nodes(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1, 1, dtype=torch.bool))
        out.append(drafter(next_embeds[:, i : i + 1], features[:, i : i + 1], nodes, cache))
        cache.used += 1
    assert torch.allclose(torch.cat(out, 1), drafter.forward_sequence(next_embeds, features), atol=1e-12)


def test_it_listens_to_the_code_ahead_and_to_the_feature_here():
    drafter, next_embeds, features = pair()
    plain = drafter.forward_sequence(next_embeds, features)
    assert not torch.allclose(drafter.forward_sequence(next_embeds + 1, features), plain)
    assert not torch.allclose(drafter.forward_sequence(next_embeds, features + 1), plain)
    swapped = drafter.forward_sequence(features, next_embeds)
    assert not torch.allclose(swapped, plain)


def test_it_is_one_layer_over_a_linear_map_of_the_pair():
    drafter, next_embeds, features = pair()
    x = torch.cat((next_embeds, features), -1) @ drafter.fc.weight.T + drafter.fc.bias
    assert torch.allclose(
        drafter.forward_sequence(next_embeds, features), drafter.decoder.forward_sequence(x), atol=1e-12
    )
    assert len(drafter.decoder.blocks) == 1
    assert isinstance(drafter.decoder.norm, torch.nn.Identity), "the target's norm is in its features already"


def test_its_options_are_those_of_the_checkpoints():
    rotary_table = ToyTarget().decoder.rotary_table
    bare = EagleDrafter(EagleConfig(DecoderConfig(16, 2, 2, 24, first_norm=False), bias=False), rotary_table)
    assert bare.fc.bias is None and len(bare.decoder.blocks) == 2
    assert isinstance(bare.decoder.blocks[0].attention_norm, torch.nn.Identity)
    assert not isinstance(bare.decoder.blocks[1].attention_norm, torch.nn.Identity)
    assert not isinstance(bare.decoder.norm, torch.nn.Identity)


@pytest.mark.parametrize(("part", "kind"), [("drafter", EagleConfig), ("parallel", ParallelConfig)])
def test_a_config_on_disk_is_flat_and_comes_back(part: str, kind: type[DrafterConfig]) -> None:
    folder = ASSETS / "nature-128" / part
    saved = checkpoints.load_config(folder)
    flat = json.loads(json.dumps(kind.of(saved, folder).flat()))
    assert all(flat[name] == saved[name] for name in flat.keys() & saved.keys())
    assert json.loads(json.dumps(kind.of(flat, folder).flat())) == flat
