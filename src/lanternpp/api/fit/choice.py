"""The choice of a draft: of those that were measured on this machine, the one with the most codes per second."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lanternpp
from lanternpp.api.fit.rates import Counter, Counts, is_joint, read_rates, strength
from lanternpp.api.fit.steps import Step, bound, disturbed, measure
from lanternpp.api.fit.store import Store, machine_facts
from lanternpp.api.model import DRAWERS, Model
from lanternpp.api.options import BASELINE, METHODS, MethodDials, Settings, names
from lanternpp.api.settings import NO_DRAFT, dials_read, with_tree
from lanternpp.engine.decode import Engine
from lanternpp.errors import InputError
from lanternpp.nn.checkpoints import checksum
from lanternpp.trees import build_tree
from lanternpp.trees.shapes import SHAPES, Shape, chain, is_chain
from lanternpp.trees.static import StaticTree
from lanternpp.util.devices import device_name
from lanternpp.util.files import digest
from lanternpp.util.registry import Given

SWITCH = "LANTERNPP_FIT"  # in the environment; 0: nothing is fitted, as with --no-fit
PLAIN = "plain"
MARGIN = 0.02  # how much slower than the fastest draft a shorter one may be: the error of a measurement
# In the order in which they are measured, as the budget of a large model may end before all are.
DEPTHS = (4, 2, 8, 12, 6, 3, 10, 14, 5, 16, 1, 7)
TREES = ("deep-8", "eagle-25")  # offered beside chains to a method whose own tree branches
COSTED = ("proposer", "accept", "neighbours", "coupling", "init", "alternatives", "window_rows", "batch_size")


class Fit:
    """Fits drafts to this machine, for one model."""

    def __init__(
        self,
        engine: Callable[[Settings], Engine],
        length: int,
        store: Store,
        rates: Sequence[tuple[Mapping[str, Any], Counts]],
    ):
        """engine: makes a new engine. length: codes of a picture. rates: known acceptance, as `read_rates` gives it."""
        self.engine, self.length, self.store, self.rates = engine, length, store, rates
        self._uncounted: set[str] = set()  # strengths whose acceptance is to be counted while drawing

    def __call__(self, settings: Settings) -> Settings:
        """Settings that are to be fitted -> those with the fastest draft; plain decoding's where no draft is faster.

        The steps of a few drafts are measured now unless they were before. Where acceptance rates are not known yet the method's
        own draft stays, with `fit` False, and is counted.
        """
        own, shape = replace(settings, fit=False), shape_of(settings)
        if os.environ.get(SWITCH) == "0" or shape is None or isinstance(settings.accept, Given):
            return own
        counts = self.counts(settings)
        if counts is None:
            self._uncounted.add(_key(strength(settings)))
            return own
        candidates = {draft_name(each): each for each in self._candidates(settings, shape, counts)}
        if len(candidates) < 2:
            return own
        try:
            measured = self._steps(settings, candidates)
        except InputError:  # such as too little memory for an engine more
            return own
        steps = {step.draft: step for step in measured if step.draft in candidates}
        rates = {
            name: 1 / (step.seconds * self._passes(candidates[name], counts)) for name, step in steps.items()
        }
        best = max(rates.values())
        good = [name for name in rates if name != PLAIN and rates[name] >= best * (1 - MARGIN)]
        if rates[PLAIN] == best or not good:
            return candidates[PLAIN]
        return candidates[min(good, key=lambda name: steps[name].rows)]

    def counts(self, settings: Settings) -> Counts | None:
        """The acceptance of a method's drafts, where it is known."""
        mine = strength(settings)
        known = next((counts for row, counts in self.rates if dict(row) == mine), None)
        return known or self.store.counts(_key(mine))

    def bound(self, settings: Settings) -> str | None:
        """One sentence on what bounds passes on this machine; None where it was not measured for such settings."""
        steps = self.store.steps(_key(costed(settings)))
        return bound(steps) if steps else None

    def count(self, settings: Settings, engine: Engine) -> None:
        """Let an engine count the acceptance of its drafts, where a fit waits for that."""
        key = _key(strength(settings))
        if key in self._uncounted:
            engine.observers.append(Counter(self.length, lambda counts: self.store.add_counts(key, counts)))

    def _steps(self, settings: Settings, candidates: Mapping[str, Settings]) -> tuple[Step, ...]:
        """The steps of the candidates, stored or measured now."""
        key = _key(costed(settings))
        known = self.store.steps(key)
        first = list(candidates)[:2]  # plain decoding and one draft, which are always measured
        if known is not None and {step.draft for step in known}.issuperset(first):
            return known
        drafts = ((name, lambda each=each: self.engine(each)) for name, each in candidates.items())
        steps = measure(drafts, self.length)
        return self.store.add_steps(key, steps, keep=not disturbed(steps))

    def _passes(self, settings: Settings, counts: Counts) -> float:
        """Passes of a picture; half of the codes that its last draft decides beyond the first lie after the end, on average."""
        shape = shape_of(settings)
        codes = 1.0 if shape is None else counts.codes(shape)
        return (self.length - 1 + (codes - 1) / 2) / codes

    @staticmethod
    def _candidates(settings: Settings, own: Shape, counts: Counts) -> Iterator[Settings]:
        """Plain decoding, the method's own draft, and others whose acceptance is known; large trees come last, as they take longest."""
        yield plain_settings(settings)
        depth, ranks = counts.size
        known = fits(own, depth, ranks)
        if known and is_chain(own):
            yield settings
        for levels in DEPTHS:
            if levels > depth:
                continue
            if settings.window is not None:
                yield replace(settings, window=levels)
            elif chain(levels) != own:
                yield with_tree(settings, f"chain-{levels}")
        if not is_chain(own):
            trees = TREES if settings.window is None else ()
            yield from (with_tree(settings, name) for name in trees if fits(SHAPES[name], depth, ranks))
            if known:
                yield settings


def fit_for(model: Model, engine: Callable[[Settings], Engine], weights: str, dtype: str) -> Fit:
    """The fit of a model. weights: a hash of its files, which models that were loaded elsewhere lack. InputError."""
    target = model.target
    codes = target.examples(8)[None]
    facts = machine_facts() | {
        "device": device_name(model.device),
        "dtype": f"{dtype}, {packed}" if (packed := getattr(target.decoder, "packed_dtype", None)) else dtype,
        "weights": digest([weights, checksum(target.embed(codes)), str(target.decoder.config)]),
        "lanternpp": lanternpp.__version__,
    }
    drafter = model.other or model.folder
    folders = dict.fromkeys((drafter, *(drafter / kind for kind in DRAWERS), model.folder))
    rates = [row for folder in folders for row in read_rates(folder)]
    return Fit(engine, target.length, Store(facts), rates)


def fits(shape: Shape, depth: int, ranks: int) -> bool:
    """Whether acceptance is known at all depths and ranks of a shape."""
    return max(map(len, shape)) <= depth and max(map(max, shape)) < ranks


def shape_of(settings: Settings) -> Shape | None:
    """The shape of a method's drafts; None where it has none, or it is decided while drafting or by compiled steps."""
    read = dials_read(settings.proposer, settings.accept)
    if settings.compile or settings.min_survival or settings.proposer == NO_DRAFT:
        return None
    if "window" in read and settings.window is not None:
        if settings.window_rows not in (None, 1):
            return None
        return (*chain(settings.window), *((rank,) for rank in range(1, 1 + (settings.alternatives or 0))))
    tree = build_tree(settings.tree) if "tree" in read and settings.tree else None
    return tree.shape if isinstance(tree, StaticTree) else None


def draft_name(settings: Settings) -> str:
    """What the draft of settings is called in a file of measured steps."""
    if settings.proposer == NO_DRAFT:
        return PLAIN
    return f"window-{settings.window}" if settings.window is not None else str(settings.tree)


def plain_settings(settings: Settings) -> Settings:
    """The same picture by plain decoding: `ar`'s parts, and none of the dials that those do not read."""
    row = dict.fromkeys(names(MethodDials)) | {**METHODS[BASELINE].dials}
    return replace(settings, method=BASELINE, **row)


def costed(settings: Settings) -> dict[str, Any]:
    """What decides the time of a step besides the draft's shape."""
    found = {name: getattr(settings, name) for name in COSTED} | {"joint": is_joint(settings)}
    sampled = {"greedy": settings.temperature == 0, "warped": settings.top_k > 0 or settings.top_p < 1}
    return found | sampled | {"guided": settings.cfg != 1}


def _key(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts, sort_keys=True)
