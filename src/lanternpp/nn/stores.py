"""Quantised weights on disk: 8 or 6 bits a number, with a scale per output channel."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from lanternpp.errors import InputError

Store = Literal["float32", "bfloat16", "int8", "int6"]
STORES: tuple[str, ...] = get_args(Store)
SCALE = ".scale"  # suffix of the tensor with the scales of a quantised tensor
SHRINK = [1 - 0.04 * i for i in range(12)]  # shares of a row's range that are tried for 6 bits
OFFSET = 32  # makes 6 bits unsigned


def pack(tensors: Mapping[str, Tensor], store: Store, keep: Collection[str] = ()) -> dict[str, Tensor]:
    """Tensors as they lie on disk; `x.scale` stands beside an `x` of fewer bits. Those named in `keep` stay float32."""
    packed: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().to("cpu").contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes or tensor.data_ptr() in seen:
            tensor = tensor.clone()  # a part of another, or another's double: safetensors wants neither
        seen.add(tensor.data_ptr())
        if not tensor.is_floating_point():
            packed[name] = tensor
        elif store == "bfloat16" and name not in keep:
            packed[name] = tensor.bfloat16()
        elif store in ("int8", "int6") and name not in keep and tensor.ndim >= 2:
            narrow = store == "int6" and tensor.shape[0] % 4 == 0
            whole, packed[name + SCALE] = quantised(tensor.float(), 6 if narrow else 8)
            packed[name] = pack_int6(whole) if narrow else whole
        else:
            packed[name] = tensor.float()
    return packed


def unpack(packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `pack`'s fewer bits; other tensors keep their dtype."""
    return {
        name: restored(tensor, packed[name + SCALE]) if scaled(name, packed) else tensor
        for name, tensor in packed.items()
        if not is_scale(name, packed)
    }


def scaled(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a tensor is one of fewer bits, whose scale stands beside it."""
    return name in tensors and tensors[name].dtype in (torch.int8, torch.uint8) and name + SCALE in tensors


def is_scale(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a tensor is the scale of another."""
    return name.endswith(SCALE) and scaled(name.removesuffix(SCALE), tensors)


def check_scales(tensors: Mapping[str, Tensor], source: Path) -> None:
    """InputError where the shape of a scale does not fit its tensor; values are not checked."""
    for name, tensor in tensors.items():
        if not scaled(name, tensors):
            continue
        scale, narrow = tensors[name + SCALE], tensor.dtype == torch.uint8
        rows = 0 if tensor.ndim < 2 else 4 * tensor.shape[1] if narrow else tensor.shape[0]
        if (
            not rows
            or (narrow and len(tensor) != 3)
            or scale.shape != (rows,)
            or not scale.is_floating_point()
        ):
            raise InputError(
                f"{source}: {name} is {tuple(tensor.shape)} and its scale {tuple(scale.shape)}, which do not go together: "
                "fetch it again."
            )


def restored(tensor: Tensor, scale: Tensor) -> Tensor:
    """The float32 tensor that one of fewer bits stands for."""
    whole = unpack_int6(tensor) if tensor.dtype == torch.uint8 else tensor
    return whole.float() * scale.view(-1, *[1] * (whole.ndim - 1))


def restored_meta(meta: Tensor) -> Tensor:
    """On the meta device: the float32 tensor that one of fewer bits stands for."""
    shape = meta.shape
    if meta.dtype == torch.uint8:
        shape = torch.Size([4 * shape[1], *shape[2:]])
    return torch.empty(shape, dtype=torch.float32, device="meta")


def quantised(tensor: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """([C, ...] int8, scale [C]): symmetric, a scale for each of dimension 0.

    8 bits span a row's whole range. 6 bits span the share of it with the least squared error; values beyond are clamped.
    """
    rows, most = tensor.flatten(1), 2 ** (bits - 1) - 1
    full = rows.abs().amax(1).clamp_min(1e-12) / most
    if bits == 8:
        return (rows / full[:, None]).round().to(torch.int8).view(tensor.shape), full
    errors = torch.stack([squared_error(rows, full * share, most) for share in SHRINK])
    scale = full * torch.tensor(SHRINK)[errors.argmin(0)]
    return (rows / scale[:, None]).round().clamp(-most, most).to(torch.int8).view(tensor.shape), scale


def squared_error(rows: Tensor, scale: Tensor, most: int) -> Tensor:
    """Squared error [C] of rows [C, N] as whole numbers up to `most` times a scale [C]."""
    near = (rows / scale[:, None]).round().clamp(-most, most) * scale[:, None]
    return (near - rows).square().sum(1)


def pack_int6(whole: Tensor) -> Tensor:
    """Numbers of 6 bits [4 C, ...] int8 -> four of them in three bytes: [3, C, ...] uint8."""
    a, b, c, d = (whole.int() + OFFSET).unflatten(0, (-1, 4)).unbind(1)
    return torch.stack([a << 2 | b >> 4, (b & 15) << 4 | c >> 2, (c & 3) << 6 | d]).to(torch.uint8)


def unpack_int6(packed: Tensor) -> Tensor:
    """Undo `pack_int6`."""
    x, y, z = packed.int().unbind(0)
    four = [x >> 2, (x & 3) << 4 | y >> 4, (y & 15) << 2 | z >> 6, z & 63]
    return (torch.stack(four, 1) - OFFSET).flatten(0, 1).to(torch.int8)
