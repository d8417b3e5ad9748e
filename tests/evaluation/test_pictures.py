"""Folders of pictures: their pictures, their prompts, and what is rejected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.refusals import rejects
from PIL import Image

from lanternpp.api.picture import grid, save_png
from lanternpp.errors import InputError
from lanternpp.evaluation.pictures import Gallery, reference_folder, square, to_pixels


def plain(colour: tuple[int, int, int], size: tuple[int, int] = (20, 20)) -> Image.Image:
    return Image.new("RGB", size, colour)


def fill(folder: Path, count: int, size: tuple[int, int] = (20, 20)) -> Path:
    for i in range(count):
        save_png(plain((i * 10, 0, 0), size), folder / f"{i:02d}.png", {"prompt": f"prompt {i}"})
    return folder


@pytest.mark.parametrize("count", [2, 5, 12])
def test_a_grid_that_generate_wrote_is_read_as_its_pictures(count: int, tmp_path: Path) -> None:
    images = [plain((i * 10, 100, 0), (16, 12)) for i in range(count)]
    save_png(grid(images), tmp_path / "sheet.png", {"prompt": "a rose", "images": str(count)})
    gallery = Gallery.read(tmp_path, one_size=True)
    assert [image.tobytes() for image in gallery] == [image.tobytes() for image in images]
    assert gallery.prompts == ["a rose"] * count
    save_png(plain((0, 0, 0), (101, 100)), tmp_path / "sheet.png", {"images": "4"})
    rejects("no grid of 4 pictures", Gallery.read, tmp_path)


def test_an_imagefolder_has_captions_and_only_the_pictures_in_its_metadata(tmp_path: Path) -> None:
    fill(tmp_path / "val" / "red", 3)
    rows = [{"file_name": "red/02.png", "text": "a red thing"}, {"file_name": "red/00.png"}]
    (tmp_path / "val" / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    gallery = Gallery.read(reference_folder(tmp_path))
    assert gallery.prompts == ["prompt 0", "a red thing"]
    assert [image.getpixel((0, 0))[0] for image in gallery] == [0, 20]
    (tmp_path / "val" / "metadata.jsonl").unlink()
    all_of_them = Gallery.read(reference_folder(tmp_path / "val"))
    assert all_of_them.prompts == [f"prompt {i}" for i in range(3)], "in the order of names"


def test_any_path_into_the_folder_may_name_a_picture(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(fill(tmp_path / "a", 3).parent)
    names = ("./a/00.png", "a//01.png", f"{tmp_path}/a/02.png")
    rows = (json.dumps({"file_name": name, "text": f"text {i}"}) + "\n" for i, name in enumerate(names))
    Path("metadata.jsonl").write_text("".join(rows))
    for folder in (Path(), tmp_path):
        assert Gallery.read(folder).prompts == ["text 0", "text 1", "text 2"]
    (tmp_path / "a" / "metadata.jsonl").write_text('{"file_name": "/b/00.png"}')
    rejects("line 1, names /b/00.png, which is not in a;", Gallery.read, Path("a"))


def test_at_most_ten_unreadable_pictures_are_named(tmp_path: Path) -> None:
    content = (fill(tmp_path, 1) / "00.png").read_bytes()
    for i in range(12):
        (tmp_path / f"bad-{i:02d}.png").write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match=r"bad-00.png \(.*bad-09.png \([^)]*\), and 2 more$") as error:
        Gallery.read(tmp_path)
    assert "bad-10" not in str(error.value)


def test_sizes_that_differ_are_named(tmp_path: Path) -> None:
    fill(tmp_path, 4)
    plain((0, 0, 0), (20, 24)).save(tmp_path / "odd.webp")
    rejects(r"most pictures are 20 x 20, but not odd.webp \(20 x 24\)", Gallery.read, tmp_path, one_size=True)
    assert len(Gallery.read(tmp_path)) == 5


def test_wrong_metadata_is_rejected(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "00.png"}\n{"text": "x"}\n')
    rejects("line 2", Gallery.read, tmp_path)
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "gone.png"}\n')
    rejects(r"gone.png \(missing\)", Gallery.read, tmp_path)


def test_squares_are_central_and_antialiased(tmp_path: Path) -> None:
    wide = Image.new("RGB", (40, 20), (0, 0, 0))
    wide.paste((200, 100, 50), (10, 0, 30, 20))
    assert set(square(wide, 20).get_flattened_data()) == {(200, 100, 50)}
    stripes = Image.new("L", (64, 64))
    stripes.putdata([255 * (x % 2) for _ in range(64) for x in range(64)])
    assert all(110 < pixel[0] < 145 for pixel in square(stripes, 16).get_flattened_data())
    pixels = to_pixels(square(wide, 20))
    assert pixels.shape == (3, 20, 20) and pixels[:, 0, 0].tolist() == [200, 100, 50]
