"""The HTTP API as clients meet it: OpenAI's own client, plain requests, and one that goes away."""

from __future__ import annotations

import gc
import json
import socket

import httpx
import openai
import pytest
from helpers.latents import write_diffusion
from helpers.processes import wait_until
from helpers.served import (
    AUTHORIZED,
    IMAGES,
    KEY,
    PacedPipe,
    app_of,
    client_of,
    connect,
    drawn,
    load_tiny,
    request,
)

from lanternpp import Pipeline
from lanternpp.errors import InputError, ModelError
from lanternpp.serve import streaming
from lanternpp.serve.config import ServerConfig
from lanternpp.serve.error_responses import response_for
from lanternpp.serve.request_mapping import half_drawn


@pytest.fixture(scope="module")
def server(pipe: Pipeline):
    """A server of the tiny model; its address."""
    config = ServerConfig(hosts=["127.0.0.1"], prompt_limit=50, body_limit=4000)
    with app_of(pipe, config, slots=4) as (_, address):
        yield address


@pytest.fixture
def http(server: str):
    with httpx.Client(base_url=server, timeout=300) as made:
        yield made


def error_of(answer: httpx.Response) -> tuple[int, str]:
    """The status and message of an error in OpenAI's format."""
    assert set(answer.json()) == {"error"}
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return answer.status_code, answer.json()["error"]["message"]


def test_the_openai_client_draws(client, pipe):
    answer = client.images.generate(
        prompt="a red tulip", model=client.models.list().data[0].id, n=3, extra_body={"seed": 5}
    )
    assert len(answer.data) == 3 and answer.output_format == "png" and answer.size == "16x16"
    for i, one in enumerate(answer.data):
        facts = one.lanternpp
        expected = pipe("a red tulip", seed=5 + i, **facts["settings"])
        picture = drawn(one.b64_json)
        assert picture.tobytes() == expected.images[0].tobytes()
        where = {"device": "cpu", "dtype": "float32", "tuned": False}  # as in the command line's files
        assert json.loads(picture.info["settings"]) == facts["settings"] | where
        assert picture.info["seed"] == str(5 + i)
        assert facts["accepted_per_pass"] == expected.stats.accepted_per_pass
    assert answer.usage.output_tokens == 3 * pipe.target.length


def test_the_openai_client_streams(pipe, monkeypatch):
    """The server goes on from a share of the picture when the client has seen it; events of progress do not hide it."""
    monkeypatch.setattr(streaming, "CHECK_INTERVAL", 0.0)  # look at every step
    paced, quarter = PacedPipe(pipe), pipe.target.length // 4
    more = {"seed": 5, "method": "ar", "progress": True}
    events = []
    with app_of(paced) as (_, address), openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        for event in client.images.generate(
            prompt="a red tulip", stream=True, partial_images=3, extra_body=more
        ):
            if event.type.endswith("accepted"):
                paced.allow(quarter - 1)  # the prefill decides the first code
            elif event.type.endswith(("partial_image", "completed")):
                events.append(event)
                paced.allow(quarter)
    kinds = [event.type.removeprefix("image_generation.") for event in events]
    assert kinds == ["partial_image"] * 3 + ["completed"]
    assert [event.partial_image_index for event in events[:-1]] == [0, 1, 2]
    expected = pipe("a red tulip", seed=5, **events[-1].lanternpp["settings"])
    assert drawn(events[-1].b64_json).tobytes() == expected.images[0].tobytes()
    for i, event in enumerate(events[:-1]):
        half = half_drawn(pipe.target, expected.codes[0, : quarter * (i + 1)])
        assert drawn(event.b64_json).tobytes() == half.tobytes()
    first = drawn(events[0].b64_json)
    assert first.getpixel((15, 15)) == (128, 128, 128) != drawn(events[-1].b64_json).getpixel((15, 15))


def test_the_rule_is_a_field_of_the_request(tmp_path):
    pipe = load_tiny(write_diffusion(tmp_path))
    fields = {"method": "eagle", "accept": "cspd"}
    with client_of(pipe) as latents:
        answer = latents.post(IMAGES, json={"prompt": "a red tulip", "seed": 3, **fields})
        assert answer.status_code == 200, answer.text
        (one,) = answer.json()["data"]
        assert one["lanternpp"]["settings"]["accept"] == "cspd"
        expected = pipe("a red tulip", seed=3, **fields).images[0]
        assert drawn(one["b64_json"]).tobytes() == expected.tobytes()
        lacks = f"method 'independent' needs a smaller target, which {pipe.name} lacks; use another method"
        for method, said in (("independent", lacks), ("jacobi", "or method ar")):
            status, message = error_of(latents.post(IMAGES, json={"prompt": "a red tulip", "method": method}))
            assert status == 400 and message.endswith(said)


@pytest.mark.parametrize(("form", "kind"), [("png", "PNG"), ("jpeg", "JPEG"), ("webp", "WEBP")])
def test_output_formats(client, form, kind):
    answer = client.images.generate(prompt="a tulip", response_format="url", output_format=form)
    head, _, data = answer.data[0].url.partition(",")
    assert head == f"data:image/{form};base64" and drawn(data).format == kind


def test_openai_hints_are_ignored_and_unsupported_fields_are_rejected(http):
    hints = {"background": "opaque", "quality": "high", "style": "vivid", "complexity": "low", "user": "u"}
    hints |= {"moderation": "low", "input_fidelity": "high", "safety_identifier": "s"}
    first, second = (http.post(IMAGES, json={"prompt": "tulip", "seed": 3, **more}) for more in ({}, hints))
    same = [answer.json()["data"][0]["b64_json"] for answer in (first, second)]
    assert same[0] == same[1]
    for name, value in {"svg": {"model": "m"}, "frame_count": 4, "background": "transparent"}.items():
        refused = http.post(IMAGES, json={"prompt": "tulip", name: value})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == name


def test_a_random_seed_is_reported(client):
    first, second = (client.images.generate(prompt="a tulip").data[0].lanternpp["seed"] for _ in range(2))
    assert first != second


WRONG = {
    "unknown word": ({"prompt": "a spaceship"}, 400, "names no subject"),
    "empty": ({"prompt": "  "}, 400, "empty"),
    "no prompt": ({}, 400, "'prompt' is missing"),
    "prompt": ({"prompt": "tulip " * 10}, 400, "takes at most 50"),
    "n": ({"prompt": "tulip", "n": 11}, 400, "n 11"),
    "seed": ({"prompt": "tulip", "seed": 2**62, "n": 2}, 400, f"with n 2 use 0 to {2**62 - 1}"),
    "a dial in words": ({"prompt": "tulip", "top_k": "3"}, 400, "top_k '3'"),
    "a deadline without end": ({"prompt": "tulip", "deadline": 1e308}, 400, "deadline 1e+308"),
    "size": ({"prompt": "tulip", "size": "32x32"}, 400, "use '16x16'"),
    "lam": ({"prompt": "tulip", "method": "eagle", "lam": 2}, 400, "lam 2.0 would change nothing"),
    "top_k": ({"prompt": "tulip", "top_k": 999}, 400, "top_k 999 exceeds the 32 codes"),
    "quoted": ({"prompt": "a zebra -method"}, 400, "'a zebra -method'"),
    "model": ({"prompt": "tulip", "model": "dall-e-3"}, 404, "use 'tiny'"),
    "method": ({"prompt": "tulip", "method": "magic"}, 400, "known: ar"),
    "no method": ({"prompt": "tulip", "method": ""}, 400, "method '' is unknown"),
    "infinite": ('{"prompt": "tulip", "cfg": Infinity}', 400, "cfg"),
    "a tree's class": ({"prompt": "tulip", "tree": "os:system"}, 400, "is unknown; known: eagle-25"),
    "a field": ({"prompt": "tulip", "proposer": "tree"}, 400, "'proposer' is unknown"),
    "an option's name": ({"prompt": "tulip", "lambda": 2}, 400, "'lambda' is called 'lam' here"),
    "half a pair": ('{"prompt": "\\ud800 tulip"}', 400, "prompt"),
    "no JSON": ("{", 400, "not JSON"),
    "a list": ("[]", 400, "send a JSON object as Content-Type: application/json"),
    "nested": ("[" * 3000, 400, "the body is not JSON: "),
    "Latin-1": ('{"prompt": "\xe9"}'.encode("latin-1"), 400, "the body is not JSON: 'utf-8' codec"),
    "progress": ({"prompt": "tulip", "progress": True}, 400, "set stream to true"),
    "a url of a stream": ({"prompt": "tulip", "stream": True, "response_format": "url"}, 400, "b64_json"),
    "a huge draft": (
        {"prompt": "tulip", "method": "jacobi", "window": 256, "window_rows": 3},
        400,
        "768 draft codes",
    ),
    "cspd": ({"prompt": "tulip", "accept": "cspd", "method": "eagle"}, 400, ": use accept exact"),
    "accept": ({"prompt": "tulip", "accept": "os:system"}, 400, "accept 'os:system' is unknown"),
    "large": ({"prompt": "tulip", "user": "x" * 5000}, 413, "4000 bytes"),
    "late": ({"prompt": "tulip", "deadline": 1e-9}, 504, "not finished"),
}


@pytest.mark.parametrize("name", WRONG)
def test_every_wrong_request_has_a_message_in_one_sentence(http, name):
    body, status, said = WRONG[name]
    content = json.dumps(body) if isinstance(body, dict) else body
    answer = http.post(IMAGES, content=content, headers={"content-type": "application/json"})
    got, sentence = error_of(answer)
    assert got == status and said in sentence and "\n" not in sentence and "Traceback" not in sentence
    # OpenAI's client reads it.
    assert answer.headers.get("x-should-retry") == ("false" if name == "late" else None)
    assert "--" not in sentence  # nor an option of the command line
    text = http.get("/metrics").text
    assert 'outcome="failed"' not in text and (name != "late" or 'outcome="expired"' in text)
    assert not isinstance(body, dict) or name not in body or answer.json()["error"]["param"] == name


def test_options_of_the_command_line_become_fields_in_messages():
    said = response_for(
        InputError("nu 1 is wrong; take lam (--lambda), or a chain (as with --tree), not '--tree lambda'")
    )
    assert json.loads(said.body)["error"]["message"] == (
        "nu 1 is wrong; take lam, or a chain (as with tree), not '--tree lambda'"
    )


def test_an_error_of_the_model_is_status_500():
    assert response_for(InputError("no")).status_code == 400
    assert response_for(ModelError("no finite numbers")).status_code == 500


def test_a_chunked_body_is_limited_too(http):
    chunks = (b"x" * 1000 for _ in range(10))
    assert error_of(http.post(IMAGES, content=chunks, headers={"content-type": "application/json"}))[0] == 413


def test_a_client_that_disconnects_within_its_body_is_status_499(server, http):
    with connect(server) as line:
        line.sendall(request()[:-3])
    wait_until(lambda: f'{{route="{IMAGES}",status="499"}}' in http.get("/metrics").text)


def test_other_paths_and_methods(http):
    assert error_of(http.get("/v1/models/other"))[0] == 404
    assert error_of(http.get("/etc/passwd"))[0] == 404
    assert error_of(http.get(IMAGES))[0] == 405
    for path in ("/healthz", "/v1/models", "/metrics"):
        assert http.head(path).status_code == 200 and int(http.head(path).headers["content-length"]) > 0
    # no preflight
    form = http.post(IMAGES, content='{"prompt": "tulip"}', headers={"content-type": "text/plain"})
    assert error_of(form)[0] == 400


@pytest.fixture(scope="module")
def named(pipe: Pipeline):
    """A client of a server with several names."""
    names = ("127.0.0.1", "::1", "draw.example", "*.flowers.example")
    with client_of(pipe, ServerConfig(hosts=names)) as made:
        yield made


HOSTS = {"127.0.0.1": 200, "[::1]:8000": 200, "Draw.Example:443": 200, "eu.flowers.example": 200}
HOSTS |= {"draw.example.": 200}
HOSTS |= dict.fromkeys(
    ("flowers.example", "draw.example.org", "127.0.0.1.evil.example", "[::1", "", "x" * 300), 400
)


@pytest.mark.parametrize(("host", "status"), HOSTS.items())
def test_only_host_names_of_the_server_are_answered(named, host, status):
    answer = named.get("/healthz", headers={"host": host})
    assert answer.status_code == status
    assert status == 200 or "--allow-host NAME" in error_of(answer)[1]


PAGES = {  # headers that a browser sends to draw.example, and whether they are answered
    "its own page": ({"origin": "http://draw.example", "sec-fetch-site": "same-origin"}, 200),
    "its own page behind TLS": ({"origin": "https://draw.example"}, 200),
    "its own page behind TLS, with a port": (
        {"host": "draw.example:443", "origin": "https://draw.example"},
        200,
    ),
    "a link": ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),
    "another port": ({"origin": "https://draw.example:8443"}, 403),
    "another of its names": ({"origin": "http://127.0.0.1"}, 403),
    "another site": ({"origin": "https://evil.example"}, 403),
    "a sandboxed frame": ({"origin": "null"}, 403),
    "one of two": ({"origin": "http://draw.example, http://evil.example"}, 403),
    "an image of another site": ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
    "an image of another port": ({"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}, 403),
}


@pytest.mark.parametrize("name", PAGES)
def test_requests_of_pages_of_other_sites_are_rejected(named, name):
    headers, status = PAGES[name]
    assert named.get("/v1/models", headers={"host": "draw.example", **headers}).status_code == status
    for method, path in (("POST", IMAGES), ("GET", "/healthz"), ("OPTIONS", IMAGES)) if status == 403 else ():
        body = {"json": {"prompt": "tulip"}} if method == "POST" else {}
        answer = named.request(method, path, headers={"host": "draw.example", **headers}, **body)
        assert error_of(answer)[0] == 403, path
        assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_a_request_line_with_a_whole_url_is_answered_as_its_path(server):
    for url, status in (
        ("http://127.0.0.1/healthz", 200),
        ("http://127.0.0.1", 404),
        ("http://[x/healthz", 200),
    ):
        with connect(server) as line:
            line.sendall(f"GET {url} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            assert line.recv(100).startswith(f"HTTP/1.1 {status}".encode()), url


def test_answers_have_security_headers(http):
    headers = http.get("/v1/models").headers
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
    assert "default-src 'none'" in headers["content-security-policy"]


def test_health_and_metrics(http, client):
    assert http.get("/healthz").json() == {"status": "ok", "running": 0, "queued": 0}
    client.images.generate(prompt="a tulip")
    text = http.get("/metrics").text
    for figure in (
        'lanternpp_requests_total{route="/v1/images/generations",status="200"}',
        'lanternpp_pictures_total{method="lantern++",outcome="drawn"}',
        "lanternpp_queue_length 0.0",
        "lanternpp_running 0.0",
        "lanternpp_batch_size_sum",
        "lanternpp_codes_per_pass_sum",
        "lanternpp_picture_seconds_sum",
        "lanternpp_waiting_seconds_sum",
    ):
        assert figure in text


def test_api_keys(pipe):
    with app_of(pipe, ServerConfig(keys=["another-key-of-ours", KEY])) as (_, address):
        with httpx.Client(base_url=address, timeout=300) as http:
            assert http.get("/healthz").status_code == 200
            for path in ("/v1/models", "/metrics", "/openapi.json", "/"):
                for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic ???"}):
                    answer = http.get(path, headers=headers)
                    assert error_of(answer)[0] == 401 and "www-authenticate" in answer.headers
            assert http.get("/v1/models", headers=AUTHORIZED).status_code == 200
            # browsers send these by themselves
            assert http.get("/metrics", auth=("anyone", KEY)).status_code == 401
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{address}/v1", api_key="sk-no").models.list()
        assert openai.OpenAI(base_url=f"{address}/v1", api_key=KEY).models.list().data


@pytest.fixture
def busy(slow: PacedPipe):
    """An app over engines that step when they are allowed to: one slot, two places in the queue."""
    with app_of(slow, ServerConfig("ar"), slots=1, queue=2) as (batcher, address):
        yield slow, batcher, address
        slow.allow()


def ask(address: str, **fields: object) -> socket.socket:
    """A request whose answer is not awaited."""
    line = connect(address)
    line.sendall(request(**fields))
    return line


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_frees_its_slot_within_a_step_and_its_place_in_the_queue(
    busy, stream, caplog
):
    pipe, batcher, address = busy
    first = ask(address, stream=stream, seed=1)
    wait_until(lambda: pipe.admitted == [1])
    with first, ask(address, stream=stream, seed=2):
        wait_until(lambda: batcher.queued == 1)
        other = ask(address, seed=3)
        wait_until(lambda: batcher.queued == 2)
        tickets = sorted(batcher._tickets, key=lambda ticket: ticket.seed)
    wait_until(lambda: [ticket.done() for ticket in tickets] == [True, True, False])
    pipe.allow(1)  # the step that was under way
    wait_until(lambda: pipe.admitted == [1, 3] and batcher.queued == 0)
    assert pipe.dropped == [1]
    pipe.allow()
    assert other.recv(100).startswith(b"HTTP/1.1 200")
    other.close()
    tickets.clear()
    gc.collect()
    assert not caplog.text  # a disconnected client is not logged


def test_a_full_queue_is_status_429_and_accepts_all_pictures_of_a_request_or_none(busy):
    pipe, batcher, address = busy

    def answer(**fields: object) -> tuple[httpx.Response, int, str]:
        said = httpx.post(address + IMAGES, json={"prompt": "tulip", **fields}, timeout=120)
        return said, *error_of(said)

    lines = [ask(address, seed=1)]
    # it leaves the queue after it has its slot
    wait_until(lambda: pipe.admitted == [1] and not batcher.queued)
    for _ in range(3):
        assert answer(prompt="a spaceship")[1] == 400  # and gives its place back
    lines.append(ask(address, seed=2))
    wait_until(lambda: batcher.queued == 1)
    assert answer(n=3)[1:] == (400, "3 pictures do not fit the queue of 2; ask for fewer")
    full, status, message = answer(n=2)
    assert status == 429 and "has 1 picture" in message and int(full.headers["retry-after"]) >= 1
    assert batcher.queued == 1
    pipe.allow()
    for line in lines:
        assert line.recv(100).startswith(b"HTTP/1.1 200")
        line.close()


def test_an_internal_error_is_logged_and_does_not_affect_other_requests(busy, caplog):
    pipe, _, address = busy
    pipe.allow()
    for seed, why in ((666, "out of memory"), (13, "a step broke")):
        answer = httpx.post(address + IMAGES, json={"prompt": "tulip", "seed": seed}, timeout=120)
        assert error_of(answer) == (500, "the server failed at this request; its log has the error")
        assert why in caplog.text
        assert httpx.post(address + IMAGES, json={"prompt": "tulip"}, timeout=120).status_code == 200
