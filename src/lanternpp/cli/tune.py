"""`lanternpp tune`: the static tree, or the window, that draws fastest with a method, on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from lanternpp.api.options import DrawOptions
from lanternpp.cli import options as opt
from lanternpp.cli.plots import plots_enabled
from lanternpp.cli.tables import show_table
from lanternpp.cli.terminal import progress_bar, say
from lanternpp.tuning.options import TuningOptions
from lanternpp.util import files
from lanternpp.util.options import Option

SHOWN = 12  # candidates of the table


@opt.verb
def tune(
    *,
    prompts: opt.Prompts = None,
    search: TuningOptions = TuningOptions(),
    output: Annotated[
        Path | None,
        opt.folder("Where measurements go; default: out/tune/MODEL-METHOD. The same command goes on."),
    ] = None,
    restart: Annotated[bool, Option("Forget what the folder holds.")] = False,
    race: Annotated[
        bool, Option("Race what was found, plain AR and the method's own draft.", negative=True)
    ] = True,
    save: Annotated[
        bool, Option("Make what was found the method's default for this model.", negative=True)
    ] = True,
    plots: opt.Plots = None,
    as_json: opt.Json = False,
    options: Annotated[DrawOptions, opt.Without(("tree", "measure_tv"))] = DrawOptions(),
    seed: opt.Seed = 0,
) -> None:
    """Find the draft tree, or Jacobi window, that draws fastest with a method on this machine, and make it the default.

    Draws pictures with one draft after another, each beside plain AR; Optuna proposes the drafts. Interrupt it when you
    like: the same command goes on. One picture at a time unless --batch-size says otherwise; what is found serves that many at a
    time, this kind of device and this dtype.
    """
    search.check()
    opt.check(options)
    with_plots = plots_enabled(plots)

    from lanternpp import Pipeline
    from lanternpp.api.model import model_folder
    from lanternpp.api.results import drawn_with
    from lanternpp.api.settings import resolve
    from lanternpp.api.tuned import Tuned
    from lanternpp.evaluation.prompts import read_prompts
    from lanternpp.evaluation.quality import Quality
    from lanternpp.tuning.candidates import check
    from lanternpp.tuning.study import Tuner

    folder, drafter = model_folder(options.model), options.drafter
    chosen, defaults = opt.method_for(options.model, drafter, options.method)
    method = chosen.method
    check(resolve(method, defaults, options.overrides))
    tuned = Tuned.read(folder, model_folder(drafter) if drafter else None)
    if save:
        tuned.check()
    prompt_list = read_prompts(prompts, folder)
    pipe = Pipeline.from_pretrained(**options.pretrained, tuned=False)
    output = output or Path("out/tune") / f"{pipe.name}-{method}"
    quality = None if search.budget_frechet is None else Quality.for_model(folder, device=pipe.device)
    tuner = Tuner(pipe, method, options.overrides, prompt_list, output, search, seed, quality, restart)
    with progress_bar("trying drafts") as progress:
        found = tuner.tune(progress)
    rows: list[dict[str, Any]] = []
    if race:
        with progress_bar("racing") as progress:
            rows = tuner.race(found, progress)
    result = tuner.report(found, rows) | {"folder": str(output), "auto": chosen.why}
    if save:
        more = {name: result[name] for name in ("machine", "sampling", "speedup", "measured", "versions")}
        tuned.add(method, pipe.conditions(tuner.settings), result["settings"], **more)
        result["file"] = str(tuned.path)
    files.write_text(output / "tune.json", json.dumps(result, indent=1) + "\n")
    if with_plots:
        tuner.plot()
    if as_json:
        print(json.dumps(result))
        return
    print(f"method: {drawn_with(method, chosen.why)}")
    show(result)


def show(result: Mapping[str, Any]) -> None:
    """The candidates, the race and the budget on stdout."""
    rows = [
        [
            words(one["overrides"]),
            str(one["nodes"]),
            f"{1000 * one['step']:.3g}",
            f"{one['codes_per_pass']:.2f}",
            f"{one['speedup']:.2f}x",
            "-" if one["cost"] is None else f"{one['cost']:.3g}",
            str(one["pictures"]),
        ]
        for one in result["tried"][:SHOWN]
    ]
    headings = ("draft", "tokens", "step, ms", "codes per pass", "speed-up", "cost", "pictures")
    show_table(headings, rows, f"the fastest of {len(result['tried'])} drafts that were tried")
    measured = result["measured"]
    if measured:
        raced = [
            [name, f"{row['codes_per_pass']:.2f}", f"{row['speedup']:.2f}x"] for name, row in measured.items()
        ]
        caption = f"{measured['ar']['images']} pictures each, taking turns"
        show_table(("race", "codes per pass", "speed-up"), raced, caption=caption)
        fastest = max(measured, key=lambda name: measured[name]["speedup"])
        if fastest != "tuned":
            say(
                "warning",
                f"{fastest} measured {measured[fastest]['speedup']:.2f}x and what was found {measured['tuned']['speedup']:.2f}x; "
                "run again on an idle machine, with more --trials and a larger -n, to see which is faster",
            )
    if result["limit"] is not None:
        print(f"{words(result['settings'])}: costs {result['cost']:.3g}, of at most {result['limit']:.3g}.")
    print(
        f"{result['folder']}/tune.json" + (f"; now the default: {result['file']}" if "file" in result else "")
    )


def words(overrides: Mapping[str, Any]) -> str:
    """Overrides in a few words."""
    from lanternpp.api.options import DIALS
    from lanternpp.evaluation.report import draft_name

    shown = {k: v for k, v in overrides.items() if k not in ("tree", "window")}
    said = [
        f"{DIALS[name].spoken} {value:.3g}" if isinstance(value, float) else f"{DIALS[name].spoken} {value}"
        for name, value in shown.items()
    ]
    return ", ".join([draft_name(overrides), *said])
