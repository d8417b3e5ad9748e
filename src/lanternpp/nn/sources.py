"""A checkpoint as its authors published it, streamed into one of our modules.

How names map is data: a family's rules, one `Rename` a line. Nothing is read until `fill`, and then one
tensor at a time, straight into its place in the target dtype, so that loading takes little more memory than
what is loaded. Make the module without weights: `with blank(): module = ...`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lanternpp.errors import InputError
from lanternpp.nn.checkpoints import CONFIG, load_config
from lanternpp.nn.decoder import Block
from lanternpp.nn.shards import files, metas, read_tensors
from lanternpp.nn.stores import check_scales, is_scale, restored_meta, scaled

CHUNK = 1 << 26  # bytes read before a file is opened anew, which lets go of what was read


def halves(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows [heads * head_dim, ...] whose neighbours are rotary pairs, as half against half within each head."""
    pairs = tensor.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).reshape(tensor.shape)


@dataclass(frozen=True)
class Rename:
    """How a tensor of a checkpoint maps into one of ours; every rule that matches a name applies.

    pattern: a regular expression that matches the whole upstream name; name: ours, with \\1, \\2.
    rows: which rows of the upstream tensor are taken, (first, last), last excluded, or a list of them;
    part: which rows of ours they fill, (first, last); halves: channels of a head whose rotary pairs are neighbours, or 0.
    """

    pattern: str
    name: str
    rows: tuple[int, int] | Tensor | None = None
    part: tuple[int, int] | None = None
    halves: int = 0

    @property
    def whole(self) -> bool:
        """Whether it takes a tensor as it is."""
        return self.rows is None and self.part is None and not self.halves

    def match(self, upstream: str) -> str | None:
        """Our name for an upstream one, or None."""
        found = re.fullmatch(self.pattern, upstream)
        return found.expand(self.name) if found else None

    def apply(self, tensor: Tensor) -> Tensor:
        """The selected rows."""
        if isinstance(self.rows, Tensor):
            tensor = tensor[self.rows.to(tensor.device)]
        elif self.rows is not None:
            tensor = tensor[self.rows[0] : self.rows[1]]
        return halves(tensor, self.halves) if self.halves else tensor


SAME = Rename(r"(.+)", r"\1")


@dataclass(frozen=True)
class Piece:
    """A mapping of one upstream tensor into one of ours."""

    upstream: str
    ours: str
    rule: Rename

    def place(self, whole: Tensor) -> Tensor:
        """The rows of our tensor `whole` that it fills."""
        return whole if self.rule.part is None else whole[self.rule.part[0] : self.rule.part[1]]


class SkipInit(TorchFunctionMode):
    """Skips initialisers: on the meta device they have no effect and would import torch's compiler."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function; an initialiser returns its tensor unchanged."""
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init" or func is F.normalize:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextmanager
def blank(config_of: Path | None = None) -> Iterator[None]:
    """Modules made within have shapes and no weights, for `Source.fill`.

    config_of: where their config was read; InputError names it where no network can be made of it.
    """
    try:
        with torch.device("meta"), SkipInit():
            yield
    except InputError:
        raise
    except (ValueError, RuntimeError, ArithmeticError) as error:
        if config_of is None:
            raise
        reason = str(error).splitlines()[0]
        raise InputError(f"{config_of}: no network has the sizes of its config.json: {reason}") from error


class Source:
    """One checkpoint: a folder or a file.

    pack: called with every `Block` as soon as it is read, to replace its layers by packed ones, so that the weights of one block alone
    are there twice; None: blocks stay as they are. packing: the dtype that it packs weights in, "bfloat16" or "int8". int8: whether weights that lie on disk in 8 or 6 bits keep these beside them.
    """

    pack: Callable[[nn.Module], None] | None = None
    packing: str | None = None
    int8 = False

    def __init__(self, path: Path, files: Sequence[Path], given: Mapping[str, Any] | None = None):
        self.path, self._files = path, files
        self.given = dict(given or {})  # given by the user instead of found beside it: tokenizer, text, size

    @classmethod
    def open(cls, path: Path, given: Mapping[str, Any] | None = None) -> Source:
        """A .safetensors, .pt, .pth or .bin file, a folder with one, or an index of shards and its folder."""
        return cls(path, files(path), given)

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json in the folder or beside the file; empty where there is none."""
        folder = self.path if self.path.is_dir() else self.path.parent
        return load_config(folder) if (folder / CONFIG).is_file() else {}

    @property
    def kinds(self) -> set[str]:
        """What the config calls the model: our `kind`, transformers' `model_type` and `architectures`."""
        named = [self.config.get("kind"), self.config.get("model_type")]
        listed = self.config.get("architectures")
        return {str(name) for name in [*named, *(listed if isinstance(listed, list) else [])] if name}

    @cached_property
    def metas(self) -> dict[str, Tensor]:
        """Every tensor's shape and dtype on the meta device; one of fewer bits and its scale are one of float32."""
        found = {name: meta for file in self._files for name, meta in metas(file).items()}
        check_scales(found, self.path)
        return {
            name: restored_meta(meta) if scaled(name, found) else meta
            for name, meta in found.items()
            if not is_scale(name, found)
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes, read from headers."""
        return {name: tuple(meta.shape) for name, meta in self.metas.items()}

    def shape(self, name: str, dims: int) -> tuple[int, ...]:
        """The shape of a tensor that must be there, of so many dimensions, none of them empty. InputError."""
        found = self.shapes().get(name)
        if found is None:
            raise InputError(f"{self.path} lacks {name}: it is another model's, or a part of one.")
        if len(found) != dims or 0 in found:
            raise InputError(f"{self.path}: {name} is {found} where {dims} dimensions are expected.")
        return found

    def tensors(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Some tensors, by their names."""
        for file in self._files:
            found = metas(file)
            for name, tensor, _ in read_tensors(file, found.keys() & set(names), found):
                yield name, tensor

    def layers(self, prefix: str = r"layers\.") -> int:
        """How many layers there are, by the highest number behind `prefix`, a regular expression."""
        numbers = (re.match(rf"{prefix}(\d{{1,6}})\.", name) for name in self.metas)
        return 1 + max((int(found[1]) for found in numbers if found), default=-1)

    def fill(
        self,
        module: nn.Module,
        rules: Sequence[Rename],
        dtype: torch.dtype,
        skip: Sequence[str] = (),
        device: torch.device | str = "cpu",
        lacking: Collection[str] = (),
    ) -> None:
        """Put the checkpoint into `module`: parameters in `dtype`, buffers in their own, on `device`.

        skip: patterns of upstream names that have no place in ours. lacking: names of ours that no checkpoint has,
        which are left as they are. Raises InputError that lists what is missing, unexpected, misshaped or of the wrong
        kind of number, at most ten of them, and names a tensor with a value that is no finite number.
        """
        expected_tensors = {name: own for name, own in module.state_dict().items() if name not in lacking}
        kept = {name for name, _ in module.named_buffers()}
        pieces, faults = self._plan(expected_tensors, rules, skip)
        if faults:
            more = f", and {len(faults) - 10} more" if len(faults) > 10 else ""
            raise InputError(
                f"{self.path} does not fit {type(module).__name__}: {', '.join(faults[:10])}{more}."
            )
        blocks = {} if self.pack is None else blocks_of(module)
        block_of = {name: next(filter(name.startswith, blocks), "") for name in expected_tensors}
        pending = Counter(block_of[piece.ours] for found in pieces.values() for piece in found)
        filled: dict[str, Tensor] = {}
        int8: dict[str, tuple[Tensor, Tensor]] = {}
        for upstream, tensor, bits in self._read(pieces, [*blocks]):
            for piece in pieces[upstream]:
                name, own = piece.ours, expected_tensors[piece.ours]
                if name not in filled:
                    kind = own.dtype if name in kept or not own.is_floating_point() else dtype
                    filled[name] = torch.empty(own.shape, dtype=kind, device=device)
                piece.place(filled[name]).copy_(piece.rule.apply(tensor))
                if self.int8 and bits is not None and piece.rule.whole and name not in kept:
                    int8[name] = bits
                block = block_of[name]
                pending[block] -= 1
                if self.pack is not None and block and not pending[block]:
                    complete = [name for name in filled if block_of[name] == block]
                    assign(module, {name: filled.pop(name) for name in complete}, int8)
                    self.pack(blocks[block])
        assign(module, filled, int8)
        every = [*module.named_parameters(), *module.named_buffers()]
        left = [name for name, tensor in every if tensor.is_meta and name not in lacking]
        if left:
            raise RuntimeError(f"{type(module).__name__} was made without {', '.join(left)}")

    def _plan(
        self, expected_tensors: dict[str, Tensor], rules: Sequence[Rename], skip: Sequence[str]
    ) -> tuple[dict[str, list[Piece]], list[str]]:
        """Where every upstream tensor goes, by its name, and what is wrong with that."""
        pieces: dict[str, list[Piece]] = {}
        wrong: list[str] = []
        covered: dict[str, int] = defaultdict(int)
        for upstream, meta in self.metas.items():
            if any(re.fullmatch(pattern, upstream) for pattern in skip):
                continue
            ways = [(rule, name) for rule in rules if (name := rule.match(upstream)) is not None]
            found = [Piece(upstream, name, rule) for rule, name in ways if name in expected_tensors]
            if not found:
                wrong.append(f"unexpected {upstream}")
            for piece in found:
                fault = misfit(piece, meta, expected_tensors[piece.ours])
                if fault:
                    wrong.append(fault)
                covered[piece.ours] += piece.place(expected_tensors[piece.ours]).numel()
            pieces[upstream] = found
        missing = [
            f"missing {name}"
            if not covered[name]
            else f"{name} is given {covered[name]} of {own.numel()} numbers"
            for name, own in expected_tensors.items()
            if covered[name] != own.numel() or name not in covered
        ]
        return pieces, missing + wrong

    def _read(
        self, pieces: dict[str, list[Piece]], blocks: list[str]
    ) -> Iterator[tuple[str, Tensor, tuple[Tensor, Tensor] | None]]:
        """Every planned tensor once, as `read_tensors` gives it, of a file those of a block together, by the beginnings of our names.

        A file is reopened after every `CHUNK` bytes, so that its pages are freed.
        """

        def block(name: str) -> int:
            """Which block a tensor belongs to; -1: none."""
            ours = pieces[name][0].ours
            return next((i for i, begin in enumerate(blocks) if ours.startswith(begin)), -1)

        for file in self._files:
            found = metas(file)
            group: list[str] = []
            size = 0
            for name in sorted(filter(pieces.get, found), key=block):
                group.append(name)
                size += found[name].nbytes
                if size >= CHUNK:
                    yield from read_tensors(file, group, found)
                    group, size = [], 0
            if group:
                yield from read_tensors(file, group, found)


def blocks_of(module: nn.Module) -> dict[str, nn.Module]:
    """The blocks of the decoders in a module, by the beginning of their tensors' names."""
    return {f"{name}.": part for name, part in module.named_modules() if isinstance(part, Block)}


def assign(
    module: nn.Module, tensors: Mapping[str, Tensor], int8: Mapping[str, tuple[Tensor, Tensor]]
) -> None:
    """Make these tensors the parameters and buffers of `module`; int8: what weights keep beside them, for `stored_parts`."""
    module.load_state_dict(tensors, strict=False, assign=True)
    for name in tensors.keys() & int8.keys():
        module.get_parameter(name).eight_bits = int8[name]  # type: ignore[attr-defined]


def misfit(piece: Piece, meta: Tensor, own: Tensor) -> str:
    """What is wrong with the shape or the dtype of a tensor for its place; empty where nothing is."""
    own = own.to("meta")
    try:
        given, place = piece.rule.apply(meta), piece.place(own)
    except (RuntimeError, IndexError):
        return f"{piece.upstream} is {tuple(meta.shape)}, which has no rows of whole heads"
    if given.shape != place.shape:
        gives = "" if given.shape == meta.shape else f", which gives {tuple(given.shape)}"
        return f"{piece.upstream} is {tuple(meta.shape)}{gives} where {tuple(place.shape)} is expected"
    if meta.is_floating_point() == own.is_floating_point():
        return ""
    kind = str(meta.dtype).removeprefix("torch.")
    expected = "weights" if own.is_floating_point() else "whole numbers"
    return f"{piece.upstream} holds {kind} where {expected} are expected"
