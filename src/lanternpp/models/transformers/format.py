"""Where the codes of a picture stand in a sequence, and which tokens may stand at each place."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isqrt, sqrt
from typing import Self

from torch import Tensor, nn

from lanternpp.errors import InputError

SMALL = 16  # codes of a square small picture's side
NO_TOKEN = "{} allows no token at all at some place"


@dataclass(frozen=True)
class Raster:
    """Rows of codes, in raster order; with `ends`, every row except the last is followed by a row end."""

    rows: int
    columns: int
    ends: bool = False

    def __str__(self) -> str:
        return f"{self.columns}x{self.rows}"

    @classmethod
    def of(cls, size: str, patch: int, ends: bool, most: int, step: int = 1) -> Self:
        """A size such as "768x512" in pixels (width first) or "768", of codes `patch` pixels wide.

        Raises InputError unless both sides are multiples of `step` codes and the image has at most `most`.
        """
        found = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", size if "x" in size else f"{size}x{size}")
        side = patch * step
        width, height = map(int, found.groups()) if found else (0, 0)
        if not (width and height) or width % side or height % side:
            raise InputError(
                f"size {size!r} cannot be drawn; give WIDTHxHEIGHT in multiples of {side} pixels"
            )
        raster = cls(height // patch, width // patch, ends)
        if raster.rows * raster.columns > most:
            raise InputError(
                f"size {size} has {raster.rows * raster.columns} codes and the model draws at most {most}"
            )
        return raster

    @classmethod
    def square(cls, sides: Sequence[int], patch: int, size: str | None) -> Raster:
        """A square of the first of `sides` codes `patch` pixels wide, or the one of a size. InputError where it is another size."""
        known = {str(side * patch): side for side in sides}
        pixels = ", ".join(known)
        width, _, height = (size or next(iter(known))).partition("x")
        if width not in known or height not in ("", width):
            drawn = f"squares of {pixels} pixels" if len(known) > 1 else f"{pixels}x{pixels} pixels alone"
            raise InputError(f"size {size} cannot be drawn; this model draws {drawn}")
        return cls(known[width], known[width])

    @property
    def width(self) -> int:
        """Places from one code to the one below it."""
        return self.columns + self.ends

    @property
    def length(self) -> int:
        """Codes of an image and the row ends between its rows."""
        return self.rows * self.width - self.ends

    def lay(self, grid: Tensor, end: int) -> Tensor:
        """Codes of a grid [B, rows, columns] -> [B, length], the code `end` after every row except the last."""
        if self.ends:
            grid = nn.functional.pad(grid, (0, 1), value=end)
        return grid.flatten(1)[:, : self.length]

    def grid(self, codes: Tensor) -> Tensor:
        """codes [B, length] -> [B, rows, columns] without the row ends."""
        full = nn.functional.pad(codes, (0, int(self.ends)))
        return full.unflatten(1, (self.rows, self.width))[..., : self.columns]

    def format(self, codes: Collection[int], row_end: int | None) -> Format:
        """The format with these tokens of codes and of a row end."""
        if not self.ends or row_end is None:
            return Format(self.length, self.width)
        kinds = [int(place % self.width == self.columns) for place in range(self.length)]
        sets = frozenset(codes), frozenset((row_end,))
        return Format(self.length, self.width, (row_end,), sets, tuple(kinds))


@dataclass(frozen=True)
class TwoPictures(Raster):
    """A small picture of the same shape, then the large one, whose rows and columns these are."""

    def __str__(self) -> str:
        return f"{self.small} and {super().__str__()}"

    @property
    def small(self) -> Raster:
        """The small picture's, about as many codes as a square of `SMALL`."""
        ratio = self.rows / self.columns
        return Raster(int(sqrt(ratio) * SMALL), int(sqrt(1 / ratio) * SMALL))

    @property
    def length(self) -> int:
        """Codes of both."""
        return self.small.length + super().length


@dataclass(frozen=True)
class Format:
    """The places of a picture, and the tokens that may stand at each.

    sets: the different sets of tokens; kinds: which of them holds at each place. Both are empty where every token of the
    target may stand everywhere. tail: tokens that must follow, each the only one allowed; they are not drawn.
    """

    length: int
    width: int  # places from one code to the one below it; only drafts depend on it
    extras: tuple[int, ...] = ()  # allowed tokens that are no codes of the image, such as a row end
    sets: tuple[frozenset[int], ...] = ()
    kinds: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()

    @classmethod
    def plain(cls, length: int, width: int = 0) -> Format:
        """A picture of codes alone; without a width it is taken for a square."""
        side = isqrt(length)
        return cls(length, width or (side if side * side == length else length))

    def without(self, suppressed: frozenset[int], tokens: Iterable[int]) -> Format:
        """The format with some tokens suppressed at every place. InputError where none is left."""
        if self.kinds or not suppressed:
            return self
        left = frozenset(tokens) - suppressed
        if not left:
            raise InputError(NO_TOKEN.format("suppress_tokens"))
        return replace(self, sets=(left,), kinds=(0,) * self.length)
