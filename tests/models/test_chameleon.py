"""Chameleon, Anole and Lumina: the network beside transformers', prompts, row ends, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import numbers, published_drafter
from helpers.families import write_chameleon, write_tokenizer
from helpers.parity import Peer, gaps
from tokenizers import Tokenizer

from lanternpp.api.model import read_target
from lanternpp.drafters.published import PublishedDrafter
from lanternpp.errors import InputError
from lanternpp.models.chameleon import ChameleonTarget
from lanternpp.nn.decoder import HeadNorm
from lanternpp.nn.sources import Source

PROMPTS = ["a photo of the red tulip", "red sea", None]


def peer(model: Any, target: ChameleonTarget) -> Peer:
    """transformers' Chameleon; its head cut to our codes, which its own class masks."""
    table = model.model.embed_tokens
    return Peer(
        tokens=table,
        codes=lambda codes: table(target.code_tokens[codes]),
        body=model.model,
        head=lambda features: model.lm_head(features)[..., target.code_tokens],
    )


@pytest.mark.parametrize(
    ("lumina", "changes"),
    [
        (False, {}),
        (True, {}),
        (False, {"swin_norm": True}),
        (
            False,
            {
                "attention_bias": True,
                "mlp_bias": True,
                "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            },
        ),
    ],
    ids=["anole", "lumina", "norms after", "biases and base"],
)
def test_logits_are_those_of_transformers(tmp_path: Path, lumina: bool, changes: dict[str, Any]) -> None:
    folder = tmp_path / ("Lumina-mGPT-7B-64" if lumina else "anole")
    model = write_chameleon(folder, lumina, **changes)
    target = read_target(folder, torch.float32)
    assert isinstance(target, ChameleonTarget)
    found = gaps(target, peer(model, target), PROMPTS)
    print(found)
    assert max(found.values()) <= 1e-4


@pytest.fixture(scope="module")
def anole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chameleon") / "anole"
    write_chameleon(folder)
    return folder


@pytest.fixture(scope="module")
def lumina(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chameleon") / "Lumina-mGPT-7B-64"
    write_chameleon(folder, lumina=True)
    return folder


def names(folder: Path, ids: list[int]) -> str:
    """Token ids as the names in a folder's tokenizer."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return " ".join(str(tokenizer.id_to_token(i)) for i in ids)


def test_anole_is_asked_as_its_authors_ask(anole: Path) -> None:
    target = read_target(anole, torch.float32)
    assert names(anole, target.conditional("red sea")) == "<s> red sea <reserved08706> <racm3:break>"
    assert names(anole, target.unconditional("red sea")) == "<s> <racm3:break>"
    assert (target.vocab, target.length, target.width) == (64, 16, 4)


def test_lumina_is_asked_for_a_size_and_told_it(lumina: Path) -> None:
    target = read_target(lumina, torch.float32, given={"size": "96x64"})
    request = "Generate an image of <s> according to the following prompt: red sea"  # 96x64 is no word here
    begin = "<racm3:break> <reserved08802> <reserved08803>"  # 2 and 3 times 32 px: the height first
    assert names(lumina, target.conditional("red sea")) == f"<s> {request} <reserved08706> {begin}"
    assert names(lumina, target.unconditional("red sea")) == begin
    assert (target.raster.rows, target.raster.columns, target.width, target.length) == (4, 6, 7, 27)
    assert target.pixels(torch.zeros(1, 27, dtype=torch.int64)).shape == (1, 3, 64, 96)
    assert target.codebook.shape == (65, 4)
    assert (
        torch.cdist(target.codebook, target.codebook)[:64, 64].min() > torch.pdist(target.codebook[:64]).max()
    )


def test_the_place_one_row_up_is_a_width_before(lumina: Path) -> None:
    """Jacobi's fresh guesses rely on it."""
    raster = read_target(lumina, torch.float32).raster
    places = raster.grid(torch.arange(raster.length)[None])[0]
    assert (places[1:] - places[:-1] == raster.width).all()


def edited(folder: Path, to: Path, **changes: Any) -> Path:
    """A copy of a checkpoint whose config has other fields; None removes one."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text()) | changes
    (to / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return to


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"hidden_act": "relu"}, "relu"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "'linear'"),
        ({"num_hidden_layers": 3}, "missing decoder.blocks.2"),
        ({"max_position_embeddings": 16}, "4x4 codes.*16 positions"),
        ({"model_type": "llava", "architectures": ["Llava"]}, "no model family.*Anole-7B"),
        ({"vq_config": {"num_embeddings": 128}}, "quantize.embedding.weight"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_in_one_line(
    anole: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    given = json.loads((anole / "config.json").read_text())
    if "vq_config" in changes:
        changes = {"vq_config": given["vq_config"] | changes["vq_config"]}
    with pytest.raises(InputError, match=named) as refusal:
        read_target(edited(anole, tmp_path / "copy", **changes), torch.float32)
    assert "\n" not in str(refusal.value)


def test_what_is_missing_beside_a_checkpoint_is_named(anole: Path, lumina: Path, tmp_path: Path) -> None:
    text_only = edited(anole, tmp_path / "chameleon-7b")
    write_tokenizer(text_only, ["<s>", "</s>", "<unk>"])
    with pytest.raises(InputError, match="only writes text"):
        read_target(text_only, torch.float32)
    (text_only / "tokenizer.json").write_text("not JSON")
    with pytest.raises(InputError, match="no tokenizer"):
        read_target(text_only, torch.float32)
    (text_only / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"tokenizer\.json is missing"):
        read_target(text_only, torch.float32)
    bare = edited(lumina, tmp_path / "Lumina-mGPT-7B-64")
    (bare / "vqgan.safetensors").unlink()
    with pytest.raises(InputError, match=r"no VQ decoder.*vqgan\.ckpt"):
        read_target(bare, torch.float32)
    given = read_target(bare, torch.float32, given={"tokenizer": lumina / "vqgan.safetensors"})
    assert given.pixels(torch.zeros(1, 19, dtype=torch.int64)).shape == (1, 3, 64, 64)


@pytest.mark.parametrize("size", ["65x64", "64x", "big", "0x64", "2048x1024"])
def test_a_size_that_cannot_be_drawn_is_refused(lumina: Path, size: str) -> None:
    with pytest.raises(InputError, match=size) as refusal:
        read_target(lumina, torch.float32, given={"size": size})
    assert "\n" not in str(refusal.value)


def test_anole_draws_one_size(anole: Path) -> None:
    with pytest.raises(InputError, match="64x64 pixels alone"):
        read_target(anole, torch.float32, given={"size": "128x64"})


def test_a_long_prompt_is_refused_with_its_length(anole: Path) -> None:
    target = read_target(anole, torch.float32)
    with pytest.raises(InputError, match=r"'red red .*\.\.\.' takes 303 slots and there are 240"):
        target.prompt(["red " * 300], 1)
    assert target.prompt(["red " * 200], 2).embeds.shape[1] == 224  # 203 slots, in steps of 32
    assert target.prompt(["red " * 237], 1).embeds.shape[1] == 240  # no more than there are


@pytest.mark.parametrize("norms", [None, 1, 4], ids=["no norms", "one norm", "a norm a head"])
def test_a_published_drafter_may_norm_queries_and_keys_as_its_target_does(
    anole: Path, tmp_path: Path, norms: int | None
) -> None:
    target = read_target(anole, torch.float32)
    tensors = published_drafter({"tok_embeddings.weight": target.token_table.detach().clone()}, 48)
    if norms:
        for name in ("q_norm", "k_norm"):
            for part in ("weight", "bias"):
                tensors[f"layers.0.self_attn.{name}.{part}"] = numbers(f"{name}.{part}", (norms, 8))
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4, "rms_norm_eps": 1e-5}')
    drafter = PublishedDrafter.read(Source.open(tmp_path), target, torch.float32)
    block = drafter.decoder.blocks[0]
    if norms:
        queries = tensors["layers.0.self_attn.q_norm.weight"]
        assert torch.equal(block.qk_norm.weight[:4], queries.repeat_interleave(4 // norms, 0))
    assert isinstance(block.qk_norm, HeadNorm) == bool(norms)
