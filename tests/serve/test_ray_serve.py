"""`lanternpp serve --ray`: two replicas behind one address draw what one server draws, and end as one."""

from __future__ import annotations

import base64
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from helpers.processes import descendants
from helpers.served import IMAGES, KEY
from PIL import Image

from lanternpp import Pipeline
from lanternpp.cli import main

REPLICA = "ray::ServeReplica"


def open_to_others(folder: Path) -> list[Path]:
    """What others of this machine can enter, of what was made for this user alone."""
    assert list(folder.glob("*/ray/session_*"))
    return [path for path in folder.iterdir() if path.is_dir() and path.stat().st_mode & 0o077]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose name is short: sockets lie in it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        yield Path(made)


@contextmanager
def serving(model: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of two replicas, and its address."""
    options = ["--ray", "--replicas", "2", "--port", "0", "--slots", "2", "--queue", "40"]
    command = [sys.executable, "-c", "from lanternpp.cli import main; main()", "serve", *options]
    process = subprocess.Popen(
        [*command, "--model", str(model), "--device", "cpu", "--dtype", "float32", "--method", "ar"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # whatever cluster there is already, --ray alone starts its own
        env={**os.environ, "LANTERNPP_API_KEYS": KEY, "TMPDIR": str(folder), "RAY_ADDRESS": "127.0.0.1:1"},
    )
    try:
        line = process.stdout.readline()
        assert "2 replicas of 2 slots" in line, process.communicate()
        yield process, line.split(": ")[0]
    finally:
        process.kill()
        process.communicate()


def test_two_replicas_answer_as_one_server(model: Path, pipe: Pipeline, folder: Path) -> None:
    with serving(model, folder) as (process, address):
        with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=300) as client:
            for seed in range(4):  # some by either replica
                answer = client.images.generate(prompt="red tulip", n=2, extra_body={"seed": seed})
                for i, one in enumerate(answer.data):
                    settings = one.lanternpp["settings"]
                    expected = pipe("red tulip", seed=seed + i, **settings).images[0]
                    drawn = Image.open(io.BytesIO(base64.b64decode(one.b64_json)))
                    assert drawn.tobytes() == expected.tobytes()
            events = client.images.generate(prompt="a tulip", stream=True, partial_images=2)
            kinds = [event.type.split(".")[1] for event in events]
            assert kinds[-1] == "completed" and kinds.count("completed") == 1, kinds
        authorized = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=address, headers=authorized, timeout=300) as http:
            assert http.get("/healthz").json() == {
                "status": "ok",
                "running": 0,
                "queued": 0,
            }
            assert http.get("/").text.startswith("<!doctype html>")
            assert http.get("/page/setup").json()["methods"]
            assert http.post(IMAGES, json={"prompt": "a pine"}).status_code == 400
            for path in ("/-/routes", "/-/healthz", "/v1/models"):  # the first two would be Ray's
                assert httpx.get(address + path, timeout=300).status_code == 401
            assert http.get("/-/routes").status_code == 404
            large = http.post(IMAGES, content=b"x" * (1 << 21))
            assert large.status_code == 413 and large.json()["error"]["code"] == "body_too_large"
            assert open_to_others(folder) == []
            assert httpx.post(address + IMAGES, json={"prompt": "a tulip"}, timeout=300).status_code == 401
            body = {"prompt": "red tulip", "n": 10, "seed": 1, "stream": True}
            with http.stream("POST", IMAGES, json=body) as late:
                finished = (line for line in late.iter_lines() if line == "event: image_generation.completed")
                next(finished)  # so the others were accepted
                process.send_signal(signal.SIGTERM)
                assert len(list(finished)) == 9
        assert process.wait(120) == 0
        assert process.stderr.read() == ""


def test_a_killed_replica_costs_its_requests_alone_and_is_replaced(long_model: Path, folder: Path) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}

    def answer(http: httpx.Client, seed: int, stream: bool) -> int:
        """The status; 0 where the connection ended in the middle of a stream."""
        body = {"prompt": "red tulip", "n": 3, "seed": seed, "stream": stream}
        try:
            with http.stream("POST", IMAGES, json=body) as answered:
                answered.read()
        except httpx.RemoteProtocolError:
            return 0
        if answered.status_code == 503:
            assert answered.json()["error"]["code"] == "unavailable" and answered.headers["Retry-After"]
        return answered.status_code

    with (
        serving(long_model, folder) as (process, address),
        httpx.Client(base_url=address, headers=headers, timeout=300) as http,
        ThreadPoolExecutor(8) as pool,
    ):
        before = descendants(process.pid, REPLICA)
        answers = [pool.submit(answer, http, seed, seed % 2 == 0) for seed in range(8)]
        while len(descendants(process.pid, REPLICA)) < 2 or http.get("/healthz").json()["running"] < 1:
            time.sleep(0.01)
        os.kill(before[0], signal.SIGKILL)
        found = [each.result() for each in answers]
        assert len(before) == 2 and set(found) <= {0, 200, 503} and 200 in found and set(found) != {200}
        while len(set(descendants(process.pid, REPLICA)) - set(before)) < 1:
            time.sleep(0.1)
        assert {answer(http, seed, stream=False) for seed in range(8)} == {200}
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


def test_replicas_are_of_ray(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", "--replicas", "2"])
    assert end.value.code == 2 and "--replicas 2 needs Ray; add --ray" in capsys.readouterr().err
