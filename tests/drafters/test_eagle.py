"""EAGLE drafters: their options, and published ones, with the authors' block and their inputs at prompt slots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import checkpoints as published
from helpers.refusals import rejects
from helpers.toys import ToyTarget
from safetensors.torch import load_file

from lanternpp.api.model import ASSETS, read_target
from lanternpp.drafters.base import DrafterConfig
from lanternpp.drafters.eagle import EagleConfig, EagleDrafter, PublishedDrafter
from lanternpp.drafters.parallel import ParallelConfig
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.models.base import Target
from lanternpp.nn import checkpoints
from lanternpp.nn.decoder import DecoderConfig
from lanternpp.nn.sources import Source
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees import build_tree
from lanternpp.types import Admission

GOLDEN = load_file(Path(__file__).parent.parent / "golden" / "llamagen.safetensors")


def test_bias_layers_and_norms_are_options():
    rotary_table = ToyTarget().decoder.rotary_table
    bare = EagleDrafter(EagleConfig(DecoderConfig(16, 2, 2, 24, first_norm=False), bias=False), rotary_table)
    assert bare.fc.bias is None and len(bare.decoder.blocks) == 2
    assert isinstance(bare.decoder.blocks[0].attention_norm, torch.nn.Identity)
    assert not isinstance(bare.decoder.blocks[1].attention_norm, torch.nn.Identity)
    assert not isinstance(bare.decoder.norm, torch.nn.Identity)


@pytest.mark.parametrize(("part", "kind"), [("drafter", EagleConfig), ("parallel", ParallelConfig)])
def test_a_config_on_disk_is_flat_and_read_back(part: str, kind: type[DrafterConfig]) -> None:
    folder = ASSETS / "nature-128" / part
    saved = checkpoints.load_config(folder)
    flat = json.loads(json.dumps(kind.of(saved, folder).flat()))
    assert all(flat[name] == saved[name] for name in flat.keys() & saved.keys())
    assert json.loads(json.dumps(kind.of(flat, folder).flat())) == flat


@pytest.fixture
def target(tmp_path: Path) -> Target:
    """The tiny LlamaGen of texts."""
    folder = published.write_llamagen(tmp_path / "model", text=True)
    return read_target(folder, torch.float32).requires_grad_(False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Its drafter."""
    return published.write_drafter(tmp_path / "drafter", text=True)


def read(folder: Path, target: Target) -> PublishedDrafter:
    """The drafter in a folder."""
    source = Source.open(folder)
    assert PublishedDrafter.claims(source)
    return PublishedDrafter.read(source, target, torch.float32).requires_grad_(False).eval()


def test_the_features_are_those_of_the_authors(target: Target, folder: Path) -> None:
    drafter = read(folder, target)
    pair = published.numbers("pairs", (11, 128))[None]
    features = drafter.forward_sequence(pair[..., :64], pair[..., 64:])[0, 5:]
    assert (features - GOLDEN["drafter"]).abs().max() < 1e-4


@pytest.mark.parametrize("table", ["output.weight", "tok_embeddings.weight"])
def test_the_inputs_at_prompt_slots_and_padding_are_those_of_code_0(
    table: str, target: Target, folder: Path
) -> None:
    path, embeddings = folder / "pytorch_model.bin", published.llamagen(True)[table]
    torch.save(torch.load(path) | {"embed_tokens.weight": embeddings}, path)
    drafter = read(folder, target)
    proposer = TreeProposer(drafter, build_tree("chain-2"))
    proposer.open(target, Sampling(), Guidance(), 1)
    prompt = target.prompt(["a red tulip"], 1)
    features, root = published.numbers("features", (1, 6, 64)), torch.tensor([9])
    proposer.begin(Admission(0, torch.tensor([0]), "a red tulip", prompt, features, root))
    assert 0 < int(prompt.start) < 5
    expected = drafter.forward_sequence(embeddings[[0, 0, 0, 0, 0, 9]][None], features)
    assert torch.allclose(proposer.features[:, 0], expected[:, -1], atol=1e-5)


def test_the_drafter_of_another_target_is_rejected(target: Target, folder: Path) -> None:
    path = folder / "pytorch_model.bin"
    tensors = torch.load(path)
    torch.save(tensors | {"embed_tokens.weight": -tensors["embed_tokens.weight"]}, path)
    rejects("another target", read, folder, target)
