"""Kernels keep what grows with V, rows or queries off the stack, which is small in threads."""

from __future__ import annotations

import os
from textwrap import dedent

import pytest
from helpers.processes import python

from lanternpp.kernels import loading as native

pytestmark = pytest.mark.skipif(native.library() is None, reason="no kernels here")

KERNELS = """
    import threading
    import torch
    from lanternpp.nn.backend import backend
    from lanternpp.kernels import loading as native
    from lanternpp.nn.decoder import Decoder, DecoderConfig
    from lanternpp.drafters.parallel import ParallelConfig, ParallelDrafter
    from lanternpp.kernels.decoder import KernelDecoder
    from lanternpp.kernels.drafter import KernelDrafter
    from lanternpp.kernels.linear import KernelLinear
    from lanternpp.nn.decoder import grid_table
    from lanternpp.trees.chain import chain_tree
    from lanternpp.types import Draft, NeighbourBudget, Nodes

    def rows_of_codes(vocab, table):
        sampling, warp = backend(), (0.9, 100, 0.95)
        logits = torch.randn(1, 3, vocab)
        p = sampling.probs(logits, warp)
        assert torch.allclose(p.sum(-1), torch.ones(1, 3)) and ((p > 0).sum(-1) <= 100).all()
        u = torch.rand(1, 3, 40_000, dtype=torch.float64)
        assert (p.gather(-1, sampling.children(p, u, 8)) > 0).all()
        assert torch.equal(sampling.children(p, None, 8), p.topk(8).indices)
        q = logits.softmax(-1)
        draft = Draft(chain_tree(1, 2, torch.device("cpu")), torch.zeros(1, 3, dtype=torch.int64), q)
        for walk in (True, False):
            budget = NeighbourBudget(table, ((0.1, 0.0), (0.1, 0.0), (0.1, 0.0)), True)
            chances = torch.full((1, 2, 1) if walk else (1, 1), 0.5).double()
            verdict = sampling.verify(draft, logits, warp, budget, chances, torch.full((1, 1), 0.5).double())
            assert 1 <= verdict.kept <= 3 and 0 <= verdict.bonus < vocab
        drafter = ParallelDrafter(ParallelConfig(DecoderConfig(32, 1, 1, 32), 2, 16), grid_table(1, 4, 32).float())
        head = KernelLinear(native.library(), [(torch.randn(vocab, 32).bfloat16(), None)])
        chain = KernelDrafter(drafter.bfloat16(), head, native.library())
        inputs = {"features": torch.randn(1, 2, 32).bfloat16(), "query": torch.randn(1, 2, 16).bfloat16()}
        inputs |= {"prev": torch.randn(vocab, 16).bfloat16(), "bias": None, "u": torch.rand(1, 2).double()}
        assert chain.sample(draft, warp, **inputs)
        assert (draft.probs.gather(-1, draft.codes[:, 1:, None].expand(-1, -1, 1)) > 0).all()

    def passes(rows, nodes):
        config = DecoderConfig(64, 1, 2, 96)
        made = Decoder(config, grid_table(1, 4, config.head_dim).float()).bfloat16().requires_grad_(False)
        slot = torch.arange(nodes).expand(rows, -1)
        mask = torch.ones(nodes, nodes, dtype=torch.bool).tril().expand(rows, 1, -1, -1)
        kv = torch.zeros(1, 2, rows, 2, nodes, 32).bfloat16()
        passes = KernelDecoder(made.stack(), made.rotary_table, native.library(), False)
        x = torch.randn(rows, nodes, 64).bfloat16()
        assert passes(x, Nodes(slot.clamp(max=3), slot, mask), kv).isfinite().all()

    def all_kernels():
        with torch.inference_mode():
            rows_of_codes(300_000, torch.randint(300_000, (300_000, 3), dtype=torch.int32))
            passes(1, 300)
            passes(20_000, 1)
        print("all", end="")

    torch.manual_seed(0)
    torch.set_num_threads(2)
    native.library()
    threading.stack_size(256 * 1024)
    thread = threading.Thread(target=all_kernels)
    thread.start()
    thread.join()
"""


def test_kernels_run_in_threads_of_256_kb() -> None:
    """Those of OpenMP too; 300,000 codes, passes of 300 nodes and of 20,000 rows."""
    run = python("-c", dedent(KERNELS), env=os.environ | {"OMP_STACKSIZE": "256k"})
    assert (run.returncode, run.stdout) == (0, "all"), run.stderr
