"""Load test of a running `lanternpp serve`: responses by status, pictures per second, latencies, and equality of pictures.

Every client sends one request after another, each with another seed. After a 429 it waits for Retry-After and sends the request
again. --check N draws N of the pictures again in this process, with the settings of the response, and compares the pixels; the
model must be the server's. --pid records the server's resident memory during the run.

    lanternpp serve --slots 8 & python bench/serve_load.py --clients 32 --seconds 60 --check 8 --pid $!
    python bench/serve_load.py --requests 1000 --clients 16 --pid PID           # does the memory grow?
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
    seconds: list[float] = field(default_factory=list)  # from a request to its response, by picture
    # facts, prompt and PNG of at most --keep pictures
    pictures: list[dict[str, Any]] = field(default_factory=list)
    batch_sizes: Counter[int] = field(default_factory=Counter)
    memory: list[tuple[int, float]] = field(default_factory=list)  # number of pictures, and MiB then
    num_requests: int = 0


def resident_memory(pid: int | None) -> float:
    """Return the resident memory of a process in MiB, or 0 for None."""
    if pid is None:
        return 0.0
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


async def client(
    number: int, http: httpx.AsyncClient, run: Run, args: argparse.Namespace, end: float
) -> None:
    """Send requests for one picture each until the end of the run."""
    rng = random.Random(args.seed + number)
    while time.monotonic() < end and (args.requests is None or run.num_requests < args.requests):
        run.num_requests += 1
        body = {"prompt": rng.choice(args.prompts), "seed": rng.randrange(1 << 31), **args.body}
        start = time.monotonic()
        while True:
            try:
                response = await http.post("/v1/images/generations", json=body)
            except httpx.HTTPError as error:
                run.statuses[type(error).__name__] += 1
                break
            run.statuses[str(response.status_code)] += 1
            if response.status_code == 429 and time.monotonic() < end:
                await asyncio.sleep(float(response.headers["retry-after"]) * rng.uniform(0.5, 1))
                continue
            break
        if response.status_code == 200:
            record(run, body, response.json()["data"][0], time.monotonic() - start, args)


def record(
    run: Run, body: dict[str, Any], data: dict[str, Any], seconds: float, args: argparse.Namespace
) -> None:
    """Record the latency, the facts and the PNG of a picture."""
    run.seconds.append(seconds)
    run.batch_sizes[data["lanternpp"]["batch_size"]] += 1
    if len(run.pictures) < args.keep:
        run.pictures.append({"prompt": body["prompt"], "png": data["b64_json"], **data["lanternpp"]})
    if args.pid and len(run.seconds) % 25 == 0:
        run.memory.append((len(run.seconds), resident_memory(args.pid)))


async def load(args: argparse.Namespace) -> Run:
    """Run all clients at once."""
    run, limits = Run(), httpx.Limits(max_connections=args.clients)
    end = time.monotonic() + (args.seconds if args.requests is None else 1e9)
    async with httpx.AsyncClient(base_url=args.url, timeout=600, limits=limits, headers=args.headers) as http:
        await asyncio.gather(*(client(i, http, run, args, end) for i in range(args.clients)))
    return run


def count_differing(run: Run, args: argparse.Namespace) -> int:
    """Draw some of the pictures again in this process, and return how many differ from the served ones."""
    from PIL import Image

    from lanternpp import Pipeline

    pipe = Pipeline.from_pretrained(args.model, dtype=args.dtype, tuned=False)
    pictures = random.Random(args.seed).sample(run.pictures, min(args.check, len(run.pictures)))
    num_differing = 0
    for picture in pictures:
        expected = pipe(picture["prompt"], seed=picture["seed"], **picture["settings"]).images[0]
        served = Image.open(io.BytesIO(base64.b64decode(picture["png"])))
        if served.convert("RGB").tobytes() != expected.convert("RGB").tobytes():
            num_differing += 1
            print(
                f"differs: {picture['prompt']!r}, seed {picture['seed']}, batch size {picture['batch_size']}"
            )
    print(f"{len(pictures) - num_differing} of {len(pictures)} pictures are equal when drawn again")
    return num_differing


def main() -> None:
    """Run the load, and print a report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--requests", type=int, help="end after this many requests, in place of --seconds")
    parser.add_argument(
        "--body", type=json.loads, default={}, help="further fields of every request, as JSON"
    )
    parser.add_argument(
        "--prompts", type=Path, help="file with a prompt a line; default: a few of nature-128's"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", type=int, default=0)
    parser.add_argument("--keep", type=int, default=1000, help="pictures of which --check chooses")
    parser.add_argument("--model", default="nature-128")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--pid", type=int)
    parser.add_argument("--key")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.headers = {"authorization": f"Bearer {args.key}"} if args.key else {}
    args.prompts = args.prompts.read_text(encoding="utf-8").splitlines() if args.prompts else PROMPTS

    memory_before, start = resident_memory(args.pid), time.monotonic()
    run = asyncio.run(load(args))
    seconds, memory_after = time.monotonic() - start, resident_memory(args.pid)
    percentiles = quantiles(run.seconds, n=100, method="inclusive") if len(run.seconds) > 1 else [0.0] * 99
    report = {
        "clients": args.clients,
        "seconds": seconds,
        "statuses": dict(run.statuses),
        "pictures": len(run.seconds),
        "pictures_per_second": len(run.seconds) / seconds,
        "p50": percentiles[49],
        "p95": percentiles[94],
        "batch_sizes": dict(sorted(run.batch_sizes.items())),
        "memory": (
            {"before": memory_before, "after": memory_after, "by_pictures": run.memory} if args.pid else None
        ),
    }
    if args.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name}: {value}")
    num_differing = count_differing(run, args) if args.check else 0
    failed = run.statuses.keys() - {"200", "429"}
    raise SystemExit(1 if num_differing or failed else 0)


if __name__ == "__main__":
    main()
