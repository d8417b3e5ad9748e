"""`lanternpp train` as its documentation says, on tiny published checkpoints, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import write_llamagen
from helpers.families import write_janus
from helpers.latents import small_diffusion
from helpers.models import contents, write_model
from helpers.photos import write_photos
from helpers.refusals import rejects
from safetensors.torch import save_file

from lanternpp.api.rates import FILE
from lanternpp.nn import checkpoints
from lanternpp.training import drafter, pictures, teacher
from lanternpp.training.codes import folder_codes
from lanternpp.util.files import locked

SMALL = ("--steps", 2, "--checks", 1, "--batch-size", 4)
TEXTS = '{"texts": ["a", "b"]}'  # of two pictures


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LlamaGen of classes and of texts, and Janus."""
    place = tmp_path_factory.mktemp("published")
    write_llamagen(place / "c2i")
    write_llamagen(place / "t2i", text=True)
    write_janus(place / "janus")
    return place


@pytest.fixture
def workdir(published: Path, empty_dir: Path) -> Path:
    """The same in the folder where commands run, with prompts."""
    shutil.copytree(published, empty_dir, dirs_exist_ok=True)
    (empty_dir / "prompts.txt").write_text("a red tulip\nthe red\na photo of a tulip\n")
    return empty_dir


@pytest.fixture
def photos(empty_dir: Path) -> Path:
    """100 photos to train on and 4 to validate."""
    write_photos(empty_dir / "photos" / "train", 100, "tulip")
    write_photos(empty_dir / "photos" / "val", 4, "tulip")
    return empty_dir / "photos"


def own(name: str) -> tuple[object, ...]:
    """Options for a drafter that learns from what its target draws; classes need no prompts."""
    return ("--self", "--samples", 6, *(() if name == "c2i" else ("--prompts", "prompts.txt")), *SMALL)


def test_a_first_drafter_works_in_compare(run, workdir: Path) -> None:
    compare = ("compare", "7", "--model", "c2i", "--runs", 1)
    relaxed = (*compare, "--method", "lantern++")
    run(*relaxed).refused("comes without a drafter", "train one")
    drawn = run(*compare)
    assert (drawn.code, drawn.err) == (0, "") and "jacobi-coupled (auto: no drafter" in drawn.out
    done = run("train", "--model", "c2i", *own("c2i"))
    assert done.code == 0, done.err
    assert "weights in c2i/parallel" in done.err and "--model c2i --method parallel" in done.err
    run(*compare, "--method", "eagle").refused("for the parallel drafter it has, use --method parallel")
    drawn = run(*compare)
    assert (drawn.code, drawn.err) == (0, "") and "parallel (auto: " in drawn.out

    def draft() -> tuple[str, str]:
        # as the README has it, with no option that a small codebook would need
        drawn = run(*relaxed, "--no-fit", "--json")
        assert (drawn.code, drawn.err) == (0, "")
        settings = json.loads(drawn.out)["methods"][1]["settings"]
        return settings["proposer"], settings["tree"]

    assert draft() == ("parallel", "chain-6")
    done = run("train", "--model", "c2i", "--kind", "eagle", *own("c2i"))
    assert done.code == 0 and "weights in c2i/drafter" in done.err
    assert "own pictures" not in done.err, "the pictures were drawn for the other drafter"
    assert draft() == ("tree", "lantern-57")


def test_a_corrupt_photo_is_named_once_and_skipped(
    run, workdir: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = ("train", "--model", "janus", "--data", "photos", "--crops", 1, *SMALL)
    (photos / "train/red/004.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    done = run(*train)
    assert done.code == 0 and done.err.count("warning") == 1, done.err
    assert "1 of 100 pictures skipped in photos/train: red/004.png" in done.err
    facts = json.loads((workdir / "janus/parallel/provenance.json").read_text())["data"]
    assert (facts["train"], facts["skipped"]) == (99, ["red/004.png"])
    run("train", "--model", "c2i", "--data", "photos", *SMALL).refused("none of the captions of photos")
    words = ("train", "--model", write_model(workdir / "mm"), "-o", "third", "--self", "--data", "photos")
    assert "warning" not in run(*words, "--samples", 2, *SMALL).err, "one for each caption with a blue tulip"
    (photos / "train/blue/005.png").unlink()
    monkeypatch.setattr(pictures, "SHARD_SIZE", 50)  # each in a shard of its own
    for _ in range(2):  # the second time one shard is there
        again = run(*train, "-o", "other")
        assert again.code == 2 and "2 of 100 pictures in photos/train are unreadable" in again.err


def test_a_damaged_or_foreign_file_of_the_cache_is_named(run, workdir: Path, photos: Path) -> None:
    train = ("train", "--model", "janus", "--kind", "eagle", "--data", "photos", "--crops", 1, *SMALL)
    assert run(*train, "--cache-features").code == 0
    for name, content in (("features-", b"{}"), ("features-", None), ("train-", b"{}"), ("train-", None)):
        (path,) = workdir.rglob(f"{name}*/00000.safetensors")
        path.write_bytes(content) if content else save_file({"codes": torch.zeros(1)}, path)
        run(*train, "--cache-features").refused(str(path.relative_to(workdir)), "delete it to make it again")


def test_other_settings_are_named_before_anything_is_drawn_or_encoded(
    run, workdir: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = ("train", "--model", "janus", *own("janus"))
    assert run(*train).code == 0
    before = contents(workdir)
    for where, name in ((teacher.OwnCodes, "draw"), (pictures.Rows, "decode")):
        monkeypatch.setattr(where, name, lambda *_: pytest.fail("work was done"))
    run(*train, "--lr", 0.01, "--loss", "lk").refused("lr 0.002 -> 0.01", "loss 'both' -> 'lk'")
    run(*train, "--layers", 2).refused("layers 1 -> 2", "--restart")
    run(*train, "--cfg", 2).refused("cfg 5.0 -> 2.0; data '", "the training data")
    run(*train[:5], 9, *train[6:]).refused("(data '", "the training data")
    run(*train[:3], "--data", "photos", *SMALL).refused("(data '")
    assert contents(workdir) == before
    with locked(workdir / "janus/parallel"):
        run(*train[:5], 6, *train[6:]).refused("janus/parallel is being filled by another process")
    for content in ({"settings": [1]}, {}, None):
        path = workdir / "janus/parallel/state.pt"
        path.write_bytes(b"PK") if content is None else checkpoints.write_pt(path, content)
        run(*train).refused("state.pt is no state of this training: pass --restart to start over")


def test_a_drafter_is_trained_on_recorded_runs_into_another_folder(run, workdir: Path) -> None:
    base = ("train", "--model", "t2i", "--self", "--prompts", "prompts.txt", *SMALL)
    runs = ("--rollouts", 5, "--drafter", "t2i/parallel", "-o", "next")
    run(*base, *runs).refused("there is none in --drafter t2i/parallel")
    drafter = write_model(workdir / "mm") / "drafter"
    eagle = ("--rollouts", 5, "--drafter", drafter, "-o", "next")
    run(*base, *eagle).refused("mm/drafter: train one first")
    run(*base, *runs[2:], "--rollouts", 0).refused("--rollouts 0 is out of range")
    run(*base, "--rollouts", 5).refused("there is none in --drafter DIR: train one first")
    run(*base, "--method", "lantern++").refused("--method has no effect with --self: add --rollouts")
    assert run(*base, "--samples", 6).code == 0
    first = weights(workdir / "t2i/parallel")
    run(*base, *runs[:4]).refused("t2i/parallel holds the drafter that it begins with", "-o DIR")
    assert run(*base, *runs).code == 0
    second = weights(workdir / "next")
    assert second != first == weights(workdir / "t2i/parallel")
    again = run(*base, *runs)
    assert again.code == 0 and "recorded runs" not in again.err and weights(workdir / "next") == second
    run(*base, *runs[2:], "--rollouts", 6).refused("(data '")
    (workdir / "t2i/defaults.json").write_text('{"cfg": 7.5, "top_k": 9}')
    run(*base, *runs).refused("(data '", "sampling.top_k 48 -> 9")
    (workdir / "t2i/defaults.json").unlink()
    relaxed = (*base, *runs, "--method", "lantern++")
    run(*relaxed).refused("(data '")
    more = run(*relaxed, "--restart", "--levels", 16, "--aux-layers", 1, "--layers", 2)
    assert more.code == 0 and "recorded runs" in more.err and weights(workdir / "next") != second
    assert "--model t2i --drafter next --method parallel" in more.err
    config = json.loads((workdir / "next/config.json").read_text())
    assert (config["queries"], config["aux_layers"], config["layers"]) == (15, [0], 2)
    compare = ("compare", "a red tulip", "--model", "t2i", "--drafter", "next", "--runs", 1)
    drawn = run(*compare, "--method", "parallel", "--tree", "chain-16")
    assert (drawn.code, drawn.err) == (0, "")


def test_only_a_drafter_that_was_trained_there_is_replaced(
    run, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = ("train", "--model", "c2i", *own("c2i"), "--device", "cpu")
    write_model(workdir / "mm")
    before = contents(workdir)
    for folder in ("janus", "c2i", "mm", "mm/target", "mm/drafter"):
        for more in ((), ("--restart",)):
            said = f"{folder} holds something other than a drafter of --kind"
            run(*train, "-o", folder, *more).refused(said)
    run(*train, "-o", "mm/parallel").refused("mm/parallel holds a drafter without the state", "--restart")
    assert contents(workdir) == before
    assert run(*train, "-o", "mm/parallel", "--restart").code == run(*train, "-o", "mm/parallel").code == 0
    assert (workdir / "mm/parallel" / FILE).exists()

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(drafter, "record_rates", stop)
    run(*train, "-o", "mm/parallel", "--restart", "--seed", 1)
    assert not (workdir / "mm/parallel" / FILE).exists(), "the rates of the weights before"


def test_a_folder_of_codes_is_learned_from_and_acceptance_counted_on_held_out_prompts(
    run, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, record = [], drafter.record_rates

    def spy(*args: object, **more: object) -> dict[str, float]:
        drawn.append(args[3])
        return record(*args, **more)

    monkeypatch.setattr(drafter, "record_rates", spy)
    assert run("train", "--model", "t2i", *own("t2i")).code == 0
    (kept,) = (workdir / "t2i" / "codes").glob("self-*")
    assert run("train", "--model", "t2i", "-o", "mine", *SMALL, "--codes", kept).code == 0
    facts = json.loads((workdir / "mine/provenance.json").read_text())["data"]
    assert (facts["train"], facts["val"], facts["folder"]) == (9, 1, kept.name)
    assert drawn[0] == ("a photo of a tulip",)
    assert drawn[1] and set(drawn[1]) <= {"a red tulip", "the red", "a photo of a tulip"}
    train = ("train", "--model", "t2i", "-o", "other", *SMALL)
    run(*train, "--codes", kept, "--self").refused("--self has no effect with --codes")
    run(*train, "--codes", "t2i").refused("is no file of this model's codes: it needs finite `codes` [n, ")
    run(*train, "--codes", "none").refused("none has no codes: --codes takes a folder")


@pytest.mark.parametrize(
    ("codes", "facts"),
    [
        (torch.zeros(0, 16), '{"texts": []}'),
        (torch.zeros(2, 16), "[1]"),
        (torch.zeros(2, 16), '{"texts": ["a"]}'),
        (torch.zeros(2, 16), '{"texts": ["a", null]}'),
        (torch.full((2, 16), 0.5), '{"texts": ["a", "b"]}'),
        (torch.full((2, 16), torch.nan), '{"texts": ["a", "b"]}'),
        (torch.full((2, 16), 9999), '{"texts": ["a", "b"]}'),
        (torch.zeros(2, 16), "{"),
    ],
)
def test_a_wrong_file_of_codes_is_rejected(codes: torch.Tensor, facts: str, run, workdir: Path) -> None:
    save_file({"codes": codes}, workdir / "x.safetensors", metadata={"facts": facts})
    refused = run("train", "--model", "janus", "-o", "mine", "--codes", ".", *SMALL)
    said = "cannot be read (Expecting property name" if facts == "{" else "is no file of this model's codes"
    refused.refused(f"x.safetensors {said}")
    assert "delete" not in refused.err


@pytest.mark.parametrize(
    "latents", [torch.full((2, 4, 2), torch.nan), torch.zeros(2, 4, 2).long(), torch.zeros(2, 4, 4)]
)
def test_files_of_latents_are_finite_and_alike(latents: torch.Tensor, tmp_path: Path) -> None:
    for name, each in ("x", torch.zeros(2, 4, 2)), ("y", latents):
        save_file({"codes": each}, tmp_path / f"{name}.safetensors", {"facts": '{"texts": ["a", "b"]}'})
    said = r"y.safetensors is no file of this model's codes: .* \[n, 4, 2\], latents, or \[n, 4, 4\], moments"
    rejects(said, folder_codes, tmp_path, small_diffusion()[0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--kind", "eagle", "--levels", 9), "--levels is for --kind parallel"),
        (("--kind", "eagle", "--muon-lr", 0.1), "--muon-lr is for --kind parallel"),
        (("--kind", "eagle", "--rollouts", 2), "--rollouts is for --kind parallel"),
        (("--kind", "eagle", "--loss", "block"), "loss 'block' is none of eagle's"),
        (("--kind", "eagle", "--drop-captions", 0.5), "with --loss guided: add --loss paper"),
        (("--loss", "paper"), "loss 'paper' is none of parallel's: choose guided, lk, both, block"),
        (("--levels", 1), "--levels 1 is out of range; use 2 to 64"),
        (("--rounds", 2), "--rounds is for --kind eagle: leave it out, or give that --kind"),
        (("--cache-features",), "--cache-features is for --kind eagle"),
        (("--rollouts", 2, "--drafter", "d"), "--samples has no effect with --rollouts: leave one"),
        (("--crops", 3), "--crops has no effect with --self: leave one of the two out"),
        (("--limit", 3), "--limit has no effect with --self"),
        (("--aux-layers", 2), "--aux-layers 2 is too many: the target has 1 layers below"),
        (("--kind", "eagle", "--inherit"), "--inherit needs 1 block of the target"),
    ],
)
def test_wrong_options_are_rejected(options: tuple[object, ...], said: str, run, workdir: Path) -> None:
    run("train", "--model", "janus", *own("janus"), *options).refused(said)
    assert not list((workdir / "janus").glob("*/state.pt")) and not (workdir / "janus/codes").exists()


def weights(folder: Path) -> dict[str, list[float]]:
    """All numbers of a drafter."""
    return {name: tensor.tolist() for name, tensor in checkpoints.load(folder)[1].items()}
