"""`lanternpp serve --ray`: two replicas behind one address draw what one server draws, and end as one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from helpers.processes import SECONDS, descendants, wait_until
from helpers.served import AUTHORIZED, IMAGES, KEY, drawn, load_tiny, serving

from lanternpp.serve.ray_serve import Replicas
from lanternpp.serve.server import bind, run, url

REPLICA = "ray::ServeReplica"


def open_to_others(folder: Path) -> list[Path]:
    """The folders of this session that other users of the machine can enter."""
    assert list(folder.glob("*/ray/session_*"))
    return [path for path in folder.iterdir() if path.is_dir() and path.stat().st_mode & 0o077]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder whose name is short: sockets lie in it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        yield Path(made)


@pytest.fixture(scope="module")
def replicated(long_model: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of two replicas, and its address. Whatever cluster there is already, --ray alone starts its own."""
    options = ["--ray", "--replicas", "2", "--slots", "2", "--queue", "40"]
    options += ["--dtype", "float32", "--method", "ar"]
    environment = {"LANTERNPP_API_KEYS": KEY, "TMPDIR": str(folder), "RAY_ADDRESS": "127.0.0.1:1"}
    with serving(long_model, *options, **environment) as started:
        yield started


@pytest.fixture
def http(replicated: tuple[subprocess.Popen[str], str]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=replicated[1], headers=AUTHORIZED, timeout=SECONDS) as client:
        yield client


def test_two_replicas_answer_as_one_server(
    replicated: tuple[subprocess.Popen[str], str], http: httpx.Client, long_model: Path, folder: Path
) -> None:
    process, address = replicated
    pipe = load_tiny(long_model)
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=SECONDS) as client:
        for seed in range(4):  # some by either replica
            answer = client.images.generate(prompt="red tulip", n=2, extra_body={"seed": seed})
            for i, one in enumerate(answer.data):
                settings = one.lanternpp["settings"]
                expected = pipe("red tulip", seed=seed + i, **settings).images[0]
                picture = drawn(one.b64_json)
                assert picture.tobytes() == expected.tobytes()
        events = client.images.generate(prompt="a tulip", stream=True, partial_images=2)
        kinds = [event.type.split(".")[1] for event in events]
        assert kinds[-1] == "completed" and kinds.count("completed") == 1, kinds
    assert http.get("/healthz").json() == {"status": "ok", "running": 0, "queued": 0}
    assert len(descendants(process.pid, REPLICA)) == 2
    assert http.get("/").text.startswith("<!doctype html>")
    assert http.get("/page/setup").json()["methods"]
    assert http.post(IMAGES, json={"prompt": "a pine"}).status_code == 400
    for path in ("/-/routes", "/-/healthz", "/v1/models"):  # the first two would be Ray's
        assert httpx.get(address + path, timeout=SECONDS).status_code == 401
    assert http.get("/-/routes").status_code == 404
    # each replica's pictures in every answer, and all requests, also those that no replica saw
    figures = http.get("/metrics").text
    counted = re.findall(r'^lanternpp_pictures_total\{.*replica="\w+"\} (\S+)$', figures, re.M)
    limits = re.findall(r'^lanternpp_queue_limit\{replica="(\w+)"\} 40.0$', figures, re.M)
    assert len(set(limits)) == 2 and sum(map(float, counted)) == 9  # one replica may have drawn all
    assert figures.count("# TYPE lanternpp_pictures_total counter") == 1
    assert 'lanternpp_requests_total{route="/v1/models",status="401"} 1.0' in figures
    large = http.post(IMAGES, content=b"x" * (1 << 21))
    assert large.status_code == 413 and large.json()["error"]["code"] == "body_too_large"
    assert open_to_others(folder) == []
    assert httpx.post(address + IMAGES, json={"prompt": "a tulip"}, timeout=SECONDS).status_code == 401


def test_a_killed_replica_fails_only_its_requests_and_is_replaced(
    replicated: tuple[subprocess.Popen[str], str], http: httpx.Client
) -> None:
    """Then the server finishes what was accepted before a signal, and ends."""
    process, _ = replicated

    def answer(seed: int, stream: bool) -> int:
        """The status; 0 where a stream ended with an event of the error."""
        body = {"prompt": "red tulip", "n": 3, "seed": seed, "stream": stream}
        said = http.post(IMAGES, json=body)
        if said.status_code == 503:
            assert said.json()["error"]["code"] == "unavailable" and said.headers["Retry-After"]
        elif stream and "event: error" in said.text:
            last = said.text.rstrip().splitlines()[-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
            return 0
        elif stream:
            assert said.text.count("event: image_generation.completed") == 3
        return said.status_code

    before = descendants(process.pid, REPLICA)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(answer, seed, seed % 4 > 0) for seed in range(8)]
        wait_until(lambda: http.get("/healthz").json()["running"])
        os.kill(before[0], signal.SIGKILL)
        found = [each.result(SECONDS) for each in answers]
    assert len(before) == 2 and set(found) <= {0, 200, 503} and 200 in found and set(found) != {200}
    wait_until(lambda: set(descendants(process.pid, REPLICA)) - set(before))
    assert {answer(seed, stream=False) for seed in range(3)} == {200}
    assert set(os.read(process.stderr.fileno(), 1 << 16).splitlines()) == {b"a replica did not answer"}

    body = {"prompt": "red tulip", "n": 10, "seed": 1, "stream": True}
    with http.stream("POST", IMAGES, json=body) as late:
        finished = (line for line in late.iter_lines() if line == "event: image_generation.completed")
        next(finished)  # so the others were accepted
        process.send_signal(signal.SIGTERM)
        assert len(list(finished)) == 9
    assert process.wait(SECONDS) == 0
    assert process.stderr.read() == ""


class Broadcast:
    """A handle whose replicas answer a broadcast with these; without answers there is no replica."""

    def __init__(self, *answers: object):
        self.answers = answers

    def broadcast(self, method: str, seconds: float) -> Broadcast:
        if not self.answers:
            raise RuntimeError("no replica is up")
        return self

    def results(self, timeout_s: float, return_exceptions: bool) -> list[object]:
        assert return_exceptions  # so that the others are waited for
        return list(self.answers)


@pytest.mark.parametrize("answers", [(), (True, RuntimeError("the replica died"))])
def test_a_signal_ends_the_server_although_replicas_fail(answers: tuple[object, ...]) -> None:
    """The handle cannot take requests: those after the signal are answered without a replica."""
    replicas, bound, late = Replicas(Broadcast(*answers)), bind("127.0.0.1", 0), []
    close, address = replicas.close, url(bound)

    def closed(drain: bool, timeout: float) -> bool:
        finished = close(drain, timeout)
        if drain:
            late.append(httpx.post(address + IMAGES, json={"prompt": "a tulip"}, timeout=SECONDS))
        return finished

    replicas.close = closed
    assert run(replicas, replicas, bound, 5.0, lambda: signal.raise_signal(signal.SIGTERM)) is False
    assert late[0].status_code == 503 and late[0].json()["error"]["code"] == "shutting_down"
