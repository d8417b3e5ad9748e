"""Model folders: `config.json` beside `model.safetensors`, written whole, read without trust."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.nn.pickled import read_pt as read_pt
from lanternpp.nn.shards import metas, read_tensors
from lanternpp.nn.stores import STORES, Store, check_scales, is_scale, pack
from lanternpp.util.files import replacing, umask, write_text
from lanternpp.util.jsonfile import read_object

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


def save(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    store: Store = "float32",
    keep: Collection[str] = (),
) -> None:
    """Write a model folder; a kill at any moment leaves the old model, the new one, or no `config.json`.

    `store` is how floating-point tensors lie on disk. int8 and int6 are symmetric with one scale per output channel
    (dimension 0) for tensors of two or more dimensions; the rest, and the names in `keep`, stay float32. Where the
    channels are no multiple of four int6 is int8.
    """
    if store not in STORES:
        raise InputError(f"store {store!r} is unknown: choose {', '.join(STORES)}.")
    folder = Path(folder)
    text = json.dumps(dict(config), indent=2, sort_keys=True) + "\n"
    packed = pack(tensors, store, keep)
    target = folder / CONFIG
    if target.exists() and target.read_text(encoding="utf-8") != text:
        target.unlink()  # never new weights under an old config
    with replacing(folder / WEIGHTS) as temporary:
        save_file(packed, temporary, metadata={"format": "pt", "store": store})
        temporary.chmod(0o666 & ~umask())  # safetensors writes for the owner alone
    write_text(target, text)


def load(folder: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the tensors of a model folder, on the CPU, fewer bits undone to float32."""
    folder = Path(folder)
    return load_config(folder), read_safetensors(folder / WEIGHTS)


def load_config(folder: str | Path) -> dict[str, Any]:
    """`config.json` of a model folder."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise InputError(f"{path} is missing: {folder} is no model folder, or its training never ended.")
    return read_object(path)


def read_safetensors(path: str | Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, on the CPU, fewer bits undone to float32."""
    path = Path(path)
    # of features of text, the names are texts
    found = metas(path, any_names=True)
    check_scales(found, path)
    named = [name for name in found if not is_scale(name, found)]
    return {name: tensor for name, tensor, _ in read_tensors(path, named, found)}


def write_pt(path: str | Path, content: Mapping[str, Any]) -> None:
    """A `.pt` of tensors and plain containers, replaced as a whole."""
    with replacing(Path(path)) as temporary, temporary.open("wb") as file:
        torch.save(dict(content), file)


def checksum(tensor: Tensor) -> str:
    """First 16 hexadecimal digits of the SHA-256 of a tensor's shape, dtype and bytes."""
    tensor = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
