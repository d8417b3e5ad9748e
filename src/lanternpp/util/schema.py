"""Validation of values from files and requests against the annotations of a dataclass.

A field is an int, a float, a bool, a str, a `Literal`, one of these or None, a tuple or list of one kind, a mapping, or
another dataclass. `Annotated[int, Between(1, 64)]` bounds a number, `Annotated[..., Length(1, 8)]` a text's or a tuple's length.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lanternpp.errors import InputError, one_line

T = TypeVar("T")
CALLED = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
HUGE = sys.float_info.max
SHOWN = 80  # characters of a wrong value that a sentence repeats


@dataclass(frozen=True)
class Between:
    """The least and the greatest that a number may be."""

    low: float
    high: float


@dataclass(frozen=True)
class Length:
    """The fewest and the most characters of a text, or entries of a tuple."""

    low: int
    high: int


@functools.cache
def hints(kind: Any) -> dict[str, Any]:
    """The annotated type of each field of a dataclass."""
    known = get_type_hints(kind, include_extras=True)
    return {field.name: known[field.name] for field in dataclasses.fields(kind)}


def made(kind: type[T], values: Mapping[str, Any], within: str = "") -> T:
    """An instance of dataclass `kind` from `values`; unknown keys are ignored, and null counts as absent.

    within: prefix of the names in messages, such as "shape.".
    Raises InputError where a field without a default is missing, or a value is not what the field may be.
    """
    values = {name: value for name, value in values.items() if value is not None}
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    free = (dataclasses.MISSING, dataclasses.MISSING)
    lacking = [f.name for f in fields if f.name not in values and (f.default, f.default_factory) == free]
    if lacking:
        raise InputError(f"{kind.__name__} lacks {', '.join(within + name for name in lacking)}")
    known = hints(kind)  # type: ignore[arg-type]
    return kind(**{n: checked(within + n, values[n], known[n]) for n in known if n in values})


def checked(name: str, value: Any, hint: Any) -> Any:
    """The value, converted to type `hint`: a list to a tuple, an object to its dataclass. InputError calls it `name`."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        found = checked(name, value, args[0])
        for limit in args[1:]:
            bounded(name, found, limit)
        return found
    if origin in (Union, UnionType):
        if value is None and NoneType in args:
            return None
        *others, last = (arg for arg in args if arg is not NoneType)
        for other in others:
            with contextlib.suppress(InputError):
                return checked(name, value, other)
        return checked(name, value, last)
    if origin is Literal:
        if not isinstance(value, str) or value not in args:
            raise wrong(name, value, f"one of {', '.join(args)}")
        return value
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            raise wrong(name, value, "a list")
        return origin(checked(f"{name}[{i}]", one, args[0]) for i, one in enumerate(value))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if not isinstance(value, Mapping):
            raise wrong(name, value, "an object")
        return made(hint, value, f"{name}.")
    if hint is Any:
        return value
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise wrong(name, value, "an object")
        return {key: checked(f"{name}.{key}", one, args[1]) for key, one in value.items()}
    if not plain(value, hint):
        raise wrong(name, value, CALLED[hint])
    return value


def plain(value: Any, kind: type) -> bool:
    """Whether a value is of a plain type. A bool is not a number; an int is also a float."""
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and -HUGE <= value <= HUGE  # excludes NaN, and integers too large for a float
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def bounded(name: str, value: Any, limit: Any) -> None:
    """InputError unless a number or a length is within a limit; None always is."""
    if value is None:
        return
    if isinstance(limit, Between) and not limit.low <= value <= limit.high:
        raise wrong(name, value, f"{limit.low:,} to {limit.high:,}")
    if isinstance(limit, Length) and not limit.low <= len(value) <= limit.high:
        what = "characters" if isinstance(value, str) else "entries"
        raise InputError(f"{name} has {len(value):,} {what}; use {limit.low:,} to {limit.high:,}")


def wrong(name: str, value: Any, right: str) -> InputError:
    """The error for a value that cannot be used."""
    return InputError(f"{name} {shown(value)} cannot be used; use {right}")


def shown(value: Any) -> str:
    """A value for a sentence, in short."""
    try:
        return one_line(repr(value), SHOWN)
    except (ValueError, RecursionError):  # a number of thousands of digits, or too deep a list
        return f"of this {type(value).__name__}"
