"""A release: the wheel of the sdist, in a new environment that has only the core dependencies."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

from helpers.models import write_model
from helpers.photos import write_photos
from helpers.processes import SECONDS, python, run_commands
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image

import lanternpp

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in")  # what src/ is built with
SOURCES = shutil.ignore_patterns("__pycache__", "*.egg-info", "lib")
SIZED = ("README.md", "docs/quickstart.md")  # pages that say how large the wheel is
EXTRAS = ("serve", "tune")  # verbs with an extra of their own


def build(kind: str, source: Path, out: Path) -> Path:
    """An sdist or a wheel of a source folder, by the project's own build backend; kernels are not optimised, in a fifth of the time."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    compiler = out / "cc"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    compiler.chmod(0o755)
    options = {"CC": str(compiler)} if shutil.which("cc") else {}
    done = python("-c", code, cwd=source, env=os.environ | options)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


def core(requirements: list[str]) -> Iterator[str]:
    """The installed distributions that these requirements need, with the extras that they name, and those that they need."""
    waiting, seen = list(requirements), set()
    while waiting:
        requirement = Requirement(waiting.pop())
        extras = requirement.extras or {""}
        for extra in extras - {e for name, e in seen if name == requirement.name}:
            seen.add((requirement.name, extra))
            needs = distribution(requirement.name).requires or []
            waiting += [
                n for n in needs if (m := Requirement(n).marker) is None or m.evaluate({"extra": extra})
            ]
            yield requirement.name


def new_environment(folder: Path) -> Path:
    """An environment with links to the core dependencies and with nothing else; its folder of packages."""
    venv.create(folder, with_pip=False, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    for name in core(PROJECT["dependencies"]):
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(found.locate_file(top))
    return packages


def test_every_package_that_make_installs_is_pinned() -> None:
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    pinned = {canonicalize_name(name) for name in pinned}
    needed = {canonicalize_name(name) for name in core(["lanternpp[dev]"])} - {"lanternpp"}
    # torch's own packages for a GPU are those of its build
    assert not {name for name in needed - pinned if not name.startswith(("nvidia", "cuda", "triton"))}


def test_the_wheel_of_the_sdist_works_in_an_environment_without_extras(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=SOURCES)
    for name in FILES:
        shutil.copy(ROOT / name, source)
    with tarfile.open(build("sdist", source, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    wheel = build("wheel", tmp_path / f"lanternpp-{lanternpp.__version__}", tmp_path)
    check_contents(wheel, ROOT / "src")

    home = tmp_path / "elsewhere"
    home.mkdir()
    packages = new_environment(tmp_path / "new")
    python_path = tmp_path / "new" / "bin" / "python"
    pip = ["-m", "pip", "--python", python_path, "install", "--quiet", "--no-compile"]
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    clean |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = python(*pip, "--no-deps", "--no-index", wheel, env=clean, cwd=home)
    assert done.returncode == 0, done.stderr
    assert not any((packages / name).exists() for name in ("fastapi", "ray", "matplotlib", "torchao"))

    command = [str(python_path.parent / "lanternpp"), "--version"]
    said = subprocess.run(command, capture_output=True, text=True, env=clean, cwd=home, timeout=SECONDS)
    assert (said.returncode, said.stdout) == (0, f"lanternpp {lanternpp.__version__}\n"), said.stderr

    requested = verbs(home)
    package, ended = run_commands(requested, home, python_path, clean)
    assert package.is_relative_to(tmp_path / "new")
    for (verb, *_), (status, _, error) in zip(requested, ended, strict=True):
        if verb in EXTRAS:
            assert status == 2 and f"lanternpp[{verb}]" in error, f"{verb}: {error}"
        else:
            assert status == 0, f"{verb}: {error}"
    with Image.open(home / "tulip.png") as picture:
        assert picture.size == (128, 128)
        assert json.loads(picture.text["versions"])["lanternpp"] == lanternpp.__version__


def check_contents(wheel: Path, source: Path) -> None:
    """The wheel has every file of the package, kernels in the place of their sources, and no picture."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        typed = archive.read(f"lanternpp-{lanternpp.__version__}.dist-info/METADATA").decode()
    made = {name for name in names if name.startswith("lanternpp/kernels/lib/")}
    files = (path for path in (source / "lanternpp").rglob("*") if path.is_file() and path.suffix != ".pyc")
    ours = {path for path in files if path.parent.name not in ("csrc", "lib")}
    assert names - made == {str(path.relative_to(source)) for path in ours}
    assert "lanternpp/kernels/lib/manifest.json" in made
    python, interface, platform = wheel.stem.split("-")[2:]
    assert (python, interface) == ("py3", "none") and platform != "any"
    assert wheel.stat().st_size < 45e6
    pictures = {name for name in names if Path(name).suffix.lower() in Image.registered_extensions()}
    assert not pictures, f"pictures in the wheel: {pictures}"
    size = f"{wheel.stat().st_size / 1e6:.0f} MB"
    assert all(size in (ROOT / page).read_text() for page in SIZED), (
        f"the wheel has {size}: say so in {SIZED}"
    )
    assert f"\nVersion: {lanternpp.__version__}\n" in typed
    for name in PROJECT["optional-dependencies"]:
        assert f"\nProvides-Extra: {name}\n" in typed


def verbs(home: Path) -> list[list[str]]:
    """Every verb: `generate` on the model that ships, the others on a tiny one in a folder."""
    model = str(write_model(home / "tiny"))
    (home / "prompts.txt").write_text("a red tulip\na tulip\n")
    write_photos(home / "data" / "train", 8, "tulip")
    write_photos(home / "data" / "val", 4, "tulip")
    prompts = ["--prompts", "prompts.txt"]
    learn = ["--data", "data", "--model", model, "--steps", "1", "--checks", "1", "--batch-size", "4"]
    return [
        ["generate", "a photo of a red tulip", "-o", "tulip.png"],
        ["models"],
        ["compare", "a red tulip", "--model", model, "--runs", "1"],
        ["bench", "--model", model, *prompts, "--methods", "eagle", "-n", "1"],
        ["generate", "--model", model, *prompts, "-o", "many", "-n", "2"],
        ["models", "convert", model, "copy"],
        ["tune", "--model", model, *prompts],
        ["train", *learn, "--kind", "eagle", "-o", "drafter"],
        ["serve"],
    ]
