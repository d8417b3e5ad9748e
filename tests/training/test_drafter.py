"""The drafter's training: its losses, what it learns from, and that it drafts better for it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.photos import made_codes, teacher_of
from torch import Tensor

from lanternpp.api.model import read_target
from lanternpp.drafters.eagle import EagleDrafter
from lanternpp.engine.guidance import Guidance
from lanternpp.errors import InputError
from lanternpp.nn import checkpoints
from lanternpp.nn.sources import Source
from lanternpp.training import eagle
from lanternpp.training.codes import Split
from lanternpp.training.drafter import train
from lanternpp.training.eagle import EagleTask
from lanternpp.training.features import CaptionPrompts, drafter_inputs
from lanternpp.training.options import DrafterSettings, TrainingData, TrainingOptions


def task(ready: Path, count: int = 6, **settings: Any) -> EagleTask:
    hparams = DrafterSettings(**{"batch_size": count, "cfg": 3.0, **settings}).of("eagle")
    return EagleTask(hparams, teacher_of(read_target(ready, torch.float32)), made_codes(count))


def go(data: Path, model: Path, steps: int = 4, stop: int | None = None, **settings: Any) -> bool:
    options = TrainingOptions(model / "drafter", steps, stop_after=stop, log_steps=1, checks=1)
    hparams = DrafterSettings(**{"batch_size": 4, "warmup": 2, **settings}).of("eagle")
    return train(model, EagleTask, hparams, TrainingData(data, crops=1), options)


def test_lk_is_the_negative_log_of_the_chance_that_verification_keeps_a_draft() -> None:
    p, q = torch.randn(2, 3, 5, 8, dtype=torch.float64) * 2
    kept = torch.zeros(3, 5, dtype=torch.float64)
    for row in range(3):
        for place in range(5):  # draw x from q, keep it with probability min(1, p / q)
            mine, other = q[row, place].softmax(-1), p[row, place].softmax(-1)
            kept[row, place] = sum(m * min(1.0, o / m) for m, o in zip(mine, other, strict=True))
    assert torch.allclose(eagle.acceptance(q, p).double(), kept, atol=1e-6)
    assert eagle.lk_loss(q, p).item() == pytest.approx(-kept.log().mean().item(), abs=1e-6)
    assert eagle.lk_loss(p, p).item() == pytest.approx(0.0, abs=1e-6)


def test_soft_cross_entropy_is_least_where_the_two_agree() -> None:
    p, q = torch.randn(2, 4, 8)
    law = torch.distributions.Categorical(logits=p)
    assert eagle.soft_cross_entropy(p, p).item() == pytest.approx(law.entropy().mean().item(), abs=1e-5)
    gap = eagle.soft_cross_entropy(q, p) - eagle.soft_cross_entropy(p, p)
    expected = torch.distributions.kl_divergence(law, torch.distributions.Categorical(logits=q)).mean()
    assert gap.item() == pytest.approx(expected.item(), abs=1e-5)


def test_lessons_pair_a_feature_with_the_input_one_ahead(ready: Path) -> None:
    target = read_target(ready, torch.float32).eval()
    prompt = target.prompt(["a red square"], 1).embeds
    codes = torch.arange(16)[None]
    with torch.no_grad():
        next_inputs, features = drafter_inputs(target, prompt, codes)
        assert torch.equal(next_inputs[:, :2], prompt[:, 1:])
        assert torch.equal(next_inputs[:, 2:], target.embed(codes[:, :-1]))
        assert torch.equal(features, target.states(prompt, codes))


def test_guided_losses_are_those_of_the_merged_rows(ready: Path) -> None:
    made = task(ready, loss="lk", cfg=3.0, noise=0.0)
    index = torch.arange(6)
    codes = made.codes.train.pick(index)
    _, distribution = made.loss(*made.train(index, 2), codes)
    p, q = [], []
    with torch.no_grad():
        for prompts, _ in (made.train(index, 1), made.train(index, 1, torch.ones(6, dtype=torch.bool))):
            next_inputs, features = drafter_inputs(made.target, prompts, codes)
            guess = made.model.forward_sequence(next_inputs, features[:, :-1])
            p.append(made.target.head(features[:, 3:]))  # of codes 1..15, after 3 prompt slots and code 0
            q.append(made.target.head(guess[:, 2:]))
    p_law, q_law = ((null + 3.0 * (caption - null)).softmax(-1) for caption, null in (p, q))
    kept = torch.minimum(p_law, q_law).sum(-1)
    assert kept.shape == (6, 15)
    assert distribution.item() == pytest.approx(-kept.log().mean().item(), rel=1e-4)


@pytest.mark.parametrize("loss", ["paper", "guided", "lk"])
def test_it_learns_six_pictures_by_heart(ready: Path, loss: str) -> None:
    made = task(ready, loss=loss, noise=0.0, lr=1e-2, weight=1.0, cfg=2.0)
    before = made.validate_on(torch.arange(6))
    for step in range(60):
        made.step(step, 0.0)
    made.average.load_state_dict(made.model.state_dict())
    after = made.validate_on(torch.arange(6))
    assert after["accept"] > before["accept"] + 0.1
    assert after["feature"] < 0.7 * before["feature"]
    assert after[loss] < before[loss]


def test_a_second_round_reads_the_drafters_own_features(ready: Path) -> None:
    """As it does at the second level of a draft; the first round is the loss of one round."""
    index = torch.arange(6)
    found = {}
    for rounds in (1, 2):
        made = task(ready, loss="guided", cfg=3.0, noise=0.0, rounds=rounds)
        codes = made.codes.train.pick(index)
        found[rounds] = made.loss(*made.train(index, 2), codes)[1].item()
    with torch.no_grad():
        prompts, _ = made.train(index, 2)
        next_inputs, features = drafter_inputs(made.target, prompts, codes.repeat(2, 1))
        first = made.model.forward_sequence(next_inputs, features[:, :-1])
        predicted = torch.cat((features[:, :3], first[:, 2:-1]), 1)
        second = made.model.forward_sequence(next_inputs, predicted)[:, 3:]
        p, q = (Guidance(3.0).merge(made.target.head(x)) for x in (features[:, 4:], second))
    expected = (found[1] + eagle.soft_cross_entropy(q, p).item()) / 2
    assert found[2] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(InputError, match="rounds 0 is out of range"):
        DrafterSettings(rounds=0).of("eagle")


def test_the_target_does_not_move(ready: Path) -> None:
    made = task(ready)
    before = {name: tensor.clone() for name, tensor in made.target.state_dict().items()}
    made.step(0, 0.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.target.state_dict().items())


def test_a_tenth_of_the_captions_is_dropped_under_the_papers_loss(
    ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = task(ready, count=60, loss="paper")
    shares, null = [], made.target.prompt([None], 1).embeds

    def loss(prompts: Tensor, start: Tensor | None, codes: Tensor, known: None) -> tuple[Tensor, Tensor]:
        shares.append((prompts == null).flatten(1).all(1).double().mean().item())
        nothing = sum(p.sum() for p in made.model.parameters()) * 0
        return nothing, nothing

    monkeypatch.setattr(made, "loss", loss)
    for step in range(60):
        made.step(step, 0.0)
    silent = 1 / 3  # "a photo" names no subject: the null prompt, dropped or not
    assert sum(shares) / 60 == pytest.approx(silent + 0.1 * (1 - silent), abs=0.02)


def test_captions_in_two_branches_are_beside_the_null_prompt(ready: Path) -> None:
    target = read_target(ready, torch.float32)
    texts = ("a blue square", "a photo", "a red square")
    captions = CaptionPrompts(target, Split(torch.zeros(3, 1, 16, dtype=torch.uint16), texts))
    assert captions.known_texts == ["a blue square", "a red square"]
    expected = target.prompt(["a red square", None], 2).embeds
    prompts, start = captions(torch.tensor([2, 1]), 2)
    assert torch.equal(prompts, expected) and start is None
    with pytest.raises(InputError, match="none of the captions"):
        CaptionPrompts(target, Split(torch.zeros(1, 1, 16, dtype=torch.uint16), ("a photo",)))


def test_a_stopped_and_resumed_run_repeats_the_unbroken_one(data: Path, ready: Path, twin: Path) -> None:
    assert go(data, ready, loss="lk")
    assert not go(data, twin, loss="lk", stop=2)
    assert go(data, twin, loss="lk")
    read = [json.loads(x) for x in (ready / "drafter" / "log.jsonl").read_text().splitlines()]
    again = [json.loads(x) for x in (twin / "drafter" / "log.jsonl").read_text().splitlines()]
    for row in (*read, *again):
        row.pop("seconds", None)
    assert read == again
    target = read_target(ready, torch.float32)
    one, two = (EagleDrafter.read(Source.open(x / "drafter"), target, torch.float32) for x in (ready, twin))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    facts = json.loads((ready / "drafter" / "provenance.json").read_text())
    assert facts["validation"].keys() >= {
        "accept",
        "accept2",
        "agree",
        "paper",
        "guided",
        "lk",
    }
    with pytest.raises(InputError, match=r"loss 'lk' -> 'guided'"):
        go(data, ready)


def test_another_target_is_another_training(data: Path, ready: Path) -> None:
    assert go(data, ready, steps=1)
    config, tensors = checkpoints.load(ready / "target")
    checkpoints.save(ready / "target", config, {name: tensor + 0.1 for name, tensor in tensors.items()})
    with pytest.raises(InputError, match=r"other settings \(target"):
        go(data, ready, steps=1)


def test_missing_parts_name_the_command_to_run(data: Path, model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none' is unknown"):
        go(data, tmp_path / "none")
    with pytest.raises(InputError, match=r"run recipes/nature/target\.py"):
        go(data, model)
    with pytest.raises(InputError, match="loss 'block' is none of eagle's: choose paper, guided, lk"):
        DrafterSettings(loss="block").of("eagle")


def test_inheriting_starts_from_the_targets_last_block(ready: Path) -> None:
    made = task(ready, inherit=True)
    last = made.target.decoder.blocks[-1].state_dict()
    assert all(torch.equal(x, last[name]) for name, x in made.model.decoder.blocks[0].state_dict().items())
    fresh = task(ready)
    assert not torch.equal(fresh.model.decoder.blocks[0].wqkv.weight, last["wqkv.weight"])


def test_figures_are_those_of_the_guidance_they_name(ready: Path) -> None:
    made = task(ready, cfg=1.0)
    figures = made.validate_on(torch.arange(6))
    assert figures["guided"] == pytest.approx(figures["paper"], rel=1e-5)
    assert made.guidance == Guidance(1.0)
