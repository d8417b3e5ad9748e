"""Files of prompts as benchmarks publish them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.refusals import rejects

from lanternpp.evaluation.prompts import read_prompts, write_geneval

COCO = {
    "images": [{"id": 7, "file_name": "7.jpg"}],
    "annotations": [
        {"image_id": 7, "id": 1, "caption": "A cat. "},
        {"image_id": 9, "id": 2, "caption": "A dog"},
        {"image_id": 7, "id": 3, "caption": "A cat on a mat.\n"},
    ],
}
KARPATHY = {
    "images": [
        {"split": "train", "sentences": [{"raw": "A ship"}]},
        {"split": "test", "sentences": [{"raw": "A cow"}, {"raw": "A brown cow"}]},
    ]
}
PARTI = 'Prompt\tCategory\tChallenge\tNote\na sign that says "Hi"\tArts\tBasic\t\n"Quoted\tArts\tBasic\t\n'


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("captions_val2017.json", json.dumps(COCO), ["A cat on a mat.", "A dog"]),
        ("dataset_coco.json", json.dumps(KARPATHY), ["A brown cow"]),
        ("longest.json", json.dumps(["a cat ", "a dog"]), ["a cat", "a dog"]),
        ("PartiPrompts.tsv", PARTI, ['a sign that says "Hi"', '"Quoted']),
        (
            "metadata.jsonl",
            '{"tag": "x", "prompt": "a bench"}\n\n{"prompt": "a cow"}\n',
            ["a bench", "a cow"],
        ),
        ("mine.txt", "# two\n a cat\n\na dog\n", ["a cat", "a dog"]),
        ("windows.txt", "\ufeff# two\r\na cat\u2028on a mat\r\na dog\x85", ["a cat\u2028on a mat", "a dog"]),
        ("windows.jsonl", '\ufeff{"prompt": "a cat\u2028\x85on a mat"}\r\n', ["a cat\u2028\x85on a mat"]),
        ("shouted.TSV", PARTI, ['a sign that says "Hi"', '"Quoted']),
        ("shouted.JSON", json.dumps(["a cat"]), ["a cat"]),
        ("shouted.JsonL", '{"prompt": "a cow"}\n', ["a cow"]),
        ("windows.tsv", "\ufeffNote\tPrompt\r\n\ta cat\u2028on a mat\r\n", ["a cat\u2028on a mat"]),
    ],
)
def test_the_files_of_benchmarks_are_read_as_they_are(
    name: str, text: str, prompts: list[str], tmp_path: Path
):
    (tmp_path / name).write_bytes(text.encode())
    assert read_prompts(tmp_path / name, tmp_path) == prompts


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("a.json", "3", "no layout known here"),
        ("a.json", "[3]", "no layout known here"),
        ("a.json", '{"annotations": [{"caption": "a cat"}]}', "no layout known here"),
        ("a.json", '{"annotations": []}', "holds none"),
        ("a.json", "{", "not valid JSON"),
        ("a.tsv", "a\tb\n", "no column Prompt"),
        ("a.tsv", "", "no column Prompt"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": 3}\n', "line 2, has no prompt"),
        ("a.jsonl", "3\n", "line 1, has no prompt"),
    ],
)
def test_other_files_are_refused_in_one_sentence(name: str, text: str, named: str, tmp_path: Path):
    (tmp_path / name).write_text(text)
    rejects(named, read_prompts, tmp_path / name, tmp_path)


def test_pictures_lie_as_the_scorer_of_geneval_reads_them(tmp_path: Path):
    pictures = [tmp_path / f"{i}.png" for i in range(3)]
    for i, picture in enumerate(pictures):
        picture.write_bytes(bytes([i]))
    rows = [{"tag": "single_object", "prompt": "a cow"}, {"tag": "counting", "prompt": "two cows"}]
    write_geneval(rows, list(zip((0, 0, 1), pictures, strict=True)), tmp_path / "out")
    found = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*"))
    assert found == [
        "00000/metadata.jsonl",
        "00000/samples/0000.png",
        "00000/samples/0001.png",
        "00001/metadata.jsonl",
        "00001/samples/0000.png",
    ]
    assert json.loads((tmp_path / "out/00001/metadata.jsonl").read_text()) == rows[1]
    assert (tmp_path / "out/00001/samples/0000.png").read_bytes() == bytes([2])
