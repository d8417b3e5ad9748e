"""The draft that is fastest on this machine: the measurement of steps, the file of measurements, and the choice.

How long a step takes with a draft is measured for at most a second, or 5 % of a picture's time.
"""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache, partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch

import lanternpp
from lanternpp.api.model import NETWORKS, Model
from lanternpp.api.options import BASELINE, METHODS, MethodDials, RuleDials, Settings, names
from lanternpp.api.rates import RATE_DIALS, Counter, Counts, passes, read_rates, strength
from lanternpp.api.settings import NO_DRAFT, is_joint, with_tree
from lanternpp.engine.decode import Engine
from lanternpp.engine.observers import TimedEngine
from lanternpp.errors import InputError
from lanternpp.nn.backend import backend
from lanternpp.nn.checkpoints import checksum
from lanternpp.trees import static_shape
from lanternpp.trees.static import Shape, chain, is_chain
from lanternpp.util.devices import device_name, own_devices, usable_cores
from lanternpp.util.files import digest, user_cache
from lanternpp.util.jsonfile import Between, key_of, read_object, validated, write_json
from lanternpp.util.registry import GivenEntry

SWITCH = "LANTERNPP_FIT"  # in the environment; 0: nothing is fitted, as with --no-fit
PLAIN = "plain"
# How much slower than the fastest draft a shorter one, or plain decoding, may be; the latter is the error of a measurement.
MARGIN, PLAIN_MARGIN = 0.02, 0.05
# In the order of measurement, as the budget may end before all depths are measured.
DEPTHS = (4, 2, 8, 12, 6, 3, 10, 14, 5, 16, 1, 7)
TREES = ("deep-8", "eagle-25")  # offered beside chains to a method whose own tree branches
COST_DIALS = ({*RATE_DIALS} - {*names(RuleDials)}) | {"neighbours", "batch_size"}
CPUINFO = Path("/proc/cpuinfo")
MIN_PASSES = 200  # passes after which counting ends: codes per pass are then known to about 5 %
MAX_SETTINGS = 256  # settings whose counts, or steps, the file keeps: the latest ones
# The budget of a measurement: seconds, or a share of the seconds of a picture by plain decoding where that is more.
SECONDS, SHARE = 0.8, 0.05
# A draft gets MIN_STEPS timed steps, and up to MAX_STEPS in STEP_SECONDS. A step of SLOW_STEP seconds needs no step before it.
MIN_STEPS, MAX_STEPS, STEP_SECONDS, SLOW_STEP = 3, 7, 0.04, 0.1
# Plain decoding finds small models in a CPU's cache, from which drafts displace them. Several steps bring them back.
WARM_SECONDS = 0.01
# Other work has disturbed a measurement above this mean spread (1.06 on a quiet machine), or where a pass takes more than
# MAX_RATIO times as long as a pass over more rows.
MAX_SPREAD, MAX_RATIO = 1.15, 1.3


@dataclass(frozen=True)
class Step:
    """A measured step with one draft. Its times are medians, in the median step of plain decoding of the same measurement."""

    rows: Annotated[int, Between(1, 1 << 32)]  # of the target's pass
    time: Annotated[float, Between(1e-9, 1e9)]
    target: Annotated[float, Between(0, 1e9)]  # time of the target's pass in the step
    spread: float  # the larger of median over minimum, and of seconds over seconds of CPU time on a CPU


Steps = dict[str, Step]  # by the draft: a tree, "window-8", or "plain"


Span = tuple[float, float]  # seconds of a step, and of the target's pass in the step


def warm_step(timed: TimedEngine, seconds: float = 0.0) -> Span:
    """Time a step after at least one other, and `seconds`, of the same engine, so that CPU caches are warm; a slow step is timed alone."""
    began, span = time.perf_counter(), timed.midway_step()
    if span[0] > SLOW_STEP:
        return span
    while time.perf_counter() - began < seconds:
        timed.midway_step()
    return timed.midway_step()


def measure(drafts: Iterable[tuple[str, Callable[[], Engine]]], length: int) -> Steps:
    """Time the steps of some drafts until the budget is used up, or there is too little memory for an engine.

    drafts: names, and functions that make the engine. The first is plain decoding, which is timed after every timed step of
    another draft. The second is always measured too, the others as far as the budget allows. length: codes of a picture.
    """
    (plain_name, make_plain), *drafted_engines = drafts
    began, thread_began = time.perf_counter(), time.thread_time()
    plain_spans, steps = list[Span](), dict[str, tuple[int, list[Span]]]()
    with suppress(InputError):  # such as too little memory for an engine
        plain = TimedEngine(make_plain())
        plain.midway_step(zero_cache=True)  # with the set-up of a first use
        budget = max(SECONDS, SHARE * length * warm_step(plain)[0])
        for name, make_engine in drafted_engines:
            elapsed = time.perf_counter() - began
            # The next draft is expected to take the mean time of plain decoding and of the drafts before it.
            if steps and elapsed + elapsed / len(steps) > budget:
                break
            steps[name] = measure_beside(plain, plain_spans, make_engine)
    if not steps:
        return {}
    wall_seconds, thread_seconds = time.perf_counter() - began, time.thread_time() - thread_began
    # On a CPU, seconds beyond the thread's own CPU time were spent waiting for a core.
    on_cpu = plain.engine.codes.device.type == "cpu"
    wait_ratio = wall_seconds / thread_seconds if thread_seconds and on_cpu else 1.0
    plain_seconds = median(seconds for seconds, _ in plain_spans)
    measured = Steps()
    for name, (rows, spans) in ({plain_name: (plain.rows, plain_spans)} | steps).items():
        seconds, target_seconds = (sorted(part) for part in zip(*spans, strict=True))
        times = median(seconds) / plain_seconds, median(target_seconds) / plain_seconds
        measured[name] = Step(rows, *times, spread=max(wait_ratio, median(seconds) / seconds[0]))
    return measured


def measure_beside(
    plain: TimedEngine, plain_spans: list[Span], make_engine: Callable[[], Engine]
) -> tuple[int, list[Span]]:
    """Time steps of a draft, in an engine that is freed at the end, and of plain decoding in turn; add the latter to `plain_spans`.

    Return the rows of the draft's passes, and its steps.
    """
    drafted, spans = TimedEngine(make_engine()), list[Span]()
    drafted.midway_step(zero_cache=True)
    start = time.perf_counter()
    while len(spans) < MAX_STEPS:
        if len(spans) >= MIN_STEPS and time.perf_counter() - start > STEP_SECONDS:
            break
        spans.append(warm_step(drafted))
        plain_spans.append(warm_step(plain, WARM_SECONDS))
    return drafted.rows, spans


def disturbed(steps: Collection[Step]) -> bool:
    """Return whether other work took the cores while the steps were measured."""
    pairs = combinations(sorted(steps, key=lambda step: step.rows), 2)
    slower = (small.target > MAX_RATIO * large.target for small, large in pairs if small.rows < large.rows)
    return any(slower) or sum(step.spread for step in steps) > MAX_SPREAD * len(steps)


def bound(steps: Collection[Step]) -> str | None:
    """Return a sentence on what bounds passes on this machine; None where too little was measured to tell."""
    rows = sorted({step.rows for step in steps})
    if len(rows) < 3:
        return None
    fastest = min(step.target for step in steps if step.rows == rows[0])
    cheap_rows = max(step.rows for step in steps if step.target <= 2 * fastest)
    if cheap_rows == rows[0]:
        return f"arithmetic bounds this machine: any draft more than doubles the time of a pass over {cheap_rows} rows"
    if cheap_rows == rows[-1]:
        return f"memory bounds this machine: a pass over {cheap_rows} rows takes at most twice as long as one over {rows[0]}"
    return f"memory bounds passes over up to {cheap_rows} rows on this machine, arithmetic larger ones"


@dataclass(frozen=True)
class Store:
    """The content of the file: measured steps and acceptance counts, by the text of the settings that they hold for.

    Of two measurements the one that was written first holds; the file keeps the latest `MAX_SETTINGS` settings. facts:
    all conditions of the measurements. Where the file is damaged, or nothing can be written, one warning says so, and
    measurements of this process serve it alone.
    """

    facts: Mapping[str, str] = field(default_factory=dict)
    steps: dict[str, Steps] = field(default_factory=dict)
    counts: dict[str, Counts] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The file of these facts."""
        return user_cache() / f"fit-{digest([f'{key} {value}' for key, value in self.facts.items()])}.json"

    def complete_counts(self, key: str) -> Counts | None:
        """Return the counts of a key; None while they are of fewer than `MIN_PASSES` passes."""
        counts = self.counts.get(key)
        return counts if counts is not None and counts.passes >= MIN_PASSES else None

    def add_steps(self, key: str, steps: Steps) -> None:
        """Add the steps of a key; steps of an earlier process stay."""
        self.read()
        self.steps[key] = steps | self.steps.pop(key, {})
        self._write()

    def add_counts(self, key: str, counts: Counts) -> bool:
        """Add to the counts of a key, unless they are complete; return whether more counts are needed."""
        self.read()
        if self.complete_counts(key) is None:
            earlier = self.counts.pop(key, None)
            self.counts[key] = earlier + counts if earlier else counts
            self._write()
        return self.complete_counts(key) is None

    def read(self) -> None:
        """Take over the measurements of other processes."""
        try:
            stored = validated("", read_object(self.path, "remove it") if self.path.is_file() else {}, Store)
        except (InputError, OSError) as error:
            _warn(f"this machine is measured again: {error}")
            return
        # Where nothing can be written, this process has more measurements than the file.
        for key, steps in stored.steps.items():
            self.steps[key] = self.steps.get(key, {}) | steps
        for key, counts in stored.counts.items():
            self.counts[key] = max(counts, self.counts.get(key, counts), key=lambda counts: counts.passes)

    def _write(self) -> None:
        for measurements in (self.steps, self.counts):
            for key in list(measurements)[:-MAX_SETTINGS]:
                del measurements[key]
        try:
            write_json(self.path, asdict(self))
        except InputError as error:
            _warn(f"the measurements of this machine are not kept for the next run: {error}")


@cache
def _warn(sentence: str) -> None:
    """Warn once in a process."""
    warnings.warn(sentence, stacklevel=3)


def machine_facts(device: torch.device) -> dict[str, str]:
    """Return the conditions of a step's time besides the model: processor, its flags, threads, kernels, PyTorch's version."""
    lines = CPUINFO.read_text(encoding="utf-8").splitlines() if CPUINFO.is_file() else []
    cpuinfo = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    # A core of ARM has a number in place of a name, and other systems have no such file.
    name = cpuinfo.get("model name") or " ".join(
        (platform.processor() or platform.machine(), cpuinfo.get("CPU part", ""), f"{os.cpu_count()} cores")
    )
    return {
        "processor": name,
        "flags": digest([cpuinfo.get("flags", cpuinfo.get("Features", ""))]),
        "threads": str(min(torch.get_num_threads(), usable_cores())),
        "kernels": backend(device).name,
        "torch": torch.__version__,
    }


class Fit:
    """Fits drafts to this machine, for one model. Raises InputError where stored rates are damaged."""

    def __init__(self, model: Model):
        target, name = model.target, model.dtype_name
        packed = getattr(target.decoder, "packed_dtype", None)
        # Models that were loaded elsewhere have no files, so their embeddings identify the weights.
        embeddings = checksum(target.embed(target.examples(8)[None]))
        facts = machine_facts(model.device) | {
            "device": device_name(model.device),
            "dtype": f"{name}, {packed}" if packed else name,
            "weights": digest([model.weights, embeddings, str(target.decoder.config)]),
            "lanternpp": lanternpp.__version__,
        }
        self.length, self.store = target.length, Store(facts)
        self.store.read()
        drafter = model.drafter or model.folder
        folders = (model.folder, *(drafter / kind for kind in NETWORKS), drafter)
        self.rates = {key: counts for folder in folders for key, counts in read_rates(folder).items()}
        self._uncounted: set[tuple[str, str]] = set()  # keys and drafts whose acceptance is to be counted
        # By key: drafts that this process had in a measurement, and steps that other processes are not to read.
        self._offered = defaultdict[str, set[str]](set)
        self._disturbed = defaultdict[str, Steps](dict)

    @own_devices()
    def __call__(self, settings: Settings, new_engine: Callable[..., Engine]) -> Settings:
        """Return the settings with the fastest draft, or plain decoding's where none is clearly faster; new_engine: of `Engines`.

        The steps of a few drafts are measured now unless they were before. Where acceptance rates are not known yet the method's
        own draft stays, with `fit` False, and is counted.
        """
        unfitted, shape = replace(settings, fit=False), draft_shape(settings)
        if os.environ.get(SWITCH) == "0" or shape is None:
            return unfitted
        counts = self.counts(settings)
        if counts is None:
            self._uncounted.add((key_of(strength(settings)), draft_name(settings)))
            return unfitted
        candidates = self._candidates(settings, shape, counts)
        makers = {name: partial(new_engine, draft, timed=True) for name, (draft, _) in candidates.items()}
        steps = self._steps(settings, makers)
        if not steps.keys() > {PLAIN}:
            return unfitted
        times = {name: step.time * passes(self.length, candidates[name][1]) for name, step in steps.items()}
        shortest = min(times.values())
        if times[PLAIN] * (1 - PLAIN_MARGIN) <= shortest:
            return candidates[PLAIN][0]
        fast = [name for name in times if name != PLAIN and times[name] * (1 - MARGIN) <= shortest]
        return candidates[min(fast, key=lambda name: steps[name].rows)][0]

    def counts(self, settings: Settings) -> Counts | None:
        """Return the acceptance counts of a method's drafts; None where they are not complete."""
        key = key_of(strength(settings))
        return self.rates.get(key) or self.store.complete_counts(key)

    def bound(self, settings: Settings) -> str | None:
        """Return a sentence on what bounds passes on this machine; None where such settings were not measured."""
        return bound(self._measured(key_of(cost_settings(settings))).values())

    def count(self, settings: Settings, engine: Engine) -> None:
        """Let an engine count the acceptance of its drafts, where a fit waits for the counts."""
        key = key_of(strength(settings))
        if (key, draft_name(settings)) in self._uncounted and self.counts(settings) is None:
            Counter(engine, partial(self.store.add_counts, key))

    def _steps(self, settings: Settings, makers: Mapping[str, Callable[[], Engine]]) -> Steps:
        """Return the steps of drafts, stored or measured now; the next process measures those beyond the budget."""
        key = key_of(cost_settings(settings))
        missing = makers.keys() - self._measured(key).keys() - self._offered[key]
        if missing:
            self._offered[key] |= missing
            names = [name for name in makers if name == PLAIN or name in missing]
            new_steps = measure([(name, makers[name]) for name in names], self.length)
            if disturbed(new_steps.values()):
                self._disturbed[key] = new_steps | self._disturbed[key]
            elif new_steps:
                self.store.add_steps(key, new_steps)
        return {name: step for name, step in self._measured(key).items() if name in makers}

    def _measured(self, key: str) -> Steps:
        """Return the measured steps of a key. A stored step takes precedence over a disturbed one of the same draft."""
        return self._disturbed[key] | self.store.steps.get(key, {})

    @staticmethod
    @lru_cache(64)
    def _candidates(settings: Settings, shape: Shape, counts: Counts) -> dict[str, tuple[Settings, float]]:
        """Return plain decoding, the method's own draft, and others whose acceptance is known, with their codes per pass."""
        if settings.window is not None:
            drafts = [replace(settings, window=depth) for depth in DEPTHS]
        else:
            drafts = [with_tree(settings, f"chain-{depth}") for depth in DEPTHS]
            if not is_chain(shape):
                drafts += [with_tree(settings, tree) for tree in TREES]
        # Trees come last, as they take longest.
        drafts.insert(0 if is_chain(shape) else len(drafts), settings)
        candidates = {PLAIN: (plain_settings(settings), 1.0)}
        for draft in drafts:
            new_shape = draft_shape(draft) or shape
            if counts.cover(new_shape) and (draft is settings or new_shape != shape):
                candidates[draft_name(draft)] = draft, counts.codes(new_shape)
        return candidates


def draft_shape(settings: Settings) -> Shape | None:
    """Return the shape of a method's drafts; None without drafts or a fixed shape, for compiled steps, and for the caller's own parts."""
    parts = settings.proposer, settings.accept, settings.tree
    # The code of a caller's part may change while its name stays.
    if any(isinstance(part, GivenEntry) for part in parts):
        return None
    if settings.compile or settings.min_survival or settings.proposer == NO_DRAFT:
        return None
    if settings.window is not None:
        if settings.window_rows not in (None, 1):
            return None
        return (*chain(settings.window), *((rank,) for rank in range(1, 1 + (settings.alternatives or 0))))
    return static_shape(settings.tree) if settings.tree else None


def draft_name(settings: Settings) -> str:
    """Return the name of a draft in a file of measured steps."""
    if settings.proposer == NO_DRAFT:
        return PLAIN
    return f"window-{settings.window}" if settings.window is not None else str(settings.tree)


def plain_settings(settings: Settings) -> Settings:
    """Return the settings of the same picture by plain decoding: `ar`'s parts, without the dials that they do not read."""
    row = dict.fromkeys(names(MethodDials)) | {**METHODS[BASELINE].dials}
    return replace(settings, method=BASELINE, **row)


def cost_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that decide the time of a step besides the draft's shape."""
    return {name: getattr(settings, name) for name in COST_DIALS} | {
        "joint": is_joint(settings),
        "greedy": settings.temperature == 0,
        "warped": settings.top_k > 0 or settings.top_p < 1,
        "guided": settings.cfg != 1,
    }
