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
from lanternpp.types import Admission, Dials, Draft, TargetOutput

LATENTS = (
    "this model draws continuous latents, which are drafted in a chain by an EAGLE drafter or not at all: use --method "
    "eagle --tree chain-4 --verify token, or --method ar"
)


class Parts(Dials):
    """What a proposer may be built from: a tree, a network, and the dials by name.

    network: what `Proposer.needs` names, a `Drafter` or a smaller `Target`; None for `draft_sampling`.
    """

    def __init__(self, tree: TreeBuilder, network: Any = None, **dials: Any):
        super().__init__(tree=tree, network=network, **dials)


@dataclass(frozen=True)
class DraftSampling:
    """How a proposer samples its drafts, which decides which verifiers support them."""

    chain: bool = False  # no node has more than one child
    samples_from_q: bool = False
    """Whether every draft code follows the distribution that it is offered with, given all that was drawn and decided at
    the places before it. Joint verification looks at the codes after a rejected one, which change their distribution for
    the next pass: `joint.rejected_distribution` gives it from `Verdict.distribution`."""
    reason: str = "does not declare how it samples its drafts"  # why not, as a clause without its subject
    fixed: bool = False  # all drafts have the same shape, and their trees a `layout`


def check_first_drafts(proposer: Proposer, codes: Tensor, count: Tensor, drafts: int = 2) -> None:
    """Have the first drafts of a proposer or tree of the caller's own checked, by host reads; codes, count: of its engine."""
    target, parts = proposer.target, (proposer, getattr(proposer, "builder", proposer))
    own = next((part for part in parts if not type(part).__module__.startswith("lanternpp.")), None)
    if own is None or target.channels:
        return
    left, usual, given = [None] * drafts, proposer.propose, vars(proposer).get("propose")

    def propose(noise: Noise) -> Draft:
        draft = usual(noise)
        drawn = count < target.length  # other samples are idle
        root = codes.gather(1, (count - 1)[:, None])[:, 0]
        if fault := fault_of(draft, proposer, root, drawn):
            raise InputError(f"{type(own).__qualname__} {fault}")
        left.pop()
        if not left:
            del proposer.propose
            vars(proposer).update({} if given is None else {"propose": given})
        return draft

    proposer.propose = propose  # type: ignore[method-assign]


def fault_of(draft: object, proposer: Proposer, root: Tensor, drawn: Tensor) -> str | None:
    """What is wrong with a draft for the samples `drawn` [B], of which root [B] was decided last, as a clause."""
    if not isinstance(draft, Draft):
        return f"returns a {type(draft).__name__} in place of a Draft"
    tree, codes, probs, vocab = draft.tree, draft.codes, draft.probs, proposer.target.vocab
    sizes = {tuple(x.shape[:2]) for x in (codes, tree.parent, tree.depth, tree.children, tree.mask)}
    if sizes != {(len(root), codes.shape[-1])} or codes.dtype != torch.int64:
        have = f"codes {list(codes.shape)} of {codes.dtype} on a tree of {list(tree.depth.shape)} nodes"
        return f"drafts {have}; give each node an int64 code, the root's first"
    nodes = max(codes.shape[1], int(tree.children.max()) + 1)
    levels = max(len(tree.widths), int(tree.depth.max()))
    if nodes > proposer.size or levels > proposer.depth:
        return f"drafts {nodes} nodes on {levels} levels, more than its size {proposer.size} and depth {proposer.depth}"
    if not bool(((codes[drawn] >= 0) & (codes[drawn] < vocab)).all()):
        return f"drafts codes that are none of the {vocab} from 0"
    if not codes[drawn, 0].equal(root[drawn]):
        return "drafts from another code than the last one decided; begin with self.root, which super().observe keeps"
    if probs is not None:
        fits = probs.shape == (*codes.shape, vocab)
        q = probs[drawn][(tree.children[drawn] >= 0).any(-1)] if fits else probs
        if not fits or not bool(((q >= 0).all(-1) & ((q.sum(-1) - 1).abs() < 0.01)).all()):
            return f"gives probs {list(probs.shape)}; a node with children needs {vocab} that sum to 1"
    return None


class Proposer(ABC):
    """Offers drafts of `size` nodes, the root and unverified nodes included, and `depth` levels below the root.

    A chain may be shorter.
    """

    dials: ClassVar[frozenset[str] | None] = None  # the fields of a method that it reads; None: any
    needs: ClassVar[str | None] = None
    """The network that it is built with, by the folder of a model that holds it: "drafter", "parallel", or "independent",
    a smaller target of the same codes; None: it is built without."""
    aux_layers: tuple[int, ...] = ()
    """The layers of the target whose output it is given after the features, as `Decoder.forward` returns them."""
    numbers_ahead: int = 64
    """The random numbers of a level, and of every other purpose, that are computed in advance."""
    whole_steps: bool = False
    """Whether a backend may propose and observe for it, as for `NoDraft`, or as `Parallel` does for a chain of all levels, but not for
    classes that derive from them; known once it is open."""
    size: int
    depth: int
    root: Tensor  # [B] the code each draft starts from
    count: Tensor  # [B] decided codes, the root among them

    @classmethod
    @abstractmethod
    def build(cls, parts: Parts) -> Self:
        """A proposer of these parts; InputError where a dial is wrong."""

    @classmethod
    def draft_sampling(cls, parts: Parts) -> DraftSampling:
        """How a proposer built from these parts samples its drafts; `parts.network` is None here."""
        return DraftSampling()

    def check(self, target: Target) -> None:
        """InputError where it does not draft what this target predicts, codes or latents."""
        if target.channels:
            raise InputError(LATENTS)

    def open(self, target: Target, sampling: Sampling, guidance: Guidance, batch: int) -> None:
        """Allocate the state of a batch; called once, before any other method."""
        self.target, self.sampling, self.guidance = target, sampling, guidance
        self.root = torch.zeros(batch, dtype=torch.int64, device=next(target.parameters()).device)
        self.count = torch.ones_like(self.root)

    def begin(self, new: Admission) -> None:
        """A sample is admitted; the state of the others does not change."""
        self.root[new.slot] = new.root[0]
        self.count[new.slot] = 1

    @abstractmethod
    def propose(self, noise: Noise) -> Draft:
        """A draft for every sample."""

    def observe(self, output: TargetOutput) -> None:
        """Update the state with the verdict on the last draft and the target's features."""
        self.root.copy_(output.verdict.bonus)
        self.count += output.verdict.kept
