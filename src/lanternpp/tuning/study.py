"""A tuning: a study whose trials are drafts, each drawn and timed beside plain decoding, and a race of the best draft.

Optuna proposes the trials. Total variation or the Fréchet distance, if limited, is measured for a candidate that would be the
fastest so far. Every measurement is logged in the folder of the tuning. A tuning is resumed by proposing all drafts again, with the
logged measurements, from which the same proposals follow.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import numpy as np

from lanternpp.api.defaults import TUNED_DIALS
from lanternpp.api.options import BASELINE, EngineDials, SamplingDials, Settings, names
from lanternpp.api.pipeline import Pipeline
from lanternpp.api.rates import passes
from lanternpp.api.results import versions
from lanternpp.api.settings import dials_read
from lanternpp.errors import InputError
from lanternpp.evaluation import report
from lanternpp.evaluation.equal import variation
from lanternpp.evaluation.prompts import spread
from lanternpp.evaluation.quality import Quality
from lanternpp.evaluation.race import FOLDER_REMEDY, RUN, Entry, Race, check_run, facts, machine
from lanternpp.trees import static_shape
from lanternpp.tuning.candidates import PlainEngine, Space, draw, first_strengths, has_window
from lanternpp.tuning.options import TuningOptions
from lanternpp.util.files import digest
from lanternpp.util.jsonfile import Journal, read_object
from lanternpp.util.terminal import progress_bar

SHARED = names(EngineDials, SamplingDials)  # dials that all engines of a tuning share, the plain one too
TUNED, OWN_DRAFT = "tuned", "default"  # labels of the race: the best draft, and the method's own draft
LOG, RACE = "trials.jsonl", "race"
REMEDY = "begin anew with --restart"
MAX_PROPOSALS = 4  # per draft to be tried, as some proposals are outside the limits, or were tried before


@dataclass(frozen=True)
class Candidate:
    """A draft that was tried."""

    overrides: dict[str, Any]
    speedup: float  # over plain decoding, expected
    codes_per_pass: float  # of the pictures drawn
    step: float  # seconds
    plain_step: float
    nodes: int
    pictures: int
    cost: float | None  # total variation or Fréchet distance, if measured
    complete: bool  # False: given up before all rounds were drawn


class Tuner:
    """A tuning of a method of a pipeline with `tuned=False`, in a folder from which a stopped tuning is resumed.

    Raises InputError if the method has nothing to tune, or the folder holds something else.
    """

    def __init__(
        self,
        pipe: Pipeline,
        method: str,
        overrides: Mapping[str, Any],
        prompts: Sequence[str],
        folder: Path,
        options: TuningOptions,
        seed: int = 0,
        restart: bool = False,
    ):
        """overrides: of the user. options: checked."""
        self.optuna = import_optuna()
        self.pipe, self.method, self.prompts, self.folder = pipe, method, list(prompts), folder
        self.options, self.seed = options, seed
        limited = options.budget_frechet is not None
        self.quality = Quality.for_model(pipe.folder, device=pipe.device) if limited else None
        self.untuned: dict[str, Any] = {"batch_size": 1, "fit": None, **overrides}
        if options.limited:
            self.untuned |= first_strengths(pipe.settings(method, **self.untuned), overrides)
        self.settings = pipe.settings(method, **self.untuned | {"fit": False})
        self.shared = {name: getattr(self.settings, name) for name in SHARED}
        self.fixed = {name: value for name, value in overrides.items() if name not in SHARED}
        for prompt in self.prompts:
            pipe.target.check(prompt)
        if pipe.target.channels:
            raise InputError(f"{pipe.name} draws continuous latents, and tuning is for models of codes")
        # The engine is built now, so that a wrong part is found before anything is drawn.
        engine = pipe.new_engine(self.settings)
        self.space = Space(pipe, self.settings, overrides, engine, options)
        if (folder / RUN).exists() and "tuned" not in read_object(folder / RUN, FOLDER_REMEDY):
            raise InputError(f"{folder} holds a run of something else; {FOLDER_REMEDY}")
        if restart:
            for name in (LOG, RUN):
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder / RACE, ignore_errors=True)
        check_run(folder, self.describe(), f"{FOLDER_REMEDY} or {REMEDY}")
        self.journal = Journal(folder / LOG, REMEDY)
        with warnings.catch_warnings(action="ignore"):  # Optuna warns of its experimental parts
            sampler = self.optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True)
        pruner = self.optuna.pruners.MedianPruner(n_startup_trials=4)
        self.study = self.optuna.create_study(sampler=sampler, pruner=pruner)

    def describe(self) -> dict[str, Any]:
        """Return the facts that must be unchanged for a tuning to be resumed, which may then have more trials."""
        options = {k: v for k, v in asdict(self.options).items() if k not in ("n", "trials")}
        options |= {"tuned": self.method, "settings": asdict(self.settings)}
        return facts(self.pipe, self.prompts, self.seed, **options)

    def tune(self) -> Candidate:
        """Try as many candidates as the options say, and return the fastest within the limit; raise InputError if there is none."""
        for params in self.space.initial_params():
            self.study.enqueue_trial(params, skip_if_exists=True)
        max_trials, state = self.options.trials, self.optuna.trial.TrialState
        with progress_bar("trying drafts") as progress, warnings.catch_warnings(action="ignore"):
            for _ in range(MAX_PROPOSALS * max_trials):
                drawn_trials = self._drawn_trials()
                if len(drawn_trials) == max_trials:
                    break
                if progress:
                    progress(len(drawn_trials), max_trials)
                trial = self.study.ask()
                overrides = self.space.overrides(trial, self._observations())
                tried = [drawn_trial.user_attrs["overrides"] for drawn_trial in drawn_trials]
                if overrides is not None and overrides not in tried:
                    seconds = self._measure(trial, overrides)
                    self.study.tell(trial, seconds, state.PRUNED if seconds is None else state.COMPLETE)
                    continue
                self.study.tell(trial, state=state.FAIL)
                if drawn_trials:
                    # As the proposal cannot be tried, the next trial is a step from the best draft, or from any draft.
                    random = Random(trial.number)
                    best = min(drawn_trials, key=lambda t: t.value or fmean(t.intermediate_values.values()))
                    origin = random.choice((best, random.choice(drawn_trials)))
                    self.study.enqueue_trial(moved_params(origin, random))
        self.pipe.release()
        return self.best()

    def candidates(self) -> list[Candidate]:
        """Return all candidates that were drawn, the fastest first, those that were given up at the end."""
        candidates, observations = [], self._observations()
        for trial in self._drawn_trials():
            overrides, batches = trial.user_attrs["overrides"], trial.user_attrs["drawn"]
            candidate = Candidate(
                overrides,
                1 / self._relative_seconds(overrides, batches, observations),
                fmean(batch["codes_per_pass"] for batch in batches),
                fmean(batch["step"] for batch in batches),
                fmean(batch["plain_step"] for batch in batches),
                nodes=batches[0]["nodes"],
                pictures=len(batches) * self.settings.batch_size,
                cost=trial.user_attrs.get("cost"),
                complete=trial.state.name == "COMPLETE",
            )
            candidates.append(candidate)
        return sorted(candidates, key=lambda candidate: (not candidate.complete, -candidate.speedup))

    def _observations(self) -> list[Any]:
        """Return the overrides and the row of each batch drawn."""
        attrs = [trial.user_attrs for trial in self._drawn_trials()]
        return [(a["overrides"], batch) for a in attrs for batch in a["drawn"]]

    def _relative_seconds(
        self, overrides: Mapping[str, Any], batches: Sequence[Mapping[str, Any]], observations: Sequence[Any]
    ) -> float:
        """Return the seconds of a picture over those of plain decoding: steps as timed, passes by all drafts of the kind."""
        length = self.pipe.target.length
        codes = self.space.expected_codes(overrides, observations)
        drawn_passes = fmean(length / batch["codes_per_pass"] - 1 for batch in batches)
        num_passes = drawn_passes if codes is None else passes(length, codes)
        return fmean((batch["outside"] + num_passes * batch["step"]) / batch["plain"] for batch in batches)

    def best(self) -> Candidate:
        """Return the fastest candidate within the limit; raise InputError if there is none."""
        candidates = self.candidates()
        for candidate in candidates:
            if candidate.complete and self.within(candidate):
                return candidate
        costs = [candidate.cost for candidate in candidates if candidate.cost is not None]
        if not costs:
            raise InputError("no draft that was tried is within the limits; allow more --nodes or --trials")
        raise InputError(
            f"nothing that was tried stays within {self.max_cost:.3g}: the least was {min(costs):.3g}; raise the budget, or --trials"
        )

    def within(self, candidate: Candidate) -> bool:
        """Return whether there is no limit, or a candidate was measured to be within the limit."""
        return not self.options.limited or (candidate.cost is not None and candidate.cost <= self.max_cost)

    def race(self, candidate: Candidate) -> list[dict[str, Any]]:
        """Race plain decoding, the method's own draft and the candidate, and return a row of figures for each."""
        batch_size, options = self.settings.batch_size, self.options
        num_batches = -(-options.n // batch_size)
        prompts = list(dict.fromkeys(spread(self.prompts, num_batches)))
        n = -(-num_batches // len(prompts)) * batch_size
        own = [] if self.is_own_draft(candidate) else [Entry(OWN_DRAFT, self.method, self.untuned)]
        tuned = Entry(TUNED, self.method, self.fixed | candidate.overrides)
        entries = [Entry(BASELINE, BASELINE, {}), *own, tuned]
        race = Race(self.pipe, entries, prompts, n, self.seed + 1000, self.shared, options.limited)
        folder = self.folder / RACE / digest([str(sorted(candidate.overrides.items())), str(n), *prompts])
        return report.rows(race.run(folder), race.describe(), {})

    def is_own_draft(self, candidate: Candidate) -> bool:
        """Return whether a candidate draws as the method does without a tuning, whose tree may have another name."""

        def draft(settings: Settings) -> tuple[Any, Settings]:
            tree = settings.tree and (static_shape(settings.tree) or settings.tree)
            return tree, replace(settings, tree=None, fit=False, min_survival=settings.min_survival or None)

        tuned = self.pipe.settings(self.method, **self.untuned | candidate.overrides)
        return draft(tuned) == draft(self.pipe.fit(self.pipe.settings(self.method, **self.untuned)))

    def report(self, candidate: Candidate, race: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the results of a tuning as one JSON object; race: rows of figures, or none."""
        figures = ("speedup", "codes_per_pass", "seconds_per_image", "tv_cost", "images")
        overrides = self.fixed | candidate.overrides
        dials = dials_read(self.settings.proposer, self.settings.accept)
        return {
            "method": self.method,
            "model": self.pipe.name,
            "settings": {k: overrides[k] for k in TUNED_DIALS if k in dials and overrides.get(k) is not None},
            "speedup": candidate.speedup,
            "measured": {row["method"]: {name: row[name] for name in figures} for row in race},
            "tried": [asdict(tried) for tried in self.candidates()],
            "limit": self.max_cost if self.options.limited else None,
            "cost": candidate.cost,
            "machine": machine(self.pipe) | self.pipe.conditions(self.settings),
            "sampling": self.shared,
            "versions": versions(),
        }

    def plot(self) -> None:
        """Write Optuna's plots of the study to the folder."""
        from optuna.visualization import matplotlib as visualization

        with warnings.catch_warnings(action="ignore"):
            history: Any = visualization.plot_optimization_history(self.study)
            slices: Any = visualization.plot_slice(self.study)
        report.save_figure(history.figure, self.folder / "history.png")
        report.save_figure(np.ravel(slices)[0].figure, self.folder / "parameters.png")

    @cached_property
    def max_cost(self) -> float:
        """The greatest total variation or Fréchet distance allowed."""
        if self.options.budget_frechet is None:
            return float(self.options.budget_tv or 0.0)
        return self._cost(BASELINE, {}) * (1 + self.options.budget_frechet / 100)

    @cached_property
    def _plain_engine(self) -> PlainEngine:
        return PlainEngine(self.pipe, self.pipe.settings(BASELINE, **self.shared), self.prompts[0])

    def _drawn_trials(self) -> list[Any]:
        """Return the trials that were drawn to the end or given up."""
        state = self.optuna.trial.TrialState
        return self.study.get_trials(deepcopy=False, states=(state.COMPLETE, state.PRUNED))

    def _measure(self, trial: Any, overrides: dict[str, Any]) -> float | None:
        """Draw one candidate, a batch a round, and return its seconds over those of plain decoding, or None if it is given up early.

        A candidate outside the limit gets 1 plus its cost over the limit instead.
        """
        observations, options = self._observations(), self.options
        settings = self.pipe.settings(self.method, **(self.shared | self.fixed | overrides))
        # Windows are compared on the same pictures. Counts of trees are pooled, and other pictures add more to them.
        first = 0 if has_window(settings) else trial.number * options.rounds
        batches: list[dict[str, Any]] = []
        trial.set_user_attr("overrides", overrides)
        for i in range(options.rounds):
            key = {"overrides": overrides, "round": i}
            batches.append(self.journal.once(key, partial(self._draw, settings, first + i)))
            trial.set_user_attr("drawn", batches)
            observed = observations + [(overrides, batch) for batch in batches]
            seconds = self._relative_seconds(overrides, batches, observed)
            trial.report(seconds, i)
            if i + 1 < options.rounds and trial.should_prune():
                return None
        if options.limited:
            speedups = [candidate.speedup for candidate in self.candidates() if self.within(candidate)]
            if 1 / seconds > max(speedups, default=0.0):
                cost = self._cost(self.method, self.fixed | overrides)
                trial.set_user_attr("cost", cost)
                if cost > self.max_cost:
                    return 1 + cost / max(self.max_cost, 1e-9)
        return seconds

    def _draw(self, settings: Settings, index: int) -> dict[str, Any]:
        """Draw the batch of this index, of the prompt in its turn, and return its figures."""
        seed = self.seed + index * settings.batch_size
        seeds = range(seed, seed + settings.batch_size)
        return draw(self.pipe, settings, self._plain_engine, self.prompts[index % len(self.prompts)], seeds)

    def _cost(self, method: str, overrides: Mapping[str, Any]) -> float:
        """Return the mean total variation of pictures with these overrides, or their Fréchet distance, which is measured once."""
        num_pictures = self.options.measured_on
        prompts, overrides = spread(self.prompts, num_pictures), {**self.shared, **overrides}
        seeds = range(self.seed + 2000, self.seed + 2000 + num_pictures)

        def measure() -> float:
            if self.quality is None:
                return variation(self.pipe, prompts, seeds, self.pipe.settings(method, **overrides))
            images = self.pipe(prompts, seed=seeds, method=method, **overrides).images
            self.pipe.release()
            return self.quality.measure(images, prompts)["frechet"]

        return float(self.journal.once({"cost of": method, "overrides": overrides}, measure))


def import_optuna() -> Any:
    """Import Optuna; raise InputError if it is missing."""
    try:
        import optuna
    except ImportError:
        raise InputError("tuning needs Optuna; install lanternpp[tune]") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def moved_params(trial: Any, random: Random) -> dict[str, Any]:
    """Return the parameters of a trial, with every number scaled at random, and a choice exchanged now and then."""
    params = {}
    for name, value in trial.params.items():
        distribution = trial.distributions[name]
        if not hasattr(distribution, "low"):
            params[name] = random.choice(distribution.choices) if random.random() < 0.2 else value
            continue
        scaled = value * random.uniform(0.7, 1.4)
        if isinstance(value, int):
            scaled = round(scaled) + random.choice((-1, 0, 1))
        params[name] = min(max(scaled, distribution.low), distribution.high)
    return params
