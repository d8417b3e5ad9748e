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
from lanternpp.nn.backend import DrafterKernels, backend
from lanternpp.nn.checkpoints import config_as
from lanternpp.nn.decoder import AttentionCache, Decoder, DecoderConfig
from lanternpp.nn.sources import SAME, Source, blank
from lanternpp.types import Nodes
from lanternpp.util.jsonfile import Between

MIN_COSINE = 0.98  # between the probes of a target and of the target that a drafter was trained for


@dataclass(frozen=True)
class DrafterConfig:
    """The shape of a drafter: that of its decoder, and the fields of a subclass.

    config.json has the fields of a subclass and the decoder's fields `shared` and `chosen` in one flat object.
    """

    decoder: DecoderConfig

    # Fields of the decoder: those that a new drafter takes from its target, and others with their defaults.
    shared: ClassVar = ("dim", "heads", "hidden", "kv_heads", "norm_eps", "qk_norm", "head_dim")
    chosen: ClassVar[dict[str, Any]] = {"layers": 1}

    @classmethod
    def like(cls, shape: DecoderConfig, layers: int = 1, **fields: Any) -> Self:
        """Return the shape of a new drafter for a target of this shape; fields: those of the subclass."""
        shared = {name: getattr(shape, name) for name in cls.shared}
        return cls(DecoderConfig(**(shared | cls.chosen | {"layers": layers})), **fields)

    @classmethod
    def of(cls, config: Mapping[str, Any], source: Path) -> Self:
        """Return the shape that config.json, read from `source`, describes. InputError where it cannot be used."""
        names = (*cls.shared, *cls.chosen)
        decoder = cls.chosen | {name: config[name] for name in names if config.get(name) is not None}
        return config_as(cls, {**config, "decoder": config_as(DecoderConfig, decoder, source)}, source)

    def flat(self) -> dict[str, Any]:
        """Return the content of config.json."""
        fields = asdict(self)
        decoder = fields.pop("decoder")
        return {name: decoder[name] for name in (*self.shared, *self.chosen)} | fields


class Drafter(nn.Module, ABC):
    """Predicts the target's feature at the next position from a position's feature and the code at the next position."""

    decoder: Decoder
    native: DrafterKernels | None = None  # the layers besides the decoder, in C; set by `pack`
    kind: ClassVar[str] = ""  # in the config of a trained drafter, as the room's `DRAFTERS` names it
    config_class: ClassVar[type[DrafterConfig]] = DrafterConfig
    about: ClassVar[str] = ""  # the checkpoints that `read` takes, for the message about an unknown one
    # The class that drafts with it: (drafter, tree).
    proposer: ClassVar[str] = "lanternpp.proposers.tree:TreeProposer"
    attends_to_padding = False  # of prompts

    @classmethod
    def claims(cls, source: Source) -> bool:
        """Whether a checkpoint without our own `kind` is of this class, by its config, its names and shapes."""
        return False

    @classmethod
    def read(cls, source: Source, target: Target, dtype: torch.dtype) -> Self:
        """Read the drafter in `source` for a target, on the CPU; InputError where it has another target's sizes."""
        config = cls.config_class.of(source.config, source.path)
        check_fit(source, config.decoder.dim, target)
        with blank(source.path):
            drafter = cls(config, target.decoder.rotary_table)
        source.fill(drafter, [SAME], dtype)
        return drafter

    def embed(self, target: Target, codes: Tensor) -> Tensor:
        """Embed codes [B, N] as [B, N, D], as the target does."""
        return target.embed(codes)

    def prompt_inputs(self, prompt: Tensor) -> Tensor:
        """Return the drafter's inputs for a prompt [R, T - 1, D], the target's shifted by one position; the same shape."""
        return prompt

    def pack(self, target: Target) -> None:
        """Prepare for passes over few rows, with its target; for inference only."""
        backend(next(self.parameters()).device).pack(self, "int8")

    @abstractmethod
    def forward(self, next_embeds: Tensor, features: Tensor, nodes: Nodes, cache: AttentionCache) -> Tensor:
        """next_embeds [R, N, D] of the codes at the next positions, features [R, N, D] -> features at the next positions."""


class DrafterWarning(UserWarning):
    """A drafter of the right sizes that was trained for another target."""


@dataclass(frozen=True)
class TargetEntry:
    """The target's entry in a drafter's config, as `mark` writes it."""

    vocab: Annotated[int, Between(0, 1 << 20)]
    probe: Annotated[tuple[float, ...], Len(0, 64)] = ()


def mark(target: Target) -> dict[str, Any]:
    """Return the target's entry in a drafter's config: its sizes, and a fingerprint of its embeddings."""
    return {"vocab": target.vocab, "dim": target.decoder.config.dim, "probe": probe(target).tolist()}


@torch.no_grad()
def probe(target: Target) -> Tensor:
    """Return the means of at most 8 groups of channels of the embeddings of at most 8 codes, [codes * groups]."""
    rows = target.embed(target.examples(8)[None])[0].float().cpu()
    return torch.stack([group.mean(1) for group in rows.chunk(8, 1)], 1).flatten()


def check_fit(source: Source, dim: int, target: Target) -> None:
    """Check that the drafter in `source`, `dim` wide, has the sizes that a target needs; raise InputError otherwise.

    Warn where the drafter was trained for another target of the same sizes: few of its codes are kept.
    """
    if dim != target.decoder.config.dim:
        raise InputError(
            f"drafter {source.path} is {dim} wide and the target {target.decoder.config.dim}; "
            "use a drafter trained for this target"
        )
    if source.config.get("target") is None:
        return
    trained_for = config_as(TargetEntry, source.config["target"], source.path)
    if trained_for.vocab != target.vocab:
        raise InputError(
            f"drafter {source.path} was trained for a target of {trained_for.vocab} codes and this one has "
            f"{target.vocab}; use a drafter trained for this target"
        )
    target_probe, expected = probe(target), torch.tensor(trained_for.probe)
    if target_probe.shape != expected.shape or F.cosine_similarity(target_probe, expected, 0) < MIN_COSINE:
        warnings.warn(
            f"drafter {source.path} was trained for another target than this one: little of what it drafts "
            "will be kept; train one for this target",
            DrafterWarning,
            stacklevel=3,
        )
