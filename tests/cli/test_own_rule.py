"""A rule of one's own: one file anywhere on the path, named by its module and class."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from lanternpp import Pipeline
from lanternpp.accept.variation import tv_cost
from lanternpp.api.settings import resolve
from lanternpp.errors import InputError

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
    with pytest.raises(InputError, match=r"lambda 2.0 would change nothing.*they take tree, verify, delta"):
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
        outcome = run(*args, "--delta", floor, "--measure-tv")
        assert (outcome.code, outcome.err) == (0, "")
        figures = json.loads(outcome.out)
        assert figures["settings"]["accept"] == "my_rules:Half" and figures["codes"] == 96
        passes.append(figures["passes"])
        assert (figures["tv_cost"] > 0.1) == (floor > 0)
    assert passes[1] <= passes[0]


def test_it_draws_from_python(own_rules, model) -> None:
    pipe = Pipeline.from_pretrained(str(model))
    result = pipe(PROMPT, method="eagle", accept="my_rules:Half", delta=0.9)
    assert result.stats.settings["accept"] == "my_rules:Half" and len(result.images) == 1


@pytest.mark.parametrize("name", ["my_rules:Quarter", "no_rules:Half"])
def test_one_that_is_not_there_is_one_sentence(name, own_rules, run) -> None:
    outcome = run("generate", PROMPT, "--method", "eagle", "--accept", name)
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and name in outcome.err


WRONG = '''
from lanternpp.accept.base import Acceptance

class Kept(Acceptance):
    """Takes nothing from the others."""

    @classmethod
    def build(cls, dials):
        return cls()

    def relax(self, p, code):
        return p.scatter(-1, code[..., None], 0.9)

class Negative(Kept):
    def relax(self, p, code):
        return p + 0.5 * (p - p.mean(-1, keepdim=True))

class Narrow(Kept):
    def relax(self, p, code):
        return p[..., :2]

class Broken(Kept):
    def relax(self, p, code):
        return p / self.delta

class Unbuilt(Acceptance):
    def relax(self, p, code):
        return p

class Other:
    pass

TREE = [[0], [1], [0, 0]]
GAPS = [[0, 0]]
'''


@pytest.fixture
def wrong_rules(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder, which only the command line looks into; a new name for each test."""
    name = f"rules_{elsewhere.parent.name.replace('-', '_')}"
    (elsewhere / f"{name}.py").write_text(WRONG)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("Kept", "returns numbers that are no probabilities (the least is"),
        ("Negative", "returns numbers that are no probabilities (the least is -"),
        ("Narrow", "returns [3, 2] for a p of [3, 32]"),
        ("Broken", "fails on a distribution of 32 codes: AttributeError"),
        ("Unbuilt", "cannot be made: it does not define build"),
        ("Other", "is no class of that kind; give one that derives from lanternpp.accept.base:Acceptance"),
        ("TREE", "is no class of that kind"),
    ],
)
def test_a_rule_that_cannot_judge_is_refused_before_anything_is_drawn(
    rule, says, wrong_rules, run, model
) -> None:
    args = ["generate", PROMPT, "--model", model, "--method", "eagle", "--accept", f"{wrong_rules}:{rule}"]
    outcome = run(*args)
    assert (outcome.code, outcome.out) == (2, "") and says in outcome.err and outcome.err.count("\n") == 1


def test_a_tree_may_be_a_list_in_a_module_of_the_current_folder(wrong_rules, run, model) -> None:
    args = ["generate", PROMPT, "--model", model, "--method", "eagle", "--json", "--tree"]
    by_name, by_paths = run(*args, f"{wrong_rules}:TREE"), run(*args, "[[0],[1],[0,0]]")
    assert by_name.code == 0, by_name.err
    assert json.loads(by_name.out)["passes"] == json.loads(by_paths.out)["passes"]
    for name, says in (("GAPS", "has no parent"), ("Other", "is no class of that kind")):
        outcome = run(*args, f"{wrong_rules}:{name}")
        assert outcome.code == 2 and says in outcome.err and outcome.err.count("\n") == 1


def test_a_module_that_is_not_found_is_refused_with_where_it_is_looked_for(run) -> None:
    outcome = run("generate", PROMPT, "--method", "eagle", "--accept", "rules_of_nobody:Rule")
    assert outcome.code == 2 and "in the current folder" in outcome.err


def test_what_an_own_rule_spends_is_estimated_where_the_codes_are_many(own_rules) -> None:
    """Near what asking for every code gives, and the same each time."""
    from my_rules import Half

    generator = torch.Generator().manual_seed(3)
    p, q = (torch.rand(3, 2000, generator=generator).pow(power) for power in (8, 6))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    rule = Half()
    for floor in (0.0, 0.0004, 0.002, 0.9):
        rule.floor = floor
        own = rule.accept_mass(p, q.where(q > p, 0))
        exact = (torch.minimum(q, own) - p).clamp(min=0).sum(-1)
        found = tv_cost(rule, p, q)
        assert torch.equal(found, tv_cost(rule, p, q))
        assert (found - exact).abs().max() <= 0.12 * (q - p).clamp(min=0).sum(-1).max()
        assert (found > 0.01).all() == (exact > 0.01).all()
    assert tv_cost(rule, p, p).abs().max() == 0
