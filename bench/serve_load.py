"""Load on a running `lanternpp serve`: answers by status, pictures per second, how long they take, and are they right.

Every client asks for one picture after another, each of its own seed. On 429 it waits as told and asks again. With
--check, that many pictures are drawn once more, alone and at the same rows, in this process, and compared byte by byte;
the model must be the server's. With --pid, the server's resident memory is read in the course of the run.

    lanternpp serve --slots 8 & python bench/serve_load.py --clients 32 --seconds 60 --check 8 --pid $!
    python bench/serve_load.py --requests 1000 --clients 16 --pid PID           # is memory flat?
    lanternpp serve --slots 1 & python bench/serve_load.py --clients 32         # the same load, one at a time
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx

PROMPTS = (
    "a photo of a red tulip",
    "a photo of the sea at sunset",
    "a photo of a sunflower under a blue sky",
    "a photo of a forest",
    "a photo of a mountain",
)


@dataclass
class Run:
    """Counts and measurements of a run."""

    statuses: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)  # of pictures, from the request to the answer
    pictures: list[dict[str, Any]] = field(default_factory=list)  # facts, prompt and bytes of some
    rows: Counter[int] = field(default_factory=Counter)
    memory: list[tuple[int, float]] = field(default_factory=list)  # pictures so far, MiB
    sent: int = 0


def resident(pid: int | None) -> float:
    """Resident memory of a process, MiB."""
    if pid is None:
        return 0.0
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


async def client(
    number: int, http: httpx.AsyncClient, run: Run, args: argparse.Namespace, end: float
) -> None:
    """One picture after another."""
    luck = random.Random(args.seed + number)
    while time.monotonic() < end and (args.requests is None or run.sent < args.requests):
        run.sent += 1
        body = {"prompt": luck.choice(args.said), "seed": luck.randrange(1 << 31), **args.body}
        began = time.monotonic()
        while True:
            try:
                answer = await http.post("/v1/images/generations", json=body)
            except httpx.HTTPError as error:
                run.statuses[type(error).__name__] += 1
                break
            run.statuses[str(answer.status_code)] += 1
            if answer.status_code == 429 and time.monotonic() < end:
                await asyncio.sleep(float(answer.headers["retry-after"]) * luck.uniform(0.5, 1))
                continue
            break
        if answer.status_code == 200:
            keep(run, body, answer.json()["data"][0], time.monotonic() - began, args)


def keep(
    run: Run, body: dict[str, Any], data: dict[str, Any], seconds: float, args: argparse.Namespace
) -> None:
    """Keep the facts and bytes of a picture."""
    run.seconds.append(seconds)
    run.rows[data["lanternpp"]["batch_size"]] += 1
    if len(run.pictures) < args.keep:
        run.pictures.append({"prompt": body["prompt"], "file": data["b64_json"], **data["lanternpp"]})
    if args.pid and len(run.seconds) % 25 == 0:
        run.memory.append((len(run.seconds), resident(args.pid)))


async def load(args: argparse.Namespace) -> Run:
    """All clients at once."""
    run, limits = Run(), httpx.Limits(max_connections=args.clients)
    end = time.monotonic() + (args.seconds if args.requests is None else 1e9)
    async with httpx.AsyncClient(base_url=args.url, timeout=600, limits=limits, headers=args.headers) as http:
        await asyncio.gather(*(client(i, http, run, args, end) for i in range(args.clients)))
    return run


def differing(run: Run, args: argparse.Namespace) -> int:
    """How many of the pictures are others than those drawn alone at the same rows."""
    from PIL import Image

    from lanternpp import Pipeline

    pipe = Pipeline.from_pretrained(args.model, dtype=args.dtype, tuned=False)
    chosen = random.Random(args.seed).sample(run.pictures, min(args.check, len(run.pictures)))
    wrong = 0
    for one in chosen:
        alone = pipe(one["prompt"], seed=one["seed"], **one["settings"]).images[0]
        served = Image.open(io.BytesIO(base64.b64decode(one["file"])))
        if served.convert("RGB").tobytes() != alone.convert("RGB").tobytes():
            wrong += 1
            print(f"differs: {one['prompt']!r}, seed {one['seed']}, rows {one['rows']}")
    print(f"{len(chosen) - wrong} of {len(chosen)} pictures equal those drawn alone at the same rows")
    return wrong


def main() -> None:
    """Load, then report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--requests", type=int, help="so many pictures in all, in place of --seconds")
    parser.add_argument("--body", type=json.loads, default={}, help="more fields of every request, as JSON")
    parser.add_argument("--prompts", type=Path, help="one a line, in place of some that nature-128 knows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", type=int, default=0)
    parser.add_argument("--keep", type=int, default=1000, help="pictures of which some are checked")
    parser.add_argument("--model", default="nature-128")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--pid", type=int)
    parser.add_argument("--key")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.headers = {"authorization": f"Bearer {args.key}"} if args.key else {}

    args.said = args.prompts.read_text(encoding="utf-8").splitlines() if args.prompts else PROMPTS

    before, began = resident(args.pid), time.monotonic()
    run = asyncio.run(load(args))
    took, after = time.monotonic() - began, resident(args.pid)
    cuts = quantiles(run.seconds, n=100, method="inclusive") if len(run.seconds) > 1 else [0.0] * 99
    report = {
        "clients": args.clients,
        "seconds": took,
        "statuses": dict(run.statuses),
        "pictures": len(run.seconds),
        "pictures_per_second": len(run.seconds) / took,
        "p50": cuts[49],
        "p95": cuts[94],
        "rows": dict(sorted(run.rows.items())),
        "memory": {"before": before, "after": after, "by_pictures": run.memory} if args.pid else None,
    }
    if args.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name}: {value}")
    wrong = differing(run, args) if args.check else 0
    others = {status for status in run.statuses if status not in ("200", "429")}
    raise SystemExit(1 if wrong or others else 0)


if __name__ == "__main__":
    main()
