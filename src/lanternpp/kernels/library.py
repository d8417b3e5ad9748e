"""A decoder's passes in C (`decoder.c`), compiled once, with the other files in C, on the machine that runs it.

For a few rows starting PyTorch's operations takes longer than computing them. The kernels need a C compiler;
without one, or with LANTERNPP_KERNELS=0 in the environment, everything is computed by PyTorch.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import stat
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from ctypes import POINTER, Structure, addressof, byref, c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.kernels.layout import COLUMNS, LargePages, blocks, gate_up
from lanternpp.nn.checkpoints import code_cache, digest, replacing
from lanternpp.nn.decoder import Block, Decoder
from lanternpp.nn.int8 import stored_parts
from lanternpp.types import Nodes, on_host

SOURCES = [
    Path(__file__).parent / "csrc" / name
    for name in ("decoder.c", "rows.c", "chain.c", "sampling.c", "verify.c", "step.c")
]
SOURCE = SOURCES[-1]  # which includes the others
SWITCH = "LANTERNPP_KERNELS"
CPUINFO = Path("/proc/cpuinfo")


def product_flags(cpu: str) -> tuple[str, ...]:
    """Compiler flags for the faster products of bfloat16 on a CPU; cpu: the text of /proc/cpuinfo.

    Intel's `vdpbf16ps` has half the rate of FMA on float32, so that weights widened in registers take 0.6 of its time. AMD's has
    the full rate, and tiles (AMX) have more than both.
    """
    widened = "GenuineIntel" in cpu and "avx512_bf16" in cpu and "amx_bf16" not in cpu
    return ("-mno-avx512bf16",) if widened else ()


FLAGS = (
    "-O3",
    "-march=native",
    *(("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()),
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-shared",
    "-fPIC",
    *product_flags(CPUINFO.read_text() if CPUINFO.is_file() else ""),
)
MOST_WEIGHTS = 1 << 27  # of a decoder: they are kept a second time, and larger ones gain little


class Linear(Structure):
    """`Linear` of decoder.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "scale", "bias")),
        *((name, c_int64) for name in ("inputs", "outputs")),
    )


class Layer(Structure):
    """`Layer` of decoder.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("attention_norm", "ffn_norm")),
        *((name, Linear) for name in ("wqkv", "wo", "w13", "w2")),
    )


class Shape(Structure):
    """`Shape` of decoder.c."""

    _fields_ = (
        *((name, c_int64) for name in ("layers", "dim", "heads", "kv_heads", "head_dim", "hidden")),
        ("norm", c_void_p),
        ("eps", c_float),
    )


class Pass(Structure):
    """`Pass` of decoder.c."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "nodes", "slots")),
        *((name, c_void_p) for name in ("x", "rotation", "slot", "mask", "kv", "out", "scratch")),
        ("parts", c_int64),
        ("part", c_void_p),
    )


class NativeDecoder:
    """The passes of a `Decoder`; it keeps a second copy of the weights, in the order they are read in."""

    def __init__(self, decoder: Decoder, library: ctypes.CDLL):
        self.library, self._kept, self._pages = library, list[Tensor](), LargePages()
        config = decoder.config
        blocks: list[Block] = list(decoder.blocks)  # type: ignore[arg-type]
        self.layers = (Layer * len(blocks))(*map(self._layer, blocks))
        last = self._floats(getattr(decoder.norm, "weight", None))
        shape = (config.layers, config.dim, config.heads, config.num_kv_heads, config.head_dim, config.hidden)
        self.shape = Shape(*shape, last, config.norm_eps)
        self.rotary_table = decoder.rotary_table.float()
        self.threads = threading.local()  # the scratch memory of each thread that calls

    def takes(self, x: Tensor) -> bool:
        """Whether it computes a pass with inputs x [R, N, D]."""
        return on_host(x)

    def __call__(self, x: Tensor, nodes: Nodes, kv: Tensor, taps: tuple[int, ...] = ()) -> Tensor:
        """x [R, N, D] at `nodes` -> features [R, N, D]; their keys and values go to kv [L, 2, R, Hkv, S, d].

        taps: as of `Decoder.forward`, [R, N, (1 + taps) D].
        """
        rows, count, _ = x.shape
        threads, slots = torch.get_num_threads(), kv.shape[4]
        scratch = self._scratch(self.library.scratch_bytes(byref(self.shape), rows, count, slots, threads))
        x, out = x.contiguous(), x.new_empty(rows, count, (1 + len(taps)) * self.shape.dim)
        rotation = self.rotary_table[nodes.position.clamp(max=len(self.rotary_table) - 1)]
        given = (x, rotation, nodes.slot.contiguous(), nodes.mask.contiguous(), kv, out, scratch)
        part = (c_int64 * self.shape.layers)(*(0,) * self.shape.layers)
        for i, layer in enumerate(taps):
            part[layer] = 1 + i
        work = Pass(
            rows, count, slots, *(tensor.data_ptr() for tensor in given), 1 + len(taps), addressof(part)
        )
        self.library.decode(byref(self.shape), self.layers, byref(work), threads)
        return out

    def _scratch(self, size: int) -> Tensor:
        """At least so many bytes, the calling thread's own."""
        kept: Tensor | None = getattr(self.threads, "scratch", None)
        if kept is None or len(kept) < size:
            kept = self.threads.scratch = torch.empty(size, dtype=torch.uint8)
        return kept

    def _layer(self, block: Block) -> Layer:
        norms = (getattr(norm, "weight", None) for norm in (block.attention_norm, block.ffn_norm))
        return Layer(
            *map(self._floats, norms),
            self._linear(block.wqkv),
            self._linear(block.wo),
            self._linear(block.w13, gate_up),
            self._linear(block.w2),
        )

    def _linear(self, layer: nn.Linear, order: Callable[[Tensor], Tensor] = lambda x: x) -> Linear:
        kept = (
            None if x is None else self._keep(x) for x in blocks(layer.weight, layer.bias, COLUMNS, order)
        )
        return Linear(*kept, layer.in_features, layer.out_features)

    def _floats(self, tensor: Tensor | None) -> int | None:
        return None if tensor is None else self._keep(tensor.detach().float())

    def _keep(self, tensor: Tensor) -> int:
        """The address of a tensor, which lives as long as this object."""
        self._kept.append(self._pages.put(tensor))
        return self._kept[-1].data_ptr()


def native(decoder: Decoder) -> NativeDecoder | None:
    """The decoder in C; None where its shape, its weights or this machine do not allow it."""
    config, weights = decoder.config, [p for p in decoder.parameters() if p.ndim == 2]
    plain = all(
        (type(p.detach()) is Tensor or stored_parts(p))
        and p.dtype == torch.bfloat16
        and p.device.type == "cpu"
        for p in weights
    )
    widths = (config.dim, config.hidden, config.heads * config.head_dim)
    simple = not (config.qk_norm or config.norm_after or config.norm_both)
    simple = simple and not any(width % COLUMNS for width in widths)
    simple = simple and config.head_dim % 16 == 0 and config.head_dim <= 256
    if not (weights and plain and simple) or sum(p.numel() for p in weights) > MOST_WEIGHTS:
        return None
    found = kernels()
    return None if found is None else NativeDecoder(decoder, found)


def kernels() -> ctypes.CDLL | None:
    """The kernels as `library` gives them; None where they are switched off."""
    return None if os.environ.get(SWITCH) == "0" else library()


def product_dtype(like: Tensor) -> torch.dtype:
    """What products of such tensors are computed in: their dtype, or float32 where the kernels widen bfloat16."""
    found = kernels() if like.device.type == "cpu" and like.dtype == torch.bfloat16 else None
    return torch.float32 if found is not None and found.widens() else like.dtype


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, from the user's cache or compiled now, in a few seconds; None, with a warning, where that is impossible."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if platform.system() != "Linux" or compiler is None:
        warnings.warn(
            "there is no C compiler (cc) for Linux, so passes take two to three times as long", stacklevel=2
        )
        return None
    try:
        return load(compiled(compiler))
    except subprocess.CalledProcessError as error:
        reason = (
            f"{compiler} does not compile {SOURCE}: {error.stderr.decode(errors='replace').strip()[-300:]}"
        )
    except (InputError, OSError, subprocess.SubprocessError) as error:
        reason = str(error)
    warnings.warn(
        f"passes take two to three times as long, as kernels cannot be compiled: {reason}", stacklevel=2
    )
    return None


def load(path: Path) -> ctypes.CDLL:
    """Compiled kernels. OSError."""
    found = ctypes.CDLL(str(path))
    found.prepare.restype, found.prepare.argtypes = None, ()
    found.widens.restype, found.widens.argtypes = c_int64, ()
    found.use_threads.restype, found.use_threads.argtypes = c_int64, (c_int64,)
    found.head_bytes.restype, found.head_bytes.argtypes = c_int64, (c_void_p, c_int64, c_int64)
    found.chain_bytes.restype, found.chain_bytes.argtypes = c_int64, (c_void_p, c_int64, c_int64, c_int64)
    found.row_bytes.restype, found.row_bytes.argtypes = c_int64, (c_int64, c_int64, c_int64)
    found.scratch_bytes.restype = c_int64
    found.scratch_bytes.argtypes = (POINTER(Shape), c_int64, c_int64, c_int64, c_int64)
    found.decode.restype = None
    found.decode.argtypes = (POINTER(Shape), POINTER(Layer), POINTER(Pass), c_int64)
    found.draw_chain.restype, found.draw_chain.argtypes = None, (c_void_p, c_void_p, c_int64)
    found.head_logits.restype, found.head_logits.argtypes = None, (c_void_p, c_void_p, c_int64)
    found.step_bytes.restype, found.step_bytes.argtypes = c_int64, (c_void_p, c_int64)
    found.run_step.restype, found.run_step.argtypes = None, (c_void_p, c_int64, c_int64, c_int64)
    found.inputs_bytes.restype, found.inputs_bytes.argtypes = c_int64, (c_void_p, *(c_int64,) * 3)
    found.drafter_inputs.restype, found.drafter_inputs.argtypes = None, (c_void_p, c_void_p, c_int64)
    found.linear_bytes.restype, found.linear_bytes.argtypes = c_int64, (c_void_p, c_int64, c_int64)
    found.linear_rows.restype = None
    found.linear_rows.argtypes = (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64)
    for name in ("row_probs", "draw_children", "output_laws", "verify_tokenwise", "verify_joint"):
        function = getattr(found, name)
        function.restype, function.argtypes = None, (c_void_p, c_int64)
    found.prepare()
    return found


def compiled(compiler: str, flags: Sequence[str] = FLAGS) -> Path:
    """The shared library for this source, compiler and CPU, in the user's cache. OSError, SubprocessError or InputError.

    A file that is there already is taken if it is this user's: in a folder that others could once write it may be theirs.
    """
    path = (
        code_cache()
        / f"decoder-{digest([*(source.read_text() for source in SOURCES), *machine(compiler, flags)])}.so"
    )
    found = path.lstat() if path.exists() else None
    if found is None or not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        with replacing(path) as temporary:
            command = [compiler, *flags, str(SOURCE), "-lm", "-o", str(temporary)]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
    return path


def machine(compiler: str, flags: Sequence[str]) -> Iterator[str]:
    """What decides the compiled code besides its source: the compiler, its flags, the CPU and PyTorch's version."""
    yield " ".join((compiler, *flags, platform.machine(), torch.__version__))
    yield subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, text=True, timeout=20
    ).stdout
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    yield from sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))})
