"""Speculative Jacobi decoding: the target's distributions of the last pass are the draft (SJD, arXiv 2410.01699).

Why it is lossless, by induction over the places of the image. Given everything at the places before it, a guess follows
the q that it is offered with. A fresh guess is drawn from a q that depends on those places alone. A pass replaces q by
the target's p, which also depends on those places alone, and the guess by one that follows p: drawn anew (SJD), or
coupled to the last guess so that it rarely changes (SCD, arXiv 2510.24211). So `verify` applies as to any draft, and
with an exact rule the output follows the target's distribution.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from lanternpp.engine.guidance import Guidance
from lanternpp.engine.noise import Noise
from lanternpp.engine.proposer import Guesses, Parts, Proposer
from lanternpp.engine.sampling import Sampling, draw
from lanternpp.errors import InputError
from lanternpp.targets.base import Target
from lanternpp.trees.chain import chain_tree
from lanternpp.types import Admission, Draft, TargetOutput

GUESS, KEEP, PLACE = 8, 9, 10  # purposes of noise: a guess drawn, a guess kept, a guess of a place
MOST = 256
COUPLINGS = ("none", "maximal", "gumbel")
FRESH = ("uniform", "last", "above", "mixed")


class Jacobi(Proposer):
    """A chain of `window` guesses behind the root, which every pass verifies and redraws.

    coupling: "none" draws every guess anew from its new p (SJD); "maximal" keeps it with probability
    min(1, p/q), else draws from [p - q]+ (SCD); "gumbel" draws with noise that belongs to the place in the
    image, the same in every pass (SCD).
    fresh: the distribution of a guess at a place without a p: "uniform"; "last", the p at the end of the
    window; "above", the p of the code one image row above, where known (else as "last"); "mixed", above at
    even places and last at odd ones. Before the first pass all of them are uniform.
    """

    dials = frozenset({"window", "coupling", "fresh", "verify"})

    def __init__(self, window: int = 16, coupling: str = "none", fresh: str = "uniform"):
        if not 1 <= window <= MOST:
            raise InputError(f"window {window} is outside 1 to {MOST}")
        if coupling not in COUPLINGS:
            raise InputError(f"coupling {coupling!r} is unknown; known: {', '.join(COUPLINGS)}")
        if fresh not in FRESH:
            raise InputError(f"fresh {fresh!r} is unknown; known: {', '.join(FRESH)}")
        self.window, self.coupling, self.fresh = window, coupling, fresh
        self.size, self.depth = window + 1, window

    @classmethod
    def build(cls, parts: Parts) -> Self:
        """From window, coupling and fresh; the defaults are those of SJD."""
        window = 16 if parts.window is None else parts.window
        return cls(window, parts.coupling or "none", parts.fresh or "uniform")

    @classmethod
    def guesses(cls, parts: Parts) -> Guesses:
        """Drawn anew for every pass, unless coupled. Coupled guesses are reused after a pass, and block verification may stop
        because of guesses behind, so that those which survive would no longer follow their q."""
        kept = (parts.coupling or "none") != "none"
        return Guesses(True, f"keeps guesses from pass to pass (coupling {parts.coupling})" if kept else None)

    def open(self, target: Target, sampling: Sampling, guidance: Guidance, batch: int) -> None:
        """Make room for a batch."""
        super().open(target, sampling, guidance, batch)
        like, window, vocab = next(target.parameters()), self.window, target.vocab
        dtype = like.dtype if like.element_size() == 8 else torch.float32
        self.width = target.width
        self._tree = chain_tree(batch, window, like.device)
        self._offsets = torch.arange(window, device=like.device)
        self.codes = torch.zeros(batch, window, dtype=torch.int64, device=like.device)
        self.q = torch.zeros(batch, self.size, vocab, dtype=dtype, device=like.device)  # of a node's child
        self.p = torch.full_like(
            self.q[:, :window], 1 / vocab
        )  # the latest p by place, the last one repeated
        self.seen = torch.zeros_like(self.root)  # guesses whose place has a p
        self.held = torch.zeros_like(self.root)  # guesses that were in the last draft
        self.rows = self.width + self.size if self.fresh in ("above", "mixed") else 0
        self.above = torch.zeros(
            batch, self.rows, vocab, dtype=dtype, device=like.device
        )  # p by place, a ring

    def begin(self, new: Admission) -> None:
        """A sample is admitted: no place has a p yet."""
        super().begin(new)
        self.seen[new.slot] = self.held[new.slot] = 0
        self.p[new.slot] = 1 / self.p.shape[-1]

    def propose(self, noise: Noise) -> Draft:
        """Redraw every guess from the latest p of its place."""
        seen = (self._offsets < self.seen[:, None])[..., None]  # [B, W, 1]
        new_q = self.p.where(seen, self._fresh())
        self.codes.copy_(self._guess(new_q, noise))
        self.q[:, : self.window] = new_q
        return Draft(self._tree, torch.cat((self.root[:, None], self.codes), 1), self.q)

    def observe(self, output: TargetOutput) -> None:
        """Move the window behind the decided codes."""
        probs, kept, window = self.sampling.probs(output.logits), output.verdict.kept, self.window
        if self.rows:
            place = (self.count[:, None] + torch.arange(self.size, device=kept.device)) % self.rows
            self.above.scatter_(1, place[..., None].expand_as(probs), probs)
        source = kept[:, None] + self._offsets  # [B, W] node whose p a guess follows; guess + 1 is its node
        old = source.clamp(max=window - 1)
        self.codes.copy_(self.codes.gather(1, old))
        self.q[:, :window] = self.q.gather(1, _each(old, self.q))
        self.p.copy_(probs.gather(1, _each(source.clamp(max=window), probs)))
        self.seen.copy_(self.size - kept)
        self.held.copy_(window - kept)
        super().observe(output)

    def _fresh(self) -> Tensor:
        """The distributions of guesses at places without a p, [B, W, V]."""
        if self.fresh == "uniform":
            return torch.full_like(self.p, 1 / self.p.shape[-1])
        if self.fresh == "last":
            return self.p
        place = self.count[:, None] + self._offsets
        above = place - self.width
        known = (above >= 1) & (above < (self.count + self.seen)[:, None]) & (self.seen > 0)[:, None]
        if self.fresh == "mixed":
            known = known & (place % 2 == 0)
        return self.above.gather(1, _each(above.clamp(min=0) % self.rows, self.p)).where(
            known[..., None], self.p
        )

    def _guess(self, new_q: Tensor, noise: Noise) -> Tensor:
        """Codes [B, W] that follow `new_q` [B, W, V], drawn as `coupling` says."""
        if self.sampling.greedy:
            return new_q.argmax(-1)
        if self.coupling == "gumbel":
            place = self.count[:, None] + self._offsets
            seed = noise.seed[:, None].expand_as(place)
            race = Noise(seed.flatten(), place.flatten()).exponential(PLACE, new_q.shape[-1])
            return (new_q / race.view(new_q.shape)).argmax(-1)
        anew = noise.fine(GUESS, self.window, 1)
        if self.coupling == "none":
            return draw(new_q, anew)[..., 0]
        q, codes = self.q[:, : self.window], self.codes[..., None]
        held = (self._offsets < self.held[:, None])[..., None]
        u = noise.fine(KEEP, self.window)[..., None]
        keep = held & (u * q.gather(-1, codes) < new_q.gather(-1, codes))
        rest = (new_q - q).clamp_(min=0)
        rest = rest.where(held & (rest.sum(-1, keepdim=True) > 0), new_q)
        return self.codes.where(keep[..., 0], draw(rest, anew)[..., 0])


def _each(index: Tensor, like: Tensor) -> Tensor:
    """index [B, W] for a gather of whole rows of `like` [B, ..., V]."""
    return index[..., None].expand(-1, -1, like.shape[-1])
