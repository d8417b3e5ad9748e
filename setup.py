"""Compiles the kernels in C, a shared library for every kind of CPU of `kernels/kinds.py`; all else is in pyproject.toml.

CC names the compiler, with its options, as `CC="clang -B/opt/tools"`. _PYTHON_HOST_PLATFORM names another platform than this
one, as for Python's own `sysconfig`; `scripts/cross_build.py` sets both. Without a compiler the package is complete but slower.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PACKAGE = Path("lanternpp", "kernels")
CODE = ROOT / "src" / PACKAGE / "csrc"
CPU = CODE / "cpu.c"  # says what a CPU has
UNIT = CODE / "kernels.c"  # includes the other files
SOURCES = sorted(CODE.glob("*.[ch]"))
KINDS = runpy.run_path(str(CODE.parent / "kinds.py"))["KINDS"]
VECTORS = ("avx", "amx", "fma", "f16c", "bmi", "gfni", "vaes")
OPTIONS = ("-O3", "-fno-math-errno", "-fno-trapping-math")
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


class Toolchain(NamedTuple):
    """A compiler, as a command, and what it compiles for."""

    command: tuple[str, ...]
    system: str  # linux, macosx or win
    machine: str
    openmp: bool

    @classmethod
    def find(cls) -> Toolchain:
        """The compiler of CC or of PATH. LookupError, with a sentence, where there is none that works."""
        said = os.environ.get("CC", "")
        try:
            given = shlex.split(said.replace("\\", r"\\") if sys.platform == "win32" else said)
        except ValueError as error:
            raise LookupError(f"CC cannot be read ({error})") from None
        # GCC for Windows puts vectors of 32 bytes on a stack that is not aligned for them; zig's clang comes with pyproject.toml.
        zig = [[sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-windows-gnu"]]
        commands = [given] if given else zig if sys.platform == "win32" else [["cc"], ["gcc"], ["clang"]]
        command = next((words for words in commands if shutil.which(words[0])), None)
        if command is None:
            raise LookupError(f"there is no C compiler ({', '.join(words[0] for words in commands)})")
        target = sysconfig.get_platform()
        machine = target.rpartition("-")[2].lower()
        machine = platform.machine().lower() if machine == "universal2" else machine
        machine = MACHINES.get(machine, machine)
        try:
            macros = run((*command, "-dM", "-E", "-x", "c", os.devnull), timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            raise LookupError(f"the C compiler {shlex.join(command)} does not run: {reason(error)}") from None
        # clang's OpenMP needs a library of its own beside the one that PyTorch brings, so it gets threads of our own.
        system = target.partition("-")[0]
        openmp = system == "linux" and "__clang__" not in macros
        return cls(tuple(command), system, machine, openmp)

    @property
    def suffix(self) -> str:
        return {"win": ".dll", "macosx": ".dylib"}.get(self.system, ".so")

    def options(self, given: Sequence[str]) -> list[str]:
        """The options of a kind as this compiler has them. zig takes -mtune for -march, and has names of its own for CPUs."""
        if not any(Path(word).stem in ("zig", "ziglang") for word in self.command):
            return list(given)
        known = [option for option in given if not option.startswith("-mtune=")]
        arm = ("-march=armv8.2-a", "-mcpu=generic+v8_2a"), ("-march=armv8-a", "-mcpu=generic")
        for ours, its in (("x86-64-v", "x86_64_v"), *arm):
            known = [option.replace(ours, its) for option in known]
        return known

    def features(self, options: Sequence[str]) -> set[str]:
        """The CPU's vector instructions that this compiler may use with such options."""
        said = run((*self.command, *self.options(options), "-dM", "-E", "-x", "c", os.devnull))
        names = {line.split()[1].strip("_").lower() for line in said.splitlines()}
        return {name for name in names if name.startswith(VECTORS)}

    def compile(self, source: Path, options: Sequence[str], out: Path) -> None:
        """One shared library. subprocess.SubprocessError.

        In two commands, as linking knows nothing of OpenMP: its functions are found in PyTorch's library when this is loaded.
        """
        compiled = out.with_suffix(".o")
        position = () if self.system == "win" else ("-fPIC",)
        threads = "-fopenmp" if self.openmp else "-fopenmp-simd"
        options = (*OPTIONS, threads, *position, *self.options(options))
        run((*self.command, *options, "-c", str(source), "-o", str(compiled)))
        # Neither debugging data nor the temporary folder's name, so that the same sources give the same bytes.
        linking = {
            "linux": ("-lm", "-pthread"),
            "macosx": (f"-Wl,-S,-install_name,@rpath/{out.name}",),
            "win": ("-s", "-lpthread"),
        }.get(self.system, ())
        run((*self.command, "-shared", str(compiled), *linking, "-o", str(out)))
        compiled.unlink()


def run(command: Sequence[str], timeout: float = 600) -> str:
    """What a command says. OSError or subprocess.SubprocessError."""
    options: Any = {"check": True, "capture_output": True, "text": True, "errors": "replace"}
    options["env"] = {"SOURCE_DATE_EPOCH": "0", **os.environ}  # the time that a library for Windows holds
    return subprocess.run(command, timeout=timeout, **options).stdout


def reason(error: Exception) -> str:
    """The end of what a compiler says about a failure, in one line."""
    lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
    return next((line for line in lines if "error" in line), lines[-1] if lines else str(error))[:300]


def digest(paths: Iterable[Path]) -> str:
    """First 16 hexadecimal digits of the SHA-256 of some files, one after the other."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def build(folder: Path) -> list[str]:
    """Compile the libraries and `manifest.json` into a folder, then remove older ones; sentences about what came of it.

    A library's name has its kind and digest, so that a process that starts meanwhile finds all of the older ones or all of the
    new ones. The manifest has the files by kind, the digest of all C, and why there is no library where there is none.
    """
    began = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    missing = ""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        try:
            tools = Toolchain.find()
            made, said = compile_all(tools, Path(temporary))
            for kind, path in made.items():
                files[kind] = f"{kind}-{digest([path])}{tools.suffix}"
                os.replace(path, folder / files[kind])
            kinds, seconds = ", ".join(kind for kind in made if kind != "cpu"), time.perf_counter() - began
            said.append(f"compiled kernels for {kinds} by {shlex.join(tools.command)}, in {seconds:.0f} s")
        except LookupError as error:
            install = "pip install ziglang" if sys.platform == "win32" else "install gcc or clang"
            remedy = "unset or mend CC" if os.environ.get("CC") else install
            missing = f"{error}; {remedy} and install lanternpp again"
            said = [f"no kernels were compiled, so that passes take several times as long: {missing}"]
        manifest = Path(temporary, "manifest.json")
        content = {"libraries": files, "missing": missing, "sources": digest(SOURCES)}
        manifest.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        os.replace(manifest, folder / manifest.name)
    for path in folder.iterdir():
        if path.is_dir() and path.stat().st_mtime < time.time() - 3600:  # of a build that was killed
            shutil.rmtree(path, ignore_errors=True)
        elif path.name not in {"manifest.json", *files.values()}:
            with suppress(OSError):  # Windows keeps what a process has loaded
                path.unlink()
    return said


def compile_all(tools: Toolchain, folder: Path) -> tuple[dict[str, Path], list[str]]:
    """The library of each kind of CPU, and of `cpu.c`, in a folder; sentences on those that this compiler does not know.

    LookupError where there is none.
    """
    kinds = {name: kind for name, kind in KINDS.items() if tools.machine in kind[0]}
    if not kinds:
        raise LookupError(f"there are none for {tools.machine}")
    jobs = [*kinds, "cpu"]

    def compile(name: str) -> Exception | None:
        # The oldest CPUs have no vector instructions besides SSE2 and NEON.
        needs, options = kinds.get(name, (frozenset(), ()))
        try:
            # CC may bring options of its own, as -march=native.
            if more := tools.features(options) - needs:
                return ValueError(f"error: the compiler may use {', '.join(sorted(more))} in them")
            tools.compile(UNIT if name in kinds else CPU, options, folder / (name + tools.suffix))
        except (OSError, subprocess.SubprocessError) as error:
            return error
        return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failed = {name: error for name, error in zip(jobs, pool.map(compile, jobs), strict=True) if error}
    made = {name: folder / (name + tools.suffix) for name in jobs if name not in failed}
    if len(made) < 2 or "cpu" in failed:
        raise LookupError(f"{shlex.join(tools.command)} fails: {reason(next(iter(failed.values())))}")
    return made, [f"left out kernels for {name}: {reason(error)}" for name, error in failed.items()]


class BuildKernels(build_ext):
    """`build_ext` that makes shared libraries without Python in them."""

    def run(self) -> None:
        for sentence in build(self.folder):
            print(f"lanternpp: {sentence}", file=sys.stderr)

    @property
    def folder(self) -> Path:
        place = ROOT / "src" if self.inplace or self.editable_mode else Path(self.build_lib)
        return place / PACKAGE / "lib"

    def get_outputs(self) -> list[str]:
        return [str(path) for path in sorted(self.folder.glob("*"))]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return [str(path.relative_to(ROOT)) for path in SOURCES]


class BuildPackage(build_py):
    """`build_py` without the modules of an earlier version that `build/` still has."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, "lanternpp"), ignore_errors=True)
        super().run()


class PlatformWheel(bdist_wheel):
    """A wheel for a platform and any Python, whose binary interface the kernels do not know."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


COMMANDS = {"build_py": BuildPackage, "build_ext": BuildKernels, "bdist_wheel": PlatformWheel}

if __name__ == "__main__":
    # Of an extension without sources setuptools only learns that there is code for one platform.
    kernels = Extension("lanternpp.kernels.lib", [])
    setup(ext_modules=[kernels], cmdclass=COMMANDS)
