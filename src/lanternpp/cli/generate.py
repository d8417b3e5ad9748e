"""`lanternpp generate`: pictures from a prompt, or from a file of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from lanternpp.api.options import DrawOptions
from lanternpp.cli import many
from lanternpp.cli import options as opt
from lanternpp.cli.output import default_path, figures, free_path, png_path
from lanternpp.cli.terminal import progress_bar, say
from lanternpp.util.options import Option

OnePrompt = Annotated[str | None, Option("What to draw.", validate=opt.not_empty)]
Output = Annotated[
    Path | None,
    Option(
        "Where to write: a PNG, or a folder with --prompts.",
        names=("-o", "--output"),
        metavar="FILE.png|FOLDER",
    ),
]


@opt.verb
def generate(
    prompt: OnePrompt = None,
    /,
    *,
    n: opt.Count = 1,
    output: Output = None,
    as_json: opt.Json = False,
    job: many.JobOptions = many.JobOptions(),
    options: DrawOptions = DrawOptions(),
    seed: opt.Seed = 0,
) -> int | None:
    """Draw pictures of PROMPT: one PNG, a grid where there are several.

    Without -o the file is out/PROMPT-SEED.png. A picture there that was drawn with other settings stays, and the name of
    the new one gets a number; --overwrite replaces it. -o replaces a picture of lanternpp, and with --overwrite any file.
    An interrupt leaves a grid of the pictures that were finished.

    With --prompts FILE -o FOLDER: -n pictures of every line of the file, a PNG each. Pictures that the folder has are not
    drawn again, so the same command resumes an interrupted job.
    """
    if job.is_job(prompt, output):
        assert output is not None
        opt.check(options)
        many.draw(job, output, n, seed, as_json, options)
        return None
    assert prompt is not None
    path = png_path(output or default_path(prompt, seed), job.overwrite or output is None)
    opt.check(options)

    from lanternpp.api.picture import grid, notes, save_png
    from lanternpp.api.results import UnfinishedError

    pipe = opt.read(options, pictures=False)  # drawing checks the output
    finished: list[int] | None = None
    try:
        with progress_bar("drawing") as progress:
            result = pipe(
                prompt, n=n, seed=seed, method=options.method, progress=progress, **options.overrides
            )
    except UnfinishedError as unfinished:
        result, finished = unfinished.result, unfinished.seeds
    stats = result.stats
    chunks = notes(prompt, seed, stats.model, stats.settings, stats.versions, stats.images)
    chunks |= {"seeds": " ".join(map(str, finished))} if finished else {}
    path = path if output or job.overwrite else free_path(path, chunks)
    save_png(grid(result.images), path, chunks)
    if finished:
        say("interrupted", f"{len(finished)} of {n} pictures were finished; they are in {path}")
        return 130
    if as_json:
        print(json.dumps(stats.to_json() | {"file": str(path)}))
    else:
        print(f"{path}: {', '.join(figures(stats.to_json()))}")
    return None
