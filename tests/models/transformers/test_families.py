"""Models of transformers in the pipeline: beside their own `generate`; prompts, sizes, and what is rejected."""

from __future__ import annotations

import ctypes
import functools
import json
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cases import CASES
from helpers.checkpoints import numbers, published_drafter
from helpers.families import (
    CODES,
    EVERY,
    PIXELS,
    image_token,
    rename_tensors,
    update_config,
    with_drafters,
    write_emu3,
    write_glm_image,
    write_glm_processor,
    write_janus,
    write_tokenizer,
)
from helpers.refusals import rejects
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

import lanternpp
from lanternpp import Pipeline
from lanternpp.api.model import read_target, target_source
from lanternpp.api.options import METHODS
from lanternpp.drafters.eagle import PublishedDrafter
from lanternpp.errors import ModelError
from lanternpp.kernels.loading import library
from lanternpp.models import FAMILIES
from lanternpp.models.hub import HubId, choose
from lanternpp.models.transformers.format import Raster
from lanternpp.models.transformers.janus import BEGIN, DRAW, PAD
from lanternpp.models.transformers.liquid import Liquid
from lanternpp.models.transformers.opening import Text
from lanternpp.models.vq.codes import nearest
from lanternpp.nn.sources import Source

PROMPTS = ["a photo of the red tulip", "red sea", "the sea at sunset"]
PROMPT = PROMPTS[0]


LUMINA = "Lumina-mGPT-7B-64"
ENDS = (LUMINA, "emu3", "lumina2", "emu3.5")  # families whose rows of codes have ends


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of them, each with random drafters of its width and a target to draft with in it."""
    place = tmp_path_factory.mktemp("families")
    for name, write in EVERY.items():
        write(place / name)
        write(place / name / "independent")
        with_drafters(place / name)
    return place


@functools.cache
def pipeline(folder: Path, dtype: str = "float64") -> Pipeline:
    return Pipeline.from_pretrained(str(folder), device="cpu", dtype=dtype)


@functools.cache
def plain(folder: Path) -> Tensor:
    """The greedy codes of plain decoding."""
    return pipeline(folder)(PROMPT, method="ar", temperature=0.0).codes


def names(folder: Path, ids: list[int]) -> str:
    """Token ids as the names in a folder's tokenizer."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return " ".join(str(tokenizer.id_to_token(i)) for i in ids)


@pytest.mark.parametrize(
    ("name", "scale"),
    [*((name, 3.0) for name in CASES if name != "glm-image"), ("emu3", 1.0), ("liquid", 1.0)],
)
def test_pipeline_accelerate_and_generate_draw_the_same_greedy_codes(
    name: str, scale: float, tmp_path: Path
) -> None:
    """Pixels too, by the model's own decoder."""
    case = CASES[name](tmp_path)
    pipe, model = pipeline(tmp_path), case.model
    target: Any = pipe.target
    given = case.call(target, PROMPTS, scale) | {"do_sample": False}
    expected = model.generate(**given)
    lanternpp.accelerate(model, window=5)
    assert torch.equal(model.generate(**given), expected)
    assert model.generate.codes_per_pass > 1
    assert torch.equal(model.generate(**given, method="ar", window=None), expected)
    lanternpp.restore(model)
    assert "generate" not in vars(model)
    assert torch.equal(model.generate(**given), expected)
    for method in ("ar", "jacobi-coupled"):
        result = pipe(PROMPTS, method=method, temperature=0.0, cfg=scale)
        tokens = result.codes if name == "janus" else target.token_ids(result.codes)
        assert torch.equal(tokens, case.tokens(expected, given, target)), method
    assert tokens.unique().numel() > 3
    grid = target.raster.grid(result.codes)
    if name in ("janus", "emu3"):
        codes = grid.flatten(1) if name == "janus" else grid
        pixels = model.model.vqmodel.decode(codes).clamp(-1, 1)
        assert pixels.std() > 0.2 and (target.pixels(result.codes) - pixels).abs().max() <= 1e-3
    side = target.pixels_per_code
    assert result.images[0].size == (4 * side, 4 * side)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """The folder of a pipeline of GLM-Image, the model of its first stage, and its processor."""
    folder = tmp_path_factory.mktemp("glm")
    model = write_glm_image(folder / "vision_language_encoder", positions=1024).double()
    return folder, model, write_glm_processor(folder / "processor")


@pytest.fixture(scope="module")
def glm_pipe(glm: tuple[Path, Any, Any]) -> Pipeline:
    return Pipeline.from_pretrained(glm[0], device="cpu", dtype="float64", size="64x32")


TEMPLATE_OPTIONS = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
OTHER_TOKENS = list(range(CODES, CODES + 4))  # GLM-Image's tokens that are no codes


def test_greedy_codes_of_glm_image_are_those_of_transformers(
    glm: tuple[Path, Any, Any], glm_pipe: Pipeline
) -> None:
    """A small picture of 11 x 22 codes and a large one of 1 x 2, from prompts of different lengths.

    Its decoder gets the large picture at twice its resolution.
    """
    _, model, processor = glm
    messages = [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in PROMPTS[:2]]
    inputs = processor.apply_chat_template(
        messages, **TEMPLATE_OPTIONS, target_h=32, target_w=64, padding=True
    )
    assert inputs["image_grid_thw"][:2].tolist() == [[1, 1, 2], [1, 11, 22]]
    call = {**inputs, "do_sample": False, "max_new_tokens": 244, "suppress_tokens": OTHER_TOKENS}
    expected = model.generate(**call)
    lanternpp.accelerate(model, window=5)
    assert torch.equal(model.generate(**call), expected)
    lanternpp.restore(model)
    codes = expected[:, inputs["input_ids"].shape[1] :]
    assert codes.unique().numel() > 3
    for method in ("ar", "jacobi-coupled"):
        result = glm_pipe(PROMPTS[:2], method=method, temperature=0, output_type="codes")
        assert torch.equal(result.codes, codes), method
    assert result.stats.codes_per_pass > 1
    book: Any = glm_pipe.target.codebook
    assert torch.allclose(book.norm(dim=-1), torch.ones(CODES, dtype=book.dtype))  # as it is looked up
    left, right = codes[0, -2:].tolist()
    assert glm_pipe.target.prior(codes[:1]).tolist() == [[left, left, right, right] * 2]


def test_greedy_codes_of_an_edit_by_glm_image_are_those_of_transformers(
    glm: tuple[Path, Any, Any],
) -> None:
    """Two pictures of different shapes are shown, and positions after each depend on its longer side."""
    folder, model, processor = glm
    pipe = Pipeline.from_pretrained(folder, device="cpu", dtype="float64", size="128x96")
    pictures = [Image.effect_noise(size, 120).convert("RGB") for size in ((96, 64), (64, 128))]
    content = [*({"type": "image", "image": one} for one in pictures), {"type": "text", "text": PROMPT}]
    messages = [{"role": "user", "content": content}]
    inputs = processor.apply_chat_template(messages, **TEMPLATE_OPTIONS, target_h=96, target_w=128)
    call = {**inputs, "do_sample": False, "max_new_tokens": 12, "suppress_tokens": OTHER_TOKENS}
    codes = model.generate(**call)[:, inputs["input_ids"].shape[1] :]
    greedy: Any = {"temperature": 0, "output_type": "codes", "image": pictures}
    for method in ("ar", "jacobi-coupled"):
        assert torch.equal(pipe(PROMPT, method=method, **greedy).codes, codes), method
    target: Any = pipe.target
    assert target.prior(codes).shape == (1, 6 * 8)
    grids = [list(grid.shape) for grid in target.depicted(PROMPT, pictures).pictures]
    assert grids == inputs["image_grid_thw"][:-1, 1:].tolist()
    rejects("differ in length, so each edits in a call of its own", pipe, PROMPTS, **greedy)
    narrow = Image.new("RGB", (300, 30))
    rejects("encoded .absolute aspect ratio", pipe, PROMPT, output_type="codes", image=narrow)


# A family with row ends meets every method; the others have drafts with neighbours, and drafters in tests/training/test_samples.py.
DRAWN = [("emu3", method) for method in METHODS]
DRAWN += [(name, "lantern-jacobi") for name in EVERY.keys() - {"emu3"}]


@pytest.mark.parametrize(("name", "method"), sorted(DRAWN))
def test_every_method_draws_one_and_several_pictures_with_and_without_guidance(
    name: str, method: str, models: Path
) -> None:
    ends, side = name in ENDS, 4 * PIXELS[name]
    pipe = pipeline(models / name)
    dials = {"neighbours": 8} if METHODS[method].dials.get("neighbours") else {}
    one = pipe(PROMPT, method=method, seed=2, cfg=1.0, **dials)
    three = pipe(PROMPTS, method=method, seed=1, **dials)
    assert three.stats.settings["cfg"] > 1 and three.stats.settings["batch_size"] == 3
    for result in (one, three):
        grid = torch.nn.functional.pad(result.codes, (0, int(ends)), value=CODES)
        rows = grid.unflatten(1, (4, 4 + ends))
        assert torch.equal(rows == CODES, (torch.arange(4 + ends) == 4).expand_as(rows))
        assert result.images[0].size == (side, side)
    if METHODS[method].dials["accept"] == "exact":
        drafted = pipe(PROMPT, method=method, temperature=0.0)
        assert torch.equal(drafted.codes, plain(models / name))


KERNELS = [(name, "auto") for name in ("emu3", "lumina2", "emu3.5", "liquid", "simplear")]
KERNELS += [(name, "bfloat16") for name in ("anole", "janus", LUMINA, "emu3")]


@pytest.mark.skipif(library() is None, reason="there are no kernels for this machine")
@pytest.mark.parametrize(("name", "dtype"), KERNELS)
@torch.inference_mode()
def test_kernels_follow_the_format_and_keep_one_copy_of_the_weights(
    name: str, dtype: str, models: Path
) -> None:
    pipe = pipeline(models / name, dtype)
    target: Any = pipe.target
    assert target.decoder.native is not None
    assert (target.decoder.native.dtype == "int8") == (dtype == "auto"), "auto keeps 8 bits"
    layer = next(target.decoder.body.get_submodule("layers").children())
    assert layer.mlp.down_proj.weight.numel() == 0 and layer.self_attn.q_proj.weight.numel() == 0
    engine = pipe.new_engine(pipe.settings("parallel", batch_size=2, tree="chain-3"))
    drafter = engine.proposer.drafter
    assert (drafter.native.head is not None) == (name != "janus"), "whose head is not linear"
    x = torch.randn(3, target.decoder.config.dim).bfloat16()
    if layer := target.head_linear:
        assert torch.equal(target.head(x), layer(x))
    engine.admit(0, PROMPT, 3)
    engine.admit(1, PROMPT, 4)
    while min(engine.decided()) < target.length:
        engine.step()
        draft = engine.proposer.propose(engine.noise)
        place = (engine.count[:, None] + torch.arange(3)).clamp(max=target.length - 1)
        ends = (name in ENDS) & (place % 5 == 4)
        assert torch.equal(draft.codes[:, 1:] == CODES, ends)
        assert draft.probs is not None and torch.allclose(
            draft.probs[:, :-1].sum(-1), torch.ones(2, 3), atol=1e-4
        )
        engine.proposer.cache.used -= engine.proposer.waiting
    assert pipe(PROMPT, method="ar").images


INSTRUCTION = "Generate an image of {} according to the following prompt: red sea"
BEGIN_96X64 = "<racm3:break> <reserved08802> <reserved08803>"  # 2 and 3 times 32 px: the height first
OTHER = "<|endoftext|>"  # a word that the tokenizer does not know
PROMPTED = {  # a size, and the tokens of "red sea" and of its unconditional branch, as the authors' code has them
    "anole": ({}, "<s> red sea <reserved08706> <racm3:break>", "<s> <racm3:break>"),
    LUMINA: (
        {"size": "96x64"},
        f"<s> {INSTRUCTION.format('<s>')} <reserved08706> {BEGIN_96X64}",
        BEGIN_96X64,
    ),
    "lumina2": (
        {"size": "96x64"},
        f"{OTHER} {INSTRUCTION.format(OTHER)} <reserved08706> {BEGIN_96X64}",
        BEGIN_96X64,
    ),
    "liquid": (
        {},
        f"<bos> red sea Generate an image {' '.join(['<pad>'] * 4)} <boi>",
        "<bos> <unconditional> <boi>",
    ),
    "emu3": (
        {},
        f"<|extra_203|> red sea {' '.join([OTHER] * 5)} <|image start|> 4*4 <|image token|>",
        f"<|extra_203|> {OTHER} {OTHER}",
    ),
    "simplear": (
        {},
        f"<|t2i|> {OTHER} {OTHER} {OTHER} image of red sea <|soi|>",
        f"<|t2i|> {OTHER} image of {OTHER}",
    ),
}


@pytest.mark.parametrize("name", PROMPTED)
def test_prompts_are_those_of_the_authors(name: str, models: Path) -> None:
    given, conditional, unconditional = PROMPTED[name]
    target: Any = read_target(models / name, torch.float32, given=given)
    assert names(models / name, target.conditional("red sea")) == conditional
    found = names(models / name, target.unconditional("red sea"))
    if name in ("emu3", "simplear"):  # which describe a bad picture
        assert found.startswith(unconditional) and found.split()[-1] == conditional.split()[-1]
        assert len(found.split()) > 20
    else:
        assert found == unconditional


def test_prompts_of_emu35_and_janus_are_those_of_the_authors(models: Path) -> None:
    target: Any = read_target(models / "emu3.5", torch.float32)
    end = "ASSISTANT: <|extra_100|><|image start|>4*4<|image token|>"
    decode = functools.partial(target.text._tokenizer.decode, skip_special_tokens=False)
    task = "<|extra_203|>You are a helpful assistant"
    assert decode(target.conditional("red sea")) == f"{task} for t2i task. USER: red sea {end}"
    assert decode(target.unconditional("red sea")) == f"{task}. USER:  {end}"

    target = read_target(models / "janus", torch.float32)
    ids, pad = target.conditional(" a photo "), target.text.id(PAD)
    assert (ids[0], ids[-1]) == (target.text.id(BEGIN), target.text.id(DRAW))
    assert ids == target.conditional("a photo") and target.unconditional(None) == target.unconditional("")
    assert target.unconditional("a photo") == [ids[0], *[pad] * (len(ids) - 2), ids[-1]]


@pytest.mark.parametrize(
    ("name", "size", "shape", "pixels"),
    [
        (LUMINA, "96x64", (4, 6, 27), (64, 96)),
        ("emu3", "24x16", (2, 3, 7), (16, 24)),
        ("lumina2", "64x32", (4, 8, 35), (32, 64)),
        ("emu3.5", "96x64", (4, 6, 27), (64, 96)),
    ],
)
def test_pictures_of_other_sizes_have_rows_of_their_own(
    name: str, size: str, shape: tuple[int, int, int], pixels: tuple[int, int], models: Path
) -> None:
    target: Any = read_target(models / name, torch.float32, given={"size": size})
    raster = target.raster
    assert (raster.rows, raster.columns, target.length) == shape and target.width == shape[1] + 1
    index = torch.arange(target.length)[None]
    allowed = target.constrain(torch.zeros(1, target.length, target.vocab), index) > float("-inf")
    ends = index[0] % target.width == shape[1]
    assert torch.equal(allowed[0].sum(-1), torch.where(ends, 1, CODES)) and allowed[0, ends, CODES].all()
    assert target.pixels(torch.zeros(2, target.length, dtype=torch.int64)).shape == (2, 3, *pixels)
    places = raster.grid(index)[0]
    assert (places[1:] - places[:-1] == raster.width).all(), "drafts of Jacobi rely on it"
    assert target.codebook.shape == (CODES + 1, 4)
    nearest_end = torch.cdist(target.codebook, target.codebook)[:CODES, CODES].min()
    assert nearest_end > torch.pdist(target.codebook[:CODES]).max(), "a row end is no code's neighbour"


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        *((LUMINA, size, size) for size in ("65x64", "big", "0x64")),
        (LUMINA, "2048x1024", "has 8192 codes and the model draws at most 4096"),
        ("anole", "128x64", "128x64 cannot be drawn; squares of 64 pixels can"),
        ("janus", "48x48", "48x48 cannot be drawn.*squares of 64 pixels"),
        ("emu3", "20x16", r"20x16.*multiples of 8"),
        ("emu3", "960x544", "120x68 codes do not fit the model's 256 positions"),
        ("liquid", "128", "squares of 64, 512 pixels"),
        ("simplear", "512x256", "squares of 64, 1024, 768, 512, 256 pixels"),
        ("simplear", "512", "32x32 codes do not fit the model's 256 positions"),
    ],
)
def test_a_size_that_cannot_be_drawn_is_rejected(name: str, size: str, said: str, models: Path) -> None:
    rejects(said, read_target, models / name, torch.float32, given={"size": size})


def edited(folder: Path, to: Path, *removed: str, **changes: Any) -> Path:
    """A copy of a checkpoint whose config has other fields."""
    shutil.copytree(folder, to)
    update_config(to, *removed, **changes)
    return to


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 1 << 14}, "asks for .* weights and the files hold"),
        ({"hidden_act": "gelup"}, "gelup.*correct its config"),
        ({"attn_implementation": "flash_attention_2"}, "FlashAttention2.*: install it"),
        ({"num_hidden_layers": 3}, r"missing model\.layers\.2"),
        ({"intermediate_size": 50}, r"down_proj\.weight is \(32, 48\) where \(32, 50\) is expected"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 is out of range"),
        ({"max_position_embeddings": 16}, "4x4 codes.*16 positions"),
        ({"model_type": "llava", "architectures": ["Llava"]}, "no model family.*Anole-7B"),
        ({"model_type": ["chameleon"]}, "unhashable.*correct its config"),
        ({"quantization_config": {"quant_method": "own"}}, "knows no quantization_config.*own"),
        ({"vocabulary_map": {"IMGIMGAZ": 4, "IMGIMGBZ": 5}}, "has 2 codes and the tokenizer"),
        ({"vocabulary_map": [4, 5]}, "correct its config"),
        ({"vocabulary_map": {image_token(n): 900 + n for n in range(CODES)}}, "correct its config"),
    ],
)
def test_a_config_that_does_not_fit_is_rejected(
    models: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    rejects(named, read_target, edited(models / "anole", tmp_path / "copy", **changes), torch.float32)


@pytest.mark.parametrize(
    ("name", "part", "field"),
    [("anole", "vq_config", "resolution"), ("janus", "vision_config", "num_image_tokens")],
)
@pytest.mark.parametrize("value", [0, 1])
def test_pictures_without_a_second_code_are_rejected(
    models: Path, tmp_path: Path, name: str, part: str, field: str, value: int
) -> None:
    config = json.loads((models / name / "config.json").read_text())
    config[part][field] = value
    folder = edited(models / name, tmp_path / "copy", **config)
    rejects("codes a side: correct its config", read_target, folder, torch.float32)


def test_layers_that_a_config_leaves_out_are_rejected(models: Path, tmp_path: Path) -> None:
    for name in ("anole", "emu3"):  # with layers at the top of the config, and below text_config
        config = json.loads((models / name / "config.json").read_text())
        config.get("text_config", config)["num_hidden_layers"] = 1
        folder = edited(models / name, tmp_path / name, **config)
        said = "config.json asks for 1 layers and the files hold 2"
        rejects(said, read_target, folder, torch.float32)


@pytest.mark.parametrize("name", ["liquid", "emu3"])
def test_the_named_file_of_a_folder_is_read_and_a_damaged_one_named(
    name: str, models: Path, tmp_path: Path
) -> None:
    folder = edited(models / name, tmp_path / name)
    first = folder / "model.safetensors"
    tensors = load_file(first)
    other = {key: tensor.flip(0) if "embed_tokens" in key else tensor for key, tensor in tensors.items()}
    save_file(other, folder / "ema.safetensors")
    torch.save({"state_dict": other}, folder / "ema.bin")
    rows = {path: read_target(path, torch.float32).tokens.weight for path in (folder, first)}
    for path in (folder / "ema.safetensors", folder / "ema.bin"):
        read: Any = read_target(path, torch.float32)
        assert all(torch.equal(read.tokens.weight, weight.flip(0)) for weight in rows.values())
    assert torch.equal(*rows.values())
    first.write_bytes(first.read_bytes()[:-100])
    rejects(r"/model\.safetensors is truncated", read_target, folder, torch.float32)
    (folder / "config.json").unlink()
    rejects(r"config\.json is missing", read_target, folder / "ema.safetensors", torch.float32)


def test_weights_quantised_by_torchao_stay_with_pytorch_and_are_not_written(tmp_path: Path) -> None:
    """The kernels cannot read them."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import Emu3ForConditionalGeneration, TorchAoConfig

    write_emu3(tmp_path / "plain")
    config = TorchAoConfig(Int8WeightOnlyConfig(version=2))
    model = Emu3ForConditionalGeneration.from_pretrained(
        tmp_path / "plain", dtype=torch.bfloat16, quantization_config=config
    )
    folder = tmp_path / "quantised"
    model.save_pretrained(folder)
    shutil.copy(tmp_path / "plain" / "tokenizer.json", folder)
    update_config(folder, size="32x32")
    with pytest.warns(UserWarning, match="its weights stay as they are"):
        result = pipeline(folder, "bfloat16")(PROMPT, temperature=0.0, method="ar")
    assert result.images[0].size == (32, 32)
    assert torch.equal(pipeline(folder, "bfloat16")(PROMPT, temperature=0.0).codes, result.codes)
    target = pipeline(folder, "bfloat16").target
    rejects("weights are quantised", target.save, tmp_path / "out", "bfloat16")
    assert not (tmp_path / "out").exists()


def test_a_generation_config_that_cannot_be_used_is_named(models: Path, tmp_path: Path) -> None:
    folder = edited(models / "liquid", tmp_path / "liquid")
    (folder / "generation_config.json").write_text('{"cache_implementation": "none"}')
    said = r"generation_config\.json cannot be read .*none.*: correct it\.$"
    rejects(said, read_target, folder, torch.float32)
    (folder / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.5}')
    target = read_target(folder, torch.float32)
    rejects("generation_config.json cannot be written", target.save, tmp_path / "out", "float32")
    for decoder in (None, torch.nn.Identity()):  # of a family with a decoder of its own
        vars(target)["vq"] = decoder
        rejects("the decoder of a Liquid cannot be written", target.save, tmp_path / "out", "float32")
    assert not (tmp_path / "out").exists()


def test_weights_in_8_bits_without_a_quantization_config_are_rejected(models: Path, tmp_path: Path) -> None:
    path = edited(models / "anole", tmp_path / "anole") / "model.safetensors"
    tensors, name = load_file(path), "model.layers.0.mlp.up_proj.weight"
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(48, 1)}
    save_file(tensors, path, metadata={"format": "pt"})
    rejects("up_proj.weight holds float8_e4m3fn where weights", read_target, path, torch.float32)


def test_nan_logits_in_float32_are_an_error_of_the_files(models: Path, tmp_path: Path) -> None:
    wrong = {"rope_theta": 0, "rope_type": "default"}
    pipe = pipeline(edited(models / "anole", tmp_path / "anole", rope_parameters=wrong), "float32")
    with pytest.raises(ModelError, match="in float32; correct its weights, or numbers of its config"):
        pipe(PROMPT, method="ar")


def test_buffers_of_nan_are_rejected(models: Path, tmp_path: Path) -> None:
    path = edited(models / "emu3", tmp_path / "emu3") / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("running_var"))
    save_file(tensors | {name: torch.full_like(tensors[name], float("nan"))}, path, metadata={"format": "pt"})
    rejects("running_var holds NaN", read_target, path, torch.float32)


def test_a_folder_called_tokenizer_beside_a_published_model_is_not_read(models: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "config.json").write_text("another model's")
    read_target(edited(models / "liquid", tmp_path / "liquid"), torch.float32)


def test_missing_files_beside_a_checkpoint_are_named(models: Path, tmp_path: Path, monkeypatch) -> None:
    def refused(said: str, folder: Path, **given: Path) -> None:
        rejects(said, read_target, folder, torch.float32, given=given)

    text_only = edited(models / "anole", tmp_path / "chameleon-7b", "vocabulary_map")
    write_tokenizer(text_only, ["<s>", "</s>", "<unk>"])
    refused("only writes text", text_only)
    (text_only / "tokenizer.json").write_text("not JSON")
    refused("no tokenizer", text_only)
    (text_only / "tokenizer.json").unlink()
    refused(r"tokenizer\.json is missing", text_only)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name, file, reason in (
        (LUMINA, "vqgan.safetensors", r"vqgan\.ckpt there.* not on this"),
        ("lumina2", "movqgan_270M.ckpt", r"movqgan_270M\.ckpt there.* not on this"),
        ("emu3.5", "Emu3.5-VisionTokenizer", r"Emu3\.5-VisionTokenizer there.* not on this"),
        ("simplear", "vq_cosmos.safetensors", r"vq_cosmos\.safetensors there.*docs/models\.md"),
    ):
        bare = edited(models / name, tmp_path / name)
        (bare / file).rename(moved / file)
        refused(f"no VQ decoder: put {reason}", bare)
    (tmp_path / "decoder.jit").write_bytes(b"code")
    refused(r"decoder\.jit is no checkpoint", bare, vq=tmp_path / "decoder.jit")
    plain = edited(models / "liquid", tmp_path / "gemma")
    write_tokenizer(plain, ["<pad>", "<eos>", "<bos>"])
    refused("no token <boi>: it only writes text", plain)
    write_tokenizer(plain, ["<pad>", "<boi>", *(f"<unused{n}>" for n in range(9))])
    refused("of 87 tokens has no 64 codes; known is Liquid", plain)
    monkeypatch.setitem(FAMILIES, "own", type("Own", (Liquid,), {}))
    assert target_source(plain)[1].__name__ == "Own", "a family of the user's is asked first"
    given = {"vq": moved / "vqgan.safetensors"}
    target = read_target(tmp_path / LUMINA, torch.float32, given=given)
    assert target.pixels(torch.zeros(1, 19, dtype=torch.int64)).shape == (1, 3, 64, 64)
    path = edited(models / LUMINA, tmp_path / "narrow") / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.k_norm.bias"] = torch.zeros(2, 1)
    save_file(tensors, path, metadata={"format": "pt"})
    refused(r"k_norm.bias is \(2, 1\), and the heads are", path.parent, **given)
    rename_tensors(tmp_path / LUMINA, {"layers.1.self_attn.k_norm.weight": "other"})
    refused("lacks model.layers.1.self_attn.k_norm.weight", tmp_path / LUMINA, **given)


def test_a_tokenizer_of_older_files_is_read_and_saved(tmp_path: Path) -> None:
    """Its special tokens too; SimpleAR's authors train with slow tokenizers, which write these files."""
    added = {6 + n: {"content": token, "special": True} for n, token in enumerate(("<|soi|>", "<|t2i|>"))}
    config = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added, "pad_token": "<|soi|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "vocab.json").write_text('{"d": 0, "e": 1, "r": 2, "s": 3, "re": 4, "red": 5}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\nr e\nre d\n")
    (tmp_path / "saved").mkdir()
    Text(tmp_path).save(tmp_path / "saved")
    for folder in (tmp_path, tmp_path / "saved"):
        assert Text(folder).filled(("<|t2i|>", "{prompt}", "<|soi|>"), prompt="reds") == [7, 5, 3, 6]


def test_emu35_encodes_text_by_merging_pairs_of_bytes(models: Path, tmp_path: Path) -> None:
    """A word that is a token is taken whole, though no pair leads to it; accents are composed first."""
    text: Any = read_target(models / "emu3.5", torch.float32).text
    assert text.ids("the red") == [*b"the", *b" ", 256, *b"d"]
    assert text.ids("a the\n12") == [*b"a", 257, *b"\n12"]
    assert text.ids("e\u0301") == list("\u00e9".encode())
    assert text.id("<|endoftext|>") == 259 and text.id("<|image end|>") == 259 + 210
    wrong = edited(models / "emu3.5", tmp_path / "wrong")
    for content, said in (("!!! 1\n", "no file of tiktoken"), ("aA== x\n", "no file of tiktoken")):
        (wrong / "emu3.tiktoken").write_text(content)
        rejects(said, read_target(wrong, torch.float32).check, "red")
    (wrong / "emu3.tiktoken").unlink()
    rejects(r"emu3\.tiktoken is missing: copy it there", read_target, wrong, torch.float32)


@pytest.mark.parametrize(("name", "by_product"), [("lumina2", False), ("emu3.5", True)])
def test_pictures_are_read_by_the_tokenizer_beside_a_model(name: str, by_product: bool, models: Path) -> None:
    target: Any = read_target(models / name, torch.float32)
    reader = target.reader()
    side = 4 * PIXELS[name]
    noise = torch.randint(
        256, (2, side, side, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8
    )
    images = noise.permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        grids = [nearest(target.encoder()(images), target.latents, product) for product in (False, True)]
    codes = reader.encode(images)
    assert (reader.size, codes.shape) == (side, (2, 19)) and (codes[:, 4::5] == CODES).all()
    assert torch.equal(target.raster.grid(codes), grids[by_product]) and not torch.equal(*grids)
    shown = [target.read_picture(Image.fromarray(picture.numpy()), 16) for picture in noise]
    assert torch.equal(torch.stack(shown), grids[by_product])


def test_a_prompt_of_emu35_may_show_pictures(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their own shape, read by its tokenizer, in both branches of guidance; slots and engines grow with them."""
    monkeypatch.setattr("lanternpp.models.transformers.adapter.SLOTS", 96)
    pipe = Pipeline.from_pretrained(models / "emu3.5", device="cpu", dtype="float64")
    target: Any = pipe.target
    usual = {"method": "ar", "temperature": 0.0}
    before = pipe(PROMPTS, **usual).codes
    noise = torch.randint(256, (30, 50, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    picture = Image.fromarray(noise.numpy())
    picture.save(tmp_path / "photo.png")

    ids, row_end = target.text.ids, target.row_end
    shown = target.depicted("red sea", [picture], own_shape=False)
    (grid,) = shown.pictures
    assert shown == "red sea" and grid.shape == (3, 5) and len(grid.unique()) > 3
    first, second, third = (grid + target.codes[0]).tolist()
    tokens = [*ids("<|image start|>3*5<|image token|>"), *first, row_end, *second, row_end, *third]
    tokens += ids("<|image end|>")
    assert shown.shape == (Raster(4, 4, True), 96 + len(tokens))
    task, drawn = "<|extra_203|>You are a helpful assistant", "<|extra_100|><|image start|>4*4<|image token|>"
    conditional = [*ids(f"{task} for x2i task. USER: "), *tokens, *ids(f"red sea ASSISTANT: {drawn}")]
    assert target.conditional(shown) == conditional
    unconditional = [*ids(f"{task}. USER: "), *tokens, *ids(f" ASSISTANT: {drawn}")]
    assert target.unconditional(shown) == unconditional
    wide = target.shaped((Raster(1, 5, True), 8))
    assert wide.depicted("red sea", [picture.resize((50, 50))]).pictures[0].shape == (3, 3), "9 codes hold 5"
    own = target.depicted("red sea", [Image.new("RGB", (50, 50)), picture])
    assert own.shape[0] == Raster(3, 5, True)
    size = ids("<|image start|>3*5<|image token|>")
    assert target.shaped(own.shape).conditional(own)[-len(size) :] == size

    edited = pipe(PROMPTS, image=tmp_path / "photo.png", **usual)
    edited_codes = edited.codes
    assert edited_codes.shape == (3, 3 * 6 - 1) and {one.size for one in edited.images} == {(80, 48)}
    assert (edited_codes[:, 5::6] == CODES).all() and target.slots == 96
    assert torch.equal(pipe(PROMPTS, image=[picture], method="jacobi", temperature=0.0).codes, edited_codes)
    assert torch.equal(pipe(PROMPTS, **usual).codes, before)
    for image, said in (
        ([picture] * 11, "5x3 codes and 253 of the pictures shown do not fit the model's 256 positions"),
        (3, "image 1 of type int is no picture; give a PIL image or a file"),
        ([], "image is an empty list"),
    ):
        rejects(said, pipe, PROMPT, image=image)
    target.save(tmp_path / "ours", "float32")
    rejects("is without its encoder", pipeline(tmp_path / "ours"), PROMPT, image=picture)


def test_a_long_prompt_is_rejected_with_its_length(models: Path) -> None:
    target = read_target(models / "anole", torch.float32)
    rejects(r"'red red .*' takes 303 slots and there are 240", target.check, "red " * 300)
    assert target.prompt(["red " * 200], 2).embeds.shape[1] == 224  # 203 slots, in steps of 32
    assert target.prompt(["red " * 237], 1).embeds.shape[1] == 240  # no more than there are


def test_an_overflow_in_float16_names_another_dtype(models: Path, tmp_path: Path) -> None:
    """All states of the prompt, or those of codes alone."""
    for name in ("liquid", "anole"):
        folder = shutil.copytree(models / name, tmp_path / name)
        tensors, codes = load_file(folder / "model.safetensors"), pipeline(models / name).target.codes
        tensors["model.layers.0.mlp.down_proj.weight"] *= 300 if name == "liquid" else 1e3
        if name == "liquid":
            tensors["model.layers.0.mlp.up_proj.weight"] *= 300
        else:
            tensors["model.embed_tokens.weight"][list(codes)] = 65504
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for method in ("ar", "jacobi-coupled"):
            said = "in float16; use the dtype bfloat16 or float32"
            rejects(said, pipeline(folder, "float16"), PROMPT, method=method)
        assert pipeline(folder, "bfloat16")(PROMPT, method="ar").codes.unique().numel() > 3


@pytest.mark.parametrize("norms", [1, 4], ids=["one norm", "a norm a head"])
def test_a_published_drafter_may_have_norms_of_queries_and_keys(
    models: Path, tmp_path: Path, norms: int
) -> None:
    target: Any = read_target(models / "anole", torch.float32)
    assert target.decoder.config.qk_norm
    tensors = published_drafter({"tok_embeddings.weight": target.tokens.weight.detach().clone()}, 48)
    for name in ("q_norm", "k_norm"):
        for part in ("weight", "bias"):
            tensors[f"layers.0.self_attn.{name}.{part}"] = numbers(f"{name}.{part}", (norms, 8))
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4, "rms_norm_eps": 1e-5}')
    drafter = PublishedDrafter.read(Source.open(tmp_path), target, torch.float32)
    prompt = target.prompt([PROMPT], 1).embeds
    assert torch.equal(drafter.prompt_inputs(prompt), prompt), "the prompt is read as it is"
    queries = tensors["layers.0.self_attn.q_norm.weight"].repeat_interleave(4 // norms, 0)
    assert torch.equal(drafter.decoder.blocks[0].qk_norm.weight[:4], queries)


def test_sizes_and_sampling_defaults_of_glm_image(
    glm: tuple[Path, Any, Any], glm_pipe: Pipeline, tmp_path: Path
) -> None:
    sized = functools.partial(glm_pipe.target.raster_of, None)
    pictures = sized("1024")
    assert (pictures.rows, pictures.columns, pictures.small.rows, pictures.length) == (32, 32, 16, 1280)
    for wrong in ("100", "4096x2048", "32x16384"):
        rejects("size", sized, wrong)
    glm[1].generation_config.update(temperature=0.9, top_p=0.75, do_sample=True)
    glm[1].save_pretrained(tmp_path)
    found = read_target(tmp_path, torch.float32, given={"size": "32"}).defaults
    assert found == {"cfg": 1.0, "temperature": 0.9, "top_k": 50, "top_p": 0.75}


def test_unsupported_calls_of_glm_image_are_rejected(glm_pipe: Pipeline, tmp_path: Path) -> None:
    rejects("output_type", glm_pipe.stream, "red sea")
    rejects("without guidance", glm_pipe, "red sea", cfg=2.0, output_type="codes")
    rejects("cannot be converted", glm_pipe.target.check_store, "float32")
    folder = Path(shutil.copytree(glm_pipe.folder, tmp_path / "glm"))
    (folder / "processor/chat_template.jinja").unlink()
    bare = Pipeline.from_pretrained(folder, size="64x32")
    rejects("chat template.*fetch .*processor again", bare, "red sea", output_type="codes")
    config = json.loads((path := folder / "vision_language_encoder/config.json").read_text())
    config["text_config"]["rope_parameters"]["mrope_section"] = [2, 1]
    path.write_text(json.dumps(config))
    rejects("split_sizes.*correct its config", Pipeline.from_pretrained, folder, size="64x32")
    rejects("use --self", glm_pipe.target.reader)
    write_glm_image(tmp_path / "narrow", positions=256)
    said = "16x16 and 1x1 codes do not fit the model's 256 positions"
    rejects(said, read_target, tmp_path / "narrow", torch.float32, given={"size": "32"})
    write_glm_image(tmp_path / "alone", positions=1024)
    alone = Pipeline.from_pretrained(tmp_path / "alone", device="cpu", dtype="float32", size="32")
    rejects("copy the folder `processor`", alone, "red sea", output_type="codes")
    files = [f"{part}/model.safetensors" for part in ("transformer", "vae", "vision_language_encoder")]
    files += ["model_index.json", "vision_language_encoder/config.json", "processor/tokenizer.json"]
    chosen = choose(HubId("zai-org/GLM-Image"), files)
    assert sorted(chosen) == sorted([files[2], *files[4:]])


@pytest.mark.skipif(library() is None, reason="there are no kernels for this machine")
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="peak memory is read from Linux's /proc")
def test_a_checkpoint_is_read_and_packed_in_little_more_memory_than_its_weights(tmp_path: Path) -> None:
    write_janus(tmp_path, hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    source, family = target_source(tmp_path)
    source.packing = "int8"
    before, peaks, done = used_memory(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peaks.append(used_memory())

    thread = threading.Thread(target=watch)
    thread.start()
    target = family.read(source, torch.bfloat16)
    target.pack()
    done.set()
    thread.join()
    assert target.decoder.native is not None and target.decoder.native.dtype == "int8"
    assert max(peaks) - before < 1.25 * 2 * sum(meta.numel() for meta in source.metas.values())


def used_memory() -> int:
    """Bytes of memory in use, after what was freed has gone back to the system. Pages of files do not count, as the kernel can drop them."""
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
    return 1024 * int(re.search(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])
