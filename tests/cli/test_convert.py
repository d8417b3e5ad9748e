"""`lanternpp convert`."""

from __future__ import annotations

from pathlib import Path

import pytest

from lanternpp.nn import checkpoints


def test_eight_bits_draw_much_the_same_from_a_quarter_of_the_bytes(run, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    done = run("convert", model, out)
    assert (done.code, done.err) == (0, "")
    sizes = [(folder / "target" / "model.safetensors").stat().st_size for folder in (model, out)]
    assert sizes[1] < 0.45 * sizes[0]
    for part in ("tokenizer", "target", "drafter"):
        before, after = (checkpoints.load(folder / part)[1] for folder in (model, out))
        for name, tensor in before.items():
            step = tensor.float().abs().amax() / 127
            assert (tensor - after[name]).abs().max() <= 0.51 * step, name
    assert (out / "defaults.json").read_bytes() == (model / "defaults.json").read_bytes()
    assert run("generate", "a red tulip", "--model", out, "-o", tmp_path / "t.png").code == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("nowhere", "out"), "nowhere"), ((".", "out"), "target"), (("MODEL", "MODEL"), "another folder")],
)
def test_what_cannot_be_converted_is_refused(
    run, model: Path, arguments: tuple[str, str], named: str
) -> None:
    done = run("convert", *[model if a == "MODEL" else a for a in arguments])
    assert done.code == 2
    assert named in done.err and done.err.count("\n") == 1


def test_an_unknown_storage_is_refused(run, model: Path, tmp_path: Path) -> None:
    done = run("convert", model, tmp_path / "x", "--store", "int4")
    assert done.code == 2 and "int4" in done.err and not (tmp_path / "x").exists()
