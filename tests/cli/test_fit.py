"""Drafts that are fitted to the machine in the output of the command line, and how a job keeps its draft."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from helpers.models import contents
from PIL import Image

from lanternpp import Pipeline
from lanternpp.api import fit
from lanternpp.api.fit import Step
from lanternpp.api.picture import save_png
from lanternpp.api.rates import FILE, Counts, strength

PROMPT = "a red tulip"


@pytest.fixture
def fitted(model: Path, monkeypatch: pytest.MonkeyPatch):
    """Every draft code of `parallel` is accepted half of the time, and steps take these times."""
    times: dict[str, float] = {}
    monkeypatch.delenv("LANTERNPP_FIT")
    settings = Pipeline.from_pretrained(model, device="cpu").settings("parallel")
    rows = [{"strength": strength(settings), "counts": asdict(Counts(((8.0,),) * 8, ((4.0,),) * 8, 900))}]
    path = model / "parallel" / FILE
    path.write_text(json.dumps({"acceptance": rows}))

    def measure(drafts, length):
        return {name: Step(2, times.get(name, 9.0), 1.0, 1.0) for name, _ in drafts}

    monkeypatch.setattr(fit, "measure", measure)
    yield times
    path.unlink()


def test_the_last_line_the_notes_and_the_json_have_the_fitted_draft(run, model, fitted, empty_dir) -> None:
    fitted |= {"plain": 1.0, "chain-2": 1.1}
    command = ("generate", PROMPT, "--model", model, "--method", "parallel")
    assert "parallel, a chain of 2, fitted to this CPU" in run(*command, "-o", "a.png").out
    with Image.open(empty_dir / "a.png") as image:
        noted = json.loads(image.text["settings"])
    assert noted["tree"] == "chain-2" and noted["fit"] is True
    assert run(*command, "--json").json["settings"] == noted
    assert "fitted" not in run(*command, "--tree", noted["tree"], "-o", "b.png").out
    with Image.open(empty_dir / "a.png") as one, Image.open(empty_dir / "b.png") as other:
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    ("fastest", "said"), [("chain-2", "a chain of 2, fitted"), ("plain", "plain decoding is the fastest")]
)
def test_a_resumed_job_draws_the_same_bytes_after_another_fit(
    run, model, fitted, empty_dir, fastest, said
) -> None:
    (empty_dir / "p.txt").write_text(f"{PROMPT}\na tulip\n")
    command = ("generate", "--prompts", "p.txt", "-o", "o", "--model", model, "--method", "parallel")
    fitted |= {"plain": 2.0, "chain-2": 3.0, fastest: 1.1}
    assert said in run(*command).out
    older, missing = sorted((empty_dir / "o").glob("*.png"))
    with Image.open(older) as image:  # as of a version with fewer options
        noted = {name: x for name, x in json.loads(image.text["settings"]).items() if x is not None}
        save_png(image, older, image.text | {"settings": json.dumps(noted)})
    before = contents(empty_dir / "o")
    missing.unlink()
    fitted |= {"plain": 2.0, "chain-2": 8.0, "chain-3": 1.1}
    (cache,) = (empty_dir.parent / "cache" / "lanternpp").glob("fit-*")
    cache.unlink()  # measured again, and another draft is the fastest now
    out = run(*command).out
    assert "1 already there" in out and said in out
    assert contents(empty_dir / "o") == before
    run(*command, "--temperature", 0.5).refused("temperature 1.0 -> 0.5")
    assert "o: 2 pictures" in run(*command, "--temperature", 0.5, "--overwrite").out
    run(*command[:-1], "ar").refused("method 'parallel' -> 'ar'")
    run(*command, "--tree", "chain-4", "--overwrite")
    run(*command).refused("tree 'chain-4' -> 'chain-")
