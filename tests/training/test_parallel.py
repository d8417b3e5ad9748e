"""The training of parallel drafters."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.photos import NEUTRAL, made_codes, teacher_of

from lanternpp.api.model import read_target
from lanternpp.engine.sampling import Sampling
from lanternpp.training import drafter, parallel
from lanternpp.training.options import DrafterSettings
from lanternpp.training.parallel import FIRST_LEVEL_WEIGHT, DraftBatch, ParallelTask


def task(ready: Path, count: int = 6, sampling: Sampling = NEUTRAL, **settings: Any) -> ParallelTask:
    small = {"batch_size": count, "levels": 4, "anchors": 6, "condition_width": 16, "warmup": 50, "cfg": 3.0}
    hparams = DrafterSettings(**{**small, **settings}).of("parallel")
    teacher = teacher_of(read_target(ready, torch.float32), sampling=sampling)
    return ParallelTask(hparams, teacher, made_codes(count))


def test_every_level_is_measured_by_the_targets_guided_distribution_at_its_place(ready: Path) -> None:
    """The target's own features are accepted everywhere; with an anchor off by one they are not."""
    made = task(ready, noise=0.0, loss="lk")
    index = torch.arange(3)
    made.anchors = lambda *_: torch.tensor([0, 3, 14])  # type: ignore[method-assign]
    read = made.batch(made.train, index, None, torch.Generator())

    def target_features(drafter: Any, batch: DraftBatch, noise: Any) -> tuple[Any, torch.Tensor]:
        level = torch.arange(made.hparams.levels)
        slot = (batch.anchors[0, :, None] + 1 + level).clamp(max=batch.features.shape[1] - 1)
        return None, batch.features[:, slot]

    made.level_features = target_features  # type: ignore[method-assign]
    figures = made.loss(made.model, read)
    assert figures["levels"].tolist() == pytest.approx([1] * 4, abs=1e-5)
    assert figures["loss"].item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(("loss", "aux_layers"), [("guided", 0), ("lk", 0), ("both", 1), ("block", 0)])
def test_training_raises_the_acceptance_of_drafts(ready: Path, loss: str, aux_layers: int) -> None:
    made = task(ready, loss=loss, aux_layers=aux_layers, lr=5e-3)
    before = made.validate()
    for step in range(40):
        figures = made.step(step, 0.0)
    made.average.load_state_dict(made.model.state_dict())
    after = made.validate()
    assert figures["accept"] > 0.3
    assert after["chain"] > before["chain"] + 0.2
    assert after["codes"] > before["codes"] + 0.2
    assert after["rejected"] == pytest.approx(1 + 4 - after["codes"])
    for name, levels in (("codes", "kept"), ("predicted", "expected")):
        assert after[name] == pytest.approx(1 + sum(after[levels]), abs=1e-3)
    assert after["predicted"] == pytest.approx(after["codes"], rel=0.2)


def test_every_held_out_picture_has_the_same_weight(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a smaller last batch."""
    made, codes = task(ready, 9), []
    monkeypatch.setattr(drafter, "autocast", lambda _: nullcontext())
    monkeypatch.setattr(parallel, "autocast", lambda _: nullcontext())
    for index in (range(9), range(8), [8]):
        monkeypatch.setattr(parallel, "evenly_spaced", lambda *_, index=index: torch.tensor(index))
        codes.append(made.validate()["codes"])
    assert codes[0] == pytest.approx((8 * codes[1] + codes[2]) / 9, rel=1e-6)


def test_the_first_level_is_trained_at_more_slots(ready: Path) -> None:
    """After the anchors themselves its loss is that of a chain in which nothing else counts."""
    made = task(ready, loss="guided", fade=1e-9, firsts=99)
    index = torch.arange(3)
    made.anchors = lambda *_: torch.tensor([0, 3, 14])  # type: ignore[method-assign]
    read = made.batch(made.train, index, None, torch.Generator())
    alone, both = made.loss(made.model, read)["loss"], made.loss(made.model, read, None, read.anchors)["loss"]
    assert both.item() == pytest.approx((1 + FIRST_LEVEL_WEIGHT) * alone.item(), rel=1e-5)


def test_a_compiled_training_is_one_graph_with_the_same_losses(
    ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    # A graph rounds to bfloat16 elsewhere than the same lines uncompiled do: in float32 both are the same.
    monkeypatch.setattr(drafter, "autocast", lambda _: nullcontext())
    monkeypatch.setattr(parallel, "autocast", lambda _: nullcontext())
    both = [task(ready, sampling=Sampling(0.5, 9, 0.8), loss="block", aux_layers=1) for _ in range(2)]
    both[0].speed_up()
    losses = []
    for made in both:
        torch.manual_seed(0)
        losses.append([made.step(step, 0.0)["loss"].item() for step in range(3)])
        made.validate()
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # Muon rounds to bfloat16
    assert len(graphs) == 1


def test_the_confidence_layer_learns_and_changes_no_other_weight(ready: Path) -> None:
    """It learns to predict acceptance; the drafter is the same as without it."""
    made, other = task(ready, lr=5e-3, noise=0.0), task(ready, lr=5e-3, noise=0.0)
    other.model.confidence.requires_grad_(False)
    losses = []
    for step in range(40):
        losses.append(float(made.step(step, 0.0)["confidence"]))
        other.step(step, 0.0)
    assert losses[-1] < losses[0] - 0.02
    for name, tensor in other.model.state_dict().items():
        same = torch.equal(tensor, made.model.state_dict()[name])
        assert same != name.startswith("confidence"), name


@pytest.mark.parametrize("loss", ["both", "block"])
def test_the_predicted_acceptance_is_that_of_the_models_own_sampling(ready: Path, loss: str) -> None:
    """As a validation measures it; the other losses are of every code."""
    made, plain = task(ready, sampling=Sampling(0.5, 9, 0.8), loss=loss), task(ready, loss=loss)
    exact = made.batch(made.val, torch.arange(3))
    read = replace(exact, unguided=None)
    ours, other = made.loss(made.model, read), plain.loss(plain.model, read)
    assert ours["kept"].tolist() == pytest.approx(made.loss(made.model, exact)["kept"].tolist(), rel=1e-4)
    assert not torch.allclose(ours["kept"], other["kept"], rtol=0.1)
    assert torch.equal(ours["loss"], other["loss"]) and ours["confidence"] != other["confidence"]
