"""The declaration of one option: its help and limits, in the annotation of a field, parameter or key.

`Annotated[int, Option("Pictures.", ge=1)]` is read by the command line and by pydantic alike.
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
    """The purpose of an option, and the values that it takes: a number of at least `ge` or above `gt`, and at most `le`.

    help: without it, the line `name: help` in the docstring of its group. remedy: the range in words. choices: names that a text may be. names: on the command line, "--" and the field's
    name by default; group: the heading of its help. negative: whether a switch has a `--no-` form. validate: raises
    InputError for a value that is wrong otherwise. more: further sentences of help.
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
        """The full help text, with its possible values."""
        names = f"One of: {', '.join(self.choices)}." if self.choices and not self.more else self.more
        return f"{self.help} {names}".strip()

    def check(self, value: Any, called: str) -> None:
        """InputError where a value, named `called` in the message, is out of range or not finite; None is in range."""
        if value is None:
            return
        if self.validate is not None:
            self.validate(value)
        limits = ((self.ge, operator.ge), (self.gt, operator.gt), (self.le, operator.le))
        kept = [holds(value, bound) for bound, holds in limits if bound is not None]
        if kept and not (all(kept) and math.isfinite(value)):
            raise InputError(f"{called} {value} is out of range; use {self.remedy or self.range}")

    @property
    def range(self) -> str:
        """The range as a phrase, such as "1 to 256"."""
        low = f"above {self.gt:g}" if self.gt is not None else f"{self.ge:g}"
        if self.le is None:
            return low if self.gt is not None else f"{low} or more"
        return f"{low}, at most {self.le:,}" if self.gt is not None else f"{low} to {self.le}"

    def __iter__(self) -> Iterator[Any]:
        """The limits as pydantic knows them; with the next attribute it takes the option for a group of such limits."""
        from annotated_types import Interval

        return iter(Interval(gt=self.gt, ge=self.ge, le=self.le))

    __is_annotated_types_grouped_metadata__ = True


def declared(kind: type) -> dict[str, Option]:
    """The options of a dataclass, by the names of its fields."""
    pairs = ((name, option_of(hint)) for name, hint in get_type_hints(kind, include_extras=True).items())
    return {name: option for name, option in pairs if option is not None}


def option_of(hint: Any) -> Option | None:
    """The option that an annotation declares."""
    meta = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((each for each in meta if isinstance(each, Option)), None)
