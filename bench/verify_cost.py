"""Cost of verification beside a forward pass: 57 draft codes, V = 16,384, a target of 12 layers and width 768, B = 1.

    python bench/verify_cost.py [--runs 40] [--cfg 7.5]

The script prints medians of interleaved runs. Draft codes are sampled from a distribution near the target's, so that as many are
accepted as with a trained drafter; the number is printed too.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from llamagen_cost import now, random_neighbours
from torch import nn

from lanternpp.accept.base import Acceptance
from lanternpp.accept.exact import Exact
from lanternpp.accept.neighbours import LanternPlusPlus
from lanternpp.engine.cache import Cache
from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.engine.verify.tokenwise import verify_tokenwise
from lanternpp.nn.backend import backend
from lanternpp.nn.decoder import Decoder, DecoderConfig, grid_table
from lanternpp.trees.static import SHAPES, StaticTree
from lanternpp.types import Draft, Frontier
from lanternpp.util.devices import pick_device, pick_dtype

VOCAB, DIM, PREFIX, GRID, WARM_UP_RUNS = 16384, 768, 120, 16, 5


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--cfg", type=float, default=7.5)
    options = parser.parse_args()
    device = pick_device()
    dtype = pick_dtype("auto", device)
    torch.manual_seed(0)
    config = DecoderConfig(DIM, layers=12, heads=12, hidden=2048)
    decoder = Decoder(config, grid_table(PREFIX, GRID, config.head_dim).float()).to(device, dtype).eval()
    head = nn.Sequential(nn.Linear(DIM, VOCAB, bias=False)).to(device, dtype)
    backend().pack(decoder.requires_grad_(False))
    backend().pack(head.requires_grad_(False))
    guidance, sampling = Guidance(options.cfg), Sampling(top_k=1000, backend=backend())
    tree = StaticTree(SHAPES["lantern-57"])
    cache = Cache(
        config,
        guidance.branches,
        PREFIX + GRID * GRID + tree.size,
        torch.empty(0, device=device, dtype=dtype),
    )
    cache.used += PREFIX + GRID * GRID // 2
    table = random_neighbours(VOCAB, device)
    rules: dict[str, Acceptance] = {"exact": Exact(), "lantern++ (1000, 2)": LanternPlusPlus(table, 2.0)}
    seconds: dict[str, list[float]] = {name: [] for name in ("pass", *rules)}
    num_codes: dict[str, list[int]] = {name: [] for name in rules}
    with torch.inference_mode():
        for run in range(WARM_UP_RUNS + options.runs):
            noise = Noise(torch.tensor([run], device=device), torch.tensor([1], device=device))
            draft, logits = draft_and_logits(tree, sampling, noise)
            x = torch.randn(guidance.branches, tree.size, DIM, device=device).to(dtype)
            nodes = cache.nodes(guidance.rows(draft.tree.depth), guidance.rows(draft.tree.mask))
            start = now()
            guidance.merge(head(decoder(x, nodes, cache)))
            run_seconds = {"pass": now() - start}
            for name, rule in rules.items():
                start = now()
                verdict = verify_tokenwise(draft, logits, sampling, rule, noise, False)
                run_seconds[name] = now() - start
                if run >= WARM_UP_RUNS:
                    num_codes[name].append(int(verdict.kept))
            if run >= WARM_UP_RUNS:
                for name, value in run_seconds.items():
                    seconds[name].append(value)
    pass_seconds = statistics.median(seconds["pass"])
    print(
        f"{device}, {dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}, cfg {options.cfg}"
    )
    print(f"pass of {tree.size} nodes in {guidance.branches} rows: {1e3 * pass_seconds:.2f} ms")
    for name in rules:
        verify_seconds = statistics.median(seconds[name])
        share = verify_seconds / pass_seconds
        codes = statistics.mean(num_codes[name])
        print(
            f"verify, {name}: {1e3 * verify_seconds:.2f} ms = {share:.1%} of the pass; {codes:.2f} codes per pass"
        )


def draft_and_logits(tree: StaticTree, sampling: Sampling, noise: Noise) -> tuple[Draft, torch.Tensor]:
    """Return a draft and the target's logits [1, N, V] at its nodes, both flat over many codes, as visual models' are."""
    device = noise.seed.device
    common = torch.randn(1, tree.size, VOCAB, device=device) * 2
    logits = common + 0.7 * torch.randn_like(common)
    q = sampling.probs(common)

    def extend(frontier: Frontier) -> torch.Tensor:
        return q.gather(1, frontier.node[..., None].expand(-1, -1, VOCAB))

    def children(q: torch.Tensor, count: int, level: int) -> torch.Tensor:
        return sampling.children(q, count, noise, Noise.DRAFT + level)

    return tree.grow(torch.zeros(1, dtype=torch.int64, device=device), q[:, 0], extend, children), logits


if __name__ == "__main__":
    main()
