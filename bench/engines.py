"""Times of a decoder pass in several engines, in turn, beside the machine's roofline; and the rounding of each engine.

    python bench/engines.py [--shapes S,XL,3B] [--engines ...] [--rows 2,10,16,26] [--kind amx] [-o engines.json]
    python bench/engines.py --show engines.json [more.json] [--into docs/performance.md]

A pass is all layers and the head over n rows (two branches of guidance with n / 2 nodes each) after 256 filled slots of the KV cache. S
has nature-128's weights, XL and 3B have random weights in LlamaGen's shapes (arXiv 2406.06525). Each engine runs in a process of its
own; engines take turns, and figures are medians. The roofline of a cell is the larger of weight bytes / bandwidth and 2 x rows x weights
/ rate. Loops in C (engines/rates.c) measure bandwidth and rates in the same run: bandwidth over as many bytes as the weights have, and
rates of the instructions that multiply bfloat16, float32 or 8-bit integers in registers.

Engines that are not installed are left out, with a message. `pip install openvino llama-cpp-python gguf` installs them; set
`CMAKE_ARGS=-DGGML_NATIVE=ON` so that llama.cpp chooses its instructions (GCC 12 miscompiles its AMX kernels: add
"-DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse -fno-tree-sra'"). torch-compile takes minutes on large shapes and runs on S alone unless
--engines names it. --kind emulates an older CPU: oneDNN and OpenVINO then use its instructions only, llama.cpp uses no AMX, and our
kernels are those of this kind. Weights are written into --folder once: 0.3 GB for S, 9 for XL, 35 for 3B with all engines.
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
    "openvino-int8": ("OpenVINO, W8A8", 1, 1.5),
    "llama.cpp": ("llama.cpp, BF16", 2, 0.2),
    "llama.cpp-int8": ("llama.cpp, Q8_0", 1, 1.2),
    "llama.cpp-int4": ("llama.cpp, Q4_0", 0.56, 0.7),
    "ours": ("**ours, bf16**", 2, 2.5),
    "ours-int8": ("**ours, int8**", 1, 1.5),
    "ours-int4": ("**ours, int4**", 0.53, 1.5),
}
"""By engine: its label, the bytes per weight that it reads, and the bytes per weight in memory besides mapped files."""
KINDS = {
    "x86-64-v3": "AVX2",
    "avx-vnni": "AVX2_VNNI",
    "x86-64-v4": "AVX512_CORE",
    "avx512-vnni": "AVX512_CORE_VNNI",
    "avx512-bf16": "AVX512_CORE_BF16",
    "amx": "AVX512_CORE_AMX",
}
"""Kinds of CPUs in ascending order: the name in our kernels, and the name in oneDNN."""
INSTRUCTIONS = {
    "avx2 fma fp32": ("x86-64-v3", "fma", 2),
    "avx2 vpdpbusd": ("avx-vnni", "avx_vnni", 1),
    "avx512 fma fp32": ("x86-64-v4", "avx512f", 2),
    "avx512 vpdpbusd": ("avx512-vnni", "avx512_vnni", 1),
    "avx512 vdpbf16ps": ("avx512-bf16", "avx512_bf16", 2),
    "amx bf16": ("amx", "amx_bf16", 2),
    "amx int8": ("amx", "amx_int8", 1),
}
"""By instruction of rates.c: the first kind of CPU that has it, its flag in /proc/cpuinfo, and the bytes of the weights that it reads."""
MARKS = ("<!-- engines: begin -->", "<!-- engines: end -->")


class Machine:
    """The measured limits of the machine: rates of instructions in operations per second, and bandwidths in bytes per second."""

    def __init__(self, folder: Path, threads: int, kind: str):
        path, self.threads = folder / "rates.so", threads
        command = ["cc", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", str(HERE / "rates.c"), "-o"]
        subprocess.run([*command, str(path)], check=True)
        self.library = ctypes.CDLL(str(path))
        self.library.rate.restype = self.library.reading.restype = ctypes.c_double
        self.bandwidths: dict[int, float] = {}  # by bytes of the buffer
        info = Path("/proc/cpuinfo").read_text().splitlines()
        fields = dict(map(str.strip, line.split(":", 1)) for line in info if ":" in line)
        self.cpu, flags = fields.get("model name", "unknown"), fields.get("flags", "").split()
        kinds = list(KINDS)
        allowed_kinds = kinds if kind == "native" else kinds[: kinds.index(kind) + 1]
        names = [
            name
            for name, (first_kind, flag, _) in INSTRUCTIONS.items()
            if first_kind in allowed_kinds and flag in flags
        ]
        self.rates = {name: self.library.rate(name.encode(), threads) for name in names}

    def bandwidth(self, size: int) -> float:
        """Return bytes per second read from a buffer of `size` bytes, at most 2 GB; a size is measured once."""
        if size not in self.bandwidths:
            self.bandwidths[size] = self.library.reading(ctypes.c_int64(min(size, 1 << 31)), self.threads)
        return self.bandwidths[size]

    def rate(self, size: float) -> float:
        """Return operations per second with weights of `size` bytes, which may be widened to a larger type."""
        rates = [rate for name, rate in self.rates.items() if INSTRUCTIONS[name][2] >= size]
        return max(rates, default=float("inf"))

    def roofline(self, layers: int, head: int, size: float, rows: int) -> float:
        """Return the least milliseconds of a pass. layers, head: numbers of weights; the head has two bytes per weight."""
        num_bytes = int(layers * size) + head * 2
        compute = 2 * rows * (layers / self.rate(size) + head / self.rate(2))
        return 1e3 * max(num_bytes / self.bandwidth(num_bytes), compute)


@dataclass
class Worker:
    """The process of an engine, and its milliseconds per pass by number of rows."""

    engine: str
    process: subprocess.Popen[str]
    log: Path
    ms: dict[int, list[float]] = field(default_factory=dict)

    @classmethod
    def start(cls, engine: str, shape: str, options: argparse.Namespace) -> Worker:
        """Start the process; its first answer follows when it is ready."""
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
        """Return the next answer, or {"unavailable": reason} if the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        lines = self.log.read_text(errors="replace").strip().splitlines() or ["no message"]
        return {"unavailable": f"the process ended with status {self.process.wait()}: {lines[-1][:200]}"}

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request, and return the answer."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            print(json.dumps(request), file=self.process.stdin, flush=True)
        return self.receive()

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def say(text: str) -> None:
    """Print a line on stderr."""
    print(text, file=sys.stderr, flush=True)


def group_engines(engines: list[str], weights: int, max_bytes: float) -> list[list[str]]:
    """Split engines into groups that fit into memory together; the engines of a group take turns."""
    groups: list[list[str]] = []
    used = float("inf")
    for engine in engines:
        size = weights * ENGINES[engine][2]
        if used + size > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(engine)
        used += size
    return groups


def run_round(workers: list[Worker], row_counts: list[int], seconds: float) -> None:
    """Time passes of every engine over each number of rows, and remove engines that have ended from `workers`."""
    for count in row_counts:
        for worker in list(workers):
            answer = worker.ask(rows=count, seconds=seconds)
            if "ms" in answer:
                worker.ms.setdefault(count, []).extend(answer["ms"])
            else:
                say(f"{worker.engine}: {answer['unavailable']}")
                workers.remove(worker)


def time_shape(shape: str, machine: Machine, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time all engines on a shape, and return a cell for each engine and number of rows."""
    engines = [name for name in options.engines if shape == "S" or name != "torch-compile" or options.named]
    # The first worker writes the weights.
    probe = Worker.start("torch", shape, options)
    size = probe.receive()
    probe.close()
    layers, head = size["layers"], size["head"]
    cells = []
    for group in group_engines(engines, layers + head, 1e9 * options.memory):
        workers = []
        for engine in group:
            worker = Worker.start(engine, shape, options)
            answer = worker.receive()
            if "unavailable" in answer:
                say(f"{shape}, {engine}: left out: {answer['unavailable']}")
            else:
                workers.append(worker)
        if workers:
            say(f"{shape}: {', '.join(worker.engine for worker in workers)}")
        run_round(workers, options.rows, 0)  # compile and warm up
        for worker in workers:
            worker.ms.clear()
        for _ in range(options.rounds):
            run_round(workers, options.rows, options.seconds)
        for worker in workers:
            memory = worker.ask(rows=options.rows[0], seconds=0).get("memory")
            worker.close()
            for rows, ms in worker.ms.items():
                roofline = machine.roofline(layers, head, ENGINES[worker.engine][1], rows)
                cell = {"shape": shape, "engine": worker.engine, "rows": rows, "weights": layers + head}
                cells.append(
                    {**cell, "ms": statistics.median(ms), "roofline_ms": roofline, "memory_gb": memory}
                )
    return cells


def measure_rounding(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the distances of each engine from float32, on S.

    llama.cpp is left out, as it has no rotary embedding along two axes, and torch-compile, as it rounds as PyTorch does.
    """
    rows = []
    for engine in ("float32", *options.engines):
        if engine.startswith("llama.cpp") or engine == "torch-compile":
            continue
        worker = Worker.start(engine, "S", options)
        if "unavailable" not in worker.receive():
            answer = worker.ask(rounding=True)
            if "unavailable" not in answer and engine != "float32":
                rows.append({"engine": engine, **answer})
        worker.close()
    return rows


def milliseconds(ms: float) -> str:
    """Return milliseconds as text with three digits, or without decimals from 100 on."""
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def table(result: dict[str, Any]) -> str:
    """Return a result as tables in Markdown."""
    rates = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in result["rates"].items())
    bandwidths = ", ".join(
        f"{int(size) / 1e6:,.0f} MB {rate / 1e9:.0f}" for size, rate in result["reading"].items()
    )
    packages = ", ".join(f"{name} {number}" for name, number in result["packages"].items())
    emulated = "" if result["kind"] == "native" else f", as a CPU of the kind {result['kind']}"
    lines = [f"{result['cpu']}{emulated}, {result['threads']} threads; {packages}.", ""]
    lines += [f"Rates, GFLOP/s or GOP/s: {rates}. Reading, GB/s: {bandwidths}.", ""]
    cells = {(cell["shape"], cell["engine"], cell["rows"]): cell for cell in result["cells"]}
    for shape in dict.fromkeys(shape for shape, _, _ in cells):
        rows = [rows for rows in result["rows"] if any(key[0] == shape and key[2] == rows for key in cells)]
        weights = next(cell["weights"] for key, cell in cells.items() if key[0] == shape)
        lines.append(f"| {shape}, {weights / 1e6:,.0f} M weights | {' | '.join(f'{n} rows' for n in rows)} |")
        lines.append(f"|---|{'--:|' * len(rows)}")
        for engine, (label, _, _) in ENGINES.items():
            engine_cells = [cells.get((shape, engine, count)) for count in rows]
            if not any(engine_cells):
                continue
            texts = [
                f"{milliseconds(c['ms'])} x{c['ms'] / c['roofline_ms']:.1f}" if c else ""
                for c in engine_cells
            ]
            lines.append(f"| {label} | {' | '.join(texts)} |")
        lines.append("")
    if result["rounding"]:
        lines += [
            "| against float32 on S | KL, nats | total variation | KL after guidance 4 |",
            "|---|--:|--:|--:|",
        ]
        for row in result["rounding"]:
            texts = [
                f"{row[name]:.1e}" if "KL" in name else f"{row[name]:.4f}"
                for name in ("KL", "TV", "KL guided")
            ]
            lines.append(f"| {ENGINES[row['engine']][0]} | {' | '.join(texts)} |")
        lines.append("")
    return "\n".join(lines)


def insert(text: str, path: Path) -> None:
    """Replace the text between the marks of a page."""
    page = path.read_text()
    if any(mark not in page for mark in MARKS):
        sys.exit(f"{path} has no line {MARKS[0]} and {MARKS[1]}")
    before, after = page.split(MARKS[0])[0], page.split(MARKS[1])[1]
    path.write_text(f"{before}{MARKS[0]}\n\n{text}\n{MARKS[1]}{after}")


def installed_version(name: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def split(text: str) -> list[str]:
    """Split an option at its commas."""
    return text.split(",")


def main() -> None:
    """Measure, or read earlier results, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=split, default=["S", "XL", "3B"])
    parser.add_argument("--engines", type=split, help=", ".join(ENGINES))
    parser.add_argument("--rows", type=lambda text: [int(n) for n in split(text)], default=[2, 10, 16, 26])
    parser.add_argument("--kind", choices=("native", *KINDS), default="native")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="seconds of an engine's turn at one number of rows"
    )
    parser.add_argument("--memory", type=float, default=10, help="GB of memory for engines that take turns")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "engines-weights")
    parser.add_argument("--no-rounding", action="store_true")
    parser.add_argument("-o", "--out", type=Path, default=Path("engines.json"))
    parser.add_argument("--show", type=Path, nargs="+", help="files of earlier runs, instead of measuring")
    parser.add_argument(
        "--into", type=Path, help="page whose text between two marks is replaced by the tables"
    )
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
            "packages": {name: number for name in PACKAGES if (number := installed_version(name))},
            "rates": machine.rates,
            "reading": dict(sorted(machine.bandwidths.items())),
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
