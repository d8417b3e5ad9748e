"""The shipped model: that it draws, with the properties that other tests check on toys."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers.distributions import chi_square

from lanternpp import InputError, Pipeline
from lanternpp.engine.decode import Engine
from lanternpp.engine.noise import Noise
from lanternpp.engine.verify.tokenwise import verify_tokenwise
from lanternpp.models.base import PromptWarning
from lanternpp.trees.static import chain_tree
from lanternpp.types import Draft

PROMPTS = ["a photo of a red tulip", "a photo of the sea at sunset"]


@functools.cache
def pipeline(dtype: str) -> Pipeline:
    return Pipeline.from_pretrained("nature-128", device="cpu", dtype=dtype)


def first_codes(engine: Engine, prompts: list[str], seeds: list[int], count: int) -> torch.Tensor:
    """The first `count` codes of each sample, all admitted at once."""
    for slot, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        engine.admit(slot, prompt, seed)
    while int(engine.count[: len(prompts)].min()) < count:
        engine.step()
    return engine.codes[: len(prompts), :count].clone()


def engine(dtype: str, method: str, batch: int = 1, **overrides: object) -> Engine:
    pipe = pipeline(dtype)
    return pipe.new_engine(pipe.settings(method, batch_size=batch, **overrides))


def test_the_distribution_of_the_next_code_is_the_targets() -> None:
    """Real p and real q: 10,000 verifications of one draft node, children drawn anew each time."""
    loop = engine("float32", "eagle", tree="chain-2")
    first_codes(loop, PROMPTS[:1], [0], 70)
    pipe, proposer = pipeline("float32"), loop.proposer
    with torch.inference_mode():
        draft = proposer.propose(loop.noise)
        rows = loop.guidance.rows
        nodes = loop.cache.nodes(rows(draft.tree.depth), rows(draft.tree.mask))
        features = pipe.target(rows(pipe.target.embed(draft.codes)), nodes, loop.cache)
        logits = loop.guidance.merge(pipe.target.head(features))
    p, q = loop.sampling.probs(logits)[0, 0].double(), draft.probs[0, 0].double()
    assert 0.1 < torch.minimum(p, q).sum() < 0.99  # the draft is neither always nor never accepted
    counts, row = torch.zeros_like(p), q.float().expand(2000, 1, -1)
    for part in range(5):
        noise = Noise(torch.arange(2000) + 2000 * part, torch.ones(2000, dtype=torch.int64))
        child = loop.sampling.children(row, 1, noise, Noise.DRAFT)[:, 0]
        codes = torch.cat((draft.codes[:, :1].expand(2000, -1), child), 1)
        many = Draft(chain_tree(2000, 1, codes.device), codes, row.expand(-1, 2, -1))
        verdict = verify_tokenwise(many, logits[:, :2].expand(2000, -1, -1), loop.sampling, loop.rule, noise)
        counts += torch.bincount(verdict.next_codes[:, 0], minlength=len(p))
    assert chi_square(counts, p) > 1e-3


def test_its_drafter_saves_more_than_half_of_the_passes() -> None:
    assert pipeline("auto")(PROMPTS[1], n=2, seed=1).stats.codes_per_pass > 2


def test_synonyms_are_replaced_with_a_warning() -> None:
    target = pipeline("auto").target
    for word, known in (("ocean", "sea"), ("rivers", "sea"), ("flowers", "tulip"), ("woods", "forest")):
        with pytest.warns(PromptWarning, match=f"this model reads {word} as {known}$"):
            ids = target.word_ids(f"a photo of the blue {word}")
        assert ids == target.word_ids(f"a photo of the blue {known}")
    assert set(target.synonyms.values()) <= set(target.config.words)
    assert not target.synonyms.keys() & set(target.config.words)


def test_emojis_warn_and_plurals_and_punctuation_do_not() -> None:
    target = pipeline("auto").target
    with pytest.warns(PromptWarning, match="are ignored: 🌷, ❤️, zebra;.* tulip") as reported:
        ids = target.word_ids("red-tulips 🌷, (of!) & the ❤️ zebra...")
    assert ids == target.word_ids("red tulip") and len(reported) == 1


@pytest.mark.parametrize("prompt", ["zebra " * 2000, "z" * 10_000, "tulip " * 2000])
def test_a_very_long_prompt_has_a_short_error(prompt: str) -> None:
    with pytest.raises(InputError) as error:
        pipeline("auto").target.word_ids(prompt)
    assert len(str(error.value)) < 300


def test_a_very_long_prompt_has_a_short_warning() -> None:
    with pytest.warns(PromptWarning, match="zebra0, .* and 1988 more; it knows") as reported:
        pipeline("auto").target.word_ids("tulip " + " ".join(f"zebra{i}" for i in range(2000)) + "z" * 9000)
    assert len(str(reported[0].message)) < 600
