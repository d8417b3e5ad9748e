"""`lanternpp warm`: compile steps by torch.compile, so that no picture waits for it."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import typer

from lanternpp.api.options import BASELINE, DrawOptions, EngineDials, SamplingDials, names
from lanternpp.cli import old_options as opt
from lanternpp.cli.overrides import check, draws, read
from lanternpp.cli.terminal import say
from lanternpp.cli.throughput import Sizes, read_sizes
from lanternpp.errors import InputError


@draws()
def warm(batch_sizes: Sizes = "1", as_json: opt.Json = False, *, options: DrawOptions) -> None:
    """Compile the steps of the method and of plain decoding by torch.compile, and keep them in the cache.

    On a GPU they are drawn compiled from then on; without it they are drawn as they are, at once. On a CPU, whose kernels are
    compiled already, this is done with --compile alone.
    """
    sizes = read_sizes(batch_sizes)
    if "batch_size" in options.overrides:
        raise InputError("--batch-size would change nothing here; use --batch-sizes")
    check(options)

    from lanternpp.api.compiled import compiled_folder

    began = time.perf_counter()
    pipe = read(options)
    done: list[dict[str, object]] = []
    settings = pipe.settings(options.method, **{"compile": pipe.device.type == "cuda", **options.overrides})
    plain = pipe.settings(
        BASELINE, **{name: getattr(settings, name) for name in names(EngineDials, SamplingDials)}
    )
    for size in sizes if settings.compile else ():
        for each in dict.fromkeys((plain, settings)):
            if pipe.warm(replace(each, batch_size=size)):
                say("warm", f"{each.method} is not compiled whole, so it is drawn as it is")
            else:
                made = f"steps of {each.method}, {size} at a time"
                done.append({"made": made, "kept": str(compiled_folder())})
    if as_json:
        typer.echo(json.dumps({"done": done, "seconds": time.perf_counter() - began}))
        return
    for one in done:
        typer.echo(f"{one['made']}: in {one['kept']}")
    typer.echo(
        f"ready after {time.perf_counter() - began:.1f} s"
        if done
        else "nothing to compile here: a CPU compiles steps with --compile alone"
    )
