"""The network of our own models and the drafters, a pre-norm transformer decoder, and `Stack`, the description of any decoder.

A `Stack` has the layers of a decoder as linear modules, norms and numbers; fast passes are packed from it. Rotary position embeddings
(RoFormer, arXiv 2104.09864) are tables of cosines and sines, and channel i of a head is rotated with channel i + d / 2; checkpoints
that pair neighbouring channels are permuted when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.nn.backend import DecoderForward
from lanternpp.nn.checkpoints import Epsilon, HeadDim, Heads, Hidden, Layers, Share, Width
from lanternpp.types import Nodes, on_host


class AttentionCache(Protocol):
    """The interface of a KV cache, which stores keys and values and attends over all stored ones."""

    def computed(self, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the result of `run`, which reads and writes keys and values [L, 2, R, Hkv, S, d] of the S slots of masks."""
        ...

    def attend(self, layer: int, nodes: Nodes, mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [R, N, Hkv, d]; attend with q [R, N, H, d] -> [R, N, H, d]."""
        ...


def is_hooked(module: nn.Module) -> bool:
    """Return whether a caller has put hooks on a module or replaced its `forward`. transformers' own hooks record outputs."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return "forward" in vars(module) or any(not x.__module__.startswith("transformers.utils.") for x in hooks)


@dataclass(frozen=True)
class DecoderConfig:
    """The hyperparameters of a decoder. Raises ValueError where heads or channels do not divide."""

    dim: Width
    layers: Layers
    heads: Heads
    hidden: Hidden
    kv_heads: Heads | None = None
    norm_eps: Epsilon = 1e-5
    final_norm: bool = True
    first_norm: bool = True
    dropout: Share = 0.0
    head_dim: HeadDim = 0  # channels of one head; 0: dim / heads
    qk_norm: bool = False  # a LayerNorm over each head of queries and keys, before rotation

    def __post_init__(self) -> None:
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.dim // self.heads)
        if self.heads % self.num_kv_heads or self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(
                f"{self.heads} heads and {self.num_kv_heads} key-value heads of {self.head_dim} channels: heads must be a "
                "multiple of key-value heads, and channels even"
            )

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values: fewer than `heads` in grouped-query attention (arXiv 2305.13245)."""
        return self.kv_heads or self.heads


@dataclass(frozen=True)
class StackLayer:
    """One layer: x += out_norm(attention(norm(x))), then x += out_norm(down(gate(..) * up(..))) of the normalised x.

    Norms are RMSNorms, given by the scales [dim] of the unit vector (Gemma's are 1 + weight); None: no norm.
    """

    qkv: Sequence[nn.Linear]  # one module with the outputs queries, keys, values, or three modules
    out: nn.Linear
    gate_up: Sequence[nn.Linear]  # one module with the outputs gate, up, or two modules
    down: nn.Linear
    attention_norm: Tensor | None = None
    ffn_norm: Tensor | None = None
    attention_out_norm: Tensor | None = None
    ffn_out_norm: Tensor | None = None
    # Weight and bias of a norm over the channels of each head of queries and keys, [heads + kv_heads, head_dim].
    qk_norm: tuple[Tensor, Tensor | None] | None = None


@dataclass(frozen=True)
class Stack:
    """A decoder without its embeddings and head. Rotation pairs channel i of a head with channel i + head_dim / 2."""

    config: DecoderConfig
    layers: Sequence[StackLayer]
    norm: Tensor | None  # [dim], after the last layer
    qk_norm: Literal["none", "rms", "layer"]  # over the channels of a head, before rotation
    qk_order: Tensor  # [head_dim]: the channels of queries and keys in the order in which rotation pairs them as above
    gate: Literal["silu", "gelu_tanh"] = "silu"


def grid_table(prefix: int, grid: int, head_dim: int, base: float = 10000.0) -> Tensor:
    """Return a 2-D table over a grid of codes, [prefix + grid * grid, 2, head_dim], for `rotate`; on the CPU, as `line_table`.

    The first half of the frequencies encodes the row, the second the column. Prefix slots have angle 0, which is no rotation.
    """
    quarter = head_dim // 4
    angle = _angles(grid, quarter, base)  # [grid, quarter]
    row = angle[:, None].expand(grid, grid, quarter)
    column = angle[None].expand(grid, grid, quarter)
    angle = torch.cat((row, column), -1).reshape(grid * grid, 2 * quarter)
    return angle_table(torch.cat((angle.new_zeros(prefix, 2 * quarter), angle)))


def line_table(positions: int, head_dim: int, base: float = 10000.0) -> Tensor:
    """Return a 1-D table, [positions, 2, head_dim], for `rotate` (RoFormer, arXiv 2104.09864, section 3.2.2).

    It is on the CPU, whatever the default device: a module that is made on the meta device keeps its table.
    """
    return angle_table(_angles(positions, head_dim // 2, base))


def _angles(positions: int, count: int, base: float) -> Tensor:
    """Return the angles of `count` frequencies at every position, [positions, count] float64, on the CPU."""
    freq = base ** -(torch.arange(count, dtype=torch.float64, device="cpu") / count)
    return torch.arange(positions, dtype=torch.float64, device="cpu")[:, None] * freq


def angle_table(angle: Tensor) -> Tensor:
    """Return the cosines and signed sines of angles [positions, head_dim / 2] for `rotate`, [positions, 2, head_dim]."""
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate x [R, N, H, d] by rows [R, N, 2, 1, d] of a table -> the same shape."""
    if torch.compiler.is_compiling():  # The gradient of `roll` is compiled to slow code on a CPU.
        half = x.shape[-1] // 2
        first, second = x.chunk(2, -1)
        cos, sin = rotation[:, :, 0, :, :half], rotation[:, :, 1, :, half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.addcmul(x * rotation[:, :, 0], x.roll(x.shape[-1] // 2, -1), rotation[:, :, 1])


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to be added to the scores: 0 where `mask` is True, -inf elsewhere."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


def causal_mask(length: int, like: Tensor) -> Tensor:
    """Return the additive causal mask [T, T] of T positions, with the dtype and device of `like`."""
    return additive_mask(torch.ones(length, length, dtype=torch.bool, device=like.device).tril(), like.dtype)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q [B, H, N, d], k and v [B, H, S, d], additive mask -> [B, H, N, d], by two products: the faster way to train, compiled on a CPU."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + mask
    return scores.softmax(-1).to(q.dtype) @ v


class Norm(nn.RMSNorm):
    """RMSNorm in the dtype of its input, whatever that of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> the same shape, of unit mean square, times the weight."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class HeadNorm(nn.Module):
    """LayerNorm over the channels of each head, with a weight and a bias of its own (ViT-22B, arXiv 2302.05442)."""

    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, head_dim))
        self.bias = nn.Parameter(torch.zeros(heads, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H, d] -> the same shape."""
        unit = F.layer_norm(x, x.shape[-1:])
        return torch.addcmul(self.bias.to(x.dtype), unit, self.weight.to(x.dtype))


class Block(nn.Module):
    """One layer: attention and a SwiGLU, each with a residual connection."""

    def __init__(self, config: DecoderConfig, first: bool = False):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.num_kv_heads, config.head_dim
        self.dropout = config.dropout
        width, rotated = config.heads * config.head_dim, config.heads + config.num_kv_heads
        normed = config.first_norm or not first
        self.attention_norm = Norm(config.dim, config.norm_eps) if normed else nn.Identity()
        self.wqkv = nn.Linear(config.dim, width + 2 * self.kv_heads * self.head_dim, bias=False)
        self.qk_norm = HeadNorm(rotated, self.head_dim) if config.qk_norm else nn.Identity()
        self.wo = nn.Linear(width, config.dim, bias=False)
        self.ffn_norm = Norm(config.dim, config.norm_eps)
        self.w13 = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """x [R, N, D], rotation [R, N, 2, 1, d], attend(q, k, v) -> [R, N, D]."""
        qk, v = self.before_attention(x, rotation)
        return self.after_attention(x, attend(qk[:, :, : self.heads], qk[:, :, self.heads :], v))

    def before_attention(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """x [R, N, D] -> queries and keys, rotated, as one tensor [R, N, H + Hkv, d], and values [R, N, Hkv, d]."""
        qkv = self.wqkv(self.attention_norm(x)).view(*x.shape[:2], -1, self.head_dim)
        rotated = self.heads + self.kv_heads
        return rotate(self.qk_norm(qkv[:, :, :rotated]), rotation), qkv[:, :, rotated:]

    def after_attention(self, x: Tensor, y: Tensor) -> Tensor:
        """The layer's input x [R, N, D] and the output of attention y [R, N, H, d] -> [R, N, D]."""
        x = x + self._drop(self.wo(y.reshape(*y.shape[:2], -1)))
        gate, up = self.w13(self.ffn_norm(x)).chunk(2, -1)
        return x + self._drop(self.w2(F.silu(gate) * up))

    def stack_layer(self) -> StackLayer:
        """Return the same layer for fast passes; it shares the weights."""
        return StackLayer(
            qkv=(self.wqkv,),
            out=self.wo,
            gate_up=(self.w13,),
            down=self.w2,
            # An Identity has no weight.
            attention_norm=getattr(self.attention_norm, "weight", None),
            ffn_norm=self.ffn_norm.weight,
            qk_norm=(norm.weight, norm.bias) if isinstance(norm := self.qk_norm, HeadNorm) else None,
        )

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.training and self.dropout else x


class Decoder(nn.Module):
    """A stack of blocks with a table of rotary embeddings; runs with a KV cache, or over a sequence without."""

    rotary_table: Tensor
    native: DecoderForward | None = None  # set by `Backend.pack`
    ranks = 1  # processes that heads of attention are divided among, by tensor parallelism
    causal: Tensor | None = None
    """The additive mask [T, T], set before compiling: a mask that is computed in the graph is slower."""

    def __init__(self, config: DecoderConfig, rotary_table: Tensor):
        super().__init__()
        if rotary_table.shape[-1] != config.head_dim:
            raise ValueError(
                f"heads of {config.head_dim} channels and rotary embeddings of {rotary_table.shape[-1]}; a drafter's heads are "
                "as wide as its target's, and on a grid a multiple of 4"
            )
        self.config = config
        self.blocks = nn.ModuleList(Block(config, first=i == 0) for i in range(config.layers))
        self.norm = Norm(config.dim, config.norm_eps) if config.final_norm else nn.Identity()
        self.register_buffer("rotary_table", rotary_table, persistent=False)  # [positions, 2, d]

    def stack(self) -> Stack:
        """Return the layers and the final norm for fast passes, which share the weights and rotate by `rotary_table`."""
        layers = [block.stack_layer() for block in cast("list[Block]", list(self.blocks))]
        norm = getattr(self.norm, "weight", None)  # an Identity has none
        qk_norm: Literal["none", "layer"] = "layer" if self.config.qk_norm else "none"
        return Stack(self.config, layers, norm, qk_norm, torch.arange(self.config.head_dim))

    def forward(
        self, x: Tensor, nodes: Nodes, cache: AttentionCache, aux_layers: tuple[int, ...] = ()
    ) -> Tensor:
        """x [R, N, D] at `nodes` -> features [R, N, D]; their keys and values go to `cache`.

        aux_layers: layers below the last, counted from 0 and ascending, whose output (the residual stream after them) is
        returned too, after the features: [R, N, (1 + aux) D].
        """
        native = self.native
        if native is not None and on_host(x):
            return cache.computed(lambda kv: native(x, nodes, kv, aux_layers))
        mask = additive_mask(nodes.mask, x.dtype)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return cache.attend(layer, nodes, mask, q, k, v)

        return self._layers(x, nodes.position, attend, aux_layers)

    def forward_sequence(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        aux_layers: tuple[int, ...] = (),
        past: list[tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """x [B, T, D] -> features [B, T, D], without a cache; aux_layers as in `forward`.

        positions [b, T]; None: 0..T-1. mask [b, 1, T, S]: the mask, True where attended to; None: causal. b is B or 1.
        past: keys and values of each layer [B, Hkv, S - T, d], which gradients pass through; [] at first. Those of x are added.
        """

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            if past is not None:
                if layer < len(past):
                    k, v = (torch.cat(pair, 2) for pair in zip(past[layer], (k, v), strict=True))
                past[layer : layer + 1] = [(k, v)]
            groups = q.shape[1] // k.shape[1]
            if groups == 1 and torch.compiler.is_compiling() and q.device.type == "cpu":
                causal = causal_mask(q.shape[2], q) if self.causal is None else self.causal
                scores_mask = causal if mask is None else additive_mask(mask, q.dtype)
                return plain_attention(q, k, v, scores_mask).transpose(1, 2)
            if mask is not None and groups > 1 and q.device.type == "cuda":
                # No fused kernel of a GPU takes both masks and fewer heads of keys.
                k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
            y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=groups > 1)
            return y.transpose(1, 2)

        return self._layers(x, positions, attend, aux_layers)

    def _layers(
        self,
        x: Tensor,
        positions: Tensor | None,
        attend: Callable[[int, Tensor, Tensor, Tensor], Tensor],
        aux_layers: tuple[int, ...],
    ) -> Tensor:
        """Run the layers and the final norm at positions [b, N] or 0..N-1; attend takes the layer's number first."""
        table = self.rotary_table
        rows = table[None, : x.shape[1]] if positions is None else table[positions.clamp(max=len(table) - 1)]
        rotation = rows[:, :, :, None].to(x.dtype)
        aux: list[Tensor] = []
        for layer, block in enumerate(self.blocks):
            x = block(x, rotation, partial(attend, layer))
            if layer in aux_layers:
                aux.append(x)
        return torch.cat((self.norm(x), *aux), -1) if aux_layers else self.norm(x)
