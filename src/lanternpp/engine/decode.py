"""The decoding loop: admit samples, step until they are finished, collect their codes.

Plain decoding is the same loop with an empty tree, so a speed-up divides two runs of the same code.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lanternpp.accept.base import Acceptance
from lanternpp.engine.cache import Cache
from lanternpp.engine.noise import Noise
from lanternpp.engine.proposer import Proposer, check_draft
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.engine.verify import Verifier
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
    """The codes of a finished sample, and how they were decided."""

    slot: int  # the slot of the engine that the sample had
    codes: Tensor  # [length] int64
    accepted: list[int]  # codes decided by each pass, the prefill first
    tv_cost: float | None = None  # of a relaxed rule, the sum over codes; None: not measured


class Observer:
    """Base class of an engine's `observers`. Methods must not change their arguments, whose memory the next step overwrites."""

    def entered(self, phase: Phase) -> None:
        """Called when a phase of a step or of an admission begins, which ends the previous phase."""

    def admitted(self, new: Admission) -> None:
        """Called when a sample has entered and its first code is decided."""

    def verified(self, output: TargetOutput, count: Tensor) -> None:
        """Called when a draft is verified and not committed yet; count [B] codes are decided so far."""


def engine_class(target: Target) -> type[Engine]:
    """Return the class of engines that decode this target."""
    return cast("type[Engine]", imported("engine", target.engine))


class Engine:
    """Decodes a batch of B samples; a step advances each sample by the accepted codes of its draft and a bonus code."""

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
        self.run: Callable[..., Any] = operator.call  # calls a part of a step: run(method, *arguments)
        # `batching.open_batch` pops the element while it draws: only one thread can. Unlike a lock, a list can be copied.
        self.idle = [True]
        self.observers: list[Observer] = []
        self.fused: Step | None = None  # complete steps, where the kernels compute all parts
        self.drafts_to_check = 0  # next drafts that are checked, if their proposer or tree is a caller's own
        self.target, self.proposer, self.rule = target, proposer, rule
        self.sampling, self.guidance, self.batch, self.verifier = sampling, guidance, batch, verifier
        self._aux_layers = {"aux_layers": proposer.aux_layers} if proposer.aux_layers else {}
        slots = target.slots + target.length + proposer.size
        # [B, N, V] in float32: logits of every branch, guided logits, probabilities, and two distributions of the drafts
        logits_bytes = (guidance.branches + 4) * batch * proposer.size * target.vocab * 4
        rows = guidance.branches * batch
        self.cache = Cache(target.decoder.config, rows, slots, like, logits_bytes, target.decoder.ranks)
        max_codes = target.length + proposer.depth + 1  # with a margin for a draft after the last code
        self.codes = torch.zeros(batch, max_codes, dtype=torch.int64, device=like.device)
        # [B] decided codes; `length` at an idle slot
        self.count = torch.full((batch,), target.length, device=like.device)
        self.passes = torch.zeros_like(self.count)  # [B] the prefill included
        self.accepted = torch.zeros_like(self.codes)  # codes decided by each pass
        self.tv_cost = torch.zeros(batch, dtype=torch.float32, device=like.device)
        self.noise = Noise(seed=torch.zeros_like(self.count), step=self.passes)
        self._next_noise: list[Noise] = []  # of the next steps, in reverse order
        self._numbers: Tensor | None = None  # of the first step's noise
        self._row = torch.arange(batch, device=like.device)[:, None]  # [B, 1]
        self._offsets = torch.arange(proposer.depth + 1, device=like.device)  # [P]
        proposer.open(target, sampling, guidance, batch)

    @classmethod
    def check(cls, target: Target, rule: Acceptance, verifier: Verifier) -> None:
        """Check that the rule and the verifier are for codes; raise InputError if not."""
        if rule.trajectories:
            raise InputError(
                "this model draws codes, and the rule cspd is for latents of a diffusion head: use --accept exact"
            )

    def parts(
        self, target: Target, sampling: Sampling, guidance: Guidance, verifier: Verifier
    ) -> tuple[Sampling, Guidance, Verifier]:
        """Return the sampling, the guidance and the verifier of this class of engines, from those of codes."""
        return sampling, guidance, verifier

    @inference()
    def admit(self, slot: int, condition: str | None, seed: int, prompt: Prompt | None = None) -> None:
        """Start a sample at `slot`: prefill its prompt, draw its first code.

        prompt: `target.prompt` of the condition and guidance, if the caller has it. Samples are prefilled one at a time, so that
        rounding does not depend on other admissions. Raises ModelError where the logits overflow, by a host read.
        """
        if prompt is None:
            prompt = self.target.prompt([condition], self.guidance.branches)
        device = self.codes.device
        rows = torch.arange(self.guidance.branches, device=device) * self.batch + slot
        prompt_cache = self.cache.rows(rows, prompt.start, prompt.embeds.shape[1])
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
        root = self.sampling.draw(self.sampling.probs(logits[:, 0]), noise)  # [1]
        self.codes[slot, 0] = root[0]
        self.count[slot] = self.passes[slot] = self.accepted[slot, 0] = 1
        admission = Admission(slot, rows, condition, prompt, features, root)
        self._enter("draft")
        self.proposer.begin(admission)
        self._enter("rest")
        for observer in self.observers:
            observer.admitted(admission)

    def _check_finite(self, values: Tensor) -> None:
        """Check that the model has not overflowed, by a host read; raise ModelError if it has."""
        if not math.isfinite(values.max()):
            dtype = str(self.cache.kv.dtype).removeprefix("torch.")
            remedy = "correct its weights, or numbers of its config.json such as rope_theta"
            if dtype == "float16":
                remedy = "use the dtype bfloat16 or float32"
            raise ModelError(f"the model's logits are no finite numbers in {dtype}; {remedy}")

    def step(self) -> None:
        """Advance every sample by a step: in one call of C, or in a call for each phase if observers time them, else by parts."""
        if self.fused is None or any(type(x).verified is not Observer.verified for x in self.observers):
            self._step_by_parts()
            return
        self._next_noise.clear()  # as the kernels take the step that its first noise is for
        if not self.observers:
            self.fused.run()
            return
        for stage, phase in enumerate(PHASES):
            self._enter(phase)
            self.fused.run(stage, stage)
        self._enter("rest")

    @inference()
    def _step_by_parts(self) -> None:
        """Propose a draft, run the target over all its nodes in one pass, verify it, commit the accepted path."""
        if not self._next_noise:
            steps = self.noise.precomputed(self.proposer.depth, self.proposer.max_precomputed)
            self._next_noise = steps[::-1]
        noise = self._at_one_address(self._next_noise.pop())
        self._enter("draft")
        draft = self.run(self.proposer.propose, noise)
        if self.drafts_to_check:
            check_draft(draft, self.proposer, self.codes, self.count, self.verifier is not verify_tokenwise)
            self.drafts_to_check -= 1
        self._enter("pass")
        features, logits = self.run(self._target_forward, draft)
        self._enter("verify")
        verdict = self.run(self._verify, draft, logits, noise)
        output = TargetOutput(draft, features, logits, verdict)
        self._enter("observe")
        for observer in list(self.observers):  # a copy, as an observer may remove itself
            observer.verified(output, self.count)
        self._enter("rest")
        self.run(self._commit, draft, verdict)
        self._enter("draft")
        self.run(self.proposer.observe, output)
        self._enter("rest")

    def _at_one_address(self, noise: Noise) -> Noise:
        """Return the noise of a step with its numbers in the same memory in every step, as a recorded graph reads them there."""
        if self._numbers is None or noise.numbers is None:
            self._numbers = noise.numbers
            return noise
        return replace(noise, numbers=self._numbers.copy_(noise.numbers))

    def _target_forward(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """Run the target over a draft and its unverified nodes; return features and logits as of `TargetOutput`."""
        rows, target = self.guidance.rows, self.target
        codes, depth, mask = draft.codes, draft.tree.depth, draft.tree.mask
        if draft.unverified is not None:
            unverified = draft.unverified
            codes = torch.cat((codes, unverified.codes), 1)  # [B, N + M]
            depth = torch.cat((depth, unverified.depth), 1)
            mask = torch.cat((F.pad(mask, (0, unverified.mask.shape[1])), unverified.mask), 1)
        nodes = self.cache.nodes(rows(depth), rows(mask))
        features = target(rows(target.embed(codes)), nodes, self.cache, **self._aux_layers)
        # the index, in the image, of the code that the logits of each node decide
        index = (self.count[:, None] + depth).clamp(max=target.length - 1)
        return features, target.constrain(self._guided_logits(features), index)

    def _guided_logits(self, features: Tensor) -> Tensor:
        """Return the guided logits [B, N, V] of features [R, N, (1 + aux) D]; the head reads the first D channels."""
        if self._aux_layers:
            features = features[..., : self.target.decoder.config.dim]
        return self.guidance.logits(self.target, features)

    def _verify(self, draft: Draft, logits: Tensor, noise: Noise) -> Verdict:
        """Verify a draft; nodes after the end of the image are not kept, and a finished sample keeps no node."""
        logits = logits[:, : draft.codes.shape[1]]  # without the logits of unverified nodes
        verdict = self.verifier(draft, logits, self.sampling, self.rule, noise, self.measure_tv)
        verdict = padded(verdict, self.proposer.depth + 1)
        return replace(verdict, kept=torch.minimum(verdict.kept, self.target.length - self.count))

    def _enter(self, phase: Phase) -> None:
        for observer in self.observers:
            observer.entered(phase)

    def decided(self) -> list[int]:
        """Return the number of decided codes at each slot, `length` at an idle slot. The only host read of the loop."""
        return cast("list[int]", self.count.tolist())

    @torch.inference_mode()
    def drop(self, slot: int) -> None:
        """Abandon the sample at `slot`; the slot is idle from now on."""
        self.count[slot] = self.target.length

    def collect(self, slot: int) -> FinishedSample:
        """Return a finished sample. Raise ModelError where a layer before the last has overflowed."""
        used = int(self.cache.used[slot])
        # After an overflow of an earlier layer, the last layer's keys of the codes are NaN.
        self._check_finite(self.cache.kv[-1, 0, slot :: self.batch, :, used - self.target.length : used])
        accepted = self.accepted[slot, : int(self.passes[slot])].tolist()
        tv_cost = 0.0 if self.rule.lossless else None
        if self.measure_tv:  # never of a lossless rule
            tv_cost = float(self.tv_cost[slot])
        return FinishedSample(slot, self.codes[slot, : self.target.length].clone(), accepted, tv_cost)

    def _commit(self, draft: Draft, verdict: Verdict) -> None:
        """Keep the accepted path and append its codes; a finished sample writes into the margin of `codes`."""
        rows = self.guidance.rows
        self.cache.commit(None if draft.tree.chain else rows(verdict.path), rows(verdict.kept))
        self.codes[self._row, self.count[:, None] + self._offsets] = verdict.next_codes
        self.accepted.scatter_(1, self.passes[:, None], verdict.kept[:, None])
        if verdict.tv_cost is not None:
            self.tv_cost += (verdict.tv_cost * (self._offsets < verdict.kept[:, None])).sum(1)
        self.passes += verdict.kept > 0
        self.count += verdict.kept
