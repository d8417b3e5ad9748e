"""The tensors that are passed between the packages of the library, as frozen dataclasses.

Letters: B samples, R rows (R = branches x B), N nodes, P path length = depth + 1, V codes,
D features, T prompt slots, S cache slots, W frontier width, K children.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Warping = tuple[float, int, float]
"""Temperature, top-k and top-p."""


def on_host(x: Tensor) -> bool:
    """Whether Python can look at the values of a tensor at no cost: on a CPU, and no graph is traced."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


class Dials(SimpleNamespace):
    """The dials of a picture by name, for the parts that read them; one that is left out is None, the part's own default."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return None


@dataclass(frozen=True, slots=True)
class Layout:
    """What is known about trees of a fixed shape before they are drawn; one for all samples."""

    spans: tuple[tuple[slice, ...], ...]
    """By depth and rank: a range of the node ids at that depth, in which are all that have a child of this rank."""
    order: Tensor  # [N] node ids: a parent before its children, a later sibling and its subtree before an earlier one


@dataclass(frozen=True, slots=True)
class Tree:
    """The shape of a draft. Node 0 is the root and a parent precedes its children."""

    parent: Tensor  # [B, N] int64, -1 for the root
    depth: Tensor  # [B, N] int64, 0 for the root
    children: Tensor  # [B, N, K] int64 node ids in trial order, -1 = none
    mask: Tensor  # [B, N, N] bool, True where j is i or an ancestor of i
    widths: tuple[int, ...]  # most children of any node at depth 0, 1, ...; a constant of the builder
    layout: Layout | None = None  # None where the shape is decided while drafting, or nobody needs it

    @property
    def chain(self) -> bool:
        """Whether it has a single path, so that a node's id is its depth."""
        return all(width <= 1 for width in self.widths)


@dataclass(frozen=True, slots=True)
class UnverifiedNodes:
    """Codes that the target's pass computes after a draft's nodes; they are not verified and not committed."""

    codes: Tensor  # [B, M] int64
    depth: Tensor  # [B, M] int64, places after the root
    mask: Tensor  # [B, M, N + M] bool, True where a node of the draft, or of these, is attended to


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of draft codes, and the distributions they were drawn from."""

    tree: Tree
    codes: Tensor  # [B, N] int64; codes[:, 0] is the root, already decided
    probs: Tensor | None  # [B, N, V] what a node's children were drawn from; None: point masses
    survival: Tensor | None = None
    """[B, levels] of a chain: the predicted probability that a code and all before it are kept, 0 where no more codes were
    drawn; None where that is not predicted."""
    unverified: UnverifiedNodes | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target kept of a draft."""

    path: Tensor  # [B, P] int64 kept nodes, root first, the last one repeated as padding
    kept: Tensor  # [B] int64 how many of the path count, 1..P (0 for a finished sample)
    next_codes: Tensor  # [B, P] int64 the code decided after each kept node; the last of them is the bonus
    bonus: Tensor  # [B] int64 the code drawn after the path: the next root
    tv_cost: Tensor | None = None  # [B, P] total variation cost of each kept node's children, if measured
    distribution: Tensor | None = None
    """[B, N, V] the distribution that the codes after every node follow, where all draft codes together decided how many are
    kept; None where the decision looked at no code after the first rejected one."""


@dataclass(frozen=True, slots=True)
class NeighbourBudget:
    """A rule whose candidate gets the probability of its nearest codes, as numbers, for verification outside of PyTorch."""

    # [V, k] int32: the nearest codes of every code, nearest first; None: no mass is moved.
    table: Tensor | None
    limits: tuple[tuple[float, float], ...]
    """(a, b) of every level: at most a + b p is moved to a code of probability p."""
    optimal: bool  # whether the residual is the optimal one


@dataclass(frozen=True, slots=True)
class Nodes:
    """The inputs' rotary positions, cache slots and attention mask, which are separate tensors."""

    position: Tensor  # [R, N] int64 for rotary embeddings
    slot: Tensor  # [R, N] int64 where keys and values go
    mask: Tensor  # [R, 1, N, S] bool, True = attended to


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """The output of one pass of the target over a draft, and the verdict on it."""

    draft: Draft
    features: (
        Tensor  # [R, N, D] after the final norm; [R, N, (1 + aux) D] where the proposer has `aux_layers`
    )
    logits: Tensor  # [B, N, V] guided and constrained, before temperature; [B, N + M, V] where the draft has unverified nodes
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Prompt:
    """An encoded prompt. Conditional rows come first, unconditional ones after."""

    embeds: Tensor  # [R, T, D]
    start: Tensor  # [R] int64 the first slot that counts (left padding)


class Depicted(str):
    """A prompt that shows pictures beside its text."""

    pictures: Sequence[Tensor] = ()  # codes [rows, columns] of each
    digests = ""  # of their pixels, for the notes of a PNG
    tokens: Sequence[int] = ()  # of the prompt, where they are made with the pictures
    shape: Hashable = None  # as `Target.shaped` takes it; None: the target's own


def shape_of(prompt: str | None) -> Hashable:
    """The shape of the picture that a prompt draws; None: the target's own."""
    return prompt.shape if isinstance(prompt, Depicted) else None


@dataclass(frozen=True, slots=True)
class Admission:
    """A sample that was admitted to a running batch, after its prompt's prefill."""

    slot: int  # of the batch, 0..B-1
    rows: Tensor  # [r] int64 its rows, the conditional one first
    condition: str | None
    prompt: Prompt  # of these rows
    features: Tensor  # [r, T, D] of the prompt's slots, as those of a `TargetOutput`
    root: Tensor  # [1] int64 the first code


@dataclass(frozen=True, slots=True)
class Frontier:
    """The nodes of a tree that the drafter is to expand next."""

    codes: Tensor  # [B, W] int64
    node: Tensor  # [B, W] int64 ids of these nodes
    parent: Tensor  # [B, W] int64 ids of their parents, which were expanded before
    level: int  # their depth
    depth: Tensor  # [B, W] int64, the same
    mask: Tensor  # [B, W, N] bool, True at themselves and their ancestors except the root
