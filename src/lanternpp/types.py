"""The frozen dataclasses of tensors that the packages of the library pass to each other.

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
    """Return whether Python can read a tensor's values at no cost: the tensor is on a CPU, and no graph is traced."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


class Dials(SimpleNamespace):
    """The dials of a picture by name. A dial without a value is None; proposers, trees and rules then use their own default."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return None


@dataclass(frozen=True, slots=True)
class Layout:
    """Facts about trees of a fixed shape that hold before the trees are drawn, and for all samples."""

    spans: tuple[tuple[slice, ...], ...]
    """By depth and rank: a range of the node ids at this depth that contains all nodes with a child of this rank."""
    order: Tensor  # [N] node ids: a parent before its children, a later sibling and its subtree before an earlier one


@dataclass(frozen=True, slots=True)
class Tree:
    """The shape of a draft. Node 0 is the root and a parent precedes its children."""

    parent: Tensor  # [B, N] int64, -1 for the root
    depth: Tensor  # [B, N] int64, 0 for the root
    children: Tensor  # [B, N, K] int64 node ids in trial order, -1 = none
    mask: Tensor  # [B, N, N] bool, True where j is i or an ancestor of i
    widths: tuple[int, ...]  # maximum children of a node at depth 0, 1, ...; a constant of the builder
    layout: Layout | None = None  # None if the shape is decided while drafting, or no reader needs the layout

    @property
    def chain(self) -> bool:
        """Whether the tree has a single path, so that a node's id is its depth."""
        return all(width <= 1 for width in self.widths)


@dataclass(frozen=True, slots=True)
class UnverifiedNodes:
    """Codes that the target's pass reads after a draft's nodes, but that are neither verified nor committed."""

    codes: Tensor  # [B, M] int64
    depth: Tensor  # [B, M] int64, distance from the root in codes
    mask: Tensor  # [B, M, N + M] bool, True where a node of the draft, or an unverified node, is attended to


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of draft codes, and the distributions that the codes were drawn from."""

    tree: Tree
    codes: Tensor  # [B, N] int64; codes[:, 0] is the root, already decided
    probs: Tensor | None
    """[B, N, V] the distribution that a node's children were drawn from; None: point masses"""
    survival: Tensor | None = None
    """[B, levels] of a chain: the predicted probability that a code and all earlier codes are accepted, 0 after the last
    drawn code; None if the proposer predicts no such probability."""
    unverified: UnverifiedNodes | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The codes of a draft that the target accepted, and the codes that it drew after them."""

    path: Tensor  # [B, P] int64 accepted nodes, root first, the last node repeated as padding
    kept: Tensor  # [B] int64 number of nodes in the path without its padding, 1..P (0 for a finished sample)
    next_codes: Tensor  # [B, P] int64 the code decided after each accepted node; the last code is the bonus
    bonus: Tensor  # [B] int64 the code drawn after the path: the next root
    tv_cost: Tensor | None = None  # [B, P] total variation cost of each accepted node's children, if measured
    distribution: Tensor | None = None
    """[B, N, V] the distribution of the codes after every node, if all draft codes together decided how many are accepted;
    None if the decision did not depend on the codes after the first rejected code."""


@dataclass(frozen=True, slots=True)
class NeighbourBudget:
    """The numbers of a rule that gives a candidate the probability of its nearest codes, for verification outside of PyTorch."""

    # [V, k] int32: the nearest codes of every code, nearest first; None: no mass is moved.
    table: Tensor | None
    limits: tuple[tuple[float, float], ...]
    """(a, b) of every level: a code of probability p gets at most a + b p."""
    optimal: bool  # whether the residual is optimal


@dataclass(frozen=True, slots=True)
class Nodes:
    """The rotary positions, cache slots and attention mask of the inputs of a pass."""

    position: Tensor  # [R, N] int64 for rotary embeddings
    slot: Tensor  # [R, N] int64 cache slots that receive the keys and values
    mask: Tensor  # [R, 1, N, S] bool, True = attended to


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """The output of one pass of the target over a draft, and the verdict on the draft."""

    draft: Draft
    features: Tensor  # [R, N, D] after the final norm; [R, N, (1 + aux) D] if the proposer has `aux_layers`
    logits: Tensor  # [B, N, V] guided and constrained, before temperature; [B, N + M, V] if the draft has unverified nodes
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Prompt:
    """An encoded prompt. Conditional rows come before unconditional rows."""

    embeds: Tensor  # [R, T, D]
    start: Tensor  # [R] int64 the first slot after the padding on the left


class Depicted(str):
    """A prompt that shows pictures beside its text."""

    pictures: Sequence[Tensor] = ()  # codes [rows, columns] of each picture
    digests = ""  # digests of the pictures' pixels, for the notes of a PNG
    tokens: Sequence[int] = ()  # the prompt's tokens, if they are encoded together with the pictures
    shape: Hashable = None  # the argument of `Target.shaped`; None: the target's own shape


def shape_of(prompt: str | None) -> Hashable:
    """Return the shape of the picture that a prompt draws; None: the target's own."""
    return prompt.shape if isinstance(prompt, Depicted) else None


@dataclass(frozen=True, slots=True)
class Admission:
    """A sample that was admitted to a running batch, after its prompt's prefill."""

    slot: int  # index of the sample in the batch, 0..B-1
    rows: Tensor  # [r] int64 rows of the sample, the conditional row first
    condition: str | None
    prompt: Prompt  # the encoded prompt of these rows
    features: Tensor  # [r, T, D] features of the prompt's slots, as in a `TargetOutput`
    root: Tensor  # [1] int64 the first code


@dataclass(frozen=True, slots=True)
class Frontier:
    """The nodes of a tree that the drafter expands next."""

    codes: Tensor  # [B, W] int64
    node: Tensor  # [B, W] int64 ids of these nodes
    parent: Tensor  # [B, W] int64 ids of their parents, which are already expanded
    level: int  # the depth of all these nodes
    depth: Tensor  # [B, W] int64, `level` as a tensor
    mask: Tensor  # [B, W, N] bool, True at the nodes themselves and their ancestors except the root
