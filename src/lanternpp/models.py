"""Where models come from: a name or a folder, read once as a target and, when first needed, a drafter."""

from __future__ import annotations

import json
import os
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lanternpp.drafters import DRAFTERS
from lanternpp.drafters.base import Drafter
from lanternpp.errors import InputError
from lanternpp.hub import fetch, hub_id
from lanternpp.nn.checkpoints import load_config
from lanternpp.nn.packed import pack
from lanternpp.registry import find, unknown
from lanternpp.targets import FAMILIES
from lanternpp.targets.base import Target

ASSETS = Path(__file__).parent / "assets"
MODELS = {
    "nature-128": "128 px photos of flowers and landscapes from a prompt of words; shipped in this package"
}
DEFAULTS = "defaults.json"


def model_folder(model: str) -> Path:
    """Where a model lies: a name of `MODELS`, a path, or an id of the hub, which is fetched.

    Raises InputError naming what can be named.
    """
    path = ASSETS / model if model in MODELS else Path(model)
    if path.is_dir():
        return path
    wanted = hub_id(model)
    if wanted is None:
        raise InputError(
            unknown("model", model, MODELS) + "; or give the path of a model folder, or a hub id"
        )
    return fetch(wanted)


def read_defaults(folder: Path) -> dict[str, Any]:
    """What a model folder says of the settings it draws best with."""
    path = folder / DEFAULTS
    if not path.is_file():
        return {}
    try:
        defaults = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(defaults, dict):
        raise InputError(f"{path} must hold a JSON object")
    return defaults


class Model:
    """The networks of a model folder on a device, for inference.

    Plain, their weights are packed for passes over few rows; compiled, they go through torch.compile, which
    arranges weights by itself. `drafter` names another folder for whatever drafts than the model's own.
    """

    def __init__(
        self,
        folder: Path,
        drafter: str | None,
        device: torch.device,
        dtype: torch.dtype,
        compiled: bool = False,
    ):
        self.folder, self.device, self.dtype, self.compiled = folder, device, dtype, compiled
        self._other = model_folder(drafter) if drafter else None
        if compiled:
            check_compiler(device)

    def compile(self) -> Model:
        """The same model, compiled."""
        other = Model(self.folder, None, self.device, self.dtype, compiled=True)
        other._other = self._other
        return other

    @cached_property
    def target(self) -> Target:
        """The target; InputError names what is wrong with a file."""
        return self._read(self.folder)

    @cached_property
    def smaller(self) -> Target:
        """A smaller target to draft with: the other folder, or the model's own `independent`. InputError."""
        source = self._other or self.folder / "independent"
        if not (source / "target").is_dir():
            raise InputError(
                f"{source} holds no smaller target to draft with; name a model folder of the same codes with "
                "--drafter: `lanternpp train target` makes one beside a copy of the tokenizer"
            )
        return self._read(source)

    def _read(self, folder: Path) -> Target:
        """The target of a model folder."""
        kind = str(load_config(folder / "target").get("kind", ""))
        target: Target = find("model family", kind, FAMILIES).read(folder, self.dtype, self.device)
        target.eval().requires_grad_(False)
        if self.compiled:
            target.compile(dynamic=False)
        else:
            target.pack()
        return target

    @cached_property
    def drafter(self) -> Drafter:
        """The drafter; InputError names what is wrong with a file, or that it is another target's."""
        folder = self._other or self.folder
        inside = folder / "drafter"
        source = inside if inside.is_dir() else folder
        kind = str(load_config(source).get("kind", ""))
        drafter = find("drafter", kind, DRAFTERS).read(source, self.target, self.dtype)
        drafter.eval().requires_grad_(False).to(self.device)
        if self.compiled:
            drafter.compile(dynamic=False)
        else:
            pack(drafter)
        return drafter


def check_compiler(device: torch.device) -> None:
    """InputError where torch.compile would fail for want of a C++ compiler; lets it keep every shape of a step."""
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and not any(map(shutil.which, (compiler, "g++", "clang++"))):
        raise InputError(
            "--compile needs a C++ compiler and none is installed; install g++ or use --no-compile"
        )
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
