"""Tiny checkpoints of the published families, drawn from a prompt to pictures by every method."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import CODES, LANGUAGE, write_chameleon, write_emu3, write_janus
from helpers.parity import Peer, greedy

from lanternpp import Pipeline
from lanternpp.api.methods import METHODS
from lanternpp.api.model import read_target
from lanternpp.api.pipeline import Result
from lanternpp.cli.compare import race
from lanternpp.drafters.eagle import EagleConfig, EagleDrafter
from lanternpp.drafters.parallel import ParallelConfig, ParallelDrafter
from lanternpp.errors import InputError
from lanternpp.kernels.loading import library
from lanternpp.nn import checkpoints
from lanternpp.nn.decoder import DecoderConfig

PROMPT = "a photo of the red tulip"


@dataclass(frozen=True)
class Family:
    """How a tiny checkpoint of a family is written, and what it draws."""

    folder: str
    write: Callable[[Path], Any]
    rows: int
    columns: int
    ends: bool
    pixels: int  # of a code's side


FAMILIES = {
    "anole": Family("anole", write_chameleon, 4, 4, False, 16),
    "lumina": Family("Lumina-mGPT-7B-64", functools.partial(write_chameleon, lumina=True), 4, 4, True, 16),
    "janus": Family("janus", write_janus, 4, 4, False, 16),
    "emu3": Family("emu3", write_emu3, 4, 4, True, 8),
}
every_family = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of them, each with a random drafter of its width and a target to draft with in it."""
    place = tmp_path_factory.mktemp("families")
    for family in FAMILIES.values():
        folder = place / family.folder
        family.write(folder)
        family.write(folder / "independent")
        shape = EagleConfig.like(
            DecoderConfig(LANGUAGE["hidden_size"], 1, LANGUAGE["num_attention_heads"], 48)
        )
        torch.manual_seed(1)
        target = read_target(folder, torch.float32)
        drafter = EagleDrafter(shape, target.decoder.rotary_table)
        checkpoints.save(folder / "drafter", {"kind": "eagle", **shape.flat()}, drafter.state_dict())
        many = ParallelConfig.like(target.decoder.config, queries=3, turn=16)
        tensors = ParallelDrafter(many, target.decoder.rotary_table).state_dict()
        checkpoints.save(folder / "parallel", {"kind": "parallel", **many.flat()}, tensors)
    return place


@functools.cache
def pipeline(folder: Path, dtype: str) -> Pipeline:
    return Pipeline.from_pretrained(str(folder), device="cpu", dtype=dtype)


@every_family
def test_greedy_pictures_are_those_of_a_plain_loop_over_transformers(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    model = family.write(tmp_path / family.folder).double()
    pipe = pipeline(tmp_path / family.folder, "float64")
    peer = peer_of(name, model, pipe.target)
    for cfg in (1.0, 3.0):
        drawn = pipe(PROMPT, method="ar", temperature=0.0, cfg=cfg)
        assert torch.equal(drawn.codes[0], greedy(pipe.target, peer, PROMPT, cfg))
    assert drawn.images[0].size == (family.columns * family.pixels, family.rows * family.pixels)


def peer_of(name: str, model: Any, target: Any) -> Peer:
    """What the family's own tests compare with."""
    table = model.get_input_embeddings()
    if name == "janus":
        own = model.prepare_embeddings_for_image_generation
        return Peer(table, own, model.model.language_model, model.model.generation_head)
    body = model.model.text_model if name == "emu3" else model.model
    return Peer(
        table,
        lambda codes: table(target.code_tokens[codes]),
        body,
        lambda x: model.lm_head(x)[..., target.code_tokens],
    )


@every_family
@pytest.mark.parametrize("method", METHODS)
def test_every_method_draws_alone_and_in_a_batch_guided_and_not(name: str, method: str, models: Path) -> None:
    family = FAMILIES[name]
    pipe = pipeline(models / family.folder, "float64")
    dials = {"neighbours": 8} if METHODS[method].neighbours else {}
    one = pipe(PROMPT, method=method, seed=2, cfg=1.0, **dials)
    three = pipe([PROMPT, "red sea", "a tulip"], method=method, seed=1, **dials)
    assert three.stats.settings["cfg"] > 1 and three.stats.settings["batch_size"] == 3
    for result in (one, three):
        grid = torch.nn.functional.pad(result.codes, (0, int(family.ends)), value=CODES)
        rows = grid.unflatten(1, (family.rows, family.columns + family.ends))
        assert (rows[..., : family.columns] < CODES).all()
        assert not family.ends or (rows[..., -1] == CODES).all()
        assert result.images[0].size == (family.columns * family.pixels, family.rows * family.pixels)
    if METHODS[method].accept == "exact":
        drafted = pipe(PROMPT, method=method, temperature=0.0)
        assert torch.equal(drafted.codes, plain(models / family.folder))


@every_family
@pytest.mark.parametrize(
    "method", ["lantern++", "parallel", "jacobi-coupled"]
)  # a drafter's tree, all levels, none
def test_a_method_is_compared_with_plain_decoding(name: str, method: str, models: Path) -> None:
    pipe = pipeline(models / FAMILIES[name].folder, "float64")
    dials = {"neighbours": 8} if METHODS[method].neighbours else {}
    batch = 3 if FAMILIES[name].ends else 1  # guided where it is one

    def draw(way: str, **given: Any) -> Result:
        return pipe([PROMPT, "red sea", "a tulip"][:batch], method=way, seed=4, **given)

    options = dials | ({"cfg": 1.0} if batch == 3 else {}) | {"batch_size": batch}
    base, side = race(draw, method, options, 1, False, None)
    reported = [one.row()["settings"] for one in (base, side)]
    assert [one["method"] for one in reported] == ["ar", method]
    assert {one["cfg"] for one in reported} == {options.get("cfg", pipe.defaults["cfg"])}
    assert {one["batch_size"] for one in reported} == {batch}
    assert base.last.codes.shape == side.last.codes.shape


@every_family
@torch.inference_mode()
def test_guesses_that_are_drawn_in_c_keep_to_the_format(name: str, models: Path) -> None:
    family = FAMILIES[name]
    pipe = pipeline(models / family.folder, "bfloat16")
    engine = pipe.new_engine(pipe.settings("parallel", batch_size=2, tree="chain-3"))
    drafter = engine.proposer.drafter  # type: ignore[attr-defined]
    assert (drafter.native is not None) == (name != "janus" and library() is not None), (
        "whose head is not linear"
    )
    x = torch.randn(3, pipe.target.decoder.config.dim).bfloat16()
    if layer := pipe.target.head_linear:
        assert torch.equal(pipe.target.head(x), layer(x))
    engine.admit(0, PROMPT, 3)
    engine.admit(1, PROMPT, 4)
    while len(engine.done()) < 2:
        engine.step()
        draft = engine.proposer.propose(engine.noise)
        place = (engine.count[:, None] + torch.arange(3)).clamp(max=pipe.target.length - 1)
        ends = family.ends & (place % (family.columns + 1) == family.columns)
        assert torch.equal(draft.codes[:, 1:] == CODES, ends)
        assert draft.probs is not None and torch.allclose(
            draft.probs[:, :-1].sum(-1), torch.ones(2, 3), atol=1e-4
        )
        engine.proposer.cache.used -= engine.proposer.waiting  # type: ignore[attr-defined]


@functools.cache
def plain(folder: Path) -> torch.Tensor:
    """The greedy codes of plain decoding."""
    return pipeline(folder, "float64")(PROMPT, method="ar", temperature=0.0).codes


def test_a_family_without_a_codebook_is_told_which_rules_it_can_use(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = Pipeline.from_pretrained(str(models / "janus"), device="cpu", dtype="float32")
    monkeypatch.setattr(type(pipe.target), "codebook", None)
    with pytest.raises(InputError, match=r"janus has no codebook.*exact or cool"):
        pipe(PROMPT, method="lantern++")
    pipe(PROMPT, method="cool")
