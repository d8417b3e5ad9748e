"""Reading an imagefolder: what is skipped is named, and crops are reproducible."""

import json
from pathlib import Path

import pytest
import torch
from helpers.photos import write_photos
from helpers.refusals import rejects

from lanternpp.training.codes import Sampler, generator
from lanternpp.training.pictures import DataWarning, read_rows
from pictures import Pictures


def test_a_corrupt_picture_is_named_and_skipped_with_its_caption(tmp_path: Path) -> None:
    write_photos(tmp_path / "train", 120)
    (tmp_path / "train" / "red" / "004.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    with pytest.warns(DataWarning, match=r"1 of 120 .*red/004.png"):
        pictures = Pictures.read(tmp_path, "train", 32)
    assert len(pictures) == len(pictures.texts) == 119 and pictures.skipped == ("red/004.png",)
    for image, text in zip(pictures.centre(torch.arange(119)), pictures.texts, strict=True):
        assert ("red" in text) == bool(image[0].amax() > 0.5 and image[2].amax() <= 0.51)
    (tmp_path / "train" / "red" / "006.png").unlink()
    rejects(r"2 of 120 .*red/006.png \(missing\)", Pictures.read, tmp_path, "train", 32)


def test_metadata_in_the_root_is_read_too(data: Path) -> None:
    before = read_rows(data, "val")
    rows = []
    for split in ("train", "val"):
        path = data / split / "metadata.jsonl"
        for line in path.read_text().splitlines():
            row = json.loads(line)
            rows.append({**row, "file_name": f"{split}/{row['file_name']}"})
        path.unlink()
    (data / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    after = read_rows(data, "val")
    assert (after.files, after.texts) == (before.files, before.texts)


def test_spellings_of_a_file_name_are_one_picture_and_further_captions_warn(data: Path) -> None:
    before, path = read_rows(data, "val"), data / "val" / "metadata.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    names = ("./{}", f"{data}/val/{{}}", "{}", "red//../{}")
    pairs = zip(lines, names, strict=True)
    lines = [{**row, "file_name": name.format(row["file_name"])} for row, name in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    after = read_rows(data, "val")
    assert (after.files, after.texts, after.key) == (before.files, before.texts, before.key)
    path.write_text(path.read_text() + json.dumps({"file_name": before.files[0], "text": "another"}) + "\n")
    said = r"1 lines of .*val/metadata.jsonl name a picture again: .* the last"
    with pytest.warns(DataWarning, match=said):
        assert read_rows(data, "val").texts == ("another", *before.texts[1:])


def test_another_picture_of_the_same_size_is_another_key(data: Path) -> None:
    before, path = read_rows(data, "val"), data / "val" / "red" / "000.png"
    key, content = before.key, path.read_bytes()
    path.write_bytes(content[:-20] + bytes(20))
    assert before.key != key
    path.write_bytes(content)
    assert before.key == key


def test_missing_parts_are_rejected(data: Path, tmp_path: Path) -> None:
    rejects("nowhere/train is no folder: --data takes", read_rows, tmp_path / "nowhere", "train")
    path = data / "val" / "metadata.jsonl"
    path.write_text('{"file_name": "red/000.png"}\n')
    rejects("line 1, has no text", read_rows, data, "val")
    path.write_text("oops\n")
    rejects("line 1, has no file_name", read_rows, data, "val")
    path.write_text("")
    rejects("no captions", read_rows, data, "val")
    path.unlink()
    rejects(r"metadata\.jsonl is missing", read_rows, data, "val")


def test_crops_are_those_of_their_offset_flip_and_scale(data: Path) -> None:
    pictures = Pictures.read(data, "train", 32)
    index = torch.arange(12)
    plain = pictures.centre(index)
    half, ones = torch.full((12, 2), 0.5), torch.ones(12)
    mirrored = pictures.crops(index, half, ones > 0, ones)
    assert torch.allclose(mirrored.flip(-1), plain, atol=1e-4)
    exact = pictures.crops(index, torch.zeros(12, 2), ones < 0, torch.zeros(12))  # the corner, as stored
    assert torch.allclose((exact + 1) * 127.5, pictures.pixels[:, :, :32, :32].float(), atol=1e-2)
    draws = [pictures.random(generator(1, s), index) for s in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_every_epoch_has_every_picture_in_a_new_variant_and_depends_only_on_the_step() -> None:
    sampler = Sampler(10, 6, 5, seed=3)
    steps = [sampler(step)[:2] for step in range(2 * 6)]  # six epochs of two steps
    epochs = [torch.cat((steps[i][0], steps[i + 1][0])) for i in range(0, 12, 2)]
    assert all(sorted(epoch.tolist()) == list(range(10)) for epoch in epochs)
    assert not torch.equal(epochs[0], epochs[1])
    seen = torch.zeros(10, 6, dtype=torch.int64)
    for index, variant in steps:
        seen[index, variant] += 1
    assert (seen == 1).all()
    for again, known in zip(Sampler(10, 6, 5, seed=3)(3), steps[3], strict=False):
        assert torch.equal(again, known)
