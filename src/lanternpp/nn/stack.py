"""The layers of a decoder as linear modules, norms and numbers: what fast passes are packed from, whoever made the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

HeadScale = tuple[Tensor, Tensor | None]
"""Weight and bias of a norm over the channels of each head, [heads, head_dim]."""


@dataclass(frozen=True)
class StackLayer:
    """One layer: x += out_norm(attention(norm(x))), then x += out_norm(down(gate(..) * up(..))) of the normalised x.

    Norms are RMSNorms, given by the numbers that the unit vector is multiplied with ([dim]; Gemma's are 1 + weight); None: no norm.
    """

    qkv: Sequence[nn.Linear]  # one with the outputs queries, keys, values, or the three
    out: nn.Linear
    gate_up: Sequence[nn.Linear]  # one with the outputs gate, up, or the two
    down: nn.Linear
    attention_norm: Tensor | None
    ffn_norm: Tensor | None
    attention_out_norm: Tensor | None = None
    ffn_out_norm: Tensor | None = None
    q_norm: HeadScale | None = None
    k_norm: HeadScale | None = None


@dataclass(frozen=True)
class Stack:
    """A decoder without its embeddings and head. Rotation pairs channel i of a head with channel i + head_dim / 2."""

    layers: Sequence[StackLayer]
    norm: Tensor | None  # [dim], after the last layer
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    eps: float
    qk_norm: Literal["none", "rms", "layer"] = "none"  # over the channels of a head, before rotation
    qk_eps: float = 1e-5
    gate: Literal["silu", "gelu_tanh"] = "silu"
    scale: float | None = None  # of the scores; None: head_dim ** -0.5
    # [head_dim]: the order in which channels of queries and keys are put, so that rotation pairs them as above; None: as they are
    qk_order: Tensor | None = None
