"""Complete steps in one call of the kernels, beside the same steps by parts."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from pathlib import Path

import pytest
import torch
from helpers.models import SMALLER, VOCAB, save_words, write_model

from lanternpp import Pipeline
from lanternpp.accept.exact import Exact
from lanternpp.engine.batching import generate
from lanternpp.engine.decode import Engine, FinishedSample
from lanternpp.engine.observers import AcceptanceByRank, TimedEngine
from lanternpp.kernels import loading as native
from lanternpp.kernels.binding import structs
from lanternpp.models.vq.autoencoder import VQ, VQConfig
from lanternpp.models.words import WordsConfig, WordsTarget
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.proposers.parallel import Parallel

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here")

PROMPTS = ["a photo of a red tulip", "a photo of a forest", "a photo of a mountain"]
SMALL_PROMPTS = ["a red tulip", "a tulip", "red tulip"]
METHODS = {
    "plain": ("ar", {}),
    "plain, warped": ("ar", {"top_k": 200, "top_p": 0.9, "temperature": 0.9}),
    "jointly": ("parallel", {"tree": "chain-12", "verify": "block"}),
    "jointly, relaxed": ("lantern++", {"tree": "chain-12", "verify": "block"}),
    "token by token": ("parallel", {"tree": "chain-3", "verify": "token"}),
    "token by token, relaxed": ("lantern++", {"tree": "chain-7", "verify": "token"}),
    "one draft code": ("parallel", {"tree": "chain-1"}),
    "without guidance": ("parallel", {"tree": "chain-5", "cfg": 1.0}),
    "warped": ("parallel", {"tree": "chain-5", "top_k": 200, "top_p": 0.9, "temperature": 0.9}),
}


# as the shipped model's lantern++ has it
PARALLEL = {"proposer": "parallel", "neighbours": 8, "residual": "optimal"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A model of 64 codes a picture, which are 32."""
    folder = write_model(tmp_path_factory.mktemp("small") / "model", grid=8)
    return Pipeline.from_pretrained(folder, device="cpu", dtype="bfloat16", tuned=False)


def engine_of(pipeline: Pipeline, method: str, batch: int, **dials: object) -> Engine:
    return pipeline.new_engine(pipeline.settings(method, batch_size=batch, **dials))


def by_parts(engine: Engine) -> Engine:
    assert engine.fused is not None
    engine.fused = None
    return engine


def assert_same(found: list[FinishedSample], expected: list[FinishedSample]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.codes, other.codes) and one.accepted == other.accepted


# A small model draws three pictures by every method, the shipped one by few.
@pytest.mark.parametrize(
    ("model", "name", "batch"),
    [
        *(("small", name, 2) for name in METHODS),
        ("nature", "token by token", 1),
        ("nature", "jointly, relaxed", 2),
    ],
)
def test_pictures_of_complete_steps_are_those_of_steps_by_parts(
    request: pytest.FixtureRequest, model: str, name: str, batch: int, threads: Callable[[int], None]
) -> None:
    """Three pictures in a batch of two, so that one enters while another is drawn, and one slot is idle in the end; one by two threads."""
    threads(3 - batch)
    pipe, (method, dials) = request.getfixturevalue(model), METHODS[name]
    prompts = PROMPTS if model == "nature" else SMALL_PROMPTS
    if model == "small":  # of fewer codes
        dials = dials | {name: 20 for name in ("top_k",) if name in dials}
        dials |= PARALLEL if method == "lantern++" else {}
    given = prompts[: 2 * batch - 1], [1, 2, 3][: 2 * batch - 1]
    found = generate(engine_of(pipe, method, batch, **dials), *given)
    expected = generate(by_parts(engine_of(pipe, method, batch, **dials)), *given)
    assert_same(found, expected)


def test_a_batch_of_many_pictures_is_drawn_as_by_parts(small: Pipeline) -> None:
    given = (SMALL_PROMPTS * 6)[:17], range(17)
    expected = generate(by_parts(engine_of(small, "parallel", 17)), *given)
    assert_same(generate(engine_of(small, "parallel", 17), *given), expected)


@pytest.mark.parametrize("cfg", [1.0, 2.0])
def test_a_width_that_is_no_multiple_of_a_vector(cfg: float, tmp_path: Path) -> None:
    """Vectors are read and written to their end, for which there is memory."""
    vq = VQ(VQConfig(16, 4, (16, 16), (1, 1), (1, 1), codes=VOCAB))
    save_words(tmp_path / "odd", WordsTarget(WordsConfig(**SMALLER | {"dim": 24}), vq))
    pipe = Pipeline.from_pretrained(tmp_path / "odd", device="cpu", dtype="bfloat16", tuned=False)
    given = SMALL_PROMPTS[:1], [1]
    engine = engine_of(pipe, "ar", 1, cfg=cfg)
    assert_same(generate(engine, *given), generate(by_parts(engine_of(pipe, "ar", 1, cfg=cfg)), *given))
    buffers = engine.fused.step.alive
    assert buffers["guided"].numel() >= 32 and buffers["features"].numel() >= (24 if cfg > 1 else 0) + 32


@pytest.mark.parametrize("method", ["ar", "parallel"])
def test_steps_are_taken_by_parts_while_drafts_are_observed(small: Pipeline, method: str) -> None:
    """From the middle of a picture on, and back."""
    expected = generate(by_parts(engine_of(small, method, 1)), SMALL_PROMPTS[:1], [1])
    engine = engine_of(small, method, 1)
    counter = AcceptanceByRank(engine.target.length)
    engine.admit(0, SMALL_PROMPTS[0], 1)
    steps = 0
    while min(engine.decided()) < engine.target.length:
        steps += 1
        engine.observers[:] = [counter] if steps % 5 in (2, 3) else []
        engine.step()
    assert_same([engine.collect(0)], expected)
    assert int(counter.passes) > 0


def test_phases_of_complete_steps_are_timed(nature: Pipeline) -> None:
    engine = engine_of(nature, "parallel", 1)
    engine._target_forward = None
    timed = TimedEngine(engine)
    timed.admit(PROMPTS[:1], [1])
    span = timed.step()
    assert all(span[phase] > 0 for phase in ("draft", "pass", "verify"))


class OwnExact(Exact):
    pass


class OwnParallel(Parallel):
    pass


class OwnNoDraft(NoDraft):
    pass


@pytest.mark.parametrize(
    ("method", "dials"),
    [
        # Classes that derive from known ones may override any part.
        ("parallel", {"proposer": OwnParallel}),
        ("ar", {"proposer": OwnNoDraft}),
        ("parallel", {"accept": OwnExact}),
        ("parallel", {"temperature": 0.0}),
        ("parallel", {"min_survival": 0.5}),
        ("lantern++", {"measure_tv": True}),
        ("eagle", {}),
        ("jacobi", {}),
        ("cool", {"proposer": "parallel", "tree": "chain-4"}),
    ],
)
def test_unsupported_parts_are_drawn_by_parts(
    nature: Pipeline, method: str, dials: dict[str, object]
) -> None:
    engine = engine_of(nature, method, 1, **dials)
    assert engine.fused is None
    engine.admit(0, PROMPTS[0], 1)
    engine.step()
    assert engine.decided()[0] > 1


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_a_pass_over_more_rows_needs_no_less_memory(nature: Pipeline, part: str) -> None:
    """A step has memory for its largest pass, and a drafter's passes over a chain of three may have three rows or six."""
    proposer = engine_of(nature, "parallel", 1).proposer
    passes = {"target": nature.target, "drafter": proposer.drafter}[part].decoder.native
    sizes = []
    for nodes in range(1, 40):
        work = structs.Pass(passes.shape, passes.layers, 1, nodes, 300)
        sizes.append(passes.library.decode(byref(work), byref(structs.Scratch()), 2))
    assert sizes == sorted(sizes)
