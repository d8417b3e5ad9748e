"""What happens on the page: a method is chosen, a race is run, a race is stopped."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from lanternpp.errors import InputError
from lanternpp.serve.api import client_of
from lanternpp.serve.batcher import Batcher
from lanternpp.serve.orders import Cancelled, Closed, Drawn, Expired, Full, Order
from lanternpp.serve.page import looks
from lanternpp.serve.page.dials import CFG, DIALS, OWN, TEMPERATURE, baseline, grid, methods, read, wish
from lanternpp.serve.page.race import Frame, Race, heard
from lanternpp.serve.pictures import encode, picture_size, png_notes
from lanternpp.serve.terms import Terms

log = logging.getLogger("lanternpp.serve")
KEPT = 24  # pictures of a session
BASE, SIDE = "Plain decoding", "With drafts"
BROKEN = "the server failed at this race; its log says how"


class Page:
    """What the handlers of the page share."""

    def __init__(self, batcher: Batcher, terms: Terms):
        self.batcher, self.pipe, self.terms = batcher, batcher.pipe, terms
        self.offered = methods(self.pipe, terms)
        own = (self.pipe.chosen(terms.method).method, self.pipe.chosen().method)
        self.method = next(name for name in (*own, *self.offered) if name in self.offered)
        target = self.pipe.target
        self.look = looks.Look(*grid(target, picture_size(self.pipe)), target.width)
        self.races: dict[str, list[Race]] = defaultdict(list)  # of each session

    def panels(self, frame: Frame | None, method: str) -> tuple[str, str]:
        """Both sides as HTML."""
        base, side = (frame.base, frame.side) if frame else (None, None)
        return self.look.panel(base, baseline(), BASE), self.look.panel(side, method, SIDE)

    def choose(self, method: str) -> list[Any]:
        """A method's own dials; what it does not read is hidden. First, a sentence on it."""
        if method not in self.offered:
            return [gr.skip() for _ in range(1 + len(DIALS))]
        settings = self.terms.settings(self.pipe, method, {})
        updates = [gr.update(value=looks.about(method))]
        for dial in DIALS:
            value = getattr(settings, dial.name)
            if dial not in read(settings):
                updates.append(gr.update(visible=False))
            elif dial.choices:
                updates.append(gr.update(visible=True, value=value or OWN, choices=dial.offers(value)))
            else:
                updates.append(gr.update(visible=True, value=value))
        return updates

    def stop(self, request: gr.Request) -> None:
        """Give up this session's races."""
        for race in self.races.pop(str(request.session_hash), []):
            race.cancel()

    async def race(
        self,
        request: gr.Request,
        shots: list[looks.Shot],
        prompt: Any,
        method: Any,
        seed: Any,
        count: Any,
        measure: Any,
        *dials: Any,
    ) -> AsyncIterator[tuple[Any, ...]]:
        """Run a race; yields the verdict, warnings, both panels, the gallery and its pictures, again and again."""
        session, skip = str(request.session_hash), gr.skip()
        given = dict(zip([dial.name for dial in (*DIALS, CFG, TEMPERATURE)], dials, strict=True))
        race = None
        try:
            if self.races.get(session):
                raise InputError("a race is running on this page already; stop it first")
            asked = wish(self.pipe, self.terms, self.offered, prompt, method, seed, count, measure, given)
            warned = await asyncio.to_thread(heard, self.batcher, asked.prompt)
            client = client_of(request.request) if request.request else session
            race = await asyncio.to_thread(Race, self.batcher, asked, client, self.terms.deadline)
            self.races[session].append(race)
            told = "".join(looks.note(sentence, "stopped") for sentence in warned)
            async for frame in race.frames():
                panels = self.panels(frame, asked.side.method)
                if frame.finished:
                    shots = [*shots, *self.shots(race, frame)][-KEPT:]
                    yield looks.verdict(frame), told, *panels, looks.gallery(shots), shots
                else:
                    yield looks.verdict(frame), told, *panels, skip, skip
        except Cancelled:
            yield looks.note("stopped", "stopped"), skip, skip, skip, skip, skip
        except (InputError, Full, Closed, Expired) as refused:
            yield looks.note(str(refused), "wrong"), "", skip, skip, skip, skip
        except Exception:
            log.exception("a race broke")
            yield looks.note(BROKEN, "wrong"), "", skip, skip, skip, skip
        finally:
            if race is not None:
                race.cancel()
                left = [other for other in self.races.pop(session, []) if other is not race]
                if left:
                    self.races[session] = left

    def shots(self, race: Race, frame: Frame) -> list[looks.Shot]:
        """The pictures of a finished race, for the gallery."""
        pictures = [*frame.base.pictures, *frame.side.pictures]
        return [
            self._shot(ticket.order, picture.drawn)
            for ticket, picture in zip(race.tickets, pictures, strict=True)
            if picture.drawn is not None
        ]

    def _shot(self, order: Order, drawn: Drawn) -> looks.Shot:
        method = drawn.settings.method
        words = "-".join(re.findall(r"[^\W_]+", f"{order.prompt} {method.replace('+', 'p')}".lower()))
        file = encode(drawn.image, "png", notes=png_notes(self.pipe, order, drawn))
        return looks.Shot(
            png=f"data:image/png;base64,{file}",
            jpeg=looks.jpeg(drawn.image),
            prompt=order.prompt,
            method=method,
            seed=order.seed,
            seconds=drawn.seconds,
            per_pass=len(drawn.codes) / len(drawn.accepted),
            name=f"{words[:60].strip('-')}-{order.seed}.png",
        )
