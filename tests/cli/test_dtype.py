"""`--dtype`: auto, what is reported, and weights in 8 and 4 bits."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch
from helpers.families import write_janus
from helpers.latents import write_diffusion

from lanternpp import Pipeline
from lanternpp.kernels.loading import SWITCH, kernels
from lanternpp.models.transformers import stack
from lanternpp.nn import int8
from lanternpp.util.devices import pick_dtype

DRAW = ("generate", "a red tulip", "--model")


def test_auto_is_half_precision_on_every_gpu_and_on_cpus_with_bfloat16(monkeypatch) -> None:
    cpu = torch.device("cpu")
    for amx, avx in product((False, True), repeat=2):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda avx=avx: avx)
        kind = torch.bfloat16 if amx or avx else torch.float32
        assert pick_dtype("auto", cpu) is kind is pick_dtype("int8", cpu)
    cards = {torch.device("cuda:0"): (7, 5), torch.device("cuda:1"): (8, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", cards.__getitem__)
    assert [pick_dtype("auto", card) for card in cards] == [torch.float16, torch.bfloat16]


def test_without_bfloat16_the_kernels_decide_the_dtype_which_is_reported(run, model, monkeypatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert f" on cpu ({'int8 weights, bfloat16' if kernels() else 'float32'}) with " in run(*DRAW, model).out
    monkeypatch.setenv(SWITCH, "0")
    assert " on cpu (float32) with " in run(*DRAW, model).out
    assert " on cpu (bfloat16) with " in run(*DRAW, model, "--dtype", "bfloat16").out
    reported = run("compare", "a red tulip", "--model", model, "--dtype", "float64", "--runs", 1).out
    assert "cpu (float64)" in reported


def test_a_model_of_latents_uses_the_kernels(tmp_path, monkeypatch) -> None:
    """In bfloat16 where the CPU has no products of it: every wide linear layer is packed, except in a diffusion head in float32."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    pipe = Pipeline.from_pretrained(str(write_diffusion(tmp_path / "latents")), device="cpu")
    assert pipe.dtype == ("bfloat16" if kernels() else "float32")
    found = kernels()
    if found and found.number_of(b"gemm is fp32"):
        plain = [m for m in pipe.target.modules() if type(m) is torch.nn.Linear]
        assert all(layer.in_features % 16 or layer.weight.dtype == torch.float32 for layer in plain)
    assert pipe("a red tulip", seed=1).images[0].size == (4, 4)


def test_8_bits_by_torchao_draw_and_report_their_effect_on_the_logits(run, model, monkeypatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    done = run(*DRAW, model, "--dtype", "int8", "--json")
    assert done.code == 0
    assert done.err.startswith("lanternpp: int8: logits move by ") and done.err.count("\n") == 1
    settings = json.loads(done.out)["settings"]
    assert settings["dtype"].startswith("int8, ")
    effect = settings["int8"]
    assert 0 < effect["total_variation"] < 0.05 and 0 < effect["mean_logit_difference"] < 0.1
    assert effect["bytes_after"] < effect["bytes_before"]


@pytest.mark.skipif(kernels() is None, reason="no kernels here")
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_kernels_draw_from_8_and_4_bits_without_torchao(run, model, monkeypatch, dtype) -> None:
    monkeypatch.setattr(int8, "find_spec", lambda name: None)
    settings = run(*DRAW, model, "--dtype", dtype, "--json").json["settings"]
    assert settings["dtype"].startswith(f"{dtype}, ")


@pytest.mark.skipif(kernels() is None, reason="no kernels here")
def test_layers_that_stay_with_pytorch_are_not_reported_as_8_bits(run, tmp_path, monkeypatch) -> None:
    write_janus(tmp_path / "janus")
    monkeypatch.setattr(stack, "FORMS", {})
    done = run(*DRAW, tmp_path / "janus", "--dtype", "int8")
    assert "LlamaDecoderLayer is not known" in done.err and "weights stay as they are" in done.err
    assert "on cpu (bfloat16) with" in done.out


@pytest.mark.parametrize("switch", ["0", "1"])
def test_8_bits_of_latents_are_rejected_with_and_without_kernels(run, tmp_path, monkeypatch, switch) -> None:
    monkeypatch.setenv(SWITCH, switch)
    run(*DRAW, write_diffusion(tmp_path), "--dtype", "int8").refused("draws continuous latents; leave it out")


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [("int8", "pip install 'lanternpp[int8]'"), ("int4", "int4 needs the kernels for CPUs")],
)
def test_weights_in_few_bits_that_nothing_computes_from_are_rejected_before_a_model_is_read(
    run, broken, monkeypatch, empty_dir, dtype, reason
) -> None:
    monkeypatch.setenv(SWITCH, "0")
    monkeypatch.setattr(int8, "find_spec", lambda name: None)
    (broken / "target" / "model.safetensors").unlink()
    run(*DRAW, broken, "--dtype", dtype).refused(reason)
    assert not list(empty_dir.iterdir())
