"""The defaults and limits of a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lanternpp.api.dials import DRAFT, LONGEST, PARTS, RULE, names
from lanternpp.api.methods import AUTO, check_method
from lanternpp.api.pipeline import Pipeline
from lanternpp.api.settings import Settings
from lanternpp.errors import InputError
from lanternpp.serve.startup import check_keys


@dataclass(frozen=True)
class ServerConfig:
    """The defaults and limits of a server. Without keys, everybody who can connect may draw."""

    method: str = AUTO
    overrides: Mapping[str, Any] = field(default_factory=dict)  # fields of `Settings`, as `Pipeline.settings`
    keys: Sequence[str] = ()  # API keys
    hosts: Sequence[str] = ()  # accepted names in the Host header; empty: any
    deadline: float | None = None  # seconds for a picture, whatever a request asks for
    max_body_bytes: int = 1 << 20
    max_prompt_chars: int = 1000

    def __post_init__(self) -> None:
        check_method(self.method)
        for name, value in (
            ("deadline", self.deadline),
            ("body limit", self.max_body_bytes),
            ("prompt limit", self.max_prompt_chars),
        ):
            if value is not None and value <= 0:
                raise InputError(f"{name} {value} is not above 0")
        if self.deadline is not None and self.deadline > LONGEST:
            raise InputError(f"deadline {self.deadline} is above {LONGEST:,} seconds, a day")
        check_keys(self.keys)

    def settings(self, pipe: Pipeline, method: str | None, given: Mapping[str, Any]) -> Settings:
        """The settings of a request: what the request gives, else what the server was started with.

        method: the request's; None: the server's. given: the dials of the request. The parts and dials that the server was
        started with belong to its own method, so a request for another method gets that method's defaults. Raises
        InputError.
        """
        default = pipe.chosen(self.method).method
        chosen = pipe.chosen(check_method(method)).method if method else default
        of_the_method = names(PARTS, DRAFT, RULE)
        base = {k: v for k, v in self.overrides.items() if chosen == default or k not in of_the_method}
        return pipe.settings(method or self.method, **{**base, **given, "batch_size": 1})
