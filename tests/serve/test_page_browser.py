"""The page in a real browser: a race from the prompt to the kept picture, on a desk and on a phone, by keyboard.

LANTERNPP_SCREENSHOT=FILE.png keeps the picture of the finished race.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from lanternpp.pipeline import Pipeline
from lanternpp.serve.app import create_app
from lanternpp.serve.batcher import Batcher
from lanternpp.serve.terms import Terms

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
QUIET += ("--disable-background-networking", "--disable-component-update")
PATIENCE = 400_000  # milliseconds; a busy machine is slow

needs_browser = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here; install Debian's package chromium")


@pytest.fixture(scope="module")
def batcher() -> Iterator[Batcher]:
    made = Batcher(Pipeline.from_pretrained("nature-128", tuned=False))
    yield made
    made.close(drain=False, timeout=30)


@contextmanager
def serving(batcher: Batcher, terms: Terms | None = None) -> Iterator[str]:
    """A server with the page; its address."""
    server = uvicorn.Server(uvicorn.Config(create_app(batcher, terms), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = server.force_exit = True
    thread.join(30)


@pytest.fixture(scope="module")
def address(batcher: Batcher) -> Iterator[str]:
    with serving(batcher) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    context.set_default_timeout(PATIENCE)
    opened = context.new_page()
    opened.asked = []  # type: ignore[attr-defined]
    opened.on("request", lambda request: opened.asked.append(request.url))  # type: ignore[attr-defined]
    opened.goto(address)
    expect(opened.locator("#race")).to_be_visible(timeout=PATIENCE)
    yield opened
    context.close()


def idle(batcher: Batcher, seconds: float = 120) -> bool:
    """Whether nothing is drawn or waits, soon."""
    until = time.monotonic() + seconds
    while batcher.stats.running + batcher.stats.queued and time.monotonic() < until:
        time.sleep(0.05)
    return not batcher.stats.running + batcher.stats.queued


@needs_browser
def test_both_pictures_of_a_race_are_seen_to_finish(page: Page, address: str, tmp_path: Path) -> None:
    page.get_by_label("Prompt").fill("a photo of a mountain covered in snow under a blue sky")
    page.get_by_label("Seed").fill("5")
    page.get_by_label("Prompt").press("Enter")
    growing = page.locator("#side .picture img[alt*=' of 256 codes']")
    expect(growing).to_be_visible(timeout=PATIENCE)
    early = page.locator("#base progress").evaluate("bar => bar.value / bar.max")
    assert early < 1
    expect(page.locator(".verdict.won")).to_be_visible(timeout=PATIENCE)

    assert page.locator(".panel progress").evaluate_all("bars => bars.map(bar => bar.value)") == [256, 256]
    assert page.locator(".panel .picture img").count() == 2
    assert page.locator("#base .figures dd").all_inner_texts()[1:] == ["1.00", "256"]
    assert float(page.locator("#side .figures dd").nth(1).inner_text()) > 2
    assert "lantern++" in page.locator(".verdict.won").inner_text()

    bands = page.locator("#side .bands")
    assert not bands.is_visible()
    page.get_by_label("Show passes").check()
    expect(bands).to_be_visible()
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    if wanted := os.environ.get("LANTERNPP_SCREENSHOT"):
        shutil.copy(tmp_path / "page.png", wanted)

    with page.expect_download() as download:
        page.locator("#gallery a").first.click()
    with Image.open(download.value.path()) as kept:
        assert (
            kept.text["prompt"] == "a photo of a mountain covered in snow under a blue sky"
            and kept.text["seed"] == "5"
        )
        assert json.loads(kept.text["settings"])["method"] == "lantern++"
        assert kept.size == (128, 128)
    shown = page.locator("#side .picture img").get_attribute("src") or ""
    with Image.open(io.BytesIO(base64.b64decode(shown.partition(",")[2]))) as seen:
        assert seen.size == (128, 128) and len(set(seen.convert("L").tobytes())) > 50

    hosts = {urlsplit(url).netloc for url in page.asked if url.startswith("http")}  # type: ignore[attr-defined]
    assert hosts == {urlsplit(address).netloc}


@needs_browser
def test_a_phone_scrolls_one_way_only(page: Page) -> None:
    page.set_viewport_size({"width": 375, "height": 812})
    page.get_by_text("More dials").click()
    page.get_by_text("Words that nature-128 knows").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    assert page.evaluate(
        "[...document.querySelectorAll('#body *')].every(e => e.getBoundingClientRect().right <= 376)"
    )
    boxes = [page.locator(f"#{name}").bounding_box() for name in ("order", "stage", "dials", "kept")]
    tops = [box["y"] for box in boxes if box]
    assert tops == sorted(tops) and len(tops) == 4


@needs_browser
def test_the_keyboard_reaches_everything_and_shows_where_it_is(page: Page) -> None:
    page.get_by_label("Prompt").focus()
    reached = []
    for _ in range(24):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "() => { const e = document.activeElement; return e.id || e.name || e.ariaLabel || e.tagName }"
            )
        )
        ring = page.evaluate(
            "() => { const s = getComputedStyle(document.activeElement); return s.outlineStyle + s.boxShadow }"
        )
        assert ring != "nonenone", f"nothing shows that {reached[-1]} has the focus"
    assert reached[:2] == ["race", "stop"]
    assert "dice" in reached
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('input, button, select, textarea')]
            .filter(e => e.offsetParent && !(e.labels?.length || e.ariaLabel || e.innerText?.trim() || e.title))
            .map(e => e.outerHTML)"""
    )
    assert not unnamed


@needs_browser
def test_a_method_brings_its_own_dials(page: Page) -> None:
    expect(page.locator("#dial-lam")).to_be_visible()
    page.get_by_label("Method").click()
    page.get_by_role("option", name="jacobi", exact=True).click()
    expect(page.locator("#dial-window")).to_be_visible()
    expect(page.locator("#dial-lam")).not_to_be_visible()


@needs_browser
def test_a_wrong_prompt_is_answered_in_a_sentence(page: Page) -> None:
    page.get_by_label("Prompt").fill("a photo of a bicycle {{value}} ${1+1}")
    page.locator("#race").click()
    expect(page.get_by_role("alert")).to_contain_text("names no subject this model knows", timeout=PATIENCE)
    expect(page.get_by_role("alert")).to_contain_text("bicycle {{value}} ${1+1}")


@needs_browser
def test_stop_and_a_closed_page_free_their_slots(page: Page, batcher: Batcher) -> None:
    page.get_by_label("4", exact=True).check()
    page.locator("#race").click()
    expect(page.locator("#base progress[value]:not([value='0'])")).to_be_visible(timeout=PATIENCE)
    page.locator("#stop").click()
    expect(page.locator(".verdict.stopped")).to_be_visible(timeout=PATIENCE)
    assert idle(batcher)
    page.locator("#race").click()
    expect(page.locator(".verdict.running")).to_be_visible(timeout=PATIENCE)
    page.close()
    assert idle(batcher)


@needs_browser
def test_with_keys_a_browser_asks_for_one_and_races(browser: Browser, batcher: Batcher) -> None:
    terms = Terms(hosts=["127.0.0.1"], keys=["correct-horse-battery"])
    with serving(batcher, terms) as address:
        assert httpx.get(address).status_code == 401
        known = {"username": "anyone", "password": "correct-horse-battery"}
        with browser.new_context(http_credentials=known) as context:
            context.set_default_timeout(PATIENCE)
            page = context.new_page()
            page.goto(address)
            page.get_by_label("Prompt").fill("a photo of a red tulip")
            page.get_by_label("Prompt").press("Enter")
            expect(page.locator(".verdict.won")).to_be_visible(timeout=PATIENCE)
            assert page.locator(".panel .picture img").count() == 2
            assert page.locator("#base .figures dd").nth(2).inner_text() == "256"


def test_the_page_shadows_no_route_and_opens_no_other(address: str) -> None:
    with httpx.Client(base_url=address, timeout=120) as client:
        assert client.get("/").text.lstrip().lower().startswith("<!doctype html>")
        assert client.get("/healthz").status_code == 200
        assert client.get("/v1/models").json()["object"] == "list"
        assert "lanternpp" in client.get("/metrics").text
        assert "/v1/images/generations" in client.get("/openapi.json").json()["paths"]
        for path in (
            "/gradio_api/file=/etc/hostname",
            "/gradio_api/proxy=https://example.com/",
            "/gradio_api/info",
            "/gradio_api/openapi.json",
            "/gradio_api/vibe-code",
            "/gradio_api/runs",
            "/monitoring",
            "/docs",
            "/v1/nothing",
            "/static/../style.css",
            "/static/..%2f..%2f..%2fpackage.json",
        ):
            answer = client.get(path)
            assert answer.status_code in (403, 404), path
            assert "Traceback" not in answer.text
        for path in (
            "/gradio_api/upload",
            "/gradio_api/run/predict",
            "/gradio_api/call/race",
            "/gradio_api/vibe-edit",
        ):
            assert client.post(path, json={"data": []}).status_code == 404, path
