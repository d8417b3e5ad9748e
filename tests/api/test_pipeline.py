"""A pipeline's calls: from several threads, the memory that it keeps, and what a caller may give."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.processes import SECONDS
from helpers.refusals import rejects

import lanternpp
from lanternpp import Pipeline
from lanternpp.accept.base import Acceptance
from lanternpp.accept.scaled import Cool
from lanternpp.engine.batching import draw_samples, generate
from lanternpp.engine.compiled import tensor_bytes
from lanternpp.engine.proposer import DraftSampling, Proposer
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.trees.dynamic import DynamicTree
from lanternpp.trees.static import StaticTree, chain_tree
from lanternpp.types import Draft
from lanternpp.util import devices

PROMPT = "a red tulip"
CALLS = [
    {"method": "parallel", "cfg": 1.0},
    {"method": "lantern++", "lam": 4.0, "tree": "chain-2"},
    {"method": "eagle", "temperature": 0.8, "cfg": 1.0},
    {"method": "jacobi-coupled", "window": 4, "cfg": 1.0},
]


class StopError(Exception):
    """What a progress bar of the tests raises."""


def test_calls_of_eight_threads_draw_what_they_draw_alone(model: Path, pipe: Pipeline) -> None:
    requested = list(product(range(5), CALLS))
    alone = [pipe(PROMPT, seed=seed, **call) for seed, call in requested]
    shared = Pipeline.from_pretrained(model, device="cpu", dtype="float32")
    together, made, make = threading.Barrier(8), [], shared.new_engine
    shared.new_engine = lambda *given: made.append(given) or make(*given)

    def stop(done: int, total: int) -> None:
        if done > 3:
            raise StopError

    def draw(thread: int) -> int:
        torch.set_num_threads(1)
        together.wait(SECONDS)
        for turn in range(10):
            place = (7 * thread + turn) % len(requested)
            seed, call = requested[place]
            if turn == 4 + thread % 3:  # an error in one call must not change other pictures
                with pytest.raises(StopError):
                    shared(PROMPT, seed=seed + 100, progress=stop, **call)
            result = shared(PROMPT, seed=seed, **call)
            assert torch.equal(result.codes, alone[place].codes)
            assert result.images[0].tobytes() == alone[place].images[0].tobytes()
            assert result.stats.accepted_per_pass == alone[place].stats.accepted_per_pass
        return 10

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(draw, range(8))) == 80
    assert len(made) <= len(CALLS) + 8, "one of each settings at a time, and one after every error"


def test_a_call_within_the_progress_of_another_changes_neither(pipe: Pipeline) -> None:
    alone = [pipe(PROMPT, seed=seed, method="eagle").codes for seed in (1, 2)]
    inner: list[torch.Tensor] = []

    def progress(done: int, total: int) -> None:
        if done > total // 2 and not inner:
            inner.append(pipe(PROMPT, seed=2, method="eagle").codes)

    outer = pipe(PROMPT, seed=1, method="eagle", progress=progress).codes
    assert torch.equal(outer, alone[0]) and torch.equal(inner[0], alone[1])


def test_two_generators_need_two_engines(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (pipe.new_engine(pipe.settings("ar", batch_size=1)) for _ in range(2))
    alone = [one.codes for one in generate(first, [PROMPT] * 2, [5, 6])]
    one, other = (draw_samples(engine, [PROMPT] * 2, [5, 6]) for engine in (first, second))
    drawn = [next(one), next(other), next(one), next(other)]
    assert all(torch.equal(sample.codes, alone[place]) for place, sample in drawn)
    one.close()

    def meanwhile(usual: Callable[..., Any], *args: Any) -> Any:
        with pytest.raises(RuntimeError, match="drawing already"):
            next(draw_samples(first, [PROMPT], [7]))
        return usual(*args)

    for name in ("decided", "drop"):  # as a batch begins, with every step, and as it ends
        monkeypatch.setattr(first, name, partial(meanwhile, getattr(first, name)))
    again = draw_samples(first, [PROMPT] * 2, [5, 6])
    next(again)
    again.close()
    monkeypatch.undo()
    assert torch.equal(generate(first, [PROMPT], [5])[0].codes, alone[0])


def kept_bytes(pipe: Pipeline) -> int:
    return tensor_bytes(list(pipe._idle_engines.values()))


def test_engines_are_kept_up_to_a_number_of_bytes(model: Path) -> None:
    pipe = Pipeline.from_pretrained(model, device="cpu", dtype="float32")
    pipe(PROMPT, method="ar", temperature=0.5)
    one = kept_bytes(pipe)  # of an engine that has drawn
    assert one > 0
    small = Pipeline.from_pretrained(model, device="cpu", dtype="float32", engine_bytes=3 * one)
    for step in range(12):
        small(PROMPT, method="ar", temperature=0.5 + step / 100)
        assert 0 < kept_bytes(small) <= 3 * one
    assert [kept.temperature for kept, _ in small._idle_engines] == [0.59, 0.6, 0.61]  # what was used last
    small(PROMPT, n=8, method="eagle")  # larger than the bound alone
    assert len(small._idle_engines) == 1
    small.release()
    assert kept_bytes(small) == 0


def test_steps_are_compiled_of_weights_that_are_not_packed(model: Path) -> None:
    pipe = Pipeline.from_pretrained(model, device="cpu", dtype="int8")
    assert pipe.new_engine(pipe.settings("ar", compile=True)).target.decoder.native is None


def test_progress_adds_no_host_read(pipe: Pipeline) -> None:
    """It gets the counts that the loop reads once a step."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        reads = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.reads += func._schema.name == "aten::_local_scalar_dense"
            return func(*args, **(kwargs or {}))

    counted, seen = [], []
    pipe.new_engine(pipe.settings("eagle", batch_size=2))  # the drafter is read, which reads numbers too
    for progress in (None, lambda done, total: seen.append((done, total))):
        with Count() as count:
            generate(pipe.new_engine(pipe.settings("eagle", batch_size=2)), [PROMPT] * 3, [1, 2, 3], progress)
        counted.append(count.reads)
    assert counted[0] == counted[1] and seen[-1] == (48, 48)


def test_numpy_and_torch_numbers_and_lists_are_accepted_as_arguments(pipe: Pipeline, model: Path) -> None:
    usual = pipe(PROMPT, n=2, seed=3, method="eagle", cfg=3.0, tree="[[0]]")
    others = [
        {"seed": np.int64(3), "n": np.int32(2), "cfg": 3, "tree": [[0]]},
        {"seed": torch.tensor(3), "n": 2, "cfg": np.float32(3), "tree": ((0,),)},
        {"seed": np.array([3]), "n": 2, "cfg": torch.tensor(3.0), "tree": StaticTree(((0,),))},
    ]
    for given in others:
        drawn = pipe((PROMPT,), method="eagle", **given)
        assert torch.equal(drawn.codes, usual.codes)
        json.dumps(drawn.stats.to_json())
    assert torch.equal(pipe(PROMPT, n=None, seed=None, method=None).codes, pipe(PROMPT).codes)
    placed = Pipeline.from_pretrained(model, model / "drafter", "cpu", torch.float32)
    assert placed.name == "tiny" and placed.settings("eagle").tree == "eagle-25"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prompt": [PROMPT, 3]}, "prompt 3 is no text"),
        ({"prompt": []}, "list of prompts is empty"),
        ({"prompt": np.array(3)}, "is no text; give a text or a list"),
        ({"prompt": b"tulip"}, "prompt b'tulip' is no text"),
        ({"n": "2"}, "n '2' is no whole number"),
        ({"n": 10**9}, r"n 1000000000 is out of range; use 1 to 1,048,576"),
        ({"seed": [1, 2]}, "seed has 2 for 1 prompt;"),
        ({"seed": 2**63 - 2, "n": 2}, r"out of range; use 0 to 2\*\*63 - 3"),
        ({"progress": 3}, "progress 3 is no function"),
        ({"cfg": "3"}, "cfg '3' is no number"),
        ({"method": "lantern++", "lam": 1e308}, r"lambda 1e\+308 is out of range"),
        ({"measure_tv": "yes"}, "measure_tv 'yes' is neither True nor False"),
        ({"tree": [[0], "x"]}, "'x' is not a path"),
        ({"tree": 7}, "tree 7 is no text|tree .* is no class"),
        ({"tree": StaticTree}, "cannot be made without arguments: .* 'shape'"),
        ({"accept": NoDraft}, "is no class of that kind"),
        ({"method": 3}, "method 3 is no text"),
    ],
)
def test_wrong_arguments_are_rejected(given: dict, says: str, pipe: Pipeline) -> None:
    rejects(says, pipe, **{"prompt": PROMPT} | given)


@pytest.mark.parametrize(
    "given", [{"model": 3}, {"drafter": 4}, {"size": 1.5}, {"device": 3}, {"dtype": None}]
)
def test_wrong_arguments_of_from_pretrained_are_rejected(given: dict, model: Path) -> None:
    rejects("; (give|use) ", Pipeline.from_pretrained, **{"model": model} | given)


def test_a_large_batch_has_at_most_a_slot_for_each_picture(pipe: Pipeline) -> None:
    plain = pipe([PROMPT] * 2, seed=[3, 4], method="ar", batch_size=2)
    large = pipe([PROMPT] * 2, seed=[3, 4], method="ar", batch_size=1_000_000)
    assert large.stats.settings["batch_size"] == 2 and torch.equal(large.codes, plain.codes)
    # as a picture of a batch of 4 is drawn again alone
    spare = pipe(PROMPT, seed=3, method="ar", batch_size=4)
    assert spare.stats.settings["batch_size"] == 4


@pytest.mark.parametrize("method", ["ar", "eagle"])
def test_a_batch_without_enough_memory_is_rejected_with_the_figures(
    method: str, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = pipe.settings(method, batch_size=100)
    one = pipe.new_engine(replace(settings, batch_size=1)).cache.kv.nbytes
    monkeypatch.setattr(devices, "free_memory", lambda device: 100 * one - 1)
    rejects(r"needs [\d.]+ GB of memory, and [\d.]+ GB are free on cpu", pipe.new_engine, settings)


class Scaled(Acceptance):
    """Accepts a code by a share of its probability."""

    dials = frozenset({"delta"})

    def __init__(self, share: float):
        self.share = share

    @classmethod
    def build(cls, dials):
        return cls(dials.delta)

    def relax(self, p, code):
        before = p.gather(-1, code[..., None])
        after = (before * self.share).where(before < 1, before)
        others = (p / (1 - before)).where(before < 1, 0) * (1 - after)
        return others.scatter(-1, code[..., None], after)


def test_a_rule_may_be_a_class_or_an_object(pipe: Pipeline) -> None:
    made = pipe(PROMPT, 4, method="eagle", accept=Scaled(0.9))
    by_class = pipe(PROMPT, 4, method="eagle", accept=Scaled, delta=0.9)
    assert torch.equal(made.codes, by_class.codes)
    other = pipe(PROMPT, 4, method="eagle", accept=Scaled(0.02))
    assert other.stats.passes > made.stats.passes  # two objects of one class are two rules
    assert by_class.stats.settings["accept"] == f"{__name__}:Scaled"
    assert made.stats.settings["accept"] == f"{__name__}:Scaled (an object)"
    json.dumps([asdict(made.stats), asdict(by_class.stats)])
    assert type(made.stats.settings["accept"]) is str
    known = pipe(PROMPT, method="eagle", accept=Cool, delta=2.0)
    assert torch.equal(known.codes, pipe(PROMPT, method="eagle", accept="cool", delta=2.0).codes)
    rejects(r"delta 0\.5 would change nothing", pipe, PROMPT, method="eagle", accept=Scaled(0.9), delta=0.5)
    grown = pipe(PROMPT, method="eagle", tree=DynamicTree(3, 2, 8), accept=Scaled(0.9))
    assert grown.stats.codes == 16


class TwoCodes(Proposer):
    """Drafts two codes."""

    dials, size, depth = frozenset(), 3, 2
    change: Any = None

    @classmethod
    def build(cls, parts):
        return cls()

    def propose(self, noise):
        codes = torch.cat((self.root[:, None], self.root.new_full((len(self.root), 2), 3)), 1)
        draft = Draft(chain_tree(len(codes), 2, codes.device), codes, None)
        return draft if self.change is None else type(self).change(draft)


def with_codes(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Draft], Draft]:
    return lambda draft: replace(draft, codes=change(draft.codes))


def with_tree(**fields: Any) -> Callable[[Draft], Draft]:
    return lambda draft: replace(draft, tree=replace(draft.tree, **fields))


def with_probs(probs: torch.Tensor) -> Callable[[Draft], Draft]:
    return lambda draft: replace(draft, probs=probs)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"change": lambda draft: None}, "NoneType in place of a Draft"),
        ({"change": lambda draft: Draft(None, None, None)}, "NoneType and NoneType in place of the Tree"),
        ({"change": with_codes(torch.Tensor.tolist)}, "Tree and list in place"),
        ({"change": with_tree(widths=(0, 0))}, r"widths \(0, 0\) or children do not fit its 3 nodes"),
        ({"change": with_tree(mask=torch.ones(1, 3, 2, dtype=torch.bool))}, "a row of a bool mask"),
        ({"dials": {"verify"}, "draft_sampling": lambda parts: DraftSampling(True, True)}, "without probs"),
        ({"change": with_codes(lambda codes: codes[:, 1:])}, "codes .1, 2. .* on a tree of .1, 3. nodes"),
        ({"change": with_codes(torch.Tensor.int)}, "give each node an int64 code"),
        ({"change": with_codes(lambda codes: codes + torch.tensor([0, 10**6, 0]))}, "none of the 32 from 0"),
        ({"change": with_codes(lambda codes: (codes + torch.tensor([1, 0, 0])) % 32)}, "begin with self.r"),
        ({"observe": lambda self, output: None}, "which super.*observe keeps"),
        ({"change": with_probs(torch.ones(1, 3, 17) / 17)}, "probs .1, 3, 17.; a node with children needs"),
        ({"change": with_probs(torch.full((1, 3, 32), torch.nan))}, "32 that sum to 1"),
        ({"size": 2}, "3 nodes on 2 levels, more than its size 2"),
        ({"size": None}, "whole numbers as its size"),
        ({"build": classmethod(lambda cls, parts: None)}, "makes a NoneType; it must be of Proposer"),
        ({"dials": "window"}, "reads 'd', which is no dial"),
        ({"needs": "medusa"}, "comes without a medusa"),
    ],
)
def test_a_wrong_custom_proposer_is_rejected_with_the_reason(
    pipe: Pipeline, wrong: dict[str, Any], said: str
) -> None:
    kind = type("Wrong", (TwoCodes,), wrong)
    said = rejects(said, pipe, PROMPT, method="ar", proposer=kind)
    assert "Wrong" in said or "medusa" in said


def test_only_the_first_drafts_of_a_custom_proposer_are_checked(pipe: Pipeline) -> None:
    kind = type("Own", (TwoCodes,), {})
    engine = pipe.new_engine(pipe.settings("ar", proposer=kind))
    engine.admit(0, PROMPT, 0)
    engine.step()
    engine.step()
    kind.change = with_codes(lambda codes: (codes + 1) % 32)
    engine.step()


def test_a_change_of_the_current_folder_changes_nothing(model: Path, monkeypatch) -> None:
    """Drafters are read at their first use."""
    monkeypatch.chdir(model.parent)
    pipe = Pipeline.from_pretrained(model.name, tuned=False)
    monkeypatch.chdir("/")
    assert pipe(PROMPT, method="parallel").stats.passes


def test_every_public_name_of_the_package_exists() -> None:
    assert all(hasattr(lanternpp, name) for name in lanternpp.__all__)
    assert {"chain-4", "deep-8", "eagle-25", "lantern-57", "eagle2", "ddd"} <= set(lanternpp.TREES)


@pytest.mark.parametrize("other", [torch.bfloat16, torch.float64, "meta"], ids=str)
@pytest.mark.parametrize("method", ["ar", "eagle", "parallel", "lantern++", "jacobi-coupled"])
def test_the_defaults_of_pytorch_change_nothing(method: str, other: torch.dtype | str, model: Path) -> None:
    """Transformers sets the dtype for the whole process while it reads a model, maybe in another thread."""
    drawn = []
    set_default: Any = torch.set_default_device if other == "meta" else torch.set_default_dtype
    usual = None if other == "meta" else torch.float32
    for default in (usual, other):
        set_default(default)
        try:
            weights = "float32" if method == "ar" else "int8"
            pipe = Pipeline.from_pretrained(model, device="cpu", dtype=weights, tuned=False)
            dials = {"measure_tv": method == "lantern++", "callback": attrgetter("images")}
            drawn.append(pipe(PROMPT, seed=3, method=method, **dials))
        finally:
            set_default(usual)
    assert torch.equal(*(result.codes for result in drawn))
    assert drawn[0].images[0].tobytes() == drawn[1].images[0].tobytes()
    assert drawn[0].stats.tv_cost == drawn[1].stats.tv_cost
