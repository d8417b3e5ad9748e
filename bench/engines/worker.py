"""One engine with one decoder, in a process of its own: it reads a request a line and writes an answer a line, in JSON.

    python bench/engines/worker.py ENGINE SHAPE FOLDER THREADS KIND

A pass is the decoder's layers and its head over the nodes of two branches, after FILLED slots of a KV cache. The keys and values of its
nodes go to the slots after these.
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
    MOST_NODES,
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

GUIDANCE = 4.0  # at which the rounding of guided logits is measured
PROMPT = 8  # slots of nature-128's prompt
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
        self.cache = cache.Cache(config, BRANCHES, FILLED + MOST_NODES, torch.empty(0, dtype=dtype))
        self.cache.kv.normal_(generator=torch.Generator().manual_seed(1))
        self.nodes: dict[tuple[int, int], Nodes] = {}

    @torch.no_grad()
    def forward(self, x: Tensor, filled: int) -> Tensor:
        """x [2, N, D] in float32 after so many slots -> logits [2, N, V]."""
        key = x.shape[1], filled
        if key not in self.nodes:
            self.nodes[key] = self.chain(*key)
        return self.step(x.to(self.dtype), self.nodes[key])

    def chain(self, count: int, filled: int) -> Nodes:
        """A chain of so many nodes in both branches."""
        self.cache.used.fill_(filled)
        mask = torch.ones(count, count, dtype=torch.bool).tril().expand(BRANCHES, -1, -1)
        return self.cache.nodes(torch.arange(count).expand(BRANCHES, -1), mask)

    def step(self, x: Tensor, nodes: Nodes) -> Tensor:
        """x [2, N, D] in the engine's dtype -> logits [2, N, V]."""
        return self.logits(self.decoder(x, nodes, self.cache))

    def logits(self, features: Tensor) -> Tensor:
        """features [2, N, D] -> logits [2, N, V]."""
        logits: Tensor = self.head(features)
        return logits


class Layers:
    """Keys and values of each layer as tensors of their own, indexed as `Cache.kv`."""

    def __init__(self, kv: Tensor):
        self.layers = [[part.clone() for part in layer] for layer in kv]

    def __getitem__(self, index: tuple[Any, ...]) -> Any:
        """Keys and values of a layer, or one of them, at the rest of the index."""
        layer, kind, *rest = index
        parts = self.layers[layer]
        return [part[..., *rest] for part in parts] if kind is ... else parts[kind][tuple(rest)]


class Compiled(PyTorch):
    """The same through torch.compile, for each number of nodes, with weights as constants."""

    def __init__(self, weights: Path):
        super().__init__(weights)
        # Of one tensor for all layers, the graph copies all of it in every layer.
        self.cache.kv = Layers(self.cache.kv)  # type: ignore[assignment]
        torch._inductor.config.freezing = True
        torch._dynamo.config.recompile_limit = 64
        self.step = torch.compile(super().step, mode="max-autotune", dynamic=False)  # type: ignore[method-assign]


class Ours(PyTorch):
    """The same, packed for the package's kernels; dtype: "bfloat16" or "int8"."""

    def __init__(self, weights: Path, dtype: str):
        super().__init__(weights)
        kernels = backend()
        kernels.pack(self.decoder, int8=dtype == "int8")
        packed = kernels.head(self.head)
        if self.decoder.native is None or packed is None:
            raise UnavailableError("our kernels do not serve this decoder, or are not installed")
        self.packed = packed

    def logits(self, features: Tensor) -> Tensor:
        """As in PyTorch."""
        found = self.packed(features, 1.0, 1)
        assert found is not None
        return found


ENGINES: dict[str, Callable[..., Any]] = {
    "float32": partial(PyTorch, dtype=torch.float32),
    "torch": PyTorch,
    "torch-compile": Compiled,
    "openvino": OpenVINO,
    "openvino-int8": partial(OpenVINO, int8=True),
    "llama.cpp": partial(LlamaCpp, kind="BF16"),
    "llama.cpp-int8": partial(LlamaCpp, kind="Q8_0"),
    "ours": partial(Ours, dtype="bfloat16"),
    "ours-int8": partial(Ours, dtype="int8"),
}


def timed(engine: Any, x: Tensor, seconds: float) -> list[float]:
    """Milliseconds of passes after FILLED slots, for at least that long and at least three."""
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < 1e3 * seconds:
        began = time.perf_counter()
        engine.forward(x, FILLED)
        taken.append(1e3 * (time.perf_counter() - began))
    return taken


def rounding(engine: Any, folder: Path) -> dict[str, float]:
    """The distance of an engine's distributions from those of float32, which "float32" computes first, over pictures' codes.

    Means over positions: KL divergence in nats and total variation, of the conditional branch and of guided logits.
    """
    pictures = []
    for picture in torch.load(folder / "inputs.pt"):
        parts = []
        for filled in range(0, FILLED - CHUNK, CHUNK):
            logits = engine.forward(picture[:, filled : filled + CHUNK], filled)
            parts.append(torch.as_tensor(logits).float().clone())
            if hasattr(engine, "store"):
                engine.store(CHUNK, filled)
        pictures.append(torch.cat(parts, 1)[:, PROMPT - 1 :])
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


def own_memory() -> float:
    """Gigabytes of memory of this process that are no mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024 / 1e9


def main() -> None:
    """Answer requests until there are none."""
    name, shape, place, threads, kind = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not go among the answers

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    torch.set_num_threads(int(threads))
    folder = Path(place)
    weights = weights_file(shape, folder)
    config, vocab = SHAPES[shape]
    tiles = kind in ("native", "amx")
    if not tiles:
        cache.TILES = False
    try:
        extra = {"amx": tiles} if name.startswith("llama.cpp") else {}
        engine = ENGINES[name](weights, **extra)
        x = {n: torch.randn(BRANCHES, n, config.dim) for n in range(1, MOST_NODES + 1)}
    except UnavailableError as error:
        answer(unavailable=str(error))
        return
    layer = 4 * config.dim**2 + 3 * config.dim * config.hidden
    answer(layers=config.layers * layer, head=config.dim * vocab)
    warm = set()
    with suppress(KeyboardInterrupt):
        for line in sys.stdin:
            request = json.loads(line)
            if request.get("rounding"):
                if not (folder / "inputs.pt").is_file():
                    torch.save(picture_inputs(), folder / "inputs.pt")
                answer(**rounding(engine, folder))
                continue
            nodes = request["rows"] // BRANCHES
            if nodes not in warm:
                timed(engine, x[nodes], 0.1)
                warm.add(nodes)
            answer(ms=timed(engine, x[nodes], request["seconds"]), memory=own_memory())


if __name__ == "__main__":
    main()
