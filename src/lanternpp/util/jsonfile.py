"""JSON of any origin: read at a sane size and depth, or rejected in a sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lanternpp.errors import InputError
from lanternpp.util.files import write_text

MOST, LINES = 1 << 26, 1 << 32  # bytes of a file, and of one that has a line for each of many things
DEEPEST = 64  # lists and objects in each other
REMEDY = "restore it from its source"


def read_json(path: Path, remedy: str = REMEDY) -> Any:
    """The content of a JSON file. Raises InputError, which ends with the remedy."""
    return parse_json(read_text(path, remedy), str(path), remedy)


def read_object(path: Path, remedy: str = REMEDY) -> dict[str, Any]:
    """The content of a JSON file, which must be an object. InputError as `read_json`."""
    content = read_json(path, remedy)
    if not isinstance(content, dict):
        raise InputError(
            f"{path} holds a {type(content).__name__}, where a JSON object is expected: {remedy}."
        )
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A JSON file that people can read, replaced as a whole. InputError where it cannot be written."""
    write_text(path, json.dumps(dict(content), indent=2) + "\n")


def read_text(path: Path, remedy: str = REMEDY, most: int = MOST) -> str:
    """A text file in UTF-8: no byte order mark, and only \\n at the ends of lines, by which a caller splits it.

    `str.splitlines` would also split at U+2028, which a caption may hold. Raises InputError where the file is missing, no plain
    file, too large, or other text.
    """
    try:
        if not path.is_file():
            raise InputError(f"{path} is {'no plain file' if path.exists() else 'missing'}: {remedy}.")
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): {remedy}.") from None
    if len(content) > most:
        raise InputError(f"{path} is larger than {most >> 20} MiB: {remedy}.")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text in UTF-8 (byte {error.start}): {remedy}.") from None


def parse_json(text: str, source: str, remedy: str = REMEDY) -> Any:
    """The content of JSON. Raises InputError, which names `source`."""
    try:
        content = json.loads(text)
        if nests_deeper(content, DEEPEST):
            raise RecursionError
        return content
    except RecursionError:
        wrong = f"nests lists and objects more than {DEEPEST} deep"
    except json.JSONDecodeError as error:
        wrong = f"is not valid JSON ({error})"
    except ValueError:  # Python's limit of digits
        wrong = "is not valid JSON (a number of too many digits)"
    raise InputError(f"{source} {wrong}: {remedy}.")


def read_lines(path: Path, key: str, remedy: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a .jsonl, each with the name of its line for messages. InputError where one has no text under `key`."""
    for number, line in enumerate(read_text(path, remedy, LINES).split("\n"), 1):
        if line.strip():
            row, where = None, f"{path}, line {number},"
            with suppress(InputError):
                row = parse_json(line, where)
            if not isinstance(row, dict) or not isinstance(row.get(key), str) or not row[key].strip():
                raise InputError(f"{where} has no {key}: {line[:60]!r}; {remedy}")
            yield where, row


def key_of(facts: Mapping[str, Any]) -> str:
    """Facts as the key of a table: the same text whatever their order."""
    return json.dumps(facts, sort_keys=True)


def nests_deeper(content: Any, most: int) -> bool:
    """Whether more than `most` lists and objects lie in each other."""
    if not isinstance(content, dict | list):
        return False
    inside = content.values() if isinstance(content, dict) else content
    return most == 0 or any(nests_deeper(one, most - 1) for one in inside)


def differences(old: Any, new: Any, name: str = "") -> Iterator[str]:
    """The differences of two nested objects, by the names that lead to them: "settings.lam 2.0 -> 4.0"."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            yield from differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif old != new:
        long = any(isinstance(value, dict | list) for value in (old, new))
        yield name if long else f"{name} {old!r} -> {new!r}"
