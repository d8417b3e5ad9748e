"""A rule of one's own: one file anywhere on the path, named by its module and class."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lanternpp import Pipeline
from lanternpp.errors import InputError
from lanternpp.settings import resolve

PROMPT = "a photo of a red tulip"
RULE = '''
from lanternpp.accept.base import Acceptance

class Half(Acceptance):
    """Accepts a code of half its probability or more."""

    @classmethod
    def build(cls, dials):
        made = cls()
        made.floor = dials.delta
        return made

    def relax(self, p, code):
        at = code[..., None]
        before = p.gather(-1, at)
        after = before.clamp(min=self.floor).where((before > 0) & (before < 1), before)
        others = (p / (1 - before)).where(before < 1, 0) * (1 - after)
        return others.scatter(-1, at, after)

class Picky(Half):
    dials = frozenset({"delta"})
'''


@pytest.fixture
def own_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rules.py").write_text(RULE)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_part_that_does_not_say_reads_everything(own_rules) -> None:
    said = {"lam": 2.0, "delta": 0.4, "residual": "optimal"}
    settings = resolve("eagle", {}, {"accept": "my_rules:Half", **said})
    assert {name: getattr(settings, name) for name in said} == said
    with pytest.raises(InputError, match=r"lambda 2.0 would change nothing.*they take tree, delta"):
        resolve("eagle", {}, {"accept": "my_rules:Picky", **said})


@pytest.mark.parametrize("method", ["eagle", "eagle2", "jacobi"])
def test_it_draws(method: str, own_rules, run, model) -> None:
    args = [
        "generate",
        PROMPT,
        "--model",
        model,
        "--method",
        method,
        "--accept",
        "my_rules:Half",
        "--json",
        "-n",
        6,
    ]
    passes = []
    for floor in (0.0, 0.9):
        outcome = run(*args, "--delta", floor, "--measure")
        assert (outcome.code, outcome.err) == (0, "")
        figures = json.loads(outcome.out)
        assert figures["settings"]["accept"] == "my_rules:Half" and figures["codes"] == 96
        passes.append(figures["passes"])
        assert (figures["tv_spent"] > 0.1) == (floor > 0)
    assert passes[1] <= passes[0]


def test_it_draws_from_python(own_rules, model) -> None:
    pipe = Pipeline.from_pretrained(str(model))
    result = pipe(PROMPT, method="eagle", accept="my_rules:Half", delta=0.9)
    assert result.stats.settings["accept"] == "my_rules:Half" and len(result.images) == 1


@pytest.mark.parametrize("name", ["my_rules:Quarter", "no_rules:Half"])
def test_one_that_is_not_there_is_one_sentence(name, own_rules, run) -> None:
    outcome = run("generate", PROMPT, "--method", "eagle", "--accept", name)
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and name in outcome.err
