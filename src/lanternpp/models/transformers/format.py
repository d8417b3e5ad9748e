"""The order of a picture's codes in a sequence, their positions, and the tokens that may stand at each place."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from math import isqrt, sqrt

from torch import Tensor, nn

from lanternpp.errors import InputError

SMALL_SIDE = 16  # codes of a side of a square small picture
NO_TOKEN = "{} allows no token at all at some place"
Positions = tuple[tuple[int, int, int], ...]
"""Three positions of every token (in time, of the row, of the column), relative to that of the first place in time."""


@dataclass(frozen=True)
class Raster:
    """Rows of codes, in raster order; with `ends`, every row except the last is followed by a row end."""

    rows: int
    columns: int
    ends: bool = False

    def __str__(self) -> str:
        return f"{self.columns}x{self.rows}"

    @staticmethod
    def of(size: str, patch: int, ends: bool, max_codes: int, step: int = 1) -> Raster:
        """Return the raster of a size such as "768x512" in pixels (width first) or "768", of codes `patch` pixels wide.

        Raises InputError unless both sides are multiples of `step` codes and the picture has at most `max_codes`.
        """
        match = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", size if "x" in size else f"{size}x{size}")
        width, height = map(int, match.groups()) if match else (0, 0)
        side = patch * step
        if not (width and height) or width % side or height % side:
            raise InputError(
                f"size {size!r} cannot be drawn; give WIDTHxHEIGHT in multiples of {side} pixels"
            )
        raster = Raster(height // patch, width // patch, ends)
        if raster.rows * raster.columns > max_codes:
            raise InputError(
                f"size {size} has {raster.rows * raster.columns} codes and the model draws at most {max_codes}"
            )
        return raster

    @property
    def width(self) -> int:
        """Places from one code to the one below it."""
        return self.columns + self.ends

    @property
    def length(self) -> int:
        """Codes of an image and the row ends between its rows."""
        return self.rows * self.width - self.ends

    def lay(self, grid: Tensor, end: int) -> Tensor:
        """Return codes [B, rows, columns] as a sequence [B, length], with the code `end` after every row except the last."""
        if self.ends:
            grid = nn.functional.pad(grid, (0, 1), value=end)
        return grid.flatten(1)[:, : self.length]

    def grid(self, codes: Tensor) -> Tensor:
        """Return codes [B, length] without their row ends, as [B, rows, columns]."""
        full = nn.functional.pad(codes, (0, int(self.ends)))
        return full.unflatten(1, (self.rows, self.width))[..., : self.columns]

    def format(self, codes: Collection[int], row_end: int | None) -> Format:
        """Return the format of the picture, for the tokens of codes and the token of a row end."""
        if not self.ends or row_end is None:
            return Format(self.length, self.width)
        sets = frozenset(codes), frozenset((row_end,))
        kinds = [int(place % self.width == self.columns) for place in range(self.length)]
        return Format(self.length, self.width, (row_end,), sets, tuple(kinds))


@dataclass(frozen=True)
class TwoPictures(Raster):
    """A small picture, then a large one of the same shape, whose rows and columns these are; InputError if one has no codes."""

    def __post_init__(self) -> None:
        if not self.small.length:
            raise InputError(
                f"size {super().__str__()} codes is too narrow: its small picture would have none"
            )

    def __str__(self) -> str:
        return f"{self.small} and {super().__str__()}"

    @property
    def small(self) -> Raster:
        """The raster of the small picture, of about as many codes as a square of `SMALL_SIDE`."""
        ratio = self.rows / self.columns
        return Raster(int(sqrt(ratio) * SMALL_SIDE), int(sqrt(1 / ratio) * SMALL_SIDE))

    @property
    def length(self) -> int:
        """Codes of both pictures."""
        return self.small.length + self.rows * self.columns

    def format(self, codes: Collection[int], row_end: int | None) -> Format:
        """Return the format of both pictures, each with positions on its own grid."""
        return Format(self.length, self.width, positions=grid_positions((self.small, self)))


@dataclass(frozen=True)
class Format:
    """The places of a picture, their positions, and the tokens that may stand at each.

    sets: the different sets of tokens; kinds: the index of the set that holds at each place. Both are empty where every token
    of the target may stand everywhere. tail: tokens that must follow, each the only one allowed; they are not drawn.
    positions: of the places. prompt_positions: of all prompt slots. Both are empty where the position of a token is its slot;
    without prompt_positions the slots of a prompt follow one another.
    """

    length: int
    width: int  # places from one code to the one below it; only drafts depend on it
    extras: tuple[int, ...] = ()  # allowed tokens that are no codes of the image, such as a row end
    sets: tuple[frozenset[int], ...] = ()
    kinds: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()
    positions: Positions = ()
    prompt_positions: Positions = ()

    @classmethod
    def plain(cls, length: int) -> Format:
        """Return the format of a picture of codes alone, which is taken for a square if it can be one."""
        side = isqrt(length)
        return cls(length, side if side * side == length else length)

    def without(self, suppressed: frozenset[int], tokens: Iterable[int]) -> Format:
        """Return the format less suppressed tokens, which formats with sets lack already; InputError where no token remains."""
        if self.kinds or not suppressed:
            return self
        allowed = frozenset(tokens) - suppressed
        if not allowed:
            raise InputError(NO_TOKEN.format("suppress_tokens"))
        return replace(self, sets=(allowed,), kinds=(0,) * self.length)


def grid_positions(rasters: Iterable[Raster]) -> Positions:
    """Return the positions of pictures that follow one another, and of a token after them, as those of GLM-Image are."""
    positions, start = [], 0
    for raster in rasters:
        for row in range(raster.rows):
            positions += [(start, start + row, start + column) for column in range(raster.columns)]
        start += max(raster.rows, raster.columns)
    return (*positions, (start, start, start))
