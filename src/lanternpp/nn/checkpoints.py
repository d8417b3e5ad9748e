"""Model folders: `config.json` beside `model.safetensors`, replaced as a whole, read without trust; weights of 8 or 6 bits on disk.

A quantised tensor `x` has a scale for each output channel in the tensor `x.scale`. The fields of a config are a frozen dataclass,
whose annotations are the schema (`lanternpp.util.jsonfile`). Their ranges are far beyond any published model, and small enough that
a bad file cannot exhaust the machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import torch
from annotated_types import Len
from safetensors.torch import save_file
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.nn.files import check_finite, opened, plain
from lanternpp.util.files import replacing, umask, write_text
from lanternpp.util.jsonfile import Between, read_object, validated

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
Store = Literal["float32", "bfloat16", "int8", "int6"]
STORES: tuple[str, ...] = get_args(Store)
SCALE = ".scale"  # suffix of the tensor with the scales of a quantised tensor
SHRINK = [1 - 0.04 * i for i in range(12)]  # shares of a row's range that are tried for 6 bits
OFFSET = 32  # added to signed numbers of 6 bits, which are stored unsigned
T = TypeVar("T")

Width = Annotated[int, Between(1, 1 << 16)]  # channels
Hidden = Annotated[int, Between(1, 1 << 18)]  # channels within a feed-forward layer
Layers = Annotated[int, Between(1, 512)]
Heads = Annotated[int, Between(1, 1024)]
HeadDim = Annotated[int, Between(0, 512)]  # 0: the width shared among the heads
Codes = Annotated[int, Between(1, 1 << 20)]  # of a codebook or of a vocabulary of text
Grid = Annotated[int, Between(1, 128)]  # codes of an image's side
Slots = Annotated[int, Between(1, 4096)]  # of a prompt
Positions = Annotated[int, Between(1, 1 << 24)]
Epsilon = Annotated[float, Between(0, 1)]
Share = Annotated[float, Between(0, 1)]
Words = Annotated[tuple[Annotated[str, Len(0, 200)], ...], Len(0, 1 << 16)]
Stages = Annotated[tuple[Annotated[int, Between(1, 1 << 13)], ...], Len(1, 8)]  # channels, or times them
Blocks = Annotated[int, Between(0, 64)]  # of a stage
StageBlocks = Annotated[tuple[Blocks, ...], Len(1, 8)]


def save(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    store: Store = "float32",
    keep: Collection[str] = (),
) -> None:
    """Write a model folder; a kill at any moment leaves the old model, the new model, or no `config.json`.

    store: the format of floating-point tensors on disk. int8 and int6 are symmetric with one scale per output channel
    (dimension 0) for tensors of two or more dimensions; other tensors, and those named in `keep`, stay float32. A tensor
    whose number of channels is no multiple of four has 8 bits in int6.
    """
    if store not in STORES:
        raise InputError(f"store {store!r} is unknown: choose {', '.join(STORES)}.")
    folder = Path(folder)
    text = json.dumps(dict(config), indent=2, sort_keys=True) + "\n"
    packed = pack(tensors, store, keep)
    target = folder / CONFIG
    if target.exists() and target.read_text(encoding="utf-8") != text:
        target.unlink()  # A kill must not leave new weights beside an old config.
    write_safetensors(folder / WEIGHTS, packed, {"format": "pt"})
    write_text(target, text)


def write_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, replaced as a whole; metadata of several entries has any order. InputError."""
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata)
        temporary.chmod(0o666 & ~umask())  # safetensors makes files that only their owner can read


def load(folder: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the config and the tensors of a model folder, on the CPU, dequantised to float32."""
    folder = Path(folder)
    return load_config(folder), read_safetensors(folder / WEIGHTS)


def load_config(folder: str | Path) -> dict[str, Any]:
    """Read `config.json` of a model folder."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise InputError(f"{path} is missing: {folder} is no model folder, or its training never ended.")
    return read_object(path)


def config_as(kind: type[T], config: Mapping[str, Any], source: Path) -> T:
    """Return `config`, read from `source`, as a dataclass `kind`; keys that are no fields of `kind` are left out.

    Raises InputError where a field without a default is missing or a value cannot be used.
    """
    try:
        return validated("", config, kind)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InputError(f"{source}: config.json: {error}") from None


def read_safetensors(path: str | Path) -> dict[str, Tensor]:
    """Read every tensor of a safetensors file, on the CPU, dequantised to float32."""
    return {name: tensor for name, tensor, _ in read_tensors(Path(path), metas(Path(path)))}


def write_pt(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a `.pt` of tensors and plain containers, replaced as a whole."""
    with replacing(Path(path)) as temporary, temporary.open("wb") as file:
        torch.save(dict(content), file)


def checksum(tensor: Tensor) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a tensor's shape, dtype and bytes."""
    tensor = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def pack(tensors: Mapping[str, Tensor], store: Store, keep: Collection[str] = ()) -> dict[str, Tensor]:
    """Return tensors in the format of `store`, with the scales of quantised tensors; tensors named in `keep` stay float32."""
    packed: dict[str, Tensor] = {}
    addresses: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().to("cpu").contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes or tensor.data_ptr() in addresses:
            tensor = tensor.clone()  # safetensors takes no tensors that share memory.
        addresses.add(tensor.data_ptr())
        if not tensor.is_floating_point():
            packed[name] = tensor
        elif store == "bfloat16" and name not in keep:
            packed[name] = tensor.bfloat16()
        elif store in ("int8", "int6") and name not in keep and tensor.ndim >= 2:
            narrow = store == "int6" and tensor.shape[0] % 4 == 0
            numbers, packed[name + SCALE] = quantised(tensor.float(), 6 if narrow else 8)
            packed[name] = pack_int6(numbers) if narrow else numbers
        else:
            packed[name] = tensor.float()
    return packed


def metas(path: Path) -> dict[str, Tensor]:
    """Return every tensor of a file on the meta device; a quantised tensor and its scale are one tensor of float32.

    No data is read. InputError where a tensor is not plain, or where the shape of a scale does not fit its tensor.
    """
    names, get = opened(path)
    stored = {name: plain(name, get(name), path).to("meta") for name in names}
    scales = {name: stored[name + SCALE] for name in stored if is_quantised(name, stored)}
    for name, scale in scales.items():
        meta = stored[name]
        shape = list(meta.shape)
        if meta.dtype == torch.uint8:
            # Three bytes hold the numbers of four rows.
            shape = [4 * shape[1], *shape[2:]] if len(shape) > 1 and shape[0] == 3 else [0]
        fits = len(meta.shape) > 1 and shape[0] > 0 and list(scale.shape) == shape[:1]
        if not fits or not scale.is_floating_point():
            raise InputError(
                f"{path}: {name} is {tuple(meta.shape)} and its scale {tuple(scale.shape)}, which do not go together: "
                "fetch it again."
            )
        stored[name] = torch.empty(shape, dtype=torch.float32, device="meta")
        del stored[name + SCALE]
    return stored


def read_tensors(
    path: Path, names: Iterable[str]
) -> Iterator[tuple[str, Tensor, tuple[Tensor, Tensor] | None]]:
    """Read the named tensors of a file, one at a time: the name, the tensor, dequantised to float32, and its bits and scale.

    Bits [out, ...] int8 and scale [out] are those of quantised tensors. InputError where a tensor holds NaN or infinity.
    """
    stored_names, get = opened(path)
    for name in names:
        tensor, int8 = get(name), None
        if tensor.dtype in (torch.int8, torch.uint8) and name + SCALE in stored_names:
            int8 = unpack_int6(tensor) if tensor.dtype == torch.uint8 else tensor, get(name + SCALE)
            tensor = dequantised(*int8)
        check_finite(name, tensor, path)
        yield name, tensor, int8


def is_quantised(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a tensor is quantised: it has whole numbers and a scale."""
    return name in tensors and tensors[name].dtype in (torch.int8, torch.uint8) and name + SCALE in tensors


def dequantised(tensor: Tensor, scale: Tensor) -> Tensor:
    """Return a quantised tensor as float32."""
    numbers = unpack_int6(tensor) if tensor.dtype == torch.uint8 else tensor
    return numbers.float() * scale.view(-1, *[1] * (numbers.ndim - 1))


def quantised(tensor: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantise a tensor [C, ...] symmetrically; return [C, ...] int8 and scale [C].

    8 bits span a row's whole range. 6 bits span the share with the least squared error; values outside are clamped.
    """
    rows, max_number = tensor.flatten(1), 2 ** (bits - 1) - 1
    scale = rows.abs().amax(1).clamp_min(1e-12) / max_number

    def nearest(scale: Tensor) -> Tensor:
        return (rows / scale[:, None]).round().clamp(-max_number, max_number)

    if bits < 8:
        candidates = [scale * share for share in SHRINK]
        errors = [(nearest(s) * s[:, None] - rows).square().sum(1) for s in candidates]
        scale = scale * torch.tensor(SHRINK)[torch.stack(errors).argmin(0)]
    return nearest(scale).to(torch.int8).view(tensor.shape), scale


def pack_int6(numbers: Tensor) -> Tensor:
    """Pack numbers of 6 bits [4 C, ...] int8, four numbers in three bytes: [3, C, ...] uint8."""
    a, b, c, d = (numbers.int() + OFFSET).unflatten(0, (-1, 4)).unbind(1)
    return torch.stack([a << 2 | b >> 4, (b & 15) << 4 | c >> 2, (c & 3) << 6 | d]).to(torch.uint8)


def unpack_int6(packed: Tensor) -> Tensor:
    """Unpack the bytes [3, C, ...] of `pack_int6` to numbers [4 C, ...] int8."""
    x, y, z = packed.int().unbind(0)
    numbers = [x >> 2, (x & 3) << 4 | y >> 4, (y & 15) << 2 | z >> 6, z & 63]
    return (torch.stack(numbers, 1) - OFFSET).flatten(0, 1).to(torch.int8)
