"""The kernels as this CPU runs them, and as CPUs with fewer instructions would, or with more, which are emulated."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lanternpp.kernels import library as native
from lanternpp.nn.checkpoints import digest

NO_TILES = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")
FLOATS = (*NO_TILES, "-mno-avx512bf16", "-mno-avx512vnni")
AVX2 = (*FLOATS, "-mno-avx512f")
EMULATION = Path(__file__).with_name("emulated.h")
EMULATED = ("-include", str(EMULATION), f"-DVERSION={digest([EMULATION.read_text()])}")
KINDS = {
    "all": (),
    "no tiles": NO_TILES,
    "floats": FLOATS,
    "AVX2": AVX2,
    "emulated bfloat16": (*NO_TILES, *EMULATED),
    "emulated tiles": (*EMULATED, "-DTILES"),
}


@pytest.fixture(scope="module", params=KINDS)
def library(request: pytest.FixtureRequest) -> Iterator[object]:
    more = KINDS[request.param]
    try:
        yield native.load(native.compiled("cc", (*native.FLAGS, *more)))
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("this compiler does not know these instructions")
