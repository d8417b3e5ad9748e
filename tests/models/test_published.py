"""Published models by hub id: target, drafter and files beside them, from the stand-in for the hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import checkpoints as llamagen
from helpers.families import EVERY, write_eagle, write_ibq
from helpers.hub import Outcome, hub, run_with_hub
from safetensors.torch import load_file

PROMPT = "a photo of the red tulip"
FAMILIES = {  # target, drafter, prompt
    "c2i": ("someone/llamagen_c2i/c2i_B_64.pt", "someone/llamagen_drafter", "7"),
    "t2i": ("someone/llamagen_t2i/t2i_XL_64.pt", "someone/llamagen_drafter2", "a red tulip"),
    "copy": ("someone/llamagen_copy", "someone/llamagen_drafter2", "a red tulip"),
    "Lumina-mGPT-7B-64": ("someone/Lumina-mGPT-7B-64", "someone/eagle", PROMPT),
    "emu3": ("someone/emu3", "someone/eagle", PROMPT),
    "lumina2": ("someone/lumina2", "someone/eagle", PROMPT),
    "emu3.5": ("someone/Emu3.5-Image", "someone/eagle", PROMPT),
    "simplear": ("someone/simplear", "someone/eagle", PROMPT),
}


def write_repositories(root: Path) -> None:
    """Every repository."""
    for name, text in (("llamagen_c2i", False), ("llamagen_t2i", True)):
        folder = llamagen.write_llamagen(root / name, text)
        (folder / "t2i_XL_tiny.pt").rename(folder / Path(FAMILIES[name[-3:]][0]).name)
        (folder / "vq_ds16.pt").rename(folder / f"vq_ds16_{name[-3:]}.pt")
    shutil.move(root / "llamagen_t2i" / "flan-t5-xl", root.parent / "google" / "flan-t5-xl")
    copy = llamagen.write_llamagen(root / "llamagen_copy", True, layout="llama")
    shutil.rmtree(copy / "flan-t5-xl")
    bare = shutil.copytree(copy, root / "bare")
    (bare / "vq_ds16.pt").unlink()
    llamagen.write_drafter(root / "llamagen_drafter")
    llamagen.write_drafter(root / "llamagen_drafter2", text=True)
    options = {"emu3": {"hub": True}, "emu3.5": {"tokenizer": False}}
    for name in FAMILIES.keys() & EVERY.keys():
        EVERY[name](root / Path(FAMILIES[name][0]).name, **options.get(name, {}))
    tokenizer = root.parent / "ai-forever" / "MoVQGAN"  # where its authors publish it
    tokenizer.mkdir(parents=True)
    shutil.move(root / "lumina2" / "movqgan_270M.ckpt", tokenizer)
    write_ibq(root.parent / "BAAI" / "Emu3.5-VisionTokenizer")
    vqgan = root.parent / "Alpha-VLLM/Chameleon_7B_mGPT/original_tokenizers/vqgan.ckpt"
    vqgan.parent.mkdir(parents=True)
    own = root / "Lumina-mGPT-7B-64" / "vqgan.safetensors"
    torch.save({"state_dict": load_file(own)}, vqgan)
    own.unlink()
    write_eagle(root / "eagle")


@pytest.fixture(scope="module")
def downloaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Outcome], Path]:
    """How commands in one process ended, and the folder of a model that one of them wrote."""
    place = tmp_path_factory.mktemp("published")
    (place / "hub" / "google").mkdir(parents=True)
    write_repositories(place / "hub" / "someone")
    commands = {}
    for name, (model, drafter, prompt) in FAMILIES.items():
        draw = ["generate", prompt, "--model", model, "--drafter", drafter, "-o", f"{name}.png", "--json"]
        commands[name] = [*draw, "--method", "lantern++", "--neighbours", "8", "-n", "3"]
    commands["convert"] = [
        "models",
        "convert",
        "someone/bare",
        "ours",
        "--vq",
        "someone/llamagen_t2i/vq_ds16_t2i.pt",
    ]
    with hub(place / "hub") as server:
        outcomes = run_with_hub(place, server.address, *commands.values())
    return dict(zip(commands, outcomes, strict=True)), place / "ours"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_downloaded_with_its_drafter_and_drawn(name: str, downloaded) -> None:
    code, out, err = downloaded[0][name]
    assert (code, err) == (0, "")
    drawn = json.loads(out)
    assert drawn["model"] == FAMILIES[name][0] and drawn["images"] == 3
    settings = drawn["settings"]
    assert drawn["method"] == "lantern++" and settings["batch_size"] == 3
    assert settings["cfg"] == {"c2i": 4.0, "t2i": 7.5}.get(name, settings["cfg"]) > 1


def test_a_target_whose_repository_has_no_tokenizer_is_converted_with_one_of_another(downloaded) -> None:
    code, out, err = downloaded[0]["convert"]
    assert (code, err) == (0, "") and "target, tokenizer" in out
    assert (
        json.loads((downloaded[1] / "target/provenance.json").read_text())["converted from"] == "someone/bare"
    )
