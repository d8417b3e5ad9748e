"""The tokenizer's training, and with it the skeleton: budget, resume, refusal, export."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.classifiers import write_classifier

import losses
import tokenizer
from lanternpp.errors import InputError
from lanternpp.evaluation.classifier import read_classifier
from lanternpp.models.vq.folder import read_vq
from lanternpp.models.vq.model import VQConfig
from lanternpp.training.loop import set_rate
from lanternpp.training.options import TrainingOptions
from lanternpp.training.state import STATE
from losses import Perceptual
from pictures import Pictures
from tokenizer import TokenizerSettings, TokenizerTask, train

TINY = VQConfig(size=32, codes=64, channels=(16, 32), encoder_blocks=(1, 1), decoder_blocks=(1, 1), thin=16)


def go(
    data: Path,
    model: Path,
    steps: int = 8,
    stop: int | None = None,
    restart: bool = False,
    codes_of: Path | None = None,
    classifier_of: Path | None = None,
    **settings: Any,
) -> bool:
    options = TrainingOptions(
        model / "tokenizer", steps, restart=restart, stop_after=stop, log_steps=1, checks=2
    )
    hparams = TokenizerSettings(**{"batch_size": 4, "adversarial": False, "perceptual": 0, **settings})
    return train(data, TINY, hparams, options, codes_of=codes_of, classifier_of=classifier_of)


def log(model: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (model / "tokenizer" / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


@pytest.mark.parametrize("stop", [3, 6])  # before and inside the adversarial part
def test_a_stopped_and_resumed_run_repeats_the_unbroken_one(data: Path, tmp_path: Path, stop: int) -> None:
    assert go(data, tmp_path / "whole", adversarial=True)
    assert not go(data, tmp_path / "parts", adversarial=True, stop=stop)
    assert not (tmp_path / "parts" / "tokenizer" / "config.json").exists()
    assert go(data, tmp_path / "parts", adversarial=True)
    assert log(tmp_path / "parts") == log(tmp_path / "whole")
    one, two = (read_vq(tmp_path / name / "tokenizer") for name in ("whole", "parts"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("adversarial", [False, True])
def test_the_codes_of_a_model_stay_while_its_decoder_learns(
    data: Path, tmp_path: Path, adversarial: bool
) -> None:
    assert go(data, tmp_path / "old", steps=4, lr=3e-3)
    for steps, stop in ((8, 3), (8, None), (10, None)):  # stopped, resumed, gone on with
        more = {"adversarial": adversarial, "adversarial_start": 0.3, "lr": 3e-3}
        done = go(data, tmp_path / "new", steps, stop, codes_of=tmp_path / "old", **more)
        assert done == (stop is None)
    old, new = (read_vq(tmp_path / name / "tokenizer") for name in ("old", "new"))
    assert torch.equal(old.codebook, new.codebook)
    reported = json.loads((tmp_path / "new" / "tokenizer" / "provenance.json").read_text())
    assert reported["data"]["codes_of"]["steps"] == 4 and reported["steps"] == 10
    for name, mine in new.encoder.state_dict().items():
        assert torch.equal(mine, old.encoder.state_dict()[name]), name
    assert not any(
        torch.equal(a, b) for a, b in zip(old.decoder.parameters(), new.decoder.parameters(), strict=True)
    )
    pictures = Pictures.read(data, "train", TINY.size)
    error = [
        losses.reconstruction(vq.decode(vq.encode(x)), x) for vq in (old, new) for x in pictures.centres(12)
    ]
    assert adversarial or error[1] < error[0]


class Slow(TokenizerTask):
    """Steps of 2 s and validations of 15 s, by a clock of its own."""

    now = 0.0

    def step(self, step: int, progress: float) -> dict[str, torch.Tensor]:
        Slow.now += 2
        return super().step(step, progress)

    def validate(self) -> dict[str, float]:
        Slow.now += 15
        return super().validate()


def test_validations_are_part_of_a_budget_in_minutes(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "TokenizerTask", Slow)
    monkeypatch.setattr(time, "monotonic", lambda: Slow.now)
    options = TrainingOptions(tmp_path / "model" / "tokenizer", minutes=2, log_steps=1)
    settings = TokenizerSettings(batch_size=4, adversarial=False, perceptual=0.0)
    assert train(data, TINY, settings, options)
    rows = log(tmp_path / "model")
    assert 110 <= Slow.now <= 122
    checks = [row["step"] for row in rows if "validation" in row]
    assert checks[-1] == rows[-1]["step"] and len(checks) == 3 and rows[-1]["step"] > 30


def test_a_check_looks_at_pictures_from_all_over(data: Path) -> None:
    pictures = Pictures.read(data, "train", TINY.size)
    some = torch.cat(list(pictures.centres(2, 3)))
    every = torch.cat(list(pictures.centres(5)))
    assert len(every) == 12 and torch.equal(some, every[[0, 6, 11]])


def test_other_settings_are_refused_by_name_until_restarted(data: Path, tmp_path: Path) -> None:
    assert not go(data, tmp_path, stop=1)
    with pytest.raises(InputError, match=r"lr 0.0005 -> 0.001.*--restart"):
        go(data, tmp_path, lr=1e-3)
    assert go(data, tmp_path, steps=2, lr=1e-3, restart=True)
    assert [row["step"] for row in log(tmp_path) if "loss" in row] == [1, 2]


def test_ctrl_c_finishes_the_step_and_saves(data: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)  # Python's own; none where a shell's background ignores Ctrl-C

    def interrupt() -> None:
        while signal.getsignal(signal.SIGINT) is before:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert not go(data, tmp_path, steps=100_000)
    assert (tmp_path / "tokenizer" / STATE).exists()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_finished_folder_holds_weights_provenance_and_samples(data: Path, tmp_path: Path) -> None:
    assert go(data, tmp_path, steps=2)
    folder = tmp_path / "tokenizer"
    facts = json.loads((folder / "provenance.json").read_text())
    assert facts["steps"] == 2
    assert facts["data"]["train"] == 12
    assert {"psnr", "detail", "usage", "perplexity", "train_usage"} <= facts["validation"].keys()
    assert list((folder / "samples").glob("*.png"))
    assert not list(folder.glob(".*.tmp"))
    assert read_vq(folder).config == TINY


def test_it_learns_four_pictures(data: Path, tmp_path: Path) -> None:
    assert go(data, tmp_path, steps=150, lr=3e-3)
    facts = json.loads((tmp_path / "tokenizer" / "provenance.json").read_text())
    assert facts["validation"]["psnr"] > 18
    assert facts["validation"]["train_usage"] > 0.5


def test_a_budget_is_required_and_positive(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--steps N, --minutes M"):
        TrainingOptions(tmp_path).check()
    with pytest.raises(InputError, match="--minutes -1"):
        TrainingOptions(tmp_path, minutes=-1).check()
    assert TrainingOptions(tmp_path, steps=10, minutes=1).progress(2, 45) == 0.75


def test_psnr_of_a_known_error() -> None:
    truth = torch.zeros(1, 3, 8, 8)
    assert losses.psnr(truth + 0.2, truth).item() == pytest.approx(20.0, abs=0.2)  # a tenth of the range


def test_detail_tells_sharp_from_blurred() -> None:
    sharp = torch.rand(2, 3, 32, 32)
    blurred = torch.nn.functional.interpolate(torch.nn.functional.avg_pool2d(sharp, 2), scale_factor=2.0)
    assert (losses.detail(blurred) < 0.3 * losses.detail(sharp)).all()
    assert torch.allclose(losses.detail(0.5 * sharp), 0.25 * losses.detail(sharp))
    assert (losses.detail(torch.full((1, 3, 8, 8), 0.3)) < 1e-10).all()


def test_the_perceptual_loss_is_of_features_and_leads_towards_the_picture(tmp_path: Path) -> None:
    distance = Perceptual(read_classifier(write_classifier(tmp_path, side=32)))
    assert [tuple(x.shape[1:]) for x in distance.features(torch.rand(2, 3, 32, 32))] == [
        (8, 16, 16),
        (16, 8, 8),
        (16, 4, 4),
    ]
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(2, 3, 32, 32, generator=generator) * 2 - 1
    images = (truth + 0.5 * torch.randn(truth.shape, generator=generator)).requires_grad_()
    before = distance(images, truth)
    (slope,) = torch.autograd.grad(before, images)
    assert distance(truth, truth).item() < 1e-9 < before.item()
    assert distance(images - 0.1 * slope / slope.norm(), truth) < before


def test_a_perceptual_weight_needs_a_classifier_and_is_logged_in_both_parts(
    data: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="name a model that has one"):
        go(data, tmp_path / "none", perceptual=0.1, classifier_of=tmp_path)
    classifier = write_classifier(tmp_path / "other", side=32)
    assert go(data, tmp_path / "one", perceptual=0.1, classifier_of=classifier, adversarial=True)
    rows = [row for row in log(tmp_path / "one") if "loss" in row]
    assert all(row["perceptual"] > 0 for row in rows) and "fooling" in rows[-1]
    with pytest.raises(InputError, match=r"perceptual 0.1 -> 0.2"):
        go(data, tmp_path / "one", steps=9, perceptual=0.2, classifier_of=classifier, adversarial=True)


def test_the_rate_is_constant_until_it_falls_to_zero_over_the_cooldown() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
    task = SimpleNamespace(cooldown=0.25, warmup=4, param_groups=lambda: optimizer.param_groups)
    group = optimizer.param_groups[0]
    group["initial_lr"] = 2.0
    rates = []
    for step, progress in ((0, 0.0), (3, 0.3), (9, 0.75), (12, 0.875), (99, 1.0)):
        set_rate(task, progress, step)  # type: ignore[arg-type]
        rates.append(group["lr"])
    assert rates == [0.5, 2.0, 2.0, 1.0, 0.0]
