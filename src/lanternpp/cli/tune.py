"""`lanternpp tune`: the static tree, or the window, that draws fastest with a method, on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from lanternpp.api.options import DIALS, DrawOptions, draft_of, drawn_with
from lanternpp.cli import options as opt
from lanternpp.errors import counted
from lanternpp.tuning.options import TuningOptions
from lanternpp.util.files import locked
from lanternpp.util.jsonfile import write_json
from lanternpp.util.terminal import say, show_table

MAX_ROWS = 12  # candidates in the table


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
    search.check(race)
    settings = opt.check(options, search.limited)
    with_plots = opt.plots_enabled(plots)

    from lanternpp import Pipeline
    from lanternpp.evaluation.prompts import read_prompts
    from lanternpp.tuning.candidates import check
    from lanternpp.tuning.study import Tuner

    defaults = opt.defaults_of(options)
    chosen = defaults.chosen(options.method)
    check(settings, search.limited)
    if save:
        opt.writable_folder(defaults.path.parent)
    prompt_list = read_prompts(prompts, defaults.folder)
    pipe = Pipeline.from_pretrained(**options.pretrained, tuned=False)
    limits = {"tv": search.budget_tv, "frechet": search.budget_frechet}
    budget = "".join(f"-{name}-{limit:g}" for name, limit in limits.items() if limit is not None)
    output = output or Path("out/tune") / f"{pipe.name}-{chosen.method}{budget}"
    with locked(output):
        tuner = Tuner(pipe, chosen.method, options.overrides, prompt_list, output, search, seed, restart)
        candidate = tuner.tune()
        rows = tuner.race(candidate) if race else []
        result = tuner.report(candidate, rows) | {"folder": str(output)}
        result |= {"auto": chosen.reason(tuner.settings), "slower": slower_reason(result)}
        if save and not result["slower"]:
            facts = {key: result[key] for key in ("machine", "sampling", "speedup", "measured", "versions")}
            defaults.add_tuned(chosen.method, pipe.conditions(tuner.settings), result["settings"], **facts)
            result["file"] = str(defaults.path)
        write_json(output / "tune.json", result)
        if with_plots:
            tuner.plot()
    if as_json:
        print(json.dumps(result))
        return
    print(f"method: {drawn_with(chosen.method, result['auto'], vars(tuner.settings))}")
    show(result)
    if result["slower"]:
        unsaved = "nothing was saved, as " if save else ""
        advice = "to see which is faster, run again on an idle machine with a larger -n, or with --restart"
        say("warning", f"{unsaved}{result['slower']}; {advice}")


def slower_reason(result: Mapping[str, Any]) -> str | None:
    """Return what was faster than the found draft in the race; None if the found draft was the fastest, or was not raced."""
    speedups = {name: row["speedup"] for name, row in result["measured"].items()}
    if result["limit"] is not None:
        speedups.pop("default", None)  # the strength of the default may cost more than the limit
    fastest = max(speedups, key=lambda name: speedups[name], default="tuned")
    if fastest == "tuned":
        return None
    return f"{fastest} measured {speedups[fastest]:.2f}x and the found draft {speedups['tuned']:.2f}x"


def show(result: Mapping[str, Any]) -> None:
    """Print the candidates, the race and the budget."""
    cells: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "draft": lambda row: as_text(row["overrides"]),
        "draft codes": lambda row: str(row["nodes"]),
        "step, ms": lambda row: f"{1000 * row['step']:.3g}",
        "codes per pass": lambda row: f"{row['codes_per_pass']:.2f}",
        "speed-up": lambda row: f"{row['speedup']:.2f}x",
        "cost": lambda row: "-" if row["cost"] is None else f"{row['cost']:.3g}",
        "pictures": lambda row: str(row["pictures"]),
    }
    rows = [[cell(row) for cell in cells.values()] for row in result["tried"][:MAX_ROWS]]
    show_table(list(cells), rows, f"the fastest of {len(result['tried'])} drafts that were tried")
    if measured := result["measured"]:
        figures = ("codes per pass", "speed-up")
        raced = [[name, *(cells[figure](row) for figure in figures)] for name, row in measured.items()]
        caption = f"{counted(measured['ar']['images'], 'picture')} each, taking turns"
        show_table(("race", *figures), raced, caption=caption)
    if result["limit"] is not None:
        print(f"{as_text(result['settings'])}: costs {result['cost']:.3g}, of at most {result['limit']:.3g}.")
    default = f"; now the default: {result['file']}" if "file" in result else ""
    print(f"{result['folder']}/tune.json{default}")


def as_text(overrides: Mapping[str, Any]) -> str:
    """Return overrides as text, the draft first."""
    dials = [(DIALS[name].spoken, x) for name, x in overrides.items() if name not in ("tree", "window")]
    phrases = [f"{name} {f'{x:.3g}' if isinstance(x, float) else x}" for name, x in dials]
    return ", ".join(filter(None, (draft_of(overrides), *phrases)))
