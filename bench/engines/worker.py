"""An engine with a decoder in a process of its own, which reads requests and writes answers, a line of JSON each.

    python bench/engines/worker.py ENGINE SHAPE FOLDER THREADS KIND

A pass is the decoder's layers and its head over the nodes of two branches, after FILLED slots of a KV cache. The keys and values of
the nodes are written to the slots after these.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from llama_gguf import LlamaCpp
from model import (
    BRANCHES,
    FILLED,
    MAX_NODES,
    SHAPES,
    UnavailableError,
    picture_inputs,
    read_weights,
    weights_file,
)
from openvino_graph import OpenVINO
from torch import Tensor, nn

from lanternpp.engine import cache
from lanternpp.nn.backend import backend
from lanternpp.nn.decoder import Decoder
from lanternpp.types import Nodes

GUIDANCE = 4.0  # of the guided logits whose rounding is measured
PROMPT_SLOTS = 8  # of nature-128
CHUNK = 13  # nodes of a branch in the passes whose rounding is measured


class PyTorch:
    """The package's `Decoder` by PyTorch's own operations."""

    def __init__(self, weights: Path, dtype: torch.dtype = torch.bfloat16):
        config, _ = SHAPES[weights.stem]
        tensors = read_weights(weights)
        table = tensors.pop("rotary_table").float()
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        with torch.device("meta"):
            self.decoder = Decoder(config, table)
        self.head = nn.Linear(config.dim, 1, bias=False)
        self.head.weight = nn.Parameter(tensors.pop("head"), requires_grad=False)
        self.decoder.load_state_dict(tensors, assign=True)
        self.decoder.rotary_table = table
        self.decoder.requires_grad_(False).eval()
        self.dtype = dtype
        self.cache = cache.Cache(config, BRANCHES, FILLED + MAX_NODES, torch.empty(0, dtype=dtype))
        self.cache.kv.normal_(generator=torch.Generator().manual_seed(1))
        self.nodes: dict[tuple[int, int], Nodes] = {}

    @torch.no_grad()
    def forward(self, x: Tensor, filled: int) -> Tensor:
        """Return logits [2, N, V] for x [2, N, D] in float32 after `filled` slots."""
        key = x.shape[1], filled
        if key not in self.nodes:
            self.nodes[key] = self.chain(*key)
        return self.step(x.to(self.dtype), self.nodes[key])

    def chain(self, count: int, filled: int) -> Nodes:
        """Return a chain of `count` nodes in both branches, after `filled` slots."""
        self.cache.used.fill_(filled)
        mask = torch.ones(count, count, dtype=torch.bool).tril().expand(BRANCHES, -1, -1)
        return self.cache.nodes(torch.arange(count).expand(BRANCHES, -1), mask)

    def step(self, x: Tensor, nodes: Nodes) -> Tensor:
        """Return logits [2, N, V] for x [2, N, D] in the engine's dtype."""
        return self.logits(self.decoder(x, nodes, self.cache))

    def logits(self, features: Tensor) -> Tensor:
        """Return logits [2, N, V] for features [2, N, D]."""
        logits: Tensor = self.head(features)
        return logits


class Layers:
    """A KV cache with two tensors per layer, indexed as `Cache.kv`."""

    def __init__(self, kv: Tensor):
        self.layers = [[part.clone() for part in layer] for layer in kv]

    def __getitem__(self, index: tuple[Any, ...]) -> Any:
        """Return the keys and values of a layer, or one of both, at the remaining index."""
        layer, kind, *position = index
        parts = self.layers[layer]
        return [part[..., *position] for part in parts] if kind is ... else parts[kind][tuple(position)]


class Compiled(PyTorch):
    """`PyTorch` through torch.compile, for each number of nodes, with weights as constants."""

    def __init__(self, weights: Path):
        super().__init__(weights)
        # With one tensor for all layers, the graph would copy the tensor in every layer.
        self.cache.kv = Layers(self.cache.kv)  # type: ignore[assignment]
        torch._inductor.config.freezing = True
        torch._dynamo.config.recompile_limit = 64
        self.step = torch.compile(super().step, mode="max-autotune", dynamic=False)  # type: ignore[method-assign]


class Ours(PyTorch):
    """`PyTorch` with weights packed for the package's kernels. dtype: "bfloat16", "int8" or "int4"."""

    def __init__(self, weights: Path, dtype: str):
        super().__init__(weights)
        kernels = backend()
        kernels.pack(self.decoder, dtype)
        packed = kernels.head(self.head)
        if self.decoder.native is None or packed is None:
            raise UnavailableError("our kernels do not serve this decoder, or are not installed")
        self.packed = packed

    def logits(self, features: Tensor) -> Tensor:
        """Return logits [2, N, V] for features [2, N, D]."""
        logits = self.packed(features, 1.0, 1)
        assert logits is not None
        return logits


ENGINES: dict[str, Callable[..., Any]] = {
    "float32": partial(PyTorch, dtype=torch.float32),
    "torch": PyTorch,
    "torch-compile": Compiled,
    "openvino": OpenVINO,
    "openvino-int8": partial(OpenVINO, int8=True),
    "llama.cpp": partial(LlamaCpp, kind="BF16"),
    "llama.cpp-int8": partial(LlamaCpp, kind="Q8_0"),
    "llama.cpp-int4": partial(LlamaCpp, kind="Q4_0"),
    "ours": partial(Ours, dtype="bfloat16"),
    "ours-int8": partial(Ours, dtype="int8"),
    "ours-int4": partial(Ours, dtype="int4"),
}


def time_passes(engine: Any, x: Tensor, seconds: float) -> list[float]:
    """Return the milliseconds of passes after FILLED slots; at least three passes and `seconds` in all."""
    ms: list[float] = []
    while len(ms) < 3 or sum(ms) < 1e3 * seconds:
        start = time.perf_counter()
        engine.forward(x, FILLED)
        ms.append(1e3 * (time.perf_counter() - start))
    return ms


def measure_rounding(engine: Any, folder: Path) -> dict[str, float]:
    """Return the distances of an engine's distributions from those of "float32", which runs first, over the codes of pictures.

    They are means over positions: KL divergence in nats and total variation, of the conditional branch and of guided logits.
    """
    pictures = []
    for picture in torch.load(folder / "inputs.pt"):
        chunks = []
        for filled in range(0, FILLED - CHUNK, CHUNK):
            logits = engine.forward(picture[:, filled : filled + CHUNK], filled)
            chunks.append(torch.as_tensor(logits).float().clone())
            if hasattr(engine, "store"):
                engine.store(CHUNK, filled)
        pictures.append(torch.cat(chunks, 1)[:, PROMPT_SLOTS - 1 :])
    logits = torch.stack(pictures)  # [pictures, 2, positions, V]
    reference = folder / "float32.pt"
    if getattr(engine, "dtype", None) == torch.float32:
        torch.save(logits, reference)
    exact = torch.load(reference)
    distances = {}
    for name, merge in (
        ("", lambda x: x[:, 0]),
        (" guided", lambda x: x[:, 1] + GUIDANCE * (x[:, 0] - x[:, 1])),
    ):
        p, q = merge(exact).log_softmax(-1), merge(logits).log_softmax(-1)
        distances[f"KL{name}"] = (p.exp() * (p - q)).sum(-1).mean().item()
        distances[f"TV{name}"] = (p.exp() - q.exp()).abs().sum(-1).mean().item() / 2
    return distances


def anonymous_memory() -> float:
    """Return the memory of this process in gigabytes, without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024 / 1e9


def main() -> None:
    """Answer requests until the input ends."""
    name, shape, folder_name, threads, kind = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    # Libraries that print write to stderr instead of between the answers.
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    torch.set_num_threads(int(threads))
    folder = Path(folder_name)
    weights = weights_file(shape, folder)
    config, vocab = SHAPES[shape]
    has_amx = kind in ("native", "amx")
    if not has_amx:
        cache.TILES = False
    try:
        extra = {"amx": has_amx} if name.startswith("llama.cpp") else {}
        engine = ENGINES[name](weights, **extra)
        x = {n: torch.randn(BRANCHES, n, config.dim) for n in range(1, MAX_NODES + 1)}
    except UnavailableError as error:
        answer(unavailable=str(error))
        return
    layer = 4 * config.dim**2 + 3 * config.dim * config.hidden
    answer(layers=config.layers * layer, head=config.dim * vocab)
    warm_counts = set()
    with suppress(KeyboardInterrupt):
        for line in sys.stdin:
            request = json.loads(line)
            if request.get("rounding"):
                if not (folder / "inputs.pt").is_file():
                    torch.save(picture_inputs(), folder / "inputs.pt")
                answer(**measure_rounding(engine, folder))
                continue
            nodes = request["rows"] // BRANCHES
            if nodes not in warm_counts:
                time_passes(engine, x[nodes], 0.1)
                warm_counts.add(nodes)
            answer(ms=time_passes(engine, x[nodes], request["seconds"]), memory=anonymous_memory())


if __name__ == "__main__":
    main()
