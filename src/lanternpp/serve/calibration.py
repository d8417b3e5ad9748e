"""Measuring which tree is fastest while nobody waits for a picture."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator

from lanternpp.errors import InputError
from lanternpp.serve.aside import aside
from lanternpp.settings import Settings

log = logging.getLogger("lanternpp.serve")
BROKEN = "measuring which tree is fastest broke; the model's own tree is used"
Choose = Callable[[Settings, int], Settings]
Steps = Generator[tuple[int, int], None, Choose]


class Calibration:
    """A measurement in steps, which yields (done, total) before each and returns what to draw with.

    Made, it has begun: `choose` is there already where nothing had to be measured. What goes wrong is logged, and ends
    the measuring alone.
    """

    def __init__(self, steps: Steps, tell: Callable[[str], None] = log.info):
        """tell: called with a sentence when measuring begins, and when it ends."""
        self.choose: Choose | None = None
        self.failed = False
        self.done = self.total = 0
        self._steps, self._tell = steps, tell
        self._told = False
        aside(self._next)

    @property
    def over(self) -> bool:
        """Whether nothing is left to measure."""
        return self.failed or self.choose is not None

    def step(self) -> None:
        """A step of the measurement, unless it is over."""
        if self.over:
            return
        if not self._told:
            self._told = True
            self._tell(
                "measuring which tree is fastest here, once, while no request waits; --no-calibrate leaves that out"
            )
        self._next()
        if self.choose is not None:
            self._tell("measured which tree is fastest here; pictures are drawn with it from now on")

    def _next(self) -> None:
        try:
            self.done, self.total = next(self._steps)
        except StopIteration as end:
            self.choose, self.done = end.value, self.total
        except Exception as error:
            if isinstance(error, InputError):
                self._tell(f"which tree is fastest cannot be measured: {error}")
            else:
                log.error(BROKEN, exc_info=error)
            self.failed = True
