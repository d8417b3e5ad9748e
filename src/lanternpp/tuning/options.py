"""The options of a tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from lanternpp.errors import InputError
from lanternpp.util.options import Option

# Pictures that a budget is measured on by default, which the help of `budget_pictures` repeats.
TV_PICTURES, FRECHET_PICTURES = 8, 100
MIN_FRECHET_PICTURES = 4


@dataclass(frozen=True)
class TuningOptions:
    """The extent and the limits of a search.

    n: Pictures for each entrant of the race at the end.
    rounds: Batches that a good draft is drawn for; slow ones are given up earlier.
    budget_tv: Also choose the strength of a relaxed rule (neighbours and lambda, or delta): at most so much total variation per picture.
    budget_frechet: The same: a Fréchet distance at most X % above that of plain decoding.
    budget_pictures: Pictures that a budget is measured on; default: 8, or 100 for Fréchet distances.
    """

    n: Annotated[int, Option(ge=1, le=10_000, names=("-n", "--n"))] = 8
    trials: Annotated[int, Option("Drafts that are tried.", ge=1, le=100_000)] = 40
    rounds: Annotated[int, Option(ge=1, le=1000)] = 3
    nodes: Annotated[int, Option("The most draft codes of a pass.", ge=1, le=512)] = 64
    depth: Annotated[int, Option("The most levels of a tree, or codes of a window.", ge=1, le=32)] = 16
    budget_tv: Annotated[float | None, Option(ge=0, metavar="X")] = None
    budget_frechet: Annotated[float | None, Option(ge=0, metavar="X")] = None
    budget_pictures: Annotated[int | None, Option(ge=1, le=100_000)] = None

    @property
    def limited(self) -> bool:
        """Whether there is a budget."""
        return self.budget_tv is not None or self.budget_frechet is not None

    @property
    def measured_on(self) -> int:
        """The number of pictures that a budget is measured on."""
        return self.budget_pictures or (TV_PICTURES if self.budget_frechet is None else FRECHET_PICTURES)

    def check(self, race: bool) -> None:
        """Raise InputError if options contradict each other; race: whether there is one at the end."""
        if self.n != TuningOptions.n and not race:
            raise InputError("-n is for the race at the end; leave out -n or --no-race")
        if self.budget_tv is not None and self.budget_frechet is not None:
            raise InputError("--budget-tv and --budget-frechet cannot both be held; give one")
        if self.budget_pictures and not self.limited:
            raise InputError("--budget-pictures would change nothing without a budget; give one")
        if self.budget_frechet is not None and self.measured_on < MIN_FRECHET_PICTURES:
            raise InputError(
                f"--budget-pictures {self.measured_on} are too few to measure; use {MIN_FRECHET_PICTURES} or more"
            )
