"""Validation of values from files against the annotations of a dataclass, by pydantic.

`Annotated[int, Between(1, 64)]` bounds a number, `Annotated[str, Len(1, 8)]` a length.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from annotated_types import Interval
from pydantic import ConfigDict, TypeAdapter, ValidationError

from lanternpp.errors import InputError, one_line

T = TypeVar("T")
SHOWN = 80  # characters of a wrong value that a sentence repeats


def Between(low: float, high: float) -> Interval:  # noqa: N802
    """The least and the greatest that a number may be."""
    return Interval(ge=low, le=high)


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[tuple[Any]]:
    """A validator of lists of one `hint`: pydantic takes no config for a dataclass alone."""
    return TypeAdapter(tuple[hint], config=ConfigDict(strict=True, allow_inf_nan=False))


def checked(name: str, value: Any, hint: type[T]) -> T:
    """The value, converted to type `hint`: a list to a tuple, an object to its dataclass. InputError calls it `name`.

    Of an object, keys that the dataclass does not have are ignored, and null counts as absent. Raises InputError where a field without
    a default is missing, or a value is not of its field's type or range.
    """
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
