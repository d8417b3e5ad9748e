"""The kernels as this CPU runs them, and as CPUs with fewer instructions would, or with more, which are emulated."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels.compiling import locked, setup

from lanternpp import Pipeline
from lanternpp.kernels import loading
from lanternpp.kernels.kinds import KINDS, choose

EMULATION = ("-include", str(Path(__file__).with_name("emulated.h")))
MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
# A kind of CPU, and further options of the compiler.
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: (name, ()) for name, (needs, _) in KINDS.items() if MACHINE in needs},
    "emulated bfloat16": ("avx512-vnni", EMULATION),
    "emulated tiles": ("avx512-vnni", (*EMULATION, "-DTILES")),
}
NATIVE = {"emulated bfloat16": "avx512-bf16", "emulated tiles": "amx"}


@pytest.fixture(scope="session")
def nature() -> Pipeline:
    """The shipped model in bfloat16, by the installed kernels."""
    return Pipeline.from_pretrained("nature-128", device="cpu", dtype="bfloat16")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for libraries that all processes of this test run share."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if base.name.startswith("popen-") else base) / "kernels"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture(scope="module", params=CASES)
def library(request: pytest.FixtureRequest, compiled: Path) -> Iterator[object]:
    """The installed kernels where they are of these sources, else compiled now."""
    kind, more = CASES[request.param]
    building, there = setup(), loading.LIBRARIES
    manifest = json.loads((there / "manifest.json").read_text())
    files = manifest["libraries"]
    able = choose(loading.features(there / files["cpu"]))
    if kind not in able or NATIVE.get(request.param) in able:
        pytest.skip(f"this CPU is none of {kind}, or has what is emulated")
    if not more and kind in files and manifest["sources"] == building.digest(building.SOURCES):
        yield loading.load(there / files[kind])
        return
    _, options = KINDS[kind]
    out = compiled / f"{request.param}.so"
    with locked(out):
        try:
            if not out.exists():
                less = ("-O1",) if more else ()  # compiled in a third of the time
                building.Toolchain.find().compile(building.UNIT, (*options, *more, *less), out)
        except (LookupError, subprocess.SubprocessError):
            pytest.skip("this compiler does not know these instructions")
    yield loading.load(out)
