"""What there is to measure on a GPU, in one command and one file: `make gpu`, or

    python bench/gpu.py [--model nature-128] [--random XL] [--batch-sizes 1,8] [-n 1] [--dtype auto] [--compile] [--out gpu.md]

The tests marked `gpu`, then races and profiles of two models, on two prompts each: --model, which needs an EAGLE drafter and a
parallel one, and one of random weights in LlamaGen's shape. The costs of its steps are those of trained weights, while its
acceptance, and so its speed-ups, say nothing about a trained drafter. The file is written after every part, also where a test or a
race failed, which it says; the status is then 1. Without a GPU it is 2, unless --device names another device.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from random_model import SIZES, random_model

from lanternpp.api.model import model_folder
from lanternpp.errors import InputError
from lanternpp.evaluation.prompts import read_prompts
from lanternpp.util.devices import pick_device
from lanternpp.util.files import write_text

FIELD = (
    "lantern++ proposer=tree tree=lantern-57, eagle tree=eagle-25, eagle tree=chain-4, parallel tree=chain-4"
)


def run(*command: object) -> tuple[int, str, str]:
    """The status of a command, what it printed, and its errors, which are printed here too as they come."""
    words = [sys.executable, "-m", *map(str, command)]
    with (
        TemporaryFile("w+") as printed,
        subprocess.Popen(words, stdout=printed, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stderr is not None
        errors = []
        for line in process.stderr:
            errors.append(line)
            print(line, end="", file=sys.stderr, flush=True)
        status = process.wait()
        printed.seek(0)
        return status, printed.read(), "".join(errors)


def main() -> None:
    """Measure, and write the file."""
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
    given = parser.parse_args()
    try:
        if pick_device(given.device).type == "cpu" and given.device == "auto":
            raise InputError(
                "this machine has no CUDA GPU that PyTorch sees; run it on one, or try it with --device cpu"
            )
        prompts = read_prompts(given.prompts, model_folder(given.model))[:2]
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    parts = ["# Measured on a GPU\n"]

    def say(text: str) -> None:
        parts.append(text)
        write_text(given.out, "\n".join(parts))

    print("the tests marked gpu, some minutes", file=sys.stderr, flush=True)
    status, told, _ = run("pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", given.tests)
    # pytest's status 5: no test was found
    failed = status not in (0, 5)
    faults = [line for line in told.splitlines() if line.startswith(("FAILED", "ERROR"))]
    last = (told.strip().splitlines() or ["none"])[-1].strip("= ")
    say("\n".join((f"Tests marked `gpu`: {last}\n", *(f"* {line}\n" for line in faults))))
    with TemporaryDirectory() as room, random_model(given.random) as random:
        for model, conditions in ((given.model, prompts), (str(random), ["207", "979"])):
            print(f"the race and the profile of {Path(model).name}", file=sys.stderr, flush=True)
            listed = Path(room) / "prompts.txt"
            write_text(listed, "\n".join(conditions))
            folder = Path(room) / Path(model).name
            asked = [
                "--model",
                model,
                "--device",
                given.device,
                "--dtype",
                given.dtype,
                "--methods",
                FIELD,
                "-n",
                given.n,
                "--prompts",
                listed,
                "-o",
                folder,
            ]
            asked += ["--compile"] if given.compile else []
            status, told, errors = run(
                "lanternpp",
                "bench",
                *asked,
                "--batch-sizes",
                given.batch_sizes,
                "--profile",
                "--no-plots",
                "--no-quality",
            )
            table = (
                (folder / "table.md").read_text(encoding="utf-8")
                if status == 0
                else f"Failed, status {status}\n"
            )
            failed |= status != 0
            say(f"## {Path(model).name}\n\n{table}\n```\n{told}{errors if status else ''}```\n")
    print(f"{given.out}: one file to send")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
