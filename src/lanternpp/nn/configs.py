"""A config file's fields as a frozen dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from lanternpp.errors import InputError

T = TypeVar("T")


def config_as(kind: type[T], config: Mapping[str, Any], source: Path) -> T:
    """`config` (as read from `source`) as a `kind`; keys it does not have are left alone.

    Raises InputError where a field without a default is missing or a value cannot be used.
    """
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    missing = [
        name
        for name, f in fields.items()
        if name not in config
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise InputError(f"{source}: config.json lacks {', '.join(missing)}; it is not a {kind.__name__}")
    try:
        return kind(**{name: config[name] for name in fields if name in config})
    except (TypeError, ValueError) as error:
        raise InputError(f"{source}: config.json cannot be used: {error}") from None
