"""Speculative Jacobi decoding: the target's distributions of the last pass are the draft (SJD, arXiv 2410.01699).

The method is lossless, by induction over the places of the image. Given all codes drawn and decided at earlier places, in
all passes, a draft code x follows the q that it is offered with:

* The first draft code of a place is drawn from a q that depends on earlier places alone.
* A pass replaces q by a p of the target, which also depends on earlier places alone, and the code by a code that follows p:
  a new draw (SJD), or a code coupled to the last one so that it rarely changes (SCD, arXiv 2510.24211).
* Codes at earlier places decide whether token-wise verification comes to a place. A code that verification does not come to
  still follows q.
* Joint verification reads all draft codes, and is likelier to stop before good codes. The probability is known: a code that
  is not kept follows [q - w p]+, normalised (`joint.rejected_distribution`), which is its q from then on.
* The alternatives are other codes at the first place, drawn from its q without the first code, in every pass. The place is
  decided in the same pass, so later draft codes depend on alternatives through earlier places alone.
* Where all codes at the first place were rejected and y was drawn, no node has p(. | y). The next draft code is drawn from
  a mean of the p after the rejected codes, in which codes that look like y weigh most. The mean depends on earlier places
  alone.
* The windows of further rows (`window_rows`) come after the first window and are not verified: no decision reads them.
  Each draft code has a place in the picture, and is drawn from codes at earlier places alone. The code keeps its q until
  the first window comes to its place.

So a verifier reads a draft of independent codes, and with an exact rule the output follows the target's distribution.
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
from lanternpp.trees.static import chain_tree
from lanternpp.types import Admission, Draft, TargetOutput, UnverifiedNodes

CODE, PLACE = 8, 10  # purposes of noise: of a draft code in a pass, and of a place in the image in all passes
SHARPNESS = 20.0  # weights of rejected codes fall by exp(-SHARPNESS) over the distance of two random codes
COUPLINGS = ("none", "maximal", "gumbel")
INITS = ("uniform", "last", "above", "mixed")
NO_PLACE = -1


class Jacobi(Proposer):
    """A chain of `window` draft codes after the root, which every pass verifies and redraws.

    coupling: "none" draws every code anew from its new p (SJD); "maximal" keeps the code with probability min(1, p/q), else
    draws from [p - q]+ (SCD); "gumbel" draws with noise of the place in the image, the same in every pass (SCD).
    init: the distribution of a code at a place without a p: "uniform"; "last", the p at the end of the window; "above", the
    p of the code one image row above, or "last" where there is no such p; "mixed", "above" at even places and "last" at odd
    ones. Before the first pass all of them are uniform.
    alternatives: the number of other codes at the first place of the window. Nothing is drafted after them, but their p
    predict the codes after similar codes.
    window_rows: the number of rows of the image with a window. The windows of later rows begin with the row, or after the
    previous window; every pass redraws their codes, given all earlier codes, and verifies none of them before the first
    window comes to it.

    The state lies in rings of `slots` places of the image: `p_place` is the place of the p in a slot, `code_place` the
    place of its code and q.
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
        for name, value, choices in (("coupling", coupling, COUPLINGS), ("init", init, INITS)):
            if value not in choices:
                raise InputError(f"{name} {value!r} is unknown; known: {', '.join(choices)}")
        self.window, self.coupling, self.init = window, coupling, init
        self.alternatives, self.window_rows = alternatives, window_rows
        self.size, self.depth = window_rows * window + 1 + alternatives, window

    @classmethod
    def build(cls, parts: Parts) -> Self:
        """Build the proposer from its dials; the defaults are those of SJD."""
        names = ("window", "coupling", "init", "alternatives", "window_rows")
        return cls(**{name: value for name in names if (value := getattr(parts, name)) is not None})

    @classmethod
    def draft_sampling(cls, parts: Parts) -> DraftSampling:
        """Return how codes are drawn: Gumbel coupling reuses noise, whose distribution given a rejection is not known."""
        reason = "keeps the noise of its drafts from pass to pass (coupling gumbel)"
        return DraftSampling(not parts.alternatives, parts.coupling != "gumbel", reason, fixed=True)

    def open(self, target: Target, sampling: Sampling, guidance: Guidance, batch: int) -> None:
        """Allocate the state of a batch; InputError where the target has too few codes or rows for the dials."""
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
        self._offsets = torch.arange(window + 1, device=like.device)
        nodes, unverified = window + 1 + self.alternatives, (self.window_rows - 1) * window
        mask = torch.ones(unverified, nodes + unverified, dtype=torch.bool, device=like.device).tril(nodes)
        mask[:, window + 1 : nodes] = False  # the alternatives
        self._unverified_mask = mask.expand(batch, -1, -1)
        num_earlier = self.width if self.init in ("above", "mixed") else 1  # places read before the root
        self.slots = num_earlier + (self.window_rows - 1) * max(self.width, window) + window + 1
        self.p_place = torch.full((batch, self.slots), NO_PLACE, device=like.device)
        self.code_place = self.p_place.clone()
        self.codes = torch.zeros_like(self.p_place)
        self.p = torch.full((batch, self.slots, vocab), 1 / vocab, dtype=dtype, device=like.device)
        self.q = torch.zeros_like(self.p)
        self.last_place = torch.zeros_like(self.root)  # with a p in the first window
        self._probs = self.p.new_zeros(batch, nodes, vocab)  # the q of every node's child
        codebook = target.codebook
        self._code_vectors: Tensor | None = None  # in units of the root mean square distance of two codes
        if codebook is not None:
            codebook = codebook.to(like.device, dtype)
            spread = (codebook - codebook.mean(0)).square().sum(-1).mean() * 2
            self._code_vectors = codebook / spread.sqrt().clamp(min=torch.finfo(dtype).tiny)

    def begin(self, new: Admission) -> None:
        """Reset the state of an admitted sample: no place has a p, and the p at `last_place` is uniform."""
        super().begin(new)
        self.p_place[new.slot] = self.code_place[new.slot] = NO_PLACE
        self.last_place[new.slot] = 0
        self.p[new.slot, 0] = 1 / self.p.shape[-1]

    def propose(self, noise: Noise) -> Draft:
        """Redraw every code from the latest p of its place, and the alternatives."""
        place, window = self._places_drafted(), self.window
        has_p = self._is_stored(self.p_place, place)
        new_q = self._read(self.p, place).where(has_p[..., None], self._initial_q(place))
        codes = self._draft(new_q, place, noise)
        self._write(self.codes, place, codes)
        self._write(self.q, place, new_q)
        self._write(self.code_place, place, place)
        self._probs[:, :window] = new_q[:, :window]
        parts = [self.root[:, None], codes[:, :window]]
        if self.alternatives:
            other_q = without(new_q[:, 0], codes[:, 0])[:, None]
            parts.append(self.sampling.children(other_q, self.alternatives, noise, noise.DRAFT)[:, 0])
        unverified = None
        if self.window_rows > 1:
            # The pass has no code before the first code of a row, whose distribution stays the same.
            self._write(self.p, place, new_q)
            self._write(self.p_place, place, place)
            depth = place[:, window:] - self.count[:, None] + 1
            unverified = UnverifiedNodes(codes[:, window:], depth, self._unverified_mask)
        return Draft(self._tree, torch.cat(parts, 1), self._probs, unverified=unverified)

    def observe(self, output: TargetOutput) -> None:
        """Store the new p by their places; the window moves after the decided codes."""
        verdict, window = output.verdict, self.window
        place, chain = self._places_drafted(), slice(window + 1)
        if verdict.distribution is not None and self.coupling == "maximal":
            codes = output.draft.codes[:, chain]
            rejected = rejected_distribution(verdict.distribution[:, chain], self._probs[:, chain], codes)
            self._write(self.q, place[:, :window], rejected)
        node_probs = self.sampling.probs(output.logits)  # [B, N + M, V], M unverified nodes
        probs = torch.cat((node_probs[:, chain], node_probs[:, len(self._tree.parent[0]) :]), 1)
        if self.alternatives:
            probs[:, 1] = self._second_p(output, node_probs)
        next_place = self.count[:, None] + self._offsets  # of the root and of the first window's codes
        if self.window_rows > 1:
            next_place = torch.cat((next_place, place[:, window:] + 1), 1)
        self._write(self.p, next_place, probs)
        self._write(self.p_place, next_place, next_place)
        self.last_place.copy_(self.count + window)
        super().observe(output)

    def _places_drafted(self) -> Tensor:
        """Return the places of all draft codes, window by window, [B, window_rows * window]."""
        window_starts = [self.count]
        for row in range(1, self.window_rows):
            row_start = (self.count // self.width + row) * self.width
            window_starts.append(torch.maximum(row_start, window_starts[-1] + self.window))
        return (torch.stack(window_starts, 1)[..., None] + self._offsets[: self.window]).flatten(1)

    def _read(self, ring: Tensor, place: Tensor) -> Tensor:
        """Return the values of a ring [B, slots, ...] at places [B, M], [B, M, ...]."""
        return ring[self._row, place % self.slots]

    def _write(self, ring: Tensor, place: Tensor, value: Tensor) -> None:
        """Write values [B, M, ...] of places [B, M] to a ring."""
        ring.index_put_((self._row, place % self.slots), value)

    def _is_stored(self, stored_place: Tensor, place: Tensor) -> Tensor:
        """Whether the rings hold the values of places [B, M]; stored_place: `p_place` or `code_place`."""
        return (self._read(stored_place, place) == place) & (place > 0)

    def _second_p(self, output: TargetOutput, probs: Tensor) -> Tensor:
        """Return the p after the first place, [B, V], of probs [B, N + M, V]: the kept code's, or a mean where all were rejected."""
        verdict, nodes = output.verdict, self._tree.children[:, 0]  # [B, K], the nodes at the first place
        weight = torch.ones_like(nodes, dtype=probs.dtype)
        if self._code_vectors is not None:
            draft_vectors = self._code_vectors[output.draft.codes.gather(1, nodes)]  # [B, K, D]
            distance = (draft_vectors - self._code_vectors[verdict.bonus][:, None]).norm(dim=-1)
            weight = (-SHARPNESS * distance).softmax(-1)
        is_kept = (nodes == verdict.path[:, 1:2]).to(weight.dtype)
        weight = is_kept.where(verdict.kept[:, None] > 1, weight)
        weight = weight / weight.sum(-1, keepdim=True)
        return weight[:, None].bmm(probs[self._row, nodes])[:, 0]

    def _initial_q(self, place: Tensor) -> Tensor:
        """Return the distributions of draft codes at places [B, M] without a p, [B, M, V] or [B, 1, V]."""
        if self.init == "uniform":
            return torch.full_like(self.p[:, :1], 1 / self.p.shape[-1])
        last_p = self._read(self.p, self.last_place[:, None])
        if self.init == "last":
            return last_p
        above = place - self.width
        use_above = self._is_stored(self.p_place, above)
        if self.init == "mixed":
            use_above = use_above & (place % 2 == 0)
        return self._read(self.p, above).where(use_above[..., None], last_p)

    def _draft(self, new_q: Tensor, place: Tensor, noise: Noise) -> Tensor:
        """Draw codes [B, M] of places [B, M] that follow `new_q` [B, M, V], by `coupling`."""
        if self.sampling.greedy:
            return new_q.argmax(-1)
        if self.coupling == "gumbel":
            seed = noise.seed[:, None].expand_as(place)
            u = Noise(seed.flatten(), place.flatten()).fine(PLACE, new_q.shape[-1])
            exponential = u.log_().neg_().float()  # of mean 1
            return (new_q / exponential.view(new_q.shape)).argmax(-1)
        u = noise.fine(CODE, place.shape[1], 1)
        if self.coupling == "none":
            return draw(new_q, u)[..., 0]
        q, codes = self._read(self.q, place), self._read(self.codes, place)[..., None]
        has_code = self._is_stored(self.code_place, place)[..., None]
        ratio = new_q.gather(-1, codes) / q.gather(-1, codes)
        keep_prob = ratio.nan_to_num(0).clamp(max=1).where(has_code, 0)  # [B, M, 1]
        residual = (new_q - q).clamp_(min=0)
        mass = residual.sum(-1, keepdim=True)
        residual = (residual / mass).where(has_code & (mass > 0), new_q)
        return draw((residual * (1 - keep_prob)).scatter_add_(-1, codes, keep_prob), u)[..., 0]
