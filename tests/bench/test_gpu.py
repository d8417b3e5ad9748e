"""`make gpu` on tiny models, without a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

# PyTorch's profiler imports it: what it adds to sys.path stays where monkeypatch puts that back
import setuptools  # noqa: F401
import torch
from helpers.models import write_model
from helpers.processes import python

from lanternpp.cli import main
from lanternpp.evaluation import profile

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., int]:
    """Runs the script in a folder with a test; its status. `lanternpp` runs in this process, and measures the machine on little."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(profile, "COPY_BYTES", 1 << 16)
    monkeypatch.setattr(profile, "MATRIX_SIDE", 32)
    script = importlib.import_module("gpu")
    in_a_process = script.run

    def run(program: str, *args: object) -> tuple[int, str, str]:
        if program != "lanternpp":
            return in_a_process(program, *args)
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
        said = capsys.readouterr()
        return end.value.code, said.out, said.err

    monkeypatch.setattr(script, "run", run)

    def measured(*asked: object) -> int:
        monkeypatch.setattr("sys.argv", ["gpu.py", *map(str, asked)])
        with pytest.raises(SystemExit) as end:
            script.main()
        return end.value.code

    return measured


@pytest.mark.parametrize("device", ["auto", "cuda", "gpu"])
def test_without_a_gpu_it_is_an_error_and_writes_nothing(
    status: Callable[..., int], device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status("--device", device) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and not list(tmp_path.iterdir())


def test_one_file_has_the_tests_and_the_races_and_profiles_of_both_models(
    status: Callable[..., int], tmp_path: Path
) -> None:
    model = write_model(tmp_path / "tiny")
    (tmp_path / "p.txt").write_text("a red tulip\n")
    (tmp_path / "test_one.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_one(): assert False\n")
    asked = ["--model", model, "--random", "tiny", "--batch-sizes", "2", "-n", "1", "--prompts", "p.txt"]
    asked += ["--device", "cpu", "--dtype", "float32", "--tests", "test_one.py"]
    assert status(*asked) == 1, "a test failed, and the rest is measured"
    text = (tmp_path / "gpu.md").read_text()
    assert "1 failed" in text and "FAILED test_one.py::test_one" in text and text.count("\n## ") == 2
    assert text.count("| `eagle tree=chain-4` |") == 2
    assert text.count("of memory bandwidth, %") >= 2


def test_by_default_it_runs_the_tests_of_its_own_checkout(
    status: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr("gpu.run", lambda *words: asked.append(words) or (1, "", ""))
    assert status("--device", "cpu", "--random", "tiny") == 1
    assert asked[0][-1] == BENCH.parent / "tests"


@pytest.mark.parametrize(
    ("script", "options", "ends", "said"),
    [
        ("sheet.py", ("--model", "nowhere", "--out", "a.png"), 2, "error: model 'nowhere' is unknown"),
        ("published_metrics.py", ("--help",), 0, "PICTURES holds metadata.jsonl"),
    ],
)
def test_scripts_print_errors_and_help_in_a_sentence(
    script: str, options: tuple[str, ...], ends: int, said: str
) -> None:
    done = python(BENCH / script, *options)
    assert done.returncode == ends and said in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_published_metrics_run_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ImageReward.py").write_text(
        "import clip\nclass load(str): score = lambda *texts: len(texts[1])"
    )
    (tmp_path / "cleanfid.py").write_text("class fid: compute_fid = lambda *_, device, **__: device.type")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(BENCH)
    metrics = importlib.import_module("published_metrics")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "a rose"}')
    assert metrics.fid("a", "b") == "cpu" and metrics.image_reward(tmp_path) == 6
    last = metrics.np.uint8([0, 0, 0, 0, 0, 0, 9, 0]).reshape(1, 8, 1).repeat(5, 0).repeat(3, 2)
    assert metrics.crop(last).any(), "torchvision's square begins at 2, the even neighbour of 1.5"


def test_the_report_says_which_race_failed(status: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "test_none.py").write_text("")
    asked = ("--device", "cpu", "--dtype", "float33", "--tests", "test_none.py", "--random", "tiny")
    assert status(*asked) == 1
    assert (tmp_path / "gpu.md").read_text().count("dtype 'float33' is unknown") == 2
