"""Measuring which tree is fastest while there is nothing to draw."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator

from lanternpp.errors import InputError
from lanternpp.serve.fresh_thread import run_in_fresh_thread
from lanternpp.settings import Settings

log = logging.getLogger("lanternpp.serve")
BROKEN = "measuring which tree is fastest failed; the model's own tree is used"
Choose = Callable[[Settings, int], Settings]
Steps = Generator[tuple[int, int], None, Choose]


class Calibration:
    """Runs a measurement one step at a time, and keeps its result in `choose`.

    `steps` yields (done, total) before each measurement, and returns the function that chooses the settings to draw with.
    The constructor runs it up to the first measurement, so `choose` is set at once where nothing has to be measured. An
    error is logged and ends the measuring, nothing else.
    """

    def __init__(self, steps: Steps, notify: Callable[[str], None] = log.info):
        """notify: called with a sentence when measuring begins, and when it ends."""
        self.choose: Choose | None = None
        self.failed = False
        self.done = self.total = 0
        self._steps, self._notify = steps, notify
        self._announced = False
        run_in_fresh_thread(self._next)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to measure, or measuring failed."""
        return self.failed or self.choose is not None

    def step(self) -> None:
        """Run one step of the measurement, unless it is finished."""
        if self.finished:
            return
        if not self._announced:
            self._announced = True
            self._notify(
                "measuring which tree is fastest here, once, while no request waits; --no-calibrate leaves that out"
            )
        self._next()
        if self.choose is not None:
            self._notify("measured which tree is fastest here; pictures are drawn with it from now on")

    def _next(self) -> None:
        try:
            self.done, self.total = next(self._steps)
        except StopIteration as end:
            self.choose, self.done = end.value, self.total
        except Exception as error:
            if isinstance(error, InputError):
                self._notify(f"which tree is fastest cannot be measured: {error}")
            else:
                log.error(BROKEN, exc_info=error)
            self.failed = True
