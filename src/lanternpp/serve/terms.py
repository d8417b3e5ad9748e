"""What a server offers, and to whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lanternpp.dials import DRAFT, PARTS, RULE, names
from lanternpp.errors import InputError
from lanternpp.methods import AUTO, check_method
from lanternpp.pipeline import Pipeline
from lanternpp.serve.entrance import check_keys
from lanternpp.settings import Settings


@dataclass(frozen=True)
class Terms:
    """The limits and defaults of a server. No key: whoever reaches it may draw."""

    method: str = AUTO
    overrides: Mapping[str, Any] = field(default_factory=dict)  # fields of `Settings`, as `Pipeline.settings`
    keys: Sequence[str] = ()
    hosts: Sequence[str] = ()  # names by which it may be called; none: any
    deadline: float | None = None  # seconds for a picture, whatever a request asks for
    body: int = 1 << 20  # most bytes of a request
    prompt: int = 1000  # most characters of a prompt

    def __post_init__(self) -> None:
        check_method(self.method)
        for name, value in (
            ("deadline", self.deadline),
            ("body limit", self.body),
            ("prompt limit", self.prompt),
        ):
            if value is not None and value <= 0:
                raise InputError(f"{name} {value} is not above 0")
        check_keys(self.keys)

    def settings(self, pipe: Pipeline, named: str | None, given: Mapping[str, Any]) -> Settings:
        """The settings of a request: what it gives, then what the server was started with. Raises InputError.

        The server's dials are its own method's; a request for another method gets that one's defaults.
        """
        own = pipe.chosen(self.method).method
        name = pipe.chosen(check_method(named)).method if named else own
        its = names(PARTS, DRAFT, RULE)
        base = {k: v for k, v in self.overrides.items() if name == own or k not in its}
        return pipe.settings(named or self.method, **{**base, **given, "batch_size": 1})
