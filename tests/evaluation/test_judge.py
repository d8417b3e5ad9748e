"""The judge's files: its weights, and the reference that belongs to them alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from judges import CPU, splashes, write_judge

from lanternpp.errors import InputError
from lanternpp.evaluation.features import JudgeFeatures, extract
from lanternpp.evaluation.judge import (
    Judge,
    JudgeConfig,
    has_judge,
    read_judge,
    read_reference,
    write_reference,
)


def test_features_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    judge = JudgeFeatures.open(write_judge(tmp_path), CPU)
    images = splashes("red", 5) + splashes("blue", 4, side=40)  # any size
    one, many = (extract(judge, images, batch=batch) for batch in (1, 64))
    assert one.shape == (9, 16)
    torch.testing.assert_close(one, many, rtol=1e-4, atol=1e-5)


def test_the_reference_comes_back_with_its_captions(tmp_path: Path) -> None:
    judge = read_judge(write_judge(tmp_path))
    features = torch.randn(6, 16)
    write_reference(tmp_path, judge, features, ["a"] * 6)
    own = read_reference(tmp_path, judge)
    assert own.texts == ("a",) * 6
    torch.testing.assert_close(own.features, features, rtol=1e-3, atol=1e-6)  # 16 bits


def test_the_reference_of_other_weights_is_refused(tmp_path: Path) -> None:
    judge = read_judge(write_judge(tmp_path))
    with torch.no_grad():
        judge.stem.weight[0, 0, 0, 0] += 1e-3
    with pytest.raises(InputError, match=r"reference.safetensors was made by other weights"):
        read_reference(tmp_path, judge)


def test_a_missing_and_a_broken_reference_are_refused(tmp_path: Path) -> None:
    judge = read_judge(write_judge(tmp_path))
    path = tmp_path / "judge" / "reference.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InputError, match="cannot be read"):
        read_reference(tmp_path, judge)
    path.unlink()
    with pytest.raises(InputError, match="--reference DIR"):
        read_reference(tmp_path, judge)


def test_a_judge_needs_something_to_tell_apart(tmp_path: Path) -> None:
    assert not has_judge(tmp_path)
    with pytest.raises(InputError, match="2 or more"):
        JudgeConfig(("rose",))
    with pytest.raises(InputError, match="one entry per stage"):
        JudgeConfig(("rose", "sea"), blocks=(1,))


def test_a_judge_without_words_judges_labels(tmp_path: Path) -> None:
    judge = Judge(JudgeConfig(("rose", "sea"), size=32, stem=8, channels=(16,), blocks=(1,)))
    labels, words = judge(torch.zeros(3, 3, 32, 32))
    assert labels.shape == (3, 2) and words.shape == (3, 0)
