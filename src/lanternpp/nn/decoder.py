"""The one network: a pre-norm transformer decoder that serves every family and the drafters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanternpp.nn.backend import DecoderForward
from lanternpp.nn.configs import Epsilon, HeadDim, Heads, Hidden, Layers, Share, Width
from lanternpp.nn.rope import rotate
from lanternpp.nn.stack import Stack, StackLayer
from lanternpp.types import Nodes, on_host

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class AttentionCache(Protocol):
    """The interface of a KV cache: store keys and values, and attend over all that are stored."""

    def computed(self, run: Callable[[Tensor], Tensor]) -> Tensor:
        """What `run` returns; it reads and writes keys and values [L, 2, R, Hkv, S, d] of the S slots that masks are over."""
        ...

    def attend(self, layer: int, nodes: Nodes, mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [R, N, H, d], k and v [R, N, Hkv, d] -> [R, N, H, d]."""
        ...


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
    norm_after: bool = False  # normalise what a sublayer returns, not what it is given (Swin v2, 2111.09883)
    norm_both: bool = (
        False  # normalise what a sublayer is given, and what it returns by norms of their own (GLM-4)
    )
    attention_bias: bool = False
    qkv_bias: bool = False  # of queries, keys and values alone
    ffn_bias: bool = False

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


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that is True where attended to -> 0 there and -inf elsewhere, to be added to the scores."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


def causal_mask(length: int, like: Tensor) -> Tensor:
    """The additive mask [T, T] of T places that attend to themselves and to earlier ones, with the dtype and device of `like`."""
    return additive_mask(torch.ones(length, length, dtype=torch.bool, device=like.device).tril(), like.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q, k and v [B, H, T, d] and an additive mask -> [B, H, T, d], by two products: compiled on a CPU, a training is faster so."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + mask
    return scores.softmax(-1).to(q.dtype) @ v


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> the same shape, of unit mean square, times the weight."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class HeadNorm(nn.Module):
    """LayerNorm over the channels of each head, with a weight and a bias of its own (ViT-22B, arXiv 2302.05442)."""

    def __init__(self, heads: int, head_dim: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, head_dim))
        self.bias = nn.Parameter(torch.zeros(heads, head_dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H, d] -> the same shape."""
        unit = F.layer_norm(x, x.shape[-1:], eps=self.eps)
        return torch.addcmul(self.bias.to(x.dtype), unit, self.weight.to(x.dtype))


class Block(nn.Module):
    """One layer: attention and a SwiGLU, each with a residual connection."""

    def __init__(self, config: DecoderConfig, first: bool = False):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.num_kv_heads, config.head_dim
        self.dropout, self.after = config.dropout, config.norm_after
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.attention_norm: nn.Module
        if first and not config.first_norm:
            self.attention_norm = nn.Identity()
        else:
            self.attention_norm = Norm(config.dim, config.norm_eps)
        self.wqkv = nn.Linear(config.dim, width, bias=config.attention_bias or config.qkv_bias)
        self.qk_norm = (
            HeadNorm(self.heads + self.kv_heads, self.head_dim) if config.qk_norm else nn.Identity()
        )
        self.wo = nn.Linear(self.heads * self.head_dim, config.dim, bias=config.attention_bias)
        self.ffn_norm = Norm(config.dim, config.norm_eps)
        self.w13 = nn.Linear(config.dim, 2 * config.hidden, bias=config.ffn_bias)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=config.ffn_bias)
        self.both = config.norm_both
        if config.norm_both:
            self.attention_out_norm = Norm(config.dim, config.norm_eps)
            self.ffn_out_norm = Norm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        """x [R, N, D], rotation [R, N, 2, 1, d] -> [R, N, D]."""
        qk, v = self.before_attention(x, rotation)
        return self.after_attention(x, attend(qk[:, :, : self.heads], qk[:, :, self.heads :], v))

    def before_attention(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """x [R, N, D] -> queries and keys, rotated, as one tensor [R, N, H + Hkv, d], and values [R, N, Hkv, d]."""
        x = x if self.after else self.attention_norm(x)
        qkv = self.wqkv(x).view(*x.shape[:2], -1, self.head_dim)
        rotated = self.heads + self.kv_heads
        return rotate(self.qk_norm(qkv[:, :, :rotated]), rotation), qkv[:, :, rotated:]

    def after_attention(self, x: Tensor, y: Tensor) -> Tensor:
        """The layer's input x [R, N, D] and what attention returned, y [R, N, H, d] -> [R, N, D]."""
        mixed = self.wo(y.reshape(*y.shape[:2], -1))
        if self.after:
            x = x + self._drop(self.attention_norm(mixed))
            return x + self._drop(self.ffn_norm(self._feed(x)))
        if self.both:
            x = x + self._drop(self.attention_out_norm(mixed))
            return x + self._drop(self.ffn_out_norm(self._feed(self.ffn_norm(x))))
        x = x + self._drop(mixed)
        return x + self._drop(self._feed(self.ffn_norm(x)))

    def stack_layer(self) -> StackLayer:
        """The same layer for fast passes; it shares the weights."""
        # an Identity has no weight
        before = tuple(getattr(norm, "weight", None) for norm in (self.attention_norm, self.ffn_norm))
        after = (self.attention_out_norm.weight, self.ffn_out_norm.weight) if self.both else (None, None)
        if self.after:
            before, after = (None, None), before
        q_norm = k_norm = None
        if isinstance(self.qk_norm, HeadNorm):
            parts = self.heads, self.kv_heads
            weights = (x.detach().split(parts) for x in (self.qk_norm.weight, self.qk_norm.bias))
            q_norm, k_norm = zip(*weights, strict=True)
        return StackLayer(
            qkv=(self.wqkv,),
            out=self.wo,
            gate_up=(self.w13,),
            down=self.w2,
            attention_norm=before[0],
            ffn_norm=before[1],
            attention_out_norm=after[0],
            ffn_out_norm=after[1],
            q_norm=q_norm,
            k_norm=k_norm,
        )

    def _feed(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, -1)
        return self.w2(F.silu(gate) * up)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.training and self.dropout else x


class Decoder(nn.Module):
    """A stack of blocks with a table of rotary embeddings; runs with a KV cache, or over a whole sequence without."""

    rotary_table: Tensor
    native: DecoderForward | None = None  # set by `Backend.pack`
    causal: Tensor | None = None
    """[T, T], set before compiling: a mask that is computed in the graph is slower."""

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
        """Its layers and final norm for fast passes; they share the weights, and rotate by `rotary_table`."""
        config, blocks = self.config, cast("list[Block]", list(self.blocks))
        return Stack(
            layers=[block.stack_layer() for block in blocks],
            norm=getattr(self.norm, "weight", None),
            dim=config.dim,
            heads=config.heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            hidden=config.hidden,
            eps=config.norm_eps,
            qk_norm="layer" if config.qk_norm else "none",
        )

    def forward(
        self, x: Tensor, nodes: Nodes, cache: AttentionCache, aux_layers: tuple[int, ...] = ()
    ) -> Tensor:
        """x [R, N, D] at `nodes` -> features [R, N, D]; their keys and values go to `cache`.

        aux_layers: layers below the last, counted from 0 and ascending, whose output (the residual stream behind them) is
        returned too, behind the features: [R, N, (1 + aux) D].
        """
        native = self.native
        if native is not None and on_host(x):
            return cache.computed(lambda kv: native(x, nodes, kv, aux_layers))
        rotation = self.rotary_table[nodes.position.clamp(max=self.rotary_table.shape[0] - 1)][
            :, :, :, None
        ].to(x.dtype)
        mask = additive_mask(nodes.mask, x.dtype)
        aux: list[Tensor] = []
        for layer, block in enumerate(self.blocks):

            def attend(q: Tensor, k: Tensor, v: Tensor, layer: int = layer) -> Tensor:
                return cache.attend(layer, nodes, mask, q, k, v)

            x = block(x, rotation, attend)
            if layer in aux_layers:
                aux.append(x)
        return torch.cat((self.norm(x), *aux), -1) if aux_layers else self.norm(x)

    def forward_sequence(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        seen: Tensor | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> Tensor:
        """x [B, T, D] -> features [B, T, D], without a cache; with aux_layers as in `forward`.

        At positions 0..T-1 or positions [b, T]. The mask is causal, or seen [b, 1, T, T], True where attended to; b is B or 1.
        """
        if positions is None:
            rotations = self.rotary_table[None, : x.shape[1]]
        else:
            rotations = self.rotary_table[positions.clamp(max=self.rotary_table.shape[0] - 1)]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            gqa = q.shape[1] != k.shape[1]
            if seen is None and not gqa and torch.compiler.is_compiling() and q.device.type == "cpu":
                mask = causal_mask(q.shape[2], q) if self.causal is None else self.causal
                return causal_attention(q, k, v, mask).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, enable_gqa=gqa)
            return y.transpose(1, 2)

        rotation = rotations[:, :, :, None].to(x.dtype)
        aux: list[Tensor] = []
        for layer, block in enumerate(self.blocks):
            x = block(x, rotation, attend)
            if layer in aux_layers:
                aux.append(x)
        return torch.cat((self.norm(x), *aux), -1) if aux_layers else self.norm(x)
