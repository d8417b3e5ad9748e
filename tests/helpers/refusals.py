"""An assertion about rejected input."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lanternpp import InputError


def rejects(said: str, call: Callable[..., object], *args: object, **options: object) -> str:
    """Assert that the call raises an InputError of one line that matches a regular expression; return the line."""
    with pytest.raises(InputError, match=said) as error:
        call(*args, **options)
    line = str(error.value)
    assert "\n" not in line
    return line
