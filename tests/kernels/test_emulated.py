"""Kernels, and the choice of them, on other CPUs in QEMU: a call is recorded here, repeated there and compared."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.processes import SECONDS
from kernels.compiling import locked, setup
from torch import Tensor

from lanternpp.engine.cache import Cache
from lanternpp.kernels import loading
from lanternpp.kernels.binding import Struct
from lanternpp.kernels.kinds import KINDS, choose
from lanternpp.kernels.packing import KernelDecoder
from lanternpp.nn.decoder import Decoder, DecoderConfig, grid_table

HARNESS = Path(__file__).with_name("harness.c")
CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
ARM = [name for name, (needs, _) in KINDS.items() if "aarch64" in needs]

cross = pytest.mark.skipif(
    not (shutil.which(CROSS) and shutil.which(EMULATOR)), reason=f"no {CROSS} or no {EMULATOR}"
)


def place(holder: Any) -> tuple[int, int]:
    """The address of a tensor, structure or array, and its bytes."""
    if isinstance(holder, Tensor):
        return holder.data_ptr(), holder.nbytes
    return ctypes.addressof(holder), ctypes.sizeof(holder)


class Recorder:
    """A library that keeps what `decode` is called with, and what it has written; layers: those of the decoder."""

    def __init__(self, library: Any, layers: list[Any]):
        self.library, self.layers = library, layers

    def decode(self, work: Any, scratch: Any, threads: int) -> int:
        """The call. `harness.c` reads `text`; the last call has the scratch memory that it needs."""
        self.numbers: dict[int, int] = {}
        self.reached: list[Any] = []
        self.pointers: list[tuple[int, int, int, int]] = []  # region and offset, and where that points
        given = [(self.reach(each._obj), 0) for each in (work, scratch)]
        self.before = self.contents()
        parts = [struct.pack("q", len(self.reached))]
        for holder, content in zip(self.reached, self.before, strict=True):
            parts += [struct.pack("qq", len(content), place(holder)[0] % 64), content]
        for rows in (self.pointers, [*given, (-1, threads)]):
            parts.append(struct.pack("q", len(rows)))
            parts += [struct.pack(f"{len(row)}q", *row) for row in rows]
        self.text = b"".join(parts)
        result: int = self.library.decode(work, scratch, threads)
        self.written = self.contents()
        return result

    def contents(self) -> list[bytes]:
        """Of all regions."""
        return [ctypes.string_at(*place(holder)) for holder in self.reached]

    def reach(self, holder: Any) -> int:
        """The number of a region, with all that it points to."""
        address, number = place(holder)[0], len(self.reached)
        if address in self.numbers:
            return self.numbers[address]
        self.numbers[address] = number
        self.reached.append(holder)
        if isinstance(holder, Struct):
            self.follow(holder, number, 0)
        elif isinstance(holder, ctypes.Array) and issubclass(holder._type_, Struct):
            for i, layer in enumerate(self.layers):
                self.follow(layer, number, i * ctypes.sizeof(layer))
        return number

    def follow(self, work: Struct, number: int, begin: int) -> None:
        """The pointers of a structure that begins there."""
        for name, value in work.alive.items():
            offset = begin + getattr(type(work), name).offset
            if work.marks[name][0] and value is not None:
                self.pointers.append((number, offset, self.reach(value), 0))
            elif isinstance(value, Struct):
                self.follow(value, number, offset)

    def compare(self, text: bytes, share: float) -> None:
        """Compare with what another library has written, up to this share in the mean; scratch memory is not compared."""
        compared, begin = 0, 0
        for holder, before, mine in zip(self.reached, self.before, self.written, strict=True):
            theirs = text[begin : begin + len(mine)]
            begin += len(mine)
            if isinstance(holder, Tensor) and holder.dtype in (torch.bfloat16, torch.float32):
                a, b = (torch.frombuffer(bytearray(x), dtype=holder.dtype).double() for x in (mine, theirs))
                assert (a - b).abs().max() <= 0.03 * a.abs().max()
                assert (a - b).abs().mean() <= share * a.abs().mean()
                compared += mine != before
        assert begin == len(text) and compared


def library_without_weight_zero() -> ctypes.CDLL:
    """The best kernels here that read weights in 8 bits without something added to them, as those for ARM do."""
    files = loading.installed()
    for kind in choose(loading.features(loading.LIBRARIES / files["cpu"])):
        found = loading.library(kind) if kind in files else None
        if found is not None and not found.number_of(b"weight zero"):
            return found
    pytest.skip("no such kernels here")


@torch.inference_mode()
def recorded_pass(kept: str) -> Recorder:
    """A chain of 5 nodes in two rows, after a prefill of 3 slots."""
    torch.manual_seed(0)
    config = DecoderConfig(64, 2, 4, 96)
    network = (
        Decoder(config, grid_table(3, 8, config.head_dim).float()).bfloat16().eval().requires_grad_(False)
    )
    found = library_without_weight_zero()
    cache, x = Cache(config, 2, 10, torch.zeros(0).bfloat16()), torch.randn(2, 8, 64).bfloat16()
    network.native = KernelDecoder(network.stack(), network.rotary_table, found, kept)
    prompt = cache.rows(torch.arange(2), torch.zeros(2, dtype=torch.int64), 3)
    network(x[:, :3], prompt.nodes(), prompt)
    network.native.library = recorder = Recorder(found, network.native.layer_structs)
    mask = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, -1, -1)
    network(x[:, 3:], cache.nodes(torch.arange(5).expand(2, -1), mask), cache)
    return recorder


@pytest.fixture(scope="module")
def arm(compiled: Path) -> Path:
    """A folder with the library of every kind of ARM and the harness, made by the first process that asks."""
    folder, building = compiled / "arm", setup()
    harness = folder / "harness"
    with locked(folder), pytest.MonkeyPatch.context() as patch:
        if harness.exists():
            return folder
        patch.setenv("CC", CROSS)
        patch.setenv("_PYTHON_HOST_PLATFORM", "linux-aarch64")
        patch.setattr(building, "OPTIONS", ("-O1", *building.OPTIONS[1:]))  # compiled in a third of the time
        said = building.build(folder / "lib")
        assert len(said) == 1, said
        command = [CROSS, "-O1", "-fopenmp", HARNESS, "-ldl", "-Wl,--no-as-needed", "-o", harness]
        subprocess.run(list(map(str, command)), check=True, timeout=SECONDS)
    return folder


def emulate(cpu: str, folder: Path, *arguments: object) -> str:
    command = [EMULATOR, "-L", "/usr/aarch64-linux-gnu", "-cpu", cpu, folder / "harness", *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def library_of(folder: Path, kind: str) -> Path:
    (found,) = (folder / "lib").glob(f"{kind}-????????????????.so")
    return found


@cross
@pytest.mark.skipif(loading.library() is None, reason="no kernels here")
@pytest.mark.parametrize("kept", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("kind", ARM)
def test_a_pass_on_arm_is_that_of_this_cpu(arm: Path, kind, kept: str, tmp_path: Path):
    recorder = recorded_pass(kept)
    (tmp_path / "in").write_bytes(recorder.text)
    emulate("max", arm, library_of(arm, kind), "decode", tmp_path / "in", tmp_path / "out")
    # Inputs have 16 bits here and 8 on a CPU with products of 8 bits.
    share = 0.01 if kept != "bfloat16" and "dotprod" in kind else 0.004
    recorder.compare((tmp_path / "out").read_bytes(), share)


@cross
@pytest.mark.parametrize(("cpu", "kind"), [("cortex-a53", "armv8-a"), ("cortex-a76", "armv8.2-dotprod")])
def test_the_features_of_an_arm_cpu(arm: Path, cpu: str, kind: str):
    said = emulate(cpu, arm, library_of(arm, "cpu"), "features")
    assert choose(set(said.split()))[0] == kind


@pytest.mark.skipif(
    not shutil.which("qemu-x86_64") or os.uname().machine != "x86_64", reason="no qemu-x86_64"
)
@pytest.mark.parametrize(
    ("cpu", "kinds"), [("Nehalem", []), ("Haswell", ["x86-64-v3"]), ("Skylake-Server", ["x86-64-v3"])]
)
def test_the_features_of_older_cpus_of_intel(cpu: str, kinds: list[str], tmp_path: Path):
    """QEMU 7.2 emulates no AVX-512, so the kernels for it are not chosen for Skylake-Server."""
    if not (loading.LIBRARIES / "manifest.json").is_file():
        pytest.skip("no kernels here")
    subprocess.run(["cc", str(HARNESS), "-ldl", "-o", str(tmp_path / "harness")], check=True, timeout=SECONDS)
    library = loading.LIBRARIES / loading.installed()["cpu"]
    command = ["qemu-x86_64", "-cpu", cpu, str(tmp_path / "harness"), str(library), "features"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS)
    assert choose(set(done.stdout.split())) == kinds
