"""Models of transformers that the pipeline opened: beside the model's own `generate`, prompts, sizes, and what is refused."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cases import CASES
from helpers.checkpoints import numbers, published_drafter
from helpers.families import (
    CODES,
    LANGUAGE,
    write_chameleon,
    write_emu3,
    write_glm_image,
    write_glm_processor,
    write_janus,
    write_tokenizer,
)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

import lanternpp
from lanternpp import InputError, Pipeline
from lanternpp.api.model import read_target
from lanternpp.api.options import METHODS
from lanternpp.drafters.eagle import EagleConfig, EagleDrafter
from lanternpp.drafters.parallel import ParallelConfig, ParallelDrafter
from lanternpp.drafters.published import PublishedDrafter
from lanternpp.kernels.loading import library
from lanternpp.models.hub import HubId, choose
from lanternpp.models.transformers.glm_image import TwoPictures
from lanternpp.models.transformers.janus import BEGIN, DRAW, PAD
from lanternpp.nn import checkpoints
from lanternpp.nn.decoder import DecoderConfig, HeadNorm
from lanternpp.nn.sources import Source

PROMPTS = ["a photo of the red tulip", "red sea", "the sea at sunset"]
PROMPT = PROMPTS[0]


@dataclass(frozen=True)
class Family:
    """How a tiny checkpoint of a family is written, and what it draws."""

    folder: str
    write: Callable[[Path], Any]
    rows: int
    columns: int
    ends: bool
    pixels: int  # of a code's side


FAMILIES = {
    "anole": Family("anole", write_chameleon, 4, 4, False, 16),
    "lumina": Family("Lumina-mGPT-7B-64", functools.partial(write_chameleon, lumina=True), 4, 4, True, 16),
    "janus": Family("janus", write_janus, 4, 4, False, 16),
    "emu3": Family("emu3", write_emu3, 4, 4, True, 8),
}
every_family = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of them, each with random drafters of its width and a target to draft with in it."""
    place = tmp_path_factory.mktemp("families")
    for family in FAMILIES.values():
        folder = place / family.folder
        family.write(folder)
        family.write(folder / "independent")
        shape = EagleConfig.like(
            DecoderConfig(LANGUAGE["hidden_size"], 1, LANGUAGE["num_attention_heads"], 48)
        )
        torch.manual_seed(1)
        decoder = read_target(folder, torch.float32).decoder
        drafter = EagleDrafter(shape, decoder.rotary_table)
        checkpoints.save(folder / "drafter", {"kind": "eagle", **shape.flat()}, drafter.state_dict())
        many = ParallelConfig.like(decoder.config, queries=3, turn=16)
        tensors = ParallelDrafter(many, decoder.rotary_table).state_dict()
        checkpoints.save(folder / "parallel", {"kind": "parallel", **many.flat()}, tensors)
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


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Rows of tokens, padded on the left, and their mask."""
    width = max(map(len, rows))
    ids = torch.tensor([[1] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("name", ["chameleon", "janus", "emu3"])
def test_pipeline_accelerate_and_generate_draw_the_same_greedy_codes(
    name: str, guided: bool, count: int, tmp_path: Path
) -> None:
    """Pixels too, by the model's own decoder. transformers' Janus cannot draw without guidance."""
    case = CASES[name](tmp_path)
    pipe, model, texts = pipeline(tmp_path), case.model, PROMPTS[:count]
    target: Any = pipe.target
    ids, mask = padded([target.conditional(text) for text in texts])
    given = case.inputs(count) | {"input_ids": ids, "attention_mask": mask, "do_sample": False}
    scale = 3.0 if guided else 1.0
    if name == "janus":
        given["guidance_scale"] = scale
        config = model.generation_config
        config.pad_token_id = target.text.id(PAD)
        config.bos_token_id, config.generation_kwargs = int(ids[0, -1]), {"boi_token_id": int(ids[0, -1])}
        config.bos_token_id = target.text.id(BEGIN)
    elif guided:
        negative, seen = padded([target.unconditional(text) for text in texts])
        given |= {"guidance_scale": scale, "negative_prompt_ids": negative}
        given["negative_prompt_attention_mask"] = seen
    expected = None if name == "janus" and not guided else model.generate(**given)
    lanternpp.accelerate(model, window=5)
    drawn = model.generate(**given)
    assert expected is None or torch.equal(drawn, expected)
    assert model.generate.codes_per_pass > 1
    assert torch.equal(model.generate(**given, method="ar", window=None), drawn)
    lanternpp.restore(model)
    assert "generate" not in vars(model)
    assert expected is None or torch.equal(model.generate(**given), expected)
    for method in ("ar", "jacobi-coupled"):
        result = pipe(texts, method=method, temperature=0.0, cfg=scale)
        tokens = result.codes if name == "janus" else target.token_ids(result.codes)
        start = 0 if name == "janus" else ids.shape[1]
        assert torch.equal(tokens, drawn[:, start : start + target.length]), method
    assert tokens.unique().numel() > 3
    grid = target.raster.grid(result.codes)
    if name != "chameleon":
        codes = grid.flatten(1) if name == "janus" else grid
        pixels = model.model.vqmodel.decode(codes).clamp(-1, 1)
        assert pixels.std() > 0.2 and (target.pixels(result.codes) - pixels).abs().max() <= 1e-3
    side = 16 if name != "emu3" else 8
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


@pytest.mark.parametrize("count", [1, 3])
def test_greedy_codes_of_glm_image_are_those_of_transformers(
    glm: tuple[Path, Any, Any], glm_pipe: Pipeline, count: int
) -> None:
    """A small picture of 11 x 22 codes and a large one of 1 x 2, from prompts of different lengths."""
    _, model, processor = glm
    messages = [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in PROMPTS[:count]]
    inputs = processor.apply_chat_template(
        messages,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        target_h=32,
        target_w=64,
        padding=True,
    )
    assert inputs["image_grid_thw"][:2].tolist() == [[1, 1, 2], [1, 11, 22]]
    others = list(range(CODES, CODES + 4))
    call = {**inputs, "do_sample": False, "max_new_tokens": 244, "suppress_tokens": others}
    expected = model.generate(**call)
    lanternpp.accelerate(model, window=5)
    assert torch.equal(model.generate(**call), expected)
    lanternpp.restore(model)
    codes = expected[:, inputs["input_ids"].shape[1] :]
    assert codes.unique().numel() > 3
    for method in ("ar", "jacobi-coupled"):
        result = glm_pipe(PROMPTS[:count], method=method, temperature=0, output_type="codes")
        assert torch.equal(result.codes, codes), method
    assert result.stats.codes_per_pass > 1


@every_family
@pytest.mark.parametrize("method", METHODS)
def test_every_method_draws_alone_and_in_a_batch_guided_and_not(name: str, method: str, models: Path) -> None:
    family = FAMILIES[name]
    pipe = pipeline(models / family.folder)
    dials = {"neighbours": 8} if METHODS[method].dials.get("neighbours") else {}
    one = pipe(PROMPT, method=method, seed=2, cfg=1.0, **dials)
    three = pipe(PROMPTS, method=method, seed=1, **dials)
    assert three.stats.settings["cfg"] > 1 and three.stats.settings["batch_size"] == 3
    for result in (one, three):
        grid = torch.nn.functional.pad(result.codes, (0, int(family.ends)), value=CODES)
        rows = grid.unflatten(1, (family.rows, family.columns + family.ends))
        assert (rows[..., : family.columns] < CODES).all()
        assert not family.ends or (rows[..., -1] == CODES).all()
        assert result.images[0].size == (family.columns * family.pixels, family.rows * family.pixels)
    if METHODS[method].dials["accept"] == "exact":
        drafted = pipe(PROMPT, method=method, temperature=0.0)
        assert torch.equal(drafted.codes, plain(models / family.folder))


@pytest.mark.skipif(library() is None, reason="there are no kernels for this machine")
@every_family
@torch.inference_mode()
def test_kernels_keep_to_the_format_from_weights_that_lie_in_memory_once(name: str, models: Path) -> None:
    family = FAMILIES[name]
    pipe = pipeline(models / family.folder, "auto" if name == "emu3" else "bfloat16")
    target: Any = pipe.target
    assert target.decoder.native is not None
    assert target.decoder.native.int8 == (name == "emu3"), "auto keeps 8 bits"
    layer = next(target.decoder.body.get_submodule("layers").children())
    assert layer.mlp.down_proj.weight.numel() == 0 and layer.self_attn.q_proj.weight.numel() == 0
    engine = pipe.new_engine(pipe.settings("parallel", batch_size=2, tree="chain-3"))
    drafter = engine.proposer.drafter  # type: ignore[attr-defined]
    assert (drafter.native is not None) == (name != "janus"), "whose head is not linear"
    x = torch.randn(3, target.decoder.config.dim).bfloat16()
    if layer := target.head_linear:
        assert torch.equal(target.head(x), layer(x))
    engine.admit(0, PROMPT, 3)
    engine.admit(1, PROMPT, 4)
    while len(engine.done()) < 2:
        engine.step()
        draft = engine.proposer.propose(engine.noise)
        place = (engine.count[:, None] + torch.arange(3)).clamp(max=target.length - 1)
        ends = family.ends & (place % (family.columns + 1) == family.columns)
        assert torch.equal(draft.codes[:, 1:] == CODES, ends)
        assert draft.probs is not None and torch.allclose(
            draft.probs[:, :-1].sum(-1), torch.ones(2, 3), atol=1e-4
        )
        engine.proposer.cache.used -= engine.proposer.waiting  # type: ignore[attr-defined]
    assert pipe(PROMPT, method="ar").images


def test_prompts_are_those_of_the_authors(models: Path) -> None:
    anole, lumina, emu3, janus = (
        models / FAMILIES[name].folder for name in ("anole", "lumina", "emu3", "janus")
    )
    target: Any = read_target(anole, torch.float32)
    assert names(anole, target.conditional("red sea")) == "<s> red sea <reserved08706> <racm3:break>"
    assert names(anole, target.unconditional("red sea")) == "<s> <racm3:break>"
    assert (target.vocab, target.length, target.width) == (64, 16, 4)

    target = read_target(lumina, torch.float32, given={"size": "96x64"})
    request = "Generate an image of <s> according to the following prompt: red sea"  # 96x64 is no word here
    begin = "<racm3:break> <reserved08802> <reserved08803>"  # 2 and 3 times 32 px: the height first
    assert names(lumina, target.conditional("red sea")) == f"<s> {request} <reserved08706> {begin}"
    assert names(lumina, target.unconditional("red sea")) == begin

    target = read_target(emu3, torch.float32)
    size = "<|image start|> 4*4 <|image token|>"
    other = "<|endoftext|>"  # what this tokenizer makes of words it does not know
    assert (
        names(emu3, target.conditional("red sea")) == f"<|extra_203|> red sea {' '.join([other] * 5)} {size}"
    )
    assert names(emu3, target.unconditional("red sea")).startswith(f"<|extra_203|> {other} {other}")
    assert names(emu3, target.unconditional(None)).endswith(size)

    target = read_target(janus, torch.float32)
    ids, pad = target.conditional(" a photo "), target.text.id(PAD)
    assert (ids[0], ids[-1]) == (target.text.id(BEGIN), target.text.id(DRAW))
    assert ids == target.conditional("a photo") and target.unconditional(None) == target.unconditional("")
    assert target.unconditional("a photo") == [ids[0], *[pad] * (len(ids) - 2), ids[-1]]


@pytest.mark.parametrize(
    ("name", "size", "shape", "pixels"),
    [("lumina", "96x64", (4, 6, 27), (64, 96)), ("emu3", "24x16", (2, 3, 7), (16, 24))],
)
def test_pictures_of_other_sizes_have_rows_of_their_own(
    name: str, size: str, shape: tuple[int, int, int], pixels: tuple[int, int], models: Path
) -> None:
    target: Any = read_target(models / FAMILIES[name].folder, torch.float32, given={"size": size})
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
    apart = torch.cdist(target.codebook, target.codebook)[:CODES, CODES].min()
    assert apart > torch.pdist(target.codebook[:CODES]).max(), "a row end is no code's neighbour"


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        *(("lumina", size, size) for size in ("65x64", "64x", "big", "0x64", "2048x1024")),
        ("anole", "128x64", "64x64 pixels alone"),
        ("janus", "48x48", r"48x48 cannot be drawn.*64x64"),
        ("emu3", "20x16", r"20x16.*multiples of 8"),
    ],
)
def test_a_size_that_cannot_be_drawn_is_refused(name: str, size: str, said: str, models: Path) -> None:
    with pytest.raises(InputError, match=said) as refusal:
        read_target(models / FAMILIES[name].folder, torch.float32, given={"size": size})
    assert "\n" not in str(refusal.value)


def edited(folder: Path, to: Path, **changes: Any) -> Path:
    """A copy of a checkpoint whose config has other fields; None removes one."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text()) | changes
    (to / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return to


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "asks for .* weights and the files hold"),
        ({"hidden_act": "gelup"}, "gelup"),
        ({"num_hidden_layers": 3}, r"missing model\.layers\.2"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 is out of range"),
        ({"max_position_embeddings": 16}, "4x4 codes.*16 positions"),
        ({"model_type": "llava", "architectures": ["Llava"]}, "no model family.*Anole-7B"),
        ({"vq_config": {"num_embeddings": 128}}, "has 64 codes and the tokenizer"),
        ({"num_attention_heads": "many"}, "num_attention_heads"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_in_one_line(
    models: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    anole = models / "anole"
    given = json.loads((anole / "config.json").read_text())
    if "vq_config" in changes:
        changes = {"vq_config": given["vq_config"] | changes["vq_config"]}
    with pytest.raises(InputError, match=named) as refusal:
        read_target(edited(anole, tmp_path / "copy", **changes), torch.float32)
    assert "\n" not in str(refusal.value)


def test_what_is_missing_beside_a_checkpoint_is_named(models: Path, tmp_path: Path) -> None:
    lumina = models / "Lumina-mGPT-7B-64"
    text_only = edited(models / "anole", tmp_path / "chameleon-7b", vocabulary_map=None)
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


def test_a_long_prompt_is_refused_with_its_length(models: Path) -> None:
    target = read_target(models / "anole", torch.float32)
    with pytest.raises(InputError, match=r"'red red .*' takes 303 slots and there are 240"):
        target.check("red " * 300)
    assert target.prompt(["red " * 200], 2).embeds.shape[1] == 224  # 203 slots, in steps of 32
    assert target.prompt(["red " * 237], 1).embeds.shape[1] == 240  # no more than there are


def test_weights_that_are_no_numbers_are_refused(models: Path, tmp_path: Path) -> None:
    folder = edited(models / "janus", tmp_path / "janus")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.language_model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"model\.language_model\.norm\.weight holds NaN"):
        read_target(folder, torch.float32)


def test_a_family_without_a_codebook_is_told_which_rules_it_can_use(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = Pipeline.from_pretrained(str(models / "janus"), device="cpu", dtype="float32")
    monkeypatch.setattr(type(pipe.target), "codebook", None)
    with pytest.raises(InputError, match=r"janus has no codebook.*exact or cool"):
        pipe(PROMPT, method="lantern++")
    pipe(PROMPT, method="cool")


@pytest.mark.parametrize("norms", [None, 1, 4], ids=["no norms", "one norm", "a norm a head"])
def test_a_published_drafter_may_norm_queries_and_keys_as_its_target_does(
    models: Path, tmp_path: Path, norms: int | None
) -> None:
    target: Any = read_target(models / "anole", torch.float32)
    tensors = published_drafter({"tok_embeddings.weight": target.tokens.weight.detach().clone()}, 48)
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


def test_the_decoder_of_glm_image_gets_the_large_picture_at_twice_its_resolution(glm_pipe: Pipeline) -> None:
    codes = glm_pipe("red sea", output_type="codes").codes
    left, right = codes[0, -2:].tolist()
    assert glm_pipe.target.prior(codes).tolist() == [[left, left, right, right] * 2]  # type: ignore[operator]
    for method in ("jacobi", "lantern-jacobi"):
        dials = {"neighbours": 8} if "lantern" in method else {}
        codes = glm_pipe(PROMPTS, method=method, output_type="codes", top_k=8, **dials).codes
        assert codes.shape == (3, 244) and int(codes.max()) < CODES


def test_sizes_of_glm_image_and_how_its_checkpoint_samples(
    glm: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    pictures = TwoPictures.sized("1024")
    assert (pictures.rows, pictures.columns, pictures.small.rows, pictures.length) == (32, 32, 16, 1280)
    for wrong in ("100", "32x4096x", "4096x2048", "32x16384"):
        with pytest.raises(InputError, match="size"):
            TwoPictures.sized(wrong)
    model = glm[1]
    model.generation_config.temperature, model.generation_config.top_p = 0.9, 0.75
    model.generation_config.do_sample = True
    model.save_pretrained(tmp_path)
    target = read_target(tmp_path, torch.float32, given={"size": "32"})
    found = dict(target.defaults)
    assert (found["cfg"], found["temperature"], found["top_p"]) == (1.0, 0.9, 0.75)


def test_what_glm_image_cannot_do_is_said_in_a_sentence(glm_pipe: Pipeline, tmp_path: Path) -> None:
    with pytest.raises(InputError, match='draw with output_type="codes"'):
        glm_pipe("red sea")
    with pytest.raises(InputError, match="output_type"):
        glm_pipe.stream("red sea")
    with pytest.raises(InputError, match="without guidance"):
        glm_pipe("red sea", cfg=2.0, output_type="codes")
    with pytest.raises(InputError, match="cannot be converted"):
        glm_pipe.target.save(tmp_path, "float32")
    with pytest.raises(InputError, match="use --self"):
        glm_pipe.target.reader()
    write_glm_image(tmp_path / "alone", positions=1024)
    alone = Pipeline.from_pretrained(tmp_path / "alone", device="cpu", dtype="float32", size="32")
    with pytest.raises(InputError, match="copy the folder `processor`"):
        alone("red sea", output_type="codes")
    files = [f"{part}/model.safetensors" for part in ("transformer", "vae", "vision_language_encoder")]
    files += ["model_index.json", "vision_language_encoder/config.json", "processor/tokenizer.json"]
    chosen = choose(HubId("zai-org/GLM-Image"), files)
    assert sorted(chosen) == sorted([files[2], *files[4:]])


PEAK = """
import re, sys, threading, time, torch, transformers
from pathlib import Path
from functools import partial
from lanternpp.api.model import target_source
from lanternpp.models.transformers.janus import Janus
from lanternpp.nn.backend import backend

def used():  # what is mapped from files does not count: its pages are let go where memory is short
    return 1024 * int(re.search(r"RssAnon:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])

def watch():
    global most
    while True:
        most = max(most, used())
        time.sleep(0.002)

transformers.JanusForConditionalGeneration, torch.zeros(8).bfloat16()
source, family = target_source(Path(sys.argv[1]))
source.pack, source.packing = partial(backend().pack, int8=True), "int8"
before = most = used()
threading.Thread(target=watch, daemon=True).start()
target = family.read(source, torch.bfloat16)
target.pack()
assert target.decoder.native is not None and target.decoder.native.int8
print((most - before) / (2 * sum(meta.numel() for meta in source.metas.values())))
"""


@pytest.mark.skipif(library() is None, reason="there are no kernels for this machine")
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="peak memory is read from Linux's /proc")
def test_a_checkpoint_is_read_and_packed_in_little_more_memory_than_its_weights(tmp_path: Path) -> None:
    write_janus(tmp_path, hidden_size=1024, intermediate_size=4096, num_hidden_layers=16)
    run = [sys.executable, "-c", PEAK, tmp_path]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 1.4
