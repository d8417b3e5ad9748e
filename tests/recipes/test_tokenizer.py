"""The tokenizer's training, and what all trainings share: budget, schedule, export."""

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers.classifiers import write_classifier
from helpers.refusals import rejects
from helpers.stages import STAGES, log, provenance, stage
from helpers.stages import tokenizer as train

import losses
import tokenizer
from autoencoders import MovingQuantiser
from lanternpp.evaluation.classifier import read_classifier
from lanternpp.models.vq.autoencoder import VQConfig, read_vq
from lanternpp.training import loop
from lanternpp.training.loop import set_rate
from lanternpp.training.options import TrainingOptions
from losses import Perceptual
from pictures import Pictures
from tokenizer import TokenizerSettings, TokenizerTask


@pytest.mark.parametrize("adversarial", [False, True])
def test_the_codes_of_another_model_are_kept_while_the_decoder_learns(
    data: Path, tmp_path: Path, adversarial: bool
) -> None:
    assert train(data, tmp_path / "old", steps=4, lr=3e-3)
    for steps, stop in ((8, 3), (8, None), (10, None)):  # stopped, resumed, continued
        more = {"adversarial": adversarial, "adversarial_start": 0.3, "lr": 3e-3}
        done = train(data, tmp_path / "new", steps, stop, codes_of=str(tmp_path / "old"), **more)
        assert done == (stop is None)
    old, new = (read_vq(tmp_path / name / "tokenizer") for name in ("old", "new"))
    assert provenance(tmp_path / "new", "tokenizer")["steps"] == 10
    for (name, mine), theirs in zip(new.state_dict().items(), old.state_dict().values(), strict=True):
        moved = name.startswith("decoder") and "norm" not in name
        assert torch.equal(mine, theirs) <= (not moved), name
        assert torch.equal(mine, theirs) or name.startswith("decoder"), name
    (images,) = Pictures.read(data, "train", 32).centres(12)
    error = [losses.reconstruction(vq.decode(vq.encode(images)), images) for vq in (old, new)]
    assert adversarial or error[1] < error[0]


class Slow(TokenizerTask):
    """Steps of 2 s and validations of 15 s, or of 10 once most of the budget is used, by a clock of its own."""

    now = 0.0

    def step(self, step: int, progress: float) -> dict[str, torch.Tensor]:
        Slow.now += 2
        return super().step(step, progress)

    def validate(self) -> dict[str, float]:
        Slow.now += 15 if Slow.now < 90 else 10
        return super().validate()


def test_a_budget_in_minutes_includes_validations_and_is_used_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "TokenizerTask", Slow)
    monkeypatch.setattr(tokenizer, "STAGES", STAGES)
    monkeypatch.setattr(time, "monotonic", lambda: Slow.now)
    small = {"batch_size": 4, "adversarial": False, "perceptual": 0.0, "size": 32, "codes": 64}
    monkeypatch.setattr(loop, "LOG_STEPS", 1)
    training = TrainingOptions(minutes=2)
    train_slowly = partial(stage, tokenizer, TokenizerSettings, data, tmp_path, training, **small)
    assert train_slowly()
    rows = log(tmp_path, "tokenizer")
    assert 110 <= Slow.now <= 122
    checks = [row["step"] for row in rows if "validation" in row]
    assert checks[-1] == rows[-1]["step"] and len(checks) == 3 and rows[-1]["step"] > 30
    assert train_slowly() and provenance(tmp_path, "tokenizer")["steps"] == rows[-1]["step"]
    assert TrainingOptions(steps=10, minutes=1).progress(2, 45) == 0.75


def test_it_learns_pictures_and_writes_weights_provenance_and_samples(data: Path, tmp_path: Path) -> None:
    assert train(data, tmp_path, steps=90, lr=3e-3)
    folder, found = tmp_path / "tokenizer", provenance(tmp_path, "tokenizer")
    assert found["steps"] == 90 and found["data"]["train"] == 12
    assert {"detail", "usage", "perplexity"} <= found["validation"].keys()
    assert found["validation"]["psnr"] > 18 and found["validation"]["train_usage"] > 0.5
    assert list((folder / "samples").glob("*.png")) and not list(folder.glob(".*.tmp"))
    assert read_vq(folder).config == VQConfig(size=32, codes=64, **STAGES[4])


def test_metrics_of_known_errors() -> None:
    truth = torch.zeros(1, 3, 8, 8)
    assert losses.psnr(truth + 0.2, truth).item() == pytest.approx(20.0, abs=0.2)  # a tenth of the range
    sharp = torch.rand(2, 3, 32, 32)
    blurred = F.interpolate(F.avg_pool2d(sharp, 2), scale_factor=2.0)
    assert (losses.detail(blurred) < 0.3 * losses.detail(sharp)).all()
    assert torch.allclose(losses.detail(0.5 * sharp), 0.25 * losses.detail(sharp))
    assert (losses.detail(torch.full((1, 3, 8, 8), 0.3)) < 1e-10).all()


def test_the_perceptual_loss_is_of_features_and_falls_along_its_gradient(tmp_path: Path) -> None:
    distance = Perceptual(read_classifier(write_classifier(tmp_path, side=32)))
    shapes = [tuple(x.shape[1:]) for x in distance.features(torch.rand(2, 3, 32, 32))]
    assert shapes == [(8, 16, 16), (16, 8, 8), (16, 4, 4)]
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
    rejects("has no classifier", train, data, tmp_path / "none", perceptual=0.1, classifier_of=str(tmp_path))
    classifier = str(write_classifier(tmp_path / "other", side=32))
    assert train(data, tmp_path / "one", perceptual=0.1, classifier_of=classifier, adversarial=True)
    rows = [row for row in log(tmp_path / "one", "tokenizer") if "loss" in row]
    assert all(row["perceptual"] > 0 for row in rows) and "fooling" in rows[-1]


def test_the_rate_is_constant_until_it_falls_to_zero_over_the_cooldown() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
    hparams = TokenizerSettings(cooldown=0.25, warmup=4)
    task = SimpleNamespace(hparams=hparams, param_groups=lambda: optimizer.param_groups)
    group = optimizer.param_groups[0]
    group["initial_lr"] = 2.0
    rates = []
    for step, progress in ((0, 0.0), (3, 0.3), (9, 0.75), (12, 0.875), (99, 1.0)):
        set_rate(task, progress, step)
        rates.append(group["lr"])
    assert rates == [0.5, 2.0, 2.0, 1.0, 0.0]


def test_the_quantiser_takes_the_nearest_code_and_passes_the_gradient() -> None:
    torch.manual_seed(0)
    quantiser = MovingQuantiser(32, 4).eval()
    latents = torch.randn(3, 5, 4, requires_grad=True)
    quantised, codes, loss = quantiser(latents)
    unit = F.normalize(latents, dim=-1)
    assert torch.equal(codes, torch.cdist(unit, quantiser.codebook[None]).argmin(-1))
    assert torch.allclose(quantised, quantiser.codebook[codes], atol=1e-6)
    (quantised.sum() + loss).backward()
    assert latents.grad.abs().sum() > 0


def test_unused_codes_are_replaced() -> None:
    torch.manual_seed(0)
    quantiser = MovingQuantiser(64, 8).train()
    quantiser.codebook.copy_(torch.eye(8)[:1].expand(64, 8))  # all codes in one place
    latents = torch.randn(4096, 8)
    assert len(quantiser(latents)[1].unique()) < 4
    for _ in range(20):
        quantiser(latents)
    assert len(quantiser.nearest(latents).unique()) == 64
    assert torch.allclose(quantiser.codebook.norm(dim=-1), torch.ones(64), atol=1e-5)
