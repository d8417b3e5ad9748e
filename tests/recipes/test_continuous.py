"""The trainings of a model over continuous latents, from pictures to a drafter."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.refusals import rejects
from helpers.stages import diffusion, eagle, kl, mixture, provenance, target
from safetensors.torch import load_file
from torch.nn.functional import avg_pool2d

from autoencoders import redraw
from lanternpp.api.model import read_target
from lanternpp.drafters.eagle import DiffusionDrafter
from lanternpp.models.latents import ContinuousConfig, DiffusionConfig
from lanternpp.models.vq.autoencoder import VQ, read_kl, read_vq
from lanternpp.nn.sources import Source
from lanternpp.training.codes import Codes, Split
from lanternpp.training.eagle import TIMES, DiffusionComparison, LatentComparison
from target import ContinuousTask, DiffusionTask, LatentTask
from words import TargetSettings


@pytest.mark.parametrize(("made", "model"), [(mixture, "latents"), (diffusion, "diffused")])
def test_compiled_losses_are_one_graph(
    made: Any, model: str, data: Path, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    for part in ("tokenizer", "target"):
        shutil.copytree(request.getfixturevalue(model) / part, tmp_path / part)
    (tmp_path / "target" / "state.pt").unlink()
    assert made(data, tmp_path, steps=1, compiled=True)
    assert eagle(data, tmp_path, steps=1, compiled=True)
    found = provenance(tmp_path, "drafter")["validation"]
    assert 0 < found["accept"] <= 1 and {"accept2", "guided", "feature"} <= found.keys()


def test_the_tokenizer_learns_and_reports_its_noise(data: Path, tmp_path: Path) -> None:
    assert kl(data, tmp_path, steps=50)
    found = provenance(tmp_path, "tokenizer")["validation"]
    assert found["psnr"] > 13 and 0 < found["noise"] < 1 and found["spread"] > 0
    read = read_kl(tmp_path / "tokenizer")
    moments = read.encode(torch.zeros(2, 3, 32, 32))
    assert moments.shape == (2, 16, 8) and redraw(read, moments).shape == (2, 3, 32, 32)


def by_brightness(vq: VQ, images: torch.Tensor) -> torch.Tensor:
    """Codes [B, length] that depend on every place's mean."""
    return (avg_pool2d(images.mean(1, keepdim=True), 8).flatten(1) * 1000).long() % 64


def shares(one: Path, two: Path, part: str) -> set[str]:
    """The names of the weights of two models that are nearly the same and not zero."""
    mine, theirs = (load_file(place / part / "model.safetensors") for place in (one, two))
    both = {name for name in mine if name in theirs and mine[name].shape == theirs[name].shape}
    return {name for name in both if mine[name].any() and (mine[name] - theirs[name]).abs().max() < 1e-3}


def test_a_tokenizer_of_latents_begins_with_the_weights_of_one_of_codes(
    data: Path, model: Path, latents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"channels": 8, "lr": 1e-6}  # as wide as the codes, but the layers beside the latent are new
    assert kl(data, tmp_path / "kl", 1, weights_of=str(model), **small)
    said = "taken from another model: encoder, decoder; new: encoder.10, decoder.0"
    assert f"tokenizer: {said}\n" in capsys.readouterr().err
    assert provenance(tmp_path / "kl", "tokenizer")["first_weights"] == said
    same = shares(tmp_path / "kl", model, "tokenizer")
    assert {"encoder.1.weight", "decoder.11.weight"} <= same
    assert not any(name.startswith(("encoder.10", "decoder.0.")) for name in same)
    assert kl(data, tmp_path / "on", 1, weights_of=str(tmp_path / "kl"), **small)
    assert provenance(tmp_path / "on", "tokenizer")["first_weights"].endswith("new: nothing")
    assert {"encoder.10.weight", "decoder.0.weight"} <= shares(tmp_path / "on", tmp_path / "kl", "tokenizer")
    rejects("start ", kl, data, tmp_path / "kl", 2, **small)
    rejects("not a model of codes", target, data, model, weights_of=str(latents))
    rejects(r"give --down 8$", kl, data, tmp_path / "other", 1, weights_of=str(model), down=4)


@pytest.mark.parametrize("made", [mixture, diffusion])
def test_a_target_of_latents_begins_with_the_weights_of_one_of_codes(
    made: Callable[..., bool], latents: Path, data: Path, model: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(VQ, "encode", by_brightness)  # an untrained tokenizer finds the same code everywhere
    assert target(data, model, 1)
    mine, again = tmp_path / "mine", tmp_path / "again"
    for place, start in ((mine, model), (again, mine)):
        shutil.copytree(latents / "tokenizer", place / "tokenizer")
        assert made(data, place, 1, weights_of=str(start), lr=1e-6, muon_lr=1e-6)
    said, head = provenance(mine, "target")["first_weights"], "latent_out" if made is mixture else "denoiser"
    assert said.startswith("taken from another model: decoder, ")
    assert f"new: latent_mean, latent_std, latent_in, {head}" in said
    assert said.endswith("latent_in is fitted to the vectors that the other model reads of 12 pictures")
    same = shares(mine, model, "target")
    assert {"decoder.blocks.1.wqkv.weight", "word_table", "slot_table", "null_prefix"} <= same
    begun, start = (read_target(place, torch.float32) for place in (mine, model))
    (cached,) = (mine / "codes").glob("train-*/*.safetensors")
    moments, generator = load_file(cached)["codes"][:, 0].float(), torch.Generator().manual_seed(0)
    drawn = begun.from_cache(moments, generator)
    vectors = start.embed(start.vq.encode(begun.vq.decode(moments[..., :4])))
    left = (vectors - begun.embed(drawn)).flatten(0, 1)
    # the residuals of least squares have no mean and no correlation with the latents
    assert left.mean(0).abs().max() < 1e-4
    assert (drawn.flatten(0, 1).T @ left / len(left)).abs().max() < 1e-4 < left.abs().mean()
    weight = "latent_out.weight" if made is mixture else "denoiser.inputs.weight"
    assert {"latent_in.weight", weight} <= shares(again, mine, "target")


@pytest.mark.parametrize("kind", [ContinuousTask, DiffusionTask])
def test_the_target_overfits_six_pictures(kind: type[LatentTask], latents: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(6, 1, 16, 4, generator=generator) * 3 + 5
    moments = torch.cat((mean, torch.full_like(mean, -4)), -1).half()
    split = Split(moments, ("a red square", "a blue square", "a photo") * 2, ("",) * 6)
    shape: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 2, "hidden": 48, "grid": 4, "slots": 3}
    shape |= {"words": ("red", "blue", "square"), "subjects": ("square",), "channels": 4}
    config: Any = ContinuousConfig(**shape, components=3)
    if kind is DiffusionTask:
        config = DiffusionConfig(**shape, denoiser_width=32, denoiser_blocks=2, denoising_steps=6)
    settings = TargetSettings(batch_size=6, lr=1e-2, muon_lr=1e-2, warmup=2, drop_captions=0.0)
    kl = read_kl(latents / "tokenizer")
    cached = Codes(split, split, "made")
    made = kind(config, settings, cached, kl, torch.device("cpu"))
    before = made.validate_on(torch.arange(6))
    for step in range(80):
        made.step(step, step / 80)
    made.average.load_state_dict(made.model.state_dict())
    after = made.validate_on(torch.arange(6))
    assert after["nll"] < after["gaussian"] - 0.5 < before["nll"]
    drawn = made.model.from_cache(moments[:, 0].float())
    assert torch.allclose(drawn.std((0, 1)), torch.ones(4), atol=0.1)
    assert torch.allclose(drawn.mean((0, 1)), torch.zeros(4), atol=0.1)


def test_expected_acceptance_is_the_overlap_of_two_distributions() -> None:
    torch.manual_seed(0)
    p = torch.tensor([0.0, 0.0, 0.0]).expand(20_000, 3)  # one component of one channel
    q = torch.tensor([0.0, 1.0, 0.0]).expand(20_000, 3)
    comparison = LatentComparison("guided", 1)
    overlap = 2 * torch.special.ndtr(torch.tensor(-0.5)).item()
    assert comparison.acceptance(q, p).mean().item() == pytest.approx(overlap, abs=0.01)
    gap = comparison.cross_entropy(q, p) - comparison.cross_entropy(p, p)
    assert gap.item() == pytest.approx(0.5, abs=0.03)  # the divergence of two Gaussians one apart


def test_diffusion_heads_are_compared_at_the_same_noisy_latents() -> None:
    torch.manual_seed(0)
    comparison = DiffusionComparison("guided", 2, 5)
    points = comparison.points(torch.zeros(3, 7, 2))
    assert points.shape == (3, 7, TIMES, 3) and (points[..., -1, 0] == 0.2).all()
    p = torch.randn(50_000, TIMES, 2)
    flat = torch.zeros(50_000, TIMES)
    same = torch.cat((flat, p.flatten(1), flat, flat), 1)  # means, then logarithms of standard deviations
    other = torch.cat((flat, (p + torch.tensor([1.0, 0.0])).flatten(1), flat, flat), 1)
    assert comparison.loss(same, same) == 0 and comparison.acceptance(same, same).min() == 1
    # One number of two is one deviation off.
    assert comparison.loss(other, same).item() == pytest.approx(0.25)
    overlap = 2 * torch.special.ndtr(torch.tensor(-0.5)).item()
    assert comparison.acceptance(other, same).mean().item() == pytest.approx(overlap, abs=0.01)
    assert comparison.agreement(same, same) == 1 > comparison.agreement(other, same)


def test_options_of_codes_and_of_other_heads_are_rejected(
    latents: Path, diffused: Path, data: Path, tmp_path: Path, model: Path
) -> None:
    rejects("--head mixture", read_vq, latents / "tokenizer")
    rejects("--kind kl", mixture, data, model)
    rejects("--corrupt is for --head softmax", mixture, data, latents, corrupt=0.1)
    other = tmp_path / "other"
    shutil.copytree(latents, other, ignore=shutil.ignore_patterns("drafter"))
    rejects("choose paper or guided", eagle, data, other, loss="lk")
    rejects("--cache-features", eagle, data, other, cache=True)
    of_mixtures, of_diffusion = (read_target(place, torch.float32) for place in (latents, diffused))
    source = Source.open(diffused / "drafter")
    assert DiffusionDrafter.read(source, of_diffusion, torch.float32).config.channels == 4
    rejects("which this model has not", DiffusionDrafter.read, source, of_mixtures, torch.float32)
