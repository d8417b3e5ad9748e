"""A target's own pictures: their prompts, their shards, and drafters that are trained on them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import write_llamagen
from helpers.families import EVERY
from helpers.models import write_model
from helpers.photos import teacher_of, write_photos
from helpers.refusals import rejects

from lanternpp import Pipeline
from lanternpp.api.model import pick_placement, read_target
from lanternpp.kernels.loading import kernels
from lanternpp.models.vq import codes as vq_codes
from lanternpp.training import teacher as teachers
from lanternpp.training.codes import Codes
from lanternpp.training.drafter import train
from lanternpp.training.eagle import EagleTask
from lanternpp.training.options import DrafterSettings, TrainingData, TrainingOptions
from lanternpp.training.parallel import ParallelTask
from lanternpp.training.rollouts import RolloutTask
from lanternpp.training.teacher import OwnCodes, Prompts, Teacher, choose_prompts, hold_out, key_of
from lanternpp.util.options import declared

CPU = torch.device("cpu")
WORDS = ("a red tulip", "red tulip"), ("tulip",)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("samples") / "tiny")
    (folder / "defaults.json").write_text('{"top_k": 20, "cfg": 2.0}')
    return folder


def drawn(model: Path, store: Path, count: int = 7, seed: int = 0, batch: int = 1) -> Codes:
    teacher = Teacher(model, store, "cpu", None, draws=True)
    teacher.store = store
    return OwnCodes(teacher, WORDS, count, batch, seed).build()


def test_codes_are_those_of_the_pipeline_for_the_same_prompt_and_seed(model: Path, tmp_path: Path) -> None:
    found = drawn(model, tmp_path, count=2)
    pipe = Pipeline.from_pretrained(model, device="cpu", dtype=pick_placement(CPU, "auto", model)[1])
    for i in range(2):
        one = pipe(found.train.texts[i], method="ar", seed=i, cfg=2.0, top_k=20, batch_size=1)
        assert torch.equal(one.codes[0], found.train.codes[i, 0].long())
    assert found.train.texts == WORDS[0] and set(found.val.texts) == set(WORDS[1])
    assert len(found.val) == 4


def test_only_missing_shards_are_drawn(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(teachers, "DRAWN_SHARD_SIZE", 4)
    first = drawn(model, tmp_path)  # 11 pictures, four a shard
    said = capsys.readouterr().err
    assert "codes of the target's own pictures, 4 of them to validate: 11 pictures, in" in said
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) == 3
    files[1].unlink()
    made: list[int] = []
    one = OwnCodes.draw

    def reversed_draw(_: object, engine: Any, texts: Any, *more: Any) -> Any:
        made.append(len(texts))
        return reversed([*one(engine, texts, *more)])  # pictures may be finished in any order

    monkeypatch.setattr(OwnCodes, "draw", reversed_draw)
    again = drawn(model, tmp_path)
    assert made == [4]
    assert torch.equal(again.train.codes, first.train.codes) and torch.equal(again.val.codes, first.val.codes)
    drawn(model, tmp_path, batch=3)
    assert made == [4], "they were drawn one at a time, and are the same three at a time"
    large = drawn(model, tmp_path / "large", batch=3)
    assert made == [4, 11], "which draws several shards at once"
    assert len(list((tmp_path / "large").rglob("*.safetensors"))) == 3
    assert torch.equal(large.train.codes, first.train.codes) and large.train.texts == first.train.texts
    monkeypatch.setattr(vq_codes, "MAX_UINT16_CODES", 16)
    assert torch.equal(drawn(model, tmp_path / "int32").val.codes, first.val.codes.int())
    files[2].write_bytes(files[2].read_bytes()[:30])
    rejects(r"00002.safetensors cannot be read .*delete it", drawn, model, tmp_path)
    drawn(model, tmp_path / "other", seed=declared(DrafterSettings)["seed"].le + 1)  # recorded runs add 1


def test_prompts_come_from_the_file_the_captions_the_model_or_the_classes(
    model: Path, tmp_path: Path
) -> None:
    teacher = teacher_of(read_target(model, torch.float32))
    teacher.folder = tmp_path

    def chosen(prompts: Path | None = None, data: Path | None = None) -> Prompts:
        return choose_prompts(teacher, prompts, data)

    rejects("a target that draws needs prompts", chosen)
    (tmp_path / "prompts.txt").write_text("a red tulip\n")
    assert chosen() == (("a red tulip",), ("a red tulip",))
    (tmp_path / "mine").write_text("tulip\nred tulip\n# no\ntulip\n")
    assert chosen(tmp_path / "mine") == (("tulip",), ("red tulip",))
    (tmp_path / "mine").write_text("tulip\na red dog\n")
    rejects("dog", chosen, tmp_path / "mine")
    for split in ("train", "val"):
        write_photos(tmp_path / "data" / split, 2)
    rejects("none of the captions", chosen, data=tmp_path / "data")
    write_llamagen(tmp_path / "c2i")
    teacher.target, teacher.folder = read_target(tmp_path / "c2i", torch.float32), tmp_path / "c2i"
    assert chosen() == (tuple("012345678"), ("9",))
    assert hold_out(tuple("abcdefghijklmnopqrstu"))[1] == ("j", "t")


FAMILIES: dict[str, Callable[[Path], Any]] = {
    "c2i": write_llamagen,
    "t2i": lambda path: write_llamagen(path, text=True),
    **EVERY,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_drafters_of_every_family_are_trained_on_its_own_pictures_and_on_recorded_runs(
    name: str, tmp_path: Path
) -> None:
    folder, prompts = tmp_path / name, tmp_path / "prompts"
    FAMILIES[name](folder)
    texts = ["1", "2", "3"] if name == "c2i" else ["a red tulip", "the red tulip " * 12, "a tulip"]
    prompts.write_text("\n".join(texts))
    own = TrainingData(own=True, prompts=prompts, samples=4, sample_batch=4)
    one = DrafterSettings(batch_size=2, warmup=1).of("eagle")
    shape = {"levels": 3, "anchors": 4, "condition_width": 8, "aux_layers": 1}
    all_levels = DrafterSettings(batch_size=2, warmup=1, **shape).of("parallel")
    runs = replace(own, samples=None, rollouts=3, drafter=folder / "parallel")
    facts = {}
    for part, kind, settings, source, steps in (
        ("drafter", EagleTask, one, own, 10),
        ("parallel", ParallelTask, all_levels, own, 2),
        ("next", RolloutTask, all_levels, runs, 2),
    ):
        assert train(folder, kind, settings, source, folder / part, TrainingOptions(steps, checks=1))
        facts[part] = json.loads((folder / part / "provenance.json").read_text())
    single, half = (read_target(folder, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert key_of(single) == key_of(half), "pictures of another device would be drawn again"
    assert facts["next"]["data"]["runs"] == 3 and len(facts["next"]["validation"]["accept"]) == 3
    pipe = Pipeline.from_pretrained(folder, folder / "next", device="cpu", dtype="float64")
    known = facts["drafter"]["settings"]
    assert known["cfg"] == pipe.settings("ar").cfg == facts["drafter"]["data"]["cfg"]
    assert known["kv_heads"] == pipe.target.decoder.config.kv_heads
    assert facts["drafter"]["steps"] == 10
    plain = pipe(texts[0], method="ar", temperature=0.0)
    usual = Pipeline.from_pretrained(folder, device="cpu", dtype="float64")
    for each, proposer in ((pipe, "parallel"), (usual, "tree")):
        fast = each(texts[0], method="eagle", proposer=proposer, temperature=0.0)
        assert torch.equal(plain.codes, fast.codes) and fast.stats.passes <= plain.stats.passes


@pytest.mark.parametrize("able", [False, True])
def test_the_target_is_read_again_for_the_training_in_another_dtype(
    able: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It draws in the fastest dtype, and trains in that of the training."""
    for probe in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, probe, lambda: able)
    teacher = Teacher("nature-128", tmp_path / "drafter", "cpu", None, draws=True)
    assert teacher.dtype is (torch.bfloat16 if able else torch.float32)
    assert teacher.drawing_dtype is (torch.bfloat16 if able or kernels() else torch.float32)
    drawn_with = teacher.target
    assert next(drawn_with.parameters()).dtype is teacher.drawing_dtype
    learned_from = teacher.trainable()
    assert next(learned_from.parameters()).dtype is teacher.dtype
    assert (learned_from is drawn_with) == (teacher.drawing_dtype is torch.float32)
