"""What the page makes of what it is given, and what it lets through, without a browser."""

from __future__ import annotations

import asyncio
import base64
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from models import LENGTH, SIDE, write_model
from PIL import Image
from served import PacedPipe, batcher_of

from lanternpp.errors import InputError
from lanternpp.pipeline import Pipeline
from lanternpp.serve.batcher import Batcher
from lanternpp.serve.orders import Cancelled
from lanternpp.serve.page import looks
from lanternpp.serve.page.dials import DIALS, Wish, methods, read, wish
from lanternpp.serve.page.handlers import Page
from lanternpp.serve.page.race import Race, heard
from lanternpp.serve.terms import Terms

PROMPT = "a red tulip"


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    return Pipeline.from_pretrained(str(write_model(tmp_path_factory.mktemp("models") / "tiny")), tuned=False)


@pytest.fixture
def batcher(pipe: Pipeline):
    made = Batcher(pipe, slots=4, queue=8)
    yield made
    made.close(drain=False, timeout=10)


def ask(pipe: Pipeline, terms: Terms | None = None, **changed: object) -> Wish:
    """What a press of Race sends, with changes; dials by name."""
    names = ("prompt", "method", "seed", "count", "measure")
    given = {"prompt": PROMPT, "method": "lantern++", "seed": 3, "count": 2, "measure": False} | changed
    dials = {name: given.pop(name) for name in list(given) if name not in names}
    terms = terms or Terms()
    return wish(pipe, terms, methods(pipe, terms), *(given[name] for name in names), dials)


def test_both_sides_get_the_same_sampling_and_only_the_method_its_dials(pipe: Pipeline) -> None:
    asked = ask(pipe, lam=3.5, neighbours=4, cfg=1.5, temperature=0.5, window=9)
    assert asked.seeds == (3, 4)
    assert (asked.side.lam, asked.side.neighbours, asked.side.window) == (3.5, 4, None)
    for settings in (asked.base, asked.side):
        assert (settings.cfg, settings.temperature) == (1.5, 0.5)
    assert (asked.base.method, asked.base.lam) == ("ar", None)


def test_what_the_server_was_started_with_holds_on_the_page(pipe: Pipeline) -> None:
    asked = ask(pipe, Terms(overrides={"top_k": 5, "lam": 4.0}))
    assert (asked.side.top_k, asked.base.top_k, asked.side.lam) == (5, 5, 4.0)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"prompt": "  "}, "prompt is empty"),
        ({"prompt": "x" * 1001}, "1001 characters"),
        ({"prompt": ["a tulip"]}, "prompt is empty"),
        ({"method": "lantern+++"}, "did you mean 'lantern++'"),
        ({"method": "ar"}, "unknown"),
        ({"seed": -1}, "Seed '-1'"),
        ({"seed": 0.5}, "whole number"),
        ({"seed": None}, "Seed 'None'"),
        ({"count": 5}, "from 1 to 4"),
        ({"count": True}, "Pictures 'True'"),
        ({"lam": 0.5}, "Lambda '0.5'"),
        ({"lam": float("nan")}, "Lambda 'nan'"),
        ({"cfg": 1e9}, "Guidance"),
        ({"tree": "/etc/passwd.json"}, "Tree '/etc/passwd.json' is unknown"),
        ({"tree": "os:system"}, "Tree 'os:system' is unknown"),
    ],
)
def test_what_cannot_be_set_is_refused_in_a_sentence(pipe: Pipeline, changed: dict, named: str) -> None:
    with pytest.raises(InputError, match=re.escape(named)):
        ask(pipe, **changed)


def test_a_method_shows_the_dials_that_it_reads(pipe: Pipeline, batcher: Batcher) -> None:
    updates = Page(batcher, Terms()).choose("jacobi")[1:]
    shown = {dial.name for dial, update in zip(DIALS, updates, strict=True) if update["visible"]}
    assert shown == {"window", "coupling", "fresh"}
    assert {dial.name for dial in read(pipe.settings("lantern++"))} >= {"lam", "neighbours", "tree"}


def test_a_method_whose_network_is_missing_is_not_offered(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "bare")
    for part in (folder / "drafter").iterdir():
        part.unlink()
    (folder / "drafter").rmdir()
    offered = methods(Pipeline.from_pretrained(str(folder), tuned=False), Terms())
    assert "eagle" not in offered
    assert {"parallel", "jacobi", "independent"} <= set(offered)


async def last(race: Race):
    """The last frame of a race, and how much was decided in those before."""
    seen = []
    async for frame in race.frames(every=0.001):
        seen.append((frame.base.decided, frame.side.decided))
    return frame, seen


def test_a_race_draws_what_the_pipeline_draws(pipe: Pipeline, batcher: Batcher) -> None:
    asked = ask(pipe)
    frame, seen = asyncio.run(last(Race(batcher, asked)))
    assert frame.finished and seen == sorted(seen)
    assert (frame.base.decided, frame.base.passes) == (2 * LENGTH, 2 * LENGTH)
    assert frame.side.passes < frame.base.passes
    for side in (frame.base, frame.side):
        for picture in side.pictures:
            given = {"cfg": side.settings.cfg, "batch_size": picture.drawn.rows}
            alone = pipe(PROMPT, seed=picture.seed, method=side.settings.method, **given)
            assert alone.images[0].tobytes() == picture.image.tobytes()


def test_stopping_frees_the_slots(pipe: Pipeline) -> None:
    paced = PacedPipe(pipe)
    with batcher_of(paced, slots=4, queue=8) as batcher:
        race = Race(batcher, ask(pipe, count=4))

        async def stopped() -> None:
            with pytest.raises(Cancelled):
                async for _ in race.frames(every=0.001):
                    race.cancel()

        asyncio.run(stopped())
        assert all(ticket.done for ticket in race.tickets)
        paced.allow()
        frame, _ = asyncio.run(last(Race(batcher, ask(pipe, count=1))))
    assert frame.finished


def listen(page: Page, session: str, *given: object) -> list[tuple]:
    """What a press shows."""

    async def gather() -> list[tuple]:
        request = SimpleNamespace(session_hash=session, request=None)
        return [shown async for shown in page.race(request, [], *given)]

    return asyncio.run(gather())


def test_a_race_ends_in_a_verdict_and_fills_the_gallery(batcher: Batcher, tmp_path: Path) -> None:
    page = Page(batcher, Terms())
    defaults = [None] * (len(DIALS) + 2)
    shown = listen(page, "one", PROMPT, "lantern++", 7, 2, True, *defaults)[-1]
    assert "verdict won" in shown[0] and "TV spent" in shown[3] and "TV spent" not in shown[2]
    assert [shot.seed for shot in shown[5]] == [7, 8, 7, 8]
    assert shown[4].count("download=") == 4
    assert not page.races
    file = tmp_path / "kept.png"
    file.write_bytes(base64.b64decode(shown[5][-1].png.partition(",")[2]))
    with Image.open(file) as kept:
        assert (kept.text["prompt"], kept.text["seed"], kept.size) == (PROMPT, "8", (SIDE, SIDE))


def test_refusals_are_one_sentence_and_leave_nothing_running(batcher: Batcher) -> None:
    page = Page(batcher, Terms())
    defaults = [None] * (len(DIALS) + 2)
    for prompt, method in (("a red bicycle", "lantern++"), (PROMPT, "nonsense"), (PROMPT, {"a": 1})):
        shown = listen(page, "one", prompt, method, 0, 1, False, *defaults)
        assert len(shown) == 1 and 'role="alert"' in shown[0][0] and "Traceback" not in shown[0][0]
    full = listen(page, "one", PROMPT, "lantern++", 0, 1, False, *defaults)
    assert "won" in full[-1][0]
    assert not page.races


def test_a_full_queue_is_said(pipe: Pipeline) -> None:
    batcher = Batcher(pipe, slots=1, queue=2)
    try:
        page = Page(batcher, Terms())
        shown = listen(page, "one", PROMPT, "lantern++", 0, 4, False, *[None] * (len(DIALS) + 2))
        assert 'role="alert"' in shown[-1][0]
    finally:
        batcher.close(drain=False, timeout=10)


def test_words_that_are_not_known_are_told(batcher: Batcher) -> None:
    assert "shiny" in " ".join(heard(batcher, "a shiny red tulip"))
    assert not heard(batcher, PROMPT)


def test_text_reaches_neither_the_browser_nor_a_template() -> None:
    shot = looks.Shot("data:,", "data:,", '<img src=x onerror="1">{{value}}${1}`', "m", 0, 1.0, 1.0, "n.png")
    html = looks.gallery([shot])
    assert not re.search(r"<img src=x|\{|\$|`", html)


def test_a_band_is_what_one_pass_decided() -> None:
    svg = looks.bands([1, 3, 5, 1, 2], seen=10, columns=4, rows=3, width=4)
    first, second = re.findall(r'd="([^"]*)"', svg)
    assert first == "M0 0h1v1h-1zM0 1h4v1h-4zM0 2h1v1h-1z"  # passes 1 and 3, which fills a row and goes on
    assert second == "M1 0h3v1h-3zM1 2h1v1h-1z"


def test_codes_that_end_a_row_are_no_column() -> None:
    svg = looks.bands([1, 6], seen=7, columns=3, rows=2, width=4)
    assert re.findall(r'd="([^"]*)"', svg) == ["M0 0h1v1h-1z", "M1 0h2v1h-2zM0 1h3v1h-3z"]
