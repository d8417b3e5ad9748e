"""The training of EAGLE drafters: its losses, its data, that it improves drafts, and that the features are those of the engine."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.checkpoints import write_llamagen
from helpers.families import write_chameleon, write_janus
from helpers.models import write_model
from helpers.photos import NEUTRAL, made_codes, teacher_of
from helpers.refusals import rejects
from helpers.stages import eagle, log
from torch import Tensor

from lanternpp.accept.exact import Exact
from lanternpp.api.model import read_target
from lanternpp.drafters.eagle import EagleConfig, EagleDrafter
from lanternpp.drafters.parallel import branch_mask
from lanternpp.engine.decode import Engine
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.nn import checkpoints
from lanternpp.proposers.tree import TreeProposer
from lanternpp.training import loop
from lanternpp.training.codes import Codes, Split
from lanternpp.training.drafter import CaptionPrompts, drafter_inputs
from lanternpp.training.eagle import MIN_ACCEPTANCE, CodeComparison, EagleTask
from lanternpp.training.options import DrafterSettings, TrainingData
from lanternpp.trees import build_tree

LONG = "the sea at sunset " * 9 + "the red tulip"  # over 32 tokens: shorter prompts are padded beside it
CASES = {
    "llamagen": (lambda path: write_llamagen(path, text=True), ("a red tulip of", "blue")),
    "janus": (write_janus, ("a red tulip", LONG)),
    "lumina": (lambda path: write_chameleon(path, lumina=True), ("a red tulip", LONG)),
    "words": (write_model, ("a red tulip", "the sea")),
}


def task(ready: Path, count: int = 6, sampling: Sampling = NEUTRAL, **settings: Any) -> EagleTask:
    hparams = DrafterSettings(**{"batch_size": count, "cfg": 3.0, **settings}).of("eagle")
    teacher = teacher_of(read_target(ready, torch.float32), sampling=sampling)
    return EagleTask(hparams, teacher, made_codes(count))


def test_lk_is_the_negative_log_of_the_probability_that_a_draft_code_is_accepted() -> None:
    p, q = torch.randn(2, 3, 5, 8, dtype=torch.float64) * 2
    kept = torch.zeros(3, 5, dtype=torch.float64)
    for row in range(3):
        for place in range(5):  # draw x from q, keep it with probability min(1, p / q)
            mine, other = q[row, place].softmax(-1), p[row, place].softmax(-1)
            kept[row, place] = sum(m * min(1.0, o / m) for m, o in zip(mine, other, strict=True))
    lk = CodeComparison("lk")
    assert torch.allclose(lk.acceptance(q, p).double(), kept, atol=1e-6)
    assert lk.loss(q, p).item() == pytest.approx(-kept.log().mean().item(), abs=1e-6)
    assert lk.loss(p, p).item() == pytest.approx(0.0, abs=1e-6)
    apart = torch.eye(2) * 200
    assert lk.loss(apart[:1], apart[1:]) < 14, "one place without overlap does not dominate the mean"
    both = lk.loss(q, p) + CodeComparison("guided").loss(q, p)
    assert CodeComparison("both").loss(q, p).item() == pytest.approx(both.item(), rel=1e-5)


def test_cross_entropy_is_least_where_the_two_agree() -> None:
    p, q = torch.randn(2, 4, 8)
    true, other = (torch.distributions.Categorical(logits=x) for x in (p, q))
    loss = CodeComparison("guided").loss
    assert loss(p, p).item() == pytest.approx(true.entropy().mean().item(), abs=1e-5)
    expected = torch.distributions.kl_divergence(true, other).mean()
    assert (loss(q, p) - loss(p, p)).item() == pytest.approx(expected.item(), abs=1e-5)


def test_guided_losses_are_those_of_the_merged_rows(ready: Path) -> None:
    made = task(ready, loss="lk", cfg=3.0, noise=0.0)
    index = torch.arange(6)
    codes = made.codes.train.pick(index)
    _, distribution = made.loss(*made.train(index, 2), codes)
    p, q = [], []
    with torch.no_grad():
        for prompts, _ in (made.train(index, 1), made.train(index, 1, torch.ones(6, dtype=torch.bool))):
            next_inputs, features = drafter_inputs(made.target, prompts, codes)
            drafted = made.model.forward_sequence(next_inputs, features[:, :-1])
            p.append(made.target.head(features[:, 3:]))  # of codes 1..15, after 3 prompt slots and code 0
            q.append(made.target.head(drafted[:, 2:]))
    guided_p, guided_q = ((null + 3.0 * (caption - null)).softmax(-1) for caption, null in (p, q))
    kept = torch.minimum(guided_p, guided_q).sum(-1)
    assert kept.shape == (6, 15)
    assert distribution.item() == pytest.approx(-kept.log().mean().item(), rel=1e-4)


@pytest.mark.parametrize("loss", ["paper", "lk"])
def test_it_overfits_six_pictures(ready: Path, loss: str) -> None:
    made = task(ready, loss=loss, noise=0.0, lr=1e-2, weight=1.0, cfg=2.0)
    before = made.validate_on(torch.arange(6))
    for step in range(60):
        made.step(step, 0.0)
    made.average.load_state_dict(made.model.state_dict())
    after = made.validate_on(torch.arange(6))
    assert after["accept"] > before["accept"] + 0.1
    assert after["feature"] < 0.7 * before["feature"]
    assert after[loss] < before[loss]


def test_a_second_round_reads_the_drafters_feature_of_the_last_code(ready: Path) -> None:
    """And the target's of all codes before; the first round is the loss of one round."""
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
        read = [torch.cat((features[:, :last], first[:, last - 1 : last]), 1) for last in range(3, 17)]
        second = [made.model.forward_sequence(next_inputs[:, : x.shape[1]], x)[:, -1] for x in read]
        p, q = (Guidance(3.0).merge(made.target.head(x)) for x in (features[:, 4:], torch.stack(second, 1)))
    expected = (found[1] + CodeComparison("guided").loss(q, p).item()) / 2
    assert found[2] == pytest.approx(expected, rel=1e-5)
    check = EagleTask.check, DrafterSettings(rounds=16).of("eagle"), made.target, TrainingData()
    rejects("--rounds 16 is too many for pictures of 16 codes: use at most 15", *check)
    made.target.length = 1
    rejects("these pictures have one code", *check)


@pytest.mark.parametrize(("loss", "cfg", "share"), [("paper", 3.0, 0.1), ("guided", 1.0, 0.0)])
def test_a_tenth_of_the_captions_is_dropped_under_the_papers_loss(
    loss: str, cfg: float, share: float, ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = task(ready, count=60, loss=loss, cfg=cfg)
    shares, null = [], made.target.prompt([None], 1).embeds

    def seen(prompts: Tensor, start: Tensor | None, codes: Tensor, known: None) -> tuple[Tensor, Tensor]:
        shares.append((prompts == null).flatten(1).all(1).double().mean().item())
        nothing = sum(p.sum() for p in made.model.parameters()) * 0
        return nothing, nothing

    monkeypatch.setattr(made, "training_loss", seen)
    for step in range(60):
        made.step(step, 0.0)
    without_subject = 1 / 3  # "a photo" names no subject: the null prompt, dropped or not
    assert sum(shares) / 60 == pytest.approx(without_subject + share * (1 - without_subject), abs=0.02)


def test_a_caption_without_a_subject_is_the_null_prompt(ready: Path) -> None:
    target, codes = read_target(ready, torch.float32), torch.zeros(2, 1, 16, dtype=torch.uint16)
    captions = CaptionPrompts(target, Split(codes, ("a blue square", "a photo")))
    prompts, start = captions(torch.tensor([1, 0]), 2)
    assert torch.equal(prompts, target.prompt([None, "a blue square"], 2).embeds) and start is None
    rejects("none of the captions", CaptionPrompts, target, Split(codes[:1], ("a photo",)))


def test_a_training_does_not_resume_with_another_target(data: Path, ready: Path) -> None:
    assert eagle(data, ready, steps=1)
    config, tensors = checkpoints.load(ready / "target")
    checkpoints.save(ready / "target", config, {name: tensor + 0.1 for name, tensor in tensors.items()})
    rejects(r"other settings \(target", eagle, data, ready, steps=1)


def test_an_interrupted_save_leaves_no_provenance(data: Path, ready: Path, monkeypatch) -> None:
    monkeypatch.setattr(loop.checkpoints, "save", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        eagle(data, ready, steps=1)
    assert not (ready / "drafter" / "provenance.json").exists()


def test_a_larger_budget_has_its_own_validations(data: Path, ready: Path) -> None:
    for steps in (2, 6):
        assert eagle(data, ready, steps=steps)
    assert [row["step"] for row in log(ready, "drafter") if "validation" in row] == [1, 2, 3, 6]


def test_inheriting_starts_from_the_targets_last_block(ready: Path) -> None:
    made = task(ready, inherit=True)
    last = made.target.decoder.blocks[-1].state_dict()
    assert all(torch.equal(x, last[name]) for name, x in made.model.decoder.blocks[0].state_dict().items())
    random = task(ready)
    assert not torch.equal(random.model.decoder.blocks[0].wqkv.weight, last["wqkv.weight"])
    deep = DrafterSettings(inherit=True, layers=9).of("eagle")
    rejects("needs 9 blocks of the target", EagleTask.check, deep, made.target, TrainingData())


def test_without_guidance_the_guided_loss_is_the_papers(ready: Path) -> None:
    made = task(ready, cfg=1.0)
    figures = made.validate_on(torch.arange(6))
    assert figures["guided"] == pytest.approx(figures["paper"], rel=1e-5)
    assert made.guidance == Guidance(1.0)


def test_acceptance_is_that_of_the_models_own_sampling(ready: Path) -> None:
    """Of the likeliest code alone, a draft is accepted where both have the same one."""
    made, plain = (task(ready, sampling=Sampling(top_k=k)).validate_on(torch.arange(6)) for k in (1, 0))
    assert made["accept"] == pytest.approx(made["agree"], abs=2e-6) != plain["accept"]
    assert made["lk"] == pytest.approx((1 - made["agree"]) * -math.log(MIN_ACCEPTANCE), rel=1e-5)
    assert {name for name in made if made[name] != plain[name]} == {"accept", "accept2", "lk"}


def test_validations_have_the_same_noise_and_do_not_change_that_of_the_training(ready: Path) -> None:
    made = task(ready)
    made.validate_on = lambda _: {"noise": torch.rand(1).item()}
    state = torch.manual_seed(5).get_state()
    assert made.validate()["noise"] == made.validate()["noise"] == made.final()["noise"]
    assert torch.equal(torch.get_rng_state(), state)


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_teacher_forced_features_are_those_of_the_engines_drafter(name: str, tmp_path: Path) -> None:
    write: Callable[[Path], object]
    write, texts = CASES[name]
    write(tmp_path / "Lumina-mGPT-7B-64")
    target = read_target(tmp_path / "Lumina-mGPT-7B-64", torch.float64).eval()
    torch.manual_seed(0)
    config = EagleConfig.like(target.decoder.config)
    drafter = EagleDrafter(config, target.decoder.rotary_table.double()).double().eval()
    proposer = TreeProposer(drafter, build_tree("chain-2"))
    engine = Engine(target, proposer, Exact(), Sampling(), Guidance(3.0), 1)
    seen: dict[int, torch.Tensor] = {}
    engine.admit(0, texts[0], 1)
    while engine.decided()[0] < target.length:
        seen[int(engine.count)] = proposer.features[:, 0].clone()
        engine.step()
    codes = engine.collect(0).codes[None].repeat(2, 1)

    captions = CaptionPrompts(target, Split(codes[:1, None].repeat(2, 1, 1), texts))
    prompts, start = captions(torch.tensor([0]), 2)
    assert (start is not None) == (name != "words")
    next_inputs, features = drafter_inputs(target, prompts, codes, start)
    slot = torch.arange(next_inputs.shape[1])[None]
    mask = None if start is None else branch_mask(slot, slot, start)
    drafted = drafter.forward_sequence(next_inputs, features[:, :-1], slot, mask)
    assert drafted.isfinite().all()
    for count, expected in seen.items():
        if count < target.length:
            here = drafted[:, prompts.shape[1] + count - 2]
            # Rotations are kept in float32.
            assert (here - expected).abs().max() < 1e-6, f"after {count} codes"
    assert len(seen) > 4


def test_a_dropped_caption_is_the_unconditional_prompt(tmp_path: Path) -> None:
    write_llamagen(tmp_path, text=True)
    target = read_target(tmp_path, torch.float32).eval()
    texts = ("a red tulip of", "blue")
    captions = CaptionPrompts(target, Split(torch.zeros(2, 1, 16, dtype=torch.uint16), texts))
    both, start = captions(torch.tensor([0, 1]), 2)
    drawn, begin = captions(torch.tensor([0, 1]), 1, torch.tensor([True, False]))
    assert torch.equal(drawn[0], both[2]) and torch.equal(drawn[1], both[1])
    assert begin.tolist() == [start[2], start[1]]


@pytest.mark.parametrize("loss", ["paper", "guided"])
def test_features_from_the_disk_give_the_losses_of_computed_ones(
    loss: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path)
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randint(32, (6, 2, 16), generator=generator).to(torch.uint16)
    split = Split(pictures, ("a red tulip", "tulip", "red tulip") * 2)
    figures = []
    for cache in (False, True):
        dropped = 0.4 if loss == "paper" else 0.1
        settings = DrafterSettings(cfg=3.0, loss=loss, batch_size=4, drop_captions=dropped)
        teacher = teacher_of(read_target(tmp_path, torch.float32), tmp_path / "codes")
        codes, source = Codes(split, split, "made"), TrainingData(cache_features=cache)
        made = EagleTask(settings.of("eagle"), teacher, codes, source)
        torch.manual_seed(0)
        figures.append([made.step(step, 0.0)["loss"].item() for step in range(4)])
    assert figures[0] == pytest.approx(figures[1], rel=1e-3)
    assert "the features of all pictures: 6 pictures, in" in capsys.readouterr().err
