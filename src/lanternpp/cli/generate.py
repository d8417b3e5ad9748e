"""`lanternpp generate`: pictures from a prompt."""

from __future__ import annotations

import json
from typing import Any

import typer

from lanternpp.cli import options as opt
from lanternpp.cli.output import default_path, notes, png_path
from lanternpp.cli.overrides import check, takes_overrides
from lanternpp.cli.terminal import progress_bar, tell_effect


@takes_overrides
def generate(
    prompt: opt.Prompt,
    n: opt.Count = 1,
    output: opt.Output = None,
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
    """Draw pictures of PROMPT: one PNG, a grid where there are several."""
    path = png_path(output or default_path(prompt, seed))
    check(model, drafter, method, overrides)

    from lanternpp import Pipeline
    from lanternpp.picture import grid, save_png

    pipe = Pipeline.from_pretrained(model=model, drafter=drafter, device=device, dtype=dtype, size=size)
    tell_effect(pipe.effect)
    with progress_bar("drawing") as progress:
        result = pipe(prompt, n=n, seed=seed, method=method, progress=progress, **overrides)
    stats = result.stats
    save_png(grid(result.images), path, notes(prompt, seed, stats))
    if as_json:
        typer.echo(json.dumps(stats.to_json() | {"file": str(path)}))
        return
    measured = (
        f", spent {stats.tv_spent:.2f} of total variation per picture" if overrides.get("measure") else ""
    )
    typer.echo(
        f"{path}: {stats.seconds_per_image:.2f} s per picture with {stats.method} in {pipe.dtype} on {stats.settings['device']}, "
        f"{stats.codes} codes in {stats.passes} passes, {stats.codes_per_pass:.2f} codes per pass{measured}"
    )
