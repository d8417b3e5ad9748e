"""`lanternpp tune`: the static tree, or the window, that draws fastest with a method, on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lanternpp.api.options import DrawOptions
from lanternpp.cli import old_options as opt
from lanternpp.cli import tune_tables
from lanternpp.cli.overrides import check, draws, method_for
from lanternpp.cli.plots import Plots, plots_enabled
from lanternpp.cli.terminal import progress_bar, say
from lanternpp.errors import InputError
from lanternpp.util import files

if TYPE_CHECKING:
    from lanternpp.tuning.budget import Budget, BudgetChoice
    from lanternpp.tuning.trees import TreeTuner, Tuning
    from lanternpp.tuning.windows import WindowTuner, WindowTuning

VARIATION, FRECHET = 8, 100  # pictures that a budget is measured on

Pictures = Annotated[
    int,
    typer.Option(
        "-n", "--n", help="Pictures for each entrant of the race at the end.", callback=opt.within(1, 10_000)
    ),
]
Rounds = Annotated[
    int, typer.Option(help="How often each draft is drawn that is tried.", callback=opt.within(1, 1000))
]
Nodes = Annotated[
    int, typer.Option(help="The most nodes of a draft, the root apart.", callback=opt.within(1, 512))
]
Depth = Annotated[
    int, typer.Option(help="The most levels of a tree, or guesses of a window.", callback=opt.within(1, 32))
]
Variation = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Also pick k and lambda: at most so much total variation per picture.",
        callback=opt.within(0),
    ),
]
Frechet = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Also pick k and lambda: a Fréchet distance at most X % above that of plain AR.",
        callback=opt.within(0),
    ),
]
Measured = Annotated[
    int | None,
    typer.Option(
        help=f"Pictures that a budget is measured on; default: {VARIATION}, or {FRECHET} for Fréchet distances.",
        callback=opt.within(1, 100_000),
    ),
]
Folder = Annotated[
    Path | None,
    opt.to_folder(help="Where measurements go; default: out/tune/MODEL-METHOD. The same command goes on."),
]
Restart = Annotated[bool, typer.Option("--restart", help="Forget what the folder holds.")]
RaceIt = Annotated[
    bool, typer.Option("--race/--no-race", help="Race what was found, plain AR and the hand-made trees.")
]
Save = Annotated[
    bool, typer.Option("--save/--no-save", help="Make what was found the method's default for this model.")
]


@draws()
def tune(
    prompts: opt.Prompts = None,
    n: Pictures = 8,
    rounds: Rounds = 3,
    nodes: Nodes = 64,
    depth: Depth = 16,
    budget_tv: Variation = None,
    budget_frechet: Frechet = None,
    budget_pictures: Measured = None,
    output: Folder = None,
    restart: Restart = False,
    race: RaceIt = True,
    save: Save = True,
    plots: Plots = None,
    as_json: opt.Json = False,
    *,
    options: DrawOptions,
    seed: opt.Seed = 0,
) -> None:
    """Find the draft tree, or Jacobi window, that draws fastest with a method on this machine, and make it the default.

    Draws pictures with several drafts, learns from them how much is kept and what a step takes, and
    searches. Interrupt it when you like: the same command goes on. One picture at a time unless --batch-size
    says otherwise; what is found serves that many at a time, this kind of device and this dtype.
    """
    for name, why in (("tree", "tune finds the tree"), ("measure_tv", "--budget-tv does that")):
        if name in options.overrides:
            raise InputError(f"--{name} would change nothing: {why}; leave it out")
    if budget_tv is not None and budget_frechet is not None:
        raise InputError("--budget-tv and --budget-frechet cannot both be held; give one")
    if budget_pictures and budget_tv is None and budget_frechet is None:
        raise InputError(
            f"--budget-pictures {budget_pictures} would change nothing without a budget; give one"
        )
    check(options)
    with_plots = plots_enabled(plots)

    from lanternpp import Pipeline
    from lanternpp.api.model import model_folder
    from lanternpp.api.results import drawn_with
    from lanternpp.api.settings import resolve
    from lanternpp.api.tuned import Tuned
    from lanternpp.evaluation.prompts import read_prompts
    from lanternpp.tuning import run, windows
    from lanternpp.tuning.trees import TreeTuner

    folder, drafter = model_folder(options.model), options.drafter
    chosen, defaults = method_for(options.model, drafter, options.method)
    settings = resolve(chosen.method, defaults, options.overrides)
    run.check(settings)
    if run.has_window(settings) and not (budget_tv is None is budget_frechet):
        raise InputError(
            f"a budget picks k and lambda for a tree, and method {chosen.method!r} has a window; give --lambda instead"
        )
    method = chosen.method
    tuned = Tuned.read(folder, model_folder(drafter) if drafter else None)
    if save:
        tuned.check()
    prompt_list = read_prompts(prompts, folder)
    pipe = Pipeline.from_pretrained(**options.pretrained, tuned=False)
    plan = run.TuningOptions(method, dict(options.overrides), prompt_list, rounds, n, nodes, depth, seed)
    output = output or Path("out/tune") / f"{pipe.name}-{method}"
    tuner = windows.tuner_for(pipe, plan, output, restart)
    budget = None
    if isinstance(tuner, TreeTuner):
        budget = budget_of(tuner, budget_tv, budget_frechet, budget_pictures)
    result, found = work(tuner, budget, race, budget_tv is not None)
    result |= {"folder": str(output), "auto": chosen.why}
    if save:
        kept = ("machine", "sampling", "acceptance", "costs", "trees", "versions")
        more = {name: result[name] for name in kept if name in result}
        more |= {"predicted": result["predicted"], "measured": result["measured"]}
        tuned.add(method, pipe.conditions(tuner.settings), result["settings"], **more)
        result["file"] = str(tuned.path)
    write(result, output, with_plots)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        typer.echo(f"method: {drawn_with(method, chosen.why)}")
        tune_tables.show(result, found)
    slower(result)


def budget_of(
    tuner: TreeTuner, variation: float | None, percent: float | None, pictures: int | None
) -> Budget | None:
    """The budget of the options, or None; the classifier of a Fréchet budget is read."""
    from lanternpp.evaluation.quality import LEAST, Quality
    from lanternpp.tuning.budget import FrechetBudget, VariationBudget

    if variation is not None:
        return VariationBudget(tuner, pictures or VARIATION, variation)
    if percent is None:
        return None
    if pictures is not None and pictures < LEAST:
        raise InputError(f"--budget-pictures {pictures} are too few to measure; use {LEAST} or more")
    device = tuner.pipe.device
    return FrechetBudget(
        tuner, pictures or FRECHET, percent, Quality.for_model(tuner.pipe.folder, device=device)
    )


def work(
    tuner: TreeTuner | WindowTuner, budget: Budget | None, race: bool, measure_tv: bool
) -> tuple[dict[str, Any], Tuning | WindowTuning]:
    """Tune and race; the result as a JSON object, and the tuning."""
    from lanternpp.tuning import report

    choice: BudgetChoice | None = None
    found: Any
    with telling(tuner, "probing"):
        if budget:
            choice = budget.choose()
            found = choice.found
        else:
            found = tuner.tune()
    rows: list[dict[str, Any]] = []
    if race:
        with telling(tuner, "racing"):
            rows = tuner.race(found, measure_tv)
    return report.tuning_report(tuner, found, rows, choice), found


@contextmanager
def telling(tuner: TreeTuner | WindowTuner, label: str) -> Iterator[None]:
    """Show a progress bar for the tuner while the block runs."""
    with progress_bar(label) as progress:
        tuner.progress = progress or (lambda done, total: None)
        yield


def write(result: dict[str, Any], folder: Path, plots: bool) -> None:
    """tune.json and tune.png."""
    from lanternpp.tuning import report

    files.write_text(folder / "tune.json", json.dumps(result, indent=1) + "\n")
    if plots:
        report.plot(result, folder / "tune.png")


def slower(result: Mapping[str, Any]) -> None:
    """Warn where another entrant won the race."""
    raced = {tree["name"]: tree["measured"]["speedup"] for tree in result["trees"] if tree["measured"]}
    if raced and max(raced, key=raced.__getitem__) != "tuned":
        name = max(raced, key=raced.__getitem__)
        say(
            "warning",
            f"{name} measured {raced[name]:.2f}x and what was found {raced['tuned']:.2f}x; run again on an idle machine, "
            "with more --rounds and a larger -n, to see which is faster",
        )
