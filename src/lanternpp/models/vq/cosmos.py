"""The decoder of NVIDIA's discrete video tokenizer (Cosmos-1.0-Tokenizer-DV8x16x16, arXiv 2501.03575) for single pictures.

A picture is a video of one frame, and the network reads the first frame again in the place of the frames before it. So a convolution
over time is a 1x1 convolution with the sum of its weights, attention over time is a linear layer, and the picture is the last of the
four frames of the inverse Haar transform. These layers are folded into the neighbouring convolutions, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from lanternpp.models.vq.layouts import TAMING, layers
from lanternpp.models.vq.vqgan import VQGAN, VQGANConfig, norm
from lanternpp.nn.checkpoints import config_as
from lanternpp.nn.files import input_errors
from lanternpp.nn.sources import SAME, Source, blank

COSMOS = replace(TAMING, middle=("mid.block_1", "mid.attn_1.0", "mid.attn_1.1", "mid.block_2"))
Conv = tuple[Tensor, Tensor]  # weight [out, in, h, w] and bias [out]


class OverTime(nn.Module):
    """Attention over the time of one frame: a residual linear layer."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm, self.out = norm(channels), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to the same shape."""
        return x + self.out(self.norm(x))


class Cosmos(VQGAN):
    """The decoder of codes; its last convolution gives 4 x 4 pixels per position, and its norms have a single group."""

    kind = "cosmos"

    def __init__(self, config: VQGANConfig):
        super().__init__(config)
        widths = [config.channels * multiple for multiple in config.multiples]
        self.middle.insert(2, OverTime(widths[-1]))
        for stage in list(self.stages)[1:2]:  # this stage of the video decoder doubles the number of frames
            stage.blocks.append(nn.Conv2d(widths[-2], widths[-2], 1))  # type: ignore[operator,union-attr]
        conv = nn.Conv2d(widths[0], 48, 3, padding=1)
        self.exit = nn.Sequential(norm(widths[0]), nn.SiLU(), conv, nn.PixelShuffle(4))
        for module in self.modules():
            if isinstance(module, nn.GroupNorm):
                module.num_groups = 1


def read_cosmos(source: Source, codebook: Tensor, dtype: torch.dtype) -> VQGAN:
    """Read a decoder for codebook [V, C]: NVIDIA's weights with the names of `decoder.jit`, or a folder of ours. Raise InputError."""
    is_ours = source.config.get("kind") == Cosmos.kind
    shape = source.config if is_ours else shape_of(source, codebook)
    with blank(source.path):
        vq = Cosmos(config_as(VQGANConfig, shape, source.path))
    if is_ours:
        source.fill(vq, [SAME], dtype)
    else:
        with input_errors(f"{source.path} is no decoder of Cosmos"):
            tensors = folded({name: tensor for name, tensor, _ in source.tensors(source.metas)}, vq)
            weights = {name: tensor.to(dtype) for name, tensor in tensors.items()}
            vq.load_state_dict(weights | {"codebook": codebook.float()}, assign=True)
    return vq.prepare_for_inference()


def shape_of(source: Source, codebook: Tensor) -> dict[str, object]:
    """Return the fields of a published decoder's `VQGANConfig`, from its tensors. Raise InputError."""
    widths = [source.shape(f"decoder.up.{i}.block.0.conv1.1.conv3d.weight", 5)[0] for i in range(3)]
    return {
        "codes": len(codebook),
        "dim": codebook.shape[1],
        "channels": widths[0],
        "multiples": tuple(width // widths[0] for width in widths),
        "blocks": source.layers(r"decoder\.up\.0\.block\."),
        "latent": source.shape("post_quant_conv.conv3d.weight", 5)[0],
        "attention": False,
        "unit": False,
    }


def folded(tensors: Mapping[str, Tensor], vq: Cosmos) -> dict[str, Tensor]:
    """Turn tensors in NVIDIA's layout into those of `vq`, in float32. Raise LookupError or RuntimeError if they do not fit."""

    def conv(name: str) -> Conv:
        # All frames are the same frame, so the kernel is summed over time.
        return tensors[f"{name}.conv3d.weight"].float().sum(2), tensors[f"{name}.conv3d.bias"].float()

    def with_linear(conv: Conv, weight: Tensor, bias: Tensor | float = 0.0) -> Conv:
        # A linear layer after a convolution is folded into the convolution.
        return torch.tensordot(weight.flatten(1), conv[0], 1), weight.flatten(1) @ conv[1] + bias

    def pair(name: str) -> Conv:
        return with_linear(conv(f"{name}.0"), *conv(f"{name}.1"))

    def residual(conv: Conv) -> Conv:
        # The input of a residual convolution is added by its centre.
        weight, _ = conv
        weight[:, :, weight.shape[-2] // 2, weight.shape[-1] // 2] += torch.eye(len(weight))
        return conv

    cosmos = {}
    for ours, theirs, layer in layers(vq, COSMOS):
        if isinstance(layer, nn.GroupNorm):
            weight, bias = tensors[f"{theirs}.norm.weight"], tensors[f"{theirs}.norm.bias"]
        elif ours == "middle.1.qkv":
            parts = [conv(theirs.replace("qkv", name)) for name in "qkv"]
            weight, bias = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        elif ours == "middle.2.out":
            weight, bias = with_linear(conv(theirs.replace("proj_out", "v")), *conv(theirs))
        elif ours == f"stages.1.blocks.{vq.config.blocks}":
            weight, bias = residual(conv("decoder.up.1.upsample.conv1"))
        elif ours.endswith(".up"):
            weight, bias = with_linear(residual(conv(f"{theirs}2")), *conv(f"{theirs}3"))
        elif ours == "exit.2":
            weight, bias = with_linear(pair(theirs), last_frame())
        else:
            weight, bias = pair(theirs) if f"{theirs}.0.conv3d.weight" in tensors else conv(theirs)
        cosmos[f"{ours}.weight"], cosmos[f"{ours}.bias"] = weight, bias
    return cosmos


def last_frame() -> Tensor:
    """Return the matrix [48, 192] from the channels of the last convolution to the pixels of the last of four frames.

    A channel is indexed by time, row and column of a coarse transform, then of a fine one, low before high, then by colour.
    """
    haar = torch.tensor([[1.0, 1.0], [1.0, -1.0]])  # [position, frequency]
    level = torch.einsum("t,ih,jw->ijthw", haar[1], haar, haar)  # positions i, j; frequencies t, h, w
    return torch.einsum("ijabc,klpqr,xy->xikjlabcpqry", level, level, torch.eye(3)).reshape(48, -1)
