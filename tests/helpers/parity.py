"""Our targets beside the implementation they come from: the same weights, the same logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lanternpp.engine.cache import Cache
from lanternpp.models.language import LanguageTarget
from lanternpp.types import Nodes

PATHS = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 1, 1)]


@dataclass(frozen=True)
class Peer:
    """An upstream model, one row at a time and without padding."""

    tokens: Callable[[Tensor], Tensor]  # token ids [1, T] -> [1, T, D]
    codes: Callable[[Tensor], Tensor]  # codes [1, N] -> [1, N, D]
    body: Callable[..., Any]  # inputs_embeds -> last_hidden_state, past_key_values
    head: Callable[[Tensor], Tensor]  # features -> logits of our codes

    def logits(self, prompt: list[int], codes: list[int]) -> Tensor:
        """Logits [len(codes) + 1, V] of the code after the prompt and after each code, in one pass."""
        embeds = self.tokens(torch.tensor([prompt]))
        if codes:
            embeds = torch.cat((embeds, self.codes(torch.tensor([codes]))), 1)
        features = self.body(inputs_embeds=embeds, use_cache=False).last_hidden_state
        return self.head(features)[0, len(prompt) - 1 :]

    def steps(self, prompt: list[int], codes: list[int]) -> Tensor:
        """The same with its cache, a code at a time."""
        out = self.body(inputs_embeds=self.tokens(torch.tensor([prompt])), use_cache=True)
        found = [self.head(out.last_hidden_state)[0, -1]]
        for code in codes:
            embeds = self.codes(torch.tensor([[code]]))
            out = self.body(inputs_embeds=embeds, past_key_values=out.past_key_values, use_cache=True)
            found.append(self.head(out.last_hidden_state)[0, -1])
        return torch.stack(found)


@torch.no_grad()
def gaps(target: LanguageTarget, peer: Peer, conditions: list[str | None]) -> dict[str, float]:
    """The greatest logit differences of a prefill, of one-code steps and of a tree, conditional rows and null rows.

    Prompts of different lengths share the batch, so most of them are padded.
    """
    rows = [target.conditional(c) if c else target.unconditional(None) for c in conditions]
    rows += [target.unconditional(c) for c in conditions]
    prompt = target.prompt(conditions, 2)
    count, slots = len(rows), prompt.embeds.shape[1]
    assert len(set(prompt.start.tolist())) > 1
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(target.codes, (count, 6), generator=generator)
    expected = torch.stack([peer.steps(row, own) for row, own in zip(rows, codes.tolist(), strict=True)])

    cache = Cache(target.decoder.config, count, slots + 32, prompt.embeds)
    memory = cache.rows(torch.arange(count), prompt.start, slots)
    features = target(prompt.embeds, memory.nodes(), memory)
    found = {"prefill": distance(target.head(features[:, -1]), expected[:, 0])}
    one = torch.ones(count, 1, 1, dtype=torch.bool)
    steps = []
    for i in range(codes.shape[1]):
        nodes = cache.nodes(torch.zeros(count, 1, dtype=torch.int64), one)
        features = target(target.embed(codes[:, i : i + 1]), nodes, cache)
        steps.append(target.head(features[:, 0]))
        cache.used += 1
    found["steps"] = distance(torch.stack(steps, 1), expected[:, 1:])
    found["tree"] = distance(*tree(target, peer, cache, rows, codes, generator))
    return found


def tree(
    target: LanguageTarget,
    peer: Peer,
    cache: Cache,
    rows: list[list[int]],
    codes: Tensor,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Logits of a tree's nodes in one pass, and of the peer run along the path to each alone."""
    nodes = [(), *PATHS]
    guesses = torch.randint(target.codes, (len(rows), len(nodes)), generator=generator)
    mask = torch.tensor([[a == b[: len(a)] for a in nodes] for b in nodes]).expand(len(rows), -1, -1)
    depth = torch.tensor([len(path) for path in nodes]).expand(len(rows), -1)
    places: Nodes = cache.nodes(depth, mask)
    ours = target.head(target(target.embed(guesses), places, cache))
    alone = []
    for row, decided, guess in zip(rows, codes.tolist(), guesses.tolist(), strict=True):
        for path in nodes:
            along = [guess[nodes.index(path[:i])] for i in range(len(path) + 1)]
            alone.append(peer.logits(row, decided + along)[-1])
    return ours, torch.stack(alone).view_as(ours)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The greatest difference, of logits that differ among themselves."""
    assert theirs.std() > 0.3, "logits too flat to tell anything"
    return float((ours - theirs).abs().max())


@torch.no_grad()
def greedy(target: LanguageTarget, peer: Peer, condition: str, scale: float) -> Tensor:
    """The most probable code after each other, [length], with guidance and forced row ends, by the peer alone."""
    rows = target.conditional(condition), target.unconditional(condition)
    codes: list[int] = []
    while len(codes) < target.length:
        if target.raster.ends and len(codes) % target.width == target.width - 1:
            codes.append(target.codes)
            continue
        kind, null = (peer.logits(row, codes)[-1, : target.codes] for row in rows)
        codes.append(int((null + scale * (kind - null)).argmax()))
    return torch.tensor(codes)
