"""What verification costs beside a pass: 57 drafted nodes, V = 16,384, a 12-layer, 768-wide target, B = 1.

    python bench/verify_cost.py [--runs 40] [--cfg 7.5]

Prints medians of interleaved runs. The drafted codes are drawn from a distribution near the target's own,
so that walks have the lengths they have in use (printed beside the figures).
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

from lanternpp.accept.base import Acceptance
from lanternpp.accept.exact import Exact
from lanternpp.accept.neighbours import LanternPlusPlus
from lanternpp.engine.cache import Cache
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.engine.verify.choose import with_native
from lanternpp.engine.verify.tokenwise import verify_tokenwise
from lanternpp.nn.backend import backend
from lanternpp.nn.decoder import Decoder, DecoderConfig, grid_table
from lanternpp.trees.static import SHAPES, StaticTree
from lanternpp.types import Draft, Frontier
from lanternpp.util.devices import pick_device, pick_dtype

VOCAB, DIM, PREFIX, GRID = 16384, 768, 120, 16


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--cfg", type=float, default=7.5)
    options = parser.parse_args()
    device = pick_device()
    dtype = pick_dtype("auto", device)
    torch.manual_seed(0)
    shape = DecoderConfig(DIM, layers=12, heads=12, hidden=2048)
    decoder = Decoder(shape, grid_table(PREFIX, GRID, shape.head_dim).float()).to(device, dtype).eval()
    head = nn.Sequential(nn.Linear(DIM, VOCAB, bias=False)).to(device, dtype)
    backend().pack(decoder.requires_grad_(False))
    backend().pack(head.requires_grad_(False))
    guidance, sampling = Guidance(options.cfg), Sampling(top_k=1000, backend=backend())
    tree = StaticTree(SHAPES["lantern-57"])
    cache = Cache(
        shape, guidance.branches, PREFIX + GRID * GRID + tree.size, torch.empty(0, device=device, dtype=dtype)
    )
    cache.used += PREFIX + GRID * GRID // 2
    table = (
        torch.stack([torch.randperm(VOCAB)[:1000] for _ in range(64)]).repeat(VOCAB // 64, 1).int().to(device)
    )
    rules: dict[str, Acceptance] = {"exact": Exact(), "lantern++ (1000, 2)": LanternPlusPlus(table, 2.0)}
    seconds: dict[str, list[float]] = {name: [] for name in ("pass", *rules)}
    kept: dict[str, list[int]] = {name: [] for name in rules}
    walk = with_native(verify_tokenwise, backend())
    with torch.inference_mode():
        for run in range(options.runs + 5):
            noise = Noise(torch.tensor([run], device=device), torch.tensor([1], device=device))
            draft, logits = make(tree, sampling, noise)
            x = torch.randn(guidance.branches, tree.size, DIM, device=device).to(dtype)
            nodes = cache.nodes(guidance.rows(draft.tree.depth), guidance.rows(draft.tree.mask))
            began = now()
            guidance.merge(head(decoder(x, nodes, cache)))
            took = {"pass": now() - began}
            for name, rule in rules.items():
                began = now()
                verdict = walk(draft, logits, sampling, rule, noise, False)
                took[name] = now() - began
                if run >= 5:
                    kept[name].append(int(verdict.kept))
            if run >= 5:
                for name, t in took.items():
                    seconds[name].append(t)
    one = statistics.median(seconds["pass"])
    print(
        f"{device}, {dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}, cfg {options.cfg}"
    )
    print(f"pass of {tree.size} nodes in {guidance.branches} rows: {1e3 * one:.2f} ms")
    for name in rules:
        t = statistics.median(seconds[name])
        mean = statistics.mean(kept[name])
        print(
            f"verify, {name}: {1e3 * t:.2f} ms = {100 * t / one:.1f} % of the pass ({mean:.2f} codes kept per pass)"
        )


def make(tree: StaticTree, sampling: Sampling, noise: Noise) -> tuple[Draft, torch.Tensor]:
    """A draft and the target's logits at its nodes: both flat over many codes, as visual models are."""
    device = noise.seed.device
    common = torch.randn(1, tree.size, VOCAB, device=device) * 2
    logits = common + 0.7 * torch.randn_like(common)
    q = sampling.probs(common)

    def extend(at: Frontier) -> torch.Tensor:
        return q.gather(1, at.node[..., None].expand(-1, -1, VOCAB))

    def children(q: torch.Tensor, count: int, level: int) -> torch.Tensor:
        return sampling.children(q, count, noise, Noise.DRAFT + level)

    return tree.grow(torch.zeros(1, dtype=torch.int64, device=device), q[:, 0], extend, children), logits


def now() -> float:
    """Seconds, with the device's work done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
