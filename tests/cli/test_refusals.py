"""Every wrong input is one line on stderr that names it, status 2, and no file."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from lanternpp import Pipeline

PROMPT = "a red tulip"
BEFORE_ANY_MODEL = [
    ([""], "prompt ''"),
    ([" \n "], "prompt ' \\n '"),
    ([PROMPT, "--temperature", "-0.5"], "--temperature -0.5"),
    ([PROMPT, "--temperature", "nan"], "--temperature nan"),
    ([PROMPT, "--temperature", "inf"], "--temperature inf"),
    ([PROMPT, "--temperature", "warm"], "'warm'"),
    ([PROMPT, "--cfg", "0.5"], "--cfg 0.5"),
    ([PROMPT, "--top-k", "-1"], "--top-k -1"),
    ([PROMPT, "--top-k", "1.5"], "'1.5'"),
    ([PROMPT, "--top-p", "0"], "--top-p 0.0"),
    ([PROMPT, "--top-p", "1.01"], "--top-p 1.01"),
    ([PROMPT, "-n", "0"], "--n 0"),
    ([PROMPT, "--batch-size", "0"], "--batch-size 0"),
    ([PROMPT, "--seed", "-1"], "--seed -1"),
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
    ([PROMPT, "--method", "eagle", "--window", "8"], "window 8 would change nothing"),
    ([PROMPT, "--method", "ar", "--residual", "paper"], "and they have no dials"),
    ([PROMPT, "--method", "jacobi", "--drafter", "x"], "--drafter x would change nothing"),
    ([PROMPT, "--delta", "-0.1"], "--delta -0.1"),
    ([PROMPT, "--lambda", "0.9"], "--lambda 0.9"),
    ([PROMPT, "--method", "lanten++"], "did you mean 'lantern++'?"),
    ([PROMPT, "--method", "xyz"], "known: ar, "),
    ([PROMPT, "--accept", "exat"], "did you mean 'exact'?"),
    ([PROMPT, "--tree", "eagle-24"], "did you mean 'eagle-25'?"),
    ([PROMPT, "--tree", "no-such.json"], "no-such.json"),
    ([PROMPT, "-o", "picture.jpg"], "'picture.jpg' does not end in .png"),
    ([PROMPT, "-o", "picture"], "'picture' does not end in .png"),
    ([PROMPT, "-o", "/proc/none/picture.png"], "'/proc/none/picture.png' cannot be written"),
    ([PROMPT, "--colour", "red"], "--colour"),
    ([PROMPT, "another"], "another"),
    ([], "PROMPT"),
]


def assert_refused(outcome: object, names: str, folder: Path) -> None:
    """One line, status 2, nothing written."""
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("lanternpp: error: ")
    assert outcome.err.count("\n") == 1 and outcome.err.endswith("\n")
    assert names in outcome.err
    assert [p.name for p in folder.iterdir()] == []


@pytest.mark.parametrize("verb", ["generate", "compare"])
@pytest.mark.parametrize(("args", "names"), BEFORE_ANY_MODEL, ids=lambda v: " ".join(v)[-24:])
def test_refused_before_any_model_is_read(verb, args, names, run, elsewhere, monkeypatch) -> None:
    monkeypatch.setattr(Pipeline, "from_pretrained", lambda **_: pytest.fail("a model was read"))
    assert_refused(run(verb, *args), names, elsewhere)


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["--model", "nature-12"], "did you mean 'nature-128'?"),
        (["--model", "./none"], "'./none'"),
        (["--device", "tpu"], "'tpu'"),
        (["--device", "cuda:99"], "'cuda:99'"),
        (["--dtype", "int3"], "'int3'"),
    ],
    ids=lambda v: " ".join(v)[-24:],
)
def test_refused_before_weights_are_read(args, names, run, model, elsewhere) -> None:
    args = args if "--model" in args else [*args, "--model", model]
    assert_refused(run("generate", PROMPT, *args), names, elsewhere)


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["--neighbours", 32], "32 neighbours"),
        (["--top-k", 33], "top-k 33"),
        (["--drafter", "./none"], "'./none'"),
    ],
    ids=lambda v: " ".join(map(str, v))[-24:],
)
@pytest.mark.parametrize("verb", ["generate", "compare"])
def test_refused_by_the_model(verb, args, names, run, model, elsewhere) -> None:
    assert_refused(run(verb, PROMPT, "--model", model, *args), names, elsewhere)


def test_a_prompt_without_a_subject_lists_the_subjects(run, model, elsewhere) -> None:
    assert_refused(run("generate", "a red\nbicycle", "--model", model), "use one of: tulip", elsewhere)


def test_other_verbs_and_options_are_refused(run, elsewhere) -> None:
    assert_refused(run("paint", "x"), "paint", elsewhere)
    assert_refused(run("compare", PROMPT, "--runs", "0"), "--runs 0", elsewhere)
    assert_refused(run("models", "--no-such"), "--no-such", elsewhere)


def test_a_folder_named_like_a_picture_is_refused(run, elsewhere) -> None:
    (elsewhere / "x.png").mkdir()
    outcome = run("generate", PROMPT, "-o", "x.png")
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and "'x.png' is not a file" in outcome.err


@pytest.mark.parametrize("verb", ["generate", "compare"])
@pytest.mark.parametrize("content", ["text", "picture"])
def test_a_file_that_lanternpp_has_not_written_stays(verb, content, run, model, elsewhere) -> None:
    theirs = elsewhere / "x.png"
    if content == "text":
        theirs.write_text("mine")
    else:
        Image.new("RGB", (2, 2)).save(theirs)
    before = theirs.read_bytes()
    outcome = run(verb, PROMPT, "--model", model, "-o", "x.png")
    assert outcome.code == 2 and outcome.err.count("\n") == 1
    assert "'x.png' is a file that lanternpp has not written" in outcome.err and "--overwrite" in outcome.err
    assert theirs.read_bytes() == before
    assert run(verb, PROMPT, "--model", model, "-o", "x.png", "--overwrite").code == 0
    assert run(verb, "a tulip", "--model", model, "-o", "x.png").code == 0, "one of lanternpp is replaced"


def test_a_file_in_place_of_the_folder_is_refused(run, elsewhere) -> None:
    (elsewhere / "notes").write_text("mine")
    outcome = run("generate", PROMPT, "-o", "notes/x.png")
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and "'notes/x.png'" in outcome.err
    assert (elsewhere / "notes").read_text() == "mine"


def test_a_truncated_checkpoint_is_refused(run, broken, elsewhere) -> None:
    weights = broken / "target" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_refused(run("generate", PROMPT, "--model", broken), str(weights), elsewhere)


def test_a_foreign_checkpoint_is_refused(run, broken, elsewhere) -> None:
    config = broken / "target" / "config.json"
    config.write_text(json.dumps({"kind": "gpt2"}))
    assert_refused(run("generate", PROMPT, "--model", broken), "'gpt2'", elsewhere)


def test_another_targets_drafter_is_refused(run, broken, model, elsewhere) -> None:
    config = broken / "drafter" / "config.json"
    config.write_text(config.read_text().replace('"dim": 32', '"dim": 64'))
    assert_refused(run("generate", PROMPT, "--model", model, "--drafter", broken), "64 wide", elsewhere)


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
    assert_refused(run("generate", PROMPT, *args), names, elsewhere)


def test_without_a_smaller_target_one_sentence_says_how_to_give_one(run, broken, elsewhere) -> None:
    shutil.rmtree(broken / "independent")
    outcome = run("generate", PROMPT, "--model", broken, "--method", "independent")
    assert_refused(outcome, "name a model folder of the same codes with --drafter", elsewhere)


@pytest.mark.parametrize("verb", [["generate"], ["compare", "--runs", 1]])
def test_a_full_disk_leaves_the_old_picture(verb, run, model, elsewhere, monkeypatch) -> None:
    def full(self: Image.Image, path: Path, **_: object) -> None:
        Path(path).write_bytes(b"half a picture")
        raise OSError(errno.ENOSPC, "No space left on device")

    (elsewhere / "x.png").write_bytes(b"old")
    monkeypatch.setattr(Image.Image, "save", full)
    outcome = run(*verb, PROMPT, "--model", model, "-o", "x.png", "--overwrite")
    assert outcome.code == 2 and outcome.err.count("\n") == 1
    assert "x.png could not be written, the disk is full: free some room" in outcome.err
    assert [p.name for p in elsewhere.iterdir()] == ["x.png"]
    assert (elsewhere / "x.png").read_bytes() == b"old"
