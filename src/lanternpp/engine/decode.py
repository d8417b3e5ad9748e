"""The decoding loop: admit samples, step until they are finished, collect their codes.

Plain decoding is the same loop with an empty tree, so a speed-up divides two runs of the same code.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp.accept.base import Acceptance
from lanternpp.engine.cache import Cache
from lanternpp.engine.noise import Noise
from lanternpp.engine.proposer import Proposer
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.engine.verify.choose import Verifier
from lanternpp.engine.verify.tokenwise import padded, verify_tokenwise
from lanternpp.errors import InputError, ModelError
from lanternpp.models.base import Target
from lanternpp.nn.backend import Step
from lanternpp.types import Admission, Draft, Prompt, TargetOutput, Verdict
from lanternpp.util.devices import inference
from lanternpp.util.registry import imported

Phase = Literal["draft", "pass", "verify", "observe", "rest"]
PHASES: tuple[Phase, ...] = ("draft", "pass", "verify", "rest")  # of a step; its stages in C


@dataclass(frozen=True)
class FinishedSample:
    """One finished sample."""

    slot: int  # of the engine, where it was
    codes: Tensor  # [length] int64
    accepted: list[int]  # codes decided by each pass, the prefill first
    tv_cost: float | None = None  # of relaxed acceptance, summed over codes; None: not measured


class Observer:
    """Base class: an engine calls the methods of all in its `observers`, which must not change what they are given."""

    def entered(self, phase: Phase) -> None:
        """A phase of a step or of an admission begins, and the one before it ends."""

    def admitted(self, new: Admission) -> None:
        """A sample has entered, and its first code is decided."""

    def verified(self, output: TargetOutput, count: Tensor) -> None:
        """A draft is verified and nothing of it is committed yet; count [B] codes are decided so far."""


def engine_class(target: Target) -> type[Engine]:
    """The class of engines that decode this target."""
    kind: type[Engine] = imported("engine", target.engine)
    return kind


class Engine:
    """Decodes a batch of samples, each of which advances by as many codes per step as its draft had accepted."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer,
        rule: Acceptance,
        sampling: Sampling,
        guidance: Guidance,
        batch: int,
        measure_tv: bool = False,
        verifier: Verifier = verify_tokenwise,
    ):
        proposer.check(target)
        self.check(target, rule, verifier if proposer.depth else verify_tokenwise)
        sampling, guidance, verifier = self.parts(target, sampling, guidance, verifier)
        like = next(target.parameters())
        self.measure_tv = measure_tv and not (rule.lossless or rule.trajectories)
        self.run: Callable[..., Any] = operator.call  # how the parts of a step are called
        # Empty while `batching.drawing` runs on it: one thread alone can take the element. Unlike a lock it can be copied.
        self.idle = [True]
        self.observers: list[Observer] = []
        self.fused: Step | None = None  # whole steps, where the kernels know all parts
        self.target, self.proposer, self.rule = target, proposer, rule
        self.sampling, self.guidance, self.batch, self.verifier = sampling, guidance, batch, verifier
        self._aux_layers = {"aux_layers": proposer.aux_layers} if proposer.aux_layers else {}
        room = target.slots + target.length + proposer.size
        # [B, N, V] in float32: logits of every branch, guided ones, probabilities, and two distributions of the drafts
        logits = (guidance.branches + 4) * batch * proposer.size * target.vocab * 4
        rows, decoder = guidance.branches * batch, target.decoder
        self.cache = Cache(decoder.config, rows, room, like, logits, decoder.ranks)
        self.codes = torch.zeros(
            batch, target.length + proposer.depth + 1, dtype=torch.int64, device=like.device
        )
        # decided codes; all of them at an idle slot
        self.count = torch.full((batch,), target.length, device=like.device)
        self.passes = torch.zeros_like(self.count)
        self.accepted = torch.zeros_like(self.codes)
        self.tv_cost = torch.zeros(batch, dtype=torch.float32, device=like.device)
        self.noise = Noise(seed=torch.zeros_like(self.count), step=self.passes)
        self._next_noise: list[Noise] = []  # of the next steps, in reverse order
        self._row = torch.arange(batch, device=like.device)[:, None]
        self._offsets = torch.arange(proposer.depth + 1, device=like.device)
        proposer.open(target, sampling, guidance, batch)

    @classmethod
    def check(cls, target: Target, rule: Acceptance, verifier: Verifier) -> None:
        """InputError unless the rule and the verifier are for what this engine decodes."""
        if rule.trajectories:
            raise InputError(
                "this model draws codes, and the rule cspd is for latents of a diffusion head: use --accept exact"
            )

    def parts(
        self, target: Target, sampling: Sampling, guidance: Guidance, verifier: Verifier
    ) -> tuple[Sampling, Guidance, Verifier]:
        """Sampling, guidance and verifier as what this engine decodes needs them."""
        return sampling, guidance, verifier

    @inference()
    def admit(self, slot: int, condition: str | None, seed: int, prompt: Prompt | None = None) -> None:
        """Start a sample at `slot`: prefill its prompt, draw its first code.

        prompt: the encoded condition, as `target.prompt` gives it for this guidance, where the caller has it. Samples are
        prefilled one at a time, so that rounding does not depend on what else is admitted. Raises ModelError where the logits
        overflow, which is read on the host.
        """
        if prompt is None:
            prompt = self.target.prompt([condition], self.guidance.branches)
        count, device = prompt.embeds.shape[1], self.codes.device
        rows = torch.arange(self.guidance.branches, device=device) * self.batch + slot
        prompt_cache = self.cache.rows(rows, prompt.start, count)
        embeds = prompt.embeds.to(self.cache.kv.dtype)
        features = prompt_cache.prefill(self.target, embeds, **self._aux_layers)
        self._next_noise.clear()
        self.noise.seed[slot] = seed
        self.tv_cost[slot] = 0
        self.passes[slot] = 0
        logits = self._guided_logits(features[:, -1:])
        self._check_finite(logits)
        logits = self.target.constrain(logits, torch.zeros(1, 1, dtype=torch.int64, device=device))
        noise = Noise(self.noise.seed[slot : slot + 1], self.noise.step[slot : slot + 1])
        root = self.sampling.draw(self.sampling.probs(logits[:, 0]), noise)
        self.codes[slot, 0] = root[0]
        self.count[slot] = self.passes[slot] = self.accepted[slot, 0] = 1
        new = Admission(slot, rows, condition, prompt, features, root)
        self._enter("draft")
        self.proposer.begin(new)
        self._enter("rest")
        for observer in self.observers:
            observer.admitted(new)

    def _check_finite(self, numbers: Tensor) -> None:
        """ModelError where the model has overflowed; a host read."""
        if not math.isfinite(numbers.max()):
            dtype = str(self.cache.kv.dtype).removeprefix("torch.")
            cure = "correct its weights, or numbers of its config.json such as rope_theta"
            cure = "use the dtype bfloat16 or float32" if dtype == "float16" else cure
            raise ModelError(f"the model's logits are no finite numbers in {dtype}; {cure}")

    @inference()
    def step(self) -> None:
        """Propose a draft, run the target over all its nodes in one pass, verify it, commit the accepted path."""
        if self.fused is not None and all(
            type(each).verified is Observer.verified for each in self.observers
        ):
            self._fused_step(self.fused)
            return
        if not self._next_noise:
            self._next_noise = self.noise.precomputed(self.proposer.depth, self.proposer.numbers_ahead)[::-1]
        noise = self._next_noise.pop()
        self._enter("draft")
        draft = self.run(self.proposer.propose, noise)
        self._enter("pass")
        features, logits = self.run(self._target_forward, draft)
        self._enter("verify")
        verdict = self.run(self._verify, draft, logits, noise)
        output = TargetOutput(draft, features, logits, verdict)
        self._enter("observe")
        for observer in (*self.observers,):  # one may leave them
            observer.verified(output, self.count)
        self._enter("rest")
        self.run(self._commit, draft, verdict)
        self._enter("draft")
        self.run(self.proposer.observe, output)
        self._enter("rest")

    def _fused_step(self, fused: Step) -> None:
        """The same step in one call, or a call for each phase where it is observed how long they take."""
        self._next_noise.clear()  # of steps that are taken here
        if not self.observers:
            fused.run()
            return
        for stage, phase in enumerate(PHASES):
            self._enter(phase)
            fused.run(stage, stage)
        self._enter("rest")

    def _target_forward(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """One pass of the target over a draft and its unverified nodes: features and logits as of `TargetOutput`."""
        rows, target = self.guidance.rows, self.target
        codes, depth, mask = draft.codes, draft.tree.depth, draft.tree.mask
        if draft.unverified is not None:
            more = draft.unverified
            codes, depth = torch.cat((codes, more.codes), 1), torch.cat((depth, more.depth), 1)
            mask = torch.cat((F.pad(mask, (0, more.mask.shape[1])), more.mask), 1)
        nodes = self.cache.nodes(rows(depth), rows(mask))
        features = target(rows(target.embed(codes)), nodes, self.cache, **self._aux_layers)
        # which code of the image the logits at every node decide
        index = (self.count[:, None] + depth).clamp(max=target.length - 1)
        return features, target.constrain(self._guided_logits(features), index)

    def _guided_logits(self, features: Tensor) -> Tensor:
        """Features [R, N, (1 + aux) D], of which the head reads the first part -> [B, N, V]."""
        if self._aux_layers:
            features = features[..., : self.target.decoder.config.dim]
        return self.guidance.logits(self.target, features)

    def _verify(self, draft: Draft, logits: Tensor, noise: Noise) -> Verdict:
        """The verdict on a draft, ended where the image ends; a finished sample keeps nothing."""
        logits = logits[:, : draft.codes.shape[1]]  # without those of unverified nodes
        verdict = self.verifier(draft, logits, self.sampling, self.rule, noise, self.measure_tv)
        verdict = padded(verdict, self.proposer.depth + 1)
        return replace(verdict, kept=torch.minimum(verdict.kept, self.target.length - self.count))

    def _enter(self, phase: Phase) -> None:
        """Notify the observers that a phase begins."""
        for observer in self.observers:
            observer.entered(phase)

    def decided(self) -> list[int]:
        """Codes decided at each slot; all of them at an idle one. The one host read of the loop."""
        counts: list[int] = self.count.tolist()
        return counts

    def done(self) -> list[int]:
        """Slots of finished samples and idle slots; a host read, as `decided` is."""
        return [slot for slot, count in enumerate(self.decided()) if count >= self.target.length]

    @torch.inference_mode()
    def drop(self, slot: int) -> None:
        """Abandon the sample at `slot`; the slot is idle from now on."""
        self.count[slot] = self.target.length

    def collect(self, slot: int) -> FinishedSample:
        """The codes of a finished sample. Raises ModelError where a layer before the last has overflowed."""
        used = int(self.cache.used[slot])
        # the last layer's keys of the codes: what overflows before is no number there
        self._check_finite(self.cache.kv[-1, 0, slot :: self.batch, :, used - self.target.length : used])
        accepted = self.accepted[slot, : int(self.passes[slot])].tolist()
        cost = 0.0 if self.rule.lossless else float(self.tv_cost[slot]) if self.measure_tv else None
        return FinishedSample(slot, self.codes[slot, : self.target.length].clone(), accepted, cost)

    def _commit(self, draft: Draft, verdict: Verdict) -> None:
        """Keep the accepted path and append its codes; what a finished sample would write falls into the margin of `codes`."""
        rows = self.guidance.rows
        self.cache.commit(None if draft.tree.chain else rows(verdict.path), rows(verdict.kept))
        where = self.count[:, None] + self._offsets
        self.codes[self._row, where] = verdict.next_codes
        self.accepted.scatter_(1, self.passes[:, None], verdict.kept[:, None])
        if verdict.tv_cost is not None:
            self.tv_cost += (verdict.tv_cost * (self._offsets < verdict.kept[:, None])).sum(1)
        self.passes += verdict.kept > 0
        self.count += verdict.kept
