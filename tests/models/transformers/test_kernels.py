"""`accelerate(model, kernels=...)`: passes of a transformers model from packed weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.cases import Case
from helpers.refusals import rejects
from helpers.stacks import StackPasses
from torch import Tensor

import lanternpp
from lanternpp.kernels import loading as native
from lanternpp.models.transformers import decoder
from lanternpp.nn.backend import Backend
from lanternpp.nn.decoder import Stack

GUIDED = [("janus", False), ("emu3", True), ("chameleon", True), ("glm-image", False), ("simplear", True)]


class Reference(Backend):
    """Computes stacks of any dtype, with PyTorch."""

    def __init__(self) -> None:
        self.packed: list[StackPasses] = []

    def decoder(self, stack: Stack, rotary_table: Tensor, dtype: str, release: bool = False) -> StackPasses:
        """The passes of a stack."""
        self.packed.append(StackPasses(stack, rotary_table))
        return self.packed[-1]


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reference]:
    """The backend in use, where memory that PyTorch does not initialise is NaN: the padding of heads must not be read."""
    made = Reference()
    monkeypatch.setattr(decoder, "backend", lambda: made)
    torch.use_deterministic_algorithms(True)
    yield made
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("name", "guided"), GUIDED)
def test_greedy_pictures_by_a_backend_are_those_of_transformers(
    made: Callable[[str], Case], reference: Reference, name: str, guided: bool
) -> None:
    case = made(name)
    given = case.inputs(3) | {"do_sample": False} | (case.negative(3) if guided else {})
    expected = case.model.generate(**given)
    lanternpp.accelerate(case.model, window=5, kernels="bfloat16")
    assert torch.equal(case.model.generate(**given), expected)
    assert case.model.generate.codes_per_pass > 1
    (passes,) = reference.packed
    assert passes.passes > 3
    assert torch.equal(case.model.generate(**given, method="ar", window=None), expected)
    assert len(reference.packed) == 1


def test_pictures_of_other_sizes_follow_one_another(
    made: Callable[[str], Case], reference: Reference
) -> None:
    """GLM-Image has positions on a grid, which differ where the number of codes is the same."""
    case = made("glm-image")
    given = case.inputs(1) | {"do_sample": False}
    calls = [given | {"image_grid_thw": torch.tensor(grids)} for grids in GRIDS]
    expected = [case.model.generate(**call) for call in calls]
    lanternpp.accelerate(case.model, window=5, kernels="int8")
    for call, picture in [*zip(calls, expected, strict=True)] * 2:
        assert torch.equal(case.model.generate(**call), picture)
    assert len(reference.packed) == 1


GRIDS = [[[1, 4, 3], [1, 2, 3]], [[1, 2, 6], [1, 1, 6]], [[1, 3, 4], [1, 2, 3]]]


def test_weights_that_changed_are_packed_again(made: Callable[[str], Case], reference: Reference) -> None:
    """In place, as training does, and replaced."""
    case = made("emu3")
    given = case.inputs(1) | {"do_sample": False}
    lanternpp.accelerate(case.model, window=5, kernels="bfloat16")
    before = case.model.generate(**given)
    layer = case.model.model.text_model.layers[0]
    weight = layer.mlp.down_proj.weight
    replaced = torch.nn.Parameter(-weight.detach())
    set_weight = functools.partial(setattr, layer.mlp.down_proj, "weight")
    with torch.no_grad():
        for change, undo in [
            (weight.neg_, weight.neg_),
            (lambda: set_weight(replaced), lambda: set_weight(weight)),
        ]:
            change()
            expected = type(case.model).generate(case.model, **given)
            assert not torch.equal(expected, before)
            assert torch.equal(case.model.generate(**given), expected)
            undo()
            assert torch.equal(case.model.generate(**given), before)
    assert len(reference.packed) == 5


def test_a_change_that_the_backend_cannot_compute_is_reported_by_the_next_draw(
    made: Callable[[str], Case], reference: Reference
) -> None:
    """Text can still be generated."""
    case = made("janus")
    given = case.inputs(1) | {"do_sample": False}
    lanternpp.accelerate(case.model, kernels="bfloat16")
    hook = case.model.model.language_model.layers[1].register_forward_hook(lambda *given: None)
    try:
        rejects(r"layers\.1 has hooks", case.model.generate, **given)
        text = {"generation_mode": "text", "max_new_tokens": 3, "kernels": "int8"}
        assert case.model.generate(**given | text).shape[1] <= given["input_ids"].shape[1] + 3
    finally:
        hook.remove()
    assert case.model.generate(**given).shape == (1, 16)
    case.model.generate(**given, kernels="int8", method="ar")
    assert case.model.generate.codes_per_pass == 1


def test_unsupported_dtypes_and_too_little_memory_are_rejected(
    made: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = made("janus").model
    in_float64 = r"in torch\.float64; load it with dtype=torch\.bfloat16"
    rejects(in_float64, lanternpp.accelerate, model, kernels="bfloat16")
    rejects("'fp4' is unknown; known: bfloat16, int8, int4", lanternpp.accelerate, model, kernels="fp4")
    monkeypatch.setattr(decoder, "free_memory", lambda device: 1000)
    no_room = r"takes 0\.0 GB, and 0\.0 GB are free; leave out kernels"
    rejects(no_room, lanternpp.accelerate, model, kernels="int8")
    assert not vars(model).keys() & {"generate", "_lanternpp"}


@pytest.mark.skipif(native.library() is None, reason="no kernels here")
def test_kernels_need_embeddings_in_bfloat16(made: Callable[[str], Case]) -> None:
    case = made("emu3")
    model: Any = case.model.to(torch.bfloat16)
    model.get_input_embeddings().float()
    model.lm_head.float()
    lanternpp.accelerate(model, window=5, kernels="bfloat16")
    rejects(r"embeddings are torch\.float32; use model\.to", model.generate, **case.inputs(1))
