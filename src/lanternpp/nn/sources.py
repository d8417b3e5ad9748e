"""A checkpoint as its authors published it, streamed into one of our modules.

A family's rules, one `Rename` a line, map its names to ours. Tensors are read by `fill`, one at a time, straight into
the module's tensors in their dtype, so that loading takes little more memory than the loaded weights. The module is
made without weights: `with blank(): module = ...`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lanternpp.errors import InputError
from lanternpp.nn.backend import backend
from lanternpp.nn.checkpoints import CONFIG, load_config, metas, read_tensors
from lanternpp.nn.decoder import Block, DecoderConfig
from lanternpp.nn.files import files, join_names

MAX_TENSORS, MAX_NAME_CHARS = 100_000, 500  # of a file
CHUNK = 1 << 26  # bytes of tensors after which a file is opened again, which frees the pages that were read


@dataclass(frozen=True)
class Rename:
    """A rule that maps a tensor of a checkpoint into one of ours; every rule that matches a name applies.

    pattern: a regular expression that matches the upstream name from end to end; name: our name, with \\1, \\2.
    rows: the rows of the upstream tensor that are taken, (first, last), last excluded, or their indices; part: the rows of our
    tensor that they fill, (first, last). halves: channels of a head whose rotary pairs are neighbours, or 0.
    """

    pattern: str
    name: str
    rows: tuple[int, int] | Tensor | None = None
    part: tuple[int, int] | None = None
    halves: int = 0

    def match(self, upstream: str) -> str:
        """Return our name for an upstream one; empty where the pattern does not match."""
        match = re.fullmatch(self.pattern, upstream)
        return match.expand(self.name) if match else ""

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the rows that are taken, in our order of channels."""
        if isinstance(self.rows, Tensor):
            tensor = tensor[self.rows.to(tensor.device)]
        elif self.rows is not None:
            tensor = tensor[self.rows[0] : self.rows[1]]
        if self.halves:  # half against half within each head
            pairs = tensor.unflatten(0, (-1, self.halves // 2, 2))
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        return tensor

    def filled(self, tensor: Tensor) -> Tensor:
        """Return the rows of our tensor that are filled."""
        return tensor if self.part is None else tensor[self.part[0] : self.part[1]]

    def mismatch(self, upstream: str, meta: Tensor, tensor: Tensor) -> str:
        """Return the fault in shape or dtype of an upstream tensor for our tensor; empty where there is none."""
        expected_shape = self.filled(tensor.to("meta")).shape
        try:
            shape = self.apply(meta).shape
        except (RuntimeError, IndexError):
            return f"{upstream} is {tuple(meta.shape)}, which has no rows of complete heads"
        if shape != expected_shape:
            selection = "" if shape == meta.shape else f", which gives {tuple(shape)}"
            return f"{upstream} is {tuple(meta.shape)}{selection} where {tuple(expected_shape)} is expected"
        if meta.is_floating_point() == tensor.is_floating_point():
            return ""
        expected = "weights" if tensor.is_floating_point() else "whole numbers"
        return f"{upstream} holds {str(meta.dtype).removeprefix('torch.')} where {expected} are expected"


SAME = Rename(r"(.+)", r"\1")
Pieces = Mapping[str, Sequence[tuple[str, Rename]]]
"""Upstream names -> the names of our tensors that they fill, each with its rule."""


def llama_rules(
    shape: DecoderConfig,
    layer: str,
    block: str,
    paired: bool = False,
    norm_rows: tuple[int, int] | None = None,
) -> list[Rename]:
    """Return the rules for the layout of transformers' Llama, which LlamaGen's copies and published drafters have.

    layer: a regular expression whose one group is the layer's number; block: our name, with \\1. paired: rotary pairs are neighbouring
    channels in the checkpoint, not half against half. norm_rows: the numbers of rows of its norms of queries and of keys, each row for
    as many neighbouring heads; default: one row a head.
    """
    heads, kv_heads, hidden = shape.heads, shape.num_kv_heads, shape.hidden
    k_start, v_start, v_end = (n * shape.head_dim for n in (heads, heads + kv_heads, heads + 2 * kv_heads))
    halves = shape.head_dim if paired else 0
    wqkv, w13 = f"{block}.wqkv.weight", f"{block}.w13.weight"
    q_rows, k_rows = norm_rows or (heads, kv_heads)
    norms = []
    for name, start, num_heads, num_rows in (("q", 0, heads, q_rows), ("k", heads, kv_heads, k_rows)):
        rows = None if num_rows == num_heads else torch.arange(num_heads) * num_rows // num_heads
        pattern = rf"{layer}\.self_attn\.{name}_norm\.(weight|bias)"
        norms.append(Rename(pattern, rf"{block}.qk_norm.\2", rows, (start, start + num_heads)))
    return [
        Rename(rf"{layer}\.self_attn\.q_proj\.weight", wqkv, part=(0, k_start), halves=halves),
        Rename(rf"{layer}\.self_attn\.k_proj\.weight", wqkv, part=(k_start, v_start), halves=halves),
        Rename(rf"{layer}\.self_attn\.v_proj\.weight", wqkv, part=(v_start, v_end)),
        Rename(rf"{layer}\.self_attn\.o_proj\.weight", f"{block}.wo.weight"),
        *norms,
        Rename(rf"{layer}\.mlp\.gate_proj\.weight", w13, part=(0, hidden)),
        Rename(rf"{layer}\.mlp\.up_proj\.weight", w13, part=(hidden, 2 * hidden)),
        Rename(rf"{layer}\.mlp\.down_proj\.weight", f"{block}.w2.weight"),
        Rename(rf"{layer}\.input_layernorm\.weight", f"{block}.attention_norm.weight"),
        Rename(rf"{layer}\.post_attention_layernorm\.weight", f"{block}.ffn_norm.weight"),
    ]


class SkipInit(TorchFunctionMode):
    """Skips initialisers, which have no effect on the meta device and would import torch's compiler."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init" or func is F.normalize:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextmanager
def blank(path: Path | None = None) -> Iterator[None]:
    """Make modules with shapes and without weights in this block, for `Source.fill`.

    path: the checkpoint with their config; InputError names it where no network can be made of the config.
    """
    try:
        with torch.device("meta"), SkipInit():
            yield
    except InputError:
        raise
    except (ValueError, RuntimeError, ArithmeticError) as error:
        if path is None:
            raise
        reason = str(error).splitlines()[0]
        raise InputError(f"{path}: no network has the sizes of its config.json: {reason}") from error


class Source:
    """One checkpoint: a folder or a file.

    packing: the dtype, "bfloat16", "int8" or "int4", in which every `Block` is packed as soon as it is read, so that the weights of one block
    alone are in memory twice; None: blocks stay as they are.
    int8: whether weights that lie on disk in 8 or 6 bits keep these bits too, for `int8_parts`.
    """

    packing: str | None = None
    int8 = False

    def __init__(self, path: Path, files: Sequence[Path], given: Mapping[str, Any] | None = None):
        self.path, self.files = path, files
        self.given = dict(given or {})  # by the user: vq, text, size; `Target.read` removes those it uses

    @classmethod
    def open(cls, path: Path, given: Mapping[str, Any] | None = None) -> Source:
        """Open a .safetensors, .pt, .pth or .bin file, a folder with one, or an index of shards."""
        return cls(path, files(path), given)

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json in the folder or beside the file; empty where there is none."""
        return load_config(self.folder) if (self.folder / CONFIG).is_file() else {}

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def kinds(self) -> set[str]:
        """The names that the config gives the model: our `kind`, transformers' `model_type` and `architectures`."""
        kinds = [self.config.get("kind"), self.config.get("model_type")]
        architectures = self.config.get("architectures")
        if isinstance(architectures, list):
            kinds += architectures
        return {str(kind) for kind in kinds if kind}

    @cached_property
    def _contents(self) -> dict[Path, dict[str, Tensor]]:
        """`metas` of every file. InputError for more or longer names than a model has."""
        contents = {file: metas(file) for file in self.files}
        for file, content in contents.items():
            longest = max(map(len, content), default=0)
            if len(content) > MAX_TENSORS or longest > MAX_NAME_CHARS:
                raise InputError(
                    f"{file} holds {len(content)} tensors with names of up to {longest} characters; at most {MAX_TENSORS} of {MAX_NAME_CHARS} are read."
                )
        return contents

    @cached_property
    def metas(self) -> dict[str, Tensor]:
        """Every tensor on the meta device; a quantised tensor and its scale are one tensor of float32."""
        return {name: meta for content in self._contents.values() for name, meta in content.items()}

    def shape(self, name: str, dims: int) -> tuple[int, ...]:
        """Return the shape of a tensor; InputError unless it exists and has `dims` dimensions, none of them empty."""
        if name not in self.metas:
            raise InputError(f"{self.path} lacks {name}: it is another model's, or a part of one.")
        shape = tuple(self.metas[name].shape)
        if len(shape) != dims or 0 in shape:
            raise InputError(f"{self.path}: {name} is {shape} where {dims} dimensions are expected.")
        return shape

    def layers(self, prefix: str = r"layers\.") -> int:
        """Return the number of layers, by the highest number after `prefix`, a regular expression."""
        matches = (re.match(rf"{prefix}(\d{{1,6}})\.", name) for name in self.metas)
        return 1 + max((int(match[1]) for match in matches if match), default=-1)

    def fill(
        self,
        module: nn.Module,
        rules: Sequence[Rename],
        dtype: torch.dtype,
        skip: Sequence[str] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        """Put the checkpoint into `module`: parameters in `dtype`, buffers in their own dtype, on `device`.

        skip: patterns of upstream names that `module` has no tensors for. Raises InputError that lists at most ten tensors which
        are missing, unexpected, misshaped or of the wrong kind of number, or names a tensor with NaN or infinity.
        """
        tensors = module.state_dict()
        buffers = {name for name, _ in module.named_buffers()}
        weights = {name for name in tensors.keys() - buffers if tensors[name].is_floating_point()}
        pieces, faults = self._plan(tensors, rules, skip)
        if faults:
            raise InputError(f"{self.path} does not fit {type(module).__name__}: {join_names(faults)}.")
        blocks: dict[str, nn.Module] = {}
        if self.packing is not None:
            blocks = {f"{name}.": child for name, child in module.named_modules() if isinstance(child, Block)}
        by_block: dict[str, dict[str, list[tuple[str, Rename]]]] = {}  # "" for what lies in no block
        for upstream, destinations in pieces.items():
            for name, rule in destinations:
                block = next(filter(name.startswith, blocks), "")
                by_block.setdefault(block, {}).setdefault(upstream, []).append((name, rule))
        for block, block_pieces in by_block.items():
            filled: dict[str, Tensor] = {}
            int8: dict[str, tuple[Tensor, Tensor]] = {}
            for upstream, upstream_tensor, bits in self.tensors(block_pieces.keys()):
                for name, rule in block_pieces[upstream]:
                    if name not in filled:
                        weight_dtype = dtype if name in weights else tensors[name].dtype
                        filled[name] = torch.empty(tensors[name].shape, dtype=weight_dtype, device=device)
                    rule.filled(filled[name]).copy_(rule.apply(upstream_tensor))
                    unchanged = rule.rows is None and rule.part is None and not rule.halves
                    if self.int8 and bits is not None and unchanged and name in weights:
                        int8[name] = bits
            module.load_state_dict(filled, strict=False, assign=True)
            for name, parts in int8.items():  # for `int8_parts`
                module.get_parameter(name).int8_weight = parts  # type: ignore[attr-defined]
            if block:
                backend().pack(blocks[block], self.packing or "bfloat16")

    def _plan(
        self, tensors: Mapping[str, Tensor], rules: Sequence[Rename], skip: Sequence[str]
    ) -> tuple[Pieces, list[str]]:
        """Return the pieces of our `tensors`, by upstream name, and a list of faults."""
        pieces: dict[str, list[tuple[str, Rename]]] = {}
        faults = list[str]()
        num_filled = Counter[str]()
        for upstream, meta in self.metas.items():
            if any(re.fullmatch(pattern, upstream) for pattern in skip):
                continue
            pieces[upstream] = [(name, rule) for rule in rules if (name := rule.match(upstream)) in tensors]
            if not pieces[upstream]:
                faults.append(f"unexpected {upstream}")
            for name, rule in pieces[upstream]:
                if fault := rule.mismatch(upstream, meta, tensors[name]):
                    faults.append(fault)
                num_filled[name] += rule.filled(tensors[name]).numel()
        missing = []
        for name, tensor in tensors.items():
            numbers = num_filled.get(name)
            if numbers != tensor.numel():
                is_given = f"{name} is given {numbers} of {tensor.numel()} numbers"
                missing.append(is_given if numbers else f"missing {name}")
        return pieces, missing + faults

    def tensors(self, names: Collection[str]) -> Iterator[tuple[str, Tensor, tuple[Tensor, Tensor] | None]]:
        """Read the tensors of these names, file by file, as `read_tensors` does."""
        for file, content in self._contents.items():
            held = [name for name in content if name in names]
            ends = accumulate(content[name].nbytes for name in held)
            chunk_of = dict(zip(held, (end // CHUNK for end in ends), strict=True))
            for _, chunk in groupby(held, chunk_of.__getitem__):
                yield from read_tensors(file, chunk)
