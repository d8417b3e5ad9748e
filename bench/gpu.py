"""All measurements on a GPU by one command, in one file: `make gpu`, or

    python bench/gpu.py [--model nature-128] [--random XL] [--batch-sizes 1,8] [-n 1] [--dtype auto] [--compile] [--out gpu.md]

The script runs the tests marked `gpu`, then races and profiles two models on two prompts each: --model, which needs an EAGLE drafter
and a parallel one, and a model with random weights in LlamaGen's shape. The steps of the second cost as much as those of trained
weights, but its acceptance, and so its speed-ups, say nothing about a trained drafter. The file is written after every part. A failed
test or race is named in the file, and the exit status is then 1. The exit status is 2 without a GPU, unless --device names a device.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from random_model import SIZES, random_model

from lanternpp.api.model import model_folder
from lanternpp.errors import InputError
from lanternpp.evaluation.prompts import read_prompts
from lanternpp.util.devices import pick_device
from lanternpp.util.files import write_text

METHODS = (
    "lantern++ proposer=tree tree=lantern-57, eagle tree=eagle-25, eagle tree=chain-4, parallel tree=chain-4"
)


def run(*command: object) -> tuple[int, str, str]:
    """Run a module, print its errors as they come, and return its exit status, its output and its errors."""
    arguments = [sys.executable, "-m", *map(str, command)]
    with (
        TemporaryFile("w+") as output,
        subprocess.Popen(arguments, stdout=output, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stderr is not None
        errors = []
        for line in process.stderr:
            errors.append(line)
            print(line, end="", file=sys.stderr, flush=True)
        status = process.wait()
        output.seek(0)
        return status, output.read(), "".join(errors)


def main() -> None:
    """Run all measurements, and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="nature-128")
    parser.add_argument("--random", default="XL", choices=SIZES)
    parser.add_argument("--batch-sizes", default="1,8")
    parser.add_argument("-n", default="1", help="turns of each method at each size")
    parser.add_argument(
        "--prompts", type=Path, help="of --model, one per line, of which two are drawn; default: its own"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--compile", action="store_true", help="compiled steps; each method takes half a minute"
    )
    parser.add_argument("--tests", default=Path(__file__).parents[1] / "tests")
    parser.add_argument("--out", type=Path, default=Path("gpu.md"))
    options = parser.parse_args()
    try:
        if pick_device(options.device).type == "cpu" and options.device == "auto":
            raise InputError(
                "this machine has no CUDA GPU that PyTorch sees; run it on one, or try it with --device cpu"
            )
        prompts = read_prompts(options.prompts, model_folder(options.model))[:2]
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    parts = ["# Measured on a GPU\n"]

    def write_part(text: str) -> None:
        parts.append(text)
        write_text(options.out, "\n".join(parts))

    print("the tests marked gpu, some minutes", file=sys.stderr, flush=True)
    status, output, _ = run("pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", options.tests)
    # Status 5 of pytest: no test was found.
    failed = status not in (0, 5)
    failures = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    summary = (output.strip().splitlines() or ["none"])[-1].strip("= ")
    write_part("\n".join((f"Tests marked `gpu`: {summary}\n", *(f"* {line}\n" for line in failures))))
    with TemporaryDirectory() as parent, random_model(options.random) as random:
        for model, conditions in ((options.model, prompts), (str(random), ["207", "979"])):
            print(f"the race and the profile of {Path(model).name}", file=sys.stderr, flush=True)
            prompts_file = Path(parent) / "prompts.txt"
            write_text(prompts_file, "\n".join(conditions))
            folder = Path(parent) / Path(model).name
            settings = {"--model": model, "--device": options.device, "--dtype": options.dtype}
            settings |= {"--methods": METHODS, "-n": options.n, "--prompts": prompts_file, "-o": folder}
            settings["--batch-sizes"] = options.batch_sizes
            switches = ["--profile", "--no-plots", "--no-quality"]
            switches += ["--compile"] if options.compile else []
            status, output, errors = run("lanternpp", "bench", *chain(*settings.items()), *switches)
            table = f"Failed, status {status}\n"
            if status == 0:
                table = (folder / "table.md").read_text(encoding="utf-8")
            failed |= status != 0
            write_part(f"## {Path(model).name}\n\n{table}\n```\n{output}{errors if status else ''}```\n")
    print(f"{options.out}: one file to send")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
