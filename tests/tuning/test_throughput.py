"""Throughput: what is counted in a turn, and what is drawn only once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.models import write_model

from lanternpp import Pipeline
from lanternpp.api.fit.choice import plain_settings
from lanternpp.api.settings import with_tree
from lanternpp.tuning.batch_runner import BatchRunner, usual_conditions
from lanternpp.tuning.throughput import Throughput, markdown

PROMPTS = ("a red tulip", "a tulip")


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """The tiny model."""
    folder = write_model(tmp_path_factory.mktemp("models") / "tiny")
    return Pipeline.from_pretrained(str(folder), dtype="float32", device="cpu")


def test_a_batch_kept_full_draws_the_pictures_that_generate_draws(pipe) -> None:
    settings = pipe.settings("eagle", batch_size=2)
    finished = []
    batch = BatchRunner(
        pipe.new_engine(settings), PROMPTS, 7, lambda codes: finished.append(codes[0].tolist())
    )
    first, second = batch.turn(), batch.turn()
    for turn in (first, second):
        assert turn["codes"] >= 2 * pipe.target.length and turn["seconds"] > 0
        assert turn["codes"] >= turn["passes"] >= turn["codes"] / (1 + batch.engine.proposer.depth)
    expected = [PROMPTS[i % 2] for i in range(len(batch.begun))]
    alone = pipe(expected, seed=[7 + i for i in range(len(expected))], method="eagle", batch_size=2)
    assert len(finished) >= 2 and all(codes in alone.codes.tolist() for codes in finished)


def test_a_fitted_draft_is_not_drawn_again_where_it_is_one_of_the_others(pipe, tmp_path, monkeypatch) -> None:
    own = pipe.settings("lantern++", proposer="parallel", tree="chain-3")
    fitted = {1: own, 2: plain_settings(own), 4: with_tree(own, "chain-1")}
    monkeypatch.setattr(
        pipe, "fit", lambda settings: replace(fitted[settings.batch_size], batch_size=settings.batch_size)
    )
    bench = Throughput(pipe, own, [1, 2, 4], PROMPTS, tmp_path / "t")
    rates = bench.run(1)
    assert len((tmp_path / "t" / "measurements.jsonl").read_text().splitlines()) == 2 + 2 + 3
    chosen = {rate.rows: rate for rate in rates if rate.kind == "fitted"}
    assert chosen[1] == replace(rates[1], kind="fitted"), "the method's own tree"
    assert chosen[2] == replace(rates[3], kind="fitted") and chosen[2].speedup == 1, "plain decoding"
    assert (chosen[4].method, chosen[4].tree) == ("lantern++", "chain-1")
    assert [line.split(" | ")[5] for line in markdown(rates, "lantern++").splitlines()[2:]] == [
        "`chain-3`",
        "`ar`",
        "`chain-1`",
    ]


def test_prompts_that_no_one_gave(pipe) -> None:
    assert set(usual_conditions(pipe)) <= {*pipe.target.conditions, None}
    (pipe.folder / "prompts.txt").write_text("a tulip\n")
    assert usual_conditions(pipe) == ["a tulip"]
