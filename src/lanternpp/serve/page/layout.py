"""The page as Gradio blocks: what stands where."""

from __future__ import annotations

from typing import Any

from lanternpp.evaluation.prompts import PROMPTS, read_prompts
from lanternpp.pipeline import Pipeline
from lanternpp.serve.batcher import Batcher
from lanternpp.serve.page import looks
from lanternpp.serve.page.dials import CFG, COUNT, DIALS, TEMPERATURE, Dial, read
from lanternpp.serve.page.handlers import Page

EXAMPLES = 6  # prompts offered
RACES, WAITING, SESSIONS = 32, 64, 200  # at once; presses that wait; sessions whose pictures are kept
DICE = "() => Math.floor(Math.random() * 1000000)"
TINTS = "(on) => { document.body.classList.toggle('with-bands', on) }"


def build_page(
    batcher: Batcher, pipe: Pipeline, limit: int = 1000, deadline: float | None = None
) -> Any:
    """The page as `gradio.Blocks`; its races go through the batcher like anyone's orders.

    limit: characters of a prompt. deadline: seconds from a press until its pictures must be finished.
    """
    import gradio as gr

    page = Page(batcher, pipe, limit, deadline)
    prompts = examples(pipe)
    with gr.Blocks(analytics_enabled=False, title=f"lanternpp · {pipe.name}") as blocks:
        gr.HTML(header(pipe), apply_default_css=False, elem_id="head")
        with gr.Row(elem_id="order"):
            prompt = gr.Textbox(
                value=prompts[0] if prompts else "",
                label="Prompt",
                placeholder="What to draw",
                lines=1,
                max_lines=1,
                max_length=limit,
                autofocus=True,
                elem_id="prompt",
            )
            race = gr.Button("Race", variant="primary", elem_id="race")
            stop = gr.Button("Stop", variant="secondary", elem_id="stop")
        with gr.Row(elem_id="examples", visible=len(prompts) > 1):
            for example in prompts:
                chip = gr.Button(example.removeprefix("a photo of "), size="sm", elem_classes="chip")
                chip.click(None, None, prompt, js=f"() => {example!r}")
        with gr.Row(elem_id="body"):
            with gr.Column(elem_id="stage"):
                verdict = gr.HTML(looks.verdict(None), apply_default_css=False, elem_id="verdict")
                warned = gr.HTML("", apply_default_css=False, elem_id="warned")
                first, second = page.panels(None, page.method)
                with gr.Row(elem_id="sides"):
                    base = gr.HTML(first, apply_default_css=False, elem_id="base")
                    side = gr.HTML(second, apply_default_css=False, elem_id="side")
                overlay = gr.Checkbox(
                    False,
                    label="Show passes",
                    info="Each band of one tint is the codes of one pass: long bands, few passes.",
                    elem_id="overlay",
                )
            with gr.Column(elem_id="dials"):
                method = gr.Dropdown(page.offered, value=page.method, label="Method", filterable=False)
                about = gr.HTML(looks.about(page.method), apply_default_css=False, elem_id="about")
                count = gr.Radio(list(range(1, COUNT + 1)), value=1, label="Pictures", elem_id="count")
                with gr.Row(elem_id="seeds"):
                    seed = gr.Number(0, label="Seed", precision=0, minimum=0, elem_id="seed")
                    dice = gr.Button("Dice", elem_id="dice")
                own = page.pipe.settings(page.method)
                dials = [control(dial, getattr(own, dial.name), dial in read(own)) for dial in DIALS]
                dials += [control(dial, getattr(own, dial.name)) for dial in (CFG, TEMPERATURE)]
                measure = gr.Checkbox(
                    False,
                    label="Measure TV spent",
                    info="What relaxed acceptance costs in total variation. Measuring takes time of its own, "
                    "so the method looks slower than it is.",
                )
        gr.HTML("<h2>This session</h2>", apply_default_css=False, elem_id="kept")
        pictures = gr.HTML(looks.gallery([]), apply_default_css=False, elem_id="gallery")
        gr.HTML(footer(pipe), apply_default_css=False, elem_id="foot")
        shots = gr.State([])

        async def run(request: Any, *given: Any) -> Any:
            async for shown in page.race(request, *given):
                yield shown

        def cease(request: Any) -> None:
            page.stop(request)

        run.__annotations__["request"] = cease.__annotations__["request"] = gr.Request  # Gradio looks here
        closed: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        gr.on(
            [race.click, prompt.submit],
            run,
            [shots, prompt, method, seed, count, measure, *dials],
            [verdict, warned, base, side, pictures, shots],
            trigger_mode="once",
            concurrency_limit=RACES,
            **closed,
        )
        stop.click(cease, concurrency_limit=None, **closed)
        blocks.unload(cease)
        method.change(page.choose, method, [about, *dials[: len(DIALS)]], concurrency_limit=None, **closed)
        dice.click(None, None, seed, js=DICE)
        overlay.change(None, overlay, None, js=TINTS)
    blocks.state_session_capacity = SESSIONS
    blocks.queue(max_size=WAITING, api_open=False)
    return blocks


def control(dial: Dial, value: Any, visible: bool = True) -> Any:
    """A dial as something to move or choose from."""
    import gradio as gr

    shared = {"label": dial.label, "info": dial.info, "visible": visible, "elem_id": f"dial-{dial.name}"}
    if dial.choices:
        known = [*dial.choices, *([value] if value and value not in dial.choices else [])]
        return gr.Dropdown(known, value=value, filterable=False, **shared)
    start = dial.low if value is None else value
    return gr.Slider(dial.low, dial.high, value=start, step=dial.step, **shared)


def examples(pipe: Pipeline) -> list[str]:
    """A few prompts that the model brings, from all over its list."""
    if not (pipe.folder / PROMPTS).is_file():
        return list(pipe.target.conditions[:EXAMPLES])
    prompts = read_prompts(None, pipe.folder)
    step = max(1, len(prompts) // EXAMPLES)
    return prompts[::-step][:EXAMPLES]


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
        "computed itself, waiting left out. Previews cost both sides a little.</p>"
    )
