"""`lanternpp models`: the list, conversion, and compiled steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import checkpoints as published
from helpers.classifiers import write_classifier
from helpers.families import with_drafters
from helpers.latents import write_diffusion
from helpers.models import contents, write_model
from PIL import Image

from lanternpp.api.options import METHODS
from lanternpp.api.pipeline import Pipeline
from lanternpp.engine import compiled
from lanternpp.evaluation.classifier import read_classifier
from lanternpp.evaluation.quality import read_reference
from lanternpp.models.hub import quiet
from lanternpp.nn import checkpoints
from lanternpp.trees import TREES


def test_weights_in_8_bits_are_close_and_less_than_half_as_large(run, model: Path, tmp_path: Path) -> None:
    out, model = tmp_path / "small", Path(shutil.copytree(model, tmp_path / "tiny"))
    rates = ("acceptance.json", "parallel/acceptance.json")  # by which drafts are fitted
    for name in rates:
        (model / name).write_text('{"acceptance": []}')
    (model / "classifier").mkdir()  # of another program
    done = run("models", "convert", model, out)
    assert (done.code, done.err) == (0, "") and not (out / "classifier").exists()
    sizes = [(folder / "target" / "model.safetensors").stat().st_size for folder in (model, out)]
    assert sizes[1] < 0.45 * sizes[0]
    for part in ("tokenizer", "target", "drafter"):
        before, after = (checkpoints.load(folder / part)[1] for folder in (model, out))
        for name, tensor in before.items():
            step = tensor.float().abs().amax() / 127
            assert (tensor - after[name]).abs().max() <= 0.51 * step, name
    for name in ("defaults.json", *rates):
        assert (out / name).read_bytes() == (model / name).read_bytes()
    for path in (out, out / "target/model.safetensors"):
        assert run("generate", "a red tulip", "--model", path, "-o", tmp_path / "t.png").code == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("nowhere", "out"), ["nowhere"]),
        ((".", "out"), ["no checkpoint"]),
        (("MODEL", "MODEL"), ["name a new folder"]),
        (("MODEL", "out", "--size", 256), ["published"]),
        (("MODEL", "out", "--vq", "gone.pt"), ["published"]),
        (("MODEL", "out", "--store", "int4"), ["int4"]),
        (("MODEL", "out", "--text", "gone"), ["--text 'gone' does not exist"]),
        (("nature-128", "file/m"), ["cannot be a folder", "file is a file"]),
    ],
)
def test_wrong_conversions_are_rejected(run, model, arguments, named, empty_dir: Path) -> None:
    (empty_dir / "file").write_text("mine")
    run("models", "convert", *[model if a == "MODEL" else a for a in arguments]).refused(*named)
    assert not (empty_dir / "out").exists()


def test_a_model_is_replaced_only_with_overwrite(run, model: Path, tmp_path: Path) -> None:
    trained = write_model(tmp_path / "trained", grid=8)
    (trained / "notes.txt").write_text("mine")
    (trained / "target" / "state.pt").write_bytes(b"of its training")

    before = contents(trained)
    run("models", "convert", model, trained).refused("holds a model", "--overwrite")
    assert contents(trained) == before
    source = Path(shutil.copytree(model, tmp_path / "source"))
    shutil.rmtree(source / "parallel")
    weights = (source / "drafter" / "model.safetensors").read_bytes()
    (source / "drafter" / "model.safetensors").write_bytes(weights[:-50])
    assert run("models", "convert", source, trained, "--overwrite").code == 2 and contents(trained) == before
    (source / "drafter" / "model.safetensors").write_bytes(weights)
    assert run("models", "convert", source, trained, "--overwrite").code == 0
    after = contents(trained)
    assert after.pop("notes.txt") == b"mine"
    run("models", "convert", source, tmp_path / "new")
    new = contents(tmp_path / "new")
    assert {name: len(data) for name, data in after.items()} == {name: len(new[name]) for name in new}


def test_files_are_replaced_only_with_overwrite_and_others_are_kept(
    run, model: Path, empty_dir: Path, tmp_path: Path
) -> None:
    mine = dict.fromkeys(("text/notes", "classifier/work", "defaults.json", "README.md"), b"mine")
    for name, data in mine.items():
        (empty_dir / name).parent.mkdir(exist_ok=True)
        (empty_dir / name).write_bytes(data)
    run("models", "convert", model, ".").refused("classifier, text, defaults.json, README.md", "--overwrite")
    assert contents(empty_dir) == mine
    (tmp_path / "link").symlink_to(tmp_path / "new")
    for out in (".", tmp_path / "link"):
        assert run("models", "convert", model, out, "--overwrite").code == 0
    after, new = contents(empty_dir), contents(tmp_path / "new")
    assert after.keys() == new.keys() | mine.keys()
    assert {name for name in mine if after[name] == b"mine"} == mine.keys() - {"defaults.json"}


def test_published_files_become_a_folder_that_draws_the_same(run, tmp_path: Path) -> None:
    files = published.write_llamagen(tmp_path / "files", text=True)
    parts = tmp_path / "parts"
    parts.mkdir()
    for name in ("t2i_XL_tiny.pt", "vq_ds16.pt", "flan-t5-xl"):
        shutil.move(files / name, parts / name)
    (tmp_path / "alone").mkdir()
    target = shutil.move(parts / "t2i_XL_tiny.pt", tmp_path / "alone" / "t2i.pt")
    out = tmp_path / "out"
    run("models", "convert", target, out, "--size", 64).refused("--vq FILE")
    args = ("--vq", parts / "vq_ds16.pt", "--text", parts / "flan-t5-xl")
    run("models", "convert", target, out, *args).refused("--size")
    assert not out.exists()
    done = run("models", "convert", target, out, *args, "--size", 64, "--store", "float32")
    assert (done.code, done.err) == (0, "") and "target, tokenizer, text" in done.out
    again = published.write_llamagen(tmp_path / "again", text=True)
    in_half(again / "flan-t5-xl")
    for model in (again, out):
        draw = ("generate", "a red tulip", "--model", model, "--method", "ar", "--dtype", "float32")
        assert run(*draw, "--top-k", 40, "-o", tmp_path / f"{model.name}.png").code == 0
    pictures = (Image.open(tmp_path / name).tobytes() for name in ("again.png", "out.png"))
    assert len(set(pictures)) == 1
    small = tmp_path / "small"
    assert run("models", "convert", out, small).code == 0
    assert (small / "text" / "config.json").is_file()
    weights = [folder / "target/model.safetensors" for folder in (small, out)]
    assert run("generate", "tulip", "--model", weights[0], "--method", "ar", "-o", out / "s.png").code == 0
    assert weights[0].stat().st_size < weights[1].stat().st_size / 3


def test_networks_and_settings_in_a_published_folder_are_converted_too(run, tmp_path: Path) -> None:
    files, out = with_drafters(published.write_llamagen(tmp_path / "files", text=True)), tmp_path / "out"
    shutil.rmtree(files / "drafter")
    published.write_drafter(files / "drafter", text=True)
    published.write_llamagen(files / "independent", text=True)
    kept = {"defaults.json": '{"methods": {"eagle": {"cfg": 2.0}}}'}
    kept |= dict.fromkeys(("acceptance.json", "parallel/acceptance.json"), '{"acceptance": []}')
    for name, text in kept.items():
        (files / name).write_text(text)
    (files / "drafter" / "state.pt").write_bytes(b"of its training")
    done = run("models", "convert", files, out, "--store", "int8")
    assert (done.code, done.err) == (0, "") and "text, drafter, parallel, independent" in done.out
    for name in (*kept, "drafter/config.json", "drafter/pytorch_model.bin", "independent/t2i_XL_tiny.pt"):
        assert (out / name).read_bytes() == (files / name).read_bytes(), name
    assert not (out / "drafter" / "state.pt").exists()
    sizes = [(folder / "parallel/model.safetensors").stat().st_size for folder in (out, files)]
    assert sizes[0] < sizes[1] / 2
    for method in ("eagle", "parallel", "independent"):
        assert (
            run("generate", "a tulip", "--model", out, "--method", method, "-o", tmp_path / "a.png").code == 0
        )


def in_half(folder: Path) -> None:
    """The encoder as `convert` stores it."""
    from transformers import T5EncoderModel

    with quiet():
        T5EncoderModel.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)


def test_wrong_tokenizers_and_encoders_are_rejected(run, tmp_path: Path) -> None:
    files = published.write_llamagen(tmp_path / "files", text=True)
    convert = ("models", "convert", files / "t2i_XL_tiny.pt", tmp_path / "out")
    run(*convert, "--vq", files / "t2i_XL_tiny.pt").refused("no image tokenizer")
    run(*convert, "--vq", files / "gone.pt").refused("gone.pt")
    run(*convert, "--text", tmp_path).refused("no folder of a T5")
    assert not (tmp_path / "out").exists()


def test_a_classifier_and_a_smaller_target_are_copied_without_training_states(
    run, model: Path, tmp_path: Path
) -> None:
    source, small = write_classifier(Path(shutil.copytree(model, tmp_path / "own"))), tmp_path / "small"
    before = contents(source / "independent")
    (source / "prompts.txt").write_text("a red tulip\n")
    for part in ("classifier", "independent/target"):
        (source / part / "state.pt").write_bytes(b"of the training")
    done = run("models", "convert", source, small)
    assert done.code == 0 and "independent, classifier" in done.out
    assert contents(small / "classifier").keys() == {
        "config.json",
        "model.safetensors",
        "reference.safetensors",
    }
    # raises if it were of other weights
    assert len(read_reference(small, read_classifier(small))) == 24
    assert (small / "prompts.txt").read_text() == "a red tulip\n"
    assert contents(small / "independent") == before


def test_models_truncates_no_name_on_a_narrow_terminal(run, monkeypatch) -> None:
    for columns in (40, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        outcome = run("models")
        assert outcome.code == 0 and outcome.err == "" and "…" not in outcome.out
        words = set(outcome.out.split())
        assert {"nature-128", *METHODS, *TREES} <= words
        for each in run("models", "--json").json["published"]:
            assert each["model"] in words and each["download"] in outcome.out
            assert (each["drafter"] or "--drafter") in words


def test_models_lists_the_draft_of_each_method_on_a_model(run, broken: Path) -> None:
    reported = run("models", "--json").json
    assert next(row for row in reported["models"] if row["name"] == "nature-128")["bytes"] > 1e6
    assert {row["name"]: row["nodes"] for row in reported["trees"]}["lantern-57"] == 57
    rows = {row["name"]: row for row in reported["methods"]}
    lossless = {name for name, row in rows.items() if row["lossless"]}
    assert lossless == {"ar", "eagle", "eagle2", "ddd", "independent", "parallel", "jacobi", "jacobi-coupled"}
    mine = rows["lantern++"]
    assert (mine["proposer"], mine["tree"], mine["dials"]["lam"]) == ("parallel", "chain-7", 2.0)
    assert reported["auto"]["method"] == "lantern++" and rows["independent"]["missing"] == "independent"
    shutil.rmtree(broken / "parallel")
    other = run("models", "--json", "--model", broken).json
    rows = {row["name"]: row for row in other["methods"]}
    assert (rows["lantern++"]["tree"], rows["lantern++"]["dials"]["neighbours"]) == ("lantern-57", 8)
    assert rows["parallel"]["missing"] == "parallel" and rows["eagle"]["missing"] is None
    own = run("models", "--model", broken).out
    assert own.startswith(f"On {broken}, ") and "lantern-57" in own and "nature-128" not in own
    run("models", "--model", "somebody/something").refused("is not on this machine")


def test_warm_without_anything_to_compile_and_with_wrong_options(
    run, model, tmp_path: Path, monkeypatch
) -> None:
    outcome = run("models", "warm", "--model", model, "--device", "cpu")
    said = "nothing to compile here: a CPU compiles steps with --compile alone\n"
    assert (outcome.code, outcome.out) == (0, said)
    run("models", "warm", "--model", model, "--batch-size", 2).refused("--batch-sizes")
    monkeypatch.setattr(Pipeline, "warm", lambda *_: ["verify"])
    outcome = run("models", "warm", "--model", model, "--device", "cpu", "--compile")
    assert outcome.code == 0 and "drawn as it is" in outcome.err and outcome.out.startswith("ready after")
    latents = ("--model", write_diffusion(tmp_path), "--compile")
    for verb in (("models", "warm"), ("generate", "a red tulip")):
        run(*verb, *latents).refused("draws latents, whose steps are never compiled; leave --compile out")


def test_steps_are_compiled_at_every_size_for_the_method_and_plain_decoding(
    run, model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compiled.FOLDER_VARIABLE, str(tmp_path / "made"))
    # What is traced is tested with the engine.
    monkeypatch.setattr(torch, "compile", lambda part, **_: part)
    args = ["--model", model, "--device", "cpu", "--compile", "--method", "parallel", "--tree", "chain-2"]
    outcome = run("models", "warm", *args, "--batch-sizes", "1,2")
    assert outcome.code == 0 and "not compiled" not in outcome.err
    steps = [line for line in outcome.out.splitlines() if line.startswith("steps of ")]
    kept = f"in {tmp_path / 'made'}"
    assert steps == [f"steps of {m}, {n} at a time: {kept}" for n in (1, 2) for m in ("ar", "parallel")]
    marks = [json.loads(path.read_text()) for path in (tmp_path / "made").glob("warm-*.json")]
    found = sorted((mark["method"], mark["batch_size"], mark["compile"]) for mark in marks)
    assert found == [(method, n, True) for method in ("ar", "parallel") for n in (1, 2)]
