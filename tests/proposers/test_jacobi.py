"""Jacobi drafting: windows at the next rows, and its couplings. `engine/test_distribution.py` has its distribution."""

from __future__ import annotations

import pytest
import torch
from helpers.distributions import chi_square
from helpers.refusals import rejects
from helpers.toys import CHAIN, MarkovTarget, ToyTarget, engine_of, observed_step

from lanternpp.engine.batching import generate
from lanternpp.engine.noise import Noise
from lanternpp.engine.proposer import Parts
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.errors import InputError
from lanternpp.proposers.jacobi import COUPLINGS, INITS, Jacobi
from lanternpp.trees.static import StaticTree, chain
from lanternpp.types import Draft, TargetOutput, Verdict


@pytest.mark.parametrize("codebook", [True, False])
def test_after_a_rejection_the_next_code_follows_the_distribution_after_similar_codes(codebook, monkeypatch):
    """Of two alternatives one has the latents of the code that was drawn, the other one the most distant ones."""
    monkeypatch.setattr(MarkovTarget, "codebook", CHAIN[[0, 1, 0]] if codebook else None)
    target = MarkovTarget(CHAIN)
    proposer = Jacobi(1, "maximal", "last", 1)
    proposer.open(target, Sampling(), Guidance(), 3)
    draft = Draft(proposer._tree, torch.tensor([[0, 0, 1]] * 3), proposer._probs)
    logits = CHAIN.double().log()[draft.codes]
    root = torch.zeros(3, 2, dtype=torch.int64)
    # both rejected and 2 drawn; the draft code accepted; its sibling accepted
    path = torch.tensor([[0, 0], [0, 1], [0, 2]])
    kept, bonus = torch.tensor([1, 2, 2]), torch.tensor([2, 2, 2])
    proposer.observe(TargetOutput(draft, logits, logits, Verdict(path, kept, root, bonus)))
    ours = CHAIN.double()[0] if codebook else CHAIN.double()[:2].mean(0)
    place = torch.tensor([[2]] * 3)  # after the code drawn
    torch.testing.assert_close(proposer._read(proposer.p, place)[0, 0], ours)
    assert proposer.count.tolist() == [2, 3, 3]
    assert proposer._is_stored(proposer.p_place, proposer.count[:, None])[:, 0].tolist() == [
        True,
        False,
        False,
    ]


def test_a_draft_code_of_the_next_row_is_drawn_again_from_the_targets_distribution_there():
    """In a grid 6 wide, with windows of 2: the second row's first draft codes, whose p the pass computes as plain decoding would."""
    target = ToyTarget(grid=6)
    proposer = Jacobi(2, "maximal", "above", 1, 2)
    engine = engine_of(target, proposer)
    engine.admit(0, "hill", 5)
    assert proposer._places_drafted().tolist() == [[1, 2, 6, 7]]
    output = observed_step(engine)
    draft = output.draft
    assert draft.codes.shape == (1, 4) and draft.unverified.depth.tolist() == [[6, 7]]
    # the same, with what is not in the pass left out of the attention of a whole sequence
    prompt = target.prompt(["hill"], 1)
    start, slots = int(prompt.start[0]), target.slots
    codes = torch.cat((draft.codes, draft.unverified.codes), 1)
    x = torch.cat((prompt.embeds, target.embed(codes)), 1)
    position = torch.cat((torch.arange(slots), slots + torch.tensor([0, 1, 2, 1, 6, 7])))[None]
    mask = torch.ones(slots + 6, slots + 6, dtype=torch.bool).tril()
    mask[:, :start] = False
    mask[slots + 3, slots + 1 :] = False  # the other code at the first place
    mask[slots + 4 :, slots + 3] = False
    mask.fill_diagonal_(True)
    features = target.decoder.forward_sequence(x, position, mask[None, None])
    torch.testing.assert_close(output.logits, target.head(features[:, slots:]))
    now = proposer._read(proposer.p, torch.tensor([[7]]))[0, 0]
    torch.testing.assert_close(now, output.logits[0, 4].softmax(-1))


@pytest.mark.parametrize("init", INITS)
def test_couplings_and_siblings_save_passes(init):
    target = ToyTarget(grid=6)

    def passes(coupling, alternatives=0):
        proposer = Jacobi(8, coupling, init, alternatives)
        engine = engine_of(target, proposer, 7)
        conditions = ["a", "sea", None, "hill", "stone", "clouds", "a"]
        return sum(
            len(sample.accepted) for sample in generate(engine, conditions, [3, 1, 4, 1 << 40, 5, 9, 2])
        )

    assert passes("maximal") < passes("none") and passes("gumbel") < passes("none")
    assert passes("maximal", 3) < passes("maximal")


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_a_draft_code_follows_the_newest_distribution_of_its_place(coupling):
    """And a coupled one stays the same with the probability 1 - TV(old, new), or (Gumbel) nearly that."""
    batch, target = 100_000, MarkovTarget(CHAIN)
    proposer = Jacobi(1, coupling)
    proposer.open(target, Sampling(), Guidance(), batch)
    seed = torch.arange(batch)
    old, new = CHAIN[0].double(), CHAIN[2].double()
    proposer.p_place[:, 1] = 1
    proposer.p[:] = old
    before = proposer.propose(Noise(seed, torch.ones_like(seed))).codes[:, 1]
    proposer.p[:] = new
    draft = proposer.propose(Noise(seed, torch.full_like(seed, 2)))
    after = draft.codes[:, 1]
    assert torch.equal(draft.probs[0, 0], new)
    assert chi_square(before.bincount(minlength=3), old) > 1e-3
    assert chi_square(after.bincount(minlength=3), new) > 1e-3
    stayed, least = (before == after).double().mean().item(), torch.minimum(old, new).sum().item()
    if coupling == "maximal":
        assert stayed == pytest.approx(least, abs=0.005)
    if coupling == "gumbel":
        assert least - 0.15 < stayed < least + 0.005
    if coupling == "none":
        assert stayed == pytest.approx((old * new).sum().item(), abs=0.005)


def test_a_new_draft_code_is_drawn_from_the_initial_distribution():
    """One pass over a grid 4 wide: the p at places 1..6 are known, the window then reaches on."""
    target, sampling = ToyTarget(), Sampling(0.8, 8)
    for init in INITS:
        proposer = Jacobi(5, "none", init)
        engine = engine_of(target, proposer, 1, sampling)
        engine.admit(0, "sea", 11)
        seen = {}
        for _ in range(6):
            count = int(engine.count[0])
            places = proposer._places_drafted()
            known = proposer._is_stored(proposer.p_place, places)[..., None]
            expected = proposer._read(proposer.p, places).where(known, proposer._initial_q(places))[0]
            for i in range(5):
                place = count + i
                if place in seen and known[0, i]:
                    assert torch.equal(expected[i], seen[place])
                elif not seen or init == "uniform":
                    assert torch.equal(expected[i], torch.full((12,), 1 / 12, dtype=torch.float64))
                elif (init == "above" or (init == "mixed" and place % 2 == 0)) and place - 4 in seen:
                    assert torch.equal(expected[i], seen[place - 4])
                else:
                    assert torch.equal(expected[i], seen[max(seen)])
            logits = observed_step(engine).logits
            seen |= {count + i: p for i, p in enumerate(sampling.probs(logits)[0])}


def test_options_are_checked_and_default_to_sjd():
    parts = Parts(StaticTree(chain(1)))
    made = Jacobi.build(parts)
    assert (made.window, made.coupling, made.init, made.size, made.depth) == (16, "none", "uniform", 17, 16)
    assert (made.alternatives, made.window_rows) == (0, 1)
    made = Jacobi.build(
        Parts(parts.tree, window=3, coupling="gumbel", init="above", alternatives=2, window_rows=4)
    )
    assert (made.window, made.coupling, made.init, made.alternatives) == (3, "gumbel", "above", 2)
    assert (made.size, made.depth) == (15, 3)
    for wrong in ((4, "minimal"), (4, "none", "old")):
        with pytest.raises(InputError):
            Jacobi(*wrong)
    for said, made in (
        ("the model has 3 codes; use fewer", Jacobi(2, alternatives=3)),
        ("2 rows", Jacobi(2, window_rows=3)),
    ):
        rejects(said, made.open, MarkovTarget(CHAIN), Sampling(), Guidance(), 1)
    for dials in ({"window": 0}, {"window": 4, "alternatives": -1}, {"window": 4, "window_rows": 0}):
        rejects("drafts nothing", Jacobi, **dials)
