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
LANES = 16  # numbers of a kind that lie together: gate and up alternate by so many outputs
FACTOR_ZERO = 16  # is added to the factors of weights of 4 bits

# A structure, the kernel that takes it, and its fields in the order of C: `x` is an integer, `x:f` a float, `x:d` a double and
# `x:Linear` a structure. `x*` is a pointer to an input, which is copied where it is a tensor that is not contiguous; `x&` is a
# pointer to the tensor itself, as later calls read it again or C writes to it. `x*:h` names the dtype that the tensor must have.
DECLARED = """
Scratch: memory& bytes
Linear: weight& scale&:f bias&:f inputs outputs is_int4
Packing pack_linear: row*:i given*:f weight& scale&:f blocks inputs width is_int4
LinearCall linear: layer* x*:h out& rows pitch branches out_is_float guidance:d
Layer: attention_norm*:f ffn_norm*:f attention_out_norm*:f ffn_out_norm*:f qk_norm*:f qk_bias*:f wqkv:Linear wo:Linear w13:Linear
 w2:Linear
Shape: layers dim heads kv_heads head_dim qk_kind gate_kind norm*:f eps:f qk_eps:f scale:f
Pass decode: shape* layers* rows nodes slots x*:h rotation*:f slot*:i mask*:b kv&:h out&:h parts part*
Sampling: temperature:d top_k top_p:d
Rows row_probs: rows codes sampling:Sampling logits*:f probs&:f
Children draw_children: rows codes each count q*:f u*:d drawn&:i
DraftLayers: fc:Linear hint:Linear down:Linear head_up:Linear head:Linear queries*:h query_count dim aux eps:f
Chain sample_chain: layers* batch levels codes sampling:Sampling features*:h query*:h prev*:h bias*:f u*:d probs&:f drawn&:i
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
# Attributes of the calling thread: `scratch` memory, and `threads`, the number that its kernels use; 0: as many as PyTorch.
own = threading.local()


class Struct(Structure):
    """A structure whose fields are set by name; `alive` has the tensors, structures and arrays that its pointers point to."""

    _fields_: ClassVar[Any] = ()
    kernel: ClassVar[str] = ""
    marks: ClassVar[dict[str, tuple[str, str]]] = {}  # the mark of every field, and the name after the colon

    def __init__(self, *values: Any, **fields: Any):
        super().__init__()
        self.__dict__["alive"] = {}
        for name, value in (*zip(self.marks, values, strict=False), *fields.items()):
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        mark, kind = self.marks[name]
        if isinstance(value, Tensor):
            value = value.contiguous() if mark == "*" else value
            # A subclass of Tensor may have the address 0.
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
        """Call the kernel of this structure; the kernel returns the bytes of scratch memory that it needs, 0 once it has run."""
        kernel = getattr(library, self.kernel)
        threads = getattr(own, "threads", 0) or torch.get_num_threads()
        scratch = getattr(own, "scratch", None) or structs.Scratch()
        while size := kernel(byref(self), byref(scratch), threads):
            scratch = own.scratch = structs.Scratch(memory=torch.empty(size, dtype=torch.uint8), bytes=size)


def _declared() -> SimpleNamespace:
    """Return the structures of `DECLARED`, each a class, by name."""
    scalars: dict[str, Any] = {"": c_int64, "f": c_float, "d": c_double}
    classes: dict[str, Any] = {}
    for name, kernel, declared in re.findall(r"^(\w+) ?(\w*):(.*(?:\n .*)*)", DECLARED, re.MULTILINE):
        types = scalars | classes
        fields = re.findall(r"(\w+)([*&]?)(?::(\w+))?", declared)
        c_fields = [(field, c_void_p if mark else types[kind]) for field, mark, kind in fields]
        marks = {field: (mark, kind) for field, mark, kind in fields}
        classes[name] = type(name, (Struct,), {"_fields_": c_fields, "kernel": kernel, "marks": marks})
    return SimpleNamespace(**classes)


structs = _declared()


def bind(library: CDLL) -> None:
    """Declare the functions of a library. AttributeError where a function is missing, ValueError where a structure's size differs."""
    library.number_of.argtypes, library.number_of.restype = [c_char_p], c_int64
    for name, struct in vars(structs).items():
        size = library.number_of(name.encode())
        if size != sizeof(struct):
            raise ValueError(f"its {name} has {size} bytes and not {sizeof(struct)}")
        if struct.kernel:
            kernel = getattr(library, struct.kernel)
            kernel.argtypes, kernel.restype = [c_void_p, c_void_p, c_int64], c_int64
    library.prepare()
