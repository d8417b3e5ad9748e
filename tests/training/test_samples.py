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

from lanternpp import Pipeline
from lanternpp.api.model import read_target
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling
from lanternpp.errors import InputError
from lanternpp.training import parallel, rollouts
from lanternpp.training.drafter import DrafterSettings, train
from lanternpp.training.material import samples
from lanternpp.training.material.samples import (
    PromptSplit,
    SelfSampling,
    choose_prompts,
    self_sampled_codes,
    split_prompts,
)
from lanternpp.training.parallel import ParallelSettings
from lanternpp.training.run import TrainingOptions

CPU = torch.device("cpu")
WORDS = PromptSplit(("a red tulip", "red tulip"), ("tulip",))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("samples") / "tiny")


def drawn(model: Path, store: Path, count: int = 7, **self_sampling: Any) -> samples.Codes:
    target = read_target(model, torch.float32).eval()
    wish = SelfSampling(count=count, **{"batch": 1, **self_sampling})
    return self_sampled_codes(target, "key", WORDS, wish, Guidance(2.0), Sampling(top_k=20), store)


def test_codes_are_those_the_pipeline_draws_for_the_same_prompt_and_seed(model: Path, tmp_path: Path) -> None:
    codes = drawn(model, tmp_path, count=2)
    pipe = Pipeline.from_pretrained(str(model), device="cpu", dtype="float32")
    for i in range(2):
        one = pipe(codes.train.texts[i], method="ar", seed=i, cfg=2.0, top_k=20, batch_size=1)
        assert torch.equal(one.codes[0], codes.train.codes[i, 0].long())
    assert codes.train.texts == WORDS.train and set(codes.val.texts) == set(WORDS.val)
    assert len(codes.val) == 4


def test_finished_shards_are_kept_and_only_the_missing_ones_drawn(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = drawn(model, tmp_path)  # 11 pictures, four a shard
    said = capsys.readouterr().err
    assert "drawing 11 pictures of 16 codes, guidance 2: 352 B" in said and "min" in said
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) == 3
    files[1].unlink()
    made: list[int] = []
    one = samples.generate
    monkeypatch.setattr(samples, "generate", lambda e, c, s, p: made.append(len(c)) or one(e, c, s, p))
    again = drawn(model, tmp_path)
    assert made == [4]
    assert torch.equal(again.train.codes, whole.train.codes) and torch.equal(again.val.codes, whole.val.codes)
    drawn(model, tmp_path)
    assert made == [4]
    files[2].write_bytes(files[2].read_bytes()[:30])
    with pytest.raises(InputError, match=r"00002.safetensors cannot be read .*delete it"):
        drawn(model, tmp_path)
    drawn(model, tmp_path / "other", seed=1)
    with pytest.raises(InputError, match="--samples 0 must be at least 1"):
        SelfSampling(count=0)


def test_prompts_come_from_the_file_the_captions_the_model_or_the_classes(
    model: Path, tmp_path: Path, paint: Callable[[Path, int], None]
) -> None:
    target = read_target(model, torch.float32)
    with pytest.raises(InputError, match="--self needs prompts"):
        choose_prompts(SelfSampling(), None, tmp_path, target)
    (tmp_path / "prompts.txt").write_text("a red tulip\n")
    assert choose_prompts(SelfSampling(), None, tmp_path, target) == PromptSplit(
        ("a red tulip",), ("a red tulip",)
    )
    (tmp_path / "mine").write_text("tulip\nred tulip\n# no\ntulip\n")
    assert choose_prompts(SelfSampling(tmp_path / "mine"), None, tmp_path, target) == PromptSplit(
        ("tulip",), ("red tulip",)
    )
    (tmp_path / "mine").write_text("tulip\na red dog\n")
    with pytest.raises(InputError, match="dog"):
        choose_prompts(SelfSampling(tmp_path / "mine"), None, tmp_path, target)
    paint(tmp_path / "data" / "train", 2)
    paint(tmp_path / "data" / "val", 2)
    with pytest.raises(InputError, match="none of the captions"):
        choose_prompts(SelfSampling(), tmp_path / "data", tmp_path, target)
    write_llamagen(tmp_path / "c2i")
    classes = choose_prompts(
        SelfSampling(), None, tmp_path / "c2i", read_target(tmp_path / "c2i", torch.float32)
    )
    assert classes == PromptSplit(tuple("012345678"), ("9",))
    assert split_prompts(tuple("abcdefghijklmnopqrstu")).val == ("j", "t")


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
    self_sampling = SelfSampling(prompts, count=4, batch=4)
    settings = DrafterSettings(loss="guided", batch_size=2, warmup=1)
    assert train(None, folder, 1, settings, options, self_sampling=self_sampling, follow=True)
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
    options = TrainingOptions(folder / "parallel", 2, checks=1, log_steps=1)
    self_sampling = SelfSampling(prompts, count=4, batch=4)
    settings = ParallelSettings(batch_size=2, warmup=1, levels=3, anchors=4, turn=8, aux_layers=1)
    with pytest.raises(InputError, match="no parallel drafter to go on with"):
        rollouts.train(None, folder, settings, options, 3, self_sampling)
    assert parallel.train(None, folder, 1, settings, options, self_sampling=self_sampling, follow=True)
    first = (folder / "parallel" / "model.safetensors").read_bytes()
    assert rollouts.train(None, folder, settings, options, 3, self_sampling, follow=True)
    assert (folder / "parallel" / "model.safetensors").read_bytes() != first
    facts = json.loads((folder / "parallel" / "provenance.json").read_text())
    assert facts["data"]["runs"] == 3 and len(facts["validation"]["accept"]) == 3
    pipe = Pipeline.from_pretrained(str(folder), device="cpu", dtype="float64")
    text = prompts.read_text().splitlines()[0]
    plain = pipe(text, method="ar", temperature=0.0)
    fast = pipe(text, method="eagle", proposer="parallel", temperature=0.0)
    assert torch.equal(plain.codes, fast.codes)
    assert fast.stats.passes <= plain.stats.passes
