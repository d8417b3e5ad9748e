"""The declaration of one option: its help and limits, in the annotation of a field, parameter or key.

Both the command line and pydantic read `Annotated[int, Option("Pictures.", ge=1)]`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from lanternpp.errors import InputError


@dataclass(frozen=True)
class Option:
    """The purpose of an option, and its values: numbers of at least `ge` or above `gt`, and at most `le`.

    help: by default the line `name: help` in the docstring of the option's group. remedy: the range in words. choices: the allowed
    names. names: on the command line, by default "--" and the field's name. group: the heading above the help. negative: whether a
    switch has a `--no-` form. validate: a further check, which raises InputError. more: further sentences of the help.
    """

    help: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    remedy: str = ""
    choices: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    metavar: str | None = None
    group: str = ""
    negative: bool = False
    validate: Callable[[Any], Any] | None = None
    more: str = ""

    @property
    def about(self) -> str:
        """The full help text, with the possible values."""
        details = f"One of: {', '.join(self.choices)}." if self.choices and not self.more else self.more
        return f"{self.help} {details}".strip()

    def check(self, value: Any, name: str) -> None:
        """Raise InputError, calling the value `name`, if it is out of range or not finite; None is in range."""
        if value is None:
            return
        if self.validate is not None:
            self.validate(value)
        limits = ((self.ge, operator.ge), (self.gt, operator.gt), (self.le, operator.le))
        within = [compare(value, limit) for limit, compare in limits if limit is not None]
        if within and not (all(within) and math.isfinite(value)):
            raise InputError(f"{name} {value} is out of range; use {self.remedy or self.range}")

    @property
    def range(self) -> str:
        """The range as a phrase, such as "1 to 256"."""
        if self.gt is not None:
            return f"above {self.gt:g}" + ("" if self.le is None else f", at most {self.le:,}")
        return f"{self.ge:g} or more" if self.le is None else f"{self.ge:g} to {self.le}"

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the limits as pydantic reads them; the next attribute marks an option as a group of such limits."""
        from annotated_types import Interval

        return iter(Interval(gt=self.gt, ge=self.ge, le=self.le))

    __is_annotated_types_grouped_metadata__ = True


def declared(kind: type) -> dict[str, Option]:
    """Return the options of a dataclass by the names of its fields."""
    pairs = ((name, option_of(hint)) for name, hint in get_type_hints(kind, include_extras=True).items())
    return {name: option for name, option in pairs if option is not None}


def option_of(hint: Any) -> Option | None:
    """Return the option that an annotation declares, or None."""
    metadata = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((item for item in metadata if isinstance(item, Option)), None)
