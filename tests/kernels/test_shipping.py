"""The compiled kernels of the package: which of them a CPU uses, and incomplete installations."""

from __future__ import annotations

import json
import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.processes import python
from helpers.refusals import rejects
from kernels.compiling import setup

from lanternpp.kernels import loading
from lanternpp.kernels.kinds import KINDS, V3, V4, choose

ROOT = Path(__file__).parents[2]
VNNI = V4 | {"avx512vnni", "avxvnni"}
BF16 = VNNI | {"avx512bf16"}
AMX = BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
AVX512 = ["avx512-bf16", "avx512-vnni", "x86-64-v4"]
CLIENT = ["avx-vnni", "x86-64-v3"]

X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="another CPU")
COMPILER = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
installed = pytest.mark.skipif(loading.library() is None, reason="no kernels here")


@pytest.mark.parametrize(
    ("features", "kinds"),
    [
        (AMX, ["amx", *AVX512, *CLIENT]),
        (AMX - {"amx_tile"}, [*AVX512, *CLIENT]),
        (AMX - {"avx512vl"}, CLIENT),
        (V4, ["x86-64-v4", "x86-64-v3"]),
        (V3 - {"fma"}, []),
        ({"aarch64", "dotprod"}, ["armv8.2-dotprod", "armv8-a"]),
        ({"riscv64"}, []),
    ],
)
def test_kinds_of_kernels_that_a_cpu_can_run_best_first(features: set[str], kinds: list[str]):
    assert choose(features) == kinds


INTEL_AND_AMD = [name for name, (needs, _) in KINDS.items() if "x86_64" in needs]


@COMPILER
@X86
@pytest.mark.parametrize("kind", INTEL_AND_AMD)
def test_the_compiler_uses_exactly_the_instructions_that_a_kind_needs(kind):
    building = setup()
    try:
        found = building.Toolchain.find().features(KINDS[kind][1])
    except subprocess.SubprocessError:
        pytest.skip("this compiler does not know these instructions")
    assert found == KINDS[kind][0] - {"x86_64", "lzcnt", "movbe", "popcnt"}


@pytest.fixture
def unloaded() -> Iterator[pytest.MonkeyPatch]:
    """No library is loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(loading.SWITCH, raising=False)
        loading.library.cache_clear()
        yield patch
    loading.library.cache_clear()


@pytest.fixture
def copied(unloaded: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The libraries of this installation in another folder."""
    folder = tmp_path / "lib"
    shutil.copytree(loading.LIBRARIES, folder)
    unloaded.setattr(loading, "LIBRARIES", folder)
    return folder


def kind_of(found: object) -> str:
    return Path(found._name).stem.rpartition("-")[0]


@installed
def test_a_kind_can_be_chosen(unloaded: pytest.MonkeyPatch):
    for kind in choose(loading.features(loading.LIBRARIES / loading.installed()["cpu"])):
        unloaded.setenv(loading.SWITCH, kind)
        assert kind_of(loading.kernels()) == kind
    unloaded.setenv(loading.SWITCH, "0")
    assert loading.kernels() is None


@installed
@pytest.mark.parametrize("asked", ["avx-512", "x86-64-v4", "cpu"])
def test_an_unavailable_kind_is_rejected_with_the_available_ones(unloaded, asked: str):
    unloaded.setattr(loading, "features", lambda path: V3)
    unloaded.setenv(loading.SWITCH, asked)
    said = f"LANTERNPP_KERNELS: there are no kernels '{asked}' for this CPU: choose x86-64-v3, 0."
    rejects(said, loading.kernels)


def changed(folder: Path) -> None:
    for path in folder.glob("*-*.so"):
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 1
        path.write_bytes(content)


def manifest(folder: Path, libraries: object, missing: str = "") -> None:
    content = {"libraries": libraries, "missing": missing, "sources": ""}
    (folder / "manifest.json").write_text(json.dumps(content))


@installed
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (changed, "is damaged: install lanternpp again"),
        (lambda folder: [path.unlink() for path in folder.glob("*-*.so")], "cannot be read"),
        (lambda folder: (folder / "manifest.json").unlink(), "kernels were not compiled"),
        (lambda folder: os.truncate(folder / "manifest.json", 40), "is damaged: install lanternpp again"),
        (lambda folder: manifest(folder, ["x86-64-v3"]), "is damaged: install lanternpp again"),
        (lambda folder: manifest(folder, {}, "there is no C compiler (cc)"), "there is no C compiler"),
    ],
)
def test_without_complete_kernels_pytorch_computes(copied: Path, damage, said: str):
    damage(copied)
    with pytest.warns(UserWarning, match=f"{said}.* several times as long"):
        assert loading.kernels() is None


@installed
def test_a_cpu_without_kernels_warns(unloaded: pytest.MonkeyPatch):
    unloaded.setattr(loading, "features", lambda path: frozenset({"x86_64", "avx"}))
    with pytest.warns(UserWarning, match="there are no kernels for this CPU"):
        assert loading.kernels() is None


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels whose Pass has one more number."""
    building, folder = setup(), tmp_path_factory.mktemp("older")
    for path in building.SOURCES:
        (folder / path.name).write_text(path.read_text().replace("} Pass;", "int64_t more; } Pass;"))
    try:
        kind = "x86-64-v3" if platform.machine() == "x86_64" else "armv8-a"
        options = (*KINDS[kind][1], "-O0")
        building.Toolchain.find().compile(folder / building.UNIT.name, options, folder / "older.so")
    except LookupError:
        pytest.skip("no C compiler here")
    return folder / "older.so"


def test_kernels_of_another_version_are_rejected(older: Path):
    rejects(r"older.so was not compiled from this version \(its Pass has \d+ bytes", loading.load, older)


FORK = """
import os, pathlib, signal, sys, torch
from lanternpp.kernels import loading
{prepare}
child = os.fork()
signal.alarm(0 if child else 30)
{work}
if not child:
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
EXP = "torch.rand(10**6).exp()"


@pytest.mark.parametrize("prepare", ["", pytest.param("loading.library()", marks=installed)])
@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch has another OpenMP here")
def test_a_forked_child_computes_with_threads_of_its_own(prepare: str):
    script = FORK.format(prepare=f"{prepare}\ntorch.set_num_threads(2)\n{EXP}", work=EXP)
    assert python("-W", "ignore", "-c", script).stdout == "7\n"


OWN_THREADS = """
from concurrent.futures import ThreadPoolExecutor
from lanternpp import Pipeline
from lanternpp.engine import threads

threads.SCHEDSTAT = pathlib.Path("missing")  # two threads, whatever else runs here
library = loading.load(pathlib.Path(sys.argv[1]))
loading.library = lambda kind=None: library
pipes = [Pipeline.from_pretrained("nature-128", device="cpu") for _ in range(2)]
# Without pixels, for which a forked child would wait for PyTorch's threads.
draw = lambda pipe: pipe("a red tulip", method="parallel", output_type="codes").codes
torch.set_num_threads(1)
expected = draw(pipes[0])
torch.set_num_threads(2)
with ThreadPoolExecutor() as pool:
    assert all(torch.equal(codes, expected) for codes in pool.map(draw, pipes))
"""


@installed
@pytest.mark.skipif(sys.platform != "linux", reason="one system without OpenMP is enough")
def test_kernels_without_openmp_draw_the_same_in_two_threads_at_once_and_in_a_forked_child(tmp_path: Path):
    building, files = setup(), loading.installed()
    kind = choose(loading.features(loading.LIBRARIES / files["cpu"]))[0]
    try:
        options = (*KINDS[kind][1], "-fno-openmp", "-fopenmp-simd", "-O1")
        building.Toolchain.find().compile(building.UNIT, options, tmp_path / "own.so")
    except (LookupError, subprocess.SubprocessError):
        pytest.skip("no C compiler here, or it does not know this CPU")
    script = FORK.format(prepare=OWN_THREADS, work="assert torch.equal(draw(pipes[0]), expected)")
    assert python("-W", "ignore", "-c", script, tmp_path / "own.so").stdout == "7\n"


DRAW = """
import os, pathlib, sys
from lanternpp import Pipeline
from lanternpp.api.options import METHODS
from lanternpp.kernels import loading

def refuse(event, arguments):
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pty.spawn"):
        raise SystemExit(f"{event} {arguments}")

sys.addaudithook(refuse)
pipe = Pipeline.from_pretrained("nature-128", device="cpu")
pipe("a red tulip", seed=0)
assert loading.kernels() is not None
for method in METHODS.keys() - {"independent"}:
    pipe.new_engine(pipe.settings(method))
slow = {"torch._dynamo", "torch._inductor", "sympy"} & sys.modules.keys()
assert not slow, f"seconds of imports that drawing needs nothing of: {slow}"
maps = pathlib.Path("/proc/self/maps")
if maps.exists():
    print(*sorted({line.split(None, 5)[5].strip() for line in maps.read_text().splitlines() if " r-xp " in line and "/" in line}), sep="\\n")
"""


@installed
def test_drawing_runs_no_other_program_no_cached_code_and_no_compiler_of_torch(tmp_path: Path):
    env = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HOME": str(tmp_path),
        "PATH": str(tmp_path),
    }
    env.pop(loading.SWITCH, None)
    done = python("-c", DRAW, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    loaded = [Path(line) for line in done.stdout.splitlines()]
    assert not [path for path in loaded if path.is_relative_to(tmp_path)]
    if loaded:
        ours = [path for path in loaded if path.is_relative_to(loading.HERE)]
        assert ours and all(path.parent == loading.LIBRARIES for path in ours)
        assert len([path for path in loaded if "gomp" in path.name or "omp5" in path.name]) == 1


SOURCE = """
#ifdef FAIL
#error never
#endif
#ifdef __AVX512BF16__
#error unknown instructions
#endif
int answer(void) { return 42; }
"""


@pytest.fixture
def building(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """setup.py with little to compile, which fails for CPUs with products of bfloat16."""
    made = setup()
    (tmp_path / "unit.c").write_text(SOURCE)
    monkeypatch.setattr(made, "UNIT", tmp_path / "unit.c")
    monkeypatch.delenv("CC", raising=False)
    return made


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("no-such-compiler", "there is no C compiler (no-such-compiler)"),
        ("false", "the C compiler false does not run"),
        ('"unclosed', "CC cannot be read (No closing quotation)"),
        pytest.param("cc -DFAIL", "never", marks=COMPILER),
        # Options of its own bring more instructions than a kind has.
        pytest.param("cc -mavx512vbmi", "may use avx512", marks=[COMPILER, X86]),
    ],
)
def test_an_installation_without_a_working_compiler_says_what_is_missing(
    building, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unloaded: pytest.MonkeyPatch, compiler, said
):
    monkeypatch.setenv("CC", compiler)
    (sentence,) = building.build(tmp_path / "lib")
    assert sentence.startswith("no kernels were compiled, so that passes take several times as long: ")
    assert said in sentence and sentence.endswith("; unset or mend CC and install lanternpp again")
    assert [path.name for path in (tmp_path / "lib").iterdir()] == ["manifest.json"]
    unloaded.setattr(loading, "LIBRARIES", tmp_path / "lib")
    with pytest.warns(UserWarning, match="kernels were not compiled: .*unset or mend CC"):
        assert loading.kernels() is None


@pytest.mark.parametrize("named", [r"C:\zig\zig.exe", r'"C:\Program Files\zig.exe"'])
def test_paths_of_compilers_on_windows(building, monkeypatch, named: str):
    monkeypatch.setattr(building.sys, "platform", "win32")
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    monkeypatch.setenv("CC", f"{named} cc")
    with pytest.raises(LookupError) as caught:
        building.Toolchain.find()
    quotes = '"'
    assert str(caught.value) == f"there is no C compiler ({named.strip(quotes)})"


@COMPILER
def test_kinds_that_the_compiler_does_not_support_are_left_out_and_older_files_removed(
    building, tmp_path: Path
):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "amx-0123456789abcdef.so").write_text("older")
    (tmp_path / "lib" / "tmp-killed").mkdir()
    os.utime(tmp_path / "lib" / "tmp-killed", (0, 0))
    said = building.build(tmp_path / "lib")
    kinds = json.loads((tmp_path / "lib" / "manifest.json").read_text())["libraries"]
    assert {path.name for path in (tmp_path / "lib").iterdir()} == {"manifest.json", *kinds.values()}
    if "x86-64-v3" in kinds:
        assert "amx" not in kinds and "avx512-bf16" not in kinds and "x86-64-v4" in kinds
        assert [
            line for line in said if "left out kernels for amx" in line and "unknown instructions" in line
        ]


PLATFORMS = ("linux-x86_64", "macosx-11.0-arm64", "win-amd64")


@pytest.mark.skipif(find_spec("ziglang") is None, reason="no ziglang here")
@pytest.mark.parametrize("platform", PLATFORMS)
def test_builds_are_reproducible_and_leave_no_other_file(
    building, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str
):
    target = runpy.run_path(str(ROOT / "scripts" / "cross_build.py"))["TARGETS"][platform]
    monkeypatch.setenv("CC", shlex.join([sys.executable, "-m", "ziglang", "cc", "-target", target]))
    monkeypatch.setenv("_PYTHON_HOST_PLATFORM", platform)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    made = []
    for name in ("one", "two"):
        building.build(tmp_path / name)
        made.append(json.loads((tmp_path / name / "manifest.json").read_text()))
        time.sleep(1.1)  # the time in a library for Windows is in seconds
    assert made[0] == made[1] and len(made[0]["libraries"]) > 1
    assert not list(Path.cwd().iterdir())


def test_the_script_for_other_platforms_needs_ziglang():
    script = ROOT / "scripts" / "cross_build.py"
    assert python("-I", "-S", script, "--help").returncode == 0
    done = python("-I", "-S", script, "win-amd64")
    assert done.returncode == 2 and "pip install ziglang" in done.stderr and "Traceback" not in done.stderr


def test_pip_installs_without_a_compiler_and_says_what_is_missing(tmp_path: Path):
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "assets", "lib")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    built = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    stale = source / "build" / built / "lanternpp" / "kernels" / "loading"  # a package of an earlier version
    stale.mkdir(parents=True)
    (stale / "__init__.py").write_text("")
    env = {**os.environ, "PATH": str(tmp_path), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    env.pop("CC", None)
    pip = ["-m", "pip", "install", "-v", "--no-deps", "--no-index", "--no-build-isolation"]
    done = python(*pip, "--target", tmp_path / "there", source, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    sentence = "lanternpp: no kernels were compiled, so that passes take several times as long"
    assert sentence in done.stdout + done.stderr and "install gcc or clang" in done.stdout + done.stderr
    assert not (tmp_path / "there" / "lanternpp" / "kernels" / "loading").exists()
    assert (tmp_path / "there" / "lanternpp" / "kernels" / "lib" / "manifest.json").is_file()
