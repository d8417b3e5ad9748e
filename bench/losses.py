"""The losses of a drafter's training side by side: same pictures, same seed, same steps, one command a row.

    python bench/losses.py --data DIR [--model nature-128] [--out runs/losses] [--steps 160] [--seeds 0,1]

Every row is one `lanternpp train` on the same evenly spread part of the photos, whose codes and features
are made once. A row that is there is not trained again, and one that was stopped goes on, so that the same command
resumes; the table is printed from whatever is finished (`--table`: only that).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lanternpp.api.model import model_folder

ROWS: dict[str, dict[str, Any]] = {
    "eagle paper": {"loss": "paper"},
    "eagle guided": {"loss": "guided"},
    "eagle lk": {"loss": "lk"},
    "eagle both": {"loss": "both"},
    "eagle both, weight 1": {"loss": "both", "weight": 1.0},
    "eagle lk, weight 1": {"loss": "lk", "weight": 1.0},
    "eagle guided, 2 rounds": {"loss": "guided", "rounds": 2},
    "eagle both, 2 rounds": {"loss": "both", "rounds": 2},
    "parallel guided": {"loss": "guided"},
    "parallel lk": {"loss": "lk"},
    "parallel both": {"loss": "both"},
    "parallel block": {"loss": "block"},
}
PARTS = ("tokenizer", "target")


def main() -> None:
    """Train what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="nature-128")
    parser.add_argument("--out", type=Path, default=Path("runs/losses"))
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--pictures", type=int, default=640, help="to train on")
    parser.add_argument("--held", type=int, default=64, help="to validate on")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--rows", default=",".join(name.replace(",", "") for name in ROWS))
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument(
        "--time", action="store_true", help="train nothing, and time steps of every loss in turn"
    )
    args = parser.parse_args()
    names = [name for name in ROWS if name.replace(",", "") in args.rows.split(",")]
    seeds = [int(seed) for seed in args.seeds.split(",")]
    if not (args.table or args.time):
        model = copied(args.model, args.out / "model")
        data = thinned(args.data, args.out / "data", {"train": args.pictures, "val": args.held})
        for seed in seeds:
            for name in names:
                train(name, seed, model, data, args)
    print(
        table({(name, seed): row for name in ROWS for seed in seeds if (row := found(args.out, name, seed))})
    )


def copied(model: str, folder: Path) -> Path:
    """The model in a folder of its own, where the codes of the pictures can be kept for all rows."""
    for part in PARTS:
        if not (folder / part).is_dir():
            shutil.copytree(model_folder(model) / part, folder / part)
    shutil.copyfile(model_folder(model) / "defaults.json", folder / "defaults.json")
    return folder


def thinned(data: Path, folder: Path, counts: dict[str, int]) -> Path:
    """An imagefolder of links to an evenly spread part of another's pictures."""
    for split, count in counts.items():
        lines = (data / split / "metadata.jsonl").read_text(encoding="utf-8").splitlines()
        rows = sorted((json.loads(line) for line in lines), key=lambda row: row["file_name"])
        rows = [rows[i * len(rows) // count] for i in range(count)]
        for row in rows:
            link = folder / split / row["file_name"]
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.symlink_to((data / split / row["file_name"]).resolve())
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / split / "metadata.jsonl").write_text(text, encoding="utf-8")
    return folder


def place(out: Path, name: str, seed: int) -> Path:
    """The folder of a row."""
    return out / f"{name.replace(',', '').replace(' ', '-')}-{seed}"


def train(name: str, seed: int, model: Path, data: Path, args: argparse.Namespace) -> None:
    """Train a row, or resume it."""
    if found(args.out, name, seed):
        return
    command = [
        sys.executable,
        "-m",
        "lanternpp",
        "train",
        "drafter",
        "--model",
        str(model),
        "--data",
        str(data),
    ]
    command += ["--out", str(place(args.out, name, seed)), "--steps", str(args.steps), "--seed", str(seed)]
    command += ["--batch-size", str(args.batch_size), "--crops", "1", "--checks", "0", "--save-minutes", "2"]
    command += ["--warmup", "20", "--decay", "0.98"]
    command += ["--kind", "parallel"] if name.startswith("parallel") else ["--cache-features"]
    for option, value in ROWS[name].items():
        command += [f"--{option}", str(value)]
    print(f"== {name}, seed {seed}", file=sys.stderr, flush=True)
    subprocess.run(command, check=True)


def times(names: list[str], args: argparse.Namespace, rounds: int = 5) -> str:
    """Processor seconds of a step, the target's pass in it: the least of some steps, the rows in turn."""
    from lanternpp.training.drafter import DrafterSettings, DrafterTask
    from lanternpp.training.material.gather import gather
    from lanternpp.training.parallel import ParallelSettings, ParallelTask
    from lanternpp.training.run import TrainingOptions

    options = TrainingOptions(args.out / "times", 1)
    read = gather(args.out / "model", options, args.out / "data", None, {"cfg": None}, True, 1, None)
    tasks: dict[str, Any] = {}
    for name in names:
        shared = {"batch_size": args.batch_size, "cfg": read.cfg, **ROWS[name]}
        known = read.target, read.codes, read.origin, options.device
        eagle = name.startswith("eagle")
        tasks[name] = (
            DrafterTask(DrafterSettings(**shared), 1, *known)
            if eagle
            else ParallelTask(ParallelSettings(**shared), 1, *known)
        )
    least = dict.fromkeys(names, float("inf"))
    for step in range(rounds + 1):
        for name, task in tasks.items():
            began = time.process_time()
            task.step(step, 0.0)
            if step:  # what is done once is done in the first
                least[name] = min(least[name], time.process_time() - began)
    rows = [f"| {name} | {value:.2f} |" for name, value in least.items()]
    return "\n".join(["| loss | seconds a step |", "|---|--:|", *rows, ""])


def found(out: Path, name: str, seed: int) -> dict[str, Any] | None:
    """The provenance of a finished row; None where it is not finished."""
    file = place(out, name, seed) / "provenance.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def table(rows: dict[tuple[str, int], dict[str, Any]]) -> str:
    """Markdown, a table for each kind of drafter."""
    seen = {
        "eagle": {
            "accept": "acceptance",
            "accept2": "second level",
            "lk": "-log acceptance",
            "agree": "agreement",
        },
        "parallel": {f"accept[{i}]": f"level {i + 1}" for i in (0, 1, 3, 7, 11)}
        | {"codes": "codes of a draft, by blocks", "chain": "by a walk"},
    }
    lines = []
    for kind, columns in seen.items():
        titles = ["loss", "seed", *columns.values()]
        titles += ["kept by depth", "codes per pass"] if kind == "eagle" else []
        lines += ["| " + " | ".join(titles) + " |", "|---|" + "--:|" * (len(titles) - 1)]
        for (name, seed), row in rows.items():
            if not name.startswith(kind):
                continue
            figures = dict(row["validation"])
            if kind == "parallel":
                figures |= {f"accept[{i}]": value for i, value in enumerate(figures["accept"])}
            cells = [name.removeprefix(kind).strip(), str(seed), *(f"{figures[key]:.3f}" for key in columns)]
            if kind == "eagle":
                cells += [" ".join(f"{x:.2f}" for x in figures["kept_by_depth"] if x is not None)]
                cells += [f"{figures['codes_per_pass']:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
