"""Every wrong input is one line on stderr that names it, status 2, and no file."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from PIL import Image

from lanternpp import Pipeline

PROMPT = "a red tulip"
BEFORE_ANY_MODEL = [
    ([" \n "], "prompt ' \\n '"),
    (["\udcff tulip"], r"prompt '\udcff tulip' is no text in UTF-8"),
    ([PROMPT, "--temperature", "-0.5"], "--temperature -0.5"),
    ([PROMPT, "--temperature", "nan"], "--temperature nan"),
    ([PROMPT, "--temperature", "warm"], "'warm'"),
    ([PROMPT, "--cfg", "0.5"], "--cfg 0.5"),
    ([PROMPT, "--top-k", "-1"], "--top-k -1"),
    ([PROMPT, "--top-k", "1.5"], "'1.5'"),
    ([PROMPT, "--top-p", "0"], "--top-p 0.0"),
    ([PROMPT, "--top-p", "1.01"], "--top-p 1.01"),
    ([PROMPT, "-n", "0"], "-n 0 is"),
    ([PROMPT, "--batch-size", "0"], "--batch-size 0"),
    ([PROMPT, "--seed", "-1"], "--seed -1 is out of range; use 0 to 4611686018427387904"),
    ([PROMPT, "--neighbours", "0"], "--neighbours 0"),
    ([PROMPT, "--method", "lantern", "--delta", "1.5"], "delta 1.5 is outside [0, 1]"),
    ([PROMPT, "--method", "cool", "--delta", "0"], "delta 0.0 is not a positive number"),
    ([PROMPT, "--nu", "-1"], "--nu -1.0"),
    ([PROMPT, "--residual", "best"], "residual 'best' is unknown; known: paper, optimal"),
    ([PROMPT, "--method", "jacobi", "--window", "0"], "--window 0"),
    ([PROMPT, "--method", "jacobi", "--window", "257"], "--window 257 is out of range; use 1 to 256"),
    ([PROMPT, "--method", "jacobi", "--coupling", "minimal"], "coupling 'minimal' is unknown"),
    (
        [PROMPT, "--method", "jacobi", "--alternatives", "17"],
        "--alternatives 17 is out of range; use 0 to 16",
    ),
    ([PROMPT, "--method", "jacobi", "--init", "old"], "init 'old' is unknown"),
    ([PROMPT, "--proposer", "jakobi"], "did you mean 'jacobi'?"),
    ([PROMPT, "--accept", "lantern"], "needs neighbours and delta"),
    (
        [PROMPT, "--delta", "0.5"],
        "delta 0.5 would change nothing: method 'lantern++', which auto takes here, has the proposer 'parallel'",
    ),
    ([PROMPT, "--method", "lantern", "--lambda", "2"], "lambda 2.0 would change nothing"),
    ([PROMPT, "--accept", "exact", "--neighbours", "5"], "and they take tree"),
    ([PROMPT, "--method", "jacobi", "--tree", "chain-3"], "and they take window, coupling, init"),
    ([PROMPT, "--method", "ar", "--residual", "paper"], "and they have no dials"),
    ([PROMPT, "--method", "jacobi", "--drafter", "x"], "--drafter x would change nothing"),
    ([PROMPT, "--delta", "-0.1"], "--delta -0.1"),
    ([PROMPT, "--lambda", "0.9"], "--lambda 0.9"),
    ([PROMPT, "--method", "lanten++"], "did you mean 'lantern++'?"),
    ([PROMPT, "--method", "xyz"], "known: ar, "),
    ([PROMPT, "--tree", "eagle-24"], "did you mean 'eagle-25'?"),
    ([PROMPT, "--tree", "no-such.json"], "no-such.json"),
    ([PROMPT, "-o", "picture.jpg"], "'picture.jpg' does not end in .png"),
    ([PROMPT, "-o", "/proc/none/picture.png"], "'/proc/none/picture.png' cannot be written"),
    ([PROMPT, "--colour", "red"], "--colour"),
    ([PROMPT, "another"], "another"),
    ([], "PROMPT"),
]


@pytest.mark.parametrize(
    ("verb", "args", "names"),
    [("generate", *row) for row in BEFORE_ANY_MODEL] + [("compare", *row) for row in BEFORE_ANY_MODEL[::6]],
)
def test_refused_before_any_model_is_read(verb, args, names, run, elsewhere, monkeypatch) -> None:
    monkeypatch.setattr(Pipeline, "from_pretrained", lambda **_: pytest.fail("a model was read"))
    run(verb, *args).refused(names)


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["--model", "nature-12"], "did you mean 'nature-128'?"),
        (["--model", "./none"], "'./none'"),
        (["--device", "tpu"], "'tpu'"),
        (["--device", "cuda:99"], "'cuda:99'"),
        (["--dtype", "int3"], "'int3'"),
        (["--neighbours", 32], "32 neighbours"),
        (["--top-k", 33], "top-k 33"),
        (["--drafter", "./none"], "'./none'"),
    ],
    ids=lambda v: " ".join(map(str, v))[-24:],
)
def test_refused_by_the_model(args, names, run, model) -> None:
    run("generate", PROMPT, *args, *(() if "--model" in args else ("--model", model))).refused(names)


def test_a_prompt_without_a_subject_lists_the_subjects(run, model, elsewhere) -> None:
    run("generate", "a red\nbicycle", "--model", model).refused("use one of: tulip")


def test_other_verbs_and_options_are_refused(run, elsewhere) -> None:
    run("paint", "x").refused("paint")
    run("compare", PROMPT, "--runs", "0").refused("--runs 0")
    run("models", "--no-such").refused("--no-such")
    run("bench", "--methods", "ar", "eagle k=1").refused(
        "unexpected 'eagle k=1': a value with spaces needs quotes"
    )


def test_a_folder_named_like_a_picture_and_a_file_in_place_of_the_folder_are_refused(run, elsewhere) -> None:
    (elsewhere / "x.png").mkdir()
    (elsewhere / "notes").write_text("mine")
    run("generate", PROMPT, "-o", "x.png").refused("'x.png' is not a file")
    run("generate", PROMPT, "-o", "notes/x.png").refused("'notes/x.png'")
    assert (elsewhere / "notes").read_text() == "mine"


@pytest.mark.parametrize(("verb", "content"), [("generate", "text"), ("compare", "picture")])
def test_a_file_that_lanternpp_has_not_written_stays(verb, content, run, model, elsewhere) -> None:
    theirs = elsewhere / "x.png"
    if content == "text":
        theirs.write_text("mine")
    else:
        Image.new("RGB", (2, 2)).save(theirs)
    before = theirs.read_bytes()
    said = ("'x.png' is a file that lanternpp has not written", "--overwrite")
    run(verb, PROMPT, "--model", model, "-o", "x.png").refused(*said)
    assert theirs.read_bytes() == before
    assert run(verb, PROMPT, "--model", model, "-o", "x.png", "--overwrite").code == 0
    assert run(verb, "a tulip", "--model", model, "-o", "x.png").code == 0, "one of lanternpp is replaced"


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ({"vocab": 24}, "16 of 24 codes and the target 16 of 32"),
        ({"grid": 3}, "9 of 32 codes and the target 16 of 32"),
        ({}, "the drafter's codebook is another than the target's"),
    ],
)
def test_a_drafter_of_other_codes_is_refused(shape, names, run, model, smaller, elsewhere) -> None:
    args = ["--model", model, "--method", "independent", "--drafter", smaller(**shape)]
    run("generate", PROMPT, *args).refused(names)


def test_without_a_smaller_target_one_sentence_says_how_to_give_one(run, broken, elsewhere) -> None:
    shutil.rmtree(broken / "independent")
    outcome = run("generate", PROMPT, "--model", broken, "--method", "independent")
    outcome.refused("name a model folder of the same codes with --drafter")


def test_a_full_disk_leaves_the_old_picture(run, model, elsewhere, monkeypatch) -> None:
    write = Path.write_bytes

    def full(self: Path, data: bytes) -> None:
        write(self, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    (elsewhere / "x.png").write_bytes(b"old")
    monkeypatch.setattr(Path, "write_bytes", full)
    outcome = run("generate", PROMPT, "--model", model, "-o", "x.png", "--overwrite")
    outcome.refused("x.png could not be written, the disk is full: free some room")
    assert [p.name for p in elsewhere.iterdir()] == ["x.png"]
    assert (elsewhere / "x.png").read_bytes() == b"old"
