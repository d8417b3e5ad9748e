"""Linear layers with weights prepacked for oneDNN, for fast passes over few rows on a CPU.

oneDNN multiplies with weights in a blocked order. In a pass over a few codes much of the time goes into reordering them;
here they are reordered once, when a model is read.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lanternpp.nn.decoder import Decoder
from lanternpp.nn.native import native


class PackedLinear(nn.Module):
    """x [..., in] -> [..., out], bfloat16 on a CPU, for inference."""

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int = 64):
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), rows)
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """The weight [out, in], unpacked."""
        plain: Tensor = self.packed.to_dense()
        return plain

    def forward(self, x: Tensor) -> Tensor:
        """The product, rounded as `nn.Linear` rounds it."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def packable(weight: Tensor) -> bool:
    """Whether this weight can be packed here: bfloat16 on a CPU with oneDNN's prepacked products."""
    ops = ("_reorder_linear_weight", "_linear_pointwise")
    there = torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, op) for op in ops)
    plain = type(weight.detach()) is Tensor  # not one of torchao's
    return there and plain and weight.device.type == "cpu" and weight.dtype == torch.bfloat16


def pack(module: nn.Module) -> None:
    """Replace every linear layer below `module` that can be packed; the module is for inference from then on."""
    if isinstance(module, Decoder):
        module.native = native(module)
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and packable(child.weight):
            setattr(module, name, PackedLinear(child.weight, child.bias))
        else:
            pack(child)
