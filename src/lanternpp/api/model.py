"""Models by name, path or hub id: the target, and drafters, which are loaded when first needed."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
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
from lanternpp.util.devices import INT8, pick_device, pick_dtype
from lanternpp.util.jsonfile import checked, read_object
from lanternpp.util.registry import find, import_extensions, unknown

ASSETS = Path(__file__).parent.parent / "assets"
MODELS = {
    "nature-128": "128 px photos of flowers and landscapes from a prompt of words; shipped in this package"
}
DEFAULTS = "defaults.json"
# Networks that draft, by their folder in a model -> the lossless method of each, and what it is.
NETWORKS = {
    "parallel": ("parallel", "parallel drafter"),
    "drafter": ("eagle", "drafter"),
    "independent": ("independent", "smaller target"),
}
UNDRAFTED = "without one, --method jacobi-coupled and --method ar draw"
MADE = {"classifier", "codes", "rollouts"}  # folders of files that are not used for drawing
ENDS = 1 << 16  # bytes of a file's beginning and end that are hashed
PROBE = 64  # codes over which rounding to 8 bits is measured


def model_folder(model: str, what: str = "model") -> Path:
    """Where a model lies: a name of `MODELS`, a path, or an id of the hub, which is fetched; what: as messages call it.

    Raises InputError naming what can be named.
    """
    path = ASSETS / model if model in MODELS else Path(model)
    try:
        if path.exists():
            return path
    except OSError as error:  # of the name itself, such as one that is too long
        raise InputError(f"{what} {model!r} cannot be read: {error.strerror}") from None
    hub_model = hub_id(model)
    if hub_model is None:
        raise InputError(unknown(what, model, MODELS) + "; or give a path, or a hub id")
    return fetch(hub_model)


def recognised(what: str, source: Source, table: Mapping[str, Any]) -> Any:
    """The entry of a registry that reads a checkpoint: the one that its `kind` names, or the one that claims it.

    Raises InputError that lists what is known.
    """
    import_extensions()
    kind = str(source.config.get("kind", ""))
    if kind in table:
        return find(what, kind, table)
    entries = {}
    for name in table:  # an entry is imported when its turn comes
        entries[name] = find(what, name, table)
        if entries[name].claims(source):
            return entries[name]
    called = f" (it calls itself {', '.join(map(repr, sorted(source.kinds)))})" if source.kinds else ""
    called = called or ("" if source.config else f" ({source.folder / CONFIG} is missing)")
    known = "; ".join(f"{name}: {entry.about}" for name, entry in entries.items())
    own = f"a {what} of your own is known once its file is imported, which LANTERNPP_IMPORT=module does (docs/extending.md)"
    raise InputError(f"{source.path} is no {what} known here{called}; {own}; known are {known}")


def target_source(model: Path, given: Mapping[str, Any] | None = None) -> tuple[Source, type[Target]]:
    """The checkpoint of a model's target, and the family that reads it.

    A model is a folder of ours with `target` in it, a published checkpoint, a pipeline of diffusers with one as its first stage, or a
    folder that holds one among others; where shards or a config.json say which, no single file is tried. InputError where no target
    known here is there.
    """
    places = [model]
    if (model / "target").is_dir():
        places = [model / "target"]
        load_config(places[0])  # written last: without it a training never ended
    elif (model / STAGE).is_dir():
        places = [model / STAGE]
    elif (
        model.is_dir()
        and not Source(model, ()).kinds
        and not any(path.name.endswith(INDEX) for path in model.iterdir())
    ):
        there = sorted(path for path in model.iterdir() if not path.name.startswith(NEIGHBOURS))
        places += [path for path in there if path.suffix in (SAFE, *PICKLED)]
    faults = []
    for place in places:
        try:
            source = Source.open(place, given)
            return source, recognised("model family", source, FAMILIES)
        except InputError as error:
            faults.append(error)
    raise (faults[1:] or faults)[0]


def read_target(
    model: Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    given: Mapping[str, Any] | None = None,
) -> Target:
    """The target of a model, ready to draw; `given` as a `Source` has it."""
    source, family = target_source(model, given)
    return family.read(source, dtype, device)


def placed(
    device: str | torch.device, dtype: str | torch.dtype, folder: Path
) -> tuple[torch.device, torch.dtype, bool]:
    """A device, the dtype that a model computes in there, and whether weights are kept in 8 bits. InputError.

    On a CPU without products of bfloat16 auto is float32, but bfloat16 where the backend computes: it reads half the bytes and
    multiplies as floats. auto keeps weights in 8 bits where the backend computes from them: that rounds less than PyTorch does
    in bfloat16, and takes half the time.
    """
    on, name = pick_device(str(device)), str(dtype).removeprefix("torch.")
    kind, half = pick_dtype(name, on), torch.empty(0, dtype=torch.bfloat16, device=on)
    if kind == torch.float32 and name in ("auto", INT8) and backend(on).packs(half):
        kind = torch.bfloat16
    codes = name == "auto" and latent_family(folder) is None
    return on, kind, name == INT8 or (codes and backend(on).packs(torch.empty(0, dtype=kind, device=on)))


def dtype_name(dtype: torch.dtype, int8: bool) -> str:
    """The name of a compute dtype, such as "bfloat16"; "int8, bfloat16" where weights have 8 bits."""
    computed = str(dtype).removeprefix("torch.")
    return f"{INT8}, {computed}" if int8 else computed


def pack_target(target: Target) -> None:
    """Prepack a target's weights, its head's too, for passes over few rows; it is for inference from then on.

    On a CPU without products of bfloat16 the VQ decoder is converted to float32, in which PyTorch is faster there.
    """
    used = backend(next(target.parameters()).device)
    target.pack()
    target.native_head = used.head(target.head_linear)
    vq: object = getattr(target, "vq", None)
    if isinstance(vq, nn.Module):
        used.pack(vq.to(used.gemm_dtype(next(vq.parameters()))))


def own_network(folder: Path) -> str | None:
    """The kind of network that a folder of ours holds to draft with; the fastest, where it has several."""
    return next((kind for kind in ("parallel", "drafter") if (folder / kind).is_dir()), None)


def read_defaults(folder: Path) -> dict[str, Any]:
    """The recommended settings in a model folder, which `resolve` checks; {} where it has none. InputError."""
    path = folder / DEFAULTS
    if not path.is_file():
        return {}
    content = read_object(path)
    try:
        for name, kind in ("method", str), ("methods", dict[str, dict[str, Any]]):
            if content.get(name) is not None:
                checked(name, content[name], kind)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return content


def latent_family(folder: Path) -> type[Target] | None:
    """The family of a model of continuous latents in a folder of ours, by its config alone; None where it is another model."""
    import_extensions()
    place = folder / "target"
    kind = str(load_config(place).get("kind")) if (place / CONFIG).is_file() else ""
    family: type[Target] | None = find("model family", kind, FAMILIES) if kind in FAMILIES else None
    return family if family is not None and family.channels else None


def fingerprint(model: Path, drafter: Path | None = None) -> str:
    """A hash of the names, sizes and ends of the weights of a model and its drafter; the classifier is left out."""
    found = blake2b(digest_size=8)
    for folder in filter(None, (model, drafter)):
        for path in [folder] if folder.is_file() else sorted(folder.rglob("*")):
            parts = path.relative_to(folder).parts
            used = not MADE & set(parts) and path.name != "state.pt" and not path.name.startswith(NEIGHBOURS)
            if path == folder or (used and path.suffix in (SAFE, *PICKLED) and path.is_file()):
                found.update(f"{'/'.join(parts)} {path.stat().st_size}\n".encode())
                with path.open("rb") as file:
                    found.update(file.read(ENDS))
                    file.seek(max(path.stat().st_size - ENDS, 0))
                    found.update(file.read(ENDS))
    return found.hexdigest()


@dataclass(eq=False)
class Model:
    """The networks of a model folder on a device, for inference.

    Their weights are packed for passes over few rows, on a CPU; where they are not `packed` they can be compiled, as
    torch.compile chooses its own layout. `other` is a folder whose network drafts in place of the model's own;
    `size`, as "768x512", is for families that draw more than one. `int8`: the target's weights are kept in 8 bits,
    and `effect` is what that did to its logits. `tensor_parallel`: transformers divides the target's layers among the
    processes that torchrun started.
    """

    folder: Path
    other: Path | None
    device: torch.device
    dtype: torch.dtype
    packed: bool = True
    size: str | None = None
    int8: bool = False
    tensor_parallel: bool = False

    def __post_init__(self) -> None:
        if self.tensor_parallel and int(os.environ.get("WORLD_SIZE", "1")) < 2:
            raise InputError(
                "tensor_parallel is for several processes; start the script with torchrun --nproc-per-node 2"
            )
        self.effect: Effect | None = None
        self._networks: dict[str, Drafter | Target] = {}
        if self.int8 and not (self.packed and backend(self.device).packs(self._like)):
            require()

    @classmethod
    def of(cls, target: Target, folder: Path, other: Path | None = None, **networks: Drafter) -> Model:
        """A model whose target is in memory already, as are some drafters; others and defaults, if any, lie in `folder`."""
        like = next(target.parameters())
        made = cls(folder, other, like.device, like.dtype)
        made.target, made._networks = target, {**networks}
        return made

    @property
    def _like(self) -> Tensor:
        """A tensor of the dtype and device."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    @property
    def dtype_name(self) -> str:
        """The target's compute dtype, such as "bfloat16"; "int8, bfloat16" where its weights have 8 bits."""
        return dtype_name(self.dtype, self.int8)

    @property
    def weights(self) -> str:
        """A hash of the files of model and drafter, to which measurements belong."""
        return fingerprint(self.folder, self.other)

    @cached_property
    def target(self) -> Target:
        """The target; InputError names what is wrong with a file."""
        return self._read(self.folder, self.size, self.int8)

    def _read(self, folder: Path, size: str | None, int8: bool = False) -> Target:
        """The target of a model, prepared for inference."""
        given = {"size": size, "tensor_parallel": self.tensor_parallel and folder == self.folder}
        source, family = target_source(folder, {name: value for name, value in given.items() if value})
        if int8 and family.channels:
            raise InputError(
                f"dtype int8 is for models of codes, and {folder.name} draws continuous latents; leave it out"
            )
        if size and not family.any_size:
            raise InputError(f"{folder.name} draws pictures of one size; leave out --size {size}")
        self._pack_while_reading(source, int8)
        target = family.read(source, self.dtype, self.device).eval().requires_grad_(False)
        if "tensor_parallel" in source.given and target.decoder.ranks == 1:
            raise InputError(
                f"{folder.name} is not run by transformers, which divides models; leave out tensor_parallel"
            )
        if int8 and source.pack is None:
            self.effect = in_eight_bits(target)
        if self.packed:
            pack_target(target)
            # the kernels may compute none of a transformers model's layers
            if int8 and source.packing and getattr(target.decoder, "packed_dtype", INT8) is None:
                self.int8 = False
        return target

    def _pack_while_reading(self, source: Source, int8: bool) -> None:
        """Have blocks packed as soon as they are read, where the backend does that, and 8 bits kept where it computes from them."""
        if not self.packed:
            return
        used = backend(self.device)
        if used.packs(self._like):
            source.pack, source.packing = partial(used.pack, int8=int8), INT8 if int8 else "bfloat16"
        source.int8 = used.gemm_dtype(self._like) != self.dtype or (int8 and source.pack is not None)

    def network(self, kind: str, shape: Hashable = None) -> Drafter | Target:
        """What `Proposer.needs` names, read once: a smaller target, or the other folder's drafter or the model's own.

        shape: of the prompts, as `Target.shaped` takes it.

        InputError names what is wrong with a file, or that it is another target's.
        """
        if kind not in self._networks:
            self._networks[kind] = self._smaller() if kind == "independent" else self._drafter(kind)
        found = self._networks[kind]
        return found.shaped(shape) if isinstance(found, Target) else found

    def _smaller(self) -> Target:
        source = self.other or self.folder / "independent"
        if not source.exists():
            raise InputError(
                f"{source} holds no smaller target to draft with; name a model folder of the same codes with "
                "--drafter: `python recipes/nature/target.py` makes one beside a copy of the tokenizer"
            )
        return self._read(source, self.size)

    def _drafter(self, kind: str) -> Drafter:
        folder = self.other or self.folder
        inside = folder / kind if self.other is None or (folder / kind).is_dir() else folder / "drafter"
        if self.other is None and not inside.is_dir():
            method, what = NETWORKS[there] if (there := own_network(folder)) else ("", "")
            proposer = "parallel" if there == "parallel" else "tree"
            use = f"for the {what} it has, use --method {method}, or --proposer {proposer} to keep the rule"
            has = use if there else UNDRAFTED
            raise InputError(
                f"{folder} comes without a {NETWORKS.get(kind, ('', kind))[1]}; name one with --drafter, or train one; {has}"
            )
        source = Source.open(inside if inside.is_dir() else folder)
        self._pack_while_reading(source, int8=True)
        drafter: Drafter = recognised("drafter", source, DRAFTERS).read(source, self.target, self.dtype)
        drafter.eval().requires_grad_(False).to(self.device)
        if self.packed:
            drafter.pack(self.target)
        return drafter


@torch.inference_mode()
def in_eight_bits(target: Target) -> Effect:
    """Quantise a target's layers to 8 bits; the change of its logits on the null prompt and some random codes."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(target.vocab, (1, min(PROBE, target.length)), generator=generator)
    codes, prompt = codes.to(target.decoder.rotary_table.device), target.prompt([None], 1).embeds
    before, size = target.head(target.forward_sequence(prompt, codes)), weight_bytes(target.decoder)
    quantise(target.decoder)
    after = target.head(target.forward_sequence(prompt, codes))
    return compared(before, after, (size, weight_bytes(target.decoder)))
