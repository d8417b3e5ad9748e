"""`lanternpp serve` as a process: its start, wrong options, its end."""

from __future__ import annotations

import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from helpers.processes import SECONDS, wait_until
from helpers.served import (
    AUTHORIZED,
    IMAGES,
    KEY,
    batcher_of,
    connect,
    make_ticket,
    read_all,
    request,
    serving,
    submit,
)

from lanternpp.cli import main
from lanternpp.serve.app import create_app
from lanternpp.serve.server import bind, run


def test_sigterm_under_load_finishes_accepted_requests_and_rejects_new_ones(long_model):
    """Accepted: 200. After the signal: 503. The end: status 0. Its keys come from the environment."""
    options = ("--slots", "1", "--queue", "40", "--method", "ar")
    with serving(long_model, *options, LANTERNPP_API_KEYS=KEY) as (process, address):
        stranger = httpx.get(f"{address}/v1/models", timeout=300)
        assert stranger.status_code == 401 and "server" not in stranger.headers
        known: Any = {"headers": AUTHORIZED, "timeout": 300}
        with httpx.Client(base_url=address, **known) as http, ThreadPoolExecutor(4) as pool:
            http.post(IMAGES, json={"prompt": "tulip"}).raise_for_status()
            body = {"prompt": "red tulip", "n": 4, "seed": 1}
            answers = [pool.submit(httpx.post, address + IMAGES, json=body, **known) for _ in range(4)]
            wait_until(lambda: waiting(http) > 8)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: http.get("/healthz").status_code == 503)
            late = http.post(IMAGES, json={"prompt": "tulip"})
            assert late.status_code == 503 and late.json()["error"]["code"] == "shutting_down"
            assert late.headers["connection"] == "close"
            done = [answer.result(SECONDS) for answer in answers]
            accepted = [answer for answer in done if answer.status_code == 200]
            assert len(accepted) >= 3, "more than two of four pictures each were in the queue"
            assert all(len(answer.json()["data"]) == 4 for answer in accepted)
            assert all(answer.status_code in (200, 503) for answer in done), "the last may have come too late"
        assert process.wait(120) == 0
        assert process.stderr.read() == ""


def waiting(http: httpx.Client) -> int:
    """Pictures in the queue."""
    return http.get("/healthz").json()["queued"]


@pytest.mark.parametrize("options", [(), ("--drain", "0")])
def test_a_second_signal_or_the_drain_time_answers_every_open_request_with_503(long_model, options):
    """Requests that wait, are drawn, stream or are incomplete; one line is logged."""
    with serving(long_model, "--slots", "1", "--method", "ar", *options) as (process, address):
        with (
            ThreadPoolExecutor(3) as pool,
            httpx.Client(base_url=address, timeout=300) as http,
            connect(address) as half,
        ):
            half.sendall(request()[:-3])
            body = {"prompt": "red tulip", "n": 10}
            complete = [pool.submit(httpx.post, address + IMAGES, json=body, timeout=300) for _ in range(2)]
            streamed = pool.submit(httpx.post, address + IMAGES, json=body | {"stream": True}, timeout=300)
            wait_until(lambda: waiting(http) > 20)  # so all three were accepted
            process.send_signal(signal.SIGINT)
            if not options:
                wait_until(lambda: http.get("/healthz").status_code == 503)
                process.send_signal(signal.SIGHUP)
            for answer in (one.result(SECONDS) for one in complete):
                assert answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"
            assert '"code":"shutting_down"' in streamed.result(SECONDS).text
            said = read_all(half)
            assert said.startswith(b"HTTP/1.1 503 ") and b'"code":"shutting_down"' in said
        assert process.wait(120) == 0
        assert process.stderr.read() == "lanternpp: serve: not all pictures were finished\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--slots", "6"], "power of two"),
        (["--queue", "0"], "--queue 0"),
        (["--batch-size", "4"], "use --slots"),
        (["--method", "ar", "--lambda", "2"], "would change nothing"),
        (["--api-key", "short"], "16 or more"),
        (["--api-key-file", "nowhere"], "cannot be read"),
        (["--host", "no.such.host.invalid", "--no-key"], "no address of this machine"),
        (["--allow-host", "https://draw.example"], "--allow-host 'https://draw.example' is no name alone"),
        (["--allow-host", "draw.example:443"], "is no name alone"),
        (["--deadline", "1e308"], "at most 86,400"),
        (["--drain", "1e308"], "--drain 1e+308"),
        (["--replicas", "2"], "--replicas 2 needs Ray; add --ray"),
        (["--host", "0.0.0.0"], "there is no API key"),
        ([], "of 127.0.0.1 cannot be used"),
    ],
)
def test_wrong_options_are_rejected(model, capsys, monkeypatch, options, said):
    monkeypatch.delenv("LANTERNPP_API_KEYS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = "0" if options else str(busy.getsockname()[1])
        with pytest.raises(SystemExit) as end:
            main(["serve", "--no-page", "--port", port, "--model", str(model), *options])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and err.count("\n") == 1 and said in err, err


def test_an_idle_server_that_is_interrupted_twice_ends_normally(pipe):
    with batcher_of(pipe, slots=1, page=False) as batcher:

        def ready() -> None:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

        assert run(create_app(batcher), batcher, bind("127.0.0.1", 0), 5.0, ready)


def test_a_server_whose_batcher_breaks_ends_with_its_error(pipe):
    """So that whatever supervises the process can restart it."""
    with batcher_of(pipe, slots=1, page=False) as batcher:

        def ready() -> None:
            batcher._expire = None
            submit(batcher, make_ticket())

        with pytest.raises(TypeError, match="not callable"):
            run(create_app(batcher), batcher, bind("127.0.0.1", 0), 5.0, ready)
