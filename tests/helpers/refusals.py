"""What is refused, in one sentence."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lanternpp import InputError


def rejects(said: str, call: Callable[..., object], *args: object, **options: object) -> str:
    """The call raises an InputError of one line, in which this regular expression is found; that line."""
    with pytest.raises(InputError, match=said) as error:
        call(*args, **options)
    line = str(error.value)
    assert "\n" not in line
    return line
