"""`accelerate` and `custom_generate` beside transformers' own `generate` of the same model."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cases import CASES, PROMPTS, Case, emu3
from helpers.distributions import chi_square
from helpers.families import CODES, LANGUAGE, with_drafters, write_janus
from helpers.processes import SECONDS
from helpers.refusals import rejects
from torch import Tensor
from transformers import (
    ChameleonForConditionalGeneration,
    GemmaConfig,
    GemmaForCausalLM,
    GenerationConfig,
    LogitsProcessorList,
    Qwen2Config,
    Qwen2ForCausalLM,
    TextStreamer,
)
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    MaxTimeCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import lanternpp
from lanternpp import InputError, Pipeline
from lanternpp.api import accelerate, fit
from lanternpp.api.accelerate import CACHES, adapter_of, held
from lanternpp.api.fit import Fit
from lanternpp.api.rates import Counts


def test_a_sequence_ends_where_a_token_ends_it(made: Callable[[str], Case]) -> None:
    """Each of a batch at another place, with padding after it, as in transformers."""
    case = made("glm-image")
    given = case.inputs(3) | {"do_sample": False}
    whole = case.model.generate(**given)[:, -19:]
    ends = [int(whole[0, 5]), int(whole[1, 9])]
    given |= {"eos_token_id": ends, "pad_token_id": 90}
    calls = [given, given | {"suppress_tokens": ends}]
    expected = [case.model.generate(**call) for call in calls]
    assert (expected[0] == 90).any()
    lanternpp.accelerate(case.model)
    for call, sequences in zip(calls, expected, strict=True):
        assert torch.equal(case.model.generate(**call), sequences)


@pytest.mark.parametrize("name", ["emu3", "glm-image"])
def test_several_sequences_of_a_prompt_have_the_same_positions(
    made: Callable[[str], Case], name: str
) -> None:
    """transformers repeats the rows of every tensor, also of GLM-Image's grids, of which a prompt has two."""
    case = made(name)
    given = case.inputs(2)
    expected = case.model.generate(**given, do_sample=False)
    lanternpp.accelerate(case.model)
    drawn = case.model.generate(**given, do_sample=True, top_k=1, num_return_sequences=2)
    assert torch.equal(drawn, expected.repeat_interleave(2, 0))


def janus_logits(model: Any, prompt: Any, codes: Tensor) -> Tensor:
    """[n, V] after a prompt of Janus and codes [n, k], by a plain loop over its layers."""
    embeds = model.get_input_embeddings()(torch.as_tensor(prompt)).expand(len(codes), -1, -1)
    if codes.numel():
        embeds = torch.cat((embeds, model.prepare_embeddings_for_image_generation(codes)), 1)
    features = model.model.language_model(inputs_embeds=embeds).last_hidden_state[:, -1]
    logits: Tensor = model.model.generation_head(features)
    return logits


def test_janus_without_guidance_draws_the_argmax(made: Callable[[str], Case]) -> None:
    """transformers' own loop fails at guidance 1."""
    case = made("janus")
    given = case.inputs(1) | {"guidance_scale": 1.0, "do_sample": False}
    drawn = lanternpp.accelerate(case.model).generate(**given)
    for place, code in enumerate(drawn[0]):
        assert janus_logits(case.model, given["input_ids"][0], drawn[:, :place]).argmax() == code


@pytest.mark.parametrize("name", ["chameleon", "liquid", "simplear"])
def test_a_model_draws_a_square_where_it_is_asked_for_a_picture(
    made: Callable[[str], Case], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And writes as usual where it is not. transformers' class of Chameleon never draws."""
    case, picture = made(name), {"generation_mode": "image"}
    given = case.inputs(2) | case.negative(2)
    expected = case.model.generate(**given, do_sample=False)
    if name == "chameleon":
        monkeypatch.setattr(case.model, "__class__", ChameleonForConditionalGeneration)
    del given["prefix_allowed_tokens_fn"], given["max_new_tokens"]
    text = case.model.generate(**given, max_new_tokens=3, do_sample=False)
    signature = inspect.signature(case.model.generate)
    lanternpp.accelerate(case.model)
    assert inspect.signature(case.model.generate) == signature
    for greedy in ({"do_sample": False}, {"generation_config": GenerationConfig(do_sample=False)}):
        assert torch.equal(case.model.generate(**given, **picture, **greedy), expected)
    assert torch.equal(case.model.generate(**given, max_new_tokens=3, do_sample=False), text)
    relaxed = given | picture | {"method": "lantern-jacobi", "neighbours": 5}
    if name == "liquid":  # whose codebook is in a file of its own
        rejects("has no codebook", case.model.generate, **relaxed)
        rejects("has no codebook", lanternpp.accelerate, case.model, method="lantern-jacobi")
    else:
        assert case.model.generate(**relaxed).shape == expected.shape


SQUARE = {"prefix_allowed_tokens_fn": None, "generation_mode": "image"}


@pytest.mark.parametrize(
    ("name", "more"), [("janus", {}), ("emu3", {}), ("glm-image", {}), ("liquid", {}), ("liquid", SQUARE)]
)
def test_suppressed_codes_are_never_drawn_and_to_suppress_all_is_rejected(
    made: Callable[[str], Case], name: str, more: dict[str, Any]
) -> None:
    case = made(name)
    codes = list(adapter_of(case.model).codes)
    generate = functools.partial(lanternpp.accelerate(case.model).generate, **case.inputs(1) | more)
    drawn = generate(suppress_tokens=codes[:5] + codes[6:], do_sample=True)
    assert set(drawn[0, -16:].tolist()) & set(codes) == {codes[5]}
    rejects("suppress_tokens allows no token at all at some place", generate, suppress_tokens=codes)


def test_a_dial_for_complete_pictures_is_lowered_for_a_shorter_call(made: Callable[[str], Case]) -> None:
    case = made("chameleon")
    given = case.inputs(1) | {"do_sample": False, "max_new_tokens": 7}
    expected = case.model.generate(**given)
    lanternpp.accelerate(case.model, method="jacobi-coupled", window=2, window_rows=2)
    assert torch.equal(case.model.generate(**given), expected)


def test_published_language_models_are_recognised_by_their_number_of_tokens() -> None:
    small = {**LANGUAGE, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    for model, first, side in (
        (GemmaForCausalLM(GemmaConfig(vocab_size=264_192, head_dim=4, **small)), 256_000, 32),
        (Qwen2ForCausalLM(Qwen2Config(vocab_size=215_672, **small)), 151_672, 64),
    ):
        target: Any = adapter_of(model)
        assert (target.codes[0], target.codes[-1]) == (first, model.config.vocab_size - 1)
        assert target.num_square_codes == side * side
    assert target.codebook.shape == (64_000, 6)
    plain = Qwen2ForCausalLM(Qwen2Config(vocab_size=151_936, **small))
    rejects("Qwen2ForCausalLM of 151936 tokens has no 64000 codes", lanternpp.accelerate, plain)


def test_custom_generate_is_a_hook_of_transformers(made: Callable[[str], Case]) -> None:
    """Without `accelerate`: by the function, and by the folder for a hub."""
    hub = str(Path(__file__).parents[3] / "integrations" / "transformers")
    ours = {"custom_generate": lanternpp.custom_generate, "window": 5}
    for name in ("emu3", "janus"):
        case = made(name)
        given = case.inputs(2) | {"do_sample": False}
        expected = case.model.generate(**given)
        given |= {"max_length": 12} if given.pop("generation_mode", None) else {}  # has no effect on Janus
        for hook in (ours, {"custom_generate": hub, "trust_remote_code": True, "method": "ar"}):
            assert torch.equal(case.model.generate(**given, **hook), expected), name


@pytest.mark.parametrize("name", ["janus", "emu3", "chameleon", "glm-image", "simplear"])
def test_the_distribution_of_the_first_codes_is_that_of_transformers(
    made: Callable[[str], Case], name: str
) -> None:
    """Temperature, top-k and top-p of a call, guidance, accepted and rejected drafts: three codes, enumerated."""
    case, count, depth = made(name), 400, 3
    given = case.inputs(1) | case.negative(1)
    given |= {"do_sample": True, "temperature": 1.3, "top_k": 3, "top_p": 0.95}
    if name == "janus":
        given["guidance_scale"] = 2.0
    else:
        given["max_new_tokens"] = depth
    if name == "glm-image":
        given["suppress_tokens"] = list(range(CODES, CODES + 4))  # none ends the sequence
    scores = functools.partial(janus_scores if name == "janus" else generate_scores, case, given)
    distribution = {(): 1.0}
    for _ in range(depth):
        paths = list(distribution)
        chances = scores(paths).softmax(-1)
        distribution = {
            (*path, int(token)): distribution[path] * float(chances[row, token])
            for row, path in enumerate(paths)
            for token in chances[row].nonzero()
        }
    lanternpp.accelerate(case.model, method="jacobi", window=4)
    torch.manual_seed(5)
    drawn = case.model.generate(**repeated(given, count))
    assert case.model.generate.codes_per_pass > 1  # some draft codes were accepted
    codes = drawn[:, :depth] if name == "janus" else drawn[:, -depth:]
    counts = torch.tensor([int((codes == torch.tensor(path)).all(1).sum()) for path in distribution])
    assert int(counts.sum()) == count and len(distribution) > 9
    assert chi_square(counts, torch.tensor(list(distribution.values()))) > 1e-3


def repeated(given: dict[str, Any], count: int) -> dict[str, Any]:
    """The arguments for one prompt, for so many of it."""
    return {
        name: value.repeat(count, *[1] * (value.dim() - 1)) if isinstance(value, Tensor) else value
        for name, value in given.items()
    }


def generate_scores(case: Case, given: dict[str, Any], paths: list[tuple[int, ...]]) -> Tensor:
    """[n, V] by transformers' own `generate` after every path, which `prefix_allowed_tokens_fn` forces, a row of the batch each."""
    model, prompt, level = case.model, given["input_ids"].shape[1], len(paths[0])
    tokens = model.lm_head.out_features
    allowed = given.get("prefix_allowed_tokens_fn", lambda row, before: range(tokens))

    def forced(row: int, before: Tensor) -> Any:
        place = len(before) - prompt
        return [paths[row][place]] if place < level else allowed(row, before)

    call = repeated(given, len(paths)) | {"prefix_allowed_tokens_fn": forced, "max_new_tokens": level + 1}
    scores: Tensor = model.generate(**call, output_scores=True, return_dict_in_generate=True).scores[level]
    return scores


def janus_scores(case: Case, given: dict[str, Any], paths: list[tuple[int, ...]]) -> Tensor:
    """The same of Janus, whose `generate` forces no tokens."""
    row, codes = case.rows[0], torch.tensor(paths, dtype=torch.int64)
    kind = janus_logits(case.model, row, codes)
    none = janus_logits(case.model, [row[0], *[1] * (len(row) - 2), row[-1]], codes)
    scores = (none + given["guidance_scale"] * (kind - none)).detach() / given["temperature"]
    for warper in (TopKLogitsWarper(given["top_k"]), TopPLogitsWarper(given["top_p"])):
        scores = warper(None, scores)
    return scores


def test_a_seed_or_a_generator_decides_the_picture(made: Callable[[str], Case]) -> None:
    case = made("janus")
    given = case.inputs(2)
    lanternpp.accelerate(case.model)

    def drawn(**more: Any) -> Tensor:
        found: Tensor = case.model.generate(**given, do_sample=True, **more)
        return found

    torch.manual_seed(1)
    first, second = drawn(), drawn()
    torch.manual_seed(1)
    assert torch.equal(drawn(), first) and not torch.equal(first, second)
    one, other = (drawn(generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, other) and not torch.equal(one[0], one[1])
    seen: list[Any] = []
    torch.manual_seed(1)
    assert torch.equal(drawn(callback=seen.append), first)
    assert seen[-1].decided == seen[-1].total == 32 and torch.equal(torch.stack(seen[-1].codes), first)
    with pytest.raises(InputError, match="pixels are made by the transformers model"):
        _ = seen[0].images
    several = drawn(num_return_sequences=2, return_dict_in_generate=True)
    assert isinstance(several, GenerateDecoderOnlyOutput) and several.sequences.shape == (4, 16)


@pytest.mark.parametrize("name", CASES)
def test_accelerate_copies_no_weights(made: Callable[[str], Case], name: str) -> None:
    model = made(name).model
    held = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    target = adapter_of(model)
    assert {x.untyped_storage().data_ptr() for x in target.parameters()} <= held
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(isinstance(value, torch.nn.Module) for value in vars(lanternpp.accelerate(model)).values())


@pytest.mark.parametrize("name", ["janus", "emu3"])
def test_drafters_of_an_accelerated_model_draw_as_in_the_pipeline(
    made: Callable[[str], Case], name: str
) -> None:
    """The same codes from the same seeds, with the drafters that a training makes: features, codes and positions agree."""
    case = made(name)
    folder = Path(case.model.name_or_path)
    for drafter in with_drafters(folder, "drafters", (0,)).iterdir():
        pipe = Pipeline.from_pretrained(folder, drafter, device="cpu", dtype="float64")
        target: Any = pipe.target
        given = case.call(target, ["red sea"], 3.0)
        torch.manual_seed(9)
        seed = int(torch.randint(2**63 - 1, (1,)))
        expected = pipe("red sea", seed=seed, cfg=3.0, top_k=8, temperature=1.0)
        torch.manual_seed(9)
        lanternpp.accelerate(case.model, drafter=drafter)
        drawn = case.model.generate(**given, do_sample=True, top_k=8)
        tokens = expected.codes if name == "janus" else target.token_ids(expected.codes)
        assert torch.equal(case.tokens(drawn, given, target), tokens)
        assert case.model.generate.codes_per_pass == pytest.approx(expected.stats.codes_per_pass)
    lanternpp.accelerate(case.model, method="lantern-jacobi", neighbours=5, lam=4.0)
    assert case.model.generate(**given, do_sample=True, top_k=8).shape[0] == 1


@pytest.mark.parametrize("name", ["janus", "emu3", "glm-image"])
def test_drafts_of_an_accelerated_model_are_fitted_to_the_machine(
    made: Callable[[str], Case], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = made(name)
    monkeypatch.delenv("LANTERNPP_FIT")
    monkeypatch.setattr(fit, "user_cache", lambda: tmp_path / "cache")
    monkeypatch.setattr(fit, "SECONDS", 60.0)  # a loaded machine has the time to measure every window
    monkeypatch.setattr(fit, "disturbed", lambda steps: False)
    every = Counts(((8.0,) * 4,) * 16, ((8.0,) * 4,) * 16, 1000)  # every draft code is accepted
    monkeypatch.setattr(Fit, "counts", lambda self, settings: every)
    given = case.inputs(2) | {"do_sample": True}
    lanternpp.accelerate(case.model, method="jacobi-coupled")
    drawn = case.model.generate(**given)
    (steps,) = held(case.model, None)._fit.store.steps.values()
    assert {"plain", "window-16", "window-4"} <= steps.keys()
    assert len(drawn) == len(case.model.generate(**given)) == 2


def adapted(inner: torch.nn.Linear) -> torch.nn.Module:
    """A linear layer with another one before it, as an adapter is no `Linear`."""
    torch.manual_seed(4)
    before = torch.nn.Linear(inner.in_features, inner.in_features, dtype=inner.weight.dtype)
    return torch.nn.Sequential(before, inner)


def test_adapters_and_later_changes_take_effect(tmp_path: Path) -> None:
    """Nothing of the layers, the head or the embeddings was copied, and replaced modules are not kept."""
    case = emu3(tmp_path)
    model, given = case.model, case.inputs(1) | {"do_sample": False}
    lanternpp.accelerate(model)
    before, body = model.generate(**given), copy.deepcopy(model.model.text_model)
    head = model.lm_head
    attention, mlp = model.model.text_model.layers[0].self_attn, model.model.text_model.layers[1].mlp
    embeddings = torch.nn.Embedding(*model.get_input_embeddings().weight.shape, dtype=torch.float64)
    for change in (
        lambda: setattr(attention, "q_proj", adapted(attention.q_proj)),
        lambda: mlp.up_proj.weight.data.neg_(),
        lambda: setattr(head, "forward", lambda x: torch.nn.functional.linear(-x, head.weight)),
        lambda: head.register_forward_hook(lambda module, given, out: 1 / out),
        lambda: head.register_forward_pre_hook(lambda module, given: (given[0].flip(-1),)),
        lambda: setattr(model, "lm_head", adapted(model.lm_head)),
        lambda: model.set_input_embeddings(embeddings),
        lambda: setattr(model.model, "text_model", body),
    ):
        change()
        expected = type(model).generate(model, **given)
        assert not torch.equal(before, expected)
        before = model.generate(**given)
        assert torch.equal(before, expected)


def test_weights_in_8_bits_by_torchao_are_used_as_they_are(tmp_path: Path) -> None:
    """Every linear layer, the head among them."""
    from torchao import quantization

    case = emu3(tmp_path)
    model, given = case.model.float(), case.inputs(2) | case.negative(2) | {"do_sample": False}
    exact = model.generate(**given)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    expected = model.generate(**given)
    assert not torch.equal(expected, exact)
    lanternpp.accelerate(model, window=5)
    assert torch.equal(model.generate(**given), expected)
    assert model.generate.codes_per_pass > 1


@pytest.mark.parametrize("name", ["janus", "emu3", "glm-image", "liquid"])
def test_another_thread_may_run_the_model_during_a_pass(made: Callable[[str], Case], name: str) -> None:
    """Its results are the same bits as without a pass, and so are the codes of the draw."""
    case = made(name)
    model, given, here = case.model, case.inputs(2) | {"do_sample": False}, threading.get_ident()
    body = adapter_of(model).decoder.body
    plain = functools.partial(body, inputs_embeds=model.get_input_embeddings()(given["input_ids"]))
    expected, features, seen = model.generate(**given), plain(output_hidden_states=True), []

    def meanwhile(*_: Any) -> None:
        if threading.get_ident() == here:
            seen.append(pool.submit(plain, output_hidden_states=True).result(SECONDS))

    hook = body.layers[0].mlp.register_forward_hook(meanwhile)
    try:
        with ThreadPoolExecutor(1) as pool:
            drawn = lanternpp.accelerate(model, window=5).generate(**given)
        assert torch.equal(drawn, expected)
    finally:
        hook.remove()
    assert len(seen) > 3
    for other in seen:
        assert torch.equal(other.last_hidden_state, features.last_hidden_state)
        assert len(other.hidden_states) == len(features.hidden_states)


def test_threads_generate_as_usual_while_one_draws(made: Callable[[str], Case]) -> None:
    case = made("emu3")
    model, given = case.model, case.inputs(2) | {"do_sample": False}
    text = {**case.inputs(3), "max_new_tokens": 12, "do_sample": False, "prefix_allowed_tokens_fn": None}
    usual, picture = functools.partial(type(model).generate, model), model.generate(**given)
    expected = usual(**text)
    lanternpp.accelerate(model, window=5)
    with ThreadPoolExecutor(3) as pool:
        drawn = [pool.submit(model.generate, **given) for _ in range(4)]
        texts = [pool.submit(call, **text) for call in (usual, model.generate) for _ in range(10)]
        assert all(torch.equal(one.result(SECONDS), picture) for one in drawn)
        assert all(torch.equal(one.result(SECONDS), expected) for one in texts)


def test_a_call_keeps_the_pipeline_that_another_thread_releases(
    made: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, usual = made("emu3").model, accelerate.made_for
    expected = held(model, None)
    with ThreadPoolExecutor(1) as pool:

        def meanwhile(*args: Any) -> tuple[Any, ...]:
            wait([pool.submit(lanternpp.restore, model)], 0.2)
            return usual(*args)

        monkeypatch.setattr(accelerate, "made_for", meanwhile)
        assert held(model, None) is expected
    assert not hasattr(model, accelerate.HELD)


def test_glm_image_rejects_a_prompt_with_the_codes_of_a_picture(made: Callable[[str], Case]) -> None:
    case = made("glm-image")
    lanternpp.accelerate(case.model, window=5)
    shown = torch.tensor([[70, CODES, *range(6), CODES + 1, 72, CODES]])
    grids = torch.tensor([[1, 2, 3], [1, 4, 3]])
    with pytest.raises(InputError, match="drafts are for text alone; give pixel_values"):
        case.model.generate(input_ids=shown, image_grid_thw=grids, images_per_sample=torch.tensor([2]))
    given = {"input_ids": shown[:, -2:], "image_grid_thw": grids[:0], "max_new_tokens": 3}
    assert case.model.generate(**given).shape == (1, 5)  # no grid: any tokens, at positions of text


def test_a_draw_does_not_change_the_positions_of_another_call(made: Callable[[str], Case]) -> None:
    """GLM-Image keeps them in the model; here a picture of another size is drawn in the middle of a plain call."""
    case = made("glm-image")
    model, given = case.model, case.inputs(1) | {"do_sample": False, "max_new_tokens": 8}
    given |= {"output_logits": True, "return_dict_in_generate": True}
    given["suppress_tokens"] = list(range(CODES, CODES + 4))  # none ends the sequence
    usual = functools.partial(type(model).generate, model)
    expected = usual(**given).logits
    other = case.inputs(1) | {"image_grid_thw": torch.tensor([[1, 2, 6], [1, 1, 6]]), "do_sample": False}
    lanternpp.accelerate(model, window=5)

    def drawing(ids: Tensor, scores: Tensor) -> Tensor:
        model.generate(**other)
        return scores

    found = usual(**given, logits_processor=LogitsProcessorList([drawing])).logits
    assert all(torch.equal(*logits) for logits in zip(found, expected, strict=True))


def test_a_replaced_forward_is_run_and_another_attention_is_rejected(tmp_path: Path) -> None:
    """As hooks of accelerate replace it."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Doubled(ModelHook):
        def post_forward(self, module: Any, output: Any) -> Any:
            return (2 * output[0], output[1])

    case = emu3(tmp_path)
    model, given = case.model, case.inputs(2) | {"do_sample": False}
    before, layers = model.generate(**given), model.model.text_model.layers
    add_hook_to_module(layers[0].self_attn, Doubled())
    expected = model.generate(**given)
    assert not torch.equal(before, expected)
    lanternpp.accelerate(model, window=5)
    layers[1].compile(backend="eager")
    assert torch.equal(model.generate(**given), expected)
    layers[1].self_attn.forward = lambda hidden_states, **more: (hidden_states, None)
    rejects("1 of 2 layers do not use the attention functions of transformers", model.generate, **given)


def test_a_model_may_be_cast_after_a_draw(tmp_path: Path) -> None:
    case = emu3(tmp_path)
    model, given = case.model, case.inputs(2) | {"do_sample": False}
    drafter = with_drafters(tmp_path, "drafters", (0,)) / "parallel"
    for method in ({"method": "jacobi", "window": 5}, {"drafter": drafter}):
        lanternpp.accelerate(model, **method)
        for cast in (lambda: model.to(torch.bfloat16), model.double):
            cast()
            other = lanternpp.accelerate(lanternpp.restore(copy.deepcopy(model)), **method)
            assert torch.equal(model.generate(**given), other.generate(**given)), method
            assert model.generate.codes_per_pass == other.generate.codes_per_pass > 1
        assert torch.equal(model.generate(**given), type(model).generate(model, **given))


def test_autocast_does_not_change_what_a_model_in_float32_draws(tmp_path: Path) -> None:
    case = emu3(tmp_path)
    model, given = case.model.float(), case.inputs(2) | {"do_sample": False}
    expected = model.generate(**given)
    lanternpp.accelerate(model, window=5)
    pipe = Pipeline.from_pretrained(str(tmp_path), device="cpu", dtype="float32")
    plain = pipe(PROMPTS[1], method="ar", output_type="pt").images
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model.generate(**given), expected)
        assert torch.equal(pipe(PROMPTS[1], method="ar", output_type="pt").images, plain)


def test_weights_that_accelerate_loads_for_a_pass_are_loaded_before_a_draw(tmp_path: Path) -> None:
    """As from the CPU to a GPU, here from one dtype to another; weights that are loaded layer by layer are rejected."""
    from accelerate import cpu_offload
    from accelerate.hooks import ModelHook, add_hook_to_module

    class CastBefore(ModelHook):
        def pre_forward(self, module: Any, *given: Any, **more: Any) -> Any:
            module.double()
            return given, more

    case = CASES["glm-image"](tmp_path)
    model, given = case.model, case.inputs(1) | {"do_sample": False}
    expected = model.generate(**given)
    lanternpp.accelerate(add_hook_to_module(model, CastBefore()), window=5)
    model.model.vqmodel.float()
    model.lm_head.float()
    assert torch.equal(model.generate(**given), expected)
    cpu_offload(model, execution_device="cpu")
    rejects("the model lies on .*meta; load it on one device", model.generate, **given)


@pytest.mark.gpu
def test_a_model_may_be_moved_after_a_draw(tmp_path: Path) -> None:
    case = emu3(tmp_path)
    model, given = case.model, case.inputs(2) | case.negative(2) | {"do_sample": False}
    lanternpp.accelerate(model, window=5)
    expected = model.generate(**given)
    for device in ("cuda", "cpu"):
        model.to(device)
        there = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items()}
        for _ in range(3):  # recorded again at every call
            assert torch.equal(model.generate(**there).cpu(), expected)


def pickled(model: Any) -> Any:
    """The model, through pickle."""
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize(
    ("name", "copied"), [("janus", copy.deepcopy), *((name, pickled) for name in ("emu3", "glm-image"))]
)
def test_a_copy_of_an_accelerated_model_draws_with_its_own_weights(
    tmp_path: Path, name: str, copied: Callable[[Any], Any]
) -> None:
    """A drafter that reads hidden states leaves no hooks of transformers, which cannot be pickled."""
    case = CASES[name](tmp_path)
    given = case.inputs(1) | {"do_sample": False}
    in_hidden_states = name in ("janus", "emu3")
    drafter = with_drafters(tmp_path, "drafters", (0,)) / "parallel" if in_hidden_states else None
    lanternpp.accelerate(case.model, drafter=drafter)
    expected = case.model.generate(**given)
    other = copied(case.model)
    assert vars(other)["_lanternpp"] is None
    for weight in case.model.get_output_embeddings().parameters():
        weight.data.neg_()
    assert torch.equal(other.generate(**given), expected)
    assert other.generate.codes_per_pass == case.model.generate.codes_per_pass > 1
    assert not torch.equal(case.model.generate(**given), expected)
    lanternpp.restore(other)
    assert "generate" not in vars(other) and torch.equal(other.generate(**given), expected)


def test_a_model_without_a_folder_writes_nothing_into_the_working_directory(
    made: Callable[[str], Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of neighbours goes to the user's cache."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    case = made("glm-image")
    monkeypatch.setattr(case.model, "name_or_path", "")
    lanternpp.accelerate(case.model, method="lantern-jacobi", neighbours=5)
    drawn = case.model.generate(**case.inputs(1), do_sample=True, generator=torch.Generator().manual_seed(0))
    assert (
        drawn.shape[1] > 7 and not list(here.iterdir()) and list((tmp_path / "cache").rglob("*.safetensors"))
    )
    case.model.generate(**case.inputs(1), do_sample=True, method="ar")  # which has no neighbours
    assert case.model.generate.codes_per_pass == 1


def test_unsupported_calls_are_rejected(made: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    case = made("emu3")
    model, given = case.model, case.inputs(2)
    other = torch.nn.Linear(1, 1)
    rejects("transformers model of class 'Linear' is unknown", lanternpp.accelerate, other)
    rejects("transformers model of class 'str' is unknown", lanternpp.accelerate, "owner/name")
    monkeypatch.setattr(other, "get_base_model", lambda: model, raising=False)  # as models of PEFT have
    compiled, parallel = torch.compile(model, backend="eager"), torch.nn.DataParallel(model)
    for one, inside in ((other, "get_base_model()"), (compiled, "_orig_mod"), (parallel, "module")):
        rejects(re.escape(f"use lanternpp.accelerate(model.{inside})"), lanternpp.accelerate, one)
    rejects("method 'fastest' is unknown", lanternpp.accelerate, model, method="fastest")
    rejects("option 'cfg' is unknown", lanternpp.accelerate, model, cfg=3.0)
    rejects(r"lambda 2\.0 would change nothing", lanternpp.accelerate, model, lam=2.0)
    without = "comes without a parallel drafter; name one with drafter, or .* method ar draw"
    rejects(without, lanternpp.accelerate, model, method="parallel")
    rejects("independent needs prompts as text", lanternpp.accelerate, model, method="independent")
    assert not vars(model).keys() & {"generate", "_lanternpp"}
    lanternpp.accelerate(model)
    rejects("method 'fastest' is unknown", lanternpp.accelerate, model, method="fastest")
    hook = {"custom_generate": lanternpp.custom_generate}
    out = model(input_ids=given["input_ids"][:, :-1], use_cache=True)
    name = next(name for name in CACHES if name in out)

    def content(batch: int, tokens: Tensor) -> Any:
        codes = model.vocabulary_mapping.image_tokens
        return codes if int(tokens[-1]) % 2 else codes[:40]

    fn, processor = "prefix_allowed_tokens_fn", "logits_processor"
    returns_scores = {"output_scores": True, "return_dict_in_generate": True}
    by_sample = {fn: lambda batch, tokens: range(20 + batch, 40), "max_new_tokens": 9}
    top_p_first = {"top_k": 5, processor: LogitsProcessorList([TopPLogitsWarper(0.5)])}
    refused: dict[str, dict[str, Any]] = {
        "RepetitionPenaltyLogitsProcessor is not supported": {"repetition_penalty": 1.2},
        "MinPLogitsWarper is not supported with drafts; the call or model.generation_config": {"min_p": 0.1},
        "out of the order temperature": top_p_first,
        "MaxTimeCriteria": {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(1.0)])},
        "beam search is not supported": {"num_beams": 2, "do_sample": False},
        "pixel_values is not supported": {"pixel_values": torch.zeros(1, 3, 32, 32)},
        "output_scores is not supported": returns_scores,
        "streamer is not supported": {"streamer": TextStreamer(None)},
        "position_ids is not supported": {"position_ids": given["attention_mask"]},
        "is not supported with drafts; leave it out": hook | {name: out[name]},
        "cache is not supported": {"cache": out[name]},
        "kernels 3 is no text": {"kernels": 3},
        "callback 3 is no function": {"callback": 3},
        "generate was called while it draws": {"callback": lambda seen: model.generate(**given)},
        "needs prefix_allowed_tokens_fn, which says where": {fn: None, "generation_mode": "image"},
        "allows no image tokens;": {fn: lambda batch, tokens: [1, 2]},
        "no image tokens beside suppress_tokens": {
            fn: lambda *_: range(40),
            "suppress_tokens": [*range(1, 99)],
        },
        "allows no token at all": {fn: lambda batch, tokens: []},
        "depends on the codes that were drawn": {fn: content, "max_new_tokens": 20},
        "differs within the batch": by_sample,
        "guidance_scale 0.5 is out of range": {"guidance_scale": 0.5},
        "cfg 0.5 is out of range": {"cfg": 0.5},
        "padded on the left": {"attention_mask": given["attention_mask"].flip(1)},
        "the model has 256": {"max_new_tokens": 500, fn: lambda batch, tokens: range(20, 40)},
    }
    for sentence, more in refused.items():
        rejects(re.escape(sentence), model.generate, **given | {"do_sample": True} | more)
    assert model.generate(**given).shape[0] == 2
    with model.register_forward_hook(lambda *given: None):
        rejects("hooks on the model itself", model.generate, **given)
    with monkeypatch.context() as patch:
        patch.setattr(model, "__class__", type("Own", (type(model),), {"forward": type(model).forward}))
        rejects("the forward of a subclass", model.generate, **given)
    prepare = functools.partial(model.prepare_inputs_for_generation)
    monkeypatch.setattr(model, "prepare_inputs_for_generation", prepare)  # as prompt tuning does
    rejects("prompt and prefix tuning", model.generate, **given)
    janus = made("janus")
    monkeypatch.setattr(janus.model, "generation_config", GenerationConfig(pad_token_id=1, bos_token_id=0))
    lanternpp.accelerate(janus.model)
    rejects("boi_token_id", janus.model.generate, **janus.inputs(1))


def test_the_script_of_the_documentation_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as it stands, on a tiny model in the place of the published one."""
    from PIL import Image
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    script = re.search(r"```python\n([^`]*Janus[^`]*)```", page)
    name = "deepseek-community/Janus-Pro-1B"
    assert script and script[1].count(name) == 1 and script[1].count("lanternpp.accelerate(model)") == 1
    model = write_janus(tmp_path / name)
    model.generation_config = GenerationConfig(
        bos_token_id=0, pad_token_id=1, generation_kwargs={"boi_token_id": 2}
    )
    model.save_pretrained(tmp_path / name)
    tokenizer = Tokenizer.from_file(str(tmp_path / name / "tokenizer.json"))
    begin = tokenizer.id_to_token(0)
    tokenizer.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=begin).save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    exec(compile(script[1], "docs/models.md", "exec"), {})
    assert Image.open("fox.png").size == (64, 64)


def test_a_top_k_above_the_codes_keeps_all_codes(made: Callable[[str], Case]) -> None:
    case = made("emu3")
    lanternpp.accelerate(case.model)
    drawn = []
    for top_k in (0, 100_000):
        torch.manual_seed(0)
        drawn.append(case.model.generate(**case.inputs(1), do_sample=True, top_k=top_k))
    assert torch.equal(*drawn)
