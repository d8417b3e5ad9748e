"""Which k and lambda: the fastest of a grid whose pictures cost no more quality than a budget allows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from PIL import Image

from lanternpp.api.options import BASELINE
from lanternpp.api.picture import save_png
from lanternpp.api.settings import dials_read
from lanternpp.errors import InputError
from lanternpp.evaluation.draw import evaluation_requests
from lanternpp.tuning.journal import PICTURES
from lanternpp.tuning.trees import TreeTuner, Tuning

if TYPE_CHECKING:
    from lanternpp.evaluation.quality import Quality

NEIGHBOURS = (5, 10, 100, 1000)
LAMBDAS = (1.5, 2.0, 3.0, 5.0, 10.0)


@dataclass(frozen=True)
class QualityCost:
    """The loss of quality of some pictures, and its standard error where that is known."""

    value: float
    spread: float | None = None


@dataclass(frozen=True)
class BudgetChoice:
    """What was chosen within a budget, and everything that was tried."""

    found: Tuning
    cost: QualityCost
    limit: float
    plain: QualityCost | None  # the cost of plain decoding, where the limit depends on it
    tried: list[dict[str, Any]]  # dials, whether it was the tree found for them, spent, spread, speedup


class Budget:
    """A limit on what pictures may cost, measured on `pictures` of them. Cost must not fall as lambda grows."""

    def __init__(self, tuner: TreeTuner, pictures: int):
        self.tuner, self.pictures = tuner, pictures
        self.plain: QualityCost | None = None
        settings = tuner.settings
        if not {"neighbours", "lam"} <= dials_read(settings.proposer, settings.accept):
            raise InputError(
                f"a budget picks k and lambda, which the rule {settings.accept!r} does not read; use lantern++"
            )
        given, vocab = tuner.options.given, tuner.pipe.target.vocab
        known = tuple(k for k in NEIGHBOURS if k < vocab) or (vocab - 1,)
        self.ks = (given["neighbours"],) if given.get("neighbours") else known
        self.lams = (given["lam"],) if given.get("lam") else LAMBDAS

    def limit(self) -> float:
        """The greatest cost allowed."""
        raise NotImplementedError

    def quality_cost(self, dials: Mapping[str, Any]) -> QualityCost:
        """The cost of pictures drawn with these dials, which may contain a tree."""
        raise NotImplementedError

    def choose(self) -> BudgetChoice:
        """The dials that are fastest by prediction and, with the tree tuned for them, within the limit.

        For every k, bisection finds the greatest lambda that stays within the limit with the method's tree, and a tree
        is tuned for it. Then the cost is measured with these trees, the fastest first; where it exceeds the limit, the
        next lower lambda is tuned instead. InputError where none is within the limit.
        """
        limit = self.limit()
        tried: list[dict[str, Any]] = []

        def measure_cost(dials: dict[str, Any], found: Tuning | None = None) -> QualityCost:
            cost = self.quality_cost(dials | (self.tuner.chosen_dials(found) if found else {}))
            row = {
                "dials": dials,
                "own_tree": found is not None,
                "spent": cost.value,
                "spread": cost.spread,
            }
            tried.append(row | ({"speedup": found.chosen.speedup} if found else {}))
            return cost

        field: list[tuple[float, int, int, Tuning]] = []
        for k in self.ks:
            last = last_accepted(
                self.lams,
                lambda lam: measure_cost({"neighbours": k, "lam": lam}).value <= limit,  # noqa: B023
            )
            if last is not None:
                field.append(self._enter(k, last))
        while field:
            best = max(field, key=lambda entry: entry[0])
            field.remove(best)
            _, k, place, found = best
            cost = measure_cost(found.dials, found)
            if cost.value <= limit:
                return BudgetChoice(found, cost, limit, self.plain, tried)
            if place:
                field.append(self._enter(k, place - 1))
        least = min(tried, key=lambda row: row["spent"])
        raise InputError(
            f"nothing of the grid stays within {limit:.3g}: the least was {least['spent']:.3g}, with "
            f"{dials_text(least['dials'])}; raise the budget, or give a lower --lambda"
        )

    def _enter(self, k: int, place: int) -> tuple[float, int, int, Tuning]:
        found = self.tuner.tune({"neighbours": k, "lam": self.lams[place]}, few=True)
        return found.chosen.speedup, k, place, found


class VariationBudget(Budget):
    """Mean total variation per picture, as `--measure-tv` reports it."""

    def __init__(self, tuner: TreeTuner, pictures: int, max_variation: float):
        super().__init__(tuner, pictures)
        self.max_variation = max_variation

    def limit(self) -> float:
        """The limit that was given."""
        return self.max_variation

    def quality_cost(self, dials: Mapping[str, Any]) -> QualityCost:
        """A mean over pictures."""
        values = [
            value
            for drawn in _draw(self.tuner, self.tuner.options.method, dials, self.pictures, measure_tv=True)
            for value in drawn["spent"]
        ]
        mean = fmean(values)
        off = fmean((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
        return QualityCost(mean, off**0.5 if len(values) > 1 else None)


class FrechetBudget(Budget):
    """Fréchet distance at most so many percent above that of plain decoding, of as many pictures of the same prompts."""

    def __init__(self, tuner: TreeTuner, pictures: int, percent: float, quality: Quality):
        super().__init__(tuner, pictures)
        self.percent, self.quality = percent, quality

    def limit(self) -> float:
        """Plain decoding's distance, and its share of it."""
        self.plain = self._distance(BASELINE, {})
        return self.plain.value * (1 + self.percent / 100)

    def quality_cost(self, dials: Mapping[str, Any]) -> QualityCost:
        """A distance of that many pictures, and its jackknife."""
        return self._distance(self.tuner.options.method, dials)

    def _distance(self, method: str, dials: Mapping[str, Any]) -> QualityCost:
        drawn = _draw(self.tuner, method, dials, self.pictures, save=True)
        files = [name for each in drawn for name in each["files"]]
        images = [Image.open(self.tuner.folder / name).convert("RGB") for name in files]
        prompts = [prompt for each in drawn for prompt in each["prompts"]]
        figures = self.tuner.journal.once(
            {"judged": files},
            lambda: {k: v for k, v in self.quality.measure(images, prompts).items() if "frechet" in k},
        )
        return QualityCost(figures["frechet"], figures["frechet_spread"])


def _draw(
    tuner: TreeTuner,
    method: str,
    dials: Mapping[str, Any],
    pictures: int,
    measure_tv: bool = False,
    save: bool = False,
) -> list[dict[str, Any]]:
    """Pictures over the prompts of the options, a batch at a time, each logged."""
    options, batch = tuner.options, tuner.settings.batch_size
    given = {**tuner.shared, **({} if method == BASELINE else {**options.given, **dials})}
    requests = evaluation_requests(options.prompts, pictures, options.seed + 2000)
    made = []
    for start in range(0, pictures, batch):
        part = requests[start : start + batch]
        key = {
            "draw": method,
            "dials": dict(dials),
            "start": start,
            "count": len(part),
            "measure_tv": measure_tv,
        }
        tuner.progress(start, pictures)

        def draw(
            part: Sequence[Any] = part, start: int = start, key: Mapping[str, Any] = key
        ) -> dict[str, Any]:
            prompts, seeds = [request.prompt for request in part], [request.seed for request in part]
            result = tuner.pipe(prompts, seed=seeds, method=method, measure_tv=measure_tv, **given)
            files = []
            for i, image in enumerate(result.images if save else []):
                name = f"{PICTURES}/{tuner.slug(json.dumps(dict(key), sort_keys=True))}-{start + i:04d}.png"
                save_png(image, tuner.folder / name, {"prompt": prompts[i], "seed": str(seeds[i])})
                files.append(name)
            return {"prompts": prompts, "files": files, "spent": result.stats.tv_cost_per_image}

        made.append(tuner.journal.once(key, draw))
    tuner.pipe.release()
    return made


def last_accepted(values: Sequence[float], accepted: Callable[[float], bool]) -> int | None:
    """The index of the last of `values` that is accepted, by bisection; None if the first is not.

    The accepted values must come before all others.
    """
    low, high = -1, len(values) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if accepted(values[middle]):
            low = middle
        else:
            high = middle - 1
    return low if low >= 0 else None


def dials_text(dials: Mapping[str, Any]) -> str:
    """Dials by the names of the command line."""
    names = {"neighbours": "k", "lam": "lambda"}
    return ", ".join(f"{names.get(name, name)} {value:g}" for name, value in dials.items())
