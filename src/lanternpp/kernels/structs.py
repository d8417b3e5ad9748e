"""The structures of `csrc/kernels.h`."""

from __future__ import annotations

from ctypes import Structure, c_double, c_float, c_int64, c_void_p

BLOCK_N = 32  # outputs of a block of weights
K_ALIGN = 64  # inputs are padded to a multiple of this
HEAD_ALIGN = 32  # and channels of a head in the KV cache
LANES = 16  # gate and up alternate by so many outputs


class Linear(Structure):
    """A linear layer's packed weights."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "scale", "bias")),
        *((name, c_int64) for name in ("inputs", "outputs")),
    )


class Packing(Structure):
    """What `pack_linear` reads and writes."""

    _fields_ = (
        *((name, c_void_p) for name in ("row", "given", "weight", "scale")),
        *((name, c_int64) for name in ("blocks", "inputs", "width")),
    )


class LinearCall(Structure):
    """Rows that `linear` multiplies."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "out", "scratch")),
        *((name, c_int64) for name in ("rows", "pitch", "branches", "out_is_float")),
        ("guidance", c_double),
    )


class Layer(Structure):
    """One layer of a decoder."""

    _fields_ = (
        *((f"{name}_norm", c_void_p) for name in ("attention", "ffn", "attention_out", "ffn_out", "qk")),
        ("qk_bias", c_void_p),
        *((name, Linear) for name in ("wqkv", "wo", "w13", "w2")),
    )


class Shape(Structure):
    """The shape of a decoder."""

    _fields_ = (
        *((name, c_int64) for name in ("layers", "dim", "heads", "kv_heads", "head_dim", "hidden")),
        *((name, c_int64) for name in ("qk_kind", "gate_kind")),
        ("norm", c_void_p),
        *((name, c_float) for name in ("eps", "qk_eps", "scale")),
    )


class Pass(Structure):
    """One pass of a decoder."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "nodes", "slots")),
        *((name, c_void_p) for name in ("x", "rotation", "slot", "mask", "kv", "out", "scratch")),
        ("parts", c_int64),
        ("part", c_void_p),
    )
