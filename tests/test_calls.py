"""Calls of a pipeline: their types, seeds and generators, partial pictures, and results."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.models import LENGTH, SIDE
from helpers.processes import python
from helpers.refusals import rejects

from lanternpp import Pipeline
from lanternpp.api.options import DIALS
from lanternpp.api.results import Partial, UnfinishedError

PROMPT = "a red tulip"


def test_signatures_have_every_dial() -> None:
    for call in (Pipeline.__call__, Pipeline.stream, Pipeline.settings):
        assert set(DIALS) <= set(inspect.signature(call).parameters)


TYPED = """
from lanternpp import RULES, Pipeline, accelerate
pipe = Pipeline.from_pretrained("nature-128").to("cpu", dtype="float32")
pipe("a tulip", 2, seed=[1], lam=3, tree=[[0]], cfg=None).images[0].save("tulip.png")
reveal_type(pipe("a tulip", output_type="np").images)
reveal_type(pipe("a tulip", output_type="pt").images)
for partial in pipe.stream("a tulip", window=8):
    reveal_type(partial.images)
pipe("a tulip", accept=RULES["lantern"])
"""
REVEALED = [(True, False), (False, False), (False, True)]  # an array, a tensor, a list
MISTAKES = [
    ('pipe("a tulip", lamda=3.0)', 'Unexpected keyword argument "lamda"'),
    ('pipe.settings("ar", top_k="5")', 'has incompatible type "str"; expected "int | None"'),
    ('pipe.stream("a tulip", temprature=1.0)', 'Unexpected keyword argument "temprature"'),
    ("accelerate(pipe, windw=4)", 'Unexpected keyword argument "windw"'),
    ('pipe("a tulip", output_type="jpg")', "No overload variant"),
]


def test_a_type_checker_accepts_typed_calls_and_rejects_misspelt_dials(tmp_path: Path) -> None:
    script = tmp_path / "use.py"
    script.write_text(TYPED + "\n".join(line for line, _ in MISTAKES) + "\n")
    config = tmp_path / "mypy.ini"
    skipped = "torch.*,transformers.*,safetensors.*,huggingface_hub.*,tokenizers.*,PIL.*,rich.*"
    config.write_text(f"[mypy]\n[mypy-{skipped}]\nfollow_imports = skip\nignore_missing_imports = true\n")
    options = ["--config-file", config, "--cache-dir", tmp_path / "cache", "--no-error-summary"]
    run = python("-m", "mypy", *options, script)
    lines = [line.removeprefix(f"{script}:") for line in run.stdout.splitlines()]
    assert [("ndarray" in line, "list[" in line) for line in lines if "Revealed" in line] == REVEALED
    errors = [line for line in lines if " error: " in line]
    first = TYPED.count("\n") + 1
    for number, (_, expected) in enumerate(MISTAKES):
        assert any(line.startswith(f"{first + number}:") and expected in line for line in errors), expected
    assert all(int(line.split(":")[0]) >= first for line in errors)


def test_a_callback_sees_every_step_and_the_pictures_so_far(pipe: Pipeline) -> None:
    counted: list[tuple[int, int]] = []
    seen: list[Partial] = []
    options: dict[str, Any] = {"n": 3, "seed": 4, "method": "eagle", "batch_size": 2}
    result = pipe(PROMPT, progress=lambda *now: counted.append(now), callback=seen.append, **options)
    assert [(one.decided, one.total) for one in seen] == counted == sorted(counted)
    assert counted[0] == (1, 48) and counted[-1] == (48, 48)
    assert torch.equal(result.codes, pipe(PROMPT, **options).codes)
    for one in seen:
        for known, whole in zip(one.codes, result.codes, strict=True):
            assert torch.equal(known, whole[: len(known)])
    assert len(seen[0].codes[0]) == 1 and not len(seen[0].codes[2])
    half = next(one for one in seen if LENGTH // 2 < len(one.codes[0]) < LENGTH)
    pixels, final = np.asarray(half.images[0]), np.asarray(result.images[0])
    assert pixels.shape == final.shape and (pixels[-1, -1] == 128).all() and (final[-1, -1] != 128).any()
    assert (pixels[0] != 128).any(-1).all()
    assert (np.asarray(half.images[2]) == 128).all()  # not begun
    assert seen[-1].images[0].tobytes() == result.images[0].tobytes()


def test_a_stream_yields_the_partials_of_a_callback_and_ends_with_the_result(pipe: Pipeline) -> None:
    options: dict[str, Any] = {"n": 3, "seed": 4, "method": "parallel", "batch_size": 2}
    seen: list[Partial] = []
    expected = pipe(PROMPT, callback=seen.append, **options)
    changed = pipe(PROMPT, callback=lambda seen: [codes.zero_() for codes in seen.codes], **options)
    assert torch.equal(changed.codes, expected.codes)
    partials = list(pipe.stream(PROMPT, **options))
    assert [one.result is None for one in partials] == [True] * (len(partials) - 1) + [False]
    assert [one.decided for one in partials] == [*(one.decided for one in seen), 48]
    result = partials[-1].result
    assert result is not None and torch.equal(result.codes, expected.codes)
    assert partials[-1].images is result.images and result.seeds == expected.seeds == [4, 5, 6]
    assert result.images[0].tobytes() == expected.images[0].tobytes()
    assert result.stats.accepted_per_pass == expected.stats.accepted_per_pass


def test_other_calls_may_run_between_two_steps_of_a_stream(model: Path) -> None:
    pipe = Pipeline.from_pretrained(model, device="cpu", dtype="float32")
    alone = [pipe(PROMPT, seed=seed, method="eagle").codes for seed in (1, 2)]
    first, second = (pipe.stream(PROMPT, seed=seed, method="eagle") for seed in (1, 2))
    next(first)
    for left, right in zip(first, second, strict=False):
        assert torch.equal(pipe(PROMPT, seed=1, method="eagle").codes, alone[0])
        known = left.codes[0], right.codes[0]
    assert all(torch.equal(a, b[0, : len(a)]) for a, b in zip(known, alone, strict=True))
    unfinished = pipe.stream(PROMPT, seed=2, method="eagle")
    next(unfinished)
    unfinished.close()
    assert torch.equal(pipe(PROMPT, seed=2, method="eagle").codes, alone[1])


def test_seeds_are_drawn_from_a_generator(pipe: Pipeline) -> None:
    def drawn(seed: int, **more: Any) -> Any:
        return pipe([PROMPT, "tulip"], n=2, generator=torch.Generator().manual_seed(seed), **more)

    one, same, other = drawn(3), drawn(3), drawn(4)
    assert torch.equal(one.codes, same.codes) and one.seeds == same.seeds != other.seeds
    assert len(set(one.seeds)) == 4 and not torch.equal(one.codes[0], one.codes[1])
    assert torch.equal(pipe("tulip", seed=one.seeds[3], batch_size=4).codes[0], one.codes[3])
    generator = torch.Generator().manual_seed(3)
    first, second = (pipe(PROMPT, generator=generator).seeds for _ in range(2))
    assert first != second and first + second == one.seeds[:2]


def test_output_types(pipe: Pipeline) -> None:
    usual = pipe(PROMPT, n=2)
    as_array = pipe(PROMPT, n=2, output_type="np").images
    as_tensor = pipe(PROMPT, n=2, output_type="pt").images
    assert as_array.shape == (2, SIDE, SIDE, 3) and as_array.dtype == np.float32
    assert as_tensor.shape == (2, 3, SIDE, SIDE)
    assert np.array_equal(as_array, as_tensor.permute(0, 2, 3, 1).numpy())
    assert as_array.min() >= 0 and as_array.max() <= 1
    assert np.array_equal(np.stack([np.asarray(one) for one in usual.images]), (as_array * 255).round())
    codes = pipe(PROMPT, n=2, output_type="codes")
    assert codes.images == [] and torch.equal(codes.codes, usual.codes)
    assert pickle.loads(pickle.dumps(UnfinishedError(codes))).seeds == [0, 1]


def test_a_pipeline_moves_to_another_dtype_and_back(model: Path) -> None:
    pipe = Pipeline.from_pretrained(model, device="cpu", dtype="float32")
    call = {"method": "lantern++", "lam": 3.0}
    usual, weights = pipe(PROMPT, **call).codes, pipe.target.decoder.norm.weight
    assert pipe.to("cpu").to("cpu:0", torch.float32).target.decoder.norm.weight is weights  # nothing to do
    wide = Pipeline.from_pretrained(model, device="cpu", dtype="float64")(PROMPT, **call).codes
    stream = pipe.stream(PROMPT, **call)
    next(stream)
    assert pipe.to(torch.float64) is pipe and pipe.dtype == "float64" and pipe.device.type == "cpu"
    *_, last = stream  # a stream that began before ends in its dtype
    assert last.result.stats.settings["dtype"] == "float32"
    assert torch.equal(last.result.codes, usual) and torch.equal(pipe(PROMPT, **call).codes, wide)
    assert {engine.cache.kv.dtype for engine in pipe._idle_engines.values()} == {torch.float64}
    narrow = pipe.to(dtype="bfloat16").to(dtype="float32")
    assert torch.equal(narrow(PROMPT, **call).codes, usual)
    rejects("dtype 'float23' is unknown", pipe.to, "cpu", "float23")
    assert pipe.dtype == "float32"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda pipe: pipe(PROMPT, output_type="jpg"), "output_type 'jpg' is unknown; .*pil, np, pt, codes"),
        (lambda pipe: pipe(PROMPT, seed=1, generator=torch.Generator()), "give one of them"),
        (lambda pipe: pipe(PROMPT, generator=3), "generator 3 is no torch.Generator"),
        (lambda pipe: pipe(PROMPT, lamda=3.0), "option 'lamda' is unknown; did you mean 'lam'"),
        (lambda pipe: pipe.stream(PROMPT, lamda=3.0), "option 'lamda' is unknown"),
        (lambda pipe: pipe.stream("an elephant"), "names no subject"),
        (lambda pipe: pipe.to("abacus"), "device 'abacus' is unknown"),
        (lambda pipe: pipe.from_pretrained(engine_bytes="1GB"), "engine_bytes '1GB' is no number"),
        (pickle.dumps, "cannot be pickled or copied; call from_pretrained in each"),
    ],
)
def test_wrong_calls_are_rejected(pipe: Pipeline, call: Callable[[Pipeline], Any], says: str) -> None:
    rejects(says, call, pipe)
