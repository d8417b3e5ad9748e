"""What each part of the recipe of recipes/nature/target.py gives: a small target trained in several ways on the same codes.

    PYTHONPATH=recipes/nature python bench/recipe.py --data DIR --model MODEL [--out runs/recipe] [--steps 400] [--limit N] [--rows "muon;adamw 2e-3"] [--table]

MODEL holds a tokenizer. A row that is there is not trained again, and one that was stopped goes on; the table is printed from
whatever is finished. `cpu` is the processor's time of a step, in all threads, so that rows may be compared at equal cost.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from captions import vocabulary
from lanternpp.models.prompted import PromptedTarget
from lanternpp.models.vq.folder import read_vq
from lanternpp.models.words import WordsConfig
from lanternpp.nn.decoder import Decoder
from lanternpp.training.material.codes import Split, read_codes, tokenizer_of
from lanternpp.training.run import TrainingOptions, run
from weights import init_weights
from words import TargetSettings, TargetTask

FEW = 400  # training photos of the rows about crops, so that each is seen often
SLOTS = 8
SHAPE = {"dim": 192, "layers": 6, "heads": 4, "hidden": 512, "slots": SLOTS, "dropout": 0.0}
# Rate of AdamW for all matrices, settings, changes of the decoder, photos and their variants.
ROWS: dict[str, dict[str, Any]] = {
    "muon": {},
    "muon 4e-3": {"settings": {"muon_lr": 4e-3}},
    "muon 8e-3": {"settings": {"muon_lr": 8e-3}},
    "muon 16e-3": {"settings": {"muon_lr": 16e-3}},
    "adamw 1e-3": {"adamw": 1e-3},
    "adamw 2e-3": {"adamw": 2e-3},
    "adamw 4e-3": {"adamw": 4e-3},
    "muon 8e-3, qk norm": {"settings": {"muon_lr": 8e-3}, "decoder": {"qk_norm": True}},
    "few photos, 1 crop": {"settings": {"muon_lr": 8e-3}, "variants": 1},
    "few photos, 1 crop and mirrored": {"settings": {"muon_lr": 8e-3}, "variants": 2},
    "few photos, 2 crops and mirrored": {"settings": {"muon_lr": 8e-3}, "variants": 4},
}


class Variant(TargetTask):
    """A training of a target with one thing changed."""

    def __init__(self, change: dict[str, Any], *args: Any):
        self.change = change
        super().__init__(*args)
        self.settings |= {"change": change}
        if rate := change.get("adamw"):
            matrices = [p for group in self.optimizers["muon"].param_groups for p in group["params"]]
            self.optimizers["muon"] = torch.optim.AdamW(
                matrices, rate, (0.9, 0.95), weight_decay=0.1, fused=True
            )

    def make(self) -> PromptedTarget:
        model = super().make()
        if changes := self.change.get("decoder"):
            decoder = model.decoder
            model.decoder = Decoder(replace(decoder.config, **changes), decoder.rotary_table)
            init_weights(model)
        return model

    def step(self, step: int, progress: float) -> dict[str, Tensor]:
        began = time.process_time()
        losses = super().step(step, progress)
        return {**losses, "cpu": torch.tensor(time.process_time() - began)}

    def validate_on(self, index: Tensor) -> dict[str, float]:
        average, figures = self.average, super().validate_on(index)
        self.average = self.model
        figures["raw_nll"] = super().validate_on(index)["nll"]
        self.average = average
        return figures

    def sample(self, path: Path) -> None:
        """No pictures."""


def train(name: str, args: argparse.Namespace) -> None:
    """One row."""
    change = ROWS[name]
    vq = read_vq(tokenizer_of(args.model))
    codes = read_codes(args.data, args.model, 2, torch.device("cpu"), args.limit)
    if "variants" in change:
        few = codes.train
        codes = replace(
            codes,
            train=Split(few.codes[:FEW, : change["variants"]], few.texts[:FEW], few.labels[:FEW]),
        )
    config = WordsConfig(
        **{**SHAPE, **vocabulary(codes, SLOTS)},
        grid=vq.config.grid,
        vocab=vq.config.codes,
        code_dim=vq.config.dim,
        factored=True,
    )
    options = TrainingOptions(folder(args, name), steps=args.steps, checks=8)
    settings = TargetSettings(**change.get("settings", {}))
    run(Variant(change, config, settings, codes, vq, torch.device("cpu")), options)


def folder(args: argparse.Namespace, name: str) -> Path:
    """Where a row lies."""
    return args.out / name.replace(",", "").replace(" ", "-")


def table(args: argparse.Namespace) -> None:
    """Print what is finished: validation losses by step, and the processor's time of a step."""
    for name in ROWS:
        if not (folder(args, name) / "provenance.json").exists():
            continue
        lines = [json.loads(line) for line in (folder(args, name) / "log.jsonl").read_text().splitlines()]
        found = [(line["step"], line["validation"]) for line in lines if "validation" in line]
        cpu = sorted(line["cpu"] for line in lines if "cpu" in line)
        steps = ", ".join(f"{step}: {v['nll']:.3f} (raw {v['raw_nll']:.3f})" for step, v in found)
        print(f"{name:34} cpu {1000 * cpu[len(cpu) // 2]:.0f} ms  {steps}", flush=True)


def main() -> None:
    """Train what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/recipe"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--limit", type=int, help="photos of each split, as of `lanternpp train`")
    parser.add_argument("--rows", default=";".join(ROWS), help="separated by semicolons")
    parser.add_argument("--table", action="store_true", help="train nothing")
    args = parser.parse_args()
    for name in [] if args.table else args.rows.split(";"):
        if not (folder(args, name.strip()) / "provenance.json").exists():
            train(name.strip(), args)
    table(args)


if __name__ == "__main__":
    main()
