"""Pictures as a model's tokenizer draws them again, so that a judge knows its brush as well as photos."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lanternpp.devices import half_width
from lanternpp.errors import InputError
from lanternpp.nn.checkpoints import checksum, digest, replacing
from lanternpp.training.codes import tokenizer_of
from lanternpp.training.data import Pictures, generator, spread
from lanternpp.training.pictures import to_bytes
from lanternpp.training.report import Report
from lanternpp.vq.folder import read_vq
from lanternpp.vq.model import VQ, channels_last


def redrawn(
    model: Path, train: Pictures, val: Pictures, count: int, device: torch.device
) -> tuple[Tensor, Pictures, Pictures]:
    """(index [M] of training pictures, those drawn again, all validation pictures drawn again).

    M is at most `count`, evenly over the split. What is drawn is kept in `model/codes` for the next run.
    Raises InputError where `model` has no tokenizer.
    """
    vq = read_vq(tokenizer_of(model), torch.bfloat16 if half_width(device) else torch.float32)
    index = spread(len(train), count) if count else torch.empty(0, dtype=torch.int64)
    parts = [checksum(tensor.float()) for tensor in vq.weights().values()]
    key = digest([*parts, train.key, val.key, str(len(train)), str(len(index))])
    path = model / "codes" / f"redrawn-{key}.safetensors"
    if not path.is_file():
        write(path, channels_last(vq).to(device), train, val, index)
    try:
        with safe_open(path, framework="pt") as file:
            return index, whole(file.get_tensor("train"), key), whole(file.get_tensor("val"), key)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} cannot be read ({error}): delete it to draw them again.") from None


def whole(pixels: Tensor, key: str) -> Pictures:
    """Squares [M, 3, H, H] uint8 as pictures."""
    sizes = torch.tensor(pixels.shape[2:]).expand(len(pixels), 2)
    return Pictures(pixels, sizes, (), (), key, pixels.shape[2])


def write(path: Path, vq: VQ, train: Pictures, val: Pictures, index: Tensor, batch: int = 32) -> None:
    """Random crops of the training pictures index [M] and the centres of the others, drawn again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    device, size = vq.codebook.device, vq.config.size
    jobs = {"train": (train.to(device), index), "val": (val.to(device), torch.arange(len(val)))}
    total = len(index) + len(val)
    report = Report("redrawn", path.parent)
    report.say(
        f"drawing {total} pictures again with the tokenizer, {total * 3 * size**2 / 2**20:.0f} MiB in {path}"
    )
    began, tally = time.monotonic(), 0
    tensors = {
        name: torch.empty(len(which), 3, size, size, dtype=torch.uint8) for name, (_, which) in jobs.items()
    }
    with report.bar(0.0):
        for name, (pictures, which) in jobs.items():
            for start in range(0, len(which), batch):
                part = which[start : start + batch]
                if name == "train":
                    images = pictures.random(generator(0, start // batch), part)
                else:
                    images = pictures.centre(part)
                again = to_bytes(vq.decode(vq.encode(images))).permute(0, 3, 1, 2)
                tensors[name][start : start + batch] = again
                tally += len(part)
                report.advance(time.monotonic() - began, tally / total, f"{tally}/{total}")
    with replacing(path) as temporary:
        save_file(tensors, temporary)
