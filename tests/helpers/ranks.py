"""Processes that draw together, each with its share of tiny models, and write a file of the results each."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2ForCausalLM
from transformers.distributed import DistributedConfig

import lanternpp
from helpers.processes import SECONDS
from helpers.refusals import rejects
from lanternpp import Pipeline


def drawn(pipe: Pipeline) -> dict[str, Any]:
    """Codes of a guided batch, passes and a sum of the pixels: by the parallel drafter, for the layers that a family divides, and of
    SimpleAR by other methods too."""
    found = {}
    for method in ("parallel", *(("eagle", "lantern-jacobi") if pipe.name == "simplear" else ())):
        dials = {"neighbours": 8} if method == "lantern-jacobi" else {}
        result = pipe(
            ["a red tulip", "the red sea"], method=method, cfg=2.0, temperature=1.0, seed=3, **dials
        )
        pixels = sum(map(sum, (image.tobytes() for image in result.images)))
        found[method] = [result.codes.tolist(), result.stats.passes, pixels]
    return found


def in_place(folder: Path, rank: int, arguments: dict[str, Any]) -> list[list[int]]:
    """Tokens that a model of the user's draws, whose processes have other states of torch's generator."""
    config = DistributedConfig(tp_plan="auto")
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float64, distributed_config=config)
    lanternpp.accelerate(model)
    torch.manual_seed(rank)
    prompts = torch.tensor([[2, 6, 7, 3], [2, 8, 9, 3]])
    codes: list[list[int]] = model.generate(prompts, **arguments).tolist()
    return codes


def draw_together(place: Path, env: dict[str, str]) -> None:
    """`drawn`: folders of models that are divided; `refused`: of those that cannot be; `simplear`: one for `in_place`."""
    signal.alarm(SECONDS)  # ends a process that waits for one that has failed
    os.environ |= env
    torch.set_num_threads(1)
    rank = int(env["RANK"])

    def opened(folder: Path) -> Pipeline:
        return Pipeline.from_pretrained(folder, device="cpu", dtype="float64", tensor_parallel=True)

    results: dict[str, Any] = {path.name: drawn(opened(path)) for path in (place / "drawn").iterdir()}
    results |= {path.name: rejects(".", opened, path) for path in (place / "refused").iterdir()}
    asked = {"generation_mode": "image", "do_sample": True, "guidance_scale": 2.0}
    results["in place"] = in_place(place / "drawn" / "simplear", rank, asked)
    (place / f"{rank}.json").write_text(json.dumps(results))
    # otherwise a thread of gloo may abort the process while the interpreter ends
    torch.distributed.destroy_process_group()
