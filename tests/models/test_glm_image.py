"""GLM-Image's autoregressive part: its codes beside transformers', prompts and sizes, and what becomes of the codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import CODES, write_glm_image, write_glm_processor

from lanternpp import InputError, Pipeline
from lanternpp.api.model import read_target
from lanternpp.models.glm_image import TwoPictures
from lanternpp.models.hub import HubId, choose

PROMPTS = ["a photo of the red tulip", "red sea", "the sea at sunset"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """The folder of a pipeline, the model of its first stage, and its processor."""
    folder = tmp_path_factory.mktemp("glm")
    model = write_glm_image(folder / "vision_language_encoder", positions=1024).double()
    return folder, model, write_glm_processor(folder / "processor")


@pytest.fixture(scope="module")
def pipe(written: tuple[Path, Any, Any]) -> Pipeline:
    return Pipeline.from_pretrained(written[0], device="cpu", dtype="float64", size="64x32")


@pytest.mark.parametrize("count", [1, 3])
def test_greedy_codes_are_those_of_transformers(
    written: tuple[Path, Any, Any], pipe: Pipeline, count: int
) -> None:
    """A small picture of 11 x 22 codes and a large one of 1 x 2, from prompts of different lengths."""
    _, model, processor = written
    messages = [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in PROMPTS[:count]]
    size = {"target_h": 32, "target_w": 64, "padding": True}
    inputs = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", **size
    )
    assert inputs["image_grid_thw"][:2].tolist() == [[1, 1, 2], [1, 11, 22]]
    others = list(range(CODES, CODES + 4))
    drawn = model.generate(**inputs, do_sample=False, max_new_tokens=244, suppress_tokens=others)
    expected = drawn[:, inputs["input_ids"].shape[1] :]
    assert expected.unique().numel() > 3
    for method in ("ar", "jacobi-coupled"):
        result = pipe(PROMPTS[:count], method=method, temperature=0, output_type="codes")
        assert torch.equal(result.codes, expected), method
    assert result.stats.codes_per_pass > 1


def test_the_decoder_gets_the_large_picture_at_twice_its_resolution(pipe: Pipeline) -> None:
    codes = pipe("red sea", output_type="codes").codes
    left, right = codes[0, -2:].tolist()
    assert pipe.target.prior(codes).tolist() == [[left, left, right, right] * 2]  # type: ignore[operator]


def test_every_kind_of_method_draws(pipe: Pipeline) -> None:
    for method in ("jacobi", "lantern-jacobi"):
        dials = {"neighbours": 8} if "lantern" in method else {}
        codes = pipe(PROMPTS, method=method, output_type="codes", top_k=8, **dials).codes
        assert codes.shape == (3, 244) and int(codes.max()) < CODES


def test_sizes_are_multiples_of_32_pixels_and_the_checkpoint_says_how_it_samples(
    written: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    pictures = TwoPictures.sized("1024")
    assert (pictures.rows, pictures.columns, pictures.small.rows, pictures.length) == (32, 32, 16, 1280)
    for wrong in ("100", "32x4096x", "4096x2048", "32x16384"):
        with pytest.raises(InputError, match="size"):
            TwoPictures.sized(wrong)
    model = written[1]
    model.generation_config.temperature, model.generation_config.top_p = 0.9, 0.75
    model.generation_config.do_sample = True
    model.save_pretrained(tmp_path)
    target = read_target(tmp_path, torch.float32, given={"size": "32"})
    assert target.defaults == {"cfg": 1.0, "temperature": 0.9, "top_p": 0.75}


def test_what_it_cannot_do_is_said_in_a_sentence(pipe: Pipeline, tmp_path: Path) -> None:
    with pytest.raises(InputError, match='draw with output_type="codes"'):
        pipe("red sea")
    with pytest.raises(InputError, match="output_type"):
        pipe.stream("red sea")
    with pytest.raises(InputError, match="without guidance"):
        pipe("red sea", cfg=2.0, output_type="codes")
    with pytest.raises(InputError, match="cannot be converted"):
        pipe.target.save(tmp_path, "float32")
    with pytest.raises(InputError, match="use --self"):
        pipe.target.reader()
    write_glm_image(tmp_path / "alone", positions=1024)
    alone = Pipeline.from_pretrained(tmp_path / "alone", device="cpu", dtype="float32", size="32")
    with pytest.raises(InputError, match="copy the folder `processor`"):
        alone("red sea", output_type="codes")


def test_of_a_pipelines_repository_its_first_stage_alone_is_fetched() -> None:
    files = [f"{part}/model.safetensors" for part in ("transformer", "vae", "vision_language_encoder")]
    files += ["model_index.json", "vision_language_encoder/config.json", "processor/tokenizer.json"]
    chosen = choose(HubId("zai-org/GLM-Image"), files)
    assert sorted(chosen) == sorted([files[2], *files[4:]])
