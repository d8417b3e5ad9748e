"""The base classes of drafters, the small networks that predict the target's features of the next codes."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import torch
import torch.nn.functional as F
from annotated_types import Len
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.nn.backend import backend
from lanternpp.nn.checkpoints import config_as
from lanternpp.nn.decoder import AttentionCache, Decoder, DecoderConfig
from lanternpp.nn.sources import SAME, Source, blank
from lanternpp.types import Nodes
from lanternpp.util.jsonfile import Between

ALIKE = 0.98  # least cosine of a target's probe with that of the target a drafter was trained for


@dataclass(frozen=True)
class DrafterConfig:
    """The shape of a drafter: its decoder, and in a subclass what else it has.

    config.json holds all of it in one flat object; of the decoder, the fields `shared` and `chosen`.
    """

    decoder: DecoderConfig

    shared: ClassVar[tuple[str, ...]] = (  # fields of the decoder that a new drafter takes from its target
        *("dim", "heads", "hidden", "kv_heads", "norm_eps", "qk_norm", "head_dim"),
    )
    chosen: ClassVar[dict[str, Any]] = {"layers": 1}  # other fields and their defaults

    @classmethod
    def like(cls, shape: DecoderConfig, layers: int = 1, **own: Any) -> Self:
        """A drafter for a target of this shape; `own`: the fields of the subclass."""
        same = {name: getattr(shape, name) for name in cls.shared}
        return cls(DecoderConfig(**(same | cls.chosen | {"layers": layers})), **own)

    @classmethod
    def of(cls, config: Mapping[str, Any], source: Path) -> Self:
        """From config.json, read from `source`. InputError where it cannot be used."""
        given = {name: config.get(name) for name in (*cls.shared, *cls.chosen)}
        fields = cls.chosen | {name: value for name, value in given.items() if value is not None}
        return config_as(cls, {**config, "decoder": config_as(DecoderConfig, fields, source)}, source)

    def flat(self) -> dict[str, Any]:
        """What config.json holds."""
        own = asdict(self)
        decoder = own.pop("decoder")
        return {name: decoder[name] for name in (*self.shared, *self.chosen)} | own


class Drafter(nn.Module, ABC):
    """Predicts the target's feature at the next position from the feature here and the code at the next position."""

    decoder: Decoder
    config_class: ClassVar[type[DrafterConfig]] = DrafterConfig
    about: ClassVar[str] = ""  # the checkpoints it reads, for the message about an unknown one
    proposer: ClassVar[str] = "lanternpp.proposers.tree:TreeProposer"  # what drafts with it: (drafter, tree)

    @classmethod
    def claims(cls, source: Source) -> bool:
        """Whether a checkpoint without our own `kind` is one of these, by its config, its names and shapes."""
        return False

    @classmethod
    def read(cls, source: Source, target: Target, dtype: torch.dtype) -> Self:
        """The drafter in `source` for this target, on the CPU; InputError where it is another target's."""
        config = cls.config_class.of(source.config, source.path)
        check_fit(source, config.decoder.dim, target)
        with blank(source.path):
            drafter = cls(config, target.decoder.rotary_table)
        source.fill(drafter, [SAME], dtype)
        return drafter

    def prompt_inputs(self, prompt: Tensor) -> Tensor:
        """The drafter's inputs for a prompt [R, T - 1, D], the target's shifted by one position; the same shape."""
        return prompt

    def pack(self, target: Target) -> None:
        """Prepare for passes over few rows, with its target; for inference only."""
        backend(next(self.parameters()).device).pack(self, int8=True)

    @abstractmethod
    def forward(self, next_embeds: Tensor, features: Tensor, nodes: Nodes, cache: AttentionCache) -> Tensor:
        """next_embeds [R, N, D], embeddings of the codes at the next positions, and features [R, N, D] -> features there."""


class DrafterWarning(UserWarning):
    """A drafter of the right sizes that was trained for another target."""


@dataclass(frozen=True)
class Mark:
    """The target's entry in a drafter's config, as `mark` writes it."""

    vocab: Annotated[int, Between(0, 1 << 20)]
    probe: Annotated[tuple[float, ...], Len(0, 64)] = ()


@dataclass(frozen=True)
class Trained:
    """Which target a drafter was trained for, where its config says."""

    target: Mark | None = None


def mark(target: Target) -> dict[str, Any]:
    """The target's entry in a drafter's config: its sizes, and a fingerprint of its embeddings."""
    return {"vocab": target.vocab, "dim": target.decoder.config.dim, "probe": probe(target).tolist()}


@torch.no_grad()
def probe(target: Target) -> Tensor:
    """The embeddings of some codes, each channel group's mean: at most 8 x 8 numbers, [n]."""
    rows = target.embed(target.examples(8)[None])[0].float().cpu()
    return torch.stack([part.mean(1) for part in rows.chunk(8, 1)], 1).flatten()


def check_fit(source: Source, dim: int, target: Target) -> None:
    """InputError where the drafter in `source`, `dim` wide, has other sizes than this target needs.

    A warning where it was trained for another target of the same sizes: it drafts, and little is kept.
    """
    if dim != target.decoder.config.dim:
        raise InputError(
            f"drafter {source.path} is {dim} wide and the target {target.decoder.config.dim}; "
            "use a drafter trained for this target"
        )
    known = config_as(Trained, source.config, source.path).target
    if known is None:
        return
    if known.vocab != target.vocab:
        raise InputError(
            f"drafter {source.path} was trained for a target of {known.vocab} codes and this one has "
            f"{target.vocab}; use a drafter trained for this target"
        )
    ours, theirs = probe(target), torch.tensor(known.probe)
    if ours.shape != theirs.shape or F.cosine_similarity(ours, theirs, 0) < ALIKE:
        warnings.warn(
            f"drafter {source.path} was trained for another target than this one: little of what it drafts "
            "will be kept; train one for this target",
            DrafterWarning,
            stacklevel=3,
        )
