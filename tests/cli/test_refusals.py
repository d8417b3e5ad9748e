"""Every wrong input is one line on stderr that names it, status 2, and no file."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers.checkpoints import write_drafter
from helpers.families import write_chameleon, write_eagle
from helpers.models import update_json
from PIL import Image
from safetensors.torch import load_file, save_file

from lanternpp import Pipeline
from lanternpp.engine.decode import Engine
from lanternpp.models.hub import quiet

PROMPT = "a red tulip"
BEFORE_A_MODEL_IS_READ = [
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
    ([PROMPT, "--method", "jacobi", "--alternatives", "17"], "--alternatives 17 is out of range; use 0"),
    ([PROMPT, "--method", "jacobi", "--init", "old"], "init 'old' is unknown"),
    ([PROMPT, "--proposer", "jakobi"], "did you mean 'jacobi'?"),
    ([PROMPT, "--accept", "lantern"], "needs neighbours and delta"),
    ([PROMPT, "--delta", "0.5"], "delta 0.5 would change nothing: method 'lantern++', which auto takes here"),
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
    ([PROMPT, "--tree", ""], "tree '' is no text"),
    ([PROMPT, "-o", "picture.jpg"], "'picture.jpg' does not end in .png"),
    ([PROMPT, "-o", "/proc/none/picture.png"], "'/proc/none/picture.png' cannot be written"),
    ([PROMPT, "--colour", "red"], "--colour"),
    ([PROMPT, "another"], "another"),
    ([PROMPT, "-o", "-"], "'-' is no file"),
    ([], "PROMPT"),
]


@pytest.mark.parametrize(
    ("verb", "args", "names"),
    [("generate", *row) for row in BEFORE_A_MODEL_IS_READ]
    + [("compare", *row) for row in BEFORE_A_MODEL_IS_READ[::6]],
)
def test_wrong_options_are_rejected_before_a_model_is_read(
    verb, args, names, run, empty_dir, monkeypatch
) -> None:
    monkeypatch.setattr(Pipeline, "from_pretrained", lambda **_: pytest.fail("a model was read"))
    run(verb, *args).refused(names)


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["--model", "nature-12"], "did you mean 'nature-128'?"),
        (["--model", "./none"], "'./none'"),
        (["--model", "x" * 5000], "File name too long"),
        (["--device", "tpu"], "'tpu'"),
        (["--device", "cuda:99"], "'cuda:99'"),
        (["--dtype", "int3"], "'int3'"),
        (["--neighbours", 32], "32 neighbours"),
        (["--top-k", 33], "top-k 33"),
        (["--drafter", "./none"], "'./none'"),
    ],
    ids=lambda v: " ".join(map(str, v))[-24:],
)
def test_options_that_the_model_does_not_support_are_rejected(args, names, run, model) -> None:
    run("generate", PROMPT, *args, *(() if "--model" in args else ("--model", model))).refused(names)


def test_unknown_verbs_and_subjects_and_wrong_outputs_are_rejected(run, model, empty_dir) -> None:
    run("generate", "a red\nbicycle", "--model", model).refused("use one of: tulip")
    run("paint", "x").refused("paint")
    run("compare", PROMPT, "--runs", "0").refused("--runs 0")
    run("models", "--no-such").refused("--no-such")
    said = "unexpected 'eagle k=1': a value with spaces needs quotes"
    run("bench", "--methods", "ar", "eagle k=1").refused(said)
    (empty_dir / "x.png").mkdir()
    (empty_dir / "notes").write_text("mine")
    run("generate", PROMPT, "-o", "x.png").refused("'x.png' is not a file")
    run("generate", PROMPT, "-o", "notes/x.png").refused("'notes/x.png'")
    assert (empty_dir / "notes").read_text() == "mine"


@pytest.mark.parametrize(("verb", "content"), [("generate", "text"), ("compare", "picture")])
def test_a_file_that_lanternpp_has_not_written_is_kept(verb, content, run, model, empty_dir) -> None:
    file = empty_dir / "x.png"
    if content == "text":
        file.write_text("mine")
    else:
        Image.new("RGB", (2, 2)).save(file)
    before = file.read_bytes()
    said = ("'x.png' is a file that lanternpp has not written", "--overwrite")
    run(verb, PROMPT, "--model", model, "-o", "x.png").refused(*said)
    assert file.read_bytes() == before
    assert run(verb, PROMPT, "--model", model, "-o", "x.png", "--overwrite").code == 0
    assert run(verb, "a tulip", "--model", model, "-o", "x.png").code == 0, "one of lanternpp is replaced"


def test_a_smaller_target_that_is_missing_or_of_other_codes_is_rejected(run, model, smaller, broken) -> None:
    draw = ("generate", PROMPT, "--method", "independent", "--model")
    shutil.rmtree(broken / "independent")
    run(*draw, broken).refused("name a model folder of the same codes with --drafter")
    for shape, said in (
        ({"vocab": 24}, "16 of 24 codes and the target 16 of 32"),
        ({"grid": 3}, "9 of 32 codes and the target 16 of 32"),
        ({}, "the drafter's codebook is another than the target's"),
    ):
        run(*draw, model, "--drafter", smaller(**shape)).refused(said)


def test_a_full_disk_leaves_the_old_picture(run, model, empty_dir, monkeypatch) -> None:
    write = Path.write_bytes

    def full(self: Path, data: bytes) -> None:
        write(self, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    (empty_dir / "x.png").write_bytes(b"old")
    monkeypatch.setattr(Path, "write_bytes", full)
    outcome = run("generate", PROMPT, "--model", model, "-o", "x.png", "--overwrite")
    outcome.refused("x.png could not be written, the disk is full: free some room")
    assert [p.name for p in empty_dir.iterdir()] == ["x.png"]
    assert (empty_dir / "x.png").read_bytes() == b"old"


def test_a_card_without_enough_memory_is_named_in_a_sentence(run, model, monkeypatch) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.")
    monkeypatch.setattr(Engine, "admit", Mock(side_effect=error))
    run("generate", PROMPT, "--model", model).refused("CUDA out of memory; use a smaller --batch-size")


def test_published_files_that_do_not_fit_are_rejected(run, tmp_path: Path) -> None:
    anole, drafters = tmp_path / "anole", (tmp_path / "wide", tmp_path / "published")
    with quiet():
        write_chameleon(anole)
    draw = ("generate", "a photo", "--model", anole)
    write_eagle(drafters[0], 64)
    write_drafter(drafters[1])  # one that EAGLE's code wrote
    for drafter in drafters:
        run(*draw, "--drafter", drafter).refused(str(drafter), "64 wide", "the target 32")
    path = anole / "model.safetensors"
    tensors = load_file(path) | {"model.vqmodel.quantize.embedding.weight": torch.ones(128, 4)}
    save_file(tensors, path, metadata={"format": "pt"})
    run(*draw, "--method", "ar").refused("has 64 codes", "has 128")
    path.write_bytes(path.read_bytes()[:-99])
    run(*draw, "--method", "ar").refused("model.safetensors", "truncated")


TARGET, VQ, DRAFTER, DEFAULTS = (
    *(f"{part}/config.json" for part in ("target", "tokenizer", "drafter")),
    "defaults.json",
)


@pytest.mark.parametrize(
    ("file", "fields", "said"),
    [
        (TARGET, {"heads": 0}, "heads 0 cannot be used: it should be greater than or equal to 1"),
        (TARGET, {"layers": 100_000}, "layers 100000 cannot be used: it should be less than or equal to 512"),
        (TARGET, {"dim": 65536, "layers": 512, "hidden": 262144}, "does not fit WordsTarget"),
        (TARGET, {"heads": 3}, "no network has the sizes of its config.json"),
        (TARGET, {"kind": "gpt2"}, "'gpt2'"),
        (VQ, {"channels": [50, 50]}, "no network has the sizes of its config.json"),
        (VQ, {"channels": [8192, 8192], "codes": 1 << 20}, "does not fit VQ"),
        (VQ, {"kind": ["vq"]}, "kind ['vq'] cannot be used: it should be 'vq' or 'kl'"),
        (DRAFTER, {"heads": 4}, "does not fit EagleDrafter"),
        (DEFAULTS, {"cfg": "high"}, "cfg 'high' is no number"),
        (DEFAULTS, {"neighbours": -1}, "the model's defaults: neighbours -1 is out of range"),
        (DEFAULTS, {"methods": {"eagle": {"neighbours": 1 << 30}}}, "methods.eagle.neighbours 1073741824 is"),
        (DEFAULTS, {"methods": []}, "methods [] cannot be used: it should be an object"),
        (DEFAULTS, {"methods": {"eagle": {"tree": [[0]]}}}, "methods.eagle.tree [[0]] is no text"),
    ],
)
def test_a_wrong_config_of_ours_is_rejected(file: str, fields: dict, said: str, run, broken: Path) -> None:
    update_json(broken / file, **fields)
    run("generate", "a red tulip", "--model", broken, "--method", "eagle").refused(said)
