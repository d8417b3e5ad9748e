"""The base class of proposers, which give the engine a draft before every pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from lanternpp.engine.noise import Noise
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.trees.base import TreeBuilder
from lanternpp.types import Admission, Dials, Draft, TargetOutput, Tree

LATENTS_MESSAGE = (
    "this model draws continuous latents, drafted in a chain by an EAGLE drafter and verified one by one, or not drafted: "
    "use --method eagle --tree chain-4 --verify token, or --method ar"
)


class Parts(Dials):
    """The parts that a proposer may be built from: a tree, a network, and the dials by name.

    network: a `Drafter` or a smaller `Target`, as `Proposer.needs` names it; None for `draft_sampling`.
    """

    def __init__(self, tree: TreeBuilder, network: Any = None, **dials: Any):
        super().__init__(tree=tree, network=network, **dials)


@dataclass(frozen=True)
class DraftSampling:
    """How a proposer samples its drafts, which decides which verifiers support them."""

    chain: bool = False  # no node has more than one child
    samples_from_q: bool = False
    """Whether every draft code follows its q, given all codes drawn and all decisions made at earlier places. Joint
    verification looks at the codes after a rejected code, which changes their distribution for the next pass:
    `joint.rejected_distribution` computes this distribution from `Verdict.distribution`."""
    reason: str = "does not declare how it samples its drafts"  # of False, as a clause without its subject
    fixed: bool = False  # all drafts have the same shape, and their trees a `layout`


def check_draft(draft: object, proposer: Proposer, codes: Tensor, count: Tensor, joint: bool) -> None:
    """Check a draft that follows the `count` [B] decided codes of codes [B, length], by host reads; raise InputError.

    joint: it is verified jointly. Only drafts of a caller's own proposer or tree builder are checked, and none of latents.
    """
    for part in (proposer, getattr(proposer, "builder", proposer)):
        if type(part).__module__.startswith("lanternpp.") or proposer.target.channels:
            continue
        root = codes.gather(1, (count - 1)[:, None])[:, 0]
        if fault := fault_of(draft, proposer, root, count < proposer.target.length, joint):
            raise InputError(f"{type(part).__qualname__} {fault}")


def fault_of(draft: object, proposer: Proposer, root: Tensor, running: Tensor, joint: bool) -> str | None:
    """Return what is wrong with a draft for the samples `running` [B] after the decided codes root [B], as a clause, or None."""
    if not isinstance(draft, Draft):
        return f"returns a {type(draft).__name__} in place of a Draft"
    tree, codes, probs, vocab = draft.tree, draft.codes, draft.probs, proposer.target.vocab
    if not all(map(isinstance, (tree, codes), (Tree, Tensor))):
        return f"returns {type(tree).__name__} and {type(codes).__name__} in place of the Tree and Tensor of a Draft"
    fields = codes, tree.parent, tree.depth, tree.children, tree.mask
    sizes = {tuple(x.shape[:2]) for x in fields} | {tuple(tree.mask.shape[::2])}
    if sizes != {(len(root), *codes.shape[1:2])} or {x.dtype for x in fields} != {torch.int64, torch.bool}:
        shapes = f"codes {list(codes.shape)} of {codes.dtype} on a tree of {list(tree.depth.shape)} nodes"
        return f"drafts {shapes}; give each node an int64 code, parent and depth, int64 children, and a row of a bool mask"
    nodes, levels = codes.shape[1], int(tree.depth.max())
    if nodes > proposer.size or max(levels, len(tree.widths)) > proposer.depth:
        return f"drafts {nodes} nodes on {levels} levels, more than its size {proposer.size} and depth {proposer.depth}"
    # The kernels read as many children of a node as the greatest width.
    ranks = max(tree.widths, default=1)
    if tree.children.shape[2] != ranks or levels > len(tree.widths) or int(tree.children.max()) >= nodes:
        return f"drafts a tree whose widths {tree.widths} or children do not fit its {nodes} nodes on {levels} levels"
    if not bool(((codes[running] >= 0) & (codes[running] < vocab)).all()):
        return f"drafts codes that are none of the {vocab} from 0"
    if not codes[running, 0].equal(root[running]):
        return "drafts from another code than the last one decided; begin with self.root, which super().observe keeps"
    if joint and (probs is None or not (tree.chain or tree.layout)):
        return "drafts without probs, or on a branching tree without a layout; use verify token"
    if probs is None:
        return None
    if probs.shape == (*codes.shape, vocab):
        q = probs[running][(tree.children[running] >= 0).any(-1)]  # [nodes with children, V]
        if bool(((q >= 0).all(-1) & ((q.sum(-1) - 1).abs() < 0.01)).all()):
            return None
    return f"gives probs {list(probs.shape)}; a node with children needs {vocab} that sum to 1"


class Proposer(ABC):
    """Proposes drafts of `size` nodes, including the root and unverified nodes, and `depth` levels below the root.

    A chain may be shorter.
    """

    dials: ClassVar[frozenset[str] | None] = None  # the dials of a method that the proposer reads; None: any
    needs: ClassVar[str | None] = None
    """The network of the proposer, by the folder of a model that holds the network: "drafter", "parallel", or "independent",
    a smaller target of the same codes; None: no network."""
    aux_layers: tuple[int, ...] = ()
    """The layers of the target whose outputs the proposer gets after the features, as `Decoder.forward` returns them."""
    max_precomputed: int = 64
    """The random numbers of a level, and of every other purpose, that are computed in advance."""
    supports_fused_steps: bool = False
    """Whether a backend may take over `propose` and `observe`, of `NoDraft` and of `Parallel` with chains of all levels, but not of
    classes that derive from them; set by `open`."""
    size: int
    depth: int
    root: Tensor  # [B] the code that each draft starts from
    count: Tensor  # [B] decided codes, the root included

    @classmethod
    @abstractmethod
    def build(cls, parts: Parts) -> Self:
        """Build a proposer of these parts; raise InputError where a dial is wrong."""

    @classmethod
    def draft_sampling(cls, parts: Parts) -> DraftSampling:
        """Return how a proposer built from these parts samples its drafts; `parts.network` is None here."""
        return DraftSampling()

    def check(self, target: Target) -> None:
        """Check that the proposer drafts what the target predicts, codes or latents; raise InputError if not."""
        if target.channels:
            raise InputError(LATENTS_MESSAGE)

    def open(self, target: Target, sampling: Sampling, guidance: Guidance, batch: int) -> None:
        """Allocate the state of a batch; called once, before all methods below."""
        self.target, self.sampling, self.guidance = target, sampling, guidance
        self.root = torch.zeros(batch, dtype=torch.int64, device=next(target.parameters()).device)
        self.count = torch.ones_like(self.root)

    def begin(self, new: Admission) -> None:
        """Set the state of an admitted sample; the state of other samples does not change."""
        self.root[new.slot] = new.root[0]
        self.count[new.slot] = 1

    @abstractmethod
    def propose(self, noise: Noise) -> Draft:
        """Return a draft for every sample."""

    def observe(self, output: TargetOutput) -> None:
        """Update the state with the verdict on the last draft and the target's features."""
        self.root.copy_(output.verdict.bonus)
        self.count += output.verdict.kept
