"""Seconds a picture and peak memory of Janus-Pro-1B, open in transformers, on a CPU. Random weights at its real shape.

    python bench/janus_cost.py [--by transformers | pytorch | bfloat16 | int8] [--codes 64] [--runs 3] [--threads 2]

transformers: its own `generate`. pytorch: `accelerate(model)`, plain decoding. bfloat16, int8: the same with `kernels=`. A run
draws so many codes of the 576 with guidance, and seconds are scaled to 576; the words' table and head are cut to 1,000 words,
which a picture does not use. Run one after the other, each in a process of its own, as peak memory is the process's.
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

PICTURE = 576
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
    """A Janus-Pro-1B of pictures of so many codes, in bfloat16."""
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
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--by", choices=("transformers", "pytorch", "bfloat16", "int8"), default="transformers"
    )
    parser.add_argument("--codes", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = janus(given.codes)
    ids = torch.tensor([[0, *range(10, 28), 2]])
    inputs: dict[str, Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    more: dict[str, Any] = {"generation_mode": "image", "do_sample": True, "guidance_scale": 5.0}
    found: dict[str, Any] = {"by": given.by}
    if given.by != "transformers":
        begin = time.perf_counter()
        lanternpp.accelerate(model, method="ar", kernels=None if given.by == "pytorch" else given.by)
        found["seconds to pack"] = round(time.perf_counter() - begin, 2)
        found["packed GB"] = round(model.generate.packed_bytes / 1e9, 2)
    seconds = []
    for _ in range(1 + given.runs):
        begin = time.perf_counter()
        model.generate(**inputs, **more)
        seconds.append(time.perf_counter() - begin)
    each = statistics.median(seconds[1:]) / given.codes
    found |= {
        "ms a code": round(1e3 * each, 1),
        "seconds a picture": round(PICTURE * each, 1),
        "peak GB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
        "weights GB": round(sum(x.numel() * x.element_size() for x in model.parameters()) / 1e9, 2),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
