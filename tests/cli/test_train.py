"""`lanternpp train` as its documentation says, on tiny published checkpoints, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.checkpoints import write_llamagen
from helpers.families import write_janus
from PIL import Image
from safetensors.torch import save_file

from lanternpp.nn import checkpoints
from lanternpp.training import codes
from lanternpp.util import files

PROMPT = {"c2i": "7", "t2i": "a red tulip", "janus": "a photo of the red tulip"}
SMALL = ("--steps", 2, "--checks", 1, "--batch-size", 4)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LlamaGen of classes and of texts, and Janus."""
    place = tmp_path_factory.mktemp("published")
    write_llamagen(place / "c2i")
    write_llamagen(place / "t2i", text=True)
    write_janus(place / "janus")
    return place


@pytest.fixture
def shelf(published: Path, elsewhere: Path) -> Path:
    """The same in the folder where commands run, with prompts."""
    shutil.copytree(published, elsewhere, dirs_exist_ok=True)
    (elsewhere / "prompts.txt").write_text("a red tulip\nthe red\na photo of a tulip\n")
    return elsewhere


@pytest.fixture
def photos(elsewhere: Path) -> Path:
    """100 photos to train on and 4 to validate."""
    random = np.random.default_rng(0)
    for split, count in (("train", 100), ("val", 4)):
        folder = elsewhere / "photos" / split
        folder.mkdir(parents=True)
        for i in range(count):
            pixels = random.integers(0, 255, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{i:03d}.png")
        rows = [{"file_name": f"{i:03d}.png", "text": "a photo of the red tulip"} for i in range(count)]
        (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return elsewhere / "photos"


def own(name: str) -> tuple[object, ...]:
    """Options for a drafter that learns from what its target draws; classes need no prompts."""
    return ("--self", "--samples", 6, *(() if name == "c2i" else ("--prompts", "prompts.txt")), *SMALL)


def refused(outcome: object, *said: str) -> None:
    """One line and status 2."""
    assert outcome.code == 2 and outcome.err.count("\n") == 1, outcome.err
    for words in said:
        assert words in outcome.err, outcome.err


@pytest.mark.parametrize("name", PROMPT)
def test_a_newcomers_drafter_works_in_compare(name: str, run, shelf: Path) -> None:
    compare = ("compare", PROMPT[name], "--model", name, "--runs", 1)
    relaxed = (*compare, "--method", "lantern++")
    refused(run(*relaxed), "comes without a drafter", "train one")
    drawn = run(*compare)
    assert (drawn.code, drawn.err) == (0, "") and "jacobi-coupled (auto: no drafter" in drawn.out
    done = run("train", "--model", name, "--kind", "parallel", *own(name))
    assert done.code == 0, done.err
    assert f"weights in {name}/parallel" in done.err and f"--model {name} --method parallel" in done.err
    refused(run(*relaxed), "for the parallel drafter it has, use --method parallel")
    drawn = run(*compare)
    assert (drawn.code, drawn.err) == (0, "") and "parallel (auto: " in drawn.out
    done = run("train", "--model", name, *own(name))
    assert done.code == 0 and f"weights in {name}/drafter" in done.err
    assert "own pictures" not in done.err, "the pictures were drawn for the other drafter"
    drawn = run(*relaxed)  # as the README has it, with no option that a small codebook would need
    assert (drawn.code, drawn.err) == (0, "") and "lantern++" in drawn.out


@pytest.mark.parametrize("kind", ["eagle", "parallel"])
def test_a_drafter_elsewhere_is_named(kind: str, run, shelf: Path) -> None:
    done = run("train", "--model", "janus", "--kind", kind, "-o", "mine", *own("janus"))
    assert done.code == 0 and f"--drafter mine --method {kind}" in done.err
    assert not (shelf / "janus" / "drafter").exists()
    compare = ("compare", PROMPT["janus"], "--model", "janus", "--runs", 1, "--method", kind, "--json")
    drawn = run(*compare, "--drafter", "mine")
    assert (drawn.code, drawn.err) == (0, "")
    assert [row["method"] for row in json.loads(drawn.out)["methods"]] == ["ar", kind]


def test_a_corrupt_photo_is_named_once_and_left_out(run, shelf: Path, photos: Path) -> None:
    train = ("train", "--model", "janus", "--data", "photos", "--crops", 1, *SMALL)
    (photos / "train" / "004.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    done = run(*train)
    assert done.code == 0, done.err
    assert done.err.count("warning") == 1 and "1 of 100 pictures skipped in photos/train: 004.png" in done.err
    facts = json.loads((shelf / "janus/drafter/provenance.json").read_text())["data"]
    assert (facts["train"], facts["skipped"]) == (99, ["004.png"])
    assert run("compare", PROMPT["janus"], "--model", "janus", "--runs", 1).code == 0
    (photos / "train" / "005.png").unlink()
    refused(
        run(*train, "-o", "other"), "2 of 100 pictures in photos/train are unreadable", "005.png (missing)"
    )
    assert not (shelf / "other").exists()


def test_a_folder_without_captions_is_refused(run, shelf: Path, photos: Path) -> None:
    train = ("train", "--model", "janus", *SMALL)
    (photos / "train" / "metadata.jsonl").write_text("")
    refused(run(*train, "--data", "photos"), "names none of the 100 pictures")
    (photos / "train" / "metadata.jsonl").write_text('{"file_name": "000.png"}\n')
    refused(run(*train, "--data", "photos", "--self"), "line 1, has no 'text'")
    (photos / "train" / "metadata.jsonl").unlink()
    refused(run(*train, "--data", "photos"), "metadata.jsonl is missing", "file_name and text")
    refused(run(*train, "--data", "none"), "none is no folder")
    assert not (shelf / "janus" / "drafter").exists() and not (shelf / "janus" / "codes").exists()


def test_other_settings_are_named_before_anything_is_drawn_or_encoded(
    run, shelf: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = ("train", "--model", "janus", *own("janus"))
    assert run(*train).code == 0
    before = {path: path.read_bytes() for path in shelf.rglob("*") if path.is_file()}
    for name in ("generate", "decode"):
        monkeypatch.setattr(codes, name, lambda *_: pytest.fail("work was done"))
    refused(run(*train, "--lr", 0.01, "--loss", "lk"), "lr 0.001 -> 0.01", "loss 'guided' -> 'lk'")
    refused(run(*train, "--layers", 2), "layers 1 -> 2", "--restart")
    refused(run(*train, "--cfg", 2), "cfg 5.0 -> 2.0; data '", "what it learns from")
    refused(run(*train[:5], 9, *train[6:]), "(data '", "what it learns from")
    refused(run(*train[:3], "--data", "photos", *SMALL), "(data '")
    assert {path: path.read_bytes() for path in shelf.rglob("*") if path.is_file()} == before


def test_a_drafter_goes_on_from_recorded_runs_in_another_folder(run, shelf: Path) -> None:
    base = ("train", "--model", "t2i", "--kind", "parallel", "--self", "--prompts", "prompts.txt", *SMALL)
    runs = ("--rollouts", 5, "--drafter", "t2i/parallel", "-o", "next")
    refused(run(*base, *runs), "t2i/parallel holds no parallel drafter to go on with")
    refused(run(*base, *runs[2:], "--rollouts", 0), "--rollouts 0 is out of range")
    refused(run(*base, "--rollouts", 5), "give both")
    refused(run(*base, "--method", "lantern++"), "give both")
    assert run(*base, "--samples", 6).code == 0
    first = weights(shelf / "t2i/parallel")
    refused(run(*base, *runs[:4]), "t2i/parallel holds the drafter that it begins with", "-o DIR")
    assert run(*base, *runs).code == 0
    second = weights(shelf / "next")
    assert second != first == weights(shelf / "t2i/parallel")
    again = run(*base, *runs)
    assert again.code == 0 and "recorded runs" not in again.err and weights(shelf / "next") == second
    refused(run(*base, *runs[2:], "--rollouts", 6), "(data '")
    relaxed = (*base, *runs, "--method", "lantern++")
    refused(run(*relaxed), "(data '")
    more = run(*relaxed, "--restart", "--levels", 16, "--aux-layers", 1, "--layers", 2)
    assert more.code == 0 and "recorded runs" in more.err and weights(shelf / "next") != second
    config = json.loads((shelf / "next/config.json").read_text())
    assert (config["queries"], config["aux_layers"], config["layers"]) == (15, [0], 2)
    compare = ("compare", PROMPT["t2i"], "--model", "t2i", "--drafter", "next", "--runs", 1)
    drawn = run(*compare, "--method", "parallel", "--tree", "chain-16")
    assert (drawn.code, drawn.err) == (0, "")


def test_a_folder_of_codes_is_learned_from(run, shelf: Path) -> None:
    assert run("train", "--model", "janus", *own("janus")).code == 0
    (kept,) = (shelf / "janus" / "codes").glob("self-*")
    train = ("train", "--model", "janus", "-o", "mine", *SMALL)
    done = run(*train, "--codes", kept, "--kind", "parallel")
    assert done.code == 0, done.err
    facts = json.loads((shelf / "mine/provenance.json").read_text())["data"]
    assert (facts["train"], facts["val"], facts["folder"]) == (9, 1, kept.name)
    train = ("train", "--model", "janus", "-o", "other", *SMALL)
    refused(run(*train, "--codes", kept, "--self"), "leave --self and --data out")
    refused(run(*train, "--codes", "janus"), "has no `codes` [n, ")
    refused(run(*train, "--codes", "none"), "none has no codes: --codes takes a folder")
    codes = {"codes": torch.full((2, 16), 9999)}
    save_file(codes, shelf / "x.safetensors", metadata={"facts": '{"texts": ["a", "b"]}'})
    refused(run(*train, "--codes", "."), "x.safetensors has codes that are not of 0 to ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--levels", 9), "--levels is for drafters of --kind parallel"),
        (("--muon-lr", 0.1), "--muon-lr is for drafters of --kind parallel"),
        (("--rollouts", 2), "--rollouts is for drafters of --kind parallel"),
        (("--loss", "block"), "loss 'block' is none of eagle's"),
        (("--taps", 2), "--taps is now --aux-layers"),
        (("--kind", "parallel", "--rounds", 2), "--rounds is for drafters of --kind eagle"),
        (("--kind", "parallel", "--cache-features"), "--cache-features is for drafters of --kind eagle"),
        (
            ("--kind", "parallel", "--aux-layers", 2),
            "--aux-layers 2 is too many: the target has 1 layers below",
        ),
    ],
)
def test_what_a_training_cannot_do_is_refused(
    options: tuple[object, ...], said: str, run, shelf: Path
) -> None:
    refused(run("train", "--model", "janus", *own("janus"), *options), said)
    assert not list((shelf / "janus").glob("*/state.pt"))


def weights(folder: Path) -> dict[str, list[float]]:
    """All numbers of a drafter."""
    return {name: tensor.tolist() for name, tensor in checkpoints.load(folder)[1].items()}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("kind", ["eagle", "parallel"])
def test_a_full_disk_is_one_sentence_and_the_training_goes_on_later(
    kind: str, run, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = ("train", "--model", "janus", "--kind", kind, *own("janus"))
    place = shelf / "janus" / ("drafter" if kind == "eagle" else kind)
    enter = files.replacing.__enter__

    def full(self: files.replacing) -> Path:
        if self.path.name == expected:
            self.temporary.symlink_to("/dev/full")
        return enter(self)

    monkeypatch.setattr(files.replacing, "__enter__", full)
    for expected in ("state.pt", "config.json"):
        outcome = run(*train)
        last = outcome.err.splitlines()[-1]
        assert outcome.code == 2 and f"{expected} could not be written, the disk is full: free some" in last
        assert not (place / "config.json").exists() and not list(place.glob(".*"))
    expected = ""
    assert run(*train).code == 0
    assert run("compare", PROMPT["janus"], "--model", "janus", "--runs", 1, "--method", kind).code == 0


def test_a_drafter_of_another_target_is_refused_or_warned_of(run, shelf: Path) -> None:
    assert run("train", "--model", "t2i", *own("t2i")).code == 0
    assert run("train", "--model", "janus", *own("janus")).code == 0
    for verb in (("compare", "a red tulip"), ("tune", "--prompts", "prompts.txt", "--no-plots")):
        refused(
            run(*verb, "--model", "janus", "--drafter", "t2i/drafter"),
            "t2i/drafter is 64 wide and the target 32",
        )
    target = shelf / "janus" / "model.safetensors"
    tensors = checkpoints.read_safetensors(target)
    save_file({name: x.flip(0) for name, x in tensors.items()}, target, metadata={"format": "pt"})
    drawn = run("compare", PROMPT["janus"], "--model", "janus", "--runs", 1)
    assert drawn.code == 0 and "trained for another target than this one" in drawn.err
    refused(run("train", "--model", "janus", *own("janus")), "target '", "the target's weights")
