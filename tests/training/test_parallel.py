"""The training of a drafter of all levels at once."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lanternpp.api.model import read_target
from lanternpp.errors import InputError
from lanternpp.models.vq.folder import read_vq
from lanternpp.models.words import WordsConfig, WordsTarget
from lanternpp.nn import checkpoints
from lanternpp.training import hardware
from lanternpp.training.material.codes import Codes, Split
from lanternpp.training.parallel import FIRST, DraftBatch, ParallelSettings, ParallelTask, train
from lanternpp.training.run import TrainingOptions

CPU = torch.device("cpu")
CONFIG = WordsConfig(("red", "blue", "square"), ("square",), 32, 2, 2, 48, grid=4, vocab=64, slots=3)


@pytest.fixture
def ready(model: Path) -> Path:
    """A model folder with a tokenizer and a target of random weights."""
    torch.manual_seed(1)
    target = WordsTarget(CONFIG, read_vq(model / "tokenizer"))
    for name, parameter in target.named_parameters():
        if "table" in name or "prefix" in name:
            torch.nn.init.normal_(parameter, std=0.4)
    config, tensors = target.folded()
    checkpoints.save(model / "target", {"kind": "words", **vars(config)}, tensors)
    return model


def task(ready: Path, count: int = 6, **settings: Any) -> ParallelTask:
    codes = torch.randint(64, (count, 1, 16), generator=torch.Generator().manual_seed(1)).to(torch.uint16)
    split = Split(codes, ("a red square", "a blue square", "a photo") * (count // 3), ("",) * count)
    hparams = ParallelSettings(**{"batch_size": count, "levels": 4, "anchors": 6, "turn": 16, **settings})
    target = read_target(ready, torch.float32)
    return ParallelTask(hparams, 1, target, Codes(split, split, {"codes": "made"}), "made", CPU)


def test_every_level_is_judged_by_the_targets_guided_distribution_at_its_place(ready: Path) -> None:
    """A drafter that answers with the target's own features is kept everywhere: an anchor off by one is not."""
    made = task(ready, noise=0.0, loss="lk")
    index = torch.arange(3)
    codes = made.codes.train.pick(index, torch.zeros_like(index))
    read = made.draft_batch(made.train, index, codes, torch.tensor([0, 3, 14]))

    def knows(drafter: Any, batch: DraftBatch, features: Any) -> torch.Tensor:
        level = torch.arange(made.hparams.levels)
        slot = (batch.anchors[0, :, None] + 1 + level).clamp(max=batch.features.shape[1] - 1)
        return batch.features[:, slot]

    made.conditioned = knows  # type: ignore[method-assign]
    figures = made.loss(made.model, read)
    assert figures["levels"].tolist() == pytest.approx([1] * 4, abs=1e-5)
    assert figures["loss"].item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(("loss", "aux_layers"), [("guided", 0), ("lk", 0), ("both", 1), ("block", 0)])
def test_training_raises_the_chance_that_drafts_are_kept(ready: Path, loss: str, aux_layers: int) -> None:
    made = task(ready, loss=loss, aux_layers=aux_layers, lr=5e-3)
    before = made.validate()
    for step in range(40):
        figures = made.step(step, 0.0)
    made.average.load_state_dict(made.model.state_dict())
    after = made.validate()
    assert figures["accept"] > 0.3
    assert after["chain"] > before["chain"] + 0.2
    assert after["codes"] > before["codes"] + 0.2
    assert after["refused"] == pytest.approx(1 + 4 - after["codes"])
    assert after["predicted"] == pytest.approx(1 + sum(after["expected"]), abs=1e-3)
    parts = torch.tensor(after["calibration"])
    assert parts.shape == (4, 2) and parts[:, 0].diff().min() >= 0
    assert parts.mean(0).tolist() == pytest.approx([after["predicted"], after["codes"]], rel=0.2)


def test_the_first_level_is_learned_behind_more_slots(ready: Path) -> None:
    """Behind the anchors themselves its loss is that of a chain in which nothing else counts."""
    made = task(ready, loss="guided", fade=1e-9, firsts=99)
    index = torch.arange(3)
    codes = made.codes.train.pick(index, torch.zeros_like(index))
    read = made.draft_batch(made.train, index, codes, torch.tensor([0, 3, 14]))
    alone, both = made.loss(made.model, read)["loss"], made.loss(made.model, read, None, read.anchors)["loss"]
    assert both.item() == pytest.approx((1 + FIRST) * alone.item(), rel=1e-5)
    slots = made.first_slots(read)
    first = read.prompts.shape[1] - 1
    assert slots.sort(1).values.tolist() == [list(range(first, first + 15))] * 3
    assert slots.max() == read.features.shape[1] - 2


def test_a_compiled_training_is_one_graph_and_learns_the_same(
    ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    # A graph rounds to bfloat16 elsewhere than the same lines uncompiled do: in float32 both are the same.
    monkeypatch.setattr(hardware, "autocast", lambda _: nullcontext())
    compiled, losses = task(ready, loss="block", aux_layers=1), []
    compiled.speed_up()
    for made in (compiled, task(ready, loss="block", aux_layers=1)):
        torch.manual_seed(0)
        losses.append([made.step(step, 0.0)["loss"].item() for step in range(3)])
        made.validate()
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # Muon rounds to bfloat16
    assert len(graphs) == 1


def test_what_is_kept_is_predicted_and_nothing_else_changes(ready: Path) -> None:
    """The layer that predicts learns what the chains of the training keep; the drafter is the one it would be without it."""
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


def test_an_unknown_loss_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="'mse' is unknown: choose guided, lk, both, block"):
        ParallelSettings(loss="mse")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("levels", 1),
        ("levels", 65),
        ("fade", 0.0),
        ("fade", 1.1),
        ("aux_layers", -1),
        ("lr", 0.0),
        ("muon_lr", 2.0),
    ],
)
def test_a_setting_out_of_range_is_named(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"^{name} {value} must be "):
        ParallelSettings(**{name: value})  # type: ignore[arg-type]


def test_an_interrupted_training_ends_as_one_that_was_not(ready: Path, data: Path, tmp_path: Path) -> None:
    def go(stop: int | None = None, restart: bool = False) -> bool:
        options = TrainingOptions(
            ready / "parallel", 4, stop_after=stop, log_steps=1, checks=1, restart=restart
        )
        hparams = ParallelSettings(batch_size=4, warmup=2, levels=3, anchors=4, turn=8)
        return train(data, ready, 1, hparams, options, crops=1)

    assert go()
    whole = checkpoints.load(ready / "parallel")[1]
    assert not go(2, restart=True)
    assert go()
    again = checkpoints.load(ready / "parallel")[1]
    assert all(torch.equal(whole[name], again[name]) for name in whole)
