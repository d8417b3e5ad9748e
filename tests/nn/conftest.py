"""The kernels as this CPU runs them, and as CPUs with fewer instructions would."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from lanternpp.nn import native

NO_TILES = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")
FLOATS = (*NO_TILES, "-mno-avx512bf16", "-mno-avx512vnni")
AVX2 = (*FLOATS, "-mno-avx512f")


@pytest.fixture(scope="module", params=["all", "no tiles", "floats", "AVX2"])
def library(request: pytest.FixtureRequest) -> Iterator[object]:
    more = {"all": (), "no tiles": NO_TILES, "floats": FLOATS, "AVX2": AVX2}[request.param]
    try:
        yield native.load(native.compiled("cc", (*native.FLAGS, *more)))
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("this compiler does not know these instructions")
