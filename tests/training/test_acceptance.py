"""What is kept of drafts, and features that come from a disk instead of the target."""

from pathlib import Path

import pytest
import torch
from helpers.models import write_model
from helpers.toys import OracleDrafter, ToyTarget, eagle

from lanternpp.api.model import read_target
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling
from lanternpp.proposers.tree import TreeProposer
from lanternpp.training.acceptance import measure_acceptance
from lanternpp.training.drafter import DrafterSettings, DrafterTask
from lanternpp.training.material.codes import Codes, Split
from lanternpp.trees import build_tree

PROMPTS = ["a", "bb", "ccc", "dddd"]


def test_an_oracles_first_children_are_all_kept() -> None:
    target = ToyTarget()
    found = measure_acceptance(
        target, TreeProposer(OracleDrafter(target), build_tree("eagle-25")), Sampling(), Guidance(), PROMPTS
    )
    figures = found.figures
    assert found.codes.shape == (4, target.length)
    assert figures["kept_by_rank"][0] == 1.0
    assert figures["kept_by_rank"][1:] == [None] * (len(figures["kept_by_rank"]) - 1)
    assert set(figures["kept_by_depth"]) == {1.0}


def test_counts_add_up_to_the_codes_that_passes_decided() -> None:
    target = ToyTarget()
    proposer = TreeProposer(eagle(target), build_tree("eagle-25"))
    figures = measure_acceptance(target, proposer, Sampling(), Guidance(2.0), PROMPTS * 2).figures
    judged = torch.tensor(figures["judged"])
    assert (judged[:, :-1] >= judged[:, 1:]).all()  # a sibling is judged after those before it
    by_depth = figures["kept_by_depth"]
    kept = [
        share * count
        for share, count in zip(by_depth, judged[:, 0].tolist(), strict=True)
        if share is not None
    ]
    assert sum(kept) > 10
    assert kept[0] >= judged[1, 0] - 0.01  # whoever is judged at depth 1 was kept at depth 0
    by_rank = [s * n for s, n in zip(figures["kept_by_rank"], judged.sum(0).tolist(), strict=True) if s]
    assert sum(by_rank) == pytest.approx(sum(kept), abs=0.5)


@pytest.mark.parametrize("loss", ["paper", "guided"])
def test_kept_features_teach_as_fresh_ones_do(
    loss: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path)
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(32, (6, 2, 16), generator=generator).to(torch.uint16)
    split = Split(codes, ("a red tulip", "tulip", "red tulip") * 2, ("",) * 6)
    figures = []
    for store in (None, tmp_path / "codes"):
        options = DrafterSettings(loss=loss, batch_size=4, drop_captions=0.4)  # type: ignore[arg-type]
        target = read_target(tmp_path, torch.float32)
        both = Codes(split, split, {"codes": "made"})
        made = DrafterTask(options, 1, target, both, "made", torch.device("cpu"), cache=store)
        assert (made.features is None) == (store is None)
        torch.manual_seed(0)
        figures.append([made.step(step, 0.0)["loss"].item() for step in range(4)])
    assert figures[0] == pytest.approx(figures[1], rel=1e-3)
    said = capsys.readouterr().err
    assert "keeping the target's features of 6 pictures x 2: 57.0 KiB in" in said
