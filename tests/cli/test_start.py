"""What happens before and around the verbs: help, version, interrupts, warnings."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.processes import LANTERNPP, python

import lanternpp
from lanternpp import Pipeline
from lanternpp.accept import RULES
from lanternpp.accept.base import RESIDUALS
from lanternpp.api.options import DIALS
from lanternpp.cli import RENAMED, RETIRED, VERBS
from lanternpp.engine.verify import VERIFIERS
from lanternpp.proposers import PROPOSERS
from lanternpp.proposers.jacobi import COUPLINGS, INITS
from lanternpp.training.team import Report
from lanternpp.util.terminal import progress_bar

ARGUMENTS = (), ("--help",), ("x", "--steps", 50)  # arguments after a retired verb


def test_help_imports_no_slow_module() -> None:
    """Of any verb."""
    code = """
import sys
from lanternpp.cli import VERBS, main
for args in (["--version"], ["--help"], *([verb, "--help"] for verb in VERBS)):
    try:
        main(args)
    except SystemExit as end:
        assert not end.code, args
    slow = {"torch", "transformers", "numpy", "PIL", "safetensors", "huggingface_hub", "matplotlib"}
    assert not slow & sys.modules.keys(), args
"""
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout


def test_help_lists_the_choices_of_every_dial(run) -> None:
    known = {"proposer": PROPOSERS, "accept": RULES, "residual": RESIDUALS, "coupling": COUPLINGS}
    known |= {"init": INITS, "verify": VERIFIERS}
    assert run("--version").out == f"lanternpp {lanternpp.__version__}\n" and "Usage" in run().out
    shown = run("generate", "--help").out
    for dial, names in known.items():
        assert set(DIALS[dial].choices) == set(names) and all(name in shown for name in names)


@pytest.mark.parametrize("verb", [*VERBS, "models list", "models convert", "models warm"])
def test_every_option_has_help(verb: str, run, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    # Lines of a panel: Cyclopts keeps the width of the first terminal, and the text above the panels is wrapped anywhere.
    text = run(*verb.split(), "--help").out
    lines = [line.strip("│ ") for line in text.splitlines() if line.startswith("│")]
    bare = [line for line in lines if line.startswith("--") and not re.search(r"\S {2,}\S", line)]
    assert not bare and any(line.startswith("--") for line in lines)


def test_a_retired_verb_or_option_names_its_replacement(run) -> None:
    retired = {
        (*verb.split(), *more): (f"`{verb}`", f"`{now}`")
        for verb, now in RETIRED.items()
        for more in ARGUMENTS
    }
    for option, now in RENAMED.items():
        for given in ([option, "2"], [f"{option}=2"]):
            retired["generate", "a red tulip", *given] = option, now
    for args, (old, now) in retired.items():
        outcome = run(*args)
        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.err == f"lanternpp: error: {old} is now {now}\n"


def test_a_shipped_model_needs_a_folder_for_the_drafter(run) -> None:
    said = "nature-128 ships with this package: name a folder for the drafter with -o DIR"
    run("train", "--model", "nature-128", "--self", "--minutes", 1).refused(said)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_ends_the_listing_without_a_message(unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        command, pipe = [*LANTERNPP, "models"], subprocess.PIPE
        done = subprocess.run(command, stdout=closed, stderr=pipe, text=True, timeout=120, env=environment)
    # Rich ends the program with 1 where it meets the closed pipe first.
    assert done.returncode in (1, 141) and done.stderr == ""


def test_the_first_process_of_a_container_ends_at_sigterm() -> None:
    code = "import os, signal; from lanternpp.cli import main; os.getpid = lambda: 1; "
    code += "main([], lambda _: signal.raise_signal(signal.SIGTERM))"
    assert python("-c", code).returncode == 143, "no default action, which Linux discards there"


UNREADABLE = PermissionError(13, "Permission denied", "/some/file")


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [(KeyboardInterrupt(), 130, "interrupted"), (UNREADABLE, 2, "error: /some/file: Permission denied")],
)
def test_ctrl_c_and_a_file_that_cannot_be_read_are_one_line(raised, code, said, run, monkeypatch, empty_dir):
    def stop(**_: object) -> None:
        raise raised

    monkeypatch.setattr(Pipeline, "from_pretrained", stop)
    outcome = run("generate", "a red tulip")
    assert (outcome.code, outcome.out, outcome.err) == (code, "", f"lanternpp: {said}\n")
    assert list(empty_dir.iterdir()) == []


def test_ctrl_c_during_the_first_imports_shows_no_traceback(empty_dir: Path) -> None:
    (empty_dir / "cyclopts.py").write_text("raise KeyboardInterrupt")
    done = python("-m", "lanternpp")
    assert (done.returncode, done.stderr) == (130, "")


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("training", [False, True])
def test_a_progress_bar_has_the_elapsed_and_the_remaining_time(
    training: bool, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    if training:
        report = Report("target", tmp_path)
        with report.bar():
            report.advance(0.25, "step 1")
    else:
        with progress_bar("drawing") as progress:
            progress(1, 4)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sys.stderr.getvalue())
    assert re.search(r"25 ?% 0:00:\d\d elapsed, [-:0-9]+ left", shown)


def test_a_model_without_a_drafter_draws_without_a_method_option(run, broken: Path) -> None:
    for kind in ("drafter", "parallel"):
        shutil.rmtree(broken / kind)
    draw = ("generate", "a red tulip", "--model", broken)
    outcome = run(*draw)
    assert (outcome.code, outcome.err) == (0, "")
    assert "jacobi-coupled (auto: no drafter, lossless)" in outcome.out
    reported = run(*draw, "--json").json
    assert (reported["method"], reported["auto"]) == ("jacobi-coupled", "no drafter, lossless")
    assert run(*draw, "--json", "--accept", "mixture", "--delta", 0.5).json["auto"] == "no drafter"
    run(*draw, "--method", "eagle").refused("--method jacobi-coupled and --method ar draw")
    Path("prompts").write_text("a red tulip")
    args = ["--no-plots", "--no-quality", "--no-measure-tv", "--prompts", "prompts", "-n", 1, "--json"]
    raced = run("bench", "--model", broken, *args)
    methods = [row["method"] for row in json.loads(raced.out)["methods"]]
    assert raced.code == 0 and methods == ["ar", "jacobi-coupled", "lantern-jacobi"]
    assert raced.err.count("\n") == 1 and "eagle2" in raced.err


def test_a_terminal_without_columns_and_with_another_encoding(model: Path, tmp_path: Path) -> None:
    """The encoding lacks letters of the path."""
    environment = {**os.environ, "COLUMNS": "0", "PYTHONIOENCODING": "ascii"}
    run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 200}
    drawn = subprocess.run([*LANTERNPP, "generate", "a red tulip", "--model", model, "-o", "\xf6.png"], **run)
    assert drawn.returncode == 0 and "\\xf6.png" in drawn.stdout and (tmp_path / "\xf6.png").is_file()
    assert "Usage" in subprocess.run([*LANTERNPP, "generate", "--help"], **run).stdout


def test_closed_streams_do_not_stop_a_picture(model: Path, tmp_path: Path) -> None:
    """As cron and pythonw start programs."""
    command = f"{sys.executable} -m lanternpp generate tulip --model {model} -o {tmp_path / 'p.png'} >&- 2>&-"
    assert subprocess.run(command, shell=True).returncode == 0 and (tmp_path / "p.png").exists()
