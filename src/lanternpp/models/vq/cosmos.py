"""The decoder of NVIDIA's discrete video tokenizer (Cosmos-1.0-Tokenizer-DV8x16x16, arXiv 2501.03575) for single pictures.

A picture is a video of one frame, and before the first frame the network sees that frame again. So a convolution over time is a
1x1 convolution with the sum of its weights, attention over time is a linear layer, and only the last of the four frames that the
inverse Haar transform makes is the picture. All of these are folded into the convolutions beside them, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lanternpp.models.vq.vqgan import VQGAN, VQGANConfig, norm
from lanternpp.nn.checkpoints import config_as
from lanternpp.nn.files import wrong_file
from lanternpp.nn.sources import SAME, Source, blank

Conv = tuple[Tensor, Tensor]  # weight [out, in, h, w] and bias [out]


class OverTime(nn.Module):
    """Attention over the time of one frame: a linear layer, added to its input."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm, self.out = norm(channels), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> the same shape."""
        return x + self.out(self.norm(x))


class Cosmos(VQGAN):
    """Codes to pixels, 4 x 4 by a place of the last convolution; every norm is over all channels of a frame."""

    kind = "cosmos"

    def __init__(self, config: VQGANConfig):
        super().__init__(config)
        widths = [config.channels * multiple for multiple in config.multiples]
        self.middle.insert(2, OverTime(widths[-1]))
        for stage in list(self.stages)[1:2]:  # which would double the number of frames
            stage.blocks.append(nn.Conv2d(widths[-2], widths[-2], 1))  # type: ignore[operator,union-attr]
        pixels = nn.Conv2d(widths[0], 48, 3, padding=1), nn.PixelShuffle(4)
        self.exit = nn.Sequential(norm(widths[0]), nn.SiLU(), *pixels)
        for module in self.modules():
            if isinstance(module, nn.GroupNorm):
                module.num_groups = 1


def read_cosmos(source: Source, book: Tensor, dtype: torch.dtype) -> VQGAN:
    """The decoder in `source`, NVIDIA's weights by the names of `decoder.jit` or one of ours, for codes at `book` [V, C]."""
    ours = source.config.get("kind") == Cosmos.kind
    shape = source.config | {"spatial": False} if ours else shape_of(source, book)
    config = config_as(VQGANConfig, shape, source.path)
    with blank(source.path):
        vq = Cosmos(config)
    if ours:
        source.fill(vq, [SAME], dtype)
        return vq.prepare_for_inference()
    with wrong_file(f"{source.path} is no decoder of Cosmos"):
        found = folded(dict(source.tensors(source.metas)), config.blocks)
        kept = {name: x.to(dtype) for name, x in found.items()} | {"codebook": book.float()}
        vq.load_state_dict(kept, assign=True)
    return vq.prepare_for_inference()


def shape_of(source: Source, book: Tensor) -> dict[str, object]:
    """The fields of a published decoder's shape, from its tensors. InputError."""
    widths = [source.shape(f"decoder.up.{i}.block.0.conv1.1.conv3d.weight", 5)[0] for i in range(3)]
    return {
        "codes": len(book),
        "dim": book.shape[1],
        "channels": widths[0],
        "multiples": tuple(width // widths[0] for width in widths),
        "blocks": source.layers(r"decoder\.up\.0\.block\."),
        "latent": source.shape("post_quant_conv.conv3d.weight", 5)[0],
        "attention": False,
        "unit": False,
    }


def folded(tensors: Mapping[str, Tensor], blocks: int) -> dict[str, Tensor]:
    """Tensors in NVIDIA's layout -> those of a `Cosmos`, in float32. LookupError or RuntimeError where they do not fit."""
    made: dict[str, Tensor] = {}

    def conv(name: str) -> Conv:  # of one frame, seen at all times
        return tensors[f"{name}.conv3d.weight"].float().sum(2), tensors[f"{name}.conv3d.bias"].float()

    def then(conv: Conv, weight: Tensor, bias: Tensor | float = 0.0) -> Conv:  # and a linear layer after it
        return torch.tensordot(weight.flatten(1), conv[0], 1), weight.flatten(1) @ conv[1] + bias

    def pair(name: str) -> Conv:
        return then(conv(f"{name}.0"), *conv(f"{name}.1"))

    def added(conv: Conv) -> Conv:  # to its input
        conv[0][:, :, conv[0].shape[-2] // 2, conv[0].shape[-1] // 2] += torch.eye(len(conv[0]))
        return conv

    def put(name: str, weight: Tensor, bias: Tensor) -> None:
        made[f"{name}.weight"], made[f"{name}.bias"] = weight, bias

    def scale(theirs: str, ours: str) -> None:
        put(ours, tensors[f"{theirs}.norm.weight"], tensors[f"{theirs}.norm.bias"])

    def block(theirs: str, ours: str) -> None:
        for n in (1, 2):
            scale(f"{theirs}.norm{n}", f"{ours}.norm{n}")
            put(f"{ours}.conv{n}", *pair(f"{theirs}.conv{n}"))
        if f"{theirs}.nin_shortcut.conv3d.weight" in tensors:
            put(f"{ours}.beside", *conv(f"{theirs}.nin_shortcut"))

    put("expand", *conv("post_quant_conv"))
    put("entry", *pair("decoder.conv_in"))
    block("decoder.mid.block_1", "middle.0")
    block("decoder.mid.block_2", "middle.3")
    space, time = "decoder.mid.attn_1.0", "decoder.mid.attn_1.1"
    weights, biases = zip(*(conv(f"{space}.{part}") for part in "qkv"), strict=True)
    put("middle.1.qkv", torch.cat(weights), torch.cat(biases))
    put("middle.1.out", *conv(f"{space}.proj_out"))
    put("middle.2.out", *then(conv(f"{time}.v"), *conv(f"{time}.proj_out")))
    scale(f"{space}.norm", "middle.1.norm")
    scale(f"{time}.norm", "middle.2.norm")
    for i in range(3):
        theirs, ours = f"decoder.up.{2 - i}", f"stages.{i}"
        up = f"{theirs}.upsample"
        for j in range(blocks):
            block(f"{theirs}.block.{j}", f"{ours}.blocks.{j}")
        if i == 1:
            put(f"{ours}.blocks.{blocks}", *added(conv(f"{up}.conv1")))
        if i < 2:
            put(f"{ours}.up", *then(added(conv(f"{up}.conv2")), *conv(f"{up}.conv3")))
    scale("decoder.norm_out", "exit.0")
    put("exit.2", *then(pair("decoder.conv_out"), last_frame()))
    return made


def last_frame() -> Tensor:
    """[48, 192] from the channels of the last convolution to the pixels of the last of four frames.

    Channels are time, row and column of a coarse transform, then of a fine one, then the colour; low before high.
    """
    haar = torch.tensor([[1.0, 1.0], [1.0, -1.0]])  # by place and frequency
    level = torch.einsum("t,ih,jw->ijthw", haar[1], haar, haar)
    return torch.einsum("ijabc,klpqr,xy->xikjlabcpqry", level, level, torch.eye(3)).reshape(48, -1)
