"""The training of parallel drafters, and the estimate of how much of a draft block verification accepts."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.distributions import Contexts, chain_distribution, contexts
from helpers.photos import NEUTRAL, made_codes, teacher_of

from lanternpp.api.model import read_target
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify.joint import chain_tails
from lanternpp.training import drafter, loop, parallel
from lanternpp.training.options import DrafterSettings
from lanternpp.training.parallel import (
    FIRST_LEVEL_WEIGHT,
    DraftBatch,
    ParallelTask,
    chain_acceptance,
    chain_gain,
)


def task(ready: Path, count: int = 6, sampling: Sampling = NEUTRAL, **settings: Any) -> ParallelTask:
    small = {"batch_size": count, "levels": 4, "anchors": 6, "condition_width": 16, "warmup": 50, "cfg": 3.0}
    hparams = DrafterSettings(**{**small, **settings}).of("parallel")
    teacher = teacher_of(read_target(ready, torch.float32), sampling=sampling)
    return ParallelTask(hparams, teacher, made_codes(count))


def test_every_level_is_measured_by_the_targets_guided_distribution_at_its_place(ready: Path) -> None:
    """The target's own features are accepted everywhere; with an anchor off by one they are not."""
    made = task(ready, noise=0.0, loss="lk")
    index = torch.arange(3)
    made.anchors = lambda *_: torch.tensor([0, 3, 14])
    read = made.batch(made.train, index, None, torch.Generator())

    def target_features(drafter: Any, batch: DraftBatch, noise: Any) -> tuple[Any, torch.Tensor]:
        level = torch.arange(made.hparams.levels)
        slot = (batch.anchors[0, :, None] + 1 + level).clamp(max=batch.features.shape[1] - 1)
        return None, batch.features[:, slot]

    made.level_features = target_features
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
    made.anchors = lambda *_: torch.tensor([0, 3, 14])
    read = made.batch(made.train, index, None, torch.Generator())
    alone, both = made.loss(made.model, read)["loss"], made.loss(made.model, read, None, read.anchors)["loss"]
    assert both.item() == pytest.approx((1 + FIRST_LEVEL_WEIGHT) * alone.item(), rel=1e-5)


def test_a_compiled_training_is_one_graph_with_the_same_losses(ready: Path, monkeypatch) -> None:
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_multiplies_in_the_dtype_of_trainings(monkeypatch, dtype: torch.dtype) -> None:
    addmm, dtypes, layer = torch.addmm, set(), torch.nn.Linear(8, 8)
    monkeypatch.setattr(loop, "compute_dtype", lambda _: dtype)
    monkeypatch.setattr(torch, "addmm", lambda x, *rest, **o: dtypes.add(x.dtype) or addmm(x, *rest, **o))
    optimizers = loop.muon_and_adamw(layer, [layer.weight], 0.1, 0.1, 0.0)
    loop.descend(optimizers.values(), layer(torch.ones(1, 8)).sum(), layer.parameters())
    assert dtypes == {dtype} and layer.weight.dtype == torch.float32


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


def estimates(p: Contexts, q: Contexts) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all chains, each as often as the target draws it: the estimated w_1 .. w_g and the last draft code's own chances, [chains, g]."""
    vocab, depth = p[0].shape[-1], len(q)
    found = []
    for chain in itertools.product(range(vocab), repeat=depth):
        at, often, rows = 0, 1.0, []
        for level, code in enumerate(chain):
            rows.append((p[level][at], q[level][at]))
            often *= float(p[level][at, code])
            at = at * vocab + code
        if often:
            ps, qs = (torch.stack(each) for each in zip(*rows, strict=True))
            reach, keep = chain_acceptance(ps, qs.log(), torch.tensor(chain))
            found.append((often * reach * keep, keep))
    kept, keep = (torch.stack(each) for each in zip(*found, strict=True))
    return kept, keep


@pytest.mark.parametrize(("vocab", "depth"), [(3, 1), (3, 4), (4, 3)])
@pytest.mark.parametrize("kind", ["random", "near", "equal", "forced"])
def test_the_estimate_from_the_targets_own_chains_is_the_acceptance_of_drafts(
    kind: str, vocab: int, depth: int
) -> None:
    p, q = contexts(vocab, depth, kind)
    _, kept = chain_distribution(chain_tails, p, q)
    assert estimates(p, q)[0].sum(0).tolist() == pytest.approx(kept.tolist(), abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_along_its_gradient_acceptance_rises(seed: int) -> None:
    """The codes enumerated before and after small steps from a random drafter."""
    p, q = contexts(3, 3, "random", seed)
    logits = [table.log().requires_grad_() for table in q]
    found = []
    for _ in range(5):
        probs = [x.softmax(-1) for x in logits]
        found.append(float(chain_distribution(chain_tails, p, [x.detach() for x in probs])[1].sum()))
        grads = torch.autograd.grad(chain_gain(*estimates(p, probs)), logits)
        with torch.no_grad():
            for x, slope in zip(logits, grads, strict=True):
                x += 0.3 * slope
    assert found == sorted(found) and found[-1] > found[0] + 0.01


def test_the_gradient_does_not_depend_on_the_recorded_code() -> None:
    """Otherwise it would overfit, and drafts would be accepted no more often."""
    p, q = contexts(4, 2, "random")
    slopes = []
    for code in range(4):
        logits = q[0][0].log().requires_grad_()
        ps = torch.stack((p[0][0], p[1][code]))
        log_qs = torch.stack((logits.log_softmax(-1), q[1][code].log()))
        reach, keep = chain_acceptance(ps, log_qs, torch.tensor([code, 0]))
        (slope,) = torch.autograd.grad(chain_gain(reach * keep, keep), logits)
        slopes.append(slope / slope.norm())
    for slope in slopes[1:]:
        assert torch.allclose(slope, slopes[0])


def test_an_extreme_ratio_has_a_finite_gradient() -> None:
    p = torch.tensor([[1e-30, 1.0], [0.5, 0.5]])
    logits = torch.tensor([[80.0, -80.0], [0.0, 0.0]], requires_grad=True)
    reach, chance = chain_acceptance(p, logits.log_softmax(-1), torch.tensor([0, 1]))
    kept = reach * chance
    chain_gain(kept, chance).backward()
    assert kept.isfinite().all() and logits.grad is not None and logits.grad.isfinite().all()
