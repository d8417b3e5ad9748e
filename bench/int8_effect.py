"""What weights in 8 bits do to a model: its logits, its probabilities, its memory and its time.

    python bench/int8_effect.py [--model nature-128] [--prompt TEXT] [-n 4] [--runs 5] [--method lantern++]

Draws n pictures by plain decoding in float32, then asks every storage for the guided logits of those very codes,
at temperature 1. Times are medians of pictures drawn in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor

from lanternpp import Pipeline
from lanternpp.engine.sampling import Guidance
from lanternpp.models.base import Target
from lanternpp.nn.int8 import compared, quantise, weight_bytes


@torch.inference_mode()
def logits(target: Target, prompt: str, codes: Tensor, cfg: float) -> Tensor:
    """Guided logits of every code, [n, length, V] in float32."""
    rows = []
    for one in codes.split(1):
        branches = []
        for condition in (prompt, None)[: 2 if cfg != 1 else 1]:
            embeds = target.prompt([condition], 1).embeds
            branches.append(target.head(target.forward_sequence(embeds, one)).float())
        rows.append(Guidance(cfg).merge(torch.cat(branches)))
    return torch.cat(rows)


def seconds(pipe: Pipeline, prompt: str, method: str, seed: int) -> float:
    """Of one picture."""
    began = time.perf_counter()
    pipe(prompt, method=method, seed=seed)
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="nature-128")
    parser.add_argument("--prompt", default="a photo of a red tulip")
    parser.add_argument("-n", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--method", default="lantern++")
    options = parser.parse_args()
    exact = Pipeline.from_pretrained(options.model, dtype="float32")
    drawn = exact(options.prompt, n=options.n, method="ar")
    cfg = drawn.stats.settings["cfg"]
    truth = logits(exact.target, options.prompt, drawn.codes, cfg)
    plain = Pipeline.from_pretrained(options.model)
    small = Pipeline.from_pretrained(options.model, dtype="int8")
    layers = Pipeline.from_pretrained(options.model, dtype="float32")
    quantise(layers.target.decoder)
    print(
        f"{options.model}, {options.n} pictures, cfg {cfg}, against float32; layers hold {weight_bytes(exact.target.decoder)} bytes in float32"
    )
    for name, pipe in (
        (plain.dtype, plain),
        ("int8, float32", layers),
        (small.dtype, small),
    ):
        effect = compared(truth, logits(pipe.target, options.prompt, drawn.codes, cfg), (0, 0))
        print(
            f"{name:30} logits: max {effect.max_logit_difference:.3f}, mean {effect.mean_logit_difference:.4f}; "
            f"total variation {effect.total_variation:.4f}"
        )
    if small.model.effect:
        print(f"as `--dtype int8` tells: {small.model.effect}")
    for method in ("ar", options.method):
        taken: dict[str, list[float]] = {plain.dtype: [], small.dtype: []}
        for run in range(options.runs + 1):
            for pipe in (plain, small):
                took = seconds(pipe, options.prompt, method, run)
                if run:
                    taken[pipe.dtype].append(took)
        for name, found in taken.items():
            print(f"{method:10} {name:15} {statistics.median(found):.2f} s per picture")


if __name__ == "__main__":
    main()
