"""Models by name, path or hub id: the target, and drafters, which are loaded when first needed."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lanternpp.drafters import DRAFTERS
from lanternpp.drafters.base import Drafter
from lanternpp.errors import InputError
from lanternpp.models import FAMILIES
from lanternpp.models.base import Target
from lanternpp.models.hub import STAGE, fetch, hub_id
from lanternpp.nn.backend import backend
from lanternpp.nn.checkpoints import CONFIG, load_config
from lanternpp.nn.files import INDEX, NEIGHBOURS, PICKLED, SAFE
from lanternpp.nn.int8 import Effect, compared, quantise, require, weight_bytes
from lanternpp.nn.sources import Source
from lanternpp.util.devices import STORED, own_devices, pick_device, pick_dtype
from lanternpp.util.jsonfile import read_object, validated
from lanternpp.util.registry import find, import_extensions, unknown

ASSETS = Path(__file__).parent.parent / "assets"
MODELS = {
    "nature-128": "128 px photos of flowers and landscapes from a prompt of words; shipped in this package"
}
DEFAULTS = "defaults.json"
# Networks that draft, by their folder in a model: the lossless method of each, and its name in messages.
NETWORKS = {
    "parallel": ("parallel", "parallel drafter"),
    "drafter": ("eagle", "drafter"),
    "independent": ("independent", "smaller target"),
}
UNDRAFTED = "without one, --method jacobi-coupled and --method ar draw"
UNHASHED_FOLDERS = {"classifier", "codes", "rollouts"}  # of files that drawing does not need
END_BYTES = 1 << 16  # of a file's beginning and end, which are hashed
PROBE_CODES = 64  # over which rounding to 8 bits is measured


def model_folder(model: str, what: str = "model") -> Path:
    """Return the path of a model: a name of `MODELS`, a path, or a hub id, which is fetched. what: for messages. InputError."""
    try:
        # Absolute, as drafters are read later, after the current folder may have changed.
        path = ASSETS / model if model in MODELS else Path(model).absolute()
        if path.exists():
            return path
    except OSError as error:  # of the name itself, such as a name that is too long
        raise InputError(f"{what} {model!r} cannot be read: {error.strerror}") from None
    if hub_model := hub_id(model):
        return fetch(hub_model)
    raise InputError(unknown(what, model, MODELS) + "; or give a path, or a hub id")


def recognise(label: str, source: Source, registry: dict[str, Any]) -> Any:
    """Return the class of a registry that reads a checkpoint: the class that its `kind` names, or the last that claims it.

    Raises an InputError that lists the known classes. label: their name in messages.
    """
    import_extensions()
    kind = str(source.config.get("kind", ""))
    if kind in registry:
        return find(label, kind, registry)
    classes_by_name = {}
    # From the last row, which may be a user's. `find` imports a class, so it is called only until a class claims the checkpoint.
    for name in reversed(registry):
        classes_by_name[name] = find(label, name, registry)
        if classes_by_name[name].claims(source):
            return classes_by_name[name]
    reason = "" if source.config else f" ({source.folder / CONFIG} is missing)"
    if source.kinds:
        reason = f" (it calls itself {', '.join(map(repr, sorted(source.kinds)))})"
    classes = "; ".join(f"{name}: {reader.about}" for name, reader in classes_by_name.items())
    remedy = f"a {label} of your own is known once its file is imported, which LANTERNPP_IMPORT=module does (docs/extending.md)"
    raise InputError(f"{source.path} is no {label} known here{reason}; {remedy}; known are {classes}")


def target_source(model: Path, given: Mapping[str, Any] | None = None) -> tuple[Source, type[Target]]:
    """Return the checkpoint of a model's target, and the family that reads it; given: as a `Source` has it.

    A model is a folder of ours with `target` in it, a published checkpoint, a pipeline of diffusers with a checkpoint as its first
    stage, or a folder that holds a checkpoint among other files. Where an index of shards or a config.json names the weights,
    single files are not tried. Raises InputError without a known target.
    """
    paths = [model]
    if (model / "target").is_dir():
        paths = [model / "target"]
        load_config(paths[0])  # training writes the config last: without it a training never ended
    elif (model / STAGE).is_dir():
        paths = [model / STAGE]
    elif (
        model.is_dir()
        and not Source(model, ()).kinds
        and not any(path.name.endswith(INDEX) for path in model.iterdir())
    ):
        files = sorted(path for path in model.iterdir() if not path.name.startswith(NEIGHBOURS))
        paths += [path for path in files if path.suffix in (SAFE, *PICKLED)]
    errors = []
    for path in paths:
        try:
            source = Source.open(path, given)
            return source, recognise("model family", source, FAMILIES)
        except InputError as error:
            errors.append(error)
    # An error of a single file is clearer than the folder's, which comes first.
    raise (errors[1:] or errors)[0]


def read_target(
    model: Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    given: Mapping[str, Any] | None = None,
) -> Target:
    """Read the target of a model, ready to draw; given: as a `Source` has it."""
    source, family = target_source(model, given)
    target = family.read(source, dtype, device)
    if unused := [f"--{name}" for name, value in source.given.items() if value]:
        raise InputError(f"{model.name} has no use for {' and '.join(unused)}; leave it out")
    return target


def pick_placement(
    device: str | torch.device, dtype: str | torch.dtype, folder: Path
) -> tuple[torch.device, torch.dtype, str | None]:
    """Return the device, the dtype that a model computes in there, and that of `STORED` which its weights are kept in. InputError.

    On a CPU without products of bfloat16 auto is float32, or bfloat16 where the backend computes: it reads half the bytes and
    multiplies them as floats. auto keeps weights in 8 bits where the backend computes from them: they round less than PyTorch does
    in bfloat16, and take half the time.
    """
    half = torch.empty(0, dtype=torch.bfloat16, device=pick_device(str(device)))
    device, name = half.device, str(dtype).removeprefix("torch.")  # of "cuda", the current GPU
    dtype = pick_dtype(name, device)
    if dtype == torch.float32 and name in ("auto", *STORED) and backend(device).packs(half):
        dtype = torch.bfloat16
    if name != "auto" or latent_family(folder) is not None:
        return device, dtype, name if name in STORED else None
    return device, dtype, "int8" if backend(device).packs(half.to(dtype)) else None


def dtype_name(dtype: torch.dtype, stored: str | None) -> str:
    """Return the name of a compute dtype, such as "bfloat16"; "int8, bfloat16" where weights are stored in int8."""
    name = str(dtype).removeprefix("torch.")
    return f"{stored}, {name}" if stored else name


def pack_target(target: Target) -> None:
    """Prepack a target's weights, its head's too, for passes over few rows; it is for inference from then on.

    On a CPU without products of bfloat16 the VQ decoder is converted to float32, in which PyTorch is faster there.
    """
    device_backend = backend(next(target.parameters()).device)
    target.pack()
    target.native_head = device_backend.head(target.head_linear)
    vq: object = getattr(target, "vq", None)
    if isinstance(vq, nn.Module):
        device_backend.pack(vq.to(device_backend.gemm_dtype(next(vq.parameters()))))


def network_inside(folder: Path) -> str | None:
    """Return the kind of drafter that a folder of ours holds, the fastest of several; None without a drafter."""
    return next((kind for kind in ("parallel", "drafter") if (folder / kind).is_dir()), None)


def read_defaults(folder: Path) -> dict[str, Any]:
    """Read the recommended settings in a model folder, {} without a file; raise InputError. `resolve` checks the values."""
    path = folder / DEFAULTS
    if not path.is_file():
        return {}
    content = read_object(path)
    try:
        for name, kind in ("method", str), ("methods", dict[str, dict[str, Any]]):
            if content.get(name) is not None:
                validated(name, content[name], kind)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return content


def latent_family(folder: Path) -> type[Target] | None:
    """Return the family of a model of continuous latents in a folder of ours, by its config alone; None for other models."""
    import_extensions()
    path = folder / "target"
    kind = str(load_config(path).get("kind")) if (path / CONFIG).is_file() else ""
    family: type[Target] | None = find("model family", kind, FAMILIES) if kind in FAMILIES else None
    return family if family is not None and family.channels else None


def fingerprint(model: Path, drafter: Path | None = None) -> str:
    """Return a hash of the names, sizes and ends of the weights of a model and its drafter, without the classifier's."""
    hasher = blake2b(digest_size=8)
    for folder in filter(None, (model, drafter)):
        for path in [folder] if folder.is_file() else sorted(folder.rglob("*")):
            parts = path.relative_to(folder).parts
            excluded = path.name == "state.pt" or path.name.startswith(NEIGHBOURS)
            excluded = excluded or not UNHASHED_FOLDERS.isdisjoint(parts)
            if path == folder or (not excluded and path.suffix in (SAFE, *PICKLED) and path.is_file()):
                hasher.update(f"{'/'.join(parts)} {path.stat().st_size}\n".encode())
                with path.open("rb") as file:
                    hasher.update(file.read(END_BYTES))
                    file.seek(max(path.stat().st_size - END_BYTES, 0))
                    hasher.update(file.read(END_BYTES))
    return hasher.hexdigest()


@dataclass(eq=False)
class Model:
    """The networks of a model folder on a device, for inference.

    On a CPU the weights are packed for passes over few rows. Networks that are not `packed` can be compiled, as
    torch.compile chooses its own layout. `drafter` is the path of a network that drafts in place of the model's own;
    `size`, as "768x512", is for families that draw several sizes. `stored`: the dtype of `STORED` that the target's
    weights are kept in; `effect` is the change of its logits where PyTorch computes from them. `tensor_parallel`:
    transformers divides the target's layers among the processes that torchrun started.
    """

    folder: Path
    drafter: Path | None
    device: torch.device
    dtype: torch.dtype
    packed: bool = True
    size: str | None = None
    stored: str | None = None
    tensor_parallel: bool = False

    def __post_init__(self) -> None:
        if self.tensor_parallel and int(os.environ.get("WORLD_SIZE", "1")) < 2:
            raise InputError(
                "tensor_parallel is for several processes; start the script with torchrun --nproc-per-node 2"
            )
        self.effect: Effect | None = None
        self._networks: dict[str, Drafter | Target] = {}
        if self.stored and not (self.packed and backend(self.device).packs(self._like)):
            require(self.stored)

    @classmethod
    def of(cls, target: Target, folder: Path, drafter_path: Path | None = None, **networks: Drafter) -> Model:
        """Make a model of a target in memory, and of drafters in memory by kind; `folder` has other drafters and defaults."""
        weight = next(target.parameters())
        model = cls(folder, drafter_path, weight.device, weight.dtype)
        model.target, model._networks = target, {**networks}
        return model

    @property
    def _like(self) -> Tensor:
        """An empty tensor of the dtype and device."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    @property
    def dtype_name(self) -> str:
        """The target's compute dtype, such as "bfloat16"; "int8, bfloat16" where its weights are stored in int8."""
        return dtype_name(self.dtype, self.stored)

    @property
    def weights(self) -> str:
        """A hash of the files of model and drafter, to which measurements belong."""
        return fingerprint(self.folder, self.drafter)

    @cached_property
    def target(self) -> Target:
        """The target; reading it raises an InputError for a damaged file."""
        return self._read_target(self.folder, self.stored)

    @cached_property
    def unpacked(self) -> Model:
        """The same networks, read again, whose weights are not packed."""
        return replace(self, packed=False, stored="int8" if self.effect else None)

    @own_devices()
    def _read_target(self, folder: Path, stored: str | None = None) -> Target:
        """Read the target of a model folder, and prepare it for inference."""
        options = {"size": self.size, "tensor_parallel": self.tensor_parallel and folder == self.folder}
        source, family = target_source(folder, {name: value for name, value in options.items() if value})
        if stored and family.channels:
            raise InputError(
                f"dtype {stored} is for models of codes, and {folder.name} draws continuous latents; leave it out"
            )
        if self.size and not family.any_size:
            raise InputError(f"{folder.name} draws pictures of one size; leave out --size {self.size}")
        self._pack_while_reading(source, stored)
        target = family.read(source, self.dtype, self.device).eval().requires_grad_(False)
        if "tensor_parallel" in source.given and target.decoder.ranks == 1:
            raise InputError(f"transformers does not divide {folder.name}; leave out tensor_parallel")
        if stored and source.packing is None:
            self.effect = in_eight_bits(target)
        if self.packed:
            pack_target(target)
            # The kernels may compute none of a transformers model's layers.
            if stored and source.packing and getattr(target.decoder, "packed_dtype", stored) is None:
                self.stored = None
        return target

    def _pack_while_reading(self, source: Source, stored: str | None) -> None:
        """Let the source pack blocks as soon as they are read, and keep the bits of stored weights, where the backend can."""
        if not self.packed:
            return
        device_backend = backend(self.device)
        if device_backend.packs(self._like):
            source.packing = stored or "bfloat16"
        source.int8 = device_backend.gemm_dtype(self._like) != self.dtype or source.packing in STORED

    @own_devices()
    def network(self, kind: str, shape: Hashable = None) -> Drafter | Target:
        """Return the network that `Proposer.needs` names, which is read once; shape: as `Target.shaped` takes it. InputError."""
        if kind not in self._networks:
            self._networks[kind] = self._read_smaller() if kind == "independent" else self._read_drafter(kind)
        network = self._networks[kind]
        return network.shaped(shape) if isinstance(network, Target) else network

    def _read_smaller(self) -> Target:
        source = self.drafter or self.folder / "independent"
        if not source.exists():
            raise InputError(
                f"{source} holds no smaller target to draft with; name a model folder of the same codes with "
                "--drafter: `python recipes/nature/target.py` makes one beside a copy of the tokenizer"
            )
        return self._read_target(source)

    def _read_drafter(self, kind: str) -> Drafter:
        folder = self.drafter or self.folder
        path = folder / kind if self.drafter is None or (folder / kind).is_dir() else folder / "drafter"
        if self.drafter is None and not path.is_dir():
            remedy = UNDRAFTED
            if available := network_inside(folder):
                method, label = NETWORKS[available]
                proposer = "parallel" if available == "parallel" else "tree"
                remedy = f"for the {label} it has, use --method {method}, or --proposer {proposer} to keep the rule"
            missing = NETWORKS.get(kind, ("", kind))[1]
            raise InputError(
                f"{folder} comes without a {missing}; name one with --drafter, or train one; {remedy}"
            )
        source = Source.open(path if path.is_dir() else folder)
        self._pack_while_reading(source, "int8")
        drafter: Drafter = recognise("drafter", source, DRAFTERS).read(source, self.target, self.dtype)
        drafter.eval().requires_grad_(False).to(self.device)
        if self.packed:
            drafter.pack(self.target)
        return drafter


@torch.inference_mode()
def in_eight_bits(target: Target) -> Effect:
    """Quantise a target's layers to 8 bits; return the change of its logits on the null prompt and random codes."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(target.vocab, (1, min(PROBE_CODES, target.length)), generator=generator)
    codes = codes.to(target.decoder.rotary_table.device)
    prompt = target.prompt([None], 1).embeds
    logits, num_bytes = target.head(target.forward_sequence(prompt, codes)), weight_bytes(target.decoder)
    quantise(target.decoder)
    int8_logits = target.head(target.forward_sequence(prompt, codes))
    return compared(logits, int8_logits, (num_bytes, weight_bytes(target.decoder)))
