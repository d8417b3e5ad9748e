"""The features that a drafter is trained on are those of the engine: teacher forcing beside the engine, step by step."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import write_llamagen
from helpers.families import write_chameleon, write_janus
from helpers.models import write_model
from helpers.photos import teacher_of

from lanternpp.accept.exact import Exact
from lanternpp.api.model import read_target
from lanternpp.drafters.eagle import EagleConfig, EagleDrafter
from lanternpp.engine.decode import Engine
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.proposers.tree import TreeProposer
from lanternpp.training.codes import Codes, Split
from lanternpp.training.eagle import EagleTask
from lanternpp.training.features import CaptionPrompts, causal_mask, drafter_inputs
from lanternpp.training.options import DrafterSettings, TrainingData
from lanternpp.trees import build_tree

LONG = "the sea at sunset " * 9 + "the red tulip"  # over 32 tokens: shorter prompts are padded beside it
CASES = {
    "llamagen": (lambda path: write_llamagen(path, text=True), ("a red tulip of", "blue")),
    "janus": (write_janus, ("a red tulip", LONG)),
    "lumina": (lambda path: write_chameleon(path, lumina=True), ("a red tulip", LONG)),
    "words": (write_model, ("a red tulip", "the sea")),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_teacher_forced_features_are_those_of_the_engines_drafter(name: str, tmp_path: Path) -> None:
    write: Callable[[Path], object]
    write, texts = CASES[name]
    write(tmp_path / "Lumina-mGPT-7B-64")
    target = read_target(tmp_path / "Lumina-mGPT-7B-64", torch.float64).eval()
    torch.manual_seed(0)
    config = EagleConfig.like(target.decoder.config)
    drafter = EagleDrafter(config, target.decoder.rotary_table.double()).double().eval()
    proposer = TreeProposer(drafter, build_tree("chain-2"))
    engine = Engine(target, proposer, Exact(), Sampling(), Guidance(3.0), 1)
    seen: dict[int, torch.Tensor] = {}
    engine.admit(0, texts[0], 1)
    while engine.decided()[0] < target.length:
        seen[int(engine.count)] = proposer.features[:, 0].clone()
        engine.step()
    codes = engine.collect(0).codes[None].repeat(2, 1)

    captions = CaptionPrompts(target, Split(codes[:1, None].repeat(2, 1, 1), texts))
    prompts, start = captions(torch.tensor([0]), 2)
    assert (start is not None) == (name != "words")
    next_inputs, features = drafter_inputs(target, prompts, codes, start)
    drafted = drafter.forward_sequence(
        next_inputs, features[:, :-1], causal_mask(start, next_inputs.shape[1])
    )
    assert drafted.isfinite().all()
    for count, expected in seen.items():
        if count < target.length:
            here = drafted[:, prompts.shape[1] + count - 2]
            assert (here - expected).abs().max() < 1e-6, (
                f"after {count} codes"
            )  # rotations are kept in float32
    assert len(seen) > 4


def test_a_dropped_caption_is_the_unconditional_prompt(tmp_path: Path) -> None:
    write_llamagen(tmp_path, text=True)
    target = read_target(tmp_path, torch.float32).eval()
    texts = ("a red tulip of", "blue")
    captions = CaptionPrompts(target, Split(torch.zeros(2, 1, 16, dtype=torch.uint16), texts))
    both, start = captions(torch.tensor([0, 1]), 2)
    drawn, begin = captions(torch.tensor([0, 1]), 1, torch.tensor([True, False]))
    assert torch.equal(drawn[0], both[2]) and torch.equal(drawn[1], both[1])
    assert begin.tolist() == [start[2], start[1]]


@pytest.mark.parametrize("loss", ["paper", "guided"])
def test_features_from_the_disk_give_the_losses_of_computed_ones(
    loss: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path)
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(32, (6, 2, 16), generator=generator).to(torch.uint16)
    split = Split(codes, ("a red tulip", "tulip", "red tulip") * 2)
    figures = []
    for cache in (False, True):
        dropped = 0.4 if loss == "paper" else 0.1
        settings = DrafterSettings(cfg=3.0, loss=loss, batch_size=4, drop_captions=dropped)
        teacher = teacher_of(read_target(tmp_path, torch.float32), tmp_path / "codes")
        made = EagleTask(
            settings.of("eagle"),
            teacher,
            Codes(split, split, {"codes": "made"}),
            TrainingData(cache_features=cache),
        )
        torch.manual_seed(0)
        figures.append([made.step(step, 0.0)["loss"].item() for step in range(4)])
    assert figures[0] == pytest.approx(figures[1], rel=1e-3)
    assert "the features of all pictures: 6 pictures, in" in capsys.readouterr().err
