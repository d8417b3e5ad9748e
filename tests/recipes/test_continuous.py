"""The trainings of a model over continuous latents, from pictures to a drafter."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import avg_pool2d

from lanternpp.api.model import read_target
from lanternpp.drafters.diffusion import DiffusionDrafter
from lanternpp.errors import InputError
from lanternpp.models.latents.target import ContinuousConfig, ContinuousTarget, DiffusionConfig
from lanternpp.models.vq.folder import read_kl, read_vq
from lanternpp.models.vq.kl import KLConfig
from lanternpp.models.vq.model import VQ
from lanternpp.nn.sources import Source
from lanternpp.training.codes import Codes, Split
from lanternpp.training.drafter import train as train_drafter
from lanternpp.training.eagle import TIMES, DiffusionComparison, EagleTask, LatentComparison
from lanternpp.training.options import DrafterSettings, TrainingData, TrainingOptions
from latents import ContinuousTask, DiffusionTask, LatentTask
from target import Head, Shape
from target import train as train_target
from tokenizer import TokenizerSettings, train
from words import TargetSettings

TINY = KLConfig(32, 4, (16, 16, 32), (1,) * 3, (1,) * 3)
SHAPE = Shape(32, 2, 2, 48)
MIXTURE = {"head": "mixture", "own": Head(components=3)}
DIFFUSION = {"head": "diffusion", "own": Head(None, 3, 16, 1)}


def options(folder: Path, steps: int, stop: int | None = None, compiled: bool = False) -> TrainingOptions:
    return TrainingOptions(folder, steps, stop_after=stop, log_steps=1, checks=2, compile=compiled)


def tokenizer(
    data: Path,
    model: Path,
    steps: int = 4,
    stop: int | None = None,
    weights_of: Path | None = None,
    config: KLConfig = TINY,
    **more: Any,
) -> bool:
    more = {"adversarial": False, "perceptual": 0.0, **more}
    settings = TokenizerSettings(**{"batch_size": 4, "lr": 3e-3, "warmup": 2, **more})
    where = options(model / "tokenizer", steps, stop)
    return train(data, config, settings, where, weights_of=weights_of)


def target(
    data: Path,
    model: Path,
    steps: int = 4,
    stop: int | None = None,
    compiled: bool = False,
    weights_of: Path | None = None,
    head: dict[str, Any] = MIXTURE,
    **more: Any,
) -> bool:
    settings = TargetSettings(**{"batch_size": 4, "warmup": 2, **more})
    where = options(model / "target", steps, stop, compiled)
    return train_target(data, model, SHAPE, settings, where, crops=1, weights_of=weights_of, **head)


def diffusion(*args: Any, **more: Any) -> bool:
    return target(*args, head=DIFFUSION, **more)


def eagle(data: Path, model: Path, steps: int = 4, stop: int | None = None, compiled: bool = False) -> bool:
    settings = DrafterSettings(batch_size=4, warmup=2).of("eagle")
    where = options(model / "drafter", steps, stop, compiled)
    return train_drafter(model, EagleTask, settings, TrainingData(data, crops=1), where)


def facts(model: Path, part: str, name: str = "validation") -> Any:
    return json.loads((model / part / "provenance.json").read_text())[name]


@pytest.fixture(scope="session")
def latent_model(
    tmp_path_factory: pytest.TempPathFactory, paint: Callable[[Path, int], None]
) -> tuple[Path, Path]:
    """(pictures, a model of latents with its three networks, all hardly trained)."""
    place = tmp_path_factory.mktemp("latents")
    for split, count in (("train", 12), ("val", 4)):
        paint(place / "data" / split, count)
    for part in (tokenizer, target, eagle):
        assert part(place / "data", place / "model")
    return place / "data", place / "model"


@pytest.fixture(scope="session")
def diffusion_model(
    latent_model: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The same with a diffusion head, over the same tokenizer."""
    data, place = latent_model[0], tmp_path_factory.mktemp("diffusion")
    shutil.copytree(latent_model[1] / "tokenizer", place / "tokenizer")
    for part in (diffusion, eagle):
        assert part(data, place)
    return data, place


@pytest.mark.parametrize(
    ("model_of", "part", "name"),
    [
        ("latent_model", tokenizer, "tokenizer"),
        ("latent_model", target, "target"),
        ("latent_model", eagle, "drafter"),
        ("diffusion_model", diffusion, "target"),
        ("diffusion_model", eagle, "drafter"),
    ],
)
def test_a_stopped_and_resumed_run_repeats_the_unbroken_one(
    model_of: str, part: Any, name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    data, whole = request.getfixturevalue(model_of)
    parts = tmp_path / "parts"
    for each in ("tokenizer", "target"):
        if each != name and not (each == "target" and name == "tokenizer"):
            shutil.copytree(whole / each, parts / each)
    assert not part(data, parts, stop=2)
    assert part(data, parts)
    one, two = (load_file(place / name / "model.safetensors") for place in (whole, parts))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("model_of", ["latent_model", "diffusion_model"])
def test_losses_are_one_graph_when_compiled(
    model_of: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, whole = request.getfixturevalue(model_of)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    for part in ("tokenizer", "target"):
        shutil.copytree(whole / part, tmp_path / part)
    (tmp_path / "target" / "state.pt").unlink()
    made = target if model_of == "latent_model" else diffusion
    assert made(data, tmp_path, steps=1, compiled=True)
    assert eagle(data, tmp_path, steps=1, compiled=True)


def test_the_tokenizer_learns_and_tells_its_noise(data: Path, tmp_path: Path) -> None:
    assert tokenizer(data, tmp_path, steps=50)
    found = facts(tmp_path, "tokenizer")
    assert found["psnr"] > 13 and 0 < found["noise"] < 1 < found["noise"] + found["spread"] + 1
    kl = read_kl(tmp_path / "tokenizer")
    moments = kl.encode(torch.zeros(2, 3, 32, 32))
    assert moments.shape == (2, 16, 8) and kl.redraw(moments).shape == (2, 3, 32, 32)


def by_brightness(vq: VQ, images: torch.Tensor) -> torch.Tensor:
    """Codes [B, length] that depend on every place's mean."""
    return (avg_pool2d(images.mean(1, keepdim=True), 8).flatten(1) * 1000).long() % 64


def shares(one: Path, two: Path, part: str) -> set[str]:
    """The names of the weights of two models that are nearly the same and not zero."""
    mine, theirs = (load_file(place / part / "model.safetensors") for place in (one, two))
    both = {name for name in mine if name in theirs and mine[name].shape == theirs[name].shape}
    return {name for name in both if mine[name].any() and (mine[name] - theirs[name]).abs().max() < 1e-3}


def test_a_tokenizer_of_latents_begins_with_the_weights_of_one_of_codes(
    data: Path,
    model: Path,
    latent_model: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = replace(TINY, dim=8)  # as wide as the codes, and yet what lies at the latent is new
    assert tokenizer(data, tmp_path / "kl", 1, weights_of=model, config=config, lr=1e-6)
    said = "taken from another model: encoder, decoder; new: encoder.10, decoder.0"
    assert f"tokenizer: {said}\n" in capsys.readouterr().err
    assert facts(tmp_path / "kl", "tokenizer", "first_weights") == said
    same = shares(tmp_path / "kl", model, "tokenizer")
    assert {"encoder.1.weight", "decoder.11.weight"} <= same
    assert not any(name.startswith(("encoder.10", "decoder.0.")) for name in same)
    assert tokenizer(data, tmp_path / "on", 1, weights_of=tmp_path / "kl", config=config, lr=1e-6)
    assert facts(tmp_path / "on", "tokenizer", "first_weights").endswith("new: nothing")
    assert {"encoder.10.weight", "decoder.0.weight"} <= shares(tmp_path / "on", tmp_path / "kl", "tokenizer")
    with pytest.raises(InputError, match="start "):
        tokenizer(data, tmp_path / "kl", 2, config=config, lr=1e-6)
    with pytest.raises(InputError, match="not a model of codes"):
        made = TrainingOptions(tmp_path / "t", 1)
        train_target(data, model, SHAPE, TargetSettings(), made, weights_of=latent_model[1])
    coarser = KLConfig(32, 8, (16, 32), (1,) * 2, (1,) * 2)
    with pytest.raises(InputError, match=r"give --down 8$"):
        tokenizer(data, tmp_path / "other", 1, weights_of=model, config=coarser)


@pytest.mark.parametrize("made", [target, diffusion])
def test_a_target_of_latents_begins_with_the_weights_of_one_of_codes(
    made: Callable[..., bool],
    latent_model: tuple[Path, Path],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, ready = latent_model
    monkeypatch.setattr(VQ, "encode", by_brightness)  # an untrained tokenizer finds the same code everywhere
    assert train_target(
        data, model, SHAPE, TargetSettings(batch_size=4), options(model / "target", 1), crops=1
    )
    shutil.copytree(ready / "tokenizer", tmp_path / "mine" / "tokenizer")
    assert made(data, tmp_path / "mine", 1, weights_of=model, lr=1e-6, muon_lr=1e-6)
    head = "latent_out" if made is target else "denoiser"
    said = facts(tmp_path / "mine", "target", "first_weights")
    assert (
        said.startswith("taken from another model: decoder, ")
        and f"new: latent_mean, latent_std, latent_in, {head}" in said
    )
    same = shares(tmp_path / "mine", model, "target")
    assert {"decoder.blocks.1.wqkv.weight", "word_table", "slot_table", "null_prefix"} <= same
    assert said.endswith("latent_in is fitted to the vectors that the other model reads of 12 pictures")
    begun, start = (read_target(place, torch.float32) for place in (tmp_path / "mine", model))
    (cached,) = (tmp_path / "mine" / "codes").glob("train-*/*.safetensors")
    moments, generator = load_file(cached)["codes"][:, 0].float(), torch.Generator().manual_seed(0)
    latents = begun.from_cache(moments, generator)
    vectors = start.embed(start.vq.encode(begun.vq.decode(moments[..., :4])))
    left = (vectors - begun.embed(latents)).flatten(0, 1)
    # what least squares leaves has no mean and nothing in common with the latents
    assert left.mean(0).abs().max() < 1e-4
    assert (latents.flatten(0, 1).T @ left / len(left)).abs().max() < 1e-4 < left.abs().mean()
    again = tmp_path / "again"
    shutil.copytree(ready / "tokenizer", again / "tokenizer")
    assert made(data, again, 1, weights_of=tmp_path / "mine", lr=1e-6, muon_lr=1e-6)
    weight = "latent_out.weight" if made is target else "denoiser.inputs.weight"
    assert {"latent_in.weight", weight} <= shares(again, tmp_path / "mine", "target")


@pytest.mark.parametrize("kind", [ContinuousTask, DiffusionTask])
def test_the_target_learns_six_pictures_by_heart(
    kind: type[LatentTask], latent_model: tuple[Path, Path]
) -> None:
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(6, 1, 16, 4, generator=generator) * 3 + 5
    moments = torch.cat((mean, torch.full_like(mean, -4)), -1).half()
    split = Split(moments, ("a red square", "a blue square", "a photo") * 2, ("",) * 6)
    shape: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 2, "hidden": 48, "grid": 4, "slots": 3}
    shape |= {"words": ("red", "blue", "square"), "subjects": ("square",), "channels": 4}
    config = (
        ContinuousConfig(**shape, components=3)
        if kind is ContinuousTask
        else DiffusionConfig(**shape, denoiser_width=32, denoiser_blocks=2, denoising_steps=6)
    )
    settings = TargetSettings(batch_size=6, lr=1e-2, muon_lr=1e-2, warmup=2, drop_captions=0.0)
    kl = read_kl(latent_model[1] / "tokenizer")
    cached = Codes(split, split, {"codes": "made"})
    made = kind(config, settings, cached, kl, torch.device("cpu"))
    before = made.validate_on(torch.arange(6))
    for step in range(80):
        made.step(step, step / 80)
    made.average.load_state_dict(made.model.state_dict())
    after = made.validate_on(torch.arange(6))
    assert after["nll"] < after["gaussian"] - 0.5 < before["nll"]
    latents = made.model.from_cache(moments[:, 0].float())
    assert torch.allclose(latents.std((0, 1)), torch.ones(4), atol=0.1)
    assert torch.allclose(latents.mean((0, 1)), torch.zeros(4), atol=0.1)


def test_moments_are_kept_on_disk_in_half_precision(latent_model: tuple[Path, Path]) -> None:
    place = latent_model[1]
    read = read_target(place, torch.float32)
    assert isinstance(read, ContinuousTarget)
    assert read.reader().encode(torch.randn(2, 3, 32, 32)).shape == (2, 16, 8)
    (cached,) = (place / "codes").glob("train-*/*.safetensors")
    found = load_file(cached)["codes"]
    assert found.shape == (12, 2, 16, 8) and found.dtype == torch.float16


def test_expected_acceptance_is_the_overlap_of_the_two_laws() -> None:
    torch.manual_seed(0)
    p = torch.tensor([0.0, 0.0, 0.0]).expand(20_000, 3)  # one component of one channel
    q = torch.tensor([0.0, 1.0, 0.0]).expand(20_000, 3)
    laws = LatentComparison("guided", 1)
    overlap = 2 * torch.special.ndtr(torch.tensor(-0.5)).item()
    assert laws.acceptance(q, p).mean().item() == pytest.approx(overlap, abs=0.01)
    gap = laws.cross_entropy(q, p) - laws.cross_entropy(p, p)
    assert gap.item() == pytest.approx(0.5, abs=0.03)  # the divergence of two Gaussians one apart


def test_diffusion_heads_are_compared_at_the_same_noisy_latents() -> None:
    torch.manual_seed(0)
    laws = DiffusionComparison("guided", 2, 5)
    points = laws.points(torch.zeros(3, 7, 2))
    assert points.shape == (3, 7, TIMES, 3) and (points[..., -1, 0] == 0.2).all()
    p = torch.randn(50_000, TIMES, 2)
    flat = torch.zeros(50_000, TIMES)
    same = torch.cat((flat, p.flatten(1), flat, flat), 1)  # means, then logarithms of standard deviations
    other = torch.cat((flat, (p + torch.tensor([1.0, 0.0])).flatten(1), flat, flat), 1)
    assert laws.loss(same, same) == 0 and laws.acceptance(same, same).min() == 1
    assert laws.loss(other, same).item() == pytest.approx(0.25)  # one number of two is one deviation off
    overlap = 2 * torch.special.ndtr(torch.tensor(-0.5)).item()
    assert laws.acceptance(other, same).mean().item() == pytest.approx(overlap, abs=0.01)
    assert laws.agreement(same, same) == 1 > laws.agreement(other, same)


@pytest.mark.parametrize("model_of", ["latent_model", "diffusion_model"])
def test_a_drafter_is_measured(model_of: str, request: pytest.FixtureRequest) -> None:
    found = facts(request.getfixturevalue(model_of)[1], "drafter")
    assert 0 < found["accept"] <= 1 and {"accept2", "guided", "feature"} <= found.keys()


def test_what_is_of_codes_is_refused(latent_model: tuple[Path, Path], tmp_path: Path, model: Path) -> None:
    data, ready = latent_model
    with pytest.raises(InputError, match="--head mixture"):
        read_vq(ready / "tokenizer")
    with pytest.raises(InputError, match="--kind kl"):
        target(data, model)
    with pytest.raises(InputError, match=r"corrupt 0\.1"):
        target(data, ready, corrupt=0.1)
    with pytest.raises(InputError, match="choose paper or guided"):
        train_drafter(
            ready,
            EagleTask,
            DrafterSettings(loss="lk").of("eagle"),
            TrainingData(data),
            options(tmp_path / "d", 2),
        )
    with pytest.raises(InputError, match="--cache-features"):
        train_drafter(
            ready,
            EagleTask,
            DrafterSettings().of("eagle"),
            TrainingData(data),
            options(tmp_path / "d", 2),
            cache=True,
        )
    with pytest.raises(InputError, match="--denoising-steps 0"):
        where = options(tmp_path / "t", 2)
        train_target(
            data, ready, SHAPE, TargetSettings(), where, head="diffusion", own=Head(denoising_steps=0)
        )


def test_a_drafter_of_another_head_is_refused(
    latent_model: tuple[Path, Path], diffusion_model: tuple[Path, Path]
) -> None:
    mixture, other = (read_target(place, torch.float32) for place in (latent_model[1], diffusion_model[1]))
    source = Source.open(diffusion_model[1] / "drafter")
    assert DiffusionDrafter.read(source, other, torch.float32).config.channels == 4
    with pytest.raises(InputError, match="which this model has not"):
        DiffusionDrafter.read(source, mixture, torch.float32)
