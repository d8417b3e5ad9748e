"""Kernels keep what grows with V, rows or queries off the stack, which is small in threads."""

from __future__ import annotations

import os
import subprocess
import sys
from textwrap import dedent

import pytest

from lanternpp.kernels import loading as native

pytestmark = pytest.mark.skipif(native.library() is None, reason="no kernels here")

KERNELS = """
    import threading
    import torch
    from lanternpp.nn.backend import backend
    from lanternpp.kernels import loading as native
    from lanternpp.nn.decoder import Decoder, DecoderConfig
    from lanternpp.kernels.chain import native_chain
    from lanternpp.kernels.decoder import KernelDecoder
    from lanternpp.nn.rope import grid_table
    from lanternpp.trees.chain import chain_tree
    from lanternpp.types import Draft, NeighbourBudget, Nodes

    def rows_of_codes(vocab, table):
        sampling, verifier, warp = backend(), backend().verifier(), (0.9, 100, 0.95)
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
            verdict, _ = verifier(draft, logits, warp, budget, walk, chances, torch.full((1, 1), 0.5).double())
            assert 1 <= verdict.kept <= 3 and 0 <= verdict.bonus < vocab
        up, head = (torch.randn(32, 16).bfloat16(), None), (torch.randn(vocab, 32).bfloat16(), None)
        inputs = torch.randn(1, 2, 32).bfloat16(), torch.randn(1, 2, 16).bfloat16()
        native_chain(up, head)(
            *inputs, torch.randn(vocab, 16).bfloat16(), None, torch.rand(1, 2).double(), warp, draft
        )
        assert (draft.probs.gather(-1, draft.codes[:, 1:, None].expand(-1, -1, 1)) > 0).all()

    def passes(rows, nodes):
        config = DecoderConfig(64, 1, 2, 96)
        made = Decoder(config, grid_table(1, 4, config.head_dim).float()).bfloat16().requires_grad_(False)
        slot = torch.arange(nodes).expand(rows, -1)
        mask = torch.ones(nodes, nodes, dtype=torch.bool).tril().expand(rows, 1, -1, -1)
        kv = torch.zeros(1, 2, rows, 2, nodes, 32).bfloat16()
        passes = KernelDecoder(made.stack(), made.rotary_table, native.library(), False)
        x = torch.randn(rows, nodes, 64).bfloat16()
        assert passes.takes(x)
        assert passes(x, Nodes(slot.clamp(max=3), slot, mask), kv).isfinite().all()

    def all_kernels():
        with torch.inference_mode():
            for vocab in (300_000, 1_048_576):
                rows_of_codes(vocab, torch.randint(vocab, (vocab, 3), dtype=torch.int32))
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
    """Those of OpenMP too; 300,000 and a million codes, passes of 300 nodes and of 20,000 rows."""
    run = subprocess.run(
        [sys.executable, "-c", dedent(KERNELS)],
        env=os.environ | {"OMP_STACKSIZE": "256k"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (run.returncode, run.stdout) == (0, "all"), run.stderr
