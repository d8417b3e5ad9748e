"""Without the kernels PyTorch computes everything; one line disables them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers.processes import python

import lanternpp
from lanternpp import Pipeline
from lanternpp.nn import backend

DRAW = """
import sys
from lanternpp import Pipeline
pipe = Pipeline.from_pretrained(sys.argv[1], device="cpu")
dials = {"ar": {}, "lantern++": {"neighbours": 8}}
print([pipe("a red tulip", seed=1, method=m, **dials[m]).images[0].size for m in dials])
assert not [name for name in sys.modules if name.startswith("lanternpp.kernels")]
"""


def test_a_package_without_kernels_needs_one_changed_line(tmp_path: Path, model: Path) -> None:
    copy = tmp_path / "lanternpp"
    left_out = shutil.ignore_patterns("__pycache__", "nature-*")
    shutil.copytree(Path(lanternpp.__file__).parent, copy, ignore=left_out)
    shutil.rmtree(copy / "kernels")
    file = copy / "nn" / "backend.py"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    (at,) = (i for i, line in enumerate(lines) if "lanternpp.kernels" in line)
    lines[at] = lines[at].replace("lanternpp.kernels:in_use", "lanternpp.nn.backend:Backend", 1)
    file.write_text("".join(lines), encoding="utf-8")
    where = {**os.environ, "PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = python("-c", DRAW, model, env=where, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[(16, 16), (16, 16)]\n"), done.stderr


def test_a_gpu_needs_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERNPP_KERNELS", "no such kind")  # an error where kernels are loaded
    assert backend.backend(torch.device("cuda")) is backend.PYTORCH


def test_an_environment_variable_disables_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERNPP_KERNELS", "0")
    used, x = backend.backend(), torch.zeros(1, 64)
    assert used.name == backend.PYTORCH.name and not used.packs(x.bfloat16())
    assert used.probs(x, (1.0, 0, 1.0)) is None and used.head(torch.nn.Linear(32, 40).bfloat16()) is None
    pipe = Pipeline.from_pretrained("nature-128", device="cpu", dtype="bfloat16")
    drafter = pipe.model.network("parallel")
    assert [part.native for part in (pipe.target.decoder, drafter, drafter.decoder)] == [None] * 3
    assert pipe.target.native_head is None
