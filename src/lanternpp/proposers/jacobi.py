"""Speculative Jacobi decoding: the target's distributions of the last pass are the draft (SJD, arXiv 2410.01699).

Why it is lossless, by induction over the places of the image. Given everything that was drawn and decided at the places
before it, in all passes, a draft code x follows the q that it is offered with:

* A first draft code is drawn from a q that depends on those places alone.
* A pass replaces q by a p of the target, which also depends on those places alone, and the code by one that follows p:
  drawn anew (SJD), or coupled to the last code so that it rarely changes (SCD, arXiv 2510.24211).
* Token-wise verification comes to a place, or does not, by the codes at the places before it. A code that it does not come
  to follows q still.
* Joint verification looks at all draft codes, and is likelier to stop before good ones. How likely is known: a code that is
  not kept follows [q - w p]+, normalised (`joint.rejected_distribution`). That is its q from then on.
* The alternatives are other codes at the first place, drawn from its q without the first code, in every pass. The place is
  decided in that pass, so later draft codes depend on them through the places before alone.
* Where all codes at the first place were rejected and y was drawn, no node has p(. | y). The next draft code is drawn from
  a mean of the p after the rejected codes, in which codes that look like y weigh most. It depends on the places before it
  alone.
* The windows of further rows (`window_rows`) come after the first one and are not verified: no decision looks at them.
  Each draft code has a place in the picture, and is drawn from codes at the places before it alone. It keeps its q until
  the first window comes to it.

So a verifier sees a draft of independent codes, and with an exact rule the output follows the target's distribution.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from lanternpp.engine.noise import Noise
from lanternpp.engine.proposer import DraftSampling, Parts, Proposer
from lanternpp.engine.sampling import Guidance, Sampling, draw
from lanternpp.engine.verify.joint import rejected_distribution
from lanternpp.engine.verify.tokenwise import without
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.trees.chain import chain_tree
from lanternpp.types import Admission, Draft, TargetOutput, UnverifiedNodes

CODE, PLACE = 8, 10  # purposes of noise: a draft code, and one by its place in the image
# of the weights of codes that look like another, over the distance of two codes drawn at random
SHARPNESS = 20.0
COUPLINGS = ("none", "maximal", "gumbel")
INITS = ("uniform", "last", "above", "mixed")
NOWHERE = -1  # not a place


class Jacobi(Proposer):
    """A chain of `window` draft codes after the root, which every pass verifies and redraws.

    coupling: "none" draws every code anew from its new p (SJD); "maximal" keeps it with probability min(1, p/q), else
    draws from [p - q]+ (SCD); "gumbel" draws with noise that belongs to the place in the image, the same in every pass
    (SCD).
    init: the distribution of a code at a place without a p: "uniform"; "last", the p at the end of the window; "above", the
    p of the code one image row above, where known (else as "last"); "mixed", above at even places and last at odd ones.
    Before the first pass all of them are uniform.
    alternatives: how many other codes there are at the first place of the window. Nothing is drafted after them, but their
    p tell what follows codes like them.
    window_rows: how many rows of the image have a window. The windows of later rows begin with the row, or after the window
    before them; every pass redraws their codes, given all codes before them, and none is verified before the first window
    comes to it.

    The state is kept by place of the image, in rings of `slots` places: `seen` names the place whose p is in a slot, `held`
    the place whose code and q are.
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
        if window < 1 or window_rows < 1 or alternatives < 0:
            raise InputError(
                f"window {window} in {window_rows} rows with {alternatives} alternatives drafts nothing"
            )
        for name, choice, known in (("coupling", coupling, COUPLINGS), ("init", init, INITS)):
            if choice not in known:
                raise InputError(f"{name} {choice!r} is unknown; known: {', '.join(known)}")
        self.window, self.coupling, self.init = window, coupling, init
        self.alternatives, self.window_rows = alternatives, window_rows
        self.size, self.depth = window_rows * window + 1 + alternatives, window

    @classmethod
    def build(cls, parts: Parts) -> Self:
        """From its dials; the defaults are those of SJD."""
        names = ("window", "coupling", "init", "alternatives", "window_rows")
        return cls(**{name: value for name in names if (value := getattr(parts, name)) is not None})

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
        self._row = torch.arange(batch, device=like.device)[:, None]
        self._offsets = torch.arange(window, device=like.device)
        self._places = torch.arange(window + 1, device=like.device)
        nodes, more = window + 1 + self.alternatives, (self.window_rows - 1) * window
        mask = torch.ones(more, nodes + more, dtype=torch.bool, device=like.device).tril(nodes)
        mask[:, window + 1 : nodes] = False
        self._unverified_mask = mask.expand(batch, -1, -1)
        before = self.width if self.init in ("above", "mixed") else 1
        self.slots = before + (self.window_rows - 1) * max(self.width, window) + window + 1
        self.seen = torch.full((batch, self.slots), NOWHERE, device=like.device)
        self.held = self.seen.clone()
        self.codes = torch.zeros_like(self.seen)
        self.p = torch.full((batch, self.slots, vocab), 1 / vocab, dtype=dtype, device=like.device)
        self.q = torch.zeros_like(self.p)
        self.end = torch.zeros_like(self.root)  # the last place with a p in the first window
        self._probs = self.p.new_zeros(batch, nodes, vocab)  # of a node's child
        book = target.codebook
        self._code_vectors = None if book is None else _scaled(book.to(like.device, dtype))

    def begin(self, new: Admission) -> None:
        """A sample is admitted: no place has a p yet, and the last one's is uniform."""
        super().begin(new)
        self.seen[new.slot] = self.held[new.slot] = NOWHERE
        self.end[new.slot] = 0
        self.p[new.slot, 0] = 1 / self.p.shape[-1]

    def propose(self, noise: Noise) -> Draft:
        """Redraw every code from the latest p of its place, and the alternatives."""
        place, window = self._places_drafted(), self.window
        known = self._is_at(self.seen, place)
        new_q = self._at(self.p, place).where(known[..., None], self._initial(place))
        codes = self._draft(new_q, place, noise)
        self._put(self.codes, place, codes)
        self._put(self.q, place, new_q)
        self._put(self.held, place, place)
        if self.window_rows > 1:
            # A row's first code has no code before it in the pass: its distribution stays.
            self._put(self.p, place, new_q)
            self._put(self.seen, place, place)
        self._probs[:, :window] = new_q[:, :window]
        parts = [self.root[:, None], codes[:, :window]]
        if self.alternatives:
            rest = without(new_q[:, 0], codes[:, 0])
            parts.append(self.sampling.children(rest[:, None], self.alternatives, noise, noise.DRAFT)[:, 0])
        unverified = None
        if self.window_rows > 1:
            depth = place[:, window:] - self.count[:, None] + 1
            unverified = UnverifiedNodes(codes[:, window:], depth, self._unverified_mask)
        return Draft(self._tree, torch.cat(parts, 1), self._probs, unverified=unverified)

    def observe(self, output: TargetOutput) -> None:
        """Keep the new p by their places; the window moves after the decided codes."""
        verdict, window = output.verdict, self.window
        place, chain = self._places_drafted(), slice(window + 1)
        if verdict.distribution is not None and self.coupling == "maximal":
            codes = output.draft.codes[:, chain]
            rejected = rejected_distribution(verdict.distribution[:, chain], self._probs[:, chain], codes)
            self._put(self.q, place[:, :window], rejected)
        probs = self.sampling.probs(output.logits)
        second = self._second_place(output, probs) if self.alternatives else None
        after = self.count[:, None] + self._places
        if self.window_rows > 1:
            after = torch.cat((after, place[:, window:] + 1), 1)
        probs = torch.cat((probs[:, chain], probs[:, len(self._tree.parent[0]) :]), 1)
        if second is not None:
            probs[:, 1] = second
        self._put(self.p, after, probs)
        self._put(self.seen, after, after)
        self.end.copy_(self.count + window)
        super().observe(output)

    def _places_drafted(self) -> Tensor:
        """The places of all draft codes, window by window, [B, rows W]."""
        first = [self.count]
        for row in range(1, self.window_rows):
            head = (self.count // self.width + row) * self.width
            first.append(torch.maximum(head, first[-1] + self.window))
        return (torch.stack(first, 1)[..., None] + self._offsets).flatten(1)

    def _at(self, ring: Tensor, place: Tensor) -> Tensor:
        """The values of a ring [B, slots, ...] at places [B, M], [B, M, ...]."""
        return ring[self._row, place % self.slots]

    def _put(self, ring: Tensor, place: Tensor, value: Tensor) -> None:
        """Write values [B, M, ...] of places [B, M] to a ring."""
        ring.index_put_((self._row, place % self.slots), value)

    def _is_at(self, owners: Tensor, place: Tensor) -> Tensor:
        """Whether the slots of places [B, M] are theirs at present, by `seen` or `held`."""
        return (self._at(owners, place) == place) & (place > 0)

    def _second_place(self, output: TargetOutput, probs: Tensor) -> Tensor:
        """The p after the first place, [B, V]: of the code that was kept there, or a mean, if all were rejected.

        probs [B, N, V].
        """
        verdict, nodes = output.verdict, self._tree.children[:, 0]  # [B, K] the codes at the first place
        weight = torch.ones_like(nodes, dtype=probs.dtype)
        if (vectors := self._code_vectors) is not None:
            drafted, drawn = vectors[output.draft.codes.gather(1, nodes)], vectors[verdict.bonus]
            weight = (-SHARPNESS * (drafted - drawn[:, None]).norm(dim=-1)).softmax(-1)
        kept = (nodes == verdict.path[:, 1:2]).to(weight.dtype)
        weight = kept.where(verdict.kept[:, None] > 1, weight)
        weight = weight / weight.sum(-1, keepdim=True)
        return weight[:, None].bmm(probs[self._row, nodes])[:, 0]

    def _initial(self, place: Tensor) -> Tensor:
        """The distributions of draft codes at places [B, M] without a p, [B, M, V] or [B, 1, V]."""
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

    def _draft(self, new_q: Tensor, place: Tensor, noise: Noise) -> Tensor:
        """Codes [B, M] of places [B, M] that follow `new_q` [B, M, V], drawn as `coupling` says."""
        if self.sampling.greedy:
            return new_q.argmax(-1)
        if self.coupling == "gumbel":
            seed = noise.seed[:, None].expand_as(place)
            race = Noise(seed.flatten(), place.flatten()).exponential(PLACE, new_q.shape[-1])
            return (new_q / race.view(new_q.shape)).argmax(-1)
        anew = noise.fine(CODE, place.shape[1], 1)
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
