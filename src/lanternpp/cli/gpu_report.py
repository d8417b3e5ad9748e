"""`lanternpp gpu-report`: what there is to measure on a GPU, in one command and one file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from lanternpp.api.options import DrawOptions
from lanternpp.cli import old_options as opt
from lanternpp.cli.output import writable_folder
from lanternpp.cli.overrides import read
from lanternpp.cli.terminal import progress_bar, say
from lanternpp.cli.throughput import Rounds, Sizes, read_sizes
from lanternpp.errors import InputError

if TYPE_CHECKING:
    from lanternpp import Pipeline

FIELD = "ar, lantern++ proposer=tree tree=lantern-57, eagle tree=eagle-25, eagle tree=chain-4, parallel tree=chain-4"
PROMPTS = 2  # of the model's own
CLASSES = ["207", "979"]  # of the random model
INTRODUCTION = """\
Written by `lanternpp gpu-report`. The weights of the model named `random` are random: the costs of its steps are those of
trained weights, but how many codes a pass keeps, and so its speed-ups, say nothing about a trained drafter.
"""

Random = Annotated[
    str, typer.Option(metavar="SIZE", help="Size of the model with random weights: B, L, XL or tiny.")
]
Report = Annotated[
    Path, typer.Option("-o", "--output", "--out", metavar="FILE.md", help="Where the report goes.")
]
Tests = Annotated[Path, typer.Option(metavar="DIR", help="The tests whose `gpu` ones are run; needs pytest.")]


def gpu_report(
    model: opt.Model = opt.MODEL,
    random: Random = "XL",
    batch_sizes: Sizes = "1,4,16",
    rounds: Rounds = 3,
    prompts: opt.Prompts = None,
    tests: Tests = Path("tests"),
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    output: Report = Path("docs/gpu.md"),
) -> None:
    """Run the GPU's tests, and races and profiles of steps on two models, and write all of it into one file.

    The models are --model, which needs an EAGLE drafter and a parallel one, and one of random weights in LlamaGen's shape.
    The file is written when all is measured. It ends with status 1 where a test failed.
    """
    from lanternpp.evaluation.random_model import check_size, random_model

    sizes, size = read_sizes(batch_sizes), check_size(random)
    if output.is_dir():
        raise InputError(f"output {str(output)!r} is a folder; give the name of a file")
    writable_folder(output.parent)

    from lanternpp.api.model import model_folder
    from lanternpp.evaluation.prompts import read_prompts
    from lanternpp.util.devices import device_name, pick_device
    from lanternpp.util.files import write_text

    prompt_list = read_prompts(prompts, model_folder(model))[:PROMPTS]
    name = device_name(pick_device(device))
    status, summary = run_tests(tests)
    parts = [
        f"# Measured on {name}\n",
        INTRODUCTION,
        f"## Tests\n\n`{tests}`, those marked `gpu`: {summary}\n",
    ]
    with random_model(size) as folder:
        for each, drawn in ((model, prompt_list), (str(folder), CLASSES)):
            pipe = read(DrawOptions(each, device=device, dtype=dtype))
            parts += sections(pipe, drawn, sizes, rounds)
            del pipe  # before the next one is read
    write_text(output, "\n".join(parts))
    typer.echo(str(output))
    if status:
        say("error", f"tests on the GPU failed: {summary}")
        raise typer.Exit(1)


def run_tests(folder: Path) -> tuple[int, str]:
    """pytest's exit status and its last line. No tests, or only skipped ones, are no failure."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", str(folder)]
    if not folder.is_dir():
        return 0, "not run, there is no such folder"
    with progress_bar("running tests") as progress:
        if progress:
            progress(0, 1)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines() or ["pytest said nothing"]
    return (0 if done.returncode == 5 else done.returncode), lines[-1].strip("= ")


def sections(pipe: Pipeline, prompts: list[str], sizes: list[int], rounds: int) -> list[str]:
    """The races of a model and the profiles of its steps as Markdown."""
    from lanternpp.evaluation import report
    from lanternpp.evaluation.profile import COLUMNS, profile_race
    from lanternpp.evaluation.speed import Race, parse_methods

    field = parse_methods(FIELD)
    parts = [f"## {pipe.name}\n"]
    for size in sizes:
        race = Race(pipe, field, prompts, size * rounds, 0, {"batch_size": size}, measure_tv=False)
        with TemporaryDirectory() as room, progress_bar(f"{pipe.name}: race, batch {size}") as progress:
            turns, info = race.run(Path(room), progress=progress), race.describe()
            table = report.rows(turns, info, {})
            profiles = profile_race(race, table, Path(room))
        parts += [f"### Race, batch {size}\n", report.markdown(table, info)]
        parts += [f"### Steps, batch {size}\n", report.markdown_table(COLUMNS, profiles, left=(0, 2))]
        pipe.release()
    return parts
