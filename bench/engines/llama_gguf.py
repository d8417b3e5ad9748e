"""A decoder's pass in llama.cpp, through llama-cpp-python and a GGUF file."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model import BRANCHES, FILLED, SHAPES, UnavailableError, read_weights
from torch import Tensor

NAMES = {
    "attention_norm": "attn_norm",
    "wo": "attn_output",
    "ffn_norm": "ffn_norm",
    "w2": "ffn_down",
}


def write(weights: Path, kind: str, path: Path) -> None:
    """Write a model of the architecture "llama" with these weights; kind: "BF16", "Q8_0" or "Q4_0", the head's too.

    Its rotary embedding has one axis and pairs other channels: the cost is equal, the logits are not.
    """
    import gguf

    config, vocab = SHAPES[weights.stem]
    tensors = read_weights(weights)
    out = gguf.GGUFWriter(path, "llama")
    out.add_context_length(2 * FILLED)
    out.add_embedding_length(config.dim)
    out.add_block_count(config.layers)
    out.add_feed_forward_length(config.hidden)
    out.add_head_count(config.heads)
    out.add_head_count_kv(config.heads)
    out.add_layer_norm_rms_eps(config.norm_eps)
    out.add_rope_dimension_count(config.head_dim)
    out.add_vocab_size(vocab)
    out.add_tokenizer_model("no_vocab")

    def put(name: str, weight: Tensor) -> None:
        if weight.dim() == 1:
            out.add_tensor(f"{name}.weight", weight.float().numpy())
            return
        kept = getattr(gguf.GGMLQuantizationType, kind)
        out.add_tensor(f"{name}.weight", gguf.quants.quantize(weight.float().numpy(), kept), raw_dtype=kept)

    put("token_embd", tensors["head"])
    put("output", tensors["head"])
    put("output_norm", tensors["norm.weight"])
    for i in range(config.layers):
        layer = {name: tensors[f"blocks.{i}.{name}.weight"] for name in (*NAMES, "wqkv", "w13")}
        for name, theirs in NAMES.items():
            put(f"blk.{i}.{theirs}", layer[name])
        for names, joined in ((("attn_q", "attn_k", "attn_v"), "wqkv"), (("ffn_gate", "ffn_up"), "w13")):
            for name, weight in zip(names, layer[joined].chunk(len(names)), strict=True):
                put(f"blk.{i}.{name}", weight)
    part = path.with_suffix(".part")
    out.write_header_to_file(part)
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    part.rename(path)


class LlamaCpp:
    """A context with a sequence for each branch."""

    def __init__(self, weights: Path, kind: str, amx: bool):
        try:
            import llama_cpp
        except ImportError as error:
            raise UnavailableError(
                "pip install llama-cpp-python gguf (it is compiled for this CPU)"
            ) from error
        self.api, (config, self.vocab) = llama_cpp, SHAPES[weights.stem]
        path = weights.with_name(f"{weights.stem}-{kind}.gguf")
        if not path.is_file():
            write(weights, kind, path)
        self.quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.quiet, None)
        options = llama_cpp.llama_model_default_params()
        options.use_extra_bufts = amx  # weights in the order that AMX reads
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = BRANCHES * 2 * FILLED
        context.n_batch = context.n_ubatch = BRANCHES * FILLED
        context.n_seq_max, context.kv_unified = BRANCHES, False
        context.n_threads = context.n_threads_batch = torch.get_num_threads()
        context.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = self.model and llama_cpp.llama_init_from_model(self.model, context)
        if not self.context:
            raise UnavailableError(f"llama.cpp does not load {path}")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batches: dict[tuple[int, int], Any] = {}
        self.forward(torch.randn(BRANCHES, FILLED, config.dim), 0)

    def forward(self, x: Tensor, filled: int) -> np.ndarray:
        """Return logits [2, N, V] in float32 for x [2, N, D] after `filled` slots; the next pass overwrites them."""
        for branch in range(BRANCHES):
            self.api.llama_memory_seq_rm(self.memory, branch, filled, -1)
        batch = self.batch(x.shape[1], x.shape[2], filled)
        x = x.contiguous()
        ctypes.memmove(batch.embd, x.data_ptr(), x.nbytes)
        if self.api.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        logits = self.api.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, (BRANCHES, x.shape[1], self.vocab))

    def batch(self, count: int, dim: int, filled: int) -> Any:
        """Return the batch of a chain of `count` nodes in each branch."""
        if (count, filled) not in self.batches:
            batch = self.api.llama_batch_init(BRANCHES * count, dim, 1)
            batch.n_tokens = BRANCHES * count
            for i in range(batch.n_tokens):
                batch.pos[i], batch.n_seq_id[i] = filled + i % count, 1
                batch.seq_id[i][0], batch.logits[i] = i // count, 1
            self.batches[count, filled] = batch
        return self.batches[count, filled]
