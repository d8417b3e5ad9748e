"""A config file's fields as a frozen dataclass, whose annotations are the schema: see `lanternpp.util.schema`.

The ranges are far beyond any published model, and small enough that a bad file cannot exhaust the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from lanternpp.errors import InputError
from lanternpp.util.schema import Between, Length, made

T = TypeVar("T")

Width = Annotated[int, Between(1, 1 << 16)]  # channels
Hidden = Annotated[int, Between(1, 1 << 18)]  # channels within a feed-forward layer
Layers = Annotated[int, Between(1, 512)]
Heads = Annotated[int, Between(1, 1024)]
HeadDim = Annotated[int, Between(0, 512)]  # 0: the width shared among the heads
Codes = Annotated[int, Between(1, 1 << 20)]  # of a codebook or of a vocabulary of text
Grid = Annotated[int, Between(1, 128)]  # codes of an image's side
Slots = Annotated[int, Between(1, 4096)]  # of a prompt
Positions = Annotated[int, Between(1, 1 << 24)]
Epsilon = Annotated[float, Between(0, 1)]
RopeBase = Annotated[float, Between(1, 1e12)]
Share = Annotated[float, Between(0, 1)]
Words = Annotated[tuple[Annotated[str, Length(0, 200)], ...], Length(0, 1 << 16)]
Stages = Annotated[tuple[Annotated[int, Between(1, 1 << 13)], ...], Length(1, 8)]  # channels, or times them
Blocks = Annotated[int, Between(0, 64)]  # of a stage
StageBlocks = Annotated[tuple[Blocks, ...], Length(1, 8)]


def config_as(kind: type[T], config: Mapping[str, Any], source: Path) -> T:
    """`config` (as read from `source`) as a `kind`; keys it does not have are left alone.

    Raises InputError where a field without a default is missing or a value cannot be used.
    """
    try:
        return made(kind, config)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InputError(f"{source}: config.json: {error}") from None
