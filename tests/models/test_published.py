"""Published models by hub id: target, drafter and what lies beside them, from the stand-in for the hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers import checkpoints as llamagen
from helpers.families import EVERY, write_eagle, write_ibq
from helpers.hub import Outcome, ended, hub

PROMPT = "a photo of the red tulip"
FAMILIES = {  # target, drafter, prompt
    "c2i": ("lamp/llamagen_c2i/c2i_B_64.pt", "lamp/llamagen_drafter", "7"),
    "t2i": ("lamp/llamagen_t2i/t2i_XL_64.pt", "lamp/llamagen_drafter2", "a red tulip"),
    "copy": ("lamp/llamagen_copy", "lamp/llamagen_drafter2", "a red tulip"),
    "Lumina-mGPT-7B-64": ("lamp/Lumina-mGPT-7B-64", "lamp/eagle", PROMPT),
    "emu3": ("lamp/emu3", "lamp/eagle", PROMPT),
    "lumina2": ("lamp/lumina2", "lamp/eagle", PROMPT),
    "emu3.5": ("lamp/Emu3.5-Image", "lamp/eagle", PROMPT),
    "simplear": ("lamp/simplear", "lamp/eagle", PROMPT),
}


def write_shelf(shelf: Path) -> None:
    """Every repository."""
    for name, text in (("llamagen_c2i", False), ("llamagen_t2i", True)):
        folder = llamagen.write_llamagen(shelf / name, text)
        (folder / "t2i_XL_tiny.pt").rename(folder / Path(FAMILIES[name[-3:]][0]).name)
        (folder / "vq_ds16.pt").rename(folder / f"vq_ds16_{name[-3:]}.pt")
    shutil.move(shelf / "llamagen_t2i" / "flan-t5-xl", shelf.parent / "google" / "flan-t5-xl")
    copy = llamagen.write_llamagen(shelf / "llamagen_copy", True, layout="llama")
    shutil.rmtree(copy / "flan-t5-xl")
    bare = shutil.copytree(copy, shelf / "bare")
    (bare / "vq_ds16.pt").unlink()
    llamagen.write_drafter(shelf / "llamagen_drafter")
    llamagen.write_drafter(shelf / "llamagen_drafter2", text=True)
    apart = {"emu3": {"hub": True}, "emu3.5": {"tokenizer": False}}
    for name in FAMILIES.keys() & EVERY.keys():
        EVERY[name](shelf / Path(FAMILIES[name][0]).name, **apart.get(name, {}))
    tokenizer = shelf.parent / "ai-forever" / "MoVQGAN"  # where its authors publish it
    tokenizer.mkdir(parents=True)
    shutil.move(shelf / "lumina2" / "movqgan_270M.ckpt", tokenizer)
    write_ibq(shelf.parent / "BAAI" / "Emu3.5-VisionTokenizer")
    write_eagle(shelf / "eagle")


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Outcome], Path]:
    """How commands in one process ended, and the folder of a model that one of them wrote."""
    place = tmp_path_factory.mktemp("published")
    (place / "hub" / "google").mkdir(parents=True)
    write_shelf(place / "hub" / "lamp")
    orders = {}
    for name, (model, drafter, prompt) in FAMILIES.items():
        draw = ["generate", prompt, "--model", model, "--drafter", drafter, "-o", f"{name}.png", "--json"]
        orders[name] = [*draw, "--method", "lantern++", "--neighbours", "8", "-n", "3"]
    orders["convert"] = ["models", "convert", "lamp/bare", "ours", "--vq", "lamp/llamagen_t2i/vq_ds16_t2i.pt"]
    with hub(place / "hub") as server:
        outcomes = ended(place, server.address, *orders.values())
    return dict(zip(orders, outcomes, strict=True)), place / "ours"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_fetched_with_its_drafter_and_drawn(name: str, fetched) -> None:
    code, out, err = fetched[0][name]
    assert (code, err) == (0, "")
    drawn = json.loads(out)
    assert drawn["model"] == FAMILIES[name][0] and drawn["images"] == 3
    assert drawn["method"] == "lantern++" and drawn["settings"]["cfg"] > 1
    assert drawn["settings"]["batch_size"] == 3


def test_a_target_whose_repository_has_no_tokenizer_is_converted_with_one_of_another(fetched) -> None:
    code, out, err = fetched[0]["convert"]
    assert (code, err) == (0, "") and "target, tokenizer" in out
    assert json.loads((fetched[1] / "target/provenance.json").read_text())["converted from"] == "lamp/bare"
