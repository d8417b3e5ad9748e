"""The page as Gradio blocks: what stands where."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from lanternpp.evaluation.prompts import PROMPTS, read_prompts
from lanternpp.pipeline import Pipeline
from lanternpp.serve.batcher import Batcher
from lanternpp.serve.page import looks
from lanternpp.serve.page.dials import CFG, COUNT, DIALS, OWN, TEMPERATURE, Dial, read
from lanternpp.serve.page.handlers import Page
from lanternpp.serve.terms import Terms

EXAMPLES = 5  # prompts offered
RACES, WAITING, SESSIONS = 32, 64, 200  # at once; presses that wait; sessions whose pictures are kept
SEED = "() => Math.floor(Math.random() * 1000000)"
CLOSED: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}


def build_page(batcher: Batcher, terms: Terms) -> gr.Blocks:
    """The page; its races are orders to the batcher like anyone's, on the server's terms."""
    page = Page(batcher, terms)
    with gr.Blocks(analytics_enabled=False, title=f"lantern++ · {page.pipe.name}") as blocks:
        written(header(page.pipe), "head")
        with gr.Row(elem_id="order"):
            prompt, race, stop = ordering(page)
        with gr.Row(elem_id="body"):
            with gr.Column(elem_id="stage"):
                verdict, warned = written(looks.verdict(None), "verdict"), written("", "warned")
                with gr.Row(elem_id="sides"):
                    base, side = map(written, page.panels(None, page.method), ("base", "side"))
                gr.Checkbox(  # the stylesheet looks whether it is checked
                    False,
                    label="Show passes",
                    info="Each band of one tint is what one pass decided.",
                    elem_id="overlay",
                )
            with gr.Column(elem_id="dials"):
                method = gr.Dropdown(page.offered, value=page.method, label="Method", filterable=False)
                about = written(looks.about(page.method), "about")
                count, seed, dials, measure = dialling(page)
            with gr.Column(elem_id="kept"):
                written("<h2>This session</h2>", "session")
                pictures = written(looks.gallery([]), "gallery")
        written(footer(page.pipe), "foot")
        shots = gr.State([])

        async def run(request: gr.Request, *given: Any) -> AsyncIterator[Any]:
            async for shown in page.race(request, *given):
                yield shown

        def cease(request: gr.Request) -> None:
            page.stop(request)

        gr.on(
            [race.click, prompt.submit],
            run,
            [shots, prompt, method, seed, count, measure, *dials],
            [verdict, warned, base, side, pictures, shots],
            trigger_mode="once",
            concurrency_limit=RACES,
            **CLOSED,
        )
        stop.click(cease, concurrency_limit=None, **CLOSED)
        blocks.unload(cease)
        method.change(page.choose, method, [about, *dials[: len(DIALS)]], concurrency_limit=None, **CLOSED)
    blocks.state_session_capacity = SESSIONS
    blocks.queue(max_size=WAITING, api_open=False)
    return blocks


def written(html: str, name: str) -> gr.HTML:
    """What we write ourselves."""
    return gr.HTML(html, apply_default_css=False, elem_id=name)


def ordering(page: Page) -> tuple[gr.Textbox, gr.Button, gr.Button]:
    """What to draw: the prompt with examples, Race and Stop."""
    prompts = examples(page.pipe)
    prompt = gr.Textbox(
        value=prompts[0] if prompts else "",
        label="Prompt",
        placeholder="What to draw",
        lines=1,
        max_lines=1,
        max_length=page.terms.prompt,
        elem_id="prompt",
    )
    race = gr.Button("Race", variant="primary", elem_id="race")
    stop = gr.Button("Stop", elem_id="stop")
    with gr.Row(elem_id="examples", visible=len(prompts) > 1):
        for example in prompts:
            chip = gr.Button(example.removeprefix("a photo of "), size="sm", elem_classes="chip")
            chip.click(None, None, prompt, js=f"() => {json.dumps(example)}")
    return prompt, race, stop


def dialling(page: Page) -> tuple[gr.Radio, gr.Number, list[Any], gr.Checkbox]:
    """How to draw it: pictures, seed, all dials in the order of `DIALS`, guidance, temperature; measuring."""
    count = gr.Radio(list(range(1, COUNT + 1)), value=1, label="Pictures", elem_id="count")
    with gr.Row(elem_id="seeds"):
        seed = gr.Number(0, label="Seed", precision=0, minimum=0, elem_id="seed")
        gr.Button("Dice", elem_id="dice").click(None, None, seed, js=SEED)
    own = page.terms.settings(page.pipe, page.method, {})
    made = {
        dial: control(dial, getattr(own, dial.name), dial in read(own)) for dial in DIALS if not dial.choices
    }
    made[CFG] = control(CFG, own.cfg)
    with gr.Accordion("More dials", open=False, elem_id="more"):
        made |= {
            dial: control(dial, getattr(own, dial.name), dial in read(own)) for dial in DIALS if dial.choices
        }
        made[TEMPERATURE] = control(TEMPERATURE, own.temperature)
        measure = gr.Checkbox(
            False,
            label="Measure TV spent",
            info="The total variation that relaxing costs. Measuring takes time of its own, so the method looks "
            "slower than it is.",
        )
    return count, seed, [made[dial] for dial in (*DIALS, CFG, TEMPERATURE)], measure


def control(dial: Dial, value: Any, visible: bool = True) -> gr.Dropdown | gr.Slider:
    """A dial as something to move or to choose from."""
    shared: dict[str, Any] = {
        "label": dial.label,
        "info": dial.info,
        "visible": visible,
        "elem_id": f"dial-{dial.name}",
    }
    if dial.choices:
        return gr.Dropdown(dial.offers(value), value=value or OWN, filterable=False, **shared)
    return gr.Slider(
        dial.low, dial.high, value=dial.low if value is None else value, step=dial.step, **shared
    )


def examples(pipe: Pipeline) -> list[str]:
    """A few prompts that the model brings, from all over its list, short ones."""
    if not (pipe.folder / PROMPTS).is_file():
        return list(pipe.target.conditions[:EXAMPLES])
    prompts = read_prompts(None, pipe.folder)[::-1]
    step = max(1, len(prompts) // EXAMPLES)
    parts = [prompts[i : i + step] for i in range(0, len(prompts), step)]
    return [min(part, key=len) for part in parts][:EXAMPLES]


def header(pipe: Pipeline) -> str:
    """What this is."""
    return (
        f'<h1>lantern<span class="plus">++</span></h1><p class="quiet">{looks.text(pipe.name)} draws a picture of '
        f"{pipe.target.length} codes, one pass of the network for each. Drafting decides several in one pass.</p>"
    )


def footer(pipe: Pipeline) -> str:
    """The words the model knows, and how the seconds are counted."""
    known = "".join(
        f"<dt>{looks.text(kind)}</dt><dd>{looks.text(', '.join(words))}</dd>"
        for kind, words in pipe.target.words.items()
    )
    listed = f"<details><summary>Words that {looks.text(pipe.name)} knows</summary><dl>{known}</dl></details>"
    return (listed if known else "") + (
        '<p class="quiet">Both sides share this machine and take turns, so each side\'s seconds are those that it '
        "computed itself, waiting left out. Showing pictures while they grow costs both sides a little.</p>"
    )
