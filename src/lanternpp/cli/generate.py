"""`lanternpp generate`: pictures from a prompt."""

from __future__ import annotations

import json

import typer

from lanternpp.cli import options as opt
from lanternpp.cli.output import default_path, notes, png_path
from lanternpp.cli.terminal import progress_bar


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
    compile: opt.Compile = None,
    batch_size: opt.BatchSize = None,
    method: opt.Method = opt.METHOD,
    tree: opt.Tree = None,
    accept: opt.Accept = None,
    neighbours: opt.Neighbours = None,
    delta: opt.Delta = None,
    lam: opt.Lambda = None,
    cfg: opt.Cfg = None,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    seed: opt.Seed = 0,
) -> None:
    """Draw pictures of PROMPT: one PNG, a grid where there are several."""
    path = png_path(output or default_path(prompt, seed))
    opt.known_parts(tree, accept)

    from lanternpp import Pipeline
    from lanternpp.picture import grid, save_png

    pipe = Pipeline.from_pretrained(model=model, drafter=drafter, device=device, dtype=dtype, size=size)
    with progress_bar("drawing") as progress:
        result = pipe(
            prompt,
            n=n,
            seed=seed,
            method=method,
            tree=tree,
            accept=accept,
            neighbours=neighbours,
            delta=delta,
            lam=lam,
            cfg=cfg,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            batch_size=batch_size,
            compile=compile,
            progress=progress,
        )
    stats = result.stats
    save_png(grid(result.images), path, notes(prompt, seed, stats))
    if as_json:
        typer.echo(json.dumps(stats.to_json() | {"file": str(path)}))
        return
    typer.echo(
        f"{path}: {stats.seconds_per_image:.2f} s per picture with {stats.method}, "
        f"{stats.codes} codes in {stats.passes} passes, {stats.codes_per_pass:.2f} codes per pass"
    )
