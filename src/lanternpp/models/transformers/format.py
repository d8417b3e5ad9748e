"""Where the codes of a picture stand in a sequence, and which tokens may stand at each place."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isqrt, sqrt
from typing import Any, Self

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError

Allowed = Callable[[int, Tensor], Any]
"""transformers' `prefix_allowed_tokens_fn`."""
SMALL = 16  # codes of a square small picture's side
REMEMBERED = 16  # returned lists of tokens that are recognised when they are returned again
RESTORE = "leave it out, or undo the acceleration with lanternpp.restore(model)"


@dataclass(frozen=True)
class Raster:
    """Rows of codes, in raster order; with `ends`, every row except the last is followed by a row end."""

    rows: int
    columns: int
    ends: bool = False

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
        """The format with some tokens suppressed at every place."""
        if self.kinds or not suppressed:
            return self
        return replace(self, sets=(frozenset(tokens) - suppressed,), kinds=(0,) * self.length)

    @classmethod
    def probed(
        cls,
        allowed: Allowed,
        suppressed: frozenset[int],
        prompts: Tensor,
        limit: int,
        codes: Collection[int],
        ends: Collection[int],
    ) -> Format:
        """What `prefix_allowed_tokens_fn` allows after prompts [B, T], called with every length up to `limit` new tokens.

        codes: the tokens of image codes; ends: those that end a sequence. Raises InputError where no image code is
        allowed, or the prompts of a batch differ.
        """
        reading = _Reading(allowed, suppressed)
        rows = [reading.places(row, prompt, limit, ends) for row, prompt in enumerate(prompts)]
        if any(row != rows[0] for row in rows):
            raise InputError(
                "prefix_allowed_tokens_fn differs within the batch; draw pictures of one size at once"
            )
        sets, kinds = reading.sets, rows[0]
        free = [place for place, kind in enumerate(kinds) if len(sets[kind]) > 1]
        if not any(not sets[kinds[place]].isdisjoint(codes) for place in free):
            raise InputError(f"prefix_allowed_tokens_fn allows no choice of image tokens; {RESTORE}")
        length = free[-1] + 1
        drawn = dict.fromkeys(kinds[:length])
        extras = dict.fromkeys(token for kind in drawn for token in sorted(sets[kind].difference(codes)))
        end = next((place for place in range(length) if len(sets[kinds[place]]) == 1), None)
        tail = tuple(min(sets[kind]) for kind in kinds[length:])
        width = cls.plain(length).width if end is None else end + 1
        return cls(length, width, tuple(extras), tuple(sets), tuple(kinds[:length]), tail)

    def check(self, allowed: Allowed, suppressed: frozenset[int], sequences: Tensor, prompt: int) -> None:
        """InputError where `prefix_allowed_tokens_fn` allows something else after the drawn codes than was assumed.

        sequences [B, prompt + n]: with the codes drawn.
        """
        reading = _Reading(allowed, suppressed, self.sets)
        for row, sequence in enumerate(sequences):
            for place, kind in enumerate(self.kinds[: sequences.shape[1] - prompt]):
                if reading.kind(row, sequence[: prompt + place]) != kind:
                    raise InputError(
                        "prefix_allowed_tokens_fn depends on the codes that were drawn, which drafts cannot follow; let it "
                        f"depend on their number alone, or {RESTORE}"
                    )


class _Reading:
    """Calls of `prefix_allowed_tokens_fn`; equal sets of tokens get one number."""

    def __init__(self, allowed: Allowed, suppressed: frozenset[int], sets: Iterable[frozenset[int]] = ()):
        self._allowed, self._suppressed = allowed, suppressed
        self.sets = list(sets)
        self._numbers = {tokens: number for number, tokens in enumerate(self.sets)}
        self._objects: dict[int, tuple[Any, int]] = {}  # most functions return the same list again and again

    def kind(self, row: int, tokens: Tensor) -> int:
        """The number of the set that is allowed after these tokens."""
        given = self._allowed(row, tokens)
        held = self._objects.get(id(given))
        if held is None:
            listed = given.flatten().tolist() if isinstance(given, Tensor) else given
            found = frozenset(map(int, listed)) - self._suppressed
            if not found:
                raise InputError("prefix_allowed_tokens_fn allows no token at all at some place")
            if found not in self._numbers:
                self._numbers[found] = len(self.sets)
                self.sets.append(found)
            held = self._objects[id(given)] = given, self._numbers[found]
            if len(self._objects) > REMEMBERED:
                del self._objects[next(iter(self._objects))]
        return held[1]

    def places(self, row: int, prompt: Tensor, limit: int, ends: Collection[int]) -> list[int]:
        """The kinds of all places after a prompt [T], up to the end of the sequence or to `limit`."""
        tokens = torch.cat((prompt, prompt.new_zeros(limit)))
        kinds: list[int] = []
        for place in range(len(prompt), len(tokens)):
            kinds.append(self.kind(row, tokens[:place]))
            allowed = self.sets[kinds[-1]]
            if allowed <= set(ends):
                break
            tokens[place] = next(iter(allowed))
        return kinds
