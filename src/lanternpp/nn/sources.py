"""A checkpoint as its authors published it, streamed into one of our modules.

How names map is data: a family's rules, one `Rename` a line. Nothing is read until `fill`, and then one
tensor at a time, straight into its place in the target dtype, so that loading takes little more memory than
what is loaded. Make the module without weights: `with blank(): module = ...`.
"""

from __future__ import annotations

import re
from collections import Counter
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
from lanternpp.nn.checkpoints import CONFIG, dequantised_metas, load_config, read_tensors
from lanternpp.nn.decoder import Block, DecoderConfig
from lanternpp.nn.files import files, listed, metas

CHUNK = 1 << 26  # bytes read before a file is opened anew, which frees the pages that were read


@dataclass(frozen=True)
class Rename:
    """How a tensor of a checkpoint maps into one of ours; every rule that matches a name applies.

    pattern: a regular expression that matches the upstream name from end to end; name: ours, with \\1, \\2.
    rows: which rows of the upstream tensor are taken, (first, last), last excluded, or a list of them;
    part: which rows of ours they fill, (first, last); halves: channels of a head whose rotary pairs are neighbours, or 0.
    """

    pattern: str
    name: str
    rows: tuple[int, int] | Tensor | None = None
    part: tuple[int, int] | None = None
    halves: int = 0

    def match(self, upstream: str) -> str:
        """Our name for an upstream one; empty where it does not match."""
        found = re.fullmatch(self.pattern, upstream)
        return found.expand(self.name) if found else ""

    def apply(self, tensor: Tensor) -> Tensor:
        """The selected rows."""
        if isinstance(self.rows, Tensor):
            tensor = tensor[self.rows.to(tensor.device)]
        elif self.rows is not None:
            tensor = tensor[self.rows[0] : self.rows[1]]
        if self.halves:  # half against half within each head
            pairs = tensor.unflatten(0, (-1, self.halves // 2, 2))
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        return tensor

    def place(self, own: Tensor) -> Tensor:
        """The rows of our tensor that are filled."""
        return own if self.part is None else own[self.part[0] : self.part[1]]

    def mismatch(self, upstream: str, meta: Tensor, own: Tensor) -> str:
        """The fault in the shape or the dtype of a tensor for its place; empty where there is none."""
        try:
            given, place = self.apply(meta), self.place(own.to("meta"))
        except (RuntimeError, IndexError):
            return f"{upstream} is {tuple(meta.shape)}, which has no rows of complete heads"
        if given.shape != place.shape:
            gives = "" if given.shape == meta.shape else f", which gives {tuple(given.shape)}"
            return f"{upstream} is {tuple(meta.shape)}{gives} where {tuple(place.shape)} is expected"
        if meta.is_floating_point() == own.is_floating_point():
            return ""
        expected = "weights" if own.is_floating_point() else "whole numbers"
        return f"{upstream} holds {str(meta.dtype).removeprefix('torch.')} where {expected} are expected"


SAME = Rename(r"(.+)", r"\1")
Pieces = Mapping[str, Sequence[tuple[str, Rename]]]
"""Upstream names -> the tensors of ours that they fill, and how."""


def llama_rules(
    shape: DecoderConfig,
    layer: str,
    block: str,
    paired: bool = False,
    norm_rows: tuple[int, int] | None = None,
) -> list[Rename]:
    """The layout of transformers' Llama, which LlamaGen's copies and published drafters have.

    `layer`, a regular expression with the layer's number as its one group, into `block`. paired: rotary pairs are neighbouring
    channels there, not half against half. norm_rows: how many rows the checkpoint's norms of queries and of keys have, each for as
    many neighbouring heads; default: one a head.
    """
    queries, keys, half = shape.heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.hidden
    halves = shape.head_dim if paired else 0
    both, every, what = queries + keys, queries + 2 * keys, r"\.weight"
    wqkv, w13 = f"{block}.wqkv.weight", f"{block}.w13.weight"
    norms, heads = [], (shape.heads, shape.num_kv_heads)
    for name, count, first, given in zip("qk", heads, (0, shape.heads), norm_rows or heads, strict=True):
        rows = None if given == count else torch.arange(count) * given // count
        pattern = rf"{layer}\.self_attn\.{name}_norm\.(weight|bias)"
        norms.append(Rename(pattern, rf"{block}.qk_norm.\2", rows, (first, first + count)))
    return [
        Rename(rf"{layer}\.self_attn\.q_proj{what}", wqkv, part=(0, queries), halves=halves),
        Rename(rf"{layer}\.self_attn\.k_proj{what}", wqkv, part=(queries, both), halves=halves),
        Rename(rf"{layer}\.self_attn\.v_proj{what}", wqkv, part=(both, every)),
        Rename(rf"{layer}\.self_attn\.o_proj{what}", f"{block}.wo.weight"),
        *norms,
        Rename(rf"{layer}\.mlp\.gate_proj{what}", w13, part=(0, half)),
        Rename(rf"{layer}\.mlp\.up_proj{what}", w13, part=(half, 2 * half)),
        Rename(rf"{layer}\.mlp\.down_proj{what}", f"{block}.w2.weight"),
        Rename(rf"{layer}\.input_layernorm\.weight", f"{block}.attention_norm.weight"),
        Rename(rf"{layer}\.post_attention_layernorm\.weight", f"{block}.ffn_norm.weight"),
    ]


class SkipInit(TorchFunctionMode):
    """Skips initialisers: on the meta device they have no effect and would import torch's compiler."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init" or func is F.normalize:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextmanager
def blank(config_of: Path | None = None) -> Iterator[None]:
    """Modules made in this block have shapes and no weights, for `Source.fill`.

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
        self.path, self.files = path, files
        self.given = dict(given or {})  # given by the user instead of found beside it: tokenizer, text, size

    @classmethod
    def open(cls, path: Path, given: Mapping[str, Any] | None = None) -> Source:
        """A .safetensors, .pt, .pth or .bin file, a folder with one, or an index of shards and its folder."""
        return cls(path, files(path), given)

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json in the folder or beside the file; empty where there is none."""
        return load_config(self.folder) if (self.folder / CONFIG).is_file() else {}

    @property
    def folder(self) -> Path:
        """The folder that it is or lies in."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def kinds(self) -> set[str]:
        """The names that the config gives the model: our `kind`, transformers' `model_type` and `architectures`."""
        named = [self.config.get("kind"), self.config.get("model_type")]
        listed = self.config.get("architectures")
        return {str(name) for name in [*named, *(listed if isinstance(listed, list) else [])] if name}

    @cached_property
    def _contents(self) -> dict[Path, dict[str, Tensor]]:
        """The tensors of every file, on the meta device."""
        return {file: metas(file) for file in self.files}

    @cached_property
    def metas(self) -> dict[str, Tensor]:
        """Every tensor's shape and dtype on the meta device; a quantised one and its scale are one of float32."""
        return dequantised_metas(
            {k: v for held in self._contents.values() for k, v in held.items()}, self.path
        )

    def shape(self, name: str, dims: int) -> tuple[int, ...]:
        """The shape of a tensor that must be there, of so many dimensions, none of them empty. InputError."""
        if name not in self.metas:
            raise InputError(f"{self.path} lacks {name}: it is another model's, or a part of one.")
        found = tuple(self.metas[name].shape)
        if len(found) != dims or 0 in found:
            raise InputError(f"{self.path}: {name} is {found} where {dims} dimensions are expected.")
        return found

    def tensors(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of these names, one at a time."""
        for file, found in self._contents.items():
            for name, tensor, _ in read_tensors(file, found.keys() & set(names)):
                yield name, tensor

    def layers(self, prefix: str = r"layers\.") -> int:
        """How many layers there are, by the highest number after `prefix`, a regular expression."""
        numbers = (re.match(rf"{prefix}(\d{{1,6}})\.", name) for name in self.metas)
        return 1 + max((int(found[1]) for found in numbers if found), default=-1)

    def fill(
        self,
        module: nn.Module,
        rules: Sequence[Rename],
        dtype: torch.dtype,
        skip: Sequence[str] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        """Put the checkpoint into `module`: parameters in `dtype`, buffers in their own, on `device`.

        skip: patterns of upstream names that have no place in ours. Raises InputError that lists what is missing, unexpected,
        misshaped or of the wrong kind of number, at most ten of them, and names a tensor with a value that is no finite number.
        """
        ours = module.state_dict()
        buffers = {name for name, _ in module.named_buffers()}
        pieces, faults = self._plan(ours, rules, skip)
        if faults:
            raise InputError(f"{self.path} does not fit {type(module).__name__}: {listed(faults)}.")
        pack = self.pack
        blocks = {f"{name}.": part for name, part in module.named_modules() if isinstance(part, Block)}
        block_of = {name: next(filter(name.startswith, blocks if pack else ()), "") for name in ours}
        pending = Counter(block_of[name] for found in pieces.values() for name, _ in found)
        filled: dict[str, Tensor] = {}
        int8: dict[str, tuple[Tensor, Tensor]] = {}
        for upstream, tensor, bits in self._read(pieces, block_of):
            for name, rule in pieces[upstream]:
                own, block = ours[name], block_of[name]
                if name not in filled:
                    kind = own.dtype if name in buffers or not own.is_floating_point() else dtype
                    filled[name] = torch.empty(own.shape, dtype=kind, device=device)
                rule.place(filled[name]).copy_(rule.apply(tensor))
                unchanged = rule.rows is None and rule.part is None and not rule.halves
                if self.int8 and bits is not None and unchanged and name not in buffers:
                    int8[name] = bits
                pending[block] -= 1
                if pack is not None and block and not pending[block]:
                    complete = [name for name in filled if block_of[name] == block]
                    assign(module, {name: filled.pop(name) for name in complete}, int8)
                    pack(blocks[block])
        assign(module, filled, int8)
        every = [*module.named_parameters(), *module.named_buffers()]
        left = [name for name, tensor in every if tensor.is_meta]
        if left:
            raise RuntimeError(f"{type(module).__name__} was made without {', '.join(left)}")

    def _plan(
        self, ours: Mapping[str, Tensor], rules: Sequence[Rename], skip: Sequence[str]
    ) -> tuple[Pieces, list[str]]:
        """Where every upstream tensor goes, by its name, and the list of faults."""
        pieces: dict[str, list[tuple[str, Rename]]] = {}
        wrong, covered = list[str](), Counter[str]()
        for upstream, meta in self.metas.items():
            if any(re.fullmatch(pattern, upstream) for pattern in skip):
                continue
            named = ((rule.match(upstream), rule) for rule in rules)
            pieces[upstream] = found = [(name, rule) for name, rule in named if name in ours]
            wrong += [] if found else [f"unexpected {upstream}"]
            for name, rule in found:
                wrong += filter(None, [rule.mismatch(upstream, meta, ours[name])])
                covered[name] += rule.place(ours[name]).numel()
        missing = [
            f"{name} is given {covered[name]} of {own.numel()} numbers"
            if covered[name]
            else f"missing {name}"
            for name, own in ours.items()
            if covered[name] != own.numel() or name not in covered
        ]
        return pieces, missing + wrong

    def _read(
        self, pieces: Pieces, block_of: Mapping[str, str]
    ) -> Iterator[tuple[str, Tensor, tuple[Tensor, Tensor] | None]]:
        """Every planned tensor once, as `read_tensors` gives it; tensors of a block that lie in one file come together."""
        for file, found in self._contents.items():
            names = sorted(filter(pieces.get, found), key=lambda name: block_of[pieces[name][0][0]])
            group: list[str] = []
            size = 0
            for name in names:
                group.append(name)
                size += found[name].nbytes
                if name is names[-1] or size >= CHUNK:
                    yield from read_tensors(file, group)
                    group, size = [], 0


def assign(
    module: nn.Module, tensors: Mapping[str, Tensor], int8: Mapping[str, tuple[Tensor, Tensor]]
) -> None:
    """Make these tensors the parameters and buffers of `module`; int8: the 8 bits that weights keep, for `int8_parts`."""
    module.load_state_dict(tensors, strict=False, assign=True)
    for name in tensors.keys() & int8.keys():
        module.get_parameter(name).int8_weight = int8[name]  # type: ignore[attr-defined]
