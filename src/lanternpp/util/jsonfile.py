"""JSON of any origin: files, logs with one row of JSON per line, and values checked against the annotations of a dataclass.

An InputError says in one sentence why a file is wrong, also if the file is far too large or nested. pydantic checks the annotations:
`Annotated[int, Between(1, 64)]` bounds a number, `Annotated[str, Len(1, 8)]` a length.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from annotated_types import Interval

from lanternpp.errors import InputError, one_line
from lanternpp.util.files import write_text

T = TypeVar("T")
MAX_BYTES, MAX_LOG_BYTES = 1 << 26, 1 << 32  # maximum bytes of a file, and of a log or another list of lines
MAX_DEPTH = 64  # levels of nested lists and objects
REMEDY = "restore it from its source"
MAX_VALUE_CHARS = 80  # characters of a wrong value that a message repeats


def read_json(path: Path, remedy: str = REMEDY, most: int = MAX_BYTES) -> Any:
    """Return the content of a JSON file of at most so many bytes. Raise InputError, ending with the remedy, if it cannot be read."""
    return parse_json(read_text(path, remedy, most), str(path), remedy)


def read_object(path: Path, remedy: str = REMEDY) -> dict[str, Any]:
    """Return the object in a JSON file. Raise InputError as `read_json`, and for any other content."""
    content = read_json(path, remedy)
    if not isinstance(content, dict):
        raise InputError(
            f"{path} holds a {type(content).__name__}, where a JSON object is expected: {remedy}."
        )
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an indented JSON file, replaced as a whole. Raise InputError if it cannot be written."""
    write_text(path, json.dumps(dict(content), indent=2) + "\n")


def read_text(path: Path, remedy: str = REMEDY, most: int = MAX_BYTES) -> str:
    """Return the text of a UTF-8 file without a byte order mark, its lines ended by \\n alone.

    Callers split the text at \\n: `str.splitlines` would also split at U+2028, which a caption may hold. Raise InputError if the
    file is missing, no plain file, larger than `most` bytes, or not UTF-8.
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
    """Return the content of a JSON text. Raise InputError, naming `source`, if it is invalid or nested too deep."""
    try:
        content = json.loads(text)
        if nests_deeper(content, MAX_DEPTH):
            raise RecursionError
        return content
    except RecursionError:
        fault = f"nests lists and objects more than {MAX_DEPTH} deep"
    except json.JSONDecodeError as error:
        fault = f"is not valid JSON ({error})"
    except ValueError:  # Python limits the digits of an integer
        fault = "is not valid JSON (a number of too many digits)"
    raise InputError(f"{source} {fault}: {remedy}.")


def read_lines(path: Path, key: str, remedy: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield "FILE, line N," and the object of each line of a .jsonl. Raise InputError if an object has no text under `key`."""
    for number, line in enumerate(read_text(path, remedy, MAX_LOG_BYTES).split("\n"), 1):
        if line.strip():
            row = None
            with suppress(InputError):
                row = parse_json(line, "it")
            if not isinstance(row, dict) or not isinstance(row.get(key), str) or not row[key].strip():
                raise InputError(f"{path}, line {number}, has no {key}: {line[:60]!r}; {remedy}")
            yield f"{path}, line {number},", row


def key_of(facts: Mapping[str, Any]) -> str:
    """Return facts as text that does not depend on their order, for the key of a table."""
    return json.dumps(facts, sort_keys=True)


def nests_deeper(content: Any, max_depth: int) -> bool:
    """Return whether more than `max_depth` levels of lists and objects are nested."""
    if not isinstance(content, dict | list):
        return False
    items = content.values() if isinstance(content, dict) else content
    return max_depth == 0 or any(nests_deeper(item, max_depth - 1) for item in items)


def differences(old: Any, new: Any, name: str = "") -> Iterator[str]:
    """Yield the differences of two nested objects, each with its path of keys: "settings.lam 2.0 -> 4.0"."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            yield from differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif old != new:
        nested = any(isinstance(value, dict | list) for value in (old, new))
        yield name if nested else f"{name} {old!r} -> {new!r}"


def Between(low: float, high: float) -> Interval:  # noqa: N802
    """Return the annotation of a number from `low` to `high`, both included."""
    return Interval(ge=low, le=high)


@functools.cache
def _adapter(hint: Any) -> Any:
    """Return a strict validator of lists with one `hint`; pydantic takes no config for a dataclass outside a list."""
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(tuple[hint], config=ConfigDict(strict=True, allow_inf_nan=False))


def validated(name: str, value: Any, hint: type[T]) -> T:
    """Return the value converted to type `hint`: a list to a tuple, an object to its dataclass.

    Keys of an object that the dataclass does not have are ignored, and null counts as absent. Raise InputError, calling the value
    `name`, if a field without a default is missing, or a value is not of its field's type or range.
    """
    from pydantic import ValidationError

    try:
        # From JSON, unlike from Python objects, strict validation makes tuples and dataclasses.
        converted: T = _adapter(hint).validate_json(json.dumps([_plain(value)], default=str))[0]  # type: ignore[arg-type]
        return converted
    except ValidationError as error:
        fault = error.errors(include_url=False)[-1]
    for part in fault["loc"][1:]:
        name += f"[{part}]" if isinstance(part, int) else f".{part}"
    name = name.strip(".")
    if fault["type"] == "value_error":  # raised by a dataclass's own check
        raise InputError(fault["ctx"]["error"])
    if fault["type"] == "missing":
        raise InputError(f"{name} is missing")
    reason = fault["msg"].replace("Input", "it")
    raise InputError(f"{name} {one_line(repr(fault['input']), MAX_VALUE_CHARS)} cannot be used: {reason}")


def _plain(value: Any) -> Any:
    """Return a value as dicts, lists and plain values, without the None values of dicts."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row to a log; a missing log is made. Raise InputError if it cannot be written."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(row)) + "\n")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def read_rows(path: Path, parse: Callable[[Any], T], remedy: str) -> list[T]:
    """Return `parse(row)` of every row; [] if there is no log. Raise InputError with the remedy if a line is damaged."""
    rows = []
    for number, line in enumerate(_complete_lines(path, remedy), 1):
        try:
            rows.append(parse(parse_json(line, "it")))
        except (ValueError, TypeError, KeyError):
            raise InputError(f"{path}, line {number}, is damaged: {remedy}") from None
    return rows


def keep_rows(path: Path, keep: Callable[[Any], bool]) -> None:
    """Remove every row from a log that cannot be read or for which `keep` is false."""
    lines = []
    for line in _complete_lines(path, "remove it"):
        with suppress(ValueError, TypeError, AttributeError):
            if keep(parse_json(line, "it")):
                lines.append(f"{line}\n")
    if path.exists():
        write_text(path, "".join(lines))


def _complete_lines(path: Path, remedy: str) -> list[str]:
    """Return the lines of a log. An incomplete last line, left by a killed process, is removed from the file."""
    if not path.exists():
        return []
    text = read_text(path, remedy, MAX_LOG_BYTES)
    complete = text[: text.rfind("\n") + 1]
    if complete != text:
        write_text(path, complete)
    return complete.splitlines()


class Journal(dict[str, Any]):
    """Logged measurements by the text of their keys. Raises InputError, ending with the remedy, if a line is damaged."""

    def __init__(self, path: Path, remedy: str):
        super().__init__(read_rows(path, lambda row: (key_of(row["key"]), row["value"]), remedy))
        self.path = path

    def once(self, key: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
        """Return the logged measurement under a key; call `measure` and log its result if there is none."""
        name = key_of(key)
        if name not in self:
            value = measure()
            append_row(self.path, {"key": dict(key), "value": value})
            self[name] = value
        return self[name]
