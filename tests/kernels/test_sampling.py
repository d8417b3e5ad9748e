"""Heads, probabilities, draws and the verification of trees in C, beside PyTorch; random ones are in `test_fuzz_kernels.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers.refusals import rejects
from helpers.toys import neighbours, noise
from kernels.drafting import drafted
from torch import Tensor

from lanternpp import Pipeline
from lanternpp.accept.exact import Exact
from lanternpp.accept.neighbours import LanternPlusPlus
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify import Verifier
from lanternpp.engine.verify.joint import verify_joint
from lanternpp.engine.verify.tokenwise import native_verdict, verify_tokenwise
from lanternpp.kernels import loading as native
from lanternpp.nn.backend import PYTORCH, backend
from lanternpp.trees.static import EAGLE, StaticTree, chain_tree
from lanternpp.types import Draft

pytestmark = [
    pytest.mark.skipif(native.library() is None, reason="no kernels here"),
    pytest.mark.usefixtures("without_gradients"),
]


class OwnBudget(LanternPlusPlus):
    """A custom rule."""

    def budget(self, p: Tensor) -> Tensor:
        return p.square()


def test_verification_without_a_draft_draws_a_code() -> None:
    """Of the target's distribution."""
    batch, vocab = 40_000, 7
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(0)).expand(batch, 1, vocab)
    root = Draft(chain_tree(batch, 0, torch.device("cpu")), torch.zeros(batch, 1).long(), None)
    sampling = Sampling(backend=backend())
    verdict = verify_tokenwise(root, logits, sampling, Exact(), noise(batch))
    assert (verdict.kept == 1).all() and not verdict.path.any()
    share = verdict.bonus.bincount(minlength=vocab) / batch
    assert (share - logits[0, 0].softmax(-1)).abs().max() < 0.01


@pytest.mark.parametrize("verifier", [verify_tokenwise, verify_joint])
@pytest.mark.parametrize("unknown", ["a custom rule", "a table of int64", "float64"])
def test_unsupported_rules_and_dtypes_are_left_to_pytorch(verifier: Verifier, unknown: str) -> None:
    table = neighbours(torch.randn(60, 3), 9)
    rule = {
        "a custom rule": OwnBudget(table, 2.0, "optimal"),
        "a table of int64": LanternPlusPlus(table.long(), 2.0, "optimal"),
        "float64": Exact(),
    }[unknown]
    dtype = torch.float64 if unknown == "float64" else torch.float32
    draft, logits = drafted(StaticTree(EAGLE), 50, 60)
    draft, logits = replace(draft, probs=draft.probs.to(dtype)), logits.to(dtype)
    verdicts = [
        verifier(draft, logits, Sampling(0.9, 50, backend=used), rule, noise(50), False)
        for used in (PYTORCH, backend())
    ]
    assert torch.equal(*(verdict.next_codes for verdict in verdicts))


def test_joint_verification_by_the_papers_residual_is_left_to_pytorch() -> None:
    draft, logits = drafted(StaticTree(EAGLE), 2, 60)
    rule = LanternPlusPlus(neighbours(torch.randn(60, 3), 9), 2.0, "paper")
    found = native_verdict(draft, logits, Sampling(backend=backend()), rule, noise(2), joint=True)
    assert found is None


@pytest.mark.parametrize("missing", ["probs", "codes"])
def test_a_draft_that_lacks_nodes_is_not_read_past_its_end(missing: str) -> None:
    draft, logits = drafted(StaticTree(EAGLE), 2, 60)
    draft = replace(draft, **{missing: getattr(draft, missing)[:, :-1]})
    sampling = Sampling(backend=backend())
    rejects("each node needs its own", verify_tokenwise, draft, logits, sampling, Exact(), noise(2))


@pytest.mark.parametrize("method", ["eagle2", "lantern"])
def test_the_shipped_model_draws_the_same_for_any_number_of_threads(
    method: str, nature: Pipeline, threads: Callable[[int], None]
) -> None:
    drawn = []
    for count in (1, 3):
        threads(count)
        engine = nature.new_engine(nature.settings(method))
        engine.admit(0, "a photo of a red tulip", 3)
        for _ in range(3):
            engine.step()
        drawn.append(engine.codes[0, : int(engine.count[0])].clone())
    assert torch.equal(*drawn)
