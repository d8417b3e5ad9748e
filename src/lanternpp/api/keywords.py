"""The dials as keyword arguments with types, for completion and type checkers; `dials.py` has their ranges and texts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeVar

if TYPE_CHECKING:
    import torch

    from lanternpp.accept.base import Acceptance
    from lanternpp.api.results import Partial
    from lanternpp.engine.proposer import Proposer
    from lanternpp.trees.base import TreeBuilder

F = TypeVar("F", bound=Callable[..., Any])
Prompts: TypeAlias = str | Sequence[str]
Seeds: TypeAlias = int | Iterable[int] | None


class MethodDials(TypedDict, total=False):
    """The parts and dials of a method; what is left out or None is the method's."""

    proposer: str | type[Proposer] | None
    tree: str | Path | Sequence[Sequence[int]] | TreeBuilder | type[TreeBuilder] | None
    accept: str | Acceptance | type[Acceptance] | None
    neighbours: int | None
    delta: float | None
    lam: float | None
    nu: float | None
    residual: str | None
    window: int | None
    coupling: str | None
    init: str | None
    alternatives: int | None
    window_rows: int | None
    verify: str | None
    min_survival: float | None


class PictureDials(MethodDials, total=False):
    """Every dial of a picture; what is left out or None is the method's or the model's default."""

    batch_size: int | None
    compile: bool | None
    fit: bool | None
    measure_tv: bool | None
    cfg: float | None
    temperature: float | None
    top_k: int | None
    top_p: float | None


class CallOptions(PictureDials, total=False):
    """The arguments of `Pipeline.__call__` besides the prompt, n and output_type."""

    seed: Seeds
    method: str | None
    progress: Callable[[int, int], None] | None
    callback: Callable[[Partial], None] | None
    generator: torch.Generator | None


def listing(kind: type) -> Callable[[F], F]:
    """A decorator: the function's signature names the keys of a TypedDict in place of `**` alone.

    Completion in a notebook reads them there, and transformers tells a function's own arguments from the model's by it.
    """

    def listed(function: F) -> F:
        own = inspect.signature(function)
        kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        rest = [p for p in own.parameters.values() if p.kind is p.VAR_KEYWORD]
        more = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=getattr(hint, "__forward_arg__", hint),  # as it is written
            )
            for name, hint in kind.__annotations__.items()
        ]
        function.__signature__ = own.replace(parameters=[*kept, *more, *rest])  # type: ignore[attr-defined]
        return function

    return listed
