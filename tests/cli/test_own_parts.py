"""Custom parts: a rule or tree in a file on the path, named by its module; a family whose module the environment names."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.documents import DOCS, blocks
from helpers.processes import run_commands
from PIL import Image

from lanternpp.accept.base import tv_cost
from lanternpp.accept.exact import Exact
from lanternpp.api.settings import resolve
from lanternpp.errors import InputError
from lanternpp.models import FAMILIES
from lanternpp.nn import checkpoints
from lanternpp.util.registry import import_extensions

PROMPT = "a photo of a red tulip"
RULES = '''
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

class OfDelta(Half):
    dials = frozenset({"delta"})

class Doubled(OfDelta):
    def relax(self, p, code):
        return super().relax(p.double(), code)

class Unbuilt(Acceptance):
    def relax(self, p, code):
        return p

class Unreturned(Half):
    build = classmethod(lambda cls, dials: None)

class Other:
    pass

class Broken(Half):
'''
OF_CODE, OF_DRAFT = "def relax(self, p, code): return ", "def relax_with_draft(self, p, q, code): return "


@pytest.fixture
def own_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, on the path."""
    (tmp_path / "my_rules.py").write_text(f"{RULES}    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rules", raising=False)
    # Files written within one second, of one size, would be the same to Python. A rejected command leaves no file.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path / "my_rules.py"


def test_a_rule_without_dials_reads_all_dials(own_rules) -> None:
    said = {"lam": 2.0, "delta": 0.4, "residual": "optimal"}
    settings = resolve("eagle", {}, {"accept": "my_rules:Half", **said})
    assert {name: getattr(settings, name) for name in said} == said
    with pytest.raises(InputError, match=r"lambda 2.0 would change nothing.*they take tree, verify, delta"):
        resolve("eagle", {}, {"accept": "my_rules:OfDelta", **said})


@pytest.mark.parametrize("method", ["eagle", "eagle2", "jacobi"])
def test_a_custom_rule_draws(method: str, own_rules, run, model) -> None:
    args = ["generate", PROMPT, "--model", model, "--method", method, "--json", "-n", 6]
    passes = []
    for floor in (0.0, 0.9):
        figures = run(*args, "--accept", "my_rules:Half", "--delta", floor, "--measure-tv").json
        assert figures["settings"]["accept"] == "my_rules:Half" and figures["codes"] == 96
        passes.append(figures["passes"])
        assert (figures["tv_cost"] > 0.1) == (floor > 0)
    assert passes[1] <= passes[0]


@pytest.mark.parametrize("verb", [("generate",), ("compare", "--runs", 1)])
def test_a_rule_that_replaces_the_methods_is_reported(verb: tuple[str, ...], own_rules, run, model) -> None:
    common = (*verb, PROMPT, "--model", model, "-o", "own.png", "--overwrite")
    args = (*common, "--method", "eagle")
    for rule in ("my_rules:Half", "my_rules:Doubled"):
        assert rule in run(*args, "--accept", rule, "--delta", 0.3).out
    assert "rule" not in run(*args).out
    for method, other in ("ar", "jacobi"), ("lantern++", "none"), ("jacobi", "tree"):
        assert f"{method}, proposer {other}" in run(*common, "--method", method, "--proposer", other).out


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (OF_CODE + "p.scatter(-1, code[..., None], 0.9)", "no probabilities (the least is"),
        (OF_CODE + "p + 0.5 * (p - p.mean(-1, keepdim=True))", "no probabilities (the least is -"),
        (OF_CODE + "p[..., :2]", "returns [9, 2] for a p of [9, 32]"),
        (OF_CODE + "p / self.delta", "fails on a distribution of 32 codes: AttributeError"),
        (OF_CODE + "0.5 * p + 0.5 / p.shape[-1]", "changes a distribution whose candidate has probability 1"),
        (OF_CODE + "(p.log() * 0 + 1).softmax(-1)", "relax of acceptance rule 'my_rules:Broken' returns"),
        (OF_DRAFT + "p + q", "relax_with_draft of acceptance rule 'my_rules:Broken' returns numbers"),
    ],
)
def test_a_wrong_rule_is_rejected_before_anything_is_drawn(
    method: str, said: str, own_rules: Path, run, model
) -> None:
    own_rules.write_text(f"{RULES}    {method}\n")
    draw = ("generate", PROMPT, "--model", model, "--method", "eagle", "--delta", 0.3, "--accept")
    run(*draw, "my_rules:Broken").refused(said)


def test_a_name_that_is_no_rule_is_rejected_with_where_it_was_looked_for(own_rules: Path, run, model) -> None:
    names = {
        "my_rules:Quarter": "my_rules:Quarter",
        "no_rules:Half": "in the current folder",
        "my_rules:Unbuilt": "cannot be made: it does not define build",
        "my_rules:Unreturned": "makes a NoneType; it must be of Acceptance",
        "my_rules:Other": "is no class of that kind; give one that derives from lanternpp.accept.base:Acceptance",
    }
    for name, said in names.items():
        run("generate", PROMPT, "--model", model, "--method", "eagle", "--accept", name).refused(said)


def test_a_tree_may_be_a_list_in_a_module_of_the_current_folder(
    own_rules, empty_dir: Path, run, model, monkeypatch
) -> None:
    """Only the command line imports from it."""
    (empty_dir / "my_trees.py").write_text("TREE = [[0], [1], [0, 0]]\nGAPS = [[0, 0]]\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    args = ["generate", PROMPT, "--model", model, "--method", "eagle", "--json", "--tree"]
    by_name, by_paths = run(*args, "my_trees:TREE").json, run(*args, "[[0],[1],[0,0]]").json
    assert by_name["passes"] == by_paths["passes"]
    for name, says in (("my_trees:GAPS", "has no parent"), ("my_rules:Other", "is no class of that kind")):
        run(*args, name).refused(says)


def test_the_cost_of_a_custom_rule_is_estimated_if_there_are_many_codes(own_rules) -> None:
    """Near the sum over every code, and the same each time."""
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


@pytest.mark.parametrize("codes", [50, 2000])
def test_the_cost_of_a_rule_that_reads_the_drafts_probabilities_depends_on_them(codes: int) -> None:
    """A mixture, by `relax_with_draft` alone: its cost is the drafter's share of TV(p, q)."""

    class Mixture(Exact):
        lossless, optimal_residual = False, True

        def relax_with_draft(self, p, q, code):
            return 0.7 * p + 0.3 * q

    generator = torch.Generator().manual_seed(3)
    p, q = (torch.rand(3, codes, dtype=torch.float64, generator=generator).pow(power) for power in (8, 6))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    expected = 0.3 * (p - q).abs().sum(-1) / 2
    assert torch.allclose(tv_cost(Mixture(), p, q), expected)
    assert torch.allclose((Mixture().output_distribution(p, q) - p).abs().sum(-1) / 2, expected)


@pytest.fixture
def grey(empty_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the family of docs/extending.md and a model of it. This process does not know the family."""
    text = {block.title: block.text for block in blocks(DOCS / "extending.md", "python")}["my_family.py"]
    (empty_dir / "my_family.py").write_text(text)
    family: dict[str, Any] = {}
    monkeypatch.setitem(FAMILIES, "grey", "")
    exec(text, family)
    checkpoints.save("grey-model/target", {"kind": "grey"}, family["GreyTarget"]().state_dict())
    del FAMILIES["grey"]
    return empty_dir


def test_a_custom_family_draws_if_the_environment_names_its_module(grey: Path, run, monkeypatch) -> None:
    draw = ("generate", "7", "--model", "grey-model", "--method", "ar", "-o", "7.png")
    refused = {
        "": "a model family of your own is known once its file is imported, which LANTERNPP_IMPORT",
        "no_family": "LANTERNPP_IMPORT 'no_family' cannot be imported: No module named 'no_family'",
    }
    monkeypatch.setattr("lanternpp.api.model.import_extensions", import_extensions.__wrapped__)
    for modules, said in refused.items():
        monkeypatch.setenv("LANTERNPP_IMPORT", modules)
        run(*draw).refused(said)
    both = [draw, ("generate", "seven", *draw[2:])]
    ended = run_commands(both, grey, env={**os.environ, "LANTERNPP_IMPORT": "json, my_family"})[1]
    said = "lanternpp: error: the prompt is no digit\n"
    assert [(code, err) for code, _, err in ended] == [(0, ""), (2, said)]
    assert Image.open(grey / "7.png").size == (8, 8)
