"""Small stand-ins with the interfaces of the real thing: targets, drafters, and engines of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from helpers.distributions import tally
from lanternpp.accept.base import Acceptance
from lanternpp.accept.exact import Exact
from lanternpp.drafters.base import Drafter
from lanternpp.drafters.eagle import EagleConfig, EagleDrafter
from lanternpp.drafters.parallel import ParallelConfig, ParallelDrafter
from lanternpp.engine.batching import generate
from lanternpp.engine.cache import RowCache
from lanternpp.engine.decode import Engine, Observer
from lanternpp.engine.noise import Noise
from lanternpp.engine.proposer import Proposer
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.engine.verify import TOKEN, VERIFIERS
from lanternpp.models.base import Target
from lanternpp.nn.checkpoints import quantised
from lanternpp.nn.decoder import AttentionCache, Decoder, DecoderConfig, grid_table
from lanternpp.proposers.jacobi import Jacobi
from lanternpp.proposers.network import AutoregressiveProposer
from lanternpp.proposers.parallel import Parallel
from lanternpp.types import Nodes, Prompt, TargetOutput

# Markov chains of three codes: a target's, a drafter's that differs much from it, and one that forbids codes.
CHAIN = torch.tensor([[0.5, 0.3, 0.2], [0.05, 0.15, 0.8], [0.6, 0.3, 0.1]], dtype=torch.float64)
FAR = torch.tensor([[0.1, 0.2, 0.7], [0.9, 0.05, 0.05], [0.3, 0.3, 0.4]], dtype=torch.float64)
HOLES = torch.tensor([[0.0, 0.4, 0.6], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
BRANCHING = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))  # a tree


def noise(draws: int, seed: int = 0) -> Noise:
    """The noise of the second step of so many samples."""
    return Noise(torch.arange(draws) + (seed << 32), torch.ones(draws, dtype=torch.int64))


class ToyTarget(Target):
    """A tiny random decoder over a random codebook; a condition is a word whose length decides the prompt."""

    def __init__(self, vocab: int = 12, grid: int = 4, seed: int = 0, layers: int = 2):
        super().__init__()
        # without the trace that `torch.manual_seed` keeps for a GPU
        torch.default_generator.manual_seed(seed)
        self.vocab, self.width, self.length = vocab, grid, grid * grid
        shape = DecoderConfig(dim=16, layers=layers, heads=2, hidden=24)
        self.decoder = Decoder(shape, grid_table(self.slots, grid, shape.head_dim))
        self.table = torch.nn.Parameter(torch.randn(vocab, 16))
        self.out = torch.nn.Parameter(torch.randn(vocab, 16) * 0.75)
        self.book = torch.nn.functional.normalize(torch.randn(vocab, 3), dim=-1)
        self.null = torch.nn.Parameter(torch.randn(16))
        for weight in self.decoder.parameters():  # strong enough for the context to matter
            if weight.dim() == 2:
                weight.data *= 4
        self.double().eval().requires_grad_(False)

    slots = 3

    @property
    def codebook(self) -> Tensor:
        return self.book

    def prompt(self, conditions: Sequence[str | None], branches: int) -> Prompt:
        every = [*conditions, *[None] * (len(conditions) * (branches - 1))]
        embeds = torch.stack(
            [
                self.null.expand(3, -1) if c is None else self.table[[len(c) % 5, len(c) % 3, len(c) % 7]]
                for c in every
            ]
        )
        start = torch.tensor([0 if c is None else len(c) % 2 for c in every])
        self.first_slots = embeds[:, :1]
        return Prompt(embeds, start)

    def embed(self, codes: Tensor) -> Tensor:
        return self.table[codes]

    def head(self, features: Tensor) -> Tensor:
        return features @ self.out.T

    def pixels(self, codes: Tensor) -> Tensor:
        return self.book[codes].transpose(1, 2).reshape(len(codes), 3, self.width, self.width)


class RowsEnd(ToyTarget):
    """A format that forces code 7 at the end of every row and forbids it elsewhere."""

    def constrain(self, logits: Tensor, index: Tensor) -> Tensor:
        end = (index % self.width == self.width - 1)[..., None]
        seven = torch.arange(self.vocab, device=logits.device) == 7
        return logits.masked_fill(end ^ seven, float("-inf"))


class MarkovTarget(ToyTarget):
    """A first-order Markov chain with a known table [V, V]; the first code follows row 0."""

    def __init__(self, table: Tensor, grid: int = 2):
        super().__init__(vocab=len(table), grid=grid)
        shape = DecoderConfig(dim=4, layers=1, heads=1, hidden=4)  # never run: its cache is kept small
        self.decoder = Decoder(shape, grid_table(self.slots, grid, shape.head_dim)).double()
        self.chain = table.double()
        self.logp = self.chain.log().clamp(min=-1e30)  # of 0 too: 0 x inf is NaN
        self.table = torch.nn.Parameter(torch.eye(len(table), 4, dtype=torch.float64), requires_grad=False)

    def distribution(self, codes: int | None = None) -> Tensor:
        """The probability of every image, or start of `codes` codes, [V ** codes], first code slowest."""
        distribution = self.chain[0]
        for _ in range((codes or self.length) - 1):
            distribution = (distribution.view(-1, self.vocab, 1) * self.chain).flatten()
        return distribution

    def prompt(self, conditions: Sequence[str | None], branches: int) -> Prompt:
        rows = len(conditions) * branches
        return Prompt(
            self.table[torch.zeros(rows, 3, dtype=torch.int64)], torch.zeros(rows, dtype=torch.int64)
        )

    def forward(
        self, x: Tensor, nodes: Nodes, cache: AttentionCache, aux_layers: tuple[int, ...] = ()
    ) -> Tensor:
        return x.repeat(1, 1, 1 + len(aux_layers))

    def head(self, features: Tensor) -> Tensor:
        return features[..., : self.vocab] @ self.logp


class OracleDrafter(Drafter):
    """The target itself, as a drafter: it ignores the features, so every first child must be accepted.

    A drafter never sees the first prompt slot, as its inputs are one position ahead; the oracle adds it, and so
    its cache is one slot longer.
    """

    def __init__(self, target: ToyTarget):
        super().__init__()
        self._target = [target]
        self.decoder = target.decoder

    def forward(self, next_embeds: Tensor, features: Tensor, nodes: Nodes, cache: AttentionCache) -> Tensor:
        target = self._target[0]
        if isinstance(cache, RowCache):
            memory = RowCache(cache._cache, cache._rows[:, 0], cache._start, cache._count + 1)
            return target(torch.cat((target.first_slots, next_embeds), 1), memory.nodes(), memory)[:, 1:]
        mask = nodes.mask.roll(1, -1)
        mask.scatter_(-1, cache.start[:, None, None, None].expand(*mask.shape[:3], 1), True)
        return target(next_embeds, Nodes(nodes.position + 1, nodes.slot + 1, mask), cache)


class OtherMarkovDrafter(Drafter):
    """A Markov chain of its own: rows in proportion to those of a table, which may have zeros and nothing of the target's."""

    def __init__(self, target: MarkovTarget, table: Tensor):
        super().__init__()
        self.decoder = target.decoder
        # head(x) = x @ logp of the target, which is invertible: ask it for log(table)
        expected = table.double().log().clamp(min=-1e4)
        self.maps = torch.nn.Parameter(torch.linalg.solve(target.logp.T, expected.T).T, requires_grad=False)

    def forward(self, next_embeds: Tensor, features: Tensor, nodes: Nodes, cache: AttentionCache) -> Tensor:
        codes = next_embeds[..., : len(self.maps)].argmax(-1)
        return torch.nn.functional.pad(self.maps[codes], (0, next_embeds.shape[-1] - len(self.maps)))


def engine_of(
    target: Target,
    proposer: Proposer,
    batch: int = 1,
    sampling: Sampling | None = None,
    cfg: float = 1.0,
    rule: Acceptance | None = None,
    verify: str = TOKEN,
) -> Engine:
    """An engine, at temperature 1 and with the exact rule unless others are given."""
    parts = rule or Exact(), sampling or Sampling(), Guidance(cfg), batch
    return Engine(target, proposer, *parts, verifier=VERIFIERS[verify])


def codes_of(engine: Engine, conditions: Sequence[str | None], seeds: Sequence[int]) -> list[list[int]]:
    """The codes of the pictures that an engine draws."""
    return [sample.codes.tolist() for sample in generate(engine, conditions, seeds)]


class HostReader(Exact):
    """A custom rule that reads a value on the host."""

    lossless = False

    def relax(self, p: Tensor, code: Tensor) -> Tensor:
        return p / p.sum() if float(p.sum()) == 0 else p


class Outputs(Observer):
    """Records the output of every pass."""

    def __init__(self) -> None:
        self.seen: list[TargetOutput] = []

    def verified(self, output: TargetOutput, count: Tensor) -> None:
        self.seen.append(output)


def observed_step(engine: Engine) -> TargetOutput:
    """Take a step; return the output of its pass."""
    outputs = Outputs()
    engine.observers.append(outputs)
    engine.step()
    engine.observers.remove(outputs)
    return outputs.seen[0]


def admit_all(engine: Engine, seeds: Tensor) -> None:
    """What `admit` does, for every slot of a Markov engine at once: its prompt needs no pass."""
    target, proposer = engine.target, engine.proposer
    engine.noise.seed.copy_(seeds)
    engine.passes.zero_()
    logits = target.logp[:1].expand(len(seeds), -1)
    root = engine.sampling.draw(engine.sampling.probs(logits), engine.noise)
    engine.codes[:, 0], engine.accepted[:, 0] = root, 1
    engine.count.fill_(1)
    engine.passes.fill_(1)
    engine.cache.used.fill_(target.slots)
    proposer.root.copy_(root)
    proposer.count.fill_(1)
    if isinstance(proposer, AutoregressiveProposer):
        proposer.cache.used.fill_(target.slots)
        first = engine.guidance.rows(target.embed(root[:, None]))
        proposer.features[:, :1] = proposer.drafter_forward(root[:, None], first, None, None)
    if isinstance(proposer, Parallel):
        proposer.cache.start.fill_(target.slots - 1)  # of the prompt it has seen only the last slot
        proposer.cache.used.fill_(target.slots - 1)
        proposer.next_embeds[:, 0], proposer.features[:, 0] = target.embed(root), 0
        proposer.waiting.fill_(1)
    if isinstance(proposer, Jacobi):
        proposer.p_place.fill_(-1)
        proposer.code_place.fill_(-1)
        proposer.last_place.zero_()
        proposer.p.fill_(1 / target.vocab)


def counts(engine: Engine, codes: int, draws: int) -> Tensor:
    """How often every start of `codes` codes occurs in `draws` images of a Markov engine, [V ** codes]."""
    found = torch.zeros(engine.target.vocab**codes)
    for first in range(0, draws, engine.batch):
        admit_all(engine, torch.arange(first, first + engine.batch))
        while (engine.count < codes).any():
            engine.step()
        found += tally(engine.codes[:, :codes], engine.target.vocab)
    assert found.sum() == draws
    return found


def neighbours(book: Tensor, k: int) -> Tensor:
    """The k nearest codes of every code by l2, nearest first, itself excluded, [V, k]."""
    far = torch.cdist(book, book).fill_diagonal_(float("inf"))
    return far.argsort(-1)[:, :k].int()


def parallel(
    target: ToyTarget, queries: int = 4, aux_layers: tuple[int, ...] = (), confidence: bool = True
) -> ParallelDrafter:
    """A random drafter whose queries and `turn` layers matter."""
    torch.manual_seed(3)
    dim = target.embed(torch.zeros(1, 1, dtype=torch.int64)).shape[-1]
    heads = max(1, dim // 8)
    rotary_table = grid_table(target.slots, target.width, dim // heads)
    drafter = ParallelDrafter(
        ParallelConfig.like(
            DecoderConfig(dim, 1, heads, 24),
            queries=queries,
            turn=12,
            aux_layers=aux_layers,
            confidence=confidence,
        ),
        rotary_table,
    )
    for weight in drafter.parameters():
        weight.data.mul_(4 if weight.dim() == 2 else 1)
    return drafter.double().eval().requires_grad_(False)


def eagle(target: Target, seed: int = 1) -> EagleDrafter:
    """A random EAGLE drafter of the toy's width."""
    torch.manual_seed(seed)
    shape = target.decoder.config
    config = EagleConfig.like(DecoderConfig(shape.dim, 1, shape.heads, shape.hidden))
    return EagleDrafter(config, target.decoder.rotary_table).double().eval().requires_grad_(False)


class SmallerTarget(ToyTarget):
    """Another target of the same codes, that takes a prompt of another length."""

    slots = 2

    def prompt(self, conditions: Sequence[str | None], branches: int) -> Prompt:
        prompt = super().prompt(conditions, branches)
        return Prompt(prompt.embeds[:, :2], prompt.start)


def smaller(target: ToyTarget) -> SmallerTarget:
    """A smaller target that shares the tables, so that it sometimes agrees."""
    made = SmallerTarget(target.vocab, target.width, seed=3, layers=1).to(target.table.dtype)
    made.book = target.book
    for name in ("table", "out"):
        ours, theirs = getattr(made, name), getattr(target, name)
        ours.copy_(ours.lerp(theirs, 0.7))
    return made


def stored_in_8_bits(weight: Tensor) -> Tensor:
    """Round a weight [out, in] to 8 bits and store them with it; return the rounded weight in float64."""
    numbers, scale = quantised(weight.float(), 8)
    exact = numbers.double() * scale.double()[:, None]
    weight.copy_(exact)
    weight.int8_weight = numbers, scale
    return exact


def fits_4_bits(weight: Tensor) -> Tensor:
    """Replace a weight [out, in] by random numbers that 4 bits store exactly; return it in float64.

    They are q - 8 times a whole number that 32 inputs share, and 2^-8, with q = 0 in each of these groups.
    """
    out, inputs = weight.shape
    groups = -(-inputs // 32)
    factors = torch.randint(1, 16, (out, groups)) * torch.randint(0, 2, (out, groups)).mul(2).sub(1)
    factors[:, 0] = 15
    numbers = torch.randint(-8, 8, (out, groups, 32))
    numbers[..., 0] = -8
    exact = (numbers * factors[..., None]).flatten(1)[:, :inputs].double() / 256
    weight.copy_(exact)
    return exact
