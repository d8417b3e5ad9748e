"""A model that transformers divides among processes, by the tensor parallel plan of its class."""

from __future__ import annotations

import json
import re
from pathlib import Path

from helpers import ranks
from helpers.families import PUBLISHED, with_drafters, write_chameleon, write_janus
from helpers.killed import exit_status, start, team_environments
from helpers.models import write_model
from helpers.refusals import rejects

from lanternpp import Pipeline


def test_processes_draw_together_what_one_draws_alone(tmp_path: Path) -> None:
    for name in ("emu3.5", "simplear", "janus"):
        PUBLISHED[name](tmp_path / "drawn" / name)
        with_drafters(tmp_path / "drawn" / name)
    write_chameleon(tmp_path / "refused" / "without a plan")
    write_model(tmp_path / "refused" / "ours")
    write_janus(tmp_path / "refused" / "one head", num_key_value_heads=1)
    processes = [start(ranks.draw_together, tmp_path, env) for env in team_environments()]
    assert [exit_status(process) for process in processes] == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    for folder in (tmp_path / "drawn").iterdir():
        alone = ranks.drawn(Pipeline.from_pretrained(folder, device="cpu", dtype="float64"))
        assert first[folder.name] == alone, folder.name
    # Before transformers 5.23 a class without a plan is no error of its own.
    assert re.search("has no `tp_plan`|^transformers does not divide", first["without a plan"])
    assert first["ours"].startswith("transformers does not divide ours;")
    assert "1 heads of keys and values do not divide among 2 processes" in first["one head"]


def test_tensor_parallel_needs_several_processes() -> None:
    for dtype, said in (
        ("auto", "start the script with torchrun"),
        ("int8", "does not go with tensor_parallel"),
    ):
        rejects(said, Pipeline.from_pretrained, "nature-128", dtype=dtype, tensor_parallel=True)
