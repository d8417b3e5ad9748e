"""Files of prompts as benchmarks publish them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.refusals import rejects

from lanternpp.evaluation.prompts import read_prompts
from lanternpp.util.jsonfile import MAX_BYTES

COCO = {
    "images": [{"id": 7, "file_name": "7.jpg"}],
    "annotations": [
        {"image_id": 7, "id": 1, "caption": "A cat on my mat"},
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
        ("mine.txt", "# two\n a cat\n\na dog\n", ["a cat", "a dog"]),
        ("windows.txt", "\ufeff# two\r\na cat\u2028on a mat\r\na dog\x85", ["a cat\u2028on a mat", "a dog"]),
        (
            "windows.JsonL",
            '\ufeff{"tag": "x", "prompt": "a cat\u2028\x85on a mat"}\r\n\n{"prompt": "a cow"}\r\n',
            ["a cat\u2028\x85on a mat", "a cow"],
        ),
        ("windows.tsv", "\ufeffNote\tPrompt\r\n\ta cat\u2028on a mat\r\n", ["a cat\u2028on a mat"]),
    ],
)
def test_files_of_benchmarks_are_read(name: str, text: str, prompts: list[str], tmp_path: Path):
    (tmp_path / name).write_bytes(text.encode())
    assert read_prompts(tmp_path / name, tmp_path) == prompts


def test_captions_may_be_larger_than_other_files(tmp_path: Path):
    (path := tmp_path / "dataset_coco.json").write_text(json.dumps(KARPATHY).ljust(MAX_BYTES + 1))
    assert read_prompts(path, tmp_path) == ["A brown cow"]


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
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
def test_other_files_are_rejected(name: str, text: str, named: str, tmp_path: Path):
    (tmp_path / name).write_text(text)
    rejects(named, read_prompts, tmp_path / name, tmp_path)
