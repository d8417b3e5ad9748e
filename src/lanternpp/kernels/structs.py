"""The structures of `csrc`, each declared once: fields in the order of C, with their types where they are not 64-bit integers."""

from __future__ import annotations

from ctypes import Array, Structure, addressof, c_double, c_float, c_int64, c_void_p
from typing import Any, ClassVar

from torch import Tensor

BLOCK_N = 32  # outputs of a block of weights
K_ALIGN = 64  # inputs are padded to a multiple of this
HEAD_ALIGN = 32  # and channels of a head in the KV cache
LANES = 16  # floats of a vector; gate and up alternate by so many outputs

ALL: dict[str, Any] = {}
"""The structures by name; sizes are compared with those of C when a library is loaded."""


class Struct(Structure):
    """A structure with fields by name. Where C has a pointer, a tensor or a structure stands for its address and is kept alive."""

    _fields_: ClassVar[Any] = ()

    def __init__(self, *groups: dict[str, Any], **fields: Any):
        super().__init__()
        for name, value in (pair for group in (*groups, fields) for pair in group.items()):
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__.setdefault("kept_alive", {})[name] = value
        if isinstance(value, Tensor):
            assert value.is_contiguous() and value.device.type == "cpu"
            value = value.data_ptr()
        elif isinstance(value, Structure | Array) and dict(self._fields_)[name] is c_void_p:
            value = addressof(value)
        super().__setattr__(name, value)


def declare(name: str, fields: str) -> Any:
    """A structure of C: `x` is an integer, `x*` a pointer, `x:f` a float, `x:d` a double, `x:Linear` a structure."""
    kinds = {"": c_int64, "f": c_float, "d": c_double, **ALL}
    pairs = [field.partition(":") for field in fields.split()]
    made = [(x.rstrip("*"), c_void_p if x.endswith("*") else kinds[kind]) for x, _, kind in pairs]
    ALL[name] = type(name, (Struct,), {"_fields_": made})
    return ALL[name]


Linear = declare("Linear", "weight* scale* bias* inputs outputs")
Packing = declare("Packing", "row* given* weight* scale* blocks inputs width")
LinearCall = declare("LinearCall", "x* out* scratch* rows pitch branches out_is_float guidance:d")
Layer = declare(
    "Layer",
    "attention_norm* ffn_norm* attention_out_norm* ffn_out_norm* qk_norm* qk_bias* "
    "wqkv:Linear wo:Linear w13:Linear w2:Linear",
)
Shape = declare(
    "Shape", "layers dim heads kv_heads head_dim hidden qk_kind gate_kind norm* eps:f qk_eps:f scale:f"
)
Pass = declare("Pass", "rows nodes slots x* rotation* slot* mask* kv* out* scratch* parts part*")
Warp = declare("Warp", "temperature:d top_p:d top_k")
Rows = declare("Rows", "rows codes sampling:Warp logits* probs* scratch*")
Children = declare("Children", "rows codes each count q* u* drawn* scratch*")
Heads = declare("Heads", "turn:Linear head:Linear")
Chain = declare(
    "Chain",
    "batch levels codes sampling:Warp features* query* prev* bias* u* probs* drawn* scratch* "
    "confidence* confidence_turn* survival* confidence_bias:d min_survival:d",
)
Node = declare("Node", "begin:d end:d tail:d parent depth")
Verification = declare(
    "Verification",
    "batch nodes codes ranks levels near optimal sampling:Warp logits* q* drawn* children* order* u* last* "
    "limit* table* node* distribution* path* following* kept* bonus* scratch*",
)
QueryLayers = declare("QueryLayers", "fc:Linear hint:Linear down:Linear queries* query_count dim aux eps:f")
QueryInputs = declare("QueryInputs", "batch known queries stride next_embeds* features* hints* out* scratch*")
Drafter = declare(
    "Drafter",
    "shape* layers* query_layers* heads* rotary* positions slots kv* start* used* waiting* next_embeds* features* "
    "hints* prev* all_hints* x* out* level_features* query* rotation* slot* mask* u*",
)
Step = declare(
    "Step",
    "batch branches levels length width joint guidance:d shape* layers* head* embed* rotary* positions slots "
    "kv* start* used* parts part* seed* passes* count* decided* accepted* root* root_count* x* features* guided* "
    "rotation* slot* mask* scratch* drafter* verification:Verification",
)


def warp_of(warp: tuple[float, int, float]) -> Any:
    """Temperature, top-k and top-p."""
    return Warp(temperature=warp[0], top_k=warp[1], top_p=warp[2])
