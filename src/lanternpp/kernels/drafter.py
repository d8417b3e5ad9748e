"""A parallel drafter's layers around its decoder, and the codes of its chains, in C (`chain.c`, `step.c`)."""

from __future__ import annotations

from ctypes import CDLL
from typing import Any

import torch
from torch import Tensor

from lanternpp.kernels.binding import BLOCK_N, LANES, structs
from lanternpp.kernels.linear import KernelLinear, packable, takes
from lanternpp.nn.checkpoints import quantised
from lanternpp.types import Draft, Warping

AROUND = ("fc", "hint", "down")  # layers before and after the decoder


class KernelDrafter:
    """The layers of a `ParallelDrafter` besides its decoder; some are replaced by packed ones in 8 bits.

    head: of the target; None: it is not linear, and chains are not sampled here. The head's logits of `combine` are those of the
    features, which are computed for all levels together, and `head_up`, the product of the head's weights with those of `up`, times
    what is known of the code before.
    """

    def __init__(self, drafter: Any, head: KernelLinear | None, library: CDLL):
        self.library, self.head = library, head
        for name in AROUND:
            layer = getattr(drafter, name)
            if not isinstance(layer, KernelLinear):
                setattr(drafter, name, KernelLinear(library, [(layer.weight, layer.bias)], int8=True))
        count, dim = drafter.queries.shape
        around = {name: getattr(drafter, name).struct for name in AROUND}
        self.layers = layers = structs.DraftLayers(**around, queries=drafter.queries.detach())
        layers.query_count, layers.dim, layers.aux = count, dim, drafter.fc.in_features // dim - 2
        layers.eps = drafter.config.decoder.norm_eps
        if head is None:
            return
        up, bias = drafter.up.weight, drafter.up.bias[:, None]
        # In 8 bits: a draft's rounding changes what is offered, not the distribution of pictures.
        head_up = product(head.weight, up)
        head_up.int8_weight = quantised(head_up, 8)  # type: ignore[attr-defined]
        self.head_up = KernelLinear(library, [(head_up, product(head.weight, bias)[:, 0])], int8=True)
        layers.head_up, layers.head = self.head_up.struct, head.struct
        if (confidence := drafter.confidence) is not None:
            layers.confidence_bias, layers.confidence = float(confidence.bias), confidence.weight.detach()
            layers.confidence_up = product(confidence.weight, torch.cat((up, bias), 1))

    def inputs(
        self, next_embeds: Tensor, features: Tensor, queries: int, hints: Tensor | None
    ) -> Tensor | None:
        """As `DrafterKernels.inputs`."""
        if not takes(next_embeds):
            return None
        batch, known, dim = next_embeds.shape
        out = next_embeds.new_empty(batch, known + queries, dim)
        sizes = self.layers, batch, known, queries, known
        structs.QueryInputs(*sizes, next_embeds, features, hints, out).run(self.library)
        return out

    def sample(self, draft: Draft, warp: Warping, min_survival: float = 0.0, **tensors: Any) -> bool:
        """As `DrafterKernels.sample`."""
        batch, levels, _ = tensors["features"].shape
        if self.head is None or not takes(tensors["features"]):
            return False
        sizes = self.layers, batch, levels, self.head.struct.outputs, structs.Sampling(*warp)
        work = structs.Chain(*sizes, **tensors, min_survival=min_survival)
        work.probs, work.drawn, work.survival = draft.probs, draft.codes, draft.survival
        work.run(self.library)
        return True


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [n, k] times b [k, m] in float32, of sums in float64: their rounding does not depend on the number of threads."""
    b = b.detach().double()
    return torch.cat([(rows.double() @ b).float() for rows in a.detach().split(4096)])


def kernel_drafter(drafter: Any, head: KernelLinear | None, library: CDLL) -> KernelDrafter | None:
    """As `KernelDrafter`; None where the weights do not allow it: they are to be bfloat16 on a CPU, in blocks."""
    weights, (dim, hidden) = [getattr(drafter, x).weight for x in (*AROUND, "up")], drafter.up.weight.shape
    odd = dim % BLOCK_N or hidden % LANES or not all(map(packable, weights))
    return None if odd else KernelDrafter(drafter, head, library)
