"""Without the kernels PyTorch computes everything, and one line turns them off for good."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lanternpp
from lanternpp import Pipeline
from lanternpp.nn import backend

DRAW = """
import sys
from lanternpp import Pipeline
result = Pipeline.from_pretrained("nature-128", device="cpu")("a red tulip", seed=1, method={method!r})
assert not [name for name in sys.modules if name.startswith("lanternpp.kernels")]
print(result.images[0].size)
"""


@pytest.mark.parametrize("method", ["ar", "lantern++"])
def test_a_copy_without_kernels_draws_after_one_changed_line(method: str, tmp_path: Path) -> None:
    copy = tmp_path / "lanternpp"
    shutil.copytree(Path(lanternpp.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(copy / "kernels")
    file = copy / "nn" / "backend.py"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    (at,) = (i for i, line in enumerate(lines) if "lanternpp.kernels" in line)
    lines[at] = lines[at].replace("lanternpp.kernels:in_use", "lanternpp.nn.backend:Backend", 1)
    file.write_text("".join(lines), encoding="utf-8")
    where = {**os.environ, "PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = [sys.executable, "-c", DRAW.format(method=method)]
    done = subprocess.run(run, env=where, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "(128, 128)\n"), done.stderr


def test_one_switch_turns_the_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERNPP_KERNELS", "0")
    used, x = backend.backend(), torch.zeros(1, 64)
    assert used.name == backend.PYTORCH.name and not used.serves(1)
    assert used.probs(x, (1.0, 0, 1.0)) is None and used.verifier() is None
    pipe = Pipeline.from_pretrained("nature-128", device="cpu", dtype="bfloat16")
    drafter = pipe.model.network("parallel")
    assert [part.native for part in (pipe.target.decoder, drafter, drafter.decoder)] == [None] * 3  # type: ignore[union-attr]
    assert pipe.target.native_head is None
