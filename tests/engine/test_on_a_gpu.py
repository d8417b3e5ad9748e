"""On a GPU a step of every method stays on the device, and the host waits for it only where a test here says so."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.documents import DOCS
from helpers.fake_cuda import DEVICE, Answer, HostReadError, Watch, fake_cuda, moved
from helpers.latents import diffusion_parts, mixture_parts
from helpers.steps import JOINT, PROPOSERS, RULES, of_method, parts
from torch import Tensor

from lanternpp.accept.exact import Cspd, Exact
from lanternpp.api.options import METHODS
from lanternpp.engine import compiled, noise
from lanternpp.engine.batching import ContinuousBatch
from lanternpp.engine.decode import Engine, engine_class
from lanternpp.engine.observers import AcceptanceByRank

MakeEngine = Callable[..., Engine]
NONE_LEFT: Mapping[str, Answer] = {"draw_residual": lambda left, undecided: left[:0]}


@pytest.fixture
def on_gpu() -> Iterator[MakeEngine]:
    """Makes an engine on a fake GPU and takes a first step, which allocates what is allocated once."""
    with ExitStack() as stack:

        def make(
            target: Any, proposer: Any, rule: Any, *rest: Any, answers: Any = None, observed: bool = False
        ) -> Engine:
            mode = stack.enter_context(fake_cuda())
            reads_of_construction = {"check": lambda differ: False}
            with Watch(reads_of_construction | (answers or {}), strict=False):
                made = engine_class(target)(*(moved(part, mode) for part in (target, proposer, rule)), *rest)
                made.observers += [AcceptanceByRank(made.target.length)] * observed
                made.step()
            return made

        yield make


def watched(engine: Engine, answers: Mapping[str, Answer] | None = None) -> Counter[str]:
    """The host reads of a step, by the function that reads."""
    with Watch(answers) as watch:
        engine.step()
    assert engine.codes.device == DEVICE and watch.launched.total() > 50
    return watch.reads


@pytest.mark.parametrize(
    ("drafts", "rule", "sampling", "cfg"),
    [
        # without those whose parts other drafts have
        *((x, "exact", "warped", 3.0) for x in PROPOSERS if x not in ("chain", "independent eagle2")),
        *((drafts, "exact", "greedy", 1.0) for drafts in ("none", "eagle2", "parallel", "jacobi siblings")),
        *(
            ("tree", rule, "T=1", 3.0)
            for rule in RULES
            if rule not in ("exact", "lantern, paper", "lantern++")
        ),
        ("eagle2", "lantern++", "warped", 3.0),
    ],
)
def test_a_step_has_no_host_read_and_no_tensor_on_the_host(
    on_gpu: MakeEngine, drafts: str, rule: str, sampling: str, cfg: float
) -> None:
    made = on_gpu(*parts(drafts, rule, sampling, cfg, measure_tv=True), observed=True)
    holders = [made, made.cache, made.proposer, made.noise]
    holders += [made.proposer.cache] if hasattr(made.proposer, "cache") else []
    names = [(h, n) for h in holders for n in dir(h) if torch.is_tensor(getattr(h, n, None))]
    before = [getattr(h, n) for h, n in names]
    assert not watched(made)
    assert len(before) > 10
    for (holder, name), tensor in zip(names, before, strict=True):
        assert tensor.device == DEVICE, name
        assert getattr(holder, name) is tensor, f"{name} is replaced, which a CUDA graph would not see"


@pytest.mark.parametrize(
    ("drafts", "verify", "rule"),
    [
        *((*joint, "exact") for joint in JOINT if joint[0] not in ("parallel", "independent")),
        *(
            ("tree", "traversal", rule)
            for rule in ("lantern", "lantern++, falling", "cool", "cactus", "mixture")
        ),
    ],
)
def test_joint_verification_has_no_host_read(on_gpu: MakeEngine, drafts: str, verify: str, rule: str) -> None:
    assert not watched(on_gpu(*parts(drafts, rule, "warped", measure_tv=True, verify=verify)))


def test_parts_are_recorded_where_no_python_of_others_runs(
    on_gpu: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "CudaGraphs", lambda device: device)
    made = on_gpu(*parts("tree"))
    assert compiled.recorder_of(made) == DEVICE
    with made.target.decoder.register_forward_hook(print):
        assert compiled.recorder_of(made) is None
    with monkeypatch.context() as patched:
        patched.setenv(compiled.GRAPHS_VARIABLE, "0")
        assert compiled.recorder_of(made) is None
    made.proposer.__class__ = type("Own", (type(made.proposer),), {"__module__": "my_proposers"})
    assert compiled.recorder_of(made) is None


def test_noise_is_computed_on_the_device(on_gpu: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "MAX_STEPS", 3)
    made = on_gpu(*parts("parallel"))
    for _ in range(4):
        assert not watched(made)


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("kind", [mixture_parts, diffusion_parts])
def test_latents_have_one_host_read_for_each_block_of_draws(
    on_gpu: MakeEngine, kind: Any, drafted: bool
) -> None:
    made = on_gpu(*kind(drafted), answers=NONE_LEFT)
    assert watched(made, NONE_LEFT) == {"draw_residual": 1}
    twice = iter((lambda left: left[:1], lambda left: left[:0]))
    assert watched(made, {"draw_residual": lambda left, undecided: next(twice)(left)}) == {"draw_residual": 2}


def test_the_published_rule_of_latents_has_no_host_read(on_gpu: MakeEngine) -> None:
    assert not watched(on_gpu(*diffusion_parts(True, rule=Cspd())))


def test_chains_that_end_early_have_one_host_read(on_gpu: MakeEngine) -> None:
    target, proposer, *rest = parts("parallel", verify="block")
    proposer.min_survival = 0.5
    answers = {"_ended": lambda longest: 2}
    assert watched(on_gpu(target, proposer, *rest, answers=answers), answers) == {"_ended": 1}


def test_a_batch_has_one_host_read_a_step(on_gpu: MakeEngine) -> None:
    answers = {"decided": lambda count: 1}
    made = on_gpu(*parts())
    with Watch(answers, strict=False):
        batch = ContinuousBatch(made)
    with Watch(answers) as watch:
        batch.step()
    assert watch.reads == {"decided": 1} and batch.counts == [1, 1]


def launches(on_gpu: MakeEngine, method: str, layers: int = 1) -> int:
    """The operations that a step starts on the device."""
    made = on_gpu(*of_method(method, layers))
    with Watch() as watch:
        made.step()
    return watch.launched.total()


@pytest.mark.parametrize("method", METHODS)
def test_the_page_has_the_launches_of_a_step(on_gpu: MakeEngine, method: str) -> None:
    found = launches(on_gpu, method)
    said = f"`{method}` {found:,}"
    page = " ".join((DOCS / "performance.md").read_text().split())
    assert re.search(rf"{re.escape(said)}[,.] ", page), f"the page lacks {said}"


def test_the_page_has_the_launches_of_a_layer(on_gpu: MakeEngine) -> None:
    page, two = (DOCS / "performance.md").read_text(), launches(on_gpu, "ar", layers=2)
    found = re.search(r"each further layer\s+adds\s+(\d+)\):\s+`ar`\s+(\d+),", page)
    assert found and two == sum(map(int, found.groups()))


@pytest.mark.parametrize("drafts", ["eagle2", "parallel", "jacobi rows"])
def test_masks_need_no_copy_for_the_attention_of_a_gpu(
    on_gpu: MakeEngine, drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, masks = on_gpu(*parts(drafts)), []

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, enable_gqa: bool = False) -> Tensor:
        masks.append(mask)
        assert not enable_gqa and q.shape[1] == k.shape[1]
        return torch.empty_like(q)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    made.step()
    assert masks and all(mask.stride(i) % 16 == 0 for mask in masks for i in range(3))


HOST_READS: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda p: p / float(p.sum()),
    "a condition": lambda p: p if p.sum() > 0 else -p,
    "a list": lambda p: p * p.sum(-1).tolist()[0],
    "a mask as index": lambda p: p[p > 0],
    "where something is": lambda p: p.nonzero(),
    "a copy": lambda p: p.cpu(),
    "a tensor of the host": lambda p: p + torch.zeros(p.shape[-1]),
    "a table that is made anew": lambda p: p + torch.tensor([0.0] * p.shape[-1], device=p.device),
    "an index of the host": lambda p: p[torch.arange(len(p))],
    "a mask that is written": lambda p: p.clone().index_put_((p > 0,), p[0, 0]),
    "a number that is copied": lambda p: p * p.max().cpu(),
    "a number that is copied into another": lambda p: torch.empty(()).copy_(p.max()),
}


def test_a_host_read_within_a_step_is_detected(on_gpu: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    made = on_gpu(*parts("jacobi none uniform"))
    for kind, read in HOST_READS.items():

        def relax(self: Exact, p: Tensor, code: Tensor, read: Callable[[Tensor], Any] = read) -> Tensor:
            read(p)
            return p

        monkeypatch.setattr(Exact, "relax", relax)
        with pytest.raises(HostReadError):
            watched(made)
            pytest.fail(f"{kind} is not detected")
