"""The decoder of NVIDIA's discrete video tokenizer (Cosmos-1.0-Tokenizer-DV8x16x16, arXiv 2501.03575) for single pictures.

A picture is a video of one frame, and the network reads the first frame again in the place of the frames before it. So a convolution
over time is a 1x1 convolution with the sum of its weights, attention over time is a linear layer, and the picture is the last of the
four frames of the inverse Haar transform. These layers are folded into the neighbouring convolutions, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lanternpp.models.vq.vqgan import VQGAN, VQGANConfig, norm
from lanternpp.nn.checkpoints import config_as
from lanternpp.nn.files import input_errors
from lanternpp.nn.sources import SAME, Source, blank

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
    ours = source.config.get("kind") == Cosmos.kind
    shape = source.config | {"spatial": False} if ours else shape_of(source, codebook)
    config = config_as(VQGANConfig, shape, source.path)
    with blank(source.path):
        vq = Cosmos(config)
    if ours:
        source.fill(vq, [SAME], dtype)
        return vq.prepare_for_inference()
    with input_errors(f"{source.path} is no decoder of Cosmos"):
        tensors = folded(dict(source.tensors(source.metas)), config.blocks)
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


def folded(tensors: Mapping[str, Tensor], blocks: int) -> dict[str, Tensor]:
    """Turn tensors in NVIDIA's layout into those of a `Cosmos`, in float32. Raise LookupError or RuntimeError if they do not fit."""
    cosmos: dict[str, Tensor] = {}

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

    def store(name: str, weight: Tensor, bias: Tensor) -> None:
        cosmos[f"{name}.weight"], cosmos[f"{name}.bias"] = weight, bias

    def scale(theirs: str, ours: str) -> None:
        store(ours, tensors[f"{theirs}.norm.weight"], tensors[f"{theirs}.norm.bias"])

    def block(theirs: str, ours: str) -> None:
        for n in (1, 2):
            scale(f"{theirs}.norm{n}", f"{ours}.norm{n}")
            store(f"{ours}.conv{n}", *pair(f"{theirs}.conv{n}"))
        if f"{theirs}.nin_shortcut.conv3d.weight" in tensors:
            store(f"{ours}.beside", *conv(f"{theirs}.nin_shortcut"))

    store("expand", *conv("post_quant_conv"))
    store("entry", *pair("decoder.conv_in"))
    block("decoder.mid.block_1", "middle.0")
    block("decoder.mid.block_2", "middle.3")
    space, time = "decoder.mid.attn_1.0", "decoder.mid.attn_1.1"
    weights, biases = zip(*(conv(f"{space}.{part}") for part in "qkv"), strict=True)
    store("middle.1.qkv", torch.cat(weights), torch.cat(biases))
    store("middle.1.out", *conv(f"{space}.proj_out"))
    store("middle.2.out", *with_linear(conv(f"{time}.v"), *conv(f"{time}.proj_out")))
    scale(f"{space}.norm", "middle.1.norm")
    scale(f"{time}.norm", "middle.2.norm")
    for i in range(3):
        theirs, ours, up = f"decoder.up.{2 - i}", f"stages.{i}", f"decoder.up.{2 - i}.upsample"
        for j in range(blocks):
            block(f"{theirs}.block.{j}", f"{ours}.blocks.{j}")
        if i == 1:
            store(f"{ours}.blocks.{blocks}", *residual(conv(f"{up}.conv1")))
        if i < 2:
            store(f"{ours}.up", *with_linear(residual(conv(f"{up}.conv2")), *conv(f"{up}.conv3")))
    scale("decoder.norm_out", "exit.0")
    store("exit.2", *with_linear(pair("decoder.conv_out"), last_frame()))
    return cosmos


def last_frame() -> Tensor:
    """Return the matrix [48, 192] from the channels of the last convolution to the pixels of the last of four frames.

    A channel is indexed by time, row and column of a coarse transform, then of a fine one, low before high, then by colour.
    """
    haar = torch.tensor([[1.0, 1.0], [1.0, -1.0]])  # [position, frequency]
    level = torch.einsum("t,ih,jw->ijthw", haar[1], haar, haar)  # positions i, j; frequencies t, h, w
    return torch.einsum("ijabc,klpqr,xy->xikjlabcpqry", level, level, torch.eye(3)).reshape(48, -1)
