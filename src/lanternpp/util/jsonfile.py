"""JSON of any origin: files, logs of a line for each thing done, and values checked against the annotations of a dataclass.

What is wrong with a file is said in a sentence, also where it is far too large or deep. `Annotated[int, Between(1, 64)]` bounds a
number, `Annotated[str, Len(1, 8)]` a length; pydantic checks them.
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
MOST, LINES = 1 << 26, 1 << 32  # bytes of a file, and of one that has a line for each of many things
DEEPEST = 64  # lists and objects in each other
REMEDY = "restore it from its source"
SHOWN = 80  # characters of a wrong value that a sentence repeats


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


def Between(low: float, high: float) -> Interval:  # noqa: N802
    """The least and the greatest that a number may be."""
    return Interval(ge=low, le=high)


@functools.cache
def _adapter(hint: Any) -> Any:
    """A validator of lists of one `hint`: pydantic takes no config for a dataclass alone."""
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(tuple[hint], config=ConfigDict(strict=True, allow_inf_nan=False))


def checked(name: str, value: Any, hint: type[T]) -> T:
    """The value, converted to type `hint`: a list to a tuple, an object to its dataclass. InputError calls it `name`.

    Of an object, keys that the dataclass does not have are ignored, and null counts as absent. Raises InputError where a field without
    a default is missing, or a value is not of its field's type or range.
    """
    from pydantic import ValidationError

    try:
        # as JSON, from which strict validation makes tuples and dataclasses
        found: T = _adapter(hint).validate_json(json.dumps([_plain(value)], default=str))[0]  # type: ignore[arg-type]
        return found
    except ValidationError as error:
        fault = error.errors(include_url=False)[-1]
    except (RecursionError, ValueError):  # of objects that no JSON file has
        raise InputError(f"{name} nests too deep, or has a number of too many digits") from None
    for part in fault["loc"][1:]:
        name += f"[{part}]" if isinstance(part, int) else f".{part}"
    name = name.strip(".")
    if fault["type"] == "value_error":  # of a dataclass's own check
        raise InputError(fault["ctx"]["error"])
    if fault["type"] == "missing":
        raise InputError(f"{name} is missing")
    why = fault["msg"].replace("Input", "it")
    raise InputError(f"{name} {one_line(repr(fault['input']), SHOWN)} cannot be used: {why}")


def _plain(value: Any) -> Any:
    """A value as JSON has it, without nulls in objects."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items() if one is not None}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row to a log, which is made where it is missing. Raises InputError where it cannot be written."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(row)) + "\n")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def read_rows(path: Path, parse: Callable[[Any], T], remedy: str) -> list[T]:
    """The results of `parse` for every row; none where there is no log. InputError names a damaged line and the remedy."""
    rows = []
    for number, line in enumerate(_whole_lines(path, remedy), 1):
        try:
            rows.append(parse(parse_json(line, "it")))
        except (ValueError, TypeError, KeyError):
            raise InputError(f"{path}, line {number}, is damaged: {remedy}") from None
    return rows


def keep_rows(path: Path, keep: Callable[[Any], bool]) -> None:
    """Remove from a log every row for which `keep` is false, or that cannot be read."""
    kept = []
    for line in _whole_lines(path, "remove it"):
        with suppress(ValueError, TypeError, AttributeError):
            kept += [f"{line}\n"] if keep(parse_json(line, "it")) else []
    if path.exists():
        write_text(path, "".join(kept))


def _whole_lines(path: Path, remedy: str) -> list[str]:
    """The lines of a log; a part of one that a kill left at the end is taken off the file."""
    if not path.exists():
        return []
    text = read_text(path, remedy, LINES)
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        write_text(path, whole)
    return whole.splitlines()


class Journal(dict[str, Any]):
    """Measurements in a log, each under the text of a key, so that a run that was stopped measures none of them twice.

    Raises InputError, which ends with the remedy, where a line is damaged.
    """

    def __init__(self, path: Path, remedy: str):
        super().__init__(read_rows(path, lambda row: (key_of(row["key"]), row["value"]), remedy))
        self.path = path

    def once(self, key: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
        """The measurement under a key; measured now, and logged, where there is none."""
        name = key_of(key)
        if name not in self:
            value = measure()
            append_row(self.path, {"key": dict(key), "value": value})
            self[name] = value
        return self[name]
