"""The structures of `csrc`, each declared once, and calls of the kernels that read them."""

from __future__ import annotations

import re
import threading
from ctypes import CDLL, Structure, addressof, byref, c_char_p, c_double, c_float, c_int64, c_void_p, sizeof
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

BLOCK_N = 32  # outputs of a block of weights
K_ALIGN = 64  # inputs are padded to a multiple of this
LANES = 16  # floats of a vector; gate and up alternate by so many outputs

# A structure, the kernel that takes it, and its fields in the order of C: `x` is an integer, `x:f` a float, `x:d` a double,
# `x:Linear` a structure, `x*` a pointer to what is read, of a tensor a contiguous copy where it is not, and `x&` one to the
# tensor itself, which is written, or read again in later calls; `x*:h` names the dtype that a tensor must have.
DECLARED = """
Scratch: memory& bytes
Linear: weight& scale&:f bias&:f inputs outputs
Packing pack_linear: row*:i given*:f weight& scale&:f blocks inputs width
LinearCall linear: layer* x*:h out& rows pitch branches out_is_float guidance:d
Layer: attention_norm*:f ffn_norm*:f attention_out_norm*:f ffn_out_norm*:f qk_norm*:f qk_bias*:f wqkv:Linear wo:Linear w13:Linear
 w2:Linear
Shape: layers dim heads kv_heads head_dim qk_kind gate_kind norm*:f eps:f qk_eps:f scale:f
Pass decode: shape* layers* rows nodes slots x*:h rotation*:f slot*:i mask*:b kv&:h out&:h parts part*
Sampling: temperature:d top_k top_p:d
Rows row_probs: rows codes sampling:Sampling logits*:f probs&:f
Children draw_children: rows codes each count q*:f u*:d drawn&:i
DraftLayers: fc:Linear hint:Linear down:Linear head_up:Linear head:Linear queries*:h confidence*:h confidence_up*:f query_count dim
 aux confidence_bias:d eps:f
Chain sample_chain: layers* batch levels codes sampling:Sampling features*:h query*:h prev*:h bias*:f u*:d probs&:f drawn&:i
 survival&:f min_survival:d
Node: begin:d end:d tail:d parent depth
Verification verify: joint batch nodes codes ranks levels near optimal sampling:Sampling logits*:f q*:f drawn*:i children*:i order*:i
 u*:d last*:d limit*:d table*:n node&:d distribution&:f path&:i following&:i kept&:i bonus&:i
QueryInputs drafter_inputs: layers* batch known queries stride next_embeds*:h features*:h hints*:h out&:h
Network: shape* layers* rotary&:f positions slots kv&:h start&:i used&:i rotation&:f slot&:i mask&:b
Drafter: decoder:Network layers* waiting&:i next_embeds&:h features&:h hints&:h prev&:h all_hints&:h x&:h out&:h level_features&:h
 query&:h u&:d
Step run_step: first last batch branches levels length width guidance:d target:Network head* embed&:h parts part* seed&:i passes&:i
 count&:i decided&:i accepted&:i root&:i root_count&:i x&:h features&:h guided&:h drafter* verification:Verification
"""


DTYPES = {
    "h": (torch.bfloat16,),
    "f": (torch.float32,),
    "d": (torch.float64,),
    "n": (torch.int32,),
    "i": (torch.int64,),
    "b": (torch.bool, torch.uint8),
}
# Of each thread: scratch memory, and how many threads its kernels have; none or 0: as many as PyTorch.
own = threading.local()


class Struct(Structure):
    """A structure with fields by name; what a pointer points to is kept alive: a tensor, a structure or an array."""

    _fields_: ClassVar[Any] = ()
    kernel: ClassVar[str] = ""
    marks: ClassVar[dict[str, tuple[str, str]]] = {}  # of every field its mark, and what follows the colon

    def __init__(self, *values: Any, **fields: Any):
        super().__init__()
        self.__dict__["alive"] = {}
        for name, value in (*zip(self.marks, values, strict=False), *fields.items()):
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        mark, kind = self.marks[name]
        if isinstance(value, Tensor):
            value = value.contiguous() if mark == "*" else value
            # the address of a subclass may be 0
            assert type(value) in (Tensor, nn.Parameter), (name, type(value))
            assert value.is_contiguous() and value.device.type == "cpu", name
            assert not kind or value.dtype in DTYPES[kind], (name, value.dtype)
        self.alive[name] = value
        if isinstance(value, Tensor):
            value = value.data_ptr()
        elif mark and value is not None:
            value = addressof(value)
        super().__setattr__(name, value)

    def run(self, library: CDLL) -> None:
        """Call the kernel that takes this, with scratch memory of the calling thread, as much as it asks for."""
        kernel, threads = getattr(library, self.kernel), getattr(own, "threads", 0) or torch.get_num_threads()
        scratch = getattr(own, "scratch", None) or structs.Scratch()
        while size := kernel(byref(self), byref(scratch), threads):
            scratch = own.scratch = structs.Scratch(memory=torch.empty(size, dtype=torch.uint8), bytes=size)


def _declared() -> SimpleNamespace:
    kinds: dict[str, Any] = {"": c_int64, "f": c_float, "d": c_double}
    for name, kernel, fields in re.findall(r"^(\w+) ?(\w*):(.*(?:\n .*)*)", DECLARED, re.MULTILINE):
        found = re.findall(r"(\w+)([*&]?)(?::(\w+))?", fields)
        content = {
            "_fields_": [(x, c_void_p if mark else kinds[kind]) for x, mark, kind in found],
            "kernel": kernel,
        }
        kinds[name] = type(name, (Struct,), content | {"marks": {x: (mark, kind) for x, mark, kind in found}})
    return SimpleNamespace(**{name: kind for name, kind in kinds.items() if len(name) > 1})


structs = _declared()


def bind(library: CDLL) -> None:
    """Declare the functions of a library. AttributeError where one is missing, ValueError where a structure has another size."""
    library.number_of.argtypes, library.number_of.restype = [c_char_p], c_int64
    for name, struct in vars(structs).items():
        there, here = library.number_of(name.encode()), sizeof(struct)
        if there != here:
            raise ValueError(f"its {name} has {there} bytes and not {here}")
        if struct.kernel:
            kernel = getattr(library, struct.kernel)
            kernel.argtypes, kernel.restype = [c_void_p, c_void_p, c_int64], c_int64
    library.prepare()
