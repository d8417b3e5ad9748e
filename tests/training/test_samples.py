"""A target's own pictures: which prompts, kept in shards, and a drafter that anyone can train on them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import write_llamagen
from helpers.families import write_chameleon, write_emu3, write_janus
from helpers.models import write_model
from helpers.photos import teacher_of

from lanternpp import Pipeline
from lanternpp.api.model import read_target
from lanternpp.engine.sampling import Sampling
from lanternpp.errors import InputError
from lanternpp.training import codes, rollouts
from lanternpp.training.codes import OwnCodes, PromptSplit, choose_prompts
from lanternpp.training.drafter import train
from lanternpp.training.eagle import EagleTask
from lanternpp.training.options import DrafterSettings, TrainingData, TrainingOptions
from lanternpp.training.parallel import ParallelTask

WORDS = PromptSplit(("a red tulip", "red tulip"), ("tulip",))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("samples") / "tiny")


def drawn(model: Path, store: Path, count: int = 7, seed: int = 0) -> codes.Codes:
    teacher = teacher_of(read_target(model, torch.float32), store)
    teacher.cfg, teacher.sampling = 2.0, Sampling(top_k=20)
    return OwnCodes(teacher, WORDS, count, 1, seed).build()


def test_codes_are_those_the_pipeline_draws_for_the_same_prompt_and_seed(model: Path, tmp_path: Path) -> None:
    found = drawn(model, tmp_path, count=2)
    pipe = Pipeline.from_pretrained(str(model), device="cpu", dtype="float32")
    for i in range(2):
        one = pipe(found.train.texts[i], method="ar", seed=i, cfg=2.0, top_k=20, batch_size=1)
        assert torch.equal(one.codes[0], found.train.codes[i, 0].long())
    assert found.train.texts == WORDS.train and set(found.val.texts) == set(WORDS.val)
    assert len(found.val) == 4


def test_finished_shards_are_kept_and_only_the_missing_ones_drawn(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = drawn(model, tmp_path)  # 11 pictures, four a shard
    said = capsys.readouterr().err
    assert "codes of the target's own pictures: 11 pictures, about 352 B in" in said
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) == 3
    files[1].unlink()
    made: list[int] = []
    one = codes.generate
    monkeypatch.setattr(codes, "generate", lambda e, c, s, p: made.append(len(c)) or one(e, c, s, p))
    again = drawn(model, tmp_path)
    assert made == [4]
    assert torch.equal(again.train.codes, whole.train.codes) and torch.equal(again.val.codes, whole.val.codes)
    drawn(model, tmp_path)
    assert made == [4]
    files[2].write_bytes(files[2].read_bytes()[:30])
    with pytest.raises(InputError, match=r"00002.safetensors cannot be read .*delete it"):
        drawn(model, tmp_path)
    drawn(model, tmp_path / "other", seed=1)
    with pytest.raises(InputError, match="--samples 0 is out of range"):
        TrainingData(own=True, samples=0).check()


def test_prompts_come_from_the_file_the_captions_the_model_or_the_classes(
    model: Path, tmp_path: Path, paint: Callable[[Path, int], None]
) -> None:
    teacher = teacher_of(read_target(model, torch.float32))
    teacher.place = tmp_path

    def chosen(prompts: Path | None = None, data: Path | None = None) -> PromptSplit:
        return choose_prompts(teacher, prompts, data)

    with pytest.raises(InputError, match="--self needs prompts"):
        chosen()
    (tmp_path / "prompts.txt").write_text("a red tulip\n")
    assert chosen() == PromptSplit(("a red tulip",), ("a red tulip",))
    (tmp_path / "mine").write_text("tulip\nred tulip\n# no\ntulip\n")
    assert chosen(tmp_path / "mine") == PromptSplit(("tulip",), ("red tulip",))
    (tmp_path / "mine").write_text("tulip\na red dog\n")
    with pytest.raises(InputError, match="dog"):
        chosen(tmp_path / "mine")
    for split in ("train", "val"):
        paint(tmp_path / "data" / split, 2)
    with pytest.raises(InputError, match="none of the captions"):
        chosen(data=tmp_path / "data")
    write_llamagen(tmp_path / "c2i")
    teacher.target, teacher.place = read_target(tmp_path / "c2i", torch.float32), tmp_path / "c2i"
    assert chosen() == PromptSplit(tuple("012345678"), ("9",))
    assert PromptSplit.of(tuple("abcdefghijklmnopqrstu")).val == ("j", "t")


FAMILIES: dict[str, Callable[[Path], Any]] = {
    "c2i": write_llamagen,
    "t2i": lambda path: write_llamagen(path, text=True),
    "anole": write_chameleon,
    "Lumina-mGPT-7B-64": lambda path: write_chameleon(path, lumina=True),
    "janus": write_janus,
    "emu3": write_emu3,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_drafter_of_every_family_learns_from_its_own_pictures(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    FAMILIES[name](folder)
    prompts = tmp_path / "prompts"
    prompts.write_text("1\n2\n3\n" if name == "c2i" else "a red tulip\nthe red\na photo of a tulip\n")
    options = TrainingOptions(folder / "drafter", 2, checks=1, log_steps=1)
    own = TrainingData(own=True, prompts=prompts, samples=4, sample_batch=4)
    assert train(folder, EagleTask, DrafterSettings(batch_size=2, warmup=1).of("eagle"), own, options)
    facts = json.loads((folder / "drafter" / "provenance.json").read_text())
    pipe = Pipeline.from_pretrained(str(folder), device="cpu", dtype="float64")
    assert facts["settings"]["cfg"] == pipe.defaults["cfg"] == facts["data"]["cfg"]
    assert facts["settings"]["kv_heads"] == pipe.target.decoder.config.kv_heads
    text = prompts.read_text().splitlines()[0]
    plain = pipe(text, method="ar", temperature=0.0)
    fast = pipe(text, method="eagle", temperature=0.0)
    assert torch.equal(plain.codes, fast.codes)
    assert fast.stats.passes <= plain.stats.passes


@pytest.mark.parametrize("name", FAMILIES)
def test_a_parallel_drafter_of_every_family_goes_on_from_recorded_runs(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    FAMILIES[name](folder)
    prompts = tmp_path / "prompts"
    prompts.write_text("1\n2\n3\n" if name == "c2i" else "a red tulip\nthe red\na photo of a tulip\n")
    own = TrainingData(own=True, prompts=prompts, samples=4, sample_batch=4)
    small = {"batch_size": 2, "warmup": 1, "levels": 3, "anchors": 4, "turn": 8, "aux_layers": 1}
    settings, first = (
        DrafterSettings(**small).of("parallel"),
        TrainingOptions(folder / "parallel", 2, checks=1),
    )
    then = TrainingOptions(folder / "next", 2, checks=1)
    with pytest.raises(InputError, match="no parallel drafter to go on with"):
        rollouts.train(folder, folder / "parallel", settings, own, then, 3)
    assert train(folder, ParallelTask, settings, own, first)
    with pytest.raises(InputError, match="name another folder with -o"):
        rollouts.train(folder, folder / "parallel", settings, own, first, 3)
    assert rollouts.train(folder, folder / "parallel", settings, own, then, 3)
    facts = json.loads((folder / "next" / "provenance.json").read_text())
    assert facts["data"]["runs"] == 3 and len(facts["validation"]["accept"]) == 3
    pipe = Pipeline.from_pretrained(str(folder), folder / "next", device="cpu", dtype="float64")
    text = prompts.read_text().splitlines()[0]
    plain = pipe(text, method="ar", temperature=0.0)
    fast = pipe(text, method="eagle", proposer="parallel", temperature=0.0)
    assert torch.equal(plain.codes, fast.codes)
    assert fast.stats.passes <= plain.stats.passes
