"""Recorded runs: they have the engine's features, and training on them drafts as the engine does."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.photos import teacher_of
from helpers.refusals import rejects
from helpers.toys import ToyTarget, parallel
from torch import Tensor

from lanternpp.accept.base import Acceptance
from lanternpp.accept.exact import Exact
from lanternpp.accept.mixture import DraftMixture
from lanternpp.drafters.parallel import ParallelDrafter
from lanternpp.engine.batching import generate
from lanternpp.engine.decode import Engine
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.engine.verify import VERIFIERS
from lanternpp.nn.decoder import line_table
from lanternpp.proposers.parallel import Parallel
from lanternpp.training.codes import Codes, Split
from lanternpp.training.drafter import drafter_inputs
from lanternpp.training.options import DrafterSettings
from lanternpp.training.rollouts import Rollout, RolloutTask, grown, record, replay
from lanternpp.trees.static import StaticTree, chain

TEXTS = ["hill", "sea", "stone", "clouds", "a"]


def engine_of(
    target: ToyTarget,
    drafter: ParallelDrafter,
    batch: int = 2,
    rule: Acceptance | None = None,
    verifier: str = "block",
) -> Engine:
    parts = Parallel(drafter, StaticTree(chain(4))), rule or Exact(), Sampling(), Guidance(3.0)
    return Engine(target, *parts, batch, verifier=VERIFIERS[verifier])


def nodes_of(run: Rollout, at: Tensor) -> Tensor:
    """The features of nodes of a run, 0 for those that are -1."""
    return run.features.flatten(0, 1)[at] * (at >= 0)[..., None]


@pytest.mark.parametrize("aux_layers", [(), (0, 1)])
def test_a_run_has_the_features_of_the_picture_it_drew(aux_layers: tuple[int, ...]) -> None:
    target = ToyTarget(layers=3)
    engine = engine_of(target, parallel(target, aux_layers=aux_layers))
    for index, run in record(engine, TEXTS, range(5)):
        decided, begin, rejected = replay(run.kept, 4, 4)
        features, hints = torch.cat((run.prompt, nodes_of(run, decided))), nodes_of(run, rejected)
        prompt = target.prompt([TEXTS[index]], 2)
        codes = run.codes[None].long().expand(2, -1)
        all_features = drafter_inputs(target, prompt.embeds, codes, prompt.start, aux_layers=aux_layers)[1]
        expected = Guidance(3.0).merge(all_features)[0]
        assert torch.allclose(features.double(), expected, atol=1e-9)
        assert begin[0] == 0 and len(begin) == len(run.kept) == len(hints)
        assert not hints[0].any(), "nothing was rejected before the first draft"
        beyond = run.kept[:-1, None] + torch.arange(4) > 4
        assert not hints[1:][beyond].any(), "nor beyond a draft"
        assert torch.equal(replay(run.kept[:1], 4, 4)[2], rejected[:1]), "a picture of one pass"


@pytest.mark.parametrize(
    ("rule", "verifier"), [(None, "block"), (DraftMixture(0.5), "block"), (None, "token")]
)
def test_runs_follow_the_given_rule_and_verifier(rule: DraftMixture | None, verifier: str) -> None:
    target = ToyTarget()
    expected = generate(engine_of(target, parallel(target), 2, rule, verifier), TEXTS, range(5))
    runs = dict(record(engine_of(target, parallel(target), 2, rule, verifier), TEXTS, range(5)))
    assert sorted(runs) == [*range(5)]
    for index, run in runs.items():
        sample = expected[index]
        assert run.codes.tolist() == sample.codes.tolist() and run.kept.tolist() == sample.accepted[1:]


@pytest.mark.parametrize(("aux_layers", "padding"), [((), 0), ((0, 1), 5)])
def test_training_drafts_as_the_engine_did(monkeypatch, aux_layers: tuple[int, ...], padding: int) -> None:
    """A recorded run gives the distributions that its drafts were drawn from, with hints, and in a batch with a longer prompt too."""
    target, seen = ToyTarget(layers=3), []
    propose = Parallel.propose

    def recorded(self: Parallel, noise: Any) -> Any:
        seen.append(propose(self, noise))
        seen[-1] = replace(seen[-1], probs=seen[-1].probs.clone())
        return seen[-1]

    monkeypatch.setattr(Parallel, "propose", recorded)
    drafter = parallel(target, aux_layers=aux_layers)
    # Only the distance of two slots counts, as with prompts of several lengths.
    for network in (target, drafter):
        network.decoder.rotary_table = line_table(32, network.decoder.config.head_dim)
    ((_, run),) = record(engine_of(target, drafter, 1), ["stone"], [0])
    assert run.kept.max() > 1 and len(seen) == len(run.kept) > 4
    settings = settings_of(anchors=len(seen), noise=0.0, aux_layers=len(aux_layers))
    begin = grown(drafter, settings, target)
    train, val = (Split(run.codes.expand(n, 1, -1), ("stone",) * n, runs=(run,) * n) for n in (1, 2))
    made = RolloutTask(settings, teacher_of(target), Codes(train, val, "runs", initial_drafter=begin))
    made.train.slots += padding
    read = made.batch(made.train, torch.tensor([0]), None, torch.Generator())
    assert read.hints is not None and read.hints.any() and read.start is not None
    assert read.start[0] == 1 + padding
    with torch.no_grad():
        features = made.level_features(drafter, read)[1]
    drafts = target.head(features).softmax(-1)[0]
    for draft, anchor in zip(drafts, read.anchors[0].tolist(), strict=True):
        decided = anchor - 2 - padding
        turn = replay(run.kept, 4, 4)[1].tolist().index(decided)
        known = min(int(run.kept[turn]), 4, 15 - decided)  # levels drafted after codes that were kept
        assert torch.allclose(draft[:known], seen[turn].probs[0, :known], atol=1e-6), turn


def test_a_larger_drafter_first_drafts_as_the_smaller_one() -> None:
    """And the added layers can learn: only their last matrices are zero."""
    target = ToyTarget(layers=3)
    small = parallel(target)
    large = grown(small, settings_of(layers=2, levels=9, aux_layers=2), target)
    older = grown(parallel(target, confidence=False), settings_of(), target)
    trained, new = (drafter.get_parameter("confidence.weight") for drafter in (large, older))
    assert trained.any() and not new.any()
    assert len(large.decoder.blocks) == len(small.decoder.blocks) + 1
    assert large.config.queries == 8 and large.aux_layers == (0, 1)
    assert grown(large, settings_of(levels=9), target).config == large.config
    for name, number in (("levels", 2), ("aux_layers", 1), ("condition_width", 8)):
        option = f"--{name.replace('_', '-')} {number}: the drafter has .* already"
        rejects(option, grown, large, settings_of(**{"levels": 9, name: number}), target)
    deep = settings_of(levels=9, aux_layers=3)
    rejects("--aux-layers 3 is too many: .* 2 layers", grown, small, deep, target)
    torch.manual_seed(0)
    dim = small.decoder.config.dim
    next_inputs, features = torch.randn(1, 6, dim), torch.randn(1, 6, 3 * dim)
    anchors = torch.tensor([[1, 3]])
    with torch.no_grad():
        before = small.float().forward_sequence(next_inputs, features[..., :dim], anchors, 8)
        after = large.forward_sequence(next_inputs, features, anchors, 8)
    for x, y in zip(before, after, strict=True):
        assert torch.allclose(x, y, atol=1e-5)
    with torch.no_grad():
        large.fc.weight[:, 2 * dim :].normal_()
        assert not torch.allclose(large.forward_sequence(next_inputs, features, anchors, 8)[0], after[0])
    added = dict(large.decoder.blocks[-1].named_parameters())
    assert all(p.any() for name, p in added.items() if "wo" not in name and "w2" not in name)


def settings_of(**settings: Any) -> DrafterSettings:
    small = {"batch_size": 2, "levels": 5, "condition_width": 12, "cfg": 3.0}
    return DrafterSettings(**{**small, **settings}).of("parallel")
