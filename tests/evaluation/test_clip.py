"""CLIP score by a tiny CLIP with random weights, written here."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from helpers.refusals import rejects
from PIL import Image
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from lanternpp.errors import InputError
from lanternpp.evaluation.features import Clip

CPU = torch.device("cpu")
SIDE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP of 16 px and 32 dimensions, with a tokenizer of single letters."""
    path = tmp_path_factory.mktemp("clip")
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    tokens = [*letters, *(f"{c}</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    (path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer.from_pretrained(path)
    tokenizer.model_max_length = 12
    tokenizer.save_pretrained(path)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1}
    torch.manual_seed(0)
    config = CLIPConfig(
        text_config={**shape, **ends, "vocab_size": len(tokens), "max_position_embeddings": 12},
        vision_config={**shape, "image_size": SIDE, "patch_size": 4},
        projection_dim=32,
    )
    CLIPModel(config).save_pretrained(path)
    crop = {"height": SIDE, "width": SIDE}
    CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=crop).save_pretrained(path)
    return path


def pictures() -> list[Image.Image]:
    noise = torch.randint(0, 256, (6, 24, 24, 3), generator=torch.Generator().manual_seed(0))
    return [Image.fromarray(x.byte().numpy()) for x in noise]


PROMPTS = ["a rose", "the sea", "forest", "a tulip and a very long line of words", "snow", "a daisy"]


def test_the_score_is_the_mean_cosine_of_pictures_and_their_prompts(folder: Path) -> None:
    clip = Clip(str(folder), CPU)
    cosines = []
    for image, prompt in zip(pictures(), PROMPTS, strict=True):
        ids = clip.processor.tokenizer(prompt, truncation=True, return_tensors="pt")
        pixels = clip.processor.image_processor(image, return_tensors="pt")["pixel_values"]
        seen = clip.model.vision_model(pixels).pooler_output @ clip.model.visual_projection.weight.T
        said = clip.model.text_model(**ids).pooler_output @ clip.model.text_projection.weight.T
        cosines.append((seen * said).sum() / seen.norm() / said.norm())
    expected = 100 * torch.stack(cosines).clamp_min(0).mean().item()
    assert clip.score(pictures(), PROMPTS) == pytest.approx(expected, rel=1e-4)
    assert clip.score(pictures(), PROMPTS, batch=4) == pytest.approx(expected, rel=1e-4)
    with torch.no_grad():
        clip.model.visual_projection.weight.neg_()
    assert min(cosines) > 0 and clip.score(pictures(), PROMPTS) == 0  # below 0 counts as 0


def test_pictures_without_a_prompt_are_left_out(folder: Path) -> None:
    clip, images = Clip(str(folder), CPU), pictures()
    some = clip.score(images, [None, PROMPTS[1], None, PROMPTS[3], "", PROMPTS[5]])
    assert some == pytest.approx(clip.score(images[1::2], PROMPTS[1::2]), rel=1e-5)
    assert clip.score(images, [None] * 6) is None


def test_other_models_are_rejected(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    rejects("a model of type t5; give a CLIP", Clip, str(tmp_path), CPU)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    for name in (str(tmp_path), str(tmp_path / "none"), "no-such-person/no-such-clip"):
        with pytest.raises(InputError, match=r"cannot be had .*hub id such as openai/clip") as error:
            Clip(name, CPU)
        assert "\n" not in str(error.value) and len(str(error.value)) < 500
