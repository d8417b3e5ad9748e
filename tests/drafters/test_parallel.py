"""The files of a parallel drafter: those written before it could read layers below the target's last, and wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.models import write_model
from helpers.refusals import rejects

from lanternpp.api.model import read_target
from lanternpp.drafters.parallel import ParallelConfig, ParallelDrafter
from lanternpp.nn import checkpoints
from lanternpp.nn.sources import Source


def read(folder: Path) -> ParallelDrafter:
    target = read_target(folder, torch.float32)
    return ParallelDrafter.read(Source.open(folder / "parallel"), target, torch.float32)


def test_an_older_file_without_aux_layers_has_none(tmp_path: Path) -> None:
    place = write_model(tmp_path) / "parallel" / "config.json"
    config = json.loads(place.read_text())
    assert config.pop("aux_layers") == []
    place.write_text(json.dumps(config))
    drafter = read(tmp_path)
    assert drafter.aux_layers == () and drafter.fc.in_features == 2 * drafter.config.decoder.dim


@pytest.mark.parametrize(
    ("aux_layers", "said"),
    [
        ([1], "reads layer 1 of its target, counted from 0, and this one has 2"),
        ([1, 0], "ascending order"),
        ([-1], "aux_layers"),
    ],
)
def test_layers_that_the_target_lacks_are_rejected(aux_layers: list[int], said: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    target = read_target(folder, torch.float32)
    config = ParallelConfig.like(target.decoder.config, aux_layers=(0, 1)[: len(aux_layers)])
    tensors = ParallelDrafter(config, target.decoder.rotary_table).state_dict()
    saved = {"kind": "parallel", **config.flat(), "aux_layers": aux_layers}
    checkpoints.save(folder / "parallel", saved, tensors)
    rejects(said, read, folder)
