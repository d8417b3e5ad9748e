"""Grids, comparisons, and PNG files written whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.refusals import rejects
from PIL import Image

from lanternpp.api.calls import pictures
from lanternpp.api.picture import (
    ACCENT,
    BAR_HEIGHT,
    PAPER,
    QUIET,
    Panel,
    comparison,
    enlarged_grid,
    fit,
    font,
    grid,
    open_image,
    save_png,
    wrap,
)

SIDES = [("ar", "", (1.0, 0.25)), ("lantern++", "2x", (0.5, 1.0))]


def plain(count: int, side: int = 10) -> list[Image.Image]:
    return [Image.new("RGB", (side, side), (40 * i, 0, 0)) for i in range(count)]


def test_a_grid_is_as_square_as_possible_and_filled_row_by_row() -> None:
    sizes = [grid(plain(count)).size for count in (1, 2, 3, 4, 5)]
    assert sizes == [(10, 10), (22, 10), (22, 22), (22, 22), (34, 22)]
    sheet = grid(plain(3))
    assert sheet.getpixel((0, 0)) == (0, 0, 0) and sheet.getpixel((21, 0)) == (40, 0, 0)
    assert sheet.getpixel((0, 21)) == (80, 0, 0) and sheet.getpixel((21, 21)) == (255, 255, 255)


def test_enlarging_keeps_every_pixel_a_square() -> None:
    image = Image.new("RGB", (3, 3))
    image.putpixel((1, 1), (9, 8, 7))
    large = enlarged_grid([image], 32)
    assert large.size == (30, 30)
    assert {large.getpixel((x, y)) for x in range(10, 20) for y in range(10, 20)} == {(9, 8, 7)}
    assert large.getpixel((9, 10)) == large.getpixel((20, 10)) == (0, 0, 0)


@pytest.mark.parametrize(("count", "side"), [(1, 10), (4, 128), (1, 600)])
def test_a_comparison_shows_both_sides(count: int, side: int) -> None:
    panels = [Panel(plain(count, side), name, ["1 s", "2 passes"], "2x") for name in ("ar", "lantern++")]
    image = comparison("a photo", panels)
    colours = image.getcolors(maxcolors=1 << 24)
    assert colours is not None and len(colours) > 10  # pictures, and letters with soft edges
    left, right = (image.crop((x, 0, x + image.width // 2, image.height)) for x in (0, image.width // 2))
    for half in (left, right):
        assert half.convert("L").getextrema()[0] < 60
    border = image.crop((0, 0, image.width, 8)).getcolors()
    assert border == [(image.width * 8, (255, 255, 255))] and PAPER == "#ffffff"


def test_bars_under_the_figures_are_as_long_as_the_shares() -> None:
    panels = [Panel(plain(1, 64), name, ["8 s", "2 codes"], mark, shares) for name, mark, shares in SIDES]
    image = comparison("a photo", panels)
    bare = comparison("a photo", [replace(panel, shares=()) for panel in panels])
    assert image.height == bare.height + 4 * BAR_HEIGHT
    half = image.width // 2
    for colour, first, lengths in ((QUIET, 0, {512, 128}), (ACCENT, half, {256, 512})):
        ink = tuple(bytes.fromhex(colour[1:]))
        rows = [[image.getpixel((x, y)) for x in range(first, first + half)] for y in range(image.height)]
        assert lengths <= {row.count(ink) for row in rows}


def test_a_long_prompt_is_wrapped_and_cut() -> None:
    lines = wrap("a photo of a sunflower under a blue sky " * 10, 26, 600)
    assert len(lines) == 3 and lines[-1].endswith("…")
    assert all(font(26).getlength(line) <= 600 for line in lines)
    assert wrap("short", 26, 600) == ["short"]
    assert wrap("w" * 400, 26, 600)[0].endswith("…")
    assert fit("word", 26, 600) == "word"


def test_a_png_has_its_notes_and_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.png"
    save_png(plain(1)[0], path, {"prompt": "a tulip, élan 花"})
    first = path.read_bytes()
    save_png(plain(1)[0], path, {"prompt": "a tulip, élan 花"})
    assert path.read_bytes() == first
    with Image.open(path) as image:
        assert image.text["prompt"] == "a tulip, élan 花"
    assert [p.name for p in path.parent.iterdir()] == ["x.png"]


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_16_bit_greys_keep_their_shades(suffix: str, tmp_path: Path) -> None:
    shades, path = [0, 255, 32768, 65535], tmp_path / f"grey.{suffix}"
    deep = torch.tensor(shades).to(torch.uint16).numpy().tobytes()
    Image.frombytes("I;16", (4, 1), deep).save(path)
    image = open_image(path)
    assert isinstance(image, Image.Image) and image.tobytes()[::3] == bytes(shade >> 8 for shade in shades)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_32_bit_pixels_are_rejected(mode: str, tmp_path: Path) -> None:
    image = Image.new(mode, (2, 2))
    image.save(tmp_path / "x.tif")
    assert "32 bits" in str(open_image(tmp_path / "x.tif"))
    rejects("image 1 cannot be read: its pixels are numbers of 32 bits", pictures, image)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_become_white(mode: str, tmp_path: Path) -> None:
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (90, 90, 90, 255))
    image = image.convert(mode)
    save_png(image, tmp_path / "x.png", {"prompt": "a tulip"})
    for found in (open_image(tmp_path / "x.png"), *pictures(image), *pictures(tmp_path / "x.png")):
        assert isinstance(found, Image.Image) and found.mode == "RGB"
        assert [found.getpixel((x, 0)) for x in (0, 1)] == [(255,) * 3, (90,) * 3]
    found = open_image(tmp_path / "x.png")
    assert isinstance(found, Image.Image) and found.info["prompt"] == "a tulip"
    assert "transparency" not in found.info, "which would be applied again"
