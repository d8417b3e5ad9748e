"""Build a wheel for another platform with zig's compiler: `pip install ziglang 'setuptools>=77'`, then name a platform."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

# zig's name of each platform, with the oldest C library or system that the wheel may meet.
TARGETS = {
    "linux-x86_64": "x86_64-linux-gnu.2.28",
    "linux-aarch64": "aarch64-linux-gnu.2.28",
    "macosx-11.0-arm64": "aarch64-macos.11.0",
    "win-amd64": "x86_64-windows-gnu",
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("platform", choices=TARGETS)
    options.add_argument("-o", "--out", default="dist", help="the folder for the wheel")
    given = options.parse_args()
    if sys.platform == "win32":
        options.error("on Windows Python builds wheels for Windows alone: use Linux or macOS")
    zig = importlib.util.find_spec("ziglang")
    if zig is None or zig.origin is None:
        options.error("ziglang is not installed: pip install ziglang 'setuptools>=77'")
    compiler = [str(Path(zig.origin).with_name("zig")), "cc", "-target", TARGETS[given.platform]]
    env = os.environ | {"CC": shlex.join(compiler), "_PYTHON_HOST_PLATFORM": given.platform}
    pip = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "-w", given.out]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [*pip, str(root)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(done.stdout)
    print(*(line.strip() for line in done.stdout.splitlines() if "lanternpp:" in line), sep="\n")


if __name__ == "__main__":
    main()
