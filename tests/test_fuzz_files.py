"""Files of any origin give a model or an error in one sentence, without a traceback or a long wait.

FUZZ=50 in the environment tries fifty times as many, with other random numbers each time.
"""

from __future__ import annotations

import copy
import json
import os
import re
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.classifiers import write_classifier
from helpers.families import PUBLISHED
from helpers.models import write_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lanternpp import InputError, Pipeline, models
from lanternpp.api.defaults import Defaults
from lanternpp.api.model import read_target
from lanternpp.api.settings import convert_override
from lanternpp.evaluation.classifier import read_classifier
from lanternpp.nn import checkpoints
from lanternpp.nn.sources import SAME, Source, blank
from lanternpp.trees import build_tree

PROMPT = "a red tulip"
TIMES = int(os.environ.get("FUZZ", "1"))


def examples(count: int) -> settings:
    """Settings for so many examples, each of which must end within a minute."""
    return settings(
        max_examples=count * TIMES,
        derandomize=TIMES == 1,
        database=None,
        deadline=60_000,
        suppress_health_check=list(HealthCheck),
    )


NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([2**16, 10**5, 2**31, 2**63, 10**30, 10**4000]),
    st.floats(allow_nan=True, allow_infinity=True),
)
LEAVES = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.text(max_size=8), st.just("x" * 5000), st.just("os:abort")
)
VALUES = st.one_of(
    st.recursive(
        LEAVES,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
    st.integers(1, 3000).map(lambda depth: ["deep", depth]),  # written as so many brackets
)


def as_json(value: Any) -> str:
    """JSON text, in which ["deep", n] stands for n lists in each other."""
    if isinstance(value, list) and len(value) == 2 and value[0] == "deep":
        return "[" * value[1] + "]" * value[1]
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(str(k))}:{as_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(as_json, value)) + "]"
    return json.dumps(value)


def one_sentence(read: Callable[[], object]) -> None:
    """`read` returns, or raises InputError with one line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read()
        except InputError as error:
            said = str(error)
            assert said and said.isprintable() and len(said) < 2100, said
            assert "weights_only" not in said and "Traceback" not in said


def mutated(document: Any, data: st.DataObject) -> Any:
    """A JSON document with one or two of its values, at any depth, taken out, replaced or added to."""
    document = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, 2))):
        at = document
        while isinstance(at, dict) and at:
            name = data.draw(st.sampled_from(sorted(at)))
            if isinstance(at[name], dict) and at[name] and data.draw(st.integers(0, 3)):
                at = at[name]
                continue
            if data.draw(st.integers(0, 4)) == 0:
                del at[name]
            else:
                at[name] = data.draw(VALUES)
            break
    return document


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of ours with every part that has a config."""
    folder = write_model(tmp_path_factory.mktemp("ours") / "model")
    write_classifier(folder)
    pipe = Pipeline.from_pretrained(str(folder), dtype="float32")
    where = pipe.conditions(pipe.settings("lantern++", batch_size=1))
    Defaults.read(folder).add_tuned("lantern++", where, {"tree": "[[0],[1]]", "lam": 3.0})
    return folder


CONFIGS = ("target", "tokenizer", "drafter", "parallel", "independent/target", "classifier")
SMALL = ("defaults.json", "tuned.json")


def read_all(folder: Path) -> None:
    """Everything that a verb may read of a folder, and a picture."""
    pipe = Pipeline.from_pretrained(str(folder), dtype="float32", device="cpu")
    for method in ("lantern++", "parallel", "independent"):
        settings = pipe.settings(method)
        pipe.new_engine(settings)
    assert pipe(PROMPT, method="ar").images
    read_classifier(folder)


@contextmanager
def written(path: Path, text: str) -> Iterator[None]:
    """A file with another content, until the end of the block."""
    kept = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(kept)


@examples(60)
@given(st.sampled_from([*(f"{part}/config.json" for part in CONFIGS), *SMALL]), st.data())
def test_a_config_of_ours(ours: Path, name: str, data: st.DataObject) -> None:
    kept = json.loads((ours / name).read_text())
    document = data.draw(VALUES) if data.draw(st.integers(0, 9)) == 0 else mutated(kept, data)
    with written(ours / name, as_json(document)):
        one_sentence(lambda: read_all(ours))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of each family that has a config.json."""
    place = tmp_path_factory.mktemp("published")
    for name, write in PUBLISHED.items():
        write(place / name)
    return place


MODELS = Path(models.__file__).parent
READ = {name for path in MODELS.rglob("*.py") for name in re.findall(r"\w+", path.read_text())}


def only_read(document: Any) -> Any:
    """A published config without the many fields that nobody here reads."""
    if not isinstance(document, dict):
        return document
    return {name: only_read(value) for name, value in document.items() if name in READ}


@examples(12)
@given(st.sampled_from(sorted(PUBLISHED)), st.data())
def test_a_config_of_others(published: Path, name: str, data: st.DataObject) -> None:
    path = published / name / "config.json"
    document = mutated(only_read(json.loads(path.read_text())), data)
    with written(path, as_json(document)):
        one_sentence(lambda: read_target(path.parent, torch.float32).prompt(["a photo"], 2))


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
NAMES = st.one_of(
    st.sampled_from(["weight", "bias", "weight.scale", "__metadata__", "\x1b[2J\nx", "n" * 2000]),
    st.text(max_size=5),
)
SHAPES = st.lists(st.one_of(st.integers(0, 4), st.sampled_from([-1, 2**31, 2**62, 2**70])), max_size=4)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "C64", "F4", "", 3]),
        "shape": st.one_of(SHAPES, VALUES),
        "data_offsets": st.lists(st.integers(0, 70), min_size=2, max_size=2),
    }
)


def read_tensors(path: Path) -> None:
    """Into a module, and, of safetensors, as they are."""
    with blank():
        linear = torch.nn.Linear(2, 4)
    one_sentence(lambda: Source.open(path).fill(linear, [SAME], torch.float32))
    if path.suffix == ".safetensors":
        one_sentence(lambda: checkpoints.read_safetensors(path))


@examples(150)
@given(
    st.dictionaries(NAMES, st.one_of(ENTRIES, VALUES), max_size=4), st.binary(max_size=70), st.integers(-8, 8)
)
def test_a_safetensors_header(tmp_path: Path, header: dict, data: bytes, off: int) -> None:
    path = tmp_path / "header.safetensors"
    text = as_json(header).encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", max(0, len(text) + (off if abs(off) > 6 else 0))) + text + data)
    read_tensors(path)


@examples(60)
@given(
    st.dictionaries(
        st.sampled_from(["weight", "bias", "weight.scale"]),
        st.tuples(st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 5), max_size=3)),
        max_size=3,
    ),
    st.sampled_from([0, 1, 127, 255]),
)
def test_whole_tensors_of_any_kind(tmp_path: Path, kinds: dict, byte: int) -> None:
    path = tmp_path / "kinds.safetensors"
    tensors = {}
    for name, (dtype, shape) in kinds.items():
        size = torch.empty(shape, dtype=dtype).nbytes
        fill = min(byte, 1) if dtype == torch.bool else byte
        tensors[name] = torch.full((size,), fill, dtype=torch.uint8).view(dtype).view(shape)
    checkpoints.save_file(tensors, path)
    read_tensors(path)


TENSORS = st.sampled_from(
    [
        torch.ones(2),
        torch.ones(1).expand(3),
        torch.ones(2, dtype=torch.complex64),
        torch.eye(2).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, device="meta"),
    ]
)
CONTENTS = st.recursive(
    st.one_of(TENSORS, st.none(), st.integers(), st.text(max_size=3), st.floats()),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.one_of(st.sampled_from(["model", "module", "weight", "ema"]), st.integers()), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@examples(60)
@given(
    CONTENTS,
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=3),
    st.integers(0, 400),
)
def test_a_pt_file(tmp_path: Path, content: Any, zipped: bool, flips: list, cut: int) -> None:
    path = tmp_path / "content.pt"
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    whole = bytearray(path.read_bytes())
    for place, byte in flips:
        whole[place % len(whole)] = byte
    path.write_bytes(whole[: len(whole) - (cut - 300 if cut > 300 else 0)])
    read_tensors(path)


@examples(100)
@given(
    st.one_of(
        VALUES.map(as_json).map(str.encode),
        st.binary(max_size=20),
        st.lists(st.lists(st.integers(-1, 3), max_size=4), max_size=5).map(json.dumps).map(str.encode),
    )
)
def test_a_tree(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tree.json"
    path.write_bytes(content)
    one_sentence(lambda: convert_override("tree", path))
    one_sentence(lambda: build_tree("[" + content.decode("utf-8", "replace")))
