"""Every lossless method draws by the distribution of plain decoding, through `Pipeline` and the kernels in C.

A random model of 64 codes, two samples of pictures of six codes, chi-square. `pytest --pictures 20000 -s` draws
more and prints the p-values; the default is what fits into the suite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.distributions import two_samples
from helpers.models import save_words
from torch import Tensor

from lanternpp import Pipeline
from lanternpp.drafters.eagle import EagleConfig, EagleDrafter
from lanternpp.drafters.parallel import ParallelConfig, ParallelDrafter
from lanternpp.kernels import Kernels
from lanternpp.kernels.linear import KernelLinear
from lanternpp.kernels.packing import KernelDecoder, KernelDrafter
from lanternpp.kernels.step import KernelStep
from lanternpp.models.vq.autoencoder import VQ, VQConfig
from lanternpp.models.words import WordsConfig, WordsTarget
from lanternpp.nn import checkpoints
from lanternpp.nn.decoder import DecoderConfig
from lanternpp.trees.dynamic import DynamicTree
from lanternpp.types import Verdict

VOCAB, GRID, CODES, TOP_K = 64, 3, 6, 4
FAVOURITES = 6  # codes that are usually among the top-k, so that drafts are accepted
CONSTANT = 8.0  # of channel 0 of all embeddings: by it the head prefers the favourites everywhere
BATCH = 8  # so that all passes have few enough rows for the kernels of any CPU
SIGNIFICANT = 1e-4
TREE = "[[0],[1],[0,0],[0,1],[1,0],[0,0,0]]"
METHODS: dict[str, dict[str, Any]] = {
    "ar, other seeds": {"method": "ar"},
    "eagle, traversal": {"method": "eagle", "tree": TREE},
    "eagle, token": {"method": "eagle", "tree": TREE, "verify": "token"},
    "eagle2": {"method": "eagle2", "tree": DynamicTree(beam=4, depth=4, nodes=14)},
    "ddd": {"method": "ddd", "tree": DynamicTree(4, 4, 14, 2, math.log(0.6))},
    "parallel, block": {"method": "parallel"},
    "parallel, token": {"method": "parallel", "verify": "token"},
    "parallel, block, cut": {"method": "parallel", "min_survival": 0.25},
    "parallel, token, cut": {"method": "parallel", "min_survival": 0.25, "verify": "token"},
    "independent, block": {"method": "independent"},
    "jacobi, block": {"method": "jacobi", "window": 6},
    "jacobi-coupled, traversal": {"method": "jacobi-coupled", "window": 6},
}
Draw = Callable[[dict[str, Any], int], tuple[Tensor, float]]


def words(vq: VQ, dim: int, layers: int, liked: Tensor) -> WordsTarget:
    """A random target that depends on what it has drawn; liked: the channel 0 of its head, [V]."""
    config = WordsConfig(("red", "tulip"), ("tulip",), dim, layers, 2, 2 * dim, GRID, 4, 0.0, VOCAB)
    target = WordsTarget(config, vq)
    for weight in target.decoder.parameters():
        if weight.dim() == 2:
            weight.normal_(std=weight.shape[1] ** -0.5)
    for table in (target.codes_in.weight, target.word_table, target.slot_table, target.null_prefix):
        table.normal_()[:, 0] = CONSTANT / (1 if table is target.codes_in.weight else 2)
    target.codes_out.weight.normal_(std=0.5 * dim**-0.5)[:, 0] = liked
    return target


@torch.no_grad()
def write(folder: Path) -> Path:
    """The model, with drafters of each kind that sometimes agree with it."""
    torch.manual_seed(0)
    shape = VQConfig(
        4 * GRID, 4, codes=VOCAB, channels=(16, 16), encoder_blocks=(1, 1), decoder_blocks=(1, 1)
    )
    vq, liked = VQ(shape), -0.6 * (torch.randperm(VOCAB) >= FAVOURITES)
    for where, dim, layers in ((folder / "independent", 32, 1), (folder, 64, 2)):
        target = words(vq, dim, layers, liked)
        save_words(where, target)
    like, table = DecoderConfig(64, 1, 2, 128), target.decoder.rotary_table
    eagle = EagleDrafter(EagleConfig.like(like), table)
    parallel = ParallelDrafter(ParallelConfig.like(like, queries=5, turn=32, confidence=True), table)
    parallel.queries.normal_()[:, 0] = CONSTANT
    for name, kind, drafter in (("drafter", "eagle", eagle), ("parallel", "parallel", parallel)):
        drafter.fc.weight[:, 64:] += torch.eye(64)
        checkpoints.save(folder / name, {"kind": kind, **drafter.config.flat()}, drafter.state_dict())
    return folder


@pytest.fixture(scope="module")
def draw(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Draw:
    """Draws the pictures of a method, from seeds of its own: codes [n, CODES] and the codes per pass."""
    pipe = Pipeline.from_pretrained(write(tmp_path_factory.mktemp("model")), device="cpu", dtype="bfloat16")
    for target in (pipe.target, pipe.model.network("independent")):
        target.length = CODES  # more would be drawn for nothing
    count = request.config.getoption("--pictures")

    def drawn(method: dict[str, Any], turn: int) -> tuple[Tensor, float]:
        given = {"batch_size": BATCH, "top_k": TOP_K, "output_type": "codes", "seed": turn << 20}
        result = pipe("red tulip", count, **given, **method)
        return result.codes, result.stats.codes_per_pass

    return drawn


@pytest.fixture(scope="module")
def plain(draw: Draw) -> Tensor:
    """Pictures of plain decoding."""
    return draw({"method": "ar"}, 0)[0]


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[bool]]:
    """For each kind of kernel, whether its calls computed a result."""
    seen: dict[str, list[bool]] = {}
    kinds = {"sample": KernelDrafter, "verify": Kernels, "probs": Kernels, "run": KernelStep}
    for name, kind in {"__call__": KernelDecoder, "product": KernelLinear, **kinds}.items():
        plain = getattr(kind, name)

        def call(self: Any, *given: Any, name: str = name, plain: Any = plain, **named: Any) -> Any:
            found = plain(self, *given, **named)
            seen.setdefault(name, []).append(name == "run" or (found is not None and found is not False))
            return found

        monkeypatch.setattr(kind, name, call)
    return seen


def p_values(one: Tensor, other: Tensor) -> dict[str, float]:
    """The p-values of two samples of codes [n, CODES]: of as many codes together as occur in few enough ways, of all codes
    together, each by its half of the codebook, of pairs of codes, and of single codes.

    Of several tests the least p-value counts, times their number.
    """
    both = torch.cat((one, other))
    halves = (both.unique(return_inverse=True)[1] % 2).chunk(2)
    first = max(n for n in range(1, CODES + 1) if 10 * len(both[:, :n].unique(dim=0)) < len(both))

    def least(count: int) -> float:
        found = [two_samples(one[:, at], other[:, at]) for at in combinations(range(CODES), count)]
        return min(1.0, len(found) * min(found))

    joint = {f"first {first}": two_samples(one[:, :first], other[:, :first]), "halves": two_samples(*halves)}
    return joint | {"pairs": least(2), "single": least(1)}


def differ(name: str, codes: Tensor, plain: Tensor, per_pass: float) -> bool:
    """Whether two samples have different distributions; prints why."""
    found = p_values(codes, plain)
    p = min(1.0, len(found) * min(found.values()))
    each = " ".join(f"{kind} {value:.2g}" for kind, value in found.items())
    print(f"{name:28} {len(codes)} pictures, {per_pass:.2f} codes per pass, p {p:.2g} ({each})")
    return p < SIGNIFICANT


@pytest.mark.parametrize("name", METHODS)
def test_first_codes_follow_the_distribution_of_plain_decoding(
    draw: Draw, plain: Tensor, kernel_calls: dict[str, list[bool]], name: str
) -> None:
    method, turn = METHODS[name], 1 + list(METHODS).index(name)
    codes, per_pass = draw(method, turn)
    assert not differ(name, codes, plain, per_pass)
    assert per_pass == 1 if method["method"] == "ar" else per_pass > 1.5
    whole = method["method"] in ("ar", "parallel") and "min_survival" not in method
    expected = {"__call__", "product", "probs", "run" if whole else "verify"}
    assert expected <= kernel_calls.keys() and all(map(all, kernel_calls.values()))


def with_wrong_residual(call: Callable[..., Verdict]) -> Callable[..., Verdict]:
    """The verifier's call, but the code after a rejection is drawn from the target's distribution instead of the residual."""

    def wrong(*given: Any) -> Verdict:
        verdict, logits, last = call(*given), given[2], given[-1]
        end = (verdict.kept - 1)[:, None]
        at = verdict.path.gather(1, end)[..., None].expand(-1, -1, VOCAB)
        top = logits.gather(1, at)[:, 0].topk(TOP_K)
        rank = (top.values.softmax(-1).cumsum(-1) < last).sum(-1, keepdim=True).clamp(max=TOP_K - 1)
        bonus = top.indices.gather(1, rank)
        codes = verdict.next_codes.scatter(1, end, bonus)
        return replace(verdict, bonus=bonus[:, 0], next_codes=codes)

    return wrong


@pytest.mark.parametrize("name", ["eagle, token", "eagle2", "independent, block"])
def test_a_wrong_residual_is_detected(
    draw: Draw, plain: Tensor, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(Kernels, "verify", with_wrong_residual(Kernels.verify))
    codes, per_pass = draw(METHODS[name], 20)
    assert differ(f"wrong residual: {name}", codes, plain, per_pass)


def test_a_relaxed_rule_is_detected(draw: Draw, plain: Tensor) -> None:
    codes, per_pass = draw({"method": "parallel", "accept": "lantern++", "lam": 3.0, "neighbours": 60}, 21)
    assert differ("relaxed: lantern++", codes, plain, per_pass)
