"""For the Python reference: what a docstring says of a parameter, on a line that starts with its name, becomes a list item."""

from __future__ import annotations

import re
from typing import Any

import griffe

PARAMETER = re.compile(r"^(?=[a-z_]\w*: )", re.M)
ENDS = re.compile(r"^(?=Raises InputError|An interrupt raises)", re.M)


class Parameters(griffe.Extension):
    """Sees every object of the package once, as it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put `* ` before each such line, and end the list before a sentence on errors."""
        if obj.docstring and obj.is_function and PARAMETER.search(obj.docstring.value):
            first, *items = PARAMETER.split(obj.docstring.value)
            listed = "".join(f"* {item}" for item in items)
            obj.docstring.value = f"{first.rstrip()}\n\n" + ENDS.sub("\n", listed)
