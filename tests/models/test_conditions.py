"""Texts are encoded for LlamaGen as the captions of its training were; classes have names."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from helpers import checkpoints
from helpers.refusals import rejects
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, T5EncoderModel

from lanternpp.errors import InputError
from lanternpp.models.base import PromptWarning
from lanternpp.models.conditions import FEATURES, T5Text, TextCondition, class_of, classes, clean
from lanternpp.models.hub import quiet

CLEANED = {  # by the authors' own code
    "A blue Porsche 356 parked in front of a yellow brick wall.": "a blue porsche 356 parked in front of a yellow brick wall.",
    "“Fancy” quotes — and dashes…": '"fancy" quotes - and dashes…',
    "a dog,cat and bird": "a dog, cat and bird",
    "an 8k render, f/1.4 (50mm) #art @me": "an 8k render, f 1.4 50mm art",
    "Tom &amp; Jerry": "tom jerry",
    "a red-and-blue well-made ultra-detailed thing": "a red and blue well made ultra detailed thing",
    "100% cotton; $5 bill: new!": "100% cotton; $5 bill: new!",
    "it's a dog's life": "it's a dog's life",
    "  spaces   everywhere  ": "spaces everywhere",
    "3.5 apples, 1,000 pears": "3.5 apples, 1,000 pears",
    'a sign that says "Hello World"': 'a sign that says "hello world"',
    "e.g. this": "e. g. this",
    "'quoted'": "quoted",
}


@pytest.mark.parametrize("text", CLEANED)
def test_prompts_are_cleaned_as_captions_were(text: str) -> None:
    assert clean(text) == CLEANED[text]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny T5's folder."""
    return checkpoints.t5(tmp_path_factory.mktemp("model") / "t5")


def test_features_are_the_encoders_without_padding(encoder: Path) -> None:
    like = torch.empty(0)
    text = T5Text(encoder)
    features = text.features("A red tulip", like)
    with quiet(), torch.no_grad():
        model = T5EncoderModel.from_pretrained(encoder)
        padded = AutoTokenizer.from_pretrained(encoder)(
            "a red tulip", padding="max_length", max_length=9, return_tensors="pt"
        )
        states = model(padded.input_ids, padded.attention_mask).last_hidden_state[0]
    assert features.shape == (4, 24)
    assert torch.allclose(features, states[:4], atol=1e-5)


def test_features_are_cached_and_the_least_recently_used_are_dropped(encoder: Path, monkeypatch) -> None:
    """Without the encoder too, once it is released."""
    text, like = T5Text(encoder), torch.empty(0)
    text.max_cached = 2
    first = text.features("a tulip", like)
    for prompt in ("a red tulip", "a tulip", "a blue tulip"):
        text.features(prompt, like)
    assert len(text._cached) == 2
    text.release()
    monkeypatch.setattr(text, "_load", lambda *_: pytest.fail("loaded again"))
    assert torch.equal(text.features("a tulip", like), first)
    text.features("a blue tulip", like)


def test_code_in_the_folder_of_an_encoder_is_not_run(encoder: Path, tmp_path: Path, capsys) -> None:
    folder = Path(shutil.copytree(encoder, tmp_path / "t5"))
    (folder / "own.py").write_text("print('boom')\nclass Own: pass\n")
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        content["auto_map"] = {"AutoTokenizer": ["own.Own", "own.Own"], "AutoConfig": "own.Own"}
        content |= {"model_type": "own", "tokenizer_class": "Own"}
        (folder / name).write_text(json.dumps(content))
    with pytest.raises(InputError, match="cannot be loaded") as caught:
        T5Text(folder).features("a tulip", torch.empty(0))
    assert "boom" not in capsys.readouterr().out and "trust_remote_code" not in str(caught.value)


def test_a_damaged_bin_file_is_rejected(encoder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(encoder, tmp_path / "t5"))
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    whole = (folder / "pytorch_model.bin").read_bytes()
    for content in (whole[: len(whole) // 2], b"x" * 999, pickle.dumps({"x": print}), b""):
        (folder / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(InputError, match="cannot be loaded") as caught:
            T5Text(folder).features("a tulip", torch.empty(0))
        assert "weights_only" not in str(caught.value) and str(caught.value).isprintable()


def test_an_encoder_without_its_tokenizer_or_some_weights_is_rejected(encoder: Path, tmp_path: Path) -> None:
    """transformers would use an empty tokenizer and random weights."""
    folder = Path(shutil.copytree(encoder, tmp_path / "t5"))
    path, name = folder / "model.safetensors", "encoder.final_layer_norm.weight"
    tensors = load_file(path)
    weight = tensors.pop(name)
    for changed, said in (({}, f"missing {name}"), ({name: weight * float("nan")}, f"{name} holds NaN")):
        save_file(tensors | changed, path, metadata={"format": "pt"})
        rejects(said, T5Text(folder).features, "a tulip", torch.empty(0))
    (folder / "tokenizer.json").unlink()
    rejects("no tokenizer.json and no spiece.model", T5Text(folder).features, "a tulip", torch.empty(0))


def test_features_of_another_encoder_are_rejected(encoder: Path, tmp_path: Path) -> None:
    condition = TextCondition(dim=8, caption_dim=24, slots=6)
    for rows in (torch.ones(24), torch.ones(4, 23), torch.ones(0, 24), torch.tensor(1.0)):
        save_file({"a tulip": rows}, tmp_path / FEATURES)
        condition.text = T5Text(encoder, features_file=tmp_path / FEATURES)
        rejects("features of 'a tulip' have the shape .*flan-t5-xl", condition.prompt, ["a tulip"], 1)


def test_a_long_prompt_is_cut_with_a_warning(encoder: Path) -> None:
    with pytest.warns(PromptWarning, match="131 tokens; this model reads the first 120"):
        assert T5Text(encoder).features("red " * 130, torch.empty(0)).shape == (120, 24)


def test_texts_are_padded_on_the_left_as_null_rows_are(encoder: Path) -> None:
    condition = TextCondition(dim=8, caption_dim=24, slots=6).requires_grad_(False)
    condition.null.normal_()  # a checkpoint's to fill
    condition.text = T5Text(encoder)
    prompt = condition.prompt(["a red tulip", None], 2)
    assert prompt.embeds.shape == (4, 6, 8)
    assert prompt.start.tolist() == [2, 0, 2, 0]
    assert torch.equal(prompt.embeds[0, :2], torch.zeros(2, 8))
    alone = condition.prompt([None], 1).embeds[0]
    assert all(torch.allclose(prompt.embeds[row], alone, atol=1e-6) for row in (1, 2, 3))


@pytest.mark.parametrize(
    ("prompt", "number"),
    [
        ("207", 207),
        ("golden retriever", 207),
        ("A photo of a Golden  Retriever", 207),
        ("golden retrievers", 207),
        ("tench", 0),
        ("Tinca tinca", 0),
        ("toilet tissue", 999),
        ("jay", 17),
    ],
)
def test_classes_are_found_by_number_and_by_name(prompt: str, number: int) -> None:
    assert class_of(prompt) == number


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("1000", "0 to 999"),
        ("a crane", "134, 517"),
        ("golden retreiver", "did you mean 'golden retriever'"),
        ("terrier", "terrier'"),
        ("", "is unknown"),
    ],
)
def test_unknown_classes_are_rejected(prompt: str, says: str) -> None:
    rejects(says, class_of, prompt)


def test_every_class_has_a_name() -> None:
    assert {number for numbers in classes().values() for number in numbers} == set(range(1000))
