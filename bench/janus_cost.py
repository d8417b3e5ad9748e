"""Seconds per picture and peak memory of Janus-Pro-1B, opened in transformers, on a CPU; with random weights in its shape.

    python bench/janus_cost.py [--by transformers | pytorch | bfloat16 | int8] [--codes 64] [--runs 3] [--threads 2]

transformers: its own `generate`. pytorch: `accelerate(model)`, plain decoding. bfloat16, int8: the same with `kernels=`. A run
draws --codes of the 576 codes with guidance, and seconds are scaled to 576. The embedding table and the head of text tokens have
1,000 rows, as a picture uses neither. Each variant needs a process of its own, as the peak memory is the process's.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, JanusConfig, JanusForConditionalGeneration

import lanternpp

PICTURE_CODES = 576
TEXT = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 1000,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
}
VISION = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "projection_dim": 2048}
CODEBOOK = {"num_embeddings": 16384, "embed_dim": 8, "projection_dim": 2048, "image_token_embed_dim": 2048}


def janus(codes: int) -> Any:
    """Build a Janus-Pro-1B whose pictures have `codes` codes, in bfloat16."""
    torch.manual_seed(0)
    config = JanusConfig(
        text_config=TEXT, vision_config=VISION | {"num_image_tokens": codes}, vq_config=CODEBOOK
    )
    config.dtype = torch.bfloat16
    model = JanusForConditionalGeneration._from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config = GenerationConfig(
        bos_token_id=0, pad_token_id=1, generation_kwargs={"boi_token_id": 2}
    )
    return model


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--by", choices=("transformers", "pytorch", "bfloat16", "int8"), default="transformers"
    )
    parser.add_argument("--codes", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = janus(options.codes)
    ids = torch.tensor([[0, *range(10, 28), 2]])
    inputs: dict[str, Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    generation: dict[str, Any] = {"generation_mode": "image", "do_sample": True, "guidance_scale": 5.0}
    result: dict[str, Any] = {"by": options.by}
    if options.by != "transformers":
        start = time.perf_counter()
        lanternpp.accelerate(model, method="ar", kernels=None if options.by == "pytorch" else options.by)
        result["seconds to pack"] = round(time.perf_counter() - start, 2)
        result["packed GB"] = round(model.generate.packed_bytes / 1e9, 2)
    seconds = []
    for _ in range(1 + options.runs):
        start = time.perf_counter()
        model.generate(**inputs, **generation)
        seconds.append(time.perf_counter() - start)
    seconds_per_code = statistics.median(seconds[1:]) / options.codes
    result |= {
        "ms a code": round(1e3 * seconds_per_code, 1),
        "seconds a picture": round(PICTURE_CODES * seconds_per_code, 1),
        "peak GB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
        "weights GB": round(sum(x.numel() * x.element_size() for x in model.parameters()) / 1e9, 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
