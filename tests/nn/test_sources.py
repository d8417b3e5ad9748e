"""Published checkpoints are read into our modules by rules, and tensors that do not fit are named."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.processes import python
from helpers.refusals import rejects
from safetensors.torch import save_file
from torch import Tensor, nn

from lanternpp.nn.decoder import Decoder, DecoderConfig, line_table
from lanternpp.nn.sources import SAME, Rename, Source, blank


class Ours(nn.Module):
    """A fused projection, a norm, and a codebook that stays in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(4, 8, bias=False)
        self.norm = nn.LayerNorm(4, bias=False)
        self.register_buffer("codebook", torch.zeros(5, 2))
        self.register_buffer("rotary_table", torch.ones(3), persistent=False)


RULES = (
    Rename(r"model\.q_proj\.weight", "wqkv.weight", part=(0, 4)),
    Rename(r"model\.k_proj\.weight", "wqkv.weight", part=(4, 6)),
    Rename(r"model\.v_proj\.weight", "wqkv.weight", part=(6, 8)),
    Rename(r"(.*)\.scale", r"\1.weight"),
    Rename(r"book", "codebook", rows=(2, 7)),
)


def upstream() -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"q": (4, 4), "k": (2, 4), "v": (2, 4)}
    tensors = {f"model.{name}_proj.weight": torch.randn(shape) for name, shape in shapes.items()}
    return {**tensors, "norm.scale": torch.randn(4), "book": torch.randn(8, 2), "rope.freqs": torch.ones(2)}


def made() -> Ours:
    with blank():
        ours = Ours()
    ours.rotary_table = torch.ones(3)
    return ours


def filled(path: Path, dtype: torch.dtype = torch.float32) -> Ours:
    ours = made()
    Source.open(path).fill(ours, RULES, dtype, skip=[r"rope\..*"])
    return ours


def write_index(folder: Path, tensors: dict[str, Tensor], suffix: str) -> None:
    names = {name: f"part-{i % 2 + 1}-of-2{suffix}" for i, name in enumerate(tensors)}
    for file in set(names.values()):
        held = {name: tensors[name].contiguous() for name in tensors if names[name] == file}
        save_file(held, folder / file) if suffix == ".safetensors" else torch.save(held, folder / file)
    (folder / f"model{suffix}.index.json").write_text(json.dumps({"weight_map": names}))


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "one.safetensors": lambda f: (save_file(upstream(), f / "one.safetensors"), f / "one.safetensors")[1],
    "folder": lambda f: (save_file(upstream(), f / "model.safetensors"), f)[1],
    "one.pth": lambda f: (torch.save(upstream(), f / "one.pth"), f / "one.pth")[1],
    "trained.pt": lambda f: (
        torch.save({"model": upstream(), "steps": 3, "args": argparse.Namespace(lr=1)}, f / "trained.pt"),
        f / "trained.pt",
    )[1],
    "pytorch_model.bin": lambda f: (torch.save({"state_dict": upstream()}, f / "pytorch_model.bin"), f)[1],
    "beside": lambda f: (
        torch.save(upstream(), f / "pytorch_model.bin"),
        save_file({"codes": torch.ones(2)}, f / "vqgan.safetensors"),
        f,
    )[2],
    "shards": lambda f: (write_index(f, upstream(), ".safetensors"), f)[1],
    "bin shards": lambda f: (write_index(f, upstream(), ".bin"), f / "model.bin.index.json")[1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_fills_the_same_module(layout: str, tmp_path: Path) -> None:
    ours, given = filled(LAYOUTS[layout](tmp_path)), upstream()
    assert torch.equal(ours.wqkv.weight, torch.cat([given[f"model.{x}_proj.weight"] for x in "qkv"]))
    assert torch.equal(ours.norm.weight, given["norm.scale"])
    assert torch.equal(ours.codebook, given["book"][2:7])


def test_parameters_take_the_dtype_and_buffers_keep_theirs(tmp_path: Path) -> None:
    ours = filled(LAYOUTS["trained.pt"](tmp_path), torch.bfloat16)
    assert {ours.wqkv.weight.dtype, ours.norm.weight.dtype} == {torch.bfloat16}
    assert ours.codebook.dtype == ours.rotary_table.dtype == torch.float32


def test_a_config_beside_a_file_names_its_kinds(tmp_path: Path) -> None:
    save_file(upstream(), tmp_path / "model.safetensors")
    assert Source.open(tmp_path).config == {}
    (tmp_path / "config.json").write_text('{"model_type": "x", "architectures": ["XForY"]}')
    assert Source.open(tmp_path / "model.safetensors").kinds == {"x", "XForY"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("norm.scale"), "missing norm.weight"),
        (lambda t: t.pop("model.k_proj.weight"), "wqkv.weight is given 24 of 32 numbers"),
        (lambda t: t.update({"extra.weight": torch.ones(1)}), "unexpected extra.weight"),
        (lambda t: t.update({"norm.scale": torch.ones(7)}), "norm.scale is (7,) where (4,) is expected"),
        (lambda t: t.update({"book": torch.ones(2)}), "book is (2,), which gives (0,) where (5, 2) is"),
        (lambda t: t.update({"book": torch.ones(8, 5, 2)}), "which gives (5, 5, 2) where (5, 2) is expected"),
        (lambda t: t.update({"book": torch.ones(8, 2).int()}), "book holds int32"),
        (lambda t: t.update({"norm.scale": torch.ones(4, dtype=torch.int64)}), "norm.scale holds int64"),
        (
            lambda t: t.update({"norm.scale": torch.ones(4, dtype=torch.complex64)}),
            "norm.scale is no plain tensor of real numbers",
        ),
        (lambda t: t.update({f"x{i}": torch.ones(1) for i in range(14)}), "unexpected x5, and 4 more"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, said: str, tmp_path: Path) -> None:
    tensors = upstream()
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    assert str(tmp_path) in rejects(re.escape(said), filled, tmp_path)


def test_files_that_are_no_checkpoint_are_rejected(tmp_path: Path) -> None:
    def refused(said: str, path: Path = tmp_path) -> None:
        message = rejects(re.escape(said), lambda: Source.open(path).metas)
        assert str(path) in message

    refused("is missing", tmp_path / "none")
    (tmp_path / "state.pt").write_bytes(b"of a training")
    refused("or its training never ended")
    (tmp_path / "x.txt").write_text("words")
    refused("should end in .safetensors", tmp_path / "x.txt")
    torch.save(upstream(), tmp_path / "x.pt")
    (tmp_path / "x.pt").write_bytes((tmp_path / "x.pt").read_bytes()[:60])
    refused("truncated")
    write_index(tmp_path, upstream(), ".safetensors")
    (tmp_path / "part-2-of-2.safetensors").unlink()
    refused("shards that are missing: part-2-of-2.safetensors")
    (tmp_path / "model.safetensors.index.json").unlink()
    refused("without their index.json")
    (tmp_path / "part-1-of-2.safetensors").unlink()
    for name in "ab":
        save_file(upstream(), tmp_path / f"{name}.safetensors")
    refused("(a.safetensors, b.safetensors): name one")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a": 5}, "no index of shards"),
        ({"a": ["x"]}, "no index of shards"),
        ({"a": "x" * 5000}, "no index of shards"),
        ({}, "no index of shards"),
        ([], "no index of shards"),
        ({"a": "/etc/passwd"}, "which is not in its folder"),
        ({"a": "../model.safetensors"}, "which is not in its folder"),
    ],
)
def test_an_index_names_files_beside_it(files: object, said: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    rejects(said, Source.open, tmp_path)


def test_very_long_names_are_rejected(tmp_path: Path) -> None:
    save_file({"n" * 600: torch.ones(1)}, tmp_path / "model.safetensors")
    rejects("names of up to 600 characters", lambda: Source.open(tmp_path).metas)


PEAK = """
import re, sys, torch
from pathlib import Path
from torch import nn
from lanternpp.nn.sources import SAME, Source, blank

def peak():  # getrusage would begin at the peak of the process that started this one
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])

with blank():
    net = nn.ModuleList(nn.Embedding(1024, 4096, dtype=torch.bfloat16) for _ in range(16))
torch.zeros(8).bfloat16()
before = peak()
Source.open(Path(sys.argv[1])).fill(net, [SAME], torch.bfloat16)
size = sum(p.nbytes for p in net.parameters())
assert all(p[0, 0] == p[-1, -1] == i for i, p in enumerate(net.parameters()))
assert "torch._dynamo" not in sys.modules, "seconds of imports that reading needs nothing of"
assert size == 128 << 20
print(peak() - before - size)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize("name", ["big.safetensors", "big.pt"])
def test_loading_takes_little_more_memory_than_the_weights(name: str, tmp_path: Path) -> None:
    big = {f"{i}.weight": torch.full((1024, 4096), float(i), dtype=torch.bfloat16) for i in range(16)}
    save_file(big, tmp_path / name) if name.endswith("s") else torch.save({"model": big}, tmp_path / name)
    done = python("-c", PEAK, tmp_path / name)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 80 << 20, "64 MB are read at a time"


@pytest.mark.parametrize("split", [False, True])
def test_blocks_are_packed_before_later_ones_are_read(
    split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DecoderConfig(16, layers=12, heads=2, hidden=32)
    table = line_table(4, 8).float()
    plain = Decoder(config, table)
    tensors = dict(plain.state_dict())
    norms = [name for name in tensors if name.endswith("attention_norm.weight")]  # one for all blocks
    stored = {"norms": tensors[norms[0]], **{name: tensors[name] for name in tensors if name not in norms}}
    if split:
        write_index(tmp_path, stored, ".safetensors")  # every block lies in two files
    else:
        save_file(stored, tmp_path / "model.safetensors")
    with blank():
        read = Decoder(config, table)
    source, left = Source.open(tmp_path), []

    def pack(block: nn.Module, dtype: str) -> None:
        assert dtype == "bfloat16" and not any(p.is_meta for p in block.parameters())
        block.w2 = nn.Identity()  # as a packed layer, it has no parameters
        left.append(sum(p.is_meta for b in read.blocks for p in b.parameters()))

    monkeypatch.setattr("lanternpp.nn.sources.backend", lambda: SimpleNamespace(pack=pack))
    source.packing = "bfloat16"
    source.fill(read, [SAME, *(Rename("norms", name) for name in norms)], torch.float32)
    per_block = len(list(plain.blocks[0].parameters()))
    assert len(left) == 12
    assert left == [per_block * (11 - done) for done in range(12)], "block by block"
    assert all(isinstance(block.w2, nn.Identity) for block in read.blocks)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read.state_dict().items())
