"""Speculative Jacobi decoding: the target's distributions of the last pass are the draft (SJD, arXiv 2410.01699).

Why it is lossless, by induction over the places of the image. Given everything that was drawn and decided at the places
before it, in all passes, a guess x follows the q that it is offered with:

* A fresh guess is drawn from a q that depends on those places alone.
* A pass replaces q by a p of the target, which also depends on those places alone, and the guess by one that follows p: drawn
  anew (SJD), or coupled to the last guess so that it rarely changes (SCD, arXiv 2510.24211).
* The walk of `verify` comes to a place, or does not, by what is at the places before it. So a guess that it does not come to
  follows q still.
* Block and traversal verification look at all guesses, and are likelier to stop before good ones. But how likely is known:
  a guess that is not kept follows [q - w p]+, normalised (`block.refused_law`). That is its q from then on.
* The siblings are other guesses at the first place, drawn from its q without the first guess, in every pass. The place is
  decided in that pass, so no guess behind depends on them but through the places before it.
* Where all guesses at the first place were refused and y was drawn, no node has p(. | y). The next guess is drawn from a mean of
  the p behind the refused codes, in which codes that look like y weigh most. It depends on the places before it alone.

So the draft is one of independent guesses as far as a verifier can tell, and with an exact rule the output follows the
target's distribution.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from lanternpp.engine.block import refused_law
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.noise import Noise
from lanternpp.engine.proposer import Guesses, Parts, Proposer
from lanternpp.engine.sampling import Sampling, draw
from lanternpp.engine.verify import without
from lanternpp.errors import InputError
from lanternpp.targets.base import Target
from lanternpp.trees.chain import chain_tree
from lanternpp.types import Admission, Draft, TargetOutput

GUESS, PLACE = 8, 10  # purposes of noise: a guess, a guess of a place
MOST, MOST_SIBLINGS = 256, 16
SHARPNESS = (
    20.0  # of the weights of codes that look like another, over the distance of two codes drawn at random
)
COUPLINGS = ("none", "maximal", "gumbel")
FRESH = ("uniform", "last", "above", "mixed")


class Jacobi(Proposer):
    """A chain of `window` guesses behind the root, which every pass verifies and redraws, and siblings of the first.

    coupling: "none" draws every guess anew from its new p (SJD); "maximal" keeps it with probability
    min(1, p/q), else draws from [p - q]+ (SCD); "gumbel" draws with noise that belongs to the place in the
    image, the same in every pass (SCD).
    fresh: the distribution of a guess at a place without a p: "uniform"; "last", the p at the end of the
    window; "above", the p of the code one image row above, where known (else as "last"); "mixed", above at
    even places and last at odd ones. Before the first pass all of them are uniform.
    siblings: how many other guesses there are at the first place of the window. Nothing is drafted behind them, but their p
    tell what follows codes like them.
    """

    dials = frozenset({"window", "coupling", "fresh", "siblings", "verify"})

    def __init__(self, window: int = 16, coupling: str = "none", fresh: str = "uniform", siblings: int = 0):
        if not 1 <= window <= MOST:
            raise InputError(f"window {window} is outside 1 to {MOST}")
        if coupling not in COUPLINGS:
            raise InputError(f"coupling {coupling!r} is unknown; known: {', '.join(COUPLINGS)}")
        if fresh not in FRESH:
            raise InputError(f"fresh {fresh!r} is unknown; known: {', '.join(FRESH)}")
        if not 0 <= siblings <= MOST_SIBLINGS:
            raise InputError(f"siblings {siblings} is outside 0 to {MOST_SIBLINGS}")
        self.window, self.coupling, self.fresh, self.siblings = window, coupling, fresh, siblings
        self.size, self.depth = window + 1 + siblings, window

    @classmethod
    def build(cls, parts: Parts) -> Self:
        """From window, coupling, fresh and siblings; the defaults are those of SJD."""
        window = 16 if parts.window is None else parts.window
        return cls(window, parts.coupling or "none", parts.fresh or "uniform", parts.siblings or 0)

    @classmethod
    def guesses(cls, parts: Parts) -> Guesses:
        """Those of gumbel coupling are drawn with the same noise in every pass. What that noise is, given that a guess was
        refused by a block, is not known as the law of a guess is."""
        why = "keeps the noise of its guesses from pass to pass (coupling gumbel)"
        return Guesses(not parts.siblings, why if parts.coupling == "gumbel" else None, fixed=True)

    def open(self, target: Target, sampling: Sampling, guidance: Guidance, batch: int) -> None:
        """Make room for a batch."""
        super().open(target, sampling, guidance, batch)
        like, window, vocab = next(target.parameters()), self.window, target.vocab
        if self.siblings >= vocab:
            raise InputError(
                f"siblings {self.siblings}: the model has {vocab} codes; use fewer siblings than codes"
            )
        dtype = like.dtype if like.element_size() == 8 else torch.float32
        self.width = target.width
        self._tree = chain_tree(batch, window, like.device, self.siblings)
        self._offsets = torch.arange(window, device=like.device)
        self._places = torch.arange(window + 1, device=like.device)
        self.codes = torch.zeros(batch, window, dtype=torch.int64, device=like.device)
        self.q = torch.zeros(batch, self.size, vocab, dtype=dtype, device=like.device)  # of a node's child
        self.p = torch.full_like(
            self.q[:, :window], 1 / vocab
        )  # the latest p by place, the last one repeated
        self.seen = torch.zeros_like(self.root)  # guesses whose place has a p
        self.held = torch.zeros_like(self.root)  # guesses that were in the last draft
        self.rows = self.width + window + 1 if self.fresh in ("above", "mixed") else 0
        self.above = torch.zeros(
            batch, self.rows, vocab, dtype=dtype, device=like.device
        )  # p by place, a ring
        self._looks = None if target.codebook is None else _scaled(target.codebook.to(like.device, dtype))

    def begin(self, new: Admission) -> None:
        """A sample is admitted: no place has a p yet."""
        super().begin(new)
        self.seen[new.slot] = self.held[new.slot] = 0
        self.p[new.slot] = 1 / self.p.shape[-1]

    def propose(self, noise: Noise) -> Draft:
        """Redraw every guess from the latest p of its place, and the siblings."""
        seen = (self._offsets < self.seen[:, None])[..., None]  # [B, W, 1]
        new_q = self.p.where(seen, self._fresh())
        self.codes.copy_(self._guess(new_q, noise))
        self.q[:, : self.window] = new_q
        codes = [self.root[:, None], self.codes]
        if self.siblings:
            rest = without(new_q[:, 0], self.codes[:, 0])
            codes.append(self.sampling.children(rest[:, None], self.siblings, noise, noise.DRAFT)[:, 0])
        return Draft(self._tree, torch.cat(codes, 1), self.q)

    def observe(self, output: TargetOutput) -> None:
        """Move the window behind the decided codes."""
        verdict, window = output.verdict, self.window
        kept, chain = verdict.kept, slice(window + 1)
        if verdict.law is not None and self.coupling == "maximal":
            codes = output.draft.codes[:, chain]
            self.q[:, :window] = refused_law(verdict.law[:, chain], self.q[:, chain], codes)
        probs = self.sampling.probs(output.logits)
        behind = self._behind(output, probs) if self.siblings else None
        probs = probs[:, chain]
        if behind is not None:
            probs[:, 1] = behind
        if self.rows:
            place = (self.count[:, None] + self._places) % self.rows
            self.above.scatter_(1, place[..., None].expand_as(probs), probs)
        source = kept[:, None] + self._offsets  # [B, W] node whose p a guess follows; guess + 1 is its node
        old = source.clamp(max=window - 1)
        self.codes.copy_(self.codes.gather(1, old))
        self.q[:, :window] = self.q.gather(1, _each(old, self.q))
        self.p.copy_(probs.gather(1, _each(source.clamp(max=window), probs)))
        self.seen.copy_(window + 1 - kept)
        self.held.copy_(window - kept)
        super().observe(output)

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
