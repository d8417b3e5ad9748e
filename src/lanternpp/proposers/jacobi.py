"""Speculative Jacobi decoding: the target's distributions of the last pass are the draft (SJD, arXiv 2410.01699).

Why it is lossless, by induction over the places of the image. Given everything that was drawn and decided at the places
before it, in all passes, a guess x follows the q that it is offered with:

* A first guess is drawn from a q that depends on those places alone.
* A pass replaces q by a p of the target, which also depends on those places alone, and the guess by one that follows p: drawn
  anew (SJD), or coupled to the last guess so that it rarely changes (SCD, arXiv 2510.24211).
* The walk of `verify` comes to a place, or does not, by what is at the places before it. So a guess that it does not come to
  follows q still.
* Block and traversal verification look at all guesses, and are likelier to stop before good ones. But how likely is known:
  a guess that is not kept follows [q - w p]+, normalised (`block.rejected_distribution`). That is its q from then on.
* The alternatives are other guesses at the first place, drawn from its q without the first guess, in every pass. The place is
  decided in that pass, so no guess behind depends on them but through the places before it.
* Where all guesses at the first place were refused and y was drawn, no node has p(. | y). The next guess is drawn from a mean of
  the p behind the refused codes, in which codes that look like y weigh most. It depends on the places before it alone.
* The windows of further rows (`window_rows`) stand behind the first one and are no part of what is verified: no decision looks at
  their guesses. Each guess has a place in the picture, and what is drawn for it depends on codes at the places before it alone. It
  waits with its q until the first window comes to it.

So the draft is one of independent guesses as far as a verifier can tell, and with an exact rule the output follows the
target's distribution.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from lanternpp.engine.guidance import Guidance
from lanternpp.engine.noise import Noise
from lanternpp.engine.proposer import DraftSampling, Parts, Proposer
from lanternpp.engine.sampling import Sampling, draw
from lanternpp.engine.verify.joint import rejected_distribution
from lanternpp.engine.verify.tokenwise import without
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.trees.chain import chain_tree
from lanternpp.types import Admission, Draft, TargetOutput, UnverifiedNodes

GUESS, PLACE = 8, 10  # purposes of noise: a guess, a guess of a place
MOST, MOST_ALTERNATIVES, MOST_ROWS = 256, 16, 16
SHARPNESS = (
    20.0  # of the weights of codes that look like another, over the distance of two codes drawn at random
)
COUPLINGS = ("none", "maximal", "gumbel")
INITS = ("uniform", "last", "above", "mixed")
NOWHERE = -1  # the place of nothing


class Jacobi(Proposer):
    """A chain of `window` guesses behind the root, which every pass verifies and redraws, and alternatives of the first.

    coupling: "none" draws every guess anew from its new p (SJD); "maximal" keeps it with probability
    min(1, p/q), else draws from [p - q]+ (SCD); "gumbel" draws with noise that belongs to the place in the
    image, the same in every pass (SCD).
    init: the distribution of a guess at a place without a p: "uniform"; "last", the p at the end of the
    window; "above", the p of the code one image row above, where known (else as "last"); "mixed", above at
    even places and last at odd ones. Before the first pass all of them are uniform.
    alternatives: how many other guesses there are at the first place of the window. Nothing is drafted behind them, but their p
    tell what follows codes like them.
    window_rows: how many rows of the image have a window. The windows of the rows below the present one begin with the row, or behind
    the window before them; every pass redraws their guesses, given all guesses before them, and none is verified before the first
    window has come to it.

    The state is kept by place of the image, in rings of `slots` places: what stands at a slot is of the place that `seen` names,
    for a p, or `held`, for a guess and its q.
    """

    dials = frozenset({"window", "coupling", "init", "alternatives", "window_rows", "verify"})

    def __init__(
        self,
        window: int = 16,
        coupling: str = "none",
        init: str = "uniform",
        alternatives: int = 0,
        window_rows: int = 1,
    ):
        if not 1 <= window <= MOST:
            raise InputError(f"window {window} is outside 1 to {MOST}")
        if coupling not in COUPLINGS:
            raise InputError(f"coupling {coupling!r} is unknown; known: {', '.join(COUPLINGS)}")
        if init not in INITS:
            raise InputError(f"init {init!r} is unknown; known: {', '.join(INITS)}")
        if not 0 <= alternatives <= MOST_ALTERNATIVES:
            raise InputError(f"alternatives {alternatives} is outside 0 to {MOST_ALTERNATIVES}")
        if not 1 <= window_rows <= MOST_ROWS:
            raise InputError(f"window_rows {window_rows} is outside 1 to {MOST_ROWS}")
        self.window, self.coupling, self.init, self.alternatives, self.window_rows = (
            window,
            coupling,
            init,
            alternatives,
            window_rows,
        )
        self.size, self.depth = window_rows * window + 1 + alternatives, window

    @classmethod
    def build(cls, parts: Parts) -> Self:
        """From window, coupling, init, alternatives and rows; the defaults are those of SJD."""
        window = 16 if parts.window is None else parts.window
        window_rows = 1 if parts.window_rows is None else parts.window_rows
        return cls(
            window, parts.coupling or "none", parts.init or "uniform", parts.alternatives or 0, window_rows
        )

    @classmethod
    def draft_sampling(cls, parts: Parts) -> DraftSampling:
        """Gumbel coupling draws with the same noise in every pass, whose distribution given a rejection is not known."""
        reason = "keeps the noise of its drafts from pass to pass (coupling gumbel)"
        return DraftSampling(not parts.alternatives, parts.coupling != "gumbel", reason, fixed=True)

    def open(self, target: Target, sampling: Sampling, guidance: Guidance, batch: int) -> None:
        """Make room for a batch."""
        super().open(target, sampling, guidance, batch)
        like, window, vocab = next(target.parameters()), self.window, target.vocab
        if self.alternatives >= vocab:
            raise InputError(
                f"alternatives {self.alternatives}: the model has {vocab} codes; use fewer alternatives than codes"
            )
        self.width = target.width
        image_rows = -(-target.length // self.width)
        if self.window_rows > image_rows:
            raise InputError(
                f"window_rows {self.window_rows}: the model's pictures have {image_rows} rows of codes"
            )
        dtype = like.dtype if like.element_size() == 8 else torch.float32
        self._tree = chain_tree(batch, window, like.device, self.alternatives)
        self._offsets = torch.arange(window, device=like.device)
        self._places = torch.arange(window + 1, device=like.device)
        nodes, front = window + 1 + self.alternatives, (self.window_rows - 1) * window
        mask = torch.ones(front, nodes + front, dtype=torch.bool, device=like.device).tril(nodes)
        mask[:, window + 1 : nodes] = False
        self._front_mask = mask.expand(batch, -1, -1)
        behind = self.width if self.init in ("above", "mixed") else 1
        self.slots = behind + (self.window_rows - 1) * max(self.width, window) + window + 1
        self.seen = torch.full((batch, self.slots), NOWHERE, device=like.device)
        self.held = self.seen.clone()
        self.codes = torch.zeros_like(self.seen)
        self.p = torch.full((batch, self.slots, vocab), 1 / vocab, dtype=dtype, device=like.device)
        self.q = torch.zeros_like(self.p)
        self.end = torch.zeros_like(self.root)  # the last place with a p in the first window
        self._probs = self.p.new_zeros(batch, nodes, vocab)  # of a node's child
        self._looks = None if target.codebook is None else _scaled(target.codebook.to(like.device, dtype))

    def begin(self, new: Admission) -> None:
        """A sample is admitted: no place has a p yet, and what stands for the last one is uniform."""
        super().begin(new)
        self.seen[new.slot] = self.held[new.slot] = NOWHERE
        self.end[new.slot] = 0
        self.p[new.slot, 0] = 1 / self.p.shape[-1]

    def propose(self, noise: Noise) -> Draft:
        """Redraw every guess from the latest p of its place, and the alternatives."""
        place, window = self._guessed(), self.window
        known = self._is_at(self.seen, place)
        new_q = self._at(self.p, place).where(known[..., None], self._initial(place))
        codes = self._guess(new_q, place, noise)
        self._put(self.codes, place, codes)
        self._put(self.q, place, new_q)
        self._put(self.held, place, place)
        if (
            self.window_rows > 1
        ):  # a row's first guess has no code before it in the pass: what it was drawn from stays
            self._put(self.p, place, new_q)
            self._put(self.seen, place, place)
        self._probs[:, :window] = new_q[:, :window]
        parts = [self.root[:, None], codes[:, :window]]
        if self.alternatives:
            rest = without(new_q[:, 0], codes[:, 0])
            parts.append(self.sampling.children(rest[:, None], self.alternatives, noise, noise.DRAFT)[:, 0])
        front = None
        if self.window_rows > 1:
            depth = place[:, window:] - self.count[:, None] + 1
            front = UnverifiedNodes(codes[:, window:], depth, self._front_mask)
        return Draft(self._tree, torch.cat(parts, 1), self._probs, unverified=front)

    def observe(self, output: TargetOutput) -> None:
        """Keep the new p by their places; the window moves behind the decided codes."""
        verdict, window = output.verdict, self.window
        place, chain = self._guessed(), slice(window + 1)
        if verdict.distribution is not None and self.coupling == "maximal":
            codes = output.draft.codes[:, chain]
            law = rejected_distribution(verdict.distribution[:, chain], self._probs[:, chain], codes)
            self._put(self.q, place[:, :window], law)
        probs = self.sampling.probs(output.logits)
        behind = self._behind(output, probs) if self.alternatives else None
        after = self.count[:, None] + self._places
        if self.window_rows > 1:
            after = torch.cat((after, place[:, window:] + 1), 1)
        probs = torch.cat((probs[:, chain], probs[:, len(self._tree.parent[0]) :]), 1)
        if behind is not None:
            probs[:, 1] = behind
        self._put(self.p, after, probs)
        self._put(self.seen, after, after)
        self.end.copy_(self.count + window)
        super().observe(output)

    def _guessed(self) -> Tensor:
        """The places of all guesses, window by window, [B, rows W]."""
        first = [self.count]
        for row in range(1, self.window_rows):
            head = (self.count // self.width + row) * self.width
            first.append(torch.maximum(head, first[-1] + self.window))
        return (torch.stack(first, 1)[..., None] + self._offsets).flatten(1)

    def _at(self, ring: Tensor, place: Tensor) -> Tensor:
        """What a ring [B, slots, ...] has for places [B, M], [B, M, ...]."""
        slot = place % self.slots
        return ring.gather(1, _each(slot, ring) if ring.ndim > 2 else slot)

    def _put(self, ring: Tensor, place: Tensor, value: Tensor) -> None:
        """Write values [B, M, ...] of places [B, M] to a ring."""
        slot = place % self.slots
        ring.scatter_(1, _each(slot, ring) if ring.ndim > 2 else slot, value)

    def _is_at(self, owners: Tensor, place: Tensor) -> Tensor:
        """Whether the slots of places [B, M] are theirs at present, by `seen` or `held`."""
        return (self._at(owners, place) == place) & (place > 0)

    def _behind(self, output: TargetOutput, probs: Tensor) -> Tensor:
        """The p behind the first place, [B, V]: of the code that was kept there, or a mean, if all guesses were refused.

        probs [B, N, V].
        """
        verdict, nodes = output.verdict, self._tree.children[:, 0]  # [B, K] the guesses at the first place
        weight = torch.ones_like(nodes, dtype=probs.dtype)
        if self._looks is not None:
            guesses, drawn = self._looks[output.draft.codes.gather(1, nodes)], self._looks[verdict.bonus]
            weight = (-SHARPNESS * (guesses - drawn[:, None]).norm(dim=-1)).softmax(-1)
        kept = (nodes == verdict.path[:, 1:2]).to(weight.dtype)
        weight = kept.where(verdict.kept[:, None] > 1, weight)
        return (weight / weight.sum(-1, keepdim=True))[:, None].bmm(probs.gather(1, _each(nodes, probs)))[
            :, 0
        ]

    def _initial(self, place: Tensor) -> Tensor:
        """The distributions of guesses at places [B, M] without a p, [B, M, V] or [B, 1, V]."""
        if self.init == "uniform":
            return torch.full_like(self.p[:, :1], 1 / self.p.shape[-1])
        last = self._at(self.p, self.end[:, None])
        if self.init == "last":
            return last
        above = place - self.width
        known = self._is_at(self.seen, above)
        if self.init == "mixed":
            known = known & (place % 2 == 0)
        return self._at(self.p, above).where(known[..., None], last)

    def _guess(self, new_q: Tensor, place: Tensor, noise: Noise) -> Tensor:
        """Codes [B, M] of places [B, M] that follow `new_q` [B, M, V], drawn as `coupling` says."""
        if self.sampling.greedy:
            return new_q.argmax(-1)
        if self.coupling == "gumbel":
            seed = noise.seed[:, None].expand_as(place)
            race = Noise(seed.flatten(), place.flatten()).exponential(PLACE, new_q.shape[-1])
            return (new_q / race.view(new_q.shape)).argmax(-1)
        anew = noise.fine(GUESS, place.shape[1], 1)
        if self.coupling == "none":
            return draw(new_q, anew)[..., 0]
        q, codes = self._at(self.q, place), self._at(self.codes, place)[..., None]
        held = self._is_at(self.held, place)[..., None]
        stays = (new_q.gather(-1, codes) / q.gather(-1, codes)).nan_to_num(0).clamp(max=1).where(held, 0)
        rest = (new_q - q).clamp_(min=0)
        mass = rest.sum(-1, keepdim=True)
        rest = (rest / mass).where(held & (mass > 0), new_q)
        return draw((rest * (1 - stays)).scatter_add_(-1, codes, stays), anew)[..., 0]


def _scaled(codebook: Tensor) -> Tensor:
    """A codebook [V, D] in units of the root mean square distance of two codes."""
    spread = (codebook - codebook.mean(0)).square().sum(-1).mean() * 2
    return codebook / spread.sqrt().clamp(min=torch.finfo(codebook.dtype).tiny)


def _each(index: Tensor, like: Tensor) -> Tensor:
    """index [B, W] for a gather of whole rows of `like` [B, ..., V]."""
    return index[..., None].expand(-1, -1, like.shape[-1])
