"""A tuning: a study whose trials are drafts, each drawn and timed beside plain decoding, and a race of what was found.

Optuna proposes the trials, logs them in the folder of the tuning, and goes on from its log. A limit on total variation or on the
Fréchet distance is measured of a candidate that would be the fastest so far.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
from filelock import FileLock

from lanternpp.api.defaults import CHOSEN
from lanternpp.api.options import BASELINE, EngineDials, SamplingDials, names
from lanternpp.api.pipeline import Pipeline, versions
from lanternpp.api.rates import passes
from lanternpp.api.settings import dials_read
from lanternpp.errors import InputError
from lanternpp.evaluation import report
from lanternpp.evaluation.equal import variation
from lanternpp.evaluation.prompts import spread
from lanternpp.evaluation.quality import Quality
from lanternpp.evaluation.race import ELSEWHERE, RUN, Entry, Race, check_run, machine
from lanternpp.trees import static_shape
from lanternpp.tuning.candidates import PlainEngine, Space, check, draw, has_window
from lanternpp.tuning.options import TuningOptions
from lanternpp.util.files import digest
from lanternpp.util.jsonfile import read_rows
from lanternpp.util.terminal import Progress

SHARED = names(EngineDials, SamplingDials)  # dials that every engine of a tuning shares, the plain one too
TUNED, OWN = "tuned", "default"  # labels of the race: what was found, and the method's own draft
LOG, RACE = "trials.jsonl", "race"
REMEDY = "begin anew with --restart"
PATIENCE = 4  # proposals for each draft that is to be tried: some are outside the limits, or were tried


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
    cost: float | None  # where it was measured against a limit
    complete: bool  # False: given up after fewer batches than others


class Tuner:
    """Tunes a method of a pipeline that was made with `tuned=False`, in a folder from which a stopped tuning goes on.

    Raises InputError where the method has nothing to tune, or the folder holds something else.
    """

    def __init__(
        self,
        pipe: Pipeline,
        method: str,
        given: Mapping[str, Any],
        prompts: Sequence[str],
        folder: Path,
        options: TuningOptions,
        seed: int = 0,
        quality: Quality | None = None,
        restart: bool = False,
    ):
        """given: overrides of the user. options: checked. quality: what measures a budget of Fréchet distance."""
        self.optuna = optuna()
        self.pipe, self.method, self.prompts, self.folder = pipe, method, list(prompts), folder
        self.options, self.seed, self.quality = options, seed, quality
        self.settings = pipe.settings(method, **{"batch_size": 1, "fit": False, **given})
        check(self.settings)
        self.shared = {name: getattr(self.settings, name) for name in SHARED}
        self.given = {name: value for name, value in given.items() if name not in SHARED}
        for prompt in self.prompts:
            pipe.target.check(prompt)
        if pipe.target.channels:
            raise InputError(f"{pipe.name} draws continuous latents, and tuning is for models of codes")
        # an engine, so that a wrong part is found before anything is drawn
        engine = pipe.new_engine(self.settings)
        self.space = Space(pipe, self.settings, given, engine, options)
        if restart:
            forget(folder)
        check_run(folder, self.describe(), f"{ELSEWHERE} or {REMEDY}")
        self.study = self._opened()

    def describe(self) -> dict[str, Any]:
        """What must be unchanged for a tuning to be resumed; more trials may be asked for."""
        facts = {k: v for k, v in asdict(self.options).items() if k not in ("n", "trials")}
        facts |= {"tuned": self.method, "prompts": self.prompts, "seed": self.seed, "model": self.pipe.name}
        facts |= {"weights": self.pipe.model.weights}
        return facts | {"settings": asdict(self.settings)} | machine(self.pipe) | {"versions": versions()}

    def tune(self, progress: Progress | None = None) -> Candidate:
        """Try candidates until there are as many as the options say; the fastest of them within the limit. InputError."""
        for params in self.space.first():
            self.study.enqueue_trial(params, skip_if_exists=True)

        trials, state = self.options.trials, self.optuna.trial.TrialState
        finished = state.COMPLETE, state.PRUNED, state.FAIL  # others wait to be tried
        while len(drawn := self._drawn()) < trials:
            if len(self.study.get_trials(deepcopy=False, states=finished)) >= PATIENCE * trials:
                break
            if progress:
                progress(len(drawn), trials)
            with warnings.catch_warnings(action="ignore"):  # of parts that Optuna calls experimental
                trial = self.study.ask()
                if (found := self._proposed(trial, drawn)) is not None:
                    relative = self._measured(trial, found)
                    self.study.tell(trial, relative, state.PRUNED if relative is None else state.COMPLETE)
                    continue
                # cannot be tried, or was: a step from the best draft, or from any, comes next
                self.study.tell(trial, state=state.FAIL)
                if drawn:
                    random = Random(trial.number)
                    best = min(drawn, key=lambda one: one.value or fmean(one.intermediate_values.values()))
                    self.study.enqueue_trial(near(random.choice((best, random.choice(drawn))), random))
        self.pipe.release()
        return self.best()

    def tried(self) -> list[Candidate]:
        """All candidates that were drawn, the fastest first."""
        found, seen = [], self._seen()
        for trial in self._drawn():
            attrs, drawn = trial.user_attrs, trial.user_attrs["drawn"]
            means = {n: fmean(row[n] for row in drawn) for n in ("codes_per_pass", "step", "plain_step")}
            one = Candidate(
                attrs["overrides"],
                1 / self._relative(attrs["overrides"], drawn, seen),
                **means,
                nodes=drawn[0]["nodes"],
                pictures=len(drawn) * self.settings.batch_size,
                cost=attrs.get("cost"),
                complete=trial.state.name == "COMPLETE",
            )
            found.append(one)
        return sorted(found, key=lambda one: (not one.complete, -one.speedup))

    def _seen(self) -> list[Any]:
        """The overrides of all batches drawn, and what was counted."""
        every = (trial.user_attrs for trial in self._drawn())
        return [(one["overrides"], (row["tried"], row["kept"])) for one in every for row in one["drawn"]]

    def _relative(
        self, overrides: Mapping[str, Any], drawn: Sequence[Mapping[str, Any]], seen: Sequence[Any]
    ) -> float:
        """Seconds of a picture in terms of plain decoding: steps as timed, codes as drafts of the kind had them accepted."""
        length, codes = self.pipe.target.length, self.space.codes(overrides, seen)
        own = fmean(length / row["codes_per_pass"] - 1 for row in drawn)
        count = own if codes is None else passes(length, codes)
        return fmean((row["outside"] + count * row["step"]) / row["plain"] for row in drawn)

    def best(self) -> Candidate:
        """The fastest candidate within the limit; InputError where there is none."""
        fine = [one for one in self.tried() if one.complete and self.within(one)]
        if fine:
            return fine[0]
        costs = [one.cost for one in self.tried() if one.cost is not None]
        if not costs:
            raise InputError("no draft that was tried is within the limits; allow more --nodes or --trials")
        raise InputError(
            f"nothing that was tried stays within {self.most:.3g}: the least was {min(costs):.3g}; raise the budget"
        )

    def within(self, one: Candidate) -> bool:
        """Whether a candidate is known to be within the limit, if there is one."""
        return not self.options.limited or (one.cost is not None and one.cost <= self.most)

    def race(self, found: Candidate, progress: Progress | None = None) -> list[dict[str, Any]]:
        """Plain decoding, the method's own draft and the one found, taking turns: a row of figures for each."""
        batch, options = self.settings.batch_size, self.options
        count = -(-options.n // batch)  # batches
        prompts = list(dict.fromkeys(spread(self.prompts, count)))
        n = -(-count // len(prompts)) * batch
        field = [Entry(BASELINE, BASELINE, {})]
        if not self.is_own(found):
            field.append(Entry(OWN, self.method, self.given))
        field.append(Entry(TUNED, self.method, self.given | found.overrides))
        race = Race(self.pipe, field, prompts, n, self.seed + 1000, self.shared, self.options.limited)
        folder = self.folder / RACE / digest([str(sorted(found.overrides.items())), str(n), *prompts])
        return report.rows(race.run(folder, progress), race.describe(), {})

    def is_own(self, found: Candidate) -> bool:
        """Whether a candidate draws as the method's own draft does, whose tree may have another name."""
        given = self.shared | {"fit": False} | self.given | found.overrides
        both = self.pipe.settings(self.method, **given), self.settings
        trees = {each.tree and (static_shape(each.tree) or each.tree) for each in both}
        others = {replace(each, tree=None, min_survival=each.min_survival or None) for each in both}
        return len(trees) == len(others) == 1

    def chosen(self, found: Candidate) -> dict[str, Any]:
        """What becomes the method's default: the draft, and the dials that were asked for or chosen."""
        values = {**self.given, **found.overrides}
        read = dials_read(self.settings.proposer, self.settings.accept)
        return {name: values[name] for name in CHOSEN if name in read and values.get(name) is not None}

    def report(self, found: Candidate, race: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """All that a tuning found, as one JSON object. race: rows of figures, or none."""
        kept = ("speedup", "codes_per_pass", "seconds_per_image", "tv_cost", "images")
        return {
            "method": self.method,
            "model": self.pipe.name,
            "settings": self.chosen(found),
            "speedup": found.speedup,
            "measured": {row["method"]: {name: row[name] for name in kept} for row in race},
            "tried": [asdict(one) for one in self.tried()],
            "limit": self.most if self.options.limited else None,
            "cost": found.cost,
            "machine": machine(self.pipe) | self.pipe.conditions(self.settings),
            "sampling": self.shared,
            "versions": versions(),
        }

    def plot(self) -> None:
        """Optuna's plots of the study, in the folder."""
        from optuna.visualization import matplotlib as drawing

        with warnings.catch_warnings(action="ignore"):
            history: Any = drawing.plot_optimization_history(self.study)
            slices: Any = drawing.plot_slice(self.study)
        figures = {"history": history.figure, "parameters": np.ravel(slices)[0].figure}
        for name, figure in figures.items():
            report.save_figure(figure, self.folder / f"{name}.png")

    @cached_property
    def most(self) -> float:
        """The greatest cost allowed."""
        if self.options.budget_frechet is None:
            return float(self.options.budget_tv or 0.0)
        plain = self.study.user_attrs.get("plain") or self._cost(BASELINE, {})
        self.study.set_user_attr("plain", plain)
        return float(plain * (1 + self.options.budget_frechet / 100))

    @cached_property
    def _plain(self) -> PlainEngine:
        settings = self.pipe.settings(BASELINE, **self.shared)
        return PlainEngine(self.pipe, settings, self.prompts[0])

    def _drawn(self) -> list[Any]:
        """The trials that are over, those given up among them."""
        state = self.optuna.trial.TrialState
        return self.study.get_trials(deepcopy=False, states=(state.COMPLETE, state.PRUNED))

    def _proposed(self, trial: Any, drawn: Sequence[Any]) -> dict[str, Any] | None:
        """The overrides of a trial; None where these are outside the limits, or were tried."""
        proposed = self.space.overrides(trial, self._seen())
        # a trial that a stop ended goes on with the tree that it had
        found: dict[str, Any] | None = trial.user_attrs.get("overrides", proposed)
        tried = [one.user_attrs["overrides"] for one in drawn]
        if found is None or (found in tried and not trial.user_attrs.get("drawn")):
            return None
        trial.set_user_attr("overrides", found)
        return found

    def _measured(self, trial: Any, found: dict[str, Any]) -> float | None:
        """Draw one candidate, a batch a round: its seconds in terms of plain decoding, and more than 2 outside the limit.

        None where it is given up after fewer batches than others.
        """
        attrs, options, seen = trial.user_attrs, self.options, self._seen()
        settings = self.pipe.settings(self.method, **(self.shared | self.given | found))
        drawn = list(attrs.get("drawn", ()))
        for turn in range(options.rounds):
            if turn == len(drawn):
                # windows are compared on the same pictures; of trees the counts are pooled, so that others tell more
                place = turn + (0 if has_window(settings) else trial.number * options.rounds)
                first = self.seed + place * settings.batch_size
                seeds = range(first, first + settings.batch_size)
                prompt = self.prompts[place % len(self.prompts)]
                drawn.append(draw(self.pipe, settings, self._plain, prompt, seeds))
                trial.set_user_attr("drawn", drawn)
            rows = drawn[: turn + 1]
            counted = seen + [(found, (row["tried"], row["kept"])) for row in rows]
            relative = self._relative(found, rows, counted)
            trial.report(relative, turn)
            if turn + 1 < options.rounds and trial.should_prune():
                return None
        fastest = max((one.speedup for one in self.tried() if self.within(one)), default=0.0)
        if self.options.limited and 1 / relative > fastest:
            cost = self._cost(self.method, self.given | found)
            trial.set_user_attr("cost", cost)
            if cost > self.most:
                return 1 + cost / max(self.most, 1e-9)
        return relative

    def _cost(self, method: str, overrides: Mapping[str, Any]) -> float:
        """Mean total variation of some pictures, or their Fréchet distance."""
        count, first = self.options.measured_on, self.seed + 2000
        prompts, given = spread(self.prompts, count), {**self.shared, **overrides}
        seeds = range(first, first + count)
        if self.options.budget_frechet is None:
            return variation(self.pipe, prompts, seeds, self.pipe.settings(method, **given))
        images = self.pipe(prompts, seed=seeds, method=method, **given).images
        self.pipe.release()
        assert self.quality is not None
        return self.quality.measure(images, prompts)["frechet"]

    def _opened(self) -> Any:
        """The study of the folder. A trial that a stop ended is put in line again with what it had measured."""
        read_rows(self.folder / LOG, dict, REMEDY)
        storages, log = self.optuna.storages, str(self.folder / LOG)
        # The system releases this lock when the process is killed; Optuna's own would be waited for.
        lock = FileLock(f"{log}.lock")
        try:
            storage = storages.JournalStorage(storages.journal.JournalFileBackend(log, lock_obj=lock))
            study = self.optuna.create_study(study_name=self.method, storage=storage, load_if_exists=True)
        except (KeyError, ValueError, TypeError) as error:
            raise InputError(f"{self.folder / LOG} is damaged ({error}): {REMEDY}") from None
        seed = self.seed + len(study.trials)
        with warnings.catch_warnings(action="ignore"):
            study.sampler = self.optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True)
        study.pruner = self.optuna.pruners.MedianPruner(n_startup_trials=4)
        state = self.optuna.trial.TrialState
        for trial in study.get_trials(states=(state.RUNNING,)):
            study.tell(trial.number, state=state.FAIL)
            # one from the line that had no overrides yet has only the parameters that it was put there with
            given = trial.system_attrs.get("fixed_params")
            params = trial.params if "overrides" in trial.user_attrs else given
            if params is not None:
                study.enqueue_trial(params, user_attrs=trial.user_attrs)
        return study


def optuna() -> Any:
    """The package. Raises InputError where it is missing."""
    try:
        import optuna
    except ImportError:
        raise InputError("tuning needs Optuna; install lanternpp[tune]") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def near(trial: Any, random: Random) -> dict[str, Any]:
    """The parameters of a trial, some of its numbers moved by up to a third."""

    def moved(name: str, value: Any) -> Any:
        bounds = trial.distributions[name]
        if isinstance(value, str) or not hasattr(bounds, "low"):
            return random.choice(bounds.choices) if random.random() < 0.2 else value
        scaled = value * random.uniform(0.7, 1.4)
        if isinstance(value, int):
            scaled = round(scaled) + random.choice((-1, 0, 1))
        return min(max(scaled, bounds.low), bounds.high)

    return {name: moved(name, value) for name, value in trial.params.items()}


def forget(folder: Path) -> None:
    """Take away what an earlier tuning left in a folder; InputError where the folder is something else's."""
    if (folder / RUN).exists() and not (folder / LOG).exists():
        raise InputError(f"{folder} holds a run of something else; {ELSEWHERE}")
    for name in (LOG, RUN):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / RACE, ignore_errors=True)
