"""What a draft-and-verify cycle costs on LlamaGen at full size, as a multiple of a plain step. Random weights.

    python bench/llamagen_cost.py [--size XL] [--stage 1] [--tree lantern-57] [--dtype int8] [--kept 5.2] [--runs 12] [--cfg 7.5]

A tree named chain-N is drafted by a parallel drafter, others by EAGLE's. LANTERNPP_KERNELS=0 gives PyTorch's plain steps. Stage 1 draws 256 codes and stage 2 draws 1,024, of a text of 120 slots. Prints medians of interleaved steps, at
an eighth, a half and seven eighths of the picture, in a loop that is the one of `generate`. A cycle costs more
the further its walk goes, and random weights agree on nothing, so there are two of them: one whose walk ends
at the root, and one with a head of zeros, where drafter and target agree and every level is kept (where a drafter in C takes
the 1,000 most probable of equal codes, others than the target's are left, and none is kept). Seconds a picture follow from both
cycles' mean and from --kept, the codes that a trained drafter's cycle keeps.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from lanternpp.accept.neighbours import LanternPlusPlus
from lanternpp.drafters.eagle import EagleConfig, EagleDrafter
from lanternpp.drafters.parallel import ParallelConfig, ParallelDrafter
from lanternpp.engine.decode import Engine
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

SIZES = {"B": (768, 12, 12, 2048), "L": (1024, 24, 16, 2816), "XL": (1280, 36, 20, 3584)}
SLOTS, WORDS, WARM = 120, 20, 3


class Bare(LlamaGenTarget):
    """A target whose text was encoded elsewhere: random features of twenty words."""

    def prompt(self, conditions: object, branches: int) -> Prompt:
        """Random slots, padded on the left."""
        like = self.codes_in.weight
        embeds = torch.randn(branches, SLOTS, like.shape[1], device=like.device).to(like)
        return Prompt(embeds, torch.full((branches,), SLOTS - WORDS, device=like.device))

    def draw_weights(self, device: torch.device, dtype: torch.dtype, int8: bool) -> None:
        """Random weights of the size that trained ones have."""
        self.decoder.rotary_table = self.decoder.rotary_table.to(device)
        for module in self.modules():
            for name, weight in module.named_parameters(recurse=False):
                made = torch.empty(weight.shape, dtype=dtype, device=device)
                made = made.fill_(1) if weight.dim() == 1 else made.normal_(0, 0.02)
                module.register_parameter(name, torch.nn.Parameter(made, requires_grad=False))
        backend().pack(self.eval(), int8)


@dataclass
class Case:
    """An engine and the seconds its steps took at each place of the picture."""

    name: str
    engine: Engine
    seconds: dict[float, list[float]]
    kept: list[float]

    def step(self, place: float, counted: bool) -> None:
        """One step with that much of the picture decided."""
        engine = self.engine
        decided = int(place * engine.target.length)
        engine.count.fill_(decided)
        engine.passes.fill_(1)
        engine.cache.used.fill_(SLOTS + decided - 1)
        if isinstance(engine.proposer, TreeProposer | Parallel):
            engine.proposer.cache.used.fill_(SLOTS + decided - 1)
        began = now()
        engine.step()
        if counted:
            self.seconds.setdefault(place, []).append(now() - began)
            self.kept.append(float(engine.count[0]) - decided)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="XL")
    parser.add_argument("--stage", type=int, choices=(1, 2), default=1)
    parser.add_argument("--tree", default="lantern-57")
    parser.add_argument("--dtype", choices=("auto", "int8"), default="auto")
    parser.add_argument("--kept", type=float, default=5.2)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--cfg", type=float, default=7.5)
    options = parser.parse_args()
    device = pick_device()
    dtype = pick_dtype("auto", device)
    torch.manual_seed(0)
    dim, layers, heads, hidden = SIZES[options.size]
    grid = 16 * options.stage
    config = LlamaGenConfig(dim, layers, heads, hidden, grid=grid, caption_dim=2048, slots=SLOTS)
    with blank():
        target = Bare(config)
    target.draw_weights(device, dtype, options.dtype == "int8")
    cases = [case("plain step", target, NoDraft(), options.cfg)]
    cases.append(case("cycle, nothing kept", target, drafting(target, options.tree), options.cfg))
    flat = share(target)
    cases.append(case("cycle, all kept", flat, drafting(flat, options.tree), options.cfg))
    places = (1 / 8, 1 / 2, 7 / 8)
    for run in range(WARM + options.runs):
        for place in places:
            for one in cases:
                one.step(place, run >= WARM)
    threads = torch.get_num_threads()
    print(
        f"LlamaGen-{options.size}, stage {options.stage}: {target.length} codes, cfg {options.cfg}, {options.tree}"
    )
    kind = "int8" if options.dtype == "int8" else dtype
    print(
        f"{device}, {kind}, kernels {backend().name}, {threads} threads, torch {torch.__version__}, medians of {options.runs} steps"
    )
    for place in places:
        plain = statistics.median(cases[0].seconds[place])
        for one in cases:
            t = statistics.median(one.seconds[place])
            kept = statistics.mean(one.kept)
            print(
                f"{place:5.3f} of the picture, {one.name:20} {1e3 * t:8.1f} ms = {t / plain:4.2f} plain steps, "
                f"{kept:.1f} codes kept"
            )
    plain, *cycles = (statistics.mean(map(statistics.median, one.seconds.values())) for one in cases)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    drafted = target.length / options.kept * statistics.mean(cycles)
    print(
        f"seconds a picture: {target.length * plain:.2f} plain, {drafted:.2f} with {options.kept} codes a cycle;",
        end=" ",
    )
    print(f"peak memory {memory:.1f} GB")


def share(target: Bare) -> Bare:
    """The same network under a head of zeros: every code is equally probable."""
    like = target.codes_in.weight
    with blank():
        flat = Bare(target.config)
    flat.decoder, flat.codes_in, flat.condition = target.decoder, target.codes_in, target.condition
    zeros = torch.zeros(flat.codes_out.weight.shape, dtype=like.dtype, device=like.device)
    flat.codes_out.weight = torch.nn.Parameter(zeros, requires_grad=False)
    flat.eval()
    backend().pack(flat)
    return flat


def drafting(target: LlamaGenTarget, tree: str) -> TreeProposer | Parallel:
    """A random drafter of the target's width, with a layer as the target's."""
    shape, like, table = target.config, target.codes_in.weight, target.decoder.rotary_table
    layer, builder = DecoderConfig(shape.dim, 1, shape.heads, shape.hidden), build_tree(tree)
    drafter: ParallelDrafter | EagleDrafter
    if builder.chain:
        drafter = ParallelDrafter(ParallelConfig.like(layer, queries=builder.depth - 1), table)
    else:
        drafter = EagleDrafter(EagleConfig.like(layer), table)
    drafter.requires_grad_(False).eval().to(like.device, like.dtype).pack(target)
    return (Parallel if builder.chain else TreeProposer)(drafter, builder)


def case(name: str, target: LlamaGenTarget, proposer: Proposer, cfg: float) -> Case:
    """An engine with one sample in it."""
    rule = LanternPlusPlus(lookalikes(target.vocab, target.codes_in.weight.device), 2.0)
    engine = Engine(target, proposer, rule, Sampling(top_k=1000), Guidance(cfg), 1)
    engine.admit(0, "", 0)
    return Case(name, engine, {}, [])


def lookalikes(vocab: int, device: torch.device) -> Tensor:
    """A table of 1,000 neighbours a code; which ones does not change what they cost."""
    return (
        torch.stack([torch.randperm(vocab)[:1000] for _ in range(64)]).repeat(vocab // 64, 1).int().to(device)
    )


def now() -> float:
    """Seconds, with the device's work done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
