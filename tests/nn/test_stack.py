"""A decoder's `Stack` computes what the decoder computes, whatever its layers have."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.families import lively
from helpers.stacks import StackPasses

from lanternpp.engine.cache import Cache
from lanternpp.nn.decoder import Decoder, DecoderConfig, grid_table

OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "grouped queries": {"kv_heads": 2},
    "wide heads": {"head_dim": 100, "kv_heads": 1},
    "norms of queries and keys": {"qk_norm": True, "kv_heads": 2},
    "a drafter": {"first_norm": False, "final_norm": False},
    "another epsilon": {"norm_eps": 0.1},
}


@pytest.mark.parametrize("name", OPTIONS)
@torch.inference_mode()
def test_a_stack_computes_what_its_decoder_computes(name: str) -> None:
    torch.manual_seed(0)
    config = DecoderConfig(64, 3, 4, 96, **OPTIONS[name])  # type: ignore[arg-type]
    plain = Decoder(config, grid_table(3, 8, config.head_dim)).double().eval().requires_grad_(False)
    lively(plain)
    plain.double()
    passes = copy.copy(plain)
    reference = passes.native = StackPasses(plain.stack(), plain.rotary_table)
    x, found = torch.randn(2, 16, 64).double(), []
    for network in (plain, passes):
        cache = Cache(config, 2, 16, x)
        prompt = cache.rows(torch.arange(2), torch.tensor([0, 1]), 4)
        out = [network(x[:, :4], prompt.nodes(), prompt, (0, 1))]
        for _ in range(3):
            depth, mask = (
                torch.arange(4).expand(2, -1),
                torch.ones(4, 4, dtype=torch.bool).tril().expand(2, -1, -1),
            )
            out.append(network(x[:, 4:8], cache.nodes(depth, mask), cache, (0, 1)))
            cache.used += 4
        found.append(torch.cat(out, 1))
    assert reference.passes == 4 and found[0].abs().max() > 1
    assert (found[0] - found[1]).abs().max() < 1e-12
