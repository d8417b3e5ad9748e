"""`lanternpp generate`: pictures from a prompt, or from a file of prompts."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from lanternpp.cli import many
from lanternpp.cli import options as opt
from lanternpp.cli.output import default_path, free_path, png_path
from lanternpp.cli.overrides import check, takes_overrides
from lanternpp.cli.terminal import progress_bar, say, tell_effect

OnePrompt = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPT", help="What to draw.", callback=opt.not_empty_if_given, show_default=False
    ),
]


@takes_overrides
def generate(
    prompt: OnePrompt = None,
    n: opt.Count = 1,
    output: opt.Output = None,
    prompts: many.Prompts = None,
    out: many.Out = None,
    overwrite: many.Overwrite = False,
    ray: many.Ray = None,
    actors: many.Actors = None,
    as_json: opt.Json = False,
    model: opt.Model = opt.MODEL,
    drafter: opt.Drafter = None,
    size: opt.Size = None,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    method: opt.Method = opt.METHOD,
    seed: opt.Seed = 0,
    *,
    overrides: dict[str, Any],
) -> None:
    """Draw pictures of PROMPT: one PNG, a grid where there are several.

    Without -o it is out/PROMPT-SEED.png. A picture there that was drawn with other settings stays, and the new one's name
    gets a number; --overwrite replaces it.

    With --prompts FILE --out DIR: -n pictures of every line of the file, a PNG each. What the folder has already is
    not drawn again, so the same command goes on where one was interrupted. Without it an interrupt leaves a grid of the
    pictures that were finished.
    """
    asked = many.Asked(prompts, out, overwrite, ray, actors)
    if asked.is_job(prompt, output):
        asked.check()
        check(model, drafter, method, overrides)
        many.draw(asked, n, seed, as_json, model, drafter, device, dtype, size, method, overrides)
        return
    assert prompt is not None
    path = png_path(output or default_path(prompt, seed))
    check(model, drafter, method, overrides)

    from lanternpp import Pipeline
    from lanternpp.picture import grid, notes, save_png
    from lanternpp.results import UnfinishedError, drawn_with

    pipe = Pipeline.from_pretrained(model=model, drafter=drafter, device=device, dtype=dtype, size=size)
    tell_effect(pipe.effect)
    kept: list[int] | None = None
    try:
        with progress_bar("drawing") as progress:
            result = pipe(prompt, n=n, seed=seed, method=method, progress=progress, **overrides)
    except UnfinishedError as unfinished:
        result, kept = unfinished.result, unfinished.seeds
    stats = result.stats
    told = notes(prompt, seed, stats) | ({"seeds": " ".join(map(str, kept))} if kept else {})
    path = path if output or overwrite else free_path(path, told)
    save_png(grid(result.images), path, told)
    if kept:
        say("interrupted", f"{len(kept)} of {n} pictures were finished; they are in {path}")
        raise typer.Exit(130)
    if as_json:
        typer.echo(json.dumps(stats.to_json() | {"file": str(path)}))
        return
    measured = (
        f", spent {stats.tv_spent:.2f} of total variation per picture" if overrides.get("measure") else ""
    )
    typer.echo(
        f"{path}: {stats.seconds_per_image:.2f} s per picture with {drawn_with(stats.method, stats.auto)} in "
        f"{pipe.dtype} on {stats.settings['device']}, "
        f"{stats.codes} codes in {stats.passes} passes, {stats.codes_per_pass:.2f} codes per pass{measured}"
    )
