"""`lanternpp generate --prompts`: a folder of pictures that any number of interrupted runs complete to the same bytes."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from filelock import FileLock
from helpers.models import contents
from helpers.processes import LANTERNPP, python
from helpers.refusals import rejects
from PIL import Image

from lanternpp.api.options import DrawOptions
from lanternpp.cli import with_values
from lanternpp.cli.options import for_workers
from lanternpp.jobs import cluster
from lanternpp.jobs.renderer import Renderer
from lanternpp.util.files import LOCK, locked

PROMPTS = ["red tulip", "a tulip", "a photo of a red tulip", "a photo of a tulip", "the red, red tulip"]


@pytest.fixture
def requested(empty_dir: Path) -> Path:
    """A file of prompts, with a comment, an empty line and one prompt twice."""
    file = empty_dir / "prompts.txt"
    file.write_text("\n".join([PROMPTS[0], "", "# not this", *PROMPTS[1:], PROMPTS[0]]) + "\n")
    return file


@pytest.fixture
def job(run, model, requested):
    """Runs the job."""
    return lambda *more: run("generate", "--prompts", requested, "--model", model, "-n", 2, *more)


def test_one_png_for_each_prompt_and_seed_with_the_bytes_of_its_prompt_alone(
    job, run, model, empty_dir: Path
) -> None:
    outcome = job("-o", "new/out", "--seed", 7, "--batch-size", 4)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("new/out: 10 pictures, ") and "codes per pass" in outcome.out
    made = {}
    for path in (empty_dir / "new/out").iterdir():
        with Image.open(path) as image:
            assert image.size == (16, 16)
            made[image.text["prompt"], image.text["seed"]] = path
    assert made.keys() == {(prompt, seed) for prompt in PROMPTS for seed in ("7", "8")}
    name = made["a photo of a red tulip", "8"].name
    assert name.startswith("a-photo-of-a-red-tulip-") and name.endswith("-8.png")
    run("generate", PROMPTS[1], "--model", model, "--seed", 8, "--batch-size", 4, "-o", "alone.png")
    assert made[PROMPTS[1], "8"].read_bytes() == (empty_dir / "alone.png").read_bytes()


def test_existing_pictures_are_not_drawn_again_and_the_order_does_not_matter(
    job, requested, empty_dir: Path
) -> None:
    job("-o", "one", "--batch-size", 3)
    before = contents(empty_dir / "one")
    times = {path: path.stat().st_mtime_ns for path in (empty_dir / "one").iterdir()}
    outcome = job("-o", "one", "--batch-size", 3)
    assert outcome.code == 0 and outcome.out == "one: nothing to draw, it has 10 pictures already\n"
    assert job("-o", "one", "--batch-size", 3, "--json").json["seconds_per_image"] is None
    requested.write_text("\n".join(["one more red tulip", *reversed(PROMPTS)]))
    figures = json.loads(job("-o", "one", "--batch-size", 3, "--json").out)
    assert (figures["images"], figures["skipped"], figures["codes"]) == (2, 10, 32)
    after = contents(empty_dir / "one")
    assert len(after) == 12 and {name: after[name] for name in before} == before
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert job("-o", "two", "--batch-size", 3).code == 0
    assert contents(empty_dir / "two") == after


def test_truncated_damaged_and_temporary_files_are_replaced(job, empty_dir: Path) -> None:
    job("-o", "out")
    before = contents(empty_dir / "out")
    truncated, empty, other, flipped, *_ = sorted((empty_dir / "out").iterdir())
    damaged = bytearray(flipped.read_bytes())
    damaged[damaged.index(b"IDAT") + 40] ^= 1
    flipped.write_bytes(damaged)
    truncated.write_bytes(truncated.read_bytes()[:-20])
    empty.write_bytes(b"")
    ended = python("-c", "import os; print(os.getpid())")
    left = other.with_name(f".{other.name}.{int(ended.stdout)}.tmp")
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    assert "3 pictures, 7 already there" in job("-o", "out").out
    assert contents(empty_dir / "out") == before


def test_a_second_job_in_the_same_folder_is_rejected(
    job, run, model, requested, empty_dir: Path, monkeypatch
) -> None:
    reported = []

    def second(renderer: Renderer, prompts: list[str]) -> tuple[dict[str, str], list[str]]:
        """Another process begins while the first is about to draw."""
        given = ["-o", "new/out", "--prompts", requested, "--model", model, "--temperature", "0.5"]
        reported.append(python(*LANTERNPP[1:], "generate", *given))
        return {}, []

    monkeypatch.setattr(Renderer, "check", second)
    assert job("-o", "new/out").code == 0
    (other,) = reported
    assert (other.returncode, other.stdout, other.stderr.count("\n")) == (2, "", 1)
    assert f"new/out is being filled by another process ({os.getpid()} on " in other.stderr
    assert len(contents(empty_dir / "new/out")) == 10  # and nothing else
    assert "nothing to draw" in job("-o", "new/out").out


def test_a_folder_whose_other_job_ends_meanwhile_is_rejected(tmp_path: Path, monkeypatch) -> None:
    def missing(self: Path, **_: object) -> str:
        raise FileNotFoundError(self)

    with FileLock(tmp_path / LOCK):
        monkeypatch.setattr(Path, "read_text", missing)
        rejects("being filled by another process", locked(tmp_path).__enter__)


def test_other_settings_need_overwrite(job, empty_dir: Path) -> None:
    job("-o", "out", "--temperature", 0.5)
    before = contents(empty_dir / "out")
    job("-o", "out", "--temperature", 0.75).refused("temperature 0.5 -> 0.75", "--overwrite")
    assert contents(empty_dir / "out") == before
    first = sorted(before)[0]
    assert "out: 10 pictures, " in job("-o", "out", "--temperature", 0.75, "--overwrite").out
    assert contents(empty_dir / "out")[first] != before[first]
    assert "nothing to draw" in job("-o", "out", "--temperature", 0.75, "--overwrite").out


def test_a_prompt_that_cannot_be_drawn_is_rejected_with_its_line(job, requested, empty_dir: Path) -> None:
    requested.write_text("red tulip\n\na pine tree\na red tulip\na rose\n")
    job("-o", "out").refused("prompts.txt, line 3: prompt 'a pine tree' names no subject", "1 more")
    assert not (empty_dir / "out").exists()


def test_unknown_words_of_only_the_first_prompts_are_reported(job, requested) -> None:
    requested.write_text("".join(f"a red tulip in year {i}\n" for i in range(20)))
    reported = job("-o", "out").err.splitlines()
    assert len(reported) == 6 and "in, year, 4" in reported[4] and "15 more warnings" in reported[5]
    assert all(line.startswith("lanternpp: warning: ") for line in reported) and "red, tulip" in reported[4]


def test_a_full_disk_leaves_only_complete_pictures(job, empty_dir: Path, monkeypatch) -> None:
    complete, write = [], Path.write_bytes

    def fill(self: Path, data: bytes) -> int:
        if len(complete) == 3:
            write(self, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        complete.append(self)
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", fill)
    job("-o", "out").failed("the disk is full")
    monkeypatch.undo()
    assert len(list((empty_dir / "out").iterdir())) == 3
    assert "7 pictures, 3 already there" in job("-o", empty_dir / "out").out


def test_a_disk_that_is_full_from_the_start_leaves_no_folder(job, empty_dir: Path, monkeypatch) -> None:
    def full(self: Path, *given: object, **more: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    job("-o", "out").failed(f"the disk is full (out/{LOCK})")
    assert not (empty_dir / "out").exists()


def test_the_figures_of_a_job(job) -> None:
    figures = json.loads(job("-o", "out", "--json", "--measure-tv", "--lambda", 20).out)
    assert figures["images"] == 10 and figures["codes"] == sum(figures["accepted_per_pass"]) == 160
    assert figures["codes_per_pass"] == pytest.approx(160 / figures["passes"])
    assert figures["settings"]["batch_size"] == 8 and figures["folder"] == "out" and figures["tv_cost"] > 0
    large = json.loads(job("-o", "large", "--json", "--batch-size", 1_000_000).out)
    # as the pictures have it, so that a longer list goes on
    assert large["settings"]["batch_size"] == 1_000_000


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ([], "give either a PROMPT, or --prompts FILE -o FOLDER"),
        (["a tulip", "--prompts", "p.txt", "-o", "o"], "give either a PROMPT, or --prompts FILE -o FOLDER"),
        (["--prompts", "p.txt"], "needs a folder to write to; add -o FOLDER"),
        (["--prompts", "p.txt", "-o", "p.txt"], "p.txt is a file"),
        (["--prompts", "p.txt", "-o", "p.txt/o"], "p.txt is a file"),
        (["--prompts", "p.txt", "-o", "x.png"], "x.png is one picture; add -o FOLDER"),
        (["--prompts", "p.txt", "-o", "o", "--image", "x.png"], "--image goes with one PROMPT"),
        (["--prompts", "none.txt", "-o", "o"], "none.txt is missing"),
        (["--prompts", "empty.txt", "-o", "o"], "empty.txt holds none"),
        (["--prompts", "pipe.txt", "-o", "o"], "pipe.txt is no plain file"),
        (["--prompts", "/dev/zero", "-o", "o"], "/dev/zero is no plain file"),
        (["--prompts", "p.txt", "-o", "o", "--actors", 2], "add --ray"),
        (["--prompts", "p.txt", "-o", "o", "--ray", "somewhere"], "'somewhere' is not an address"),
        (["--prompts", "p.txt", "-o", "o", "--cfg", 0.5], "--cfg 0.5 is out of range"),
        (["a tulip", "--ray"], "--ray goes with --prompts"),
    ],
)
def test_wrong_options_are_rejected(args, names, run, model, empty_dir: Path) -> None:
    (empty_dir / "p.txt").write_text("red tulip\n")
    (empty_dir / "empty.txt").write_text("# nothing\n\n")
    os.mkfifo(empty_dir / "pipe.txt")  # nobody writes into it
    run("generate", *args, "--model", model).refused(names)
    assert sorted(path.name for path in empty_dir.iterdir()) == ["empty.txt", "p.txt", "pipe.txt"]


def test_without_ray_one_sentence_says_what_to_install(job, monkeypatch) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    job("-o", "out", "--ray", "local").refused("pip install 'lanternpp[ray]'")


def test_ray_without_a_value_is_this_machine() -> None:
    assert with_values(["--ray", "--actors", "2"]) == ["--ray", "local", "--actors", "2"]
    assert with_values(["-n", "2", "--ray"]) == ["-n", "2", "--ray", "local"]
    assert with_values(["--ray", "auto", "-n", "2"]) == ["--ray", "auto", "-n", "2"]


def test_workers_in_other_folders_need_no_file_of_this_folder(empty_dir: Path) -> None:
    (empty_dir / "m").mkdir()
    (empty_dir / "t.json").write_text("[[0], [1]]")
    options = for_workers(DrawOptions("m", overrides={"cfg": 2.0, "tree": "t.json"}))
    assert options == DrawOptions(str(empty_dir / "m"), overrides={"cfg": 2.0, "tree": "[[0],[1]]"})
