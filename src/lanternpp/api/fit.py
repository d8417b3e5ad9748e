"""The draft that is fastest on this machine: the measurement of steps, the file of measurements, and the choice.

How long a step takes with a draft is measured for at most a second, or 5 % of a picture's time.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import torch

import lanternpp
from lanternpp.api.model import NETWORKS, Model
from lanternpp.api.options import BASELINE, METHODS, MethodDials, Settings, names
from lanternpp.api.rates import DECIDING, Counter, Counts, passes, read_rates, strength
from lanternpp.api.settings import NO_DRAFT, dials_read, is_joint, with_tree
from lanternpp.engine.decode import Engine
from lanternpp.engine.observers import TimedEngine
from lanternpp.errors import InputError
from lanternpp.nn.backend import backend
from lanternpp.nn.checkpoints import checksum
from lanternpp.trees import static_shape
from lanternpp.trees.static import Shape, chain, is_chain
from lanternpp.util.devices import device_name
from lanternpp.util.files import digest, user_cache
from lanternpp.util.jsonfile import Between, checked, key_of, read_object, write_json
from lanternpp.util.registry import Importable

SWITCH = "LANTERNPP_FIT"  # in the environment; 0: nothing is fitted, as with --no-fit
PLAIN = "plain"
MARGIN = 0.02  # how much slower than the fastest draft a shorter one may be: the error of a measurement
# In the order in which they are measured, as the budget of a large model may end before all are.
DEPTHS = (4, 2, 8, 12, 6, 3, 10, 14, 5, 16, 1, 7)
TREES = ("deep-8", "eagle-25")  # offered beside chains to a method whose own tree branches
COSTED = ({*DECIDING} - {"delta", "lam", "nu", "residual"}) | {"batch_size"}
CPUINFO = Path("/proc/cpuinfo")
ENOUGH = 200  # passes after which counting ends: codes per pass are then known to about 5 %
KEPT = 256  # settings whose counts, or steps, the file keeps: those that were added to last
# The budget of a measurement: seconds, or a share of a picture by plain decoding where that is more.
SECONDS, SHARE = 0.8, 0.05
# Timed steps of a draft: FEWEST, one less where a step takes SLOW seconds, and up to MOST until they have taken LONG seconds.
FEWEST, MOST, LONG, SLOW = 3, 7, 0.04, 0.1
# Other work has disturbed a measurement from this mean of the spreads on, 1.06 on a quiet machine, or where a pass takes so many
# times as long as one over more rows.
NOISY, FALL = 1.15, 1.3


@dataclass(frozen=True)
class Step:
    """A measured step with one draft. Seconds are medians."""

    draft: str  # a tree, "window-8", or "plain"
    rows: Annotated[int, Between(1, 1 << 32)]  # of the target's pass
    seconds: Annotated[float, Between(1e-9, 1e9)]
    target: Annotated[float, Between(0, 1e9)]  # seconds of the target's pass in it
    spread: float  # median over minimum, or seconds over those in which a CPU's thread had a core, where that is more


Span = tuple[float, float]  # seconds of a step, and of the target's pass in it


def warm_step(timed: TimedEngine) -> Span:
    """A step that follows one of the same engine, as in drawing: the caches hold what it reads. A slow step is taken as it is."""
    span = timed.midway_step()
    return span if span[0] > SLOW else timed.midway_step()


def measure(drafts: Iterable[tuple[str, Callable[[], Engine]]], length: int) -> tuple[Step, ...]:
    """Time the steps of some drafts until the budget is used up, each in an engine of its own that is freed after it.

    drafts: their names, and functions that make the engine. The first is plain decoding, which is timed after every timed step of
    another draft: a step's time relative to plain decoding's does not change when the machine becomes slower for a while. The second
    is always measured too, the others as far as the budget allows. length: codes of a picture.
    """
    (plain_name, make_plain), *others = drafts
    began, plain = time.perf_counter(), TimedEngine(make_plain())
    plain.midway_step(first=True)  # with the set-up of a first use
    beside = [warm_step(plain) for _ in range(FEWEST)]
    budget = max(SECONDS, SHARE * length * beside[-1][0])
    passed = ran = 0.0
    measured: list[tuple[str, int, list[tuple[Span, Span]]]] = []
    for name, make in others:
        used = time.perf_counter() - began
        if measured and used + used / (1 + len(measured)) > budget:
            break
        try:
            drafted = TimedEngine(make())
        except InputError:  # such as too little memory for it
            if not measured:
                raise
            break
        fewest = FEWEST - (drafted.midway_step(first=True)[0] > SLOW)
        pairs, since, had = list[tuple[Span, Span]](), time.perf_counter(), time.thread_time()
        while len(pairs) < fewest or (len(pairs) < MOST and time.perf_counter() - since < LONG):
            pairs.append((warm_step(drafted), warm_step(plain)))
        passed, ran = passed + time.perf_counter() - since, ran + time.thread_time() - had
        measured.append((name, drafted.rows, pairs))
        beside += [other for _, other in pairs]
    usual = median(seconds for seconds, _ in beside)
    waited = passed / ran if ran and plain.engine.codes.device.type == "cpu" else 1.0
    steps = []
    for name, rows, pairs in ((plain_name, plain.rows, [(span, span) for span in beside]), *measured):
        seconds, target = (usual * median(span[i] / other[0] for span, other in pairs) for i in (0, 1))
        taken = [span[0] for span, _ in pairs]
        steps.append(Step(name, rows, seconds, target, max(waited, median(taken) / min(taken))))
    return tuple(steps)


def joined(known: Sequence[Step], steps: Sequence[Step]) -> tuple[Step, ...]:
    """Known steps, and others as if the machine had taken them at the pace of the known ones; plain decoding's is the first of `steps`."""
    seconds = {one.draft: one.seconds for one in known}
    scale = next((seconds[s.draft] / s.seconds for s in steps[:1] if s.draft in seconds), 1.0)
    more = (s for s in steps if s.draft not in seconds)
    return (*known, *(replace(s, seconds=s.seconds * scale, target=s.target * scale) for s in more))


def disturbed(steps: Sequence[Step]) -> bool:
    """Whether other work took the cores while the steps were measured."""
    by_rows = combinations(sorted(steps, key=lambda step: step.rows), 2)
    return fmean(step.spread for step in steps) > NOISY or any(
        before.target > FALL * after.target and before.rows < after.rows for before, after in by_rows
    )


def bound(steps: Sequence[Step]) -> str | None:
    """One sentence on what bounds passes on this machine; None where too little was measured to tell."""
    rows = sorted({step.rows for step in steps})
    if len(rows) < 3:
        return None
    fastest = min(step.target for step in steps if step.rows == rows[0])
    cheap = max(step.rows for step in steps if step.target <= 2 * fastest)
    if cheap == rows[0]:
        return f"arithmetic bounds this machine: any draft more than doubles the time of a pass over {cheap} rows"
    if cheap == rows[-1]:
        return f"memory bounds this machine: a pass over {cheap} rows takes at most twice as long as one over {rows[0]}"
    return f"memory bounds passes over up to {cheap} rows on this machine, arithmetic larger ones"


@dataclass(frozen=True)
class Store:
    """The content of the file: measured steps and counted acceptance, by the settings that they hold for, as text.

    Of two measurements the one that was written first holds; of those of more than `KEPT` settings the latest are kept. facts:
    everything that the measurements depend on. Where the file is damaged, or nothing can be written, one warning says so, and
    measurements of this process serve it alone.
    """

    facts: Mapping[str, str] = field(default_factory=dict)
    steps: dict[str, tuple[Step, ...]] = field(default_factory=dict)
    counts: dict[str, Counts] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The file of these facts."""
        return user_cache() / f"fit-{digest([f'{key} {value}' for key, value in self.facts.items()])}.json"

    def enough(self, key: str) -> Counts | None:
        """The counts of this key; None until they are enough."""
        found = self.counts.get(key)
        return found if found is not None and found.passes >= ENOUGH else None

    def add_steps(self, key: str, steps: tuple[Step, ...]) -> None:
        """Add the steps of a key; those of an earlier process stay."""
        self.read()
        self.steps[key] = joined(self.steps.pop(key, ()), steps)
        self._write()

    def add_counts(self, key: str, counts: Counts) -> bool:
        """Add to the counts of a key, unless they are enough; returns whether more are needed."""
        self.read()
        if self.enough(key) is None:
            known = self.counts.pop(key, None)
            self.counts[key] = known + counts if known else counts
            self._write()
        return self.enough(key) is None

    def read(self) -> None:
        """Take over the measurements of other processes."""
        try:
            found = checked("", read_object(self.path) if self.path.is_file() else {}, Store)
        except (InputError, OSError) as error:
            _warn(f"this machine is measured again: {error}")
            return
        # where nothing can be written, this process knows more
        for key, steps in found.steps.items():
            self.steps[key] = joined(steps, self.steps.get(key, ()))
        for key, counts in found.counts.items():
            self.counts[key] = max(counts, self.counts.get(key, counts), key=lambda each: each.passes)

    def _write(self) -> None:
        for kept in (self.steps, self.counts):
            for key in list(kept)[:-KEPT]:
                del kept[key]
        try:
            write_json(self.path, asdict(self))
        except InputError as error:
            _warn(f"the measurements of this machine are not kept for the next run: {error}")


@cache
def _warn(sentence: str) -> None:
    """Warn once in a process."""
    warnings.warn(sentence, stacklevel=3)


def machine_facts(device: torch.device) -> dict[str, str]:
    """The conditions of a step's time besides the model: processor, its flags, threads, kernels, version of PyTorch."""
    lines = CPUINFO.read_text(encoding="utf-8").splitlines() if CPUINFO.is_file() else []
    named = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {
        "processor": named.get("model name", "unknown"),
        "flags": digest([named.get("flags", named.get("Features", ""))]),
        "threads": str(torch.get_num_threads()),
        "kernels": backend(device).name,
        "torch": torch.__version__,
    }


class Fit:
    """Fits drafts to this machine, for one model; engine: makes a new engine. Raises InputError where stored rates are damaged."""

    def __init__(self, model: Model, engine: Callable[[Settings], Engine]):
        target, name = model.target, model.dtype_name
        packed = getattr(target.decoder, "packed_dtype", None)
        # models that were loaded elsewhere have no files
        checked = checksum(target.embed(target.examples(8)[None]))
        facts = machine_facts(model.device) | {
            "device": device_name(model.device),
            "dtype": f"{name}, {packed}" if packed else name,
            "weights": digest([model.weights, checked, str(target.decoder.config)]),
            "lanternpp": lanternpp.__version__,
        }
        self.engine, self.length, self.store = engine, target.length, Store(facts)
        self.store.read()
        drafter = model.other or model.folder
        folders = (model.folder, *(drafter / kind for kind in NETWORKS), drafter)
        self.rates = {name: counts for folder in folders for name, counts in read_rates(folder).items()}
        # strengths, and the drafts with which their acceptance is to be counted while drawing
        self._uncounted: set[tuple[str, str]] = set()
        self._offered: dict[str, set[str]] = {}  # drafts by key that this process had in a measurement
        self._disturbed: dict[str, tuple[Step, ...]] = {}  # steps by key that other processes are not to read

    def __call__(self, settings: Settings) -> Settings:
        """Settings to fit -> the settings with the fastest draft; plain decoding's where no draft is faster.

        The steps of a few drafts are measured now unless they were before. Where acceptance rates are not known yet the method's
        own draft stays, with `fit` False, and is counted.
        """
        own, shape = replace(settings, fit=False), shape_of(settings)
        if os.environ.get(SWITCH) == "0" or shape is None:
            return own
        counts = self.counts(settings)
        if counts is None:
            self._uncounted.add((key_of(strength(settings)), draft_name(settings)))
            return own
        candidates = self._candidates(settings, shape, counts)
        steps = self._steps(settings, {name: draft for name, (draft, _) in candidates.items()})
        if not steps.keys() > {PLAIN}:
            return own
        seconds = {
            name: step.seconds * passes(self.length, candidates[name][1]) for name, step in steps.items()
        }
        least = min(seconds.values())
        good = [name for name in seconds if name != PLAIN and seconds[name] * (1 - MARGIN) <= least]
        best = PLAIN if seconds[PLAIN] == least else min(good, key=lambda name: steps[name].rows)
        return candidates[best][0]

    def counts(self, settings: Settings) -> Counts | None:
        """The acceptance of a method's drafts, where it is known."""
        mine = key_of(strength(settings))
        return self.rates.get(mine) or self.store.enough(mine)

    def bound(self, settings: Settings) -> str | None:
        """One sentence on what bounds passes on this machine; None where it was not measured for such settings."""
        return bound(self._known(key_of(costed(settings))))

    def count(self, settings: Settings, engine: Engine) -> None:
        """Let an engine count the acceptance of its drafts, where a fit waits for the counts."""
        mine = key_of(strength(settings))
        if (mine, draft_name(settings)) in self._uncounted and self.counts(settings) is None:
            Counter(engine, partial(self.store.add_counts, mine))

    def _steps(self, settings: Settings, candidates: Mapping[str, Settings]) -> dict[str, Step]:
        """The steps of the candidates, stored or measured now: what the budget leaves out is left to the next process."""
        mine = key_of(costed(settings))
        offered = self._offered.setdefault(mine, set())
        known = {step.draft: step for step in self._known(mine) if step.draft in candidates}
        lacking = [name for name in candidates if name == PLAIN or name not in known]
        if offered.issuperset(lacking) or candidates.keys() <= known.keys():
            return known
        offered.update(lacking)
        with suppress(InputError):  # such as too little memory for an engine more
            steps = measure(((name, partial(self.engine, candidates[name])) for name in lacking), self.length)
            if disturbed(steps):
                self._disturbed[mine] = joined(self._known(mine), steps)
            else:
                self.store.add_steps(mine, steps)
        return {step.draft: step for step in self._known(mine) if step.draft in candidates}

    def _known(self, key: str) -> tuple[Step, ...]:
        """The steps of a key that were measured, the stored ones first, as they hold where both are of one draft."""
        return joined(self.store.steps.get(key, ()), self._disturbed.get(key, ()))

    @staticmethod
    def _candidates(settings: Settings, own: Shape, counts: Counts) -> dict[str, tuple[Settings, float]]:
        """Plain decoding, the method's own draft, and others whose acceptance is known, with their codes per pass.

        Trees come last, as they take longest.
        """
        if settings.window is not None:
            drafts = [replace(settings, window=levels) for levels in DEPTHS]
        else:
            named = (*(f"chain-{levels}" for levels in DEPTHS), *(() if is_chain(own) else TREES))
            drafts = [with_tree(settings, name) for name in named]
        drafts.insert(0 if is_chain(own) else len(drafts), settings)
        plain = plain_settings(settings)
        found = {draft_name(plain): (plain, 1.0)}
        for draft in drafts:
            shape = shape_of(draft) or own
            if counts.cover(shape) and (draft is settings or shape != own):
                found[draft_name(draft)] = draft, counts.codes(shape)
        return found


def shape_of(settings: Settings) -> Shape | None:
    """The shape of a method's drafts; None where it has none, it is decided while drafting or by compiled steps, or a part is the
    caller's own, whose code may change while its name stays.
    """
    parts = settings.proposer, settings.accept, settings.tree
    if any(isinstance(part, Importable) and ":" in part for part in parts):
        return None
    read = dials_read(settings.proposer, settings.accept)
    if settings.compile or settings.min_survival or settings.proposer == NO_DRAFT:
        return None
    if "window" in read and settings.window is not None:
        if settings.window_rows not in (None, 1):
            return None
        return (*chain(settings.window), *((rank,) for rank in range(1, 1 + (settings.alternatives or 0))))
    return static_shape(settings.tree) if "tree" in read and settings.tree else None


def draft_name(settings: Settings) -> str:
    """The name of a draft in a file of measured steps."""
    if settings.proposer == NO_DRAFT:
        return PLAIN
    return f"window-{settings.window}" if settings.window is not None else str(settings.tree)


def plain_settings(settings: Settings) -> Settings:
    """The same picture by plain decoding: `ar`'s parts, without the dials that these do not read."""
    row = dict.fromkeys(names(MethodDials)) | {**METHODS[BASELINE].dials}
    return replace(settings, method=BASELINE, **row)


def costed(settings: Settings) -> dict[str, Any]:
    """The settings that decide the time of a step besides the draft's shape."""
    found = {name: getattr(settings, name) for name in COSTED} | {"joint": is_joint(settings)}
    sampled = {"greedy": settings.temperature == 0, "warped": settings.top_k > 0 or settings.top_p < 1}
    return found | sampled | {"guided": settings.cfg != 1}
