"""The target that a drafter learns from draws in what is fastest, and teaches in what the training computes in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lanternpp.kernels.loading import kernels
from lanternpp.training.options import TrainingOptions
from lanternpp.training.teacher import Teacher


@pytest.mark.parametrize("able", [False, True])
def test_a_target_that_has_drawn_is_read_again_to_learn_from(
    able: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for probe in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, probe, lambda: able)
    teacher = Teacher("nature-128", TrainingOptions(tmp_path / "drafter", device="cpu"), None, draws=True)
    assert teacher.dtype is (torch.bfloat16 if able else torch.float32)
    assert teacher.drawing_dtype is (torch.bfloat16 if able or kernels() else torch.float32)
    drawn_with = teacher.target
    assert next(drawn_with.parameters()).dtype is teacher.drawing_dtype
    learned_from = teacher.trainable()
    assert next(learned_from.parameters()).dtype is teacher.dtype
    assert (learned_from is drawn_with) == (teacher.drawing_dtype is torch.float32)
