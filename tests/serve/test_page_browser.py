"""The page in a real browser: a race from the prompt to the kept picture, on a desk and on a phone, by keyboard; and
what the pages of other sites can do to the server through that browser.

LANTERNPP_SCREENSHOT=FILE.png keeps the picture of the finished race.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import pytest
from helpers.processes import wait_until
from helpers.served import KEY, PacedPipe, app_of, listening
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright
from starlette.responses import HTMLResponse

from lanternpp.api.pipeline import Pipeline
from lanternpp.serve.batcher import Batcher
from lanternpp.serve.config import ServerConfig

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
QUIET += ("--disable-background-networking", "--disable-component-update")
QUIET += ("--host-resolver-rules=MAP *.test 127.0.0.1",)
TIMEOUT = 150_000  # milliseconds; a busy machine is slow
MOUNTAIN = "a photo of a mountain covered in snow under a blue sky"
CONTRAST = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => numbers(colour).slice(0, 3)
    .map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4))
    .reduce((all, c, i) => all + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if ((numbers(colour)[3] ?? 1) === 1) return colour;
    }
    return "rgb(255 255 255)";
  };
  const texts = [...document.querySelectorAll("body *")].filter((e) =>
    e.checkVisibility() && !e.disabled && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()));
  return texts.map((e) => {
    const [one, two] = [light(getComputedStyle(e).color), light(behind(e))];
    return [(Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05), e.outerHTML.slice(0, 80)];
  });
}"""
NAMES = """() => [...document.querySelectorAll('input, button, select, a, summary')]
    .filter(e => e.checkVisibility())
    .map(e => [e.tagName, e.type, e.ariaLabel || [...(e.labels ?? [])].map(l => l.innerText).join(' ') || e.innerText.trim()])"""

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here; install Debian's package chromium")


@pytest.fixture(scope="module")
def nature() -> Pipeline:
    return Pipeline.from_pretrained("nature-128", tuned=False)


@pytest.fixture(scope="module")
def served(nature: Pipeline) -> Iterator[tuple[Batcher, str]]:
    with app_of(nature, page=True) as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield started
        started.close()


@contextmanager
def opened(browser: Browser, address: str, **options: object) -> Iterator[Page]:
    """A page in a context of its own. What breaks in it, its content policy above all, breaks the test."""
    with browser.new_context(viewport={"width": 1280, "height": 900}, **options) as context:
        context.set_default_timeout(TIMEOUT)
        page = context.new_page()
        wrong = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda line: wrong.append(line.text) if "Policy" in line.text else None)
        page.requested = []
        page.on("request", lambda request: page.requested.append(request.url))
        page.goto(address)
        yield page
        assert not wrong


@pytest.fixture
def page(browser: Browser, served: tuple[Batcher, str]) -> Iterator[Page]:
    with opened(browser, served[1]) as page:
        expect(page.locator("#race")).to_be_visible(timeout=TIMEOUT)
        yield page


def wait_until_idle(batcher: Batcher) -> None:
    """Wait until nothing is drawn and nothing waits."""
    wait_until(lambda: not batcher.running + batcher.queued)


def height(page: Page) -> int:
    return page.evaluate("document.documentElement.scrollHeight")


def test_a_race_shows_both_pictures_and_figures_which_can_be_downloaded(
    browser: Browser, nature: Pipeline
) -> None:
    paced = PacedPipe(nature)
    with app_of(paced, page=True) as (_, address), opened(browser, address, accept_downloads=True) as page:
        expect(page.locator("#race")).to_be_visible(timeout=TIMEOUT)
        before = height(page)
        page.get_by_label("Prompt").fill(MOUNTAIN)
        page.get_by_label("Seed").fill("5")
        page.get_by_label("Prompt").press("Enter")
        assert height(page) == before, "nothing jumps when a race begins"
        bars = page.locator(".panel progress")
        for _ in range(200):
            if all(bars.evaluate_all("bars => bars.map(bar => bar.value)")):
                break
            paced.allow(1)
            page.wait_for_timeout(100)
        # The engines do not step, so the unfinished pictures stay.
        for side in ("base", "side"):
            unfinished = page.locator(f"#{side} .picture img[alt*=' of 256 codes']")
            expect(unfinished).to_be_visible(timeout=TIMEOUT)
        assert height(page) == before
        paced.allow()
        expect(page.locator("#board.won")).to_be_visible(timeout=TIMEOUT)
        assert page.locator(".panel progress").evaluate_all("bars => bars.map(bar => bar.value)") == [
            256,
            256,
        ]
        assert page.locator(".panel .picture img").count() == 2
        assert page.locator("#base .figures dd").all_inner_texts()[1:3] == ["1.00", "256"]
        assert float(page.locator("#side .figures dd").nth(1).inner_text()) > 2
        assert "lantern++" in page.get_by_role("status").first.inner_text()

        bands = page.locator("#side .bands")
        assert not bands.is_visible()
        page.get_by_label("Show passes").check()
        expect(bands).to_be_visible()
        # the prefill decides a code
        assert bands.locator(".tint0").get_attribute("d").startswith("M0 0h1v1h-1z")
        if screenshot := os.environ.get("LANTERNPP_SCREENSHOT"):
            page.screenshot(path=screenshot, full_page=True)

        assert page.locator("#gallery li").count() == 2
        with page.expect_download() as download:
            page.get_by_role("link", name=f"{MOUNTAIN}, lantern++, seed 5").click()
        name = "a-photo-of-a-mountain-covered-in-snow-under-a-bl-lanternpp-5.png"
        assert download.value.suggested_filename == name
        with Image.open(download.value.path()) as kept:
            assert (kept.text["prompt"], kept.text["seed"], kept.size) == (MOUNTAIN, "5", (128, 128))
            assert json.loads(kept.text["settings"])["method"] == "lantern++"
            assert len(set(kept.convert("L").tobytes())) > 50

        hosts = {urlsplit(url).netloc for url in page.requested if url.startswith("http")}
        assert hosts == {urlsplit(address).netloc}


def test_a_phone_scrolls_only_vertically(page: Page) -> None:
    page.set_viewport_size({"width": 375, "height": 812})
    page.get_by_text("More dials").click()
    page.get_by_text("Words that nature-128 knows").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    assert page.evaluate(
        "[...document.querySelectorAll('#body *')].every(e => e.getBoundingClientRect().right <= 376)"
    )
    boxes = [page.locator(f"#{name}").bounding_box() for name in ("prompting", "stage", "dials", "kept")]
    tops = [box["y"] for box in boxes if box]
    assert tops == sorted(tops) and len(tops) == 4


def test_the_keyboard_reaches_everything_with_a_visible_focus(page: Page) -> None:
    page.get_by_text("More dials").click()
    page.get_by_label("Prompt").focus()
    reached = []
    while "words" not in reached:
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("document.activeElement.id || document.activeElement.parentElement.id || 'other'")
        )
        ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert ring != "none", f"nothing shows that {reached[-1]} has the focus"
        assert len(reached) < 60
    assert reached[:2] == ["race", "stop"]
    assert {"overlay", "method", "dice", "field-lam", "field-tree", "measure"} <= set(reached)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_has_a_distinct_name_and_enough_contrast(browser: Browser, served, scheme: str) -> None:
    with opened(browser, served[1], color_scheme=scheme) as page:
        page.get_by_text("More dials").click()
        named = [tuple(name) for name in page.evaluate(NAMES)]
        assert all(name[2] for name in named) and len(named) == len(set(named)), sorted(named)
        seen = page.evaluate(CONTRAST)
        assert len(seen) > 40 and [text for ratio, text in seen if ratio < 4.5] == []


def test_a_method_has_its_own_dials_which_can_be_reset(page: Page) -> None:
    number, back = page.get_by_label("Lambda", exact=True), page.get_by_role("button", name="Reset Lambda")
    own = number.input_value()
    assert back.is_disabled()
    page.get_by_label("Lambda, slider").press("ArrowRight")
    assert float(number.input_value()) > float(own)
    back.click()
    assert number.input_value() == own
    page.get_by_label("Guidance", exact=True).fill("4.5")
    page.get_by_label("Method").select_option("jacobi")
    expect(page.get_by_label("Window", exact=True)).to_be_visible()
    expect(number).not_to_be_visible()
    assert page.get_by_label("Guidance", exact=True).input_value() == "4.5", "it is both sides'"


def test_a_band_shows_the_codes_of_one_pass(page: Page) -> None:
    drawn = "given => import('/page/side.js').then(side => side.bands(...given))"
    first, second = page.evaluate(drawn, [[1, 3, 5, 1, 2], 10, 4, 4])
    assert first == "M0 0h1v1h-1zM0 1h4v1h-4zM0 2h1v1h-1z"  # passes 1 and 3, which fills a row and goes on
    assert second == "M1 0h3v1h-3zM1 2h1v1h-1z"
    assert page.evaluate(drawn, [[1, 6], 7, 3, 4]) == ["M0 0h1v1h-1z", "M1 0h2v1h-2zM0 1h3v1h-3z"]


def test_stop_and_a_closed_page_free_their_slots(page: Page, served: tuple[Batcher, str]) -> None:
    batcher, _ = served
    page.get_by_label("4", exact=True).check()
    page.locator("#race").click()
    expect(page.locator("#lead")).to_contain_text("%", timeout=TIMEOUT)
    page.locator("#stop").click()
    expect(page.locator("#board.stopped")).to_be_visible(timeout=TIMEOUT)
    wait_until_idle(batcher)
    page.locator("#race").click()
    wait_until(lambda: batcher.running)
    page.close()
    wait_until_idle(batcher)


def test_the_page_with_keys_wrong_prompts_and_several_pictures(browser: Browser, pipe: Pipeline) -> None:
    config = ServerConfig(hosts=["127.0.0.1"], keys=[KEY])
    with app_of(pipe, config, page=True) as (_, address), opened(browser, address) as page:
        page.get_by_label("API key").fill("not-the-key-that-it-is")
        page.get_by_role("button", name="Open").click()
        expect(page.get_by_role("alert")).to_contain_text("not one of this server's keys")
        page.get_by_label("API key").fill(KEY)
        page.get_by_label("API key").press("Enter")
        page.get_by_label("Prompt").fill("a bicycle {{value}} ${1+1} <img src=x onerror=alert(1)>")
        page.get_by_role("button", name="Race").click()
        alert = page.locator("#board").get_by_role("alert")
        expect(alert).to_contain_text("names no subject this model knows", timeout=TIMEOUT)
        expect(alert).to_contain_text("bicycle {{value}} ${1+1} <img src=x")
        page.get_by_label("Prompt").fill("a shiny red tulip")
        page.get_by_label("3", exact=True).check()
        page.get_by_text("More dials").click()
        page.get_by_label("Measure TV cost").check()
        before = page.locator("#sides").bounding_box()
        page.get_by_role("button", name="Race").click()
        expect(page.locator("#board.won")).to_be_visible(timeout=TIMEOUT)
        expect(page.get_by_text("Words this model does not know are ignored: shiny")).to_have_count(1)
        assert before and (now := page.locator("#sides").bounding_box())
        assert before["height"] == now["height"], "three pictures have the place of one"
        assert page.locator("#base .price").is_hidden()
        assert float(page.locator("#side .price dd").inner_text()) >= 0
        assert page.locator("#gallery li").count() == 6
        words = page.locator("#words dd").count()
        # the server's keys have changed
        page.route("**/generations", lambda route: route.fulfill(status=401))
        page.get_by_role("button", name="Race").click()
        page.get_by_label("API key").fill(KEY)
        page.get_by_label("API key").press("Enter")
        expect(page.get_by_label("Prompt")).to_have_value("a shiny red tulip")
        assert page.locator("#words dd").count() == words > 0
        page.reload()
        expect(page.get_by_label("Prompt")).to_be_visible()
        page.get_by_role("button", name="Forget the key").click()
        expect(page.get_by_label("API key")).to_be_visible()


HOSTILE = """<!doctype html><title>another site</title><body><script type="module">
const target = TARGET, images = target + "/v1/images/generations", body = JSON.stringify({prompt: "a red tulip"});
const load = (tag, src) => new Promise((onload, onerror) =>
  document.body.append(Object.assign(document.createElement(tag), {src, onload, onerror})));
const tries = {
  draw: () => fetch(images, {method: "POST", headers: {"Content-Type": "application/json"}, body}),
  blind: () => fetch(images, {method: "POST", mode: "no-cors", body}),
  read: () => fetch(target + "/page/setup"),
  script: () => load("script", target + "/page/page.js"),
  image: () => load("img", target + "/page/icon.svg"),
};
const form = Object.assign(document.createElement("form"),
  {method: "POST", enctype: "text/plain", action: images, target: "frame"});
form.append(Object.assign(document.createElement("input"), {name: body.slice(0, -1) + ',"user":"', value: '"}'}));
document.body.append(Object.assign(document.createElement("iframe"), {name: "frame"}), form);
form.submit();
const got = {};
for (const [name, attempt] of Object.entries(tries)) {
  try { const answer = await attempt(); got[name] = answer?.type === "opaque" ? "opaque" : "done"; } catch { got[name] = "refused"; }
}
document.title = JSON.stringify(got);
</script>"""


@pytest.mark.parametrize(("victim", "attacker"), [("127.0.0.1", "127.0.0.1"), ("draw.test", "evil.test")])
def test_pages_of_other_sites_can_neither_draw_nor_read(
    browser: Browser, pipe: Pipeline, victim: str, attacker: str
) -> None:
    config = ServerConfig(hosts=["127.0.0.1", "draw.test"])  # as with --allow-host draw.test
    with app_of(pipe, config, page=True) as (_, address):
        port = urlsplit(address).port
        hostile = HTMLResponse(HOSTILE.replace("TARGET", json.dumps(f"http://{victim}:{port}")))
        with listening(hostile) as other, browser.new_context() as context:
            page, answers = context.new_page(), []
            page.on("response", lambda answer: answers.append(answer))
            page.goto(f"http://{attacker}:{urlsplit(other).port}")
            page.wait_for_function("document.title.startsWith('{')", timeout=TIMEOUT)
            got = json.loads(page.title())
            assert got.pop("blind") in ("opaque", "refused"), "it is answered 403, which the page cannot see"
            assert set(got.values()) == {"refused"}, got
            mine = [answer for answer in answers if urlsplit(answer.url).port == port]
            assert mine and {answer.status for answer in mine} == {403}
            assert page.goto(f"http://evil.test:{port}").status == 400, "a name that resolves to this server"
            assert page.goto(f"http://{victim}:{port}").status == 200, "a link to it, and its own page"
            expect(page.get_by_label("Prompt")).to_be_visible(timeout=TIMEOUT)
        assert "lanternpp_pictures_total{" not in httpx.get(f"{address}/metrics").text
