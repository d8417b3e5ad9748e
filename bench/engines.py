"""One decoder pass in several engines, in turn, beside what the machine can do at best; and how much each engine rounds.

    python bench/engines.py [--shapes S,XL,3B] [--engines ...] [--rows 2,10,16,26] [--kind amx] [-o engines.json]
    python bench/engines.py --show engines.json [more.json] [--into docs/performance.md]

A pass is the whole stack and the head over n rows (two branches of guidance with n / 2 nodes each) after 256 filled slots of the KV cache. S
has nature-128's weights, XL and 3B random ones in LlamaGen's shapes (arXiv 2406.06525). Each engine has a process of its own; they take
turns, and figures are medians. The roofline of a cell is the larger of weight bytes / bandwidth and 2 x rows x weights / rate, from
what this machine reads and computes, measured in the same run with loops in C (engines/rates.c): bandwidth over as many bytes as the
weights have, rates of the instructions that multiply bfloat16 or float32, or 8 bits, in registers.

Engines that are not installed are left out with a line that says how to get them: `pip install openvino llama-cpp-python gguf`, the last two beside
`CMAKE_ARGS=-DGGML_NATIVE=ON` for llama.cpp's own choice of instructions (GCC 12 miscompiles its AMX kernels; add
"-DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse -fno-tree-sra'"). torch-compile takes minutes on large shapes and runs on S alone unless it is
named. --kind imitates an older CPU: oneDNN and OpenVINO then use its instructions alone, llama.cpp no AMX, and our kernels are
those for it. Weights are written into --folder once: 0.3 GB for S, 9 for XL, 35 for 3B with all engines.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "engines"
PACKAGES = ("torch", "openvino", "llama-cpp-python", "lanternpp")
ENGINES = {
    "torch": ("PyTorch, bf16", 2, 0.2),
    "torch-compile": ("torch.compile, max-autotune, bf16", 2, 4.0),
    "openvino": ("OpenVINO, bf16", 2, 2.5),
    "openvino-int8": ("OpenVINO, W8A8 in groups of 64, head bf16", 1, 1.5),
    "llama.cpp": ("llama.cpp, BF16", 2, 0.2),
    "llama.cpp-int8": ("llama.cpp, Q8_0", 1, 1.2),
    "ours": ("**ours, bf16**", 2, 2.5),
    "ours-int8": ("**ours, int8**", 1, 1.5),
}
"""Label, bytes of a weight as it is read, bytes of memory that it takes besides mapped files."""
KINDS = {
    "x86-64-v3": "AVX2",
    "avx-vnni": "AVX2_VNNI",
    "x86-64-v4": "AVX512_CORE",
    "avx512-vnni": "AVX512_CORE_VNNI",
    "avx512-bf16": "AVX512_CORE_BF16",
    "amx": "AVX512_CORE_AMX",
}
"""CPUs by what they have, each more than the one before: our kernels' name and oneDNN's."""
INSTRUCTIONS = {
    "avx2 fma fp32": ("x86-64-v3", "fma", 2),
    "avx2 vpdpbusd": ("avx-vnni", "avx_vnni", 1),
    "avx512 fma fp32": ("x86-64-v4", "avx512f", 2),
    "avx512 vpdpbusd": ("avx512-vnni", "avx512_vnni", 1),
    "avx512 vdpbf16ps": ("avx512-bf16", "avx512_bf16", 2),
    "amx bf16": ("amx", "amx_bf16", 2),
    "amx int8": ("amx", "amx_int8", 1),
}
"""Of rates.c: the first kind that has it, the CPU's flag, and for weights of how many bytes it is."""
MARKS = ("<!-- engines: begin -->", "<!-- engines: end -->")


class Machine:
    """What the machine can do: rates of instructions in operations a second, and reading."""

    def __init__(self, folder: Path, threads: int, kind: str):
        path, self.threads = folder / "rates.so", threads
        command = ["cc", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", str(HERE / "rates.c"), "-o"]
        subprocess.run([*command, str(path)], check=True)
        self.library = ctypes.CDLL(str(path))
        self.library.rate.restype = self.library.reading.restype = ctypes.c_double
        self.readings: dict[int, float] = {}  # what `reading` gave
        info = Path("/proc/cpuinfo").read_text().splitlines()
        fields = dict(map(str.strip, line.split(":", 1)) for line in info if ":" in line)
        self.cpu, flags = fields.get("model name", "unknown"), fields.get("flags", "").split()
        kinds = list(KINDS)
        known = kinds if kind == "native" else kinds[: kinds.index(kind) + 1]
        names = [name for name, (at, flag, _) in INSTRUCTIONS.items() if at in known and flag in flags]
        self.rates = {name: self.library.rate(name.encode(), threads) for name in names}

    def reading(self, size: int) -> float:
        """Bytes a second from a buffer of so many bytes, or of 2 GB where it is larger; measured once."""
        if size not in self.readings:
            self.readings[size] = self.library.reading(ctypes.c_int64(min(size, 1 << 31)), self.threads)
        return self.readings[size]

    def rate(self, size: int) -> float:
        """Operations a second with weights of so many bytes; 8 bits may be widened, and bfloat16 too."""
        fit = [rate for name, rate in self.rates.items() if INSTRUCTIONS[name][2] >= size]
        return max(fit, default=float("inf"))

    def roofline(self, layers: int, head: int, size: int, rows: int) -> float:
        """Milliseconds of a pass at best; the head has two bytes a weight."""
        read = layers * size + head * 2
        compute = 2 * rows * (layers / self.rate(size) + head / self.rate(2))
        return 1e3 * max(read / self.reading(read), compute)


@dataclass
class Worker:
    """An engine's process."""

    engine: str
    process: subprocess.Popen[str]
    log: Path
    ms: dict[int, list[float]] = field(default_factory=dict)

    @classmethod
    def start(cls, engine: str, shape: str, options: argparse.Namespace) -> Worker:
        """Start it; `receive` says when it is ready."""
        env = os.environ | {"OMP_NUM_THREADS": str(options.threads), "MALLOC_MMAP_THRESHOLD_": "262144"}
        if options.kind != "native":
            env |= {"ONEDNN_MAX_CPU_ISA": KINDS[options.kind], "LANTERNPP_KERNELS": options.kind}
        command = [sys.executable, str(HERE / "worker.py"), engine, shape, str(options.folder)]
        log = options.folder / f"{engine}.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [*command, str(options.threads), options.kind],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        return cls(engine, process, log)

    def receive(self) -> dict[str, Any]:
        """Its next answer; {"unavailable": why} where it ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        lines = self.log.read_text(errors="replace").strip().splitlines() or ["no message"]
        return {"unavailable": f"it ended with status {self.process.wait()}: {lines[-1][:200]}"}

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            print(json.dumps(request), file=self.process.stdin, flush=True)
        return self.receive()

    def close(self) -> None:
        """End it."""
        self.process.communicate()


def note(text: str) -> None:
    """A line for who waits."""
    print(text, file=sys.stderr, flush=True)


def groups(engines: list[str], weights: int, limit: float) -> list[list[str]]:
    """Engines that take turns: as many as fit into `limit` bytes together."""
    found: list[list[str]] = []
    used = float("inf")
    for engine in engines:
        size = weights * ENGINES[engine][2]
        if used + size > limit:
            found.append([])
            used = 0
        found[-1].append(engine)
        used += size
    return found


def turns(workers: list[Worker], rows: list[int], seconds: float) -> None:
    """One round: every engine's passes over each number of rows."""
    for count in rows:
        for worker in list(workers):
            answer = worker.ask(rows=count, seconds=seconds)
            if "ms" in answer:
                worker.ms.setdefault(count, []).extend(answer["ms"])
            else:
                note(f"{worker.engine}: {answer['unavailable']}")
                workers.remove(worker)


def time_shape(shape: str, machine: Machine, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A shape's cells: engine, rows, milliseconds, and the roofline's."""
    engines = [name for name in options.engines if shape == "S" or name != "torch-compile" or options.named]
    probe = Worker.start("torch", shape, options)  # it writes the weights
    size = probe.receive()
    probe.close()
    layers, head = size["layers"], size["head"]
    cells = []
    for group in groups(engines, layers + head, 1e9 * options.memory):
        workers = []
        for engine in group:
            worker = Worker.start(engine, shape, options)
            answer = worker.receive()
            if "unavailable" in answer:
                note(f"{shape}, {engine}: left out: {answer['unavailable']}")
            else:
                workers.append(worker)
        if workers:
            note(f"{shape}: {', '.join(worker.engine for worker in workers)}")
        turns(workers, options.rows, 0)  # compiles and warms up
        for worker in workers:
            worker.ms.clear()
        for _ in range(options.rounds):
            turns(workers, options.rows, options.seconds)
        for worker in workers:
            memory = worker.ask(rows=options.rows[0], seconds=0).get("memory")
            worker.close()
            for rows, taken in worker.ms.items():
                best = machine.roofline(layers, head, ENGINES[worker.engine][1], rows)
                cell = {"shape": shape, "engine": worker.engine, "rows": rows, "weights": layers + head}
                cells.append(
                    {**cell, "ms": statistics.median(taken), "roofline_ms": best, "memory_gb": memory}
                )
    return cells


def measure_rounding(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each engine's distances from float32, on S. llama.cpp has no rotations along two axes; compiled it rounds as PyTorch does."""
    found = []
    for engine in ("float32", *options.engines):
        if engine.startswith("llama.cpp") or engine == "torch-compile":
            continue
        worker = Worker.start(engine, "S", options)
        if "unavailable" not in worker.receive():
            answer = worker.ask(rounding=True)
            if "unavailable" not in answer and engine != "float32":
                found.append({"engine": engine, **answer})
        worker.close()
    return found


def milliseconds(ms: float) -> str:
    """Three digits, or all before the point."""
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def table(result: dict[str, Any]) -> str:
    """A result in Markdown."""
    rates = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in result["rates"].items())
    reads = ", ".join(
        f"{int(size) / 1e6:,.0f} MB {rate / 1e9:.0f}" for size, rate in result["reading"].items()
    )
    packages = ", ".join(f"{name} {number}" for name, number in result["packages"].items())
    imitated = "" if result["kind"] == "native" else f", as a CPU of the kind {result['kind']}"
    lines = [f"{result['cpu']}{imitated}, {result['threads']} threads; {packages}.", ""]
    lines += [f"Rates, GFLOP/s or GOP/s: {rates}. Reading, GB/s: {reads}.", ""]
    cells = {(cell["shape"], cell["engine"], cell["rows"]): cell for cell in result["cells"]}
    for shape in dict.fromkeys(shape for shape, _, _ in cells):
        rows = [rows for rows in result["rows"] if any(at[0] == shape and at[2] == rows for at in cells)]
        weights = next(cell["weights"] for at, cell in cells.items() if at[0] == shape)
        lines.append(
            f"| {shape}, {weights / 1e6:,.0f} M weights | {' | '.join(f'{n} rows' for n in rows)} | GB |"
        )
        lines.append(f"|---|{'--:|' * (len(rows) + 1)}")
        for engine, (label, _, _) in ENGINES.items():
            own = [cells.get((shape, engine, count)) for count in rows]
            if not any(own):
                continue
            texts = [f"{milliseconds(c['ms'])} x{c['ms'] / c['roofline_ms']:.1f}" if c else "" for c in own]
            memory = next(cell["memory_gb"] for cell in own if cell)
            lines.append(f"| {label} | {' | '.join(texts)} | {memory:.1f} |")
        lines.append("")
    if result["rounding"]:
        lines += [
            "| against float32 on S | KL, nats | total variation | KL after guidance 4 |",
            "|---|--:|--:|--:|",
        ]
        for one in result["rounding"]:
            texts = [
                f"{one[name]:.1e}" if "KL" in name else f"{one[name]:.4f}"
                for name in ("KL", "TV", "KL guided")
            ]
            lines.append(f"| {ENGINES[one['engine']][0]} | {' | '.join(texts)} |")
        lines.append("")
    return "\n".join(lines)


def insert(text: str, path: Path) -> None:
    """Put it between the marks of a page."""
    page = path.read_text()
    if any(mark not in page for mark in MARKS):
        sys.exit(f"{path} has no line {MARKS[0]} and {MARKS[1]}")
    before, after = page.split(MARKS[0])[0], page.split(MARKS[1])[1]
    path.write_text(f"{before}{MARKS[0]}\n\n{text}\n{MARKS[1]}{after}")


def installed(name: str) -> str | None:
    """A package's version."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def listed(text: str) -> list[str]:
    """The parts between commas."""
    return text.split(",")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=listed, default=["S", "XL", "3B"])
    parser.add_argument("--engines", type=listed, help=", ".join(ENGINES))
    parser.add_argument("--rows", type=lambda text: [int(n) for n in listed(text)], default=[2, 10, 16, 26])
    parser.add_argument("--kind", choices=("native", *KINDS), default="native")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="of an engine's turn at one number of rows"
    )
    parser.add_argument("--memory", type=float, default=10, help="GB for engines that take turns")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "engines-weights")
    parser.add_argument("--no-rounding", action="store_true")
    parser.add_argument("-o", "--out", type=Path, default=Path("engines.json"))
    parser.add_argument("--show", type=Path, nargs="+", help="files of earlier runs, instead of measuring")
    parser.add_argument("--into", type=Path, help="a page whose marked part the tables replace")
    options = parser.parse_args()
    if not options.show:
        options.named = options.engines is not None
        options.engines = options.engines or list(ENGINES)
        if unknown := set(options.engines) - set(ENGINES):
            parser.error(f"unknown engines: {', '.join(unknown)}")
        options.folder.mkdir(parents=True, exist_ok=True)
        machine = Machine(options.folder, options.threads, options.kind)
        cells = [cell for shape in options.shapes for cell in time_shape(shape, machine, options)]
        result = {
            "cpu": machine.cpu,
            "kind": options.kind,
            "threads": options.threads,
            "rows": options.rows,
            "packages": {name: found for name in PACKAGES if (found := installed(name))},
            "rates": machine.rates,
            "reading": dict(sorted(machine.readings.items())),
            "cells": cells,
            "rounding": [] if options.no_rounding else measure_rounding(options),
        }
        options.out.write_text(json.dumps(result, indent=1))
    text = "\n".join(table(json.loads(path.read_text())) for path in options.show or [options.out])
    print(text)
    if options.into:
        insert(text, options.into)


if __name__ == "__main__":
    main()
