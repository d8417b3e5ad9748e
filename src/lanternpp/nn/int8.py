"""8-bit weights with torchao: half the memory of bfloat16, at the cost of rounding, whose effect is measured.

Weights are symmetric with one scale per output channel; activations keep their dtype (weight-only). The decoder's linear layers alone
have 8 bits: embeddings and the head, where rounding would move the logits most directly, keep their dtype.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib.util import find_spec

from torch import Tensor, nn

from lanternpp.errors import InputError


@dataclass(frozen=True)
class Effect:
    """The change of a target's logits by 8-bit weights, over the positions of a probe."""

    max_logit_difference: float
    mean_logit_difference: float
    total_variation: float  # of the probabilities at temperature 1, mean over positions
    bytes_before: int  # of the linear layers' weights
    bytes_after: int

    def __str__(self) -> str:
        """Return one line for users."""
        return (
            f"logits move by {self.mean_logit_difference:.2g} in the mean and {self.max_logit_difference:.2g} at most, "
            f"probabilities by {self.total_variation:.2g} (total variation); "
            f"{self.bytes_before / 1e6:.3g} MB of weights take {self.bytes_after / 1e6:.3g} MB"
        )


def quantise(module: nn.Module) -> None:
    """Store the weight of every linear layer below `module` in 8 bits, for inference; `require` checks that torchao is installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(module, Int8WeightOnlyConfig(version=2))


def require(dtype: str) -> None:
    """Raise InputError unless PyTorch computes from weights in a dtype of `STORED`, without an import of torchao, which takes seconds."""
    if dtype != "int8":
        raise InputError(f"dtype {dtype} needs the kernels for CPUs; use int8, or another dtype")
    if find_spec("torchao") is None:
        raise InputError(
            "dtype int8 needs torchao, which is not installed; pip install 'lanternpp[int8]', or use another dtype"
        )


def int8_parts(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the bits [out, in] int8 and scale [out] of a weight, from its checkpoint or from `quantise`; None: it has none."""
    parts: tuple[Tensor, Tensor] | None = getattr(weight, "int8_weight", None)
    scale: Tensor | None = getattr(weight, "scale", None)
    if parts is not None or scale is None:
        return parts
    return weight.qdata, scale.flatten()  # type: ignore[attr-defined]


def compared(before: Tensor, after: Tensor, weights: tuple[int, int]) -> Effect:
    """Compare logits [..., V] of the same positions before and after; weights: the bytes of weights before and after."""
    before, after = before.float(), after.float()
    difference = (before - after).abs()
    distance = (before.softmax(-1) - after.softmax(-1)).abs().sum(-1) / 2
    return Effect(difference.max().item(), difference.mean().item(), distance.mean().item(), *weights)


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of the weights of linear layers, as they are stored."""
    weights = [child.weight for child in module.modules() if isinstance(child, nn.Linear)]
    return sum(part.nbytes for weight in weights for part in int8_parts(weight) or (weight,))
