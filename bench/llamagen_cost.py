"""Cost of a drafted step on LlamaGen at full size, as a multiple of a plain step; with random weights.

    python bench/llamagen_cost.py [--size XL] [--stage 1] [--tree lantern-57] [--dtype int8] [--accepted 5.2] [--runs 12] [--cfg 7.5]

A tree named chain-N is drafted by a parallel drafter, other trees by EAGLE's. LANTERNPP_KERNELS=0 takes PyTorch's operations. Stage 1
draws 256 codes and stage 2 draws 1,024, after a text of 120 slots. The script prints medians of interleaved steps of the engine at
an eighth, a half and seven eighths of the picture, and the milliseconds of verification in them.

The cost of a drafted step grows with the number of accepted codes, and random weights accept none, so two kinds of drafted steps are
timed: "nothing accepted", and "all accepted" with a head of zeros, where drafter and target agree. (If the drafter runs in C, top-k keeps
1,000 of equally probable codes, which are other codes in the drafter than in the target, and none is accepted.) Seconds per picture
follow from the mean of both kinds and from --accepted, the codes per step with a trained drafter.
"""

from __future__ import annotations

import argparse
import resource
import statistics
from collections import defaultdict

import torch
from random_model import SIZES
from torch import Tensor

from lanternpp.accept.neighbours import LanternPlusPlus
from lanternpp.drafters.eagle import EagleConfig, EagleDrafter
from lanternpp.drafters.parallel import ParallelConfig, ParallelDrafter
from lanternpp.engine.decode import Engine
from lanternpp.engine.observers import TimedEngine
from lanternpp.engine.proposer import Proposer
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.models.llamagen import LlamaGenConfig, LlamaGenTarget
from lanternpp.nn.backend import backend
from lanternpp.nn.decoder import DecoderConfig
from lanternpp.nn.sources import blank
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.proposers.parallel import Parallel
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees import build_tree
from lanternpp.types import Prompt
from lanternpp.util.devices import pick_device, pick_dtype

SLOTS, TEXT_SLOTS, WARM_UP_STEPS = 120, 20, 3


class RandomTarget(LlamaGenTarget):
    """A target with random weights and, in place of an encoded text, random features in `TEXT_SLOTS` slots."""

    def prompt(self, conditions: object, branches: int) -> Prompt:
        """Return random embeddings [branches, SLOTS, D], padded on the left."""
        weight = self.codes_in.weight
        embeds = torch.randn(branches, SLOTS, weight.shape[1], device=weight.device).to(weight)
        return Prompt(embeds, torch.full((branches,), SLOTS - TEXT_SLOTS, device=weight.device))

    def draw_weights(self, device: torch.device, dtype: torch.dtype, stored: str) -> None:
        """Draw weights with the standard deviation of trained ones, and pack them for the kernels."""
        self.decoder.rotary_table = self.decoder.rotary_table.to(device)
        for module in self.modules():
            for name, weight in module.named_parameters(recurse=False):
                values = torch.empty(weight.shape, dtype=dtype, device=device)
                values = values.fill_(1) if weight.dim() == 1 else values.normal_(0, 0.02)
                module.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))
        backend().pack(self.eval(), "bfloat16" if stored == "auto" else stored)


class Case(TimedEngine):
    """A timed engine under LANTERN++ with one sample, the seconds of its steps by place in the picture, and their decided codes."""

    def __init__(self, name: str, target: LlamaGenTarget, proposer: Proposer, cfg: float):
        rule = LanternPlusPlus(random_neighbours(target.vocab, target.codes_in.weight.device), 2.0)
        super().__init__(Engine(target, proposer, rule, Sampling(top_k=1000), Guidance(cfg), 1))
        self.name, self.seconds, self.num_codes = name, defaultdict[float, list[float]](list), list[float]()
        self.verify_seconds: list[float] = []
        self.admit([""], [0])

    def step_at(self, place: float, record: bool) -> None:
        """Run a step with the share `place` of the picture decided; record its seconds and codes if asked to."""
        engine = self.engine
        decided = int(place * engine.target.length)
        engine.count.fill_(decided)
        engine.passes.fill_(1)
        for cache in (engine.cache, getattr(engine.proposer, "cache", engine.cache)):
            cache.used.fill_(SLOTS + decided - 1)
        seconds = self.step()
        if record:
            self.seconds[place].append(sum(seconds.values()))
            self.verify_seconds.append(seconds["verify"])
            self.num_codes.append(float(engine.count[0]) - decided)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="XL")
    parser.add_argument("--stage", type=int, choices=(1, 2), default=1)
    parser.add_argument("--tree", default="lantern-57")
    parser.add_argument("--dtype", choices=("auto", "int8", "int4"), default="auto")
    parser.add_argument("--accepted", type=float, default=5.2)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--cfg", type=float, default=7.5)
    options = parser.parse_args()
    device = pick_device()
    dtype = pick_dtype("auto", device)
    torch.manual_seed(0)
    dim, layers, heads, hidden, *_ = SIZES[options.size]
    grid = 16 * options.stage
    config = LlamaGenConfig(dim, layers, heads, hidden, grid=grid, caption_dim=2048, slots=SLOTS)
    with blank():
        target = RandomTarget(config)
    target.draw_weights(device, dtype, options.dtype)
    cases = [Case("plain step", target, NoDraft(), options.cfg)]
    for name, drafted in (("nothing accepted", target), ("all accepted", with_flat_head(target))):
        cases.append(Case(name, drafted, build_proposer(drafted, options.tree), options.cfg))
    places = (1 / 8, 1 / 2, 7 / 8)
    for run in range(WARM_UP_STEPS + options.runs):
        for place in places:
            for case in cases:
                case.step_at(place, run >= WARM_UP_STEPS)
    threads = torch.get_num_threads()
    print(
        f"LlamaGen-{options.size}, stage {options.stage}: {target.length} codes, cfg {options.cfg}, {options.tree}"
    )
    weights = dtype if options.dtype == "auto" else options.dtype
    print(
        f"{device}, {weights}, kernels {backend().name}, {threads} threads, torch {torch.__version__}, medians of {options.runs} steps"
    )
    for place in places:
        plain = statistics.median(cases[0].seconds[place])
        for case in cases:
            seconds = statistics.median(case.seconds[place])
            verify = statistics.median(case.verify_seconds)
            print(
                f"{place:5.3f} of the picture, {case.name:17} {1e3 * seconds:8.1f} ms = {seconds / plain:4.2f} plain steps, "
                f"verification {1e3 * verify:.1f} ms, {statistics.mean(case.num_codes):.1f} codes"
            )
    plain, *drafted_steps = (statistics.mean(map(statistics.median, case.seconds.values())) for case in cases)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    drafted = target.length / options.accepted * statistics.mean(drafted_steps)
    print(
        f"seconds per picture: {target.length * plain:.2f} plain, {drafted:.2f} with {options.accepted} codes per step;",
        end=" ",
    )
    print(f"peak memory {memory:.1f} GB")


def with_flat_head(target: RandomTarget) -> RandomTarget:
    """Return a target with the same layers and a head of zeros, under which every code is equally probable."""
    embedding = target.codes_in.weight
    with blank():
        flat = RandomTarget(target.config)
    flat.decoder, flat.codes_in, flat.condition = target.decoder, target.codes_in, target.condition
    zeros = torch.zeros(flat.codes_out.weight.shape, dtype=embedding.dtype, device=embedding.device)
    flat.codes_out.weight = torch.nn.Parameter(zeros, requires_grad=False)
    flat.eval()
    backend().pack(flat)
    return flat


def build_proposer(target: LlamaGenTarget, tree: str) -> TreeProposer | Parallel:
    """Build a proposer with a random drafter of one layer in the shape of the target's layers."""
    config, embedding, table = target.config, target.codes_in.weight, target.decoder.rotary_table
    layer = DecoderConfig(config.dim, 1, config.heads, config.hidden)
    builder = build_tree(tree)
    drafter: ParallelDrafter | EagleDrafter
    if builder.chain:
        drafter = ParallelDrafter(ParallelConfig.like(layer, queries=builder.depth - 1), table)
    else:
        drafter = EagleDrafter(EagleConfig.like(layer), table)
    drafter.requires_grad_(False).eval().to(embedding.device, embedding.dtype).pack(target)
    return (Parallel if builder.chain else TreeProposer)(drafter, builder)


def random_neighbours(vocab: int, device: torch.device) -> Tensor:
    """Return a table of 1,000 random neighbours per code, [V, 1000]."""
    rows = torch.stack([torch.randperm(vocab)[:1000] for _ in range(64)])
    return rows.repeat(vocab // 64, 1).int().to(device)


if __name__ == "__main__":
    main()
