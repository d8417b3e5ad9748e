"""Memory that grows with V, rows or queries is not on the stack, which is small in threads."""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import dedent

import pytest
from helpers.processes import python

from lanternpp.kernels import loading as native

pytestmark = pytest.mark.skipif(native.library() is None, reason="no kernels here")

KERNELS = """
    import threading
    import torch
    from kernels.drafting import Turn, drafted
    from lanternpp.engine.sampling import Sampling
    from lanternpp.kernels import loading as native
    from lanternpp.kernels.packing import KernelDecoder
    from lanternpp.nn.backend import backend
    from lanternpp.nn.decoder import Decoder, DecoderConfig, grid_table
    from lanternpp.trees.static import StaticTree, chain
    from lanternpp.types import NeighbourBudget, Nodes

    def rows_of_codes(vocab, table):
        sampling, warp = backend(), (0.9, 100, 0.95)
        draft, logits = drafted(StaticTree(chain(2)), 1, vocab)
        p = sampling.probs(logits, warp)
        assert ((p > 0).sum(-1) <= 100).all()
        for u in (torch.rand(1, 3, 40_000, dtype=torch.float64), None):
            assert (p.gather(-1, sampling.children(p, u, 8)) > 0).all()
        budget = NeighbourBudget(table, ((0.1, 0.0), (0.1, 0.0), (0.1, 0.0)), True)
        for u in (torch.full((1, 2, 1), 0.5).double(), torch.full((1, 1), 0.5).double()):
            sampling.verify(draft, logits, warp, budget, u, torch.full((1, 1), 0.5).double())
        Turn(vocab, 1, dim=32, hidden=16, levels=2).drawn(native.library(), Sampling(*warp))

    def passes(rows, nodes):
        config = DecoderConfig(64, 1, 2, 96)
        made = Decoder(config, grid_table(1, 4, config.head_dim).float()).bfloat16().requires_grad_(False)
        slot = torch.arange(nodes).expand(rows, -1)
        mask = torch.ones(nodes, nodes, dtype=torch.bool).tril().expand(rows, 1, -1, -1)
        kv = torch.zeros(1, 2, rows, 2, nodes, 32).bfloat16()
        passes = KernelDecoder(made.stack(), made.rotary_table, native.library(), "bfloat16")
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
    places = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, places))
    run = python("-c", dedent(KERNELS), env=os.environ | {"OMP_STACKSIZE": "256k", "PYTHONPATH": path})
    assert (run.returncode, run.stdout) == (0, "all"), run.stderr
