"""The shipped model: that it draws, and that what holds on toys holds on it."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch

from lanternpp import InputError, Pipeline
from lanternpp.api.model import model_folder
from lanternpp.engine.decode import Engine
from lanternpp.engine.noise import Noise
from lanternpp.engine.verify.tokenwise import verify_tokenwise
from lanternpp.models.base import PromptWarning
from lanternpp.types import Draft

PROMPTS = [
    "a photo of a red tulip",
    "a photo of the sea at sunset",
    "a photo of a forest",
    "a photo of a sunflower",
]


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
    return pipe.engine(pipe.settings(method, batch_size=batch, **overrides))


def test_greedy_exact_equals_greedy_ar_code_by_code() -> None:
    ar = first_codes(engine("float64", "ar", temperature=0.0), PROMPTS[:1], [0], 40)
    drafted = first_codes(engine("float64", "eagle", temperature=0.0), PROMPTS[:1], [0], 40)
    assert torch.equal(ar, drafted)


@pytest.mark.parametrize(("method", "tree"), [("ar", None), ("lantern++", "chain-12")])
def test_a_batch_of_four_equals_four_runs_of_one(method: str, tree: str | None) -> None:
    together = first_codes(engine("float64", method, batch=4, tree=tree), PROMPTS, [3, 4, 5, 6], 20)
    alone = [
        first_codes(engine("float64", method, tree=tree), [p], [s], 20)[0]
        for p, s in zip(PROMPTS, range(3, 7), strict=True)
    ]
    assert torch.equal(together, torch.stack(alone))


@pytest.mark.parametrize(
    "overrides", [{"accept": "lantern", "delta": 0.0}, {"accept": "lantern++", "lam": 1.0}]
)
def test_dials_at_zero_give_the_codes_of_exact(overrides: dict[str, object]) -> None:
    exact = first_codes(engine("float32", "lantern++", accept="exact"), PROMPTS[:1], [1], 60)
    relaxed = first_codes(engine("float32", "lantern++", neighbours=100, **overrides), PROMPTS[:1], [1], 60)
    assert torch.equal(exact, relaxed)


def test_a_picture_does_not_depend_on_its_neighbours_in_the_batch() -> None:
    one = first_codes(engine("auto", "lantern++", batch=3), PROMPTS[:3], [7, 8, 9], 48)
    other = first_codes(
        engine("auto", "lantern++", batch=3), [PROMPTS[3], PROMPTS[1], PROMPTS[3]], [1, 8, 2], 48
    )
    assert torch.equal(one[1], other[1])


def test_the_distribution_of_the_next_code_is_the_targets() -> None:
    """Real p and real q: 40,000 verifications of one draft node, children drawn anew each time."""
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
    assert 0.1 < torch.minimum(p, q).sum() < 0.99  # a draft worth testing: neither hopeless nor perfect
    counts = torch.zeros_like(p)
    for part in range(20):
        noise = Noise(torch.arange(2000) + 2000 * part, torch.ones(2000, dtype=torch.int64))
        child = loop.sampling.children(q.float().expand(2000, 1, -1), 1, noise, Noise.DRAFT)[:, 0, 0]
        codes = draft.codes.repeat(2000, 1)
        codes[:, 1] = child
        tree = type(draft.tree)(
            *(x.repeat(2000, *[1] * (x.dim() - 1)) for x in (draft.tree.parent, draft.tree.depth)),
            draft.tree.children.repeat(2000, 1, 1),
            draft.tree.mask.repeat(2000, 1, 1),
            draft.tree.widths[:1],
        )
        many = Draft(tree, codes, q.float().expand(2000, codes.shape[1], -1))
        verdict = verify_tokenwise(many, logits.expand(2000, -1, -1), loop.sampling, loop.rule, noise)
        counts += torch.bincount(verdict.next_codes[:, 0], minlength=len(p))
    order = p.argsort(descending=True)
    cells = torch.cat((torch.arange(60), torch.full((len(p) - 60,), 60)))  # the likeliest codes, and the rest
    cells = torch.where(torch.arange(len(p)) < 60, cells, 60 + (torch.arange(len(p)) % 20))
    expected = torch.zeros(80, dtype=torch.float64).index_add_(0, cells, p[order]) * counts.sum()
    seen = torch.zeros(80, dtype=torch.float64).index_add_(0, cells, counts[order].double())
    statistic = ((seen - expected).square() / expected).sum()
    assert expected.min() > 5
    assert statistic < 79 + 4 * (2 * 79) ** 0.5, f"chi-square {statistic:.1f} on 79 degrees of freedom"


def test_the_same_seed_gives_the_same_picture_and_another_seed_another() -> None:
    pipe = pipeline("auto")
    one, again, other = (pipe(PROMPTS[0], seed=seed).images[0].tobytes() for seed in (5, 5, 6))
    assert one == again
    assert one != other


def test_picture_i_has_seed_plus_i() -> None:
    pipe = pipeline("auto")
    pair = pipe(PROMPTS[0], n=2, seed=5, batch_size=1)
    assert pair.images[1].tobytes() == pipe(PROMPTS[0], seed=6, batch_size=1).images[0].tobytes()


def test_stats_add_up() -> None:
    stats = pipeline("auto")(PROMPTS[1], n=2, seed=1).stats
    assert stats.images == 2 and stats.codes == 512 == sum(stats.accepted_per_pass)
    assert stats.passes == len(stats.accepted_per_pass)
    assert stats.codes_per_pass == pytest.approx(512 / stats.passes)
    assert stats.codes_per_pass > 2


def test_red_tulips_are_redder_than_forests() -> None:
    pipe = pipeline("auto")
    tulip, forest = (
        torch.stack(
            [
                torch.tensor(list(i.convert("RGB").resize((1, 1)).getpixel((0, 0))))
                for i in pipe(p, n=4).images
            ]
        )
        for p in ("a photo of a red tulip", "a photo of a forest")
    )
    redness = [(x[:, 0] - x[:, 1]).float().mean() for x in (tulip, forest)]
    assert redness[0] > redness[1] + 10


def test_unknown_words_are_named_and_the_known_ones_listed() -> None:
    with pytest.warns(PromptWarning, match="zebra.*tulip"):
        pipeline("auto").target.prompt(["a photo of a zebra on a tulip"], 1)


def test_plurals_are_understood() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline("auto").target.prompt(["a photo of red tulips"], 1)


def test_common_words_are_read_as_the_models_own_and_said_so() -> None:
    target = pipeline("auto").target
    for word, known in (("ocean", "sea"), ("rivers", "sea"), ("flowers", "tulip"), ("woods", "forest")):
        with pytest.warns(PromptWarning, match=f"this model reads {word} as {known}$"):
            ids = target.word_ids(f"a photo of the blue {word}")
        assert ids == target.word_ids(f"a photo of the blue {known}")
    assert set(target.synonyms.values()) <= set(target.config.words)
    assert not target.synonyms.keys() & set(target.config.words)


def test_an_emoji_is_warned_of_and_punctuation_is_not() -> None:
    target = pipeline("auto").target
    with pytest.warns(PromptWarning, match="are ignored: 🌷, ❤️, zebra;"):
        ids = target.word_ids("a red-tulip 🌷, (of!) & the ❤️ zebra...")
    assert ids == target.word_ids("red tulip")


@pytest.mark.parametrize("prompt", ["zebra " * 2000, "z" * 10_000, "tulip " * 2000])
def test_a_very_long_prompt_has_a_short_refusal(prompt: str) -> None:
    with pytest.raises(InputError) as refusal:
        pipeline("auto").target.word_ids(prompt)
    assert len(str(refusal.value)) < 300


def test_a_very_long_prompt_has_a_short_warning() -> None:
    with pytest.warns(PromptWarning, match="zebra0, .* and 1988 more; it knows") as reported:
        pipeline("auto").target.word_ids("tulip " + " ".join(f"zebra{i}" for i in range(2000)) + "z" * 9000)
    assert len(str(reported[0].message)) < 600


@pytest.mark.parametrize(
    ("call", "names"),
    [
        ({"prompt": "a photo of a zebra"}, "daisy.*tulip"),
        ({"prompt": "  "}, "empty"),
        ({"n": 0}, "n 0"),
        ({"seed": -1}, "seed -1"),
        ({"method": "lantern+"}, "lantern[+][+]"),
        ({"temperature": -1.0}, "temperature -1"),
        ({"cfg": 0.5}, "cfg 0.5"),
        ({"top_p": 0.0}, "top_p 0"),
        ({"top_k": 5000}, "top-k 5000"),
        ({"neighbours": 4096}, "4096 neighbours.*4095"),
        ({"lam": 0.5}, "lambda 0.5"),
        ({"method": "lantern", "delta": 2.0}, "delta 2"),
        ({"tree": "oak"}, "tree 'oak'"),
        ({"accept": "always"}, "rule 'always'"),
        ({"batch_size": 0}, "batch_size 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_sentence(call: dict[str, object], names: str) -> None:
    with pytest.raises(InputError, match=names) as refusal:
        pipeline("auto")(**{"prompt": PROMPTS[0], **call})
    assert "\n" not in str(refusal.value)


def test_it_ships_in_45_megabytes() -> None:
    files = [path for path in model_folder("nature-128").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 45_000_000
