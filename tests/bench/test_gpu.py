"""`make gpu` on tiny models, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers.models import write_model

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu.py"


def test_one_file_has_the_tests_and_the_races_and_profiles_of_both_models(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny")
    (tmp_path / "p.txt").write_text("a red tulip\n")
    (tmp_path / "test_one.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_one(): assert False\n")
    asked = ["--model", model, "--random", "tiny", "--batch-sizes", "1,2", "-n", "1", "--prompts", "p.txt"]
    asked += ["--device", "cpu", "--dtype", "float32", "--tests", "test_one.py"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *asked],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ
        | {
            "PYTHONPATH": str(Path(sys.modules["lanternpp"].__file__).parents[1]),
            "XDG_CACHE_HOME": str(tmp_path),
        },
    )
    assert done.returncode == 1, f"a test failed, and the rest is measured: {done.stderr}"
    text = (tmp_path / "gpu.md").read_text()
    assert "1 failed" in text and text.count("\n## ") == 2
    for size in (1, 2):
        assert text.count(f"| `eagle tree=chain-4` | {size} | `chain-4` |") == 2
    assert text.count("of memory bandwidth, %") >= 2
