"""The file in the user's cache with what was measured and counted for one model on one machine."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from lanternpp.api.fit.rates import ENOUGH, Counts, check_counts
from lanternpp.api.fit.steps import Step
from lanternpp.errors import InputError
from lanternpp.nn.backend import backend
from lanternpp.util.files import digest, user_cache, write_text
from lanternpp.util.jsonfile import read_object
from lanternpp.util.schema import made

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class _Content:
    """facts: of the machine and the model, for people who read the file."""

    facts: Mapping[str, str] = field(default_factory=dict)
    steps: Mapping[str, tuple[Step, ...]] = field(default_factory=dict)
    counts: Mapping[str, Counts] = field(default_factory=dict)


class Store:
    """Measured steps and counted acceptance by a text that says what they hold for. What is written first holds.

    Where the file is damaged, or nothing can be written, one warning says so, and what this process measures serves it alone.
    """

    def __init__(self, facts: Mapping[str, str]):
        """facts: everything that the measurements depend on."""
        self.facts = facts
        self.path = user_cache() / f"fit-{digest([f'{key} {value}' for key, value in facts.items()])}.json"

    @cached_property
    def content(self) -> _Content:
        """What is known, from the file and of this process."""
        return self._read()

    def steps(self, key: str) -> tuple[Step, ...] | None:
        """The steps that were measured for this key."""
        return self.content.steps.get(key)

    def counts(self, key: str) -> Counts | None:
        """What was counted for this key; None until it is enough."""
        found = self.content.counts.get(key)
        return found if found is not None and found.passes >= ENOUGH else None

    def add_steps(self, key: str, steps: tuple[Step, ...], keep: bool) -> tuple[Step, ...]:
        """The steps to use for a key: those of a process that was earlier, and these of other drafts, written down with `keep`."""
        self._update()
        known = self.content.steps.get(key, ())
        steps = (*known, *(step for step in steps if step.draft not in {one.draft for one in known}))
        self.content = replace(self.content, steps={**self.content.steps, key: steps})
        if keep:
            self._write()
        return steps

    def add_counts(self, key: str, counts: Counts) -> bool:
        """Add to what was counted for a key, unless that is enough; returns whether more is wanted."""
        self._update()
        known = self.content.counts.get(key)
        if known is None or known.passes < ENOUGH:
            known = counts if known is None else known + counts
            self.content = replace(self.content, counts={**self.content.counts, key: known})
            self._write()
        return known.passes < ENOUGH

    def _update(self) -> None:
        """Take over what other processes have written since."""
        now, mine = self._read(), self.content
        self.content = _Content(self.facts, {**mine.steps, **now.steps}, {**mine.counts, **now.counts})

    def _write(self) -> None:
        try:
            write_text(self.path, json.dumps(asdict(self.content), indent=1) + "\n")
        except InputError as error:
            self._warn(f"what was measured of this machine is not kept for the next run: {error}")

    def _read(self) -> _Content:
        try:
            content = made(_Content, read_object(self.path)) if self.path.is_file() else _Content()
            for counts in content.counts.values():
                check_counts(counts)
            if any(step.seconds <= 0 or step.rows < 1 for steps in content.steps.values() for step in steps):
                raise InputError(f"{self.path} has steps of no duration")
        except (InputError, OSError) as error:
            self._warn(f"this machine is measured again: {error}")
            return _Content()
        return content

    def _warn(self, sentence: str) -> None:
        """Warn once."""
        if "warned" not in self.__dict__:
            self.__dict__["warned"] = True
            warnings.warn(sentence, stacklevel=2)


def machine_facts() -> dict[str, str]:
    """What decides the time of a step besides the model: processor, its flags, threads, kernels, version of PyTorch."""
    lines = CPUINFO.read_text(encoding="utf-8").splitlines() if CPUINFO.is_file() else []
    named = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {
        "processor": named.get("model name", "unknown"),
        "flags": digest([named.get("flags", named.get("Features", ""))]),
        "threads": str(torch.get_num_threads()),
        "kernels": backend().name,
        "torch": torch.__version__,
    }
