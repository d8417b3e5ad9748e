"""Pictures as events: their progress, and clients that do not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
from helpers.served import IMAGES, PacedPipe, app_of, batcher_of, drawn, submit_all

from lanternpp.api.pipeline import Pipeline
from lanternpp.serve import streaming
from lanternpp.serve.config import ServerConfig
from lanternpp.serve.request_mapping import RequestMapper
from lanternpp.serve.schemas import ImagesRequest
from lanternpp.serve.streaming import PictureStream
from lanternpp.serve.tickets import CANCELLED

PROMPT = "a red tulip"


def events(address: str, **fields: object) -> Iterator[dict[str, Any]]:
    """Of a streamed request, as they come."""
    body = {"prompt": PROMPT, "stream": True, **fields}
    with httpx.stream("POST", address + IMAGES, json=body, timeout=300) as answer:
        assert answer.status_code == 200, answer.read()
        yield from (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))


def test_progress_events_have_figures_and_previews(pipe: Pipeline, monkeypatch) -> None:
    monkeypatch.setattr(streaming, "PROGRESS_INTERVAL", 0.02)
    paced = PacedPipe(pipe)
    with app_of(paced, ServerConfig("ar")) as (_, address):
        received = []
        for event in events(address, progress=True, n=2, seed=5):
            received.append(event)
            if event["type"].endswith("accepted"):  # the pictures are followed from now on
                paced.allow(pipe.target.length // 2)  # the rest once a preview has come
            elif event["type"].endswith("preview"):
                paced.allow()
    kinds = [event["type"].removeprefix("image_generation.") for event in received]
    assert kinds[0] == "accepted" and received[0]["warnings"] == [] and kinds.count("completed") == 2
    for index in (0, 1):
        mine = [(kind, event) for kind, event in zip(kinds, received, strict=True) if event["index"] == index]
        assert mine[-1][0] == "completed", "nothing outdated comes after the picture"
        passes = [event["accepted_per_pass"] for kind, event in mine if kind == "progress"]
        assert passes == sorted(passes, key=len) and {code for each in passes for code in each} == {1}
        facts = mine[-1][1]["lanternpp"]
        assert facts["seed"] == 5 + index and facts["codes"] == pipe.target.length
    for kind, event in zip(kinds, received, strict=True):
        if kind == "preview":
            seen = drawn(event["b64_json"])
            assert seen.format == "JPEG" and seen.size == (16, 16)
    assert "preview" in kinds


def test_a_request_gets_the_warnings_of_its_own_prompt(pipe: Pipeline) -> None:
    with app_of(pipe, ServerConfig("ar")) as (_, address):
        first = next(events(address, progress=True, prompt="a shiny red tulip"))
        assert "shiny" in " ".join(first["warnings"])
        assert next(events(address, progress=True))["warnings"] == []


def test_no_events_are_queued_for_a_client_that_stops_reading(pipe: Pipeline, monkeypatch) -> None:
    monkeypatch.setattr(streaming, "PROGRESS_INTERVAL", 0.01)
    paced = PacedPipe(pipe)

    async def stalled() -> None:
        body = ImagesRequest(prompt=PROMPT, n=2, stream=True, progress=True, seed=1)
        mapper = RequestMapper(batcher)
        tickets = submit_all(batcher, mapper.tickets(body, ""))
        stream, read, ended = PictureStream(mapper, body, tickets), 0, asyncio.Event()

        async def receive() -> dict[str, str]:
            await ended.wait()
            return {"type": "http.disconnect"}

        async def send(message: object) -> None:
            nonlocal read
            read += 1
            if read > 2:  # the head and an event; then the window of the connection is full
                await asyncio.Event().wait()

        running = asyncio.create_task(stream({"type": "http"}, receive, send))
        for _ in range(8):
            paced.allow(1)
            await asyncio.sleep(0.05)
        assert read == 3 and not [task for task in asyncio.all_tasks() if "draw" in repr(task)]
        ended.set()
        await running
        assert all(ticket.exception(0).status_code == CANCELLED for ticket in tickets)

    with batcher_of(paced, ServerConfig("ar")) as batcher:
        asyncio.run(stalled())
