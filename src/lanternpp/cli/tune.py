"""`lanternpp tune`: the static tree, or the window, that draws fastest with a method, on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from lanternpp.api.options import DIALS, DrawOptions, draft_of, drawn_with
from lanternpp.cli import options as opt
from lanternpp.tuning.options import TuningOptions
from lanternpp.util.files import locked
from lanternpp.util.jsonfile import write_json
from lanternpp.util.terminal import progress_bar, say, show_table

SHOWN = 12  # candidates of the table


@opt.verb
def tune(
    *,
    prompts: opt.Prompts = None,
    search: TuningOptions = TuningOptions(),
    output: Annotated[Path | None, opt.Folder] = None,
    restart: bool = False,
    race: Annotated[bool, opt.Switch] = True,
    save: Annotated[bool, opt.Switch] = True,
    plots: opt.Plots = None,
    as_json: opt.Json = False,
    options: Annotated[DrawOptions, opt.without("tree", "measure_tv")] = DrawOptions(),
    seed: opt.Seed = 0,
) -> None:
    """Find the draft tree, or Jacobi window, that draws fastest with a method on this machine, and make it the default.

    Draws pictures with one draft after another, each beside plain decoding; Optuna proposes the drafts. Interrupt it when you
    like: the same command goes on. One picture at a time unless --batch-size says otherwise; the result serves that many at a
    time, this kind of device and this dtype.

    output: Where measurements go; default: out/tune/MODEL-METHOD, and the budget. The same command goes on.
    restart: Remove the folder's measurements.
    race: Race the found draft, plain decoding and the method's own draft.
    save: Make the found draft the method's default for this model, unless the race finds it slower.
    """
    search.check()
    settings = opt.check(options)
    with_plots = opt.plots_enabled(plots)

    from lanternpp import Pipeline
    from lanternpp.evaluation.prompts import read_prompts
    from lanternpp.evaluation.quality import Quality
    from lanternpp.tuning.candidates import check
    from lanternpp.tuning.study import Tuner

    defaults = opt.defaults_of(options)
    chosen, folder = defaults.chosen(options.method), defaults.folder
    method = chosen.method
    check(settings)
    if save:
        opt.writable_folder(defaults.path.parent)
    prompt_list = read_prompts(prompts, folder)
    pipe = Pipeline.from_pretrained(**options.pretrained, tuned=False)
    limits = {"tv": search.budget_tv, "frechet": search.budget_frechet}
    budget = "".join(f"-{name}-{limit:g}" for name, limit in limits.items() if limit is not None)
    output = output or Path("out/tune") / f"{pipe.name}-{method}{budget}"
    quality = None if search.budget_frechet is None else Quality.for_model(folder, device=pipe.device)
    with locked(output):
        tuner = Tuner(pipe, method, options.overrides, prompt_list, output, search, seed, quality, restart)
        with progress_bar("trying drafts") as progress:
            found = tuner.tune(progress)
        rows: list[dict[str, Any]] = []
        if race:
            with progress_bar("racing") as progress:
                rows = tuner.race(found, progress)
        result = tuner.report(found, rows) | {"folder": str(output), "auto": chosen.reason(tuner.settings)}
        result["slower"] = why_slower(result)
        if save and not result["slower"]:
            more = {name: result[name] for name in ("machine", "sampling", "speedup", "measured", "versions")}
            defaults.add_tuned(method, pipe.conditions(tuner.settings), result["settings"], **more)
            result["file"] = str(defaults.path)
        write_json(output / "tune.json", result)
        if with_plots:
            tuner.plot()
    if as_json:
        print(json.dumps(result))
        return
    print(f"method: {drawn_with(method, result['auto'])}")
    show(result)
    if result["slower"]:
        unsaved = "nothing was saved, as " if save else ""
        advice = "to see which is faster, run again on an idle machine with a larger -n, or with --restart"
        say("warning", f"{unsaved}{result['slower']}; {advice}")


def why_slower(result: Mapping[str, Any]) -> str | None:
    """What was faster than the found draft in the race; None where it was the fastest, or was not raced."""
    speedups = {name: row["speedup"] for name, row in result["measured"].items()}
    if result["limit"] is not None:
        speedups.pop("default", None)  # its strength may cost more than the limit
    fastest = max(speedups, key=lambda name: speedups[name], default="tuned")
    if fastest == "tuned":
        return None
    return f"{fastest} measured {speedups[fastest]:.2f}x and the found draft {speedups['tuned']:.2f}x"


def show(result: Mapping[str, Any]) -> None:
    """The candidates, the race and the budget on stdout."""
    cells: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "draft": lambda one: words(one["overrides"]),
        "draft codes": lambda one: str(one["nodes"]),
        "step, ms": lambda one: f"{1000 * one['step']:.3g}",
        "codes per pass": lambda one: f"{one['codes_per_pass']:.2f}",
        "speed-up": lambda one: f"{one['speedup']:.2f}x",
        "cost": lambda one: "-" if one["cost"] is None else f"{one['cost']:.3g}",
        "pictures": lambda one: str(one["pictures"]),
    }
    rows = [[cell(one) for cell in cells.values()] for one in result["tried"][:SHOWN]]
    show_table(list(cells), rows, f"the fastest of {len(result['tried'])} drafts that were tried")
    if measured := result["measured"]:
        figures = ("codes per pass", "speed-up")
        raced = [[name, *(cells[figure](row) for figure in figures)] for name, row in measured.items()]
        caption = f"{measured['ar']['images']} pictures each, taking turns"
        show_table(("race", *figures), raced, caption=caption)
    if result["limit"] is not None:
        print(f"{words(result['settings'])}: costs {result['cost']:.3g}, of at most {result['limit']:.3g}.")
    default = f"; now the default: {result['file']}" if "file" in result else ""
    print(f"{result['folder']}/tune.json{default}")


def words(overrides: Mapping[str, Any]) -> str:
    """Overrides as text."""
    shown = {DIALS[name].spoken: x for name, x in overrides.items() if name not in ("tree", "window")}
    said = [f"{name} {f'{x:.3g}' if isinstance(x, float) else x}" for name, x in shown.items()]
    return ", ".join(filter(None, (draft_of(overrides), *said)))
