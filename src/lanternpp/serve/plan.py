"""What a server draws with, as data: whoever has it can open the batcher, in this process or in another."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from lanternpp.pipeline import Pipeline
from lanternpp.serve.batcher import Batcher, Choose
from lanternpp.serve.terms import Terms


@dataclass(frozen=True)
class Plan:
    """A model as `Pipeline.from_pretrained` reads it, the terms of a server, and the sizes of its batcher."""

    model: str
    drafter: str | None
    device: str
    dtype: str
    size: str | None
    terms: Terms
    slots: int = 8
    queue: int = 64
    lanes: int = 4

    def open(self, pipe: Pipeline | None = None, choose: Choose | None = None) -> Batcher:
        """The batcher of a model, read here if it was not before; it is the caller's to close.

        choose: as of `Batcher`. From here on warnings are about strangers' prompts, and not shown. Raises InputError.
        """
        pipe = pipe or self.read()
        warnings.simplefilter("ignore", UserWarning)
        return Batcher(pipe, self.slots, self.queue, self.lanes, choose)

    def read(self) -> Pipeline:
        """The model; what is missing of the method is missed here. Raises InputError."""
        pipe = Pipeline.from_pretrained(self.model, self.drafter, self.device, self.dtype, self.size)
        pipe.new_engine(self.terms.settings(pipe, None, {}))
        return pipe
