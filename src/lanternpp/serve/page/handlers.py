"""What happens on the page: a method is chosen, a race is run, a race is stopped."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import torch

from lanternpp.errors import InputError
from lanternpp.picture import png
from lanternpp.pipeline import Pipeline, versions
from lanternpp.serve.batcher import Batcher, Cancelled, Closed, Drawn, Expired, Full
from lanternpp.serve.page import looks
from lanternpp.serve.page.dials import CFG, DIALS, TEMPERATURE, baseline, methods, read, wish
from lanternpp.serve.page.preview import grid
from lanternpp.serve.page.race import Frame, Race, heard

log = logging.getLogger(__name__)
DEFAULT = "lantern++"
KEPT = 24  # pictures of a session
BASE_TITLE, SIDE_TITLE = "Plain decoding", "With drafts"


class Page:
    """What the handlers of the page share."""

    def __init__(self, batcher: Batcher, pipe: Pipeline, limit: int, deadline: float | None):
        self.batcher, self.pipe, self.limit, self.deadline = batcher, pipe, limit, deadline
        self.offered = methods(pipe)
        self.method = DEFAULT if DEFAULT in self.offered else self.offered[0]
        self.look = looks.Look(*self._shape(), pipe.target.width)
        self.races: dict[str, list[Race]] = defaultdict(list)  # of each session

    def _shape(self) -> tuple[int, int]:
        """Columns and rows of codes in a picture; what draws it knows its size in pixels."""
        target = self.pipe.target
        codes = torch.zeros(1, target.length, dtype=torch.int64, device=next(target.parameters()).device)
        return grid(target, self.pipe.images(codes)[0].size)

    def panels(self, frame: Frame | None, method: str) -> tuple[str, str]:
        """Both sides as HTML."""
        base, side = (frame.base, frame.side) if frame else (None, None)
        return self.look.panel(base, baseline(), BASE_TITLE), self.look.panel(side, method, SIDE_TITLE)

    def choose(self, method: str) -> list[dict[str, Any]]:
        """What a method's dials show: its own values; what it does not read is hidden."""
        import gradio as gr

        if method not in self.offered:
            raise gr.Error("this method is not offered here", print_exception=False)
        settings = self.pipe.settings(method)
        shown = read(settings)
        return [gr.update(value=looks.about(method))] + [
            gr.update(visible=dial in shown, **({"value": getattr(settings, dial.name)} if dial in shown else {}))
            for dial in DIALS
        ]

    def stop(self, request: Any) -> None:
        """Give up this session's races."""
        for race in self.races.pop(request.session_hash, []):
            race.cancel()

    async def race(
        self, request: Any, shots: list[looks.Shot], prompt: str, method: str, seed: Any, count: Any, measure: Any,
        *dials: Any,
    ) -> AsyncIterator[tuple[Any, ...]]:  # fmt: skip
        """Run a race; yields the verdict, a warning, both panels, the gallery and its pictures."""
        import gradio as gr

        session, skip = request.session_hash, gr.skip()
        given = dict(zip([dial.name for dial in (*DIALS, CFG, TEMPERATURE)], dials, strict=True))
        race = None
        try:
            if self.races.get(session):
                raise InputError("a race is running on this page already; stop it first")
            asked = wish(self.pipe, self.offered, prompt, method, seed, count, measure, given, self.limit)
            warned = await asyncio.to_thread(heard, self.batcher, asked.prompt)
            race = await asyncio.to_thread(Race, self.batcher, asked, f"page {session}", self.deadline)
            self.races[session].append(race)
            told = " ".join(looks.note(f"{sentence}.", "stopped") for sentence in warned)
            async for frame in race.frames():
                panels = self.panels(frame, asked.side.method)
                if frame.finished:
                    shots = [*shots, *self.shots(race, frame)][-KEPT:]
                    yield looks.verdict(frame), told, *panels, looks.gallery(shots), shots
                else:
                    yield looks.verdict(frame), told, *panels, skip, skip
        except Cancelled:
            yield looks.note("Stopped.", "stopped"), skip, skip, skip, skip, skip
        except (InputError, Full, Closed, Expired) as refused:
            sentence = str(refused)
            yield looks.note(sentence[:1].upper() + sentence[1:] + ".", "wrong"), "", skip, skip, skip, skip
        except Exception:
            log.exception("a race broke")
            sentence = "Something broke here; the server's log says what."
            yield looks.note(sentence, "wrong"), "", skip, skip, skip, skip
        finally:
            if race is not None:
                race.cancel()
                if race in self.races.get(session, []):
                    self.races[session].remove(race)
                if not self.races.get(session):
                    self.races.pop(session, None)

    def shots(self, race: Race, frame: Frame) -> list[looks.Shot]:
        """The pictures of a finished race, for the gallery."""
        made = []
        for side in (frame.base, frame.side):
            for picture in side.pictures:
                assert picture.drawn is not None
                made.append(self._shot(race.wish.prompt, picture.seed, picture.drawn))
        return made

    def _shot(self, prompt: str, seed: int, drawn: Drawn) -> looks.Shot:
        words = "-".join(re.findall(r"[^\W_]+", prompt.lower()))[:50].strip("-") or "picture"
        name = f"{words}-{seed}-{drawn.settings.method.replace('+', 'p')}.png"
        per_pass = len(drawn.codes) / len(drawn.accepted)
        return looks.Shot(
            png(drawn.image, self.notes(prompt, seed, drawn)),
            looks.jpeg(drawn.image),
            prompt,
            drawn.settings.method,
            seed,
            drawn.seconds,
            per_pass,
            name,
        )

    def notes(self, prompt: str, seed: int, drawn: Drawn) -> dict[str, str]:
        """What a PNG says of how it was made: enough to make it again."""
        where = {"device": str(next(self.pipe.target.parameters()).device), "dtype": self.pipe.dtype}
        return {
            "prompt": prompt,
            "seed": str(seed),
            "images": "1",
            "model": self.pipe.name,
            "settings": json.dumps(asdict(drawn.settings) | where, sort_keys=True),
            "versions": json.dumps(versions(), sort_keys=True),
        }
