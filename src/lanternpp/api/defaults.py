"""The settings that a model is drawn with by default: its `defaults.json`, results of `lanternpp tune`, and the method of `auto`.

`auto` takes, in this order: the method that the model's `defaults.json` names; the one that `lanternpp tune` was last run for with
these weights; the parallel drafter's chain; EAGLE's drafter; coupled Jacobi decoding, which needs no drafter. A method whose
network is missing is passed over. The last three are lossless: `auto` relaxes only where the model or a tuning says so.

`lanternpp tune` writes one entry per method and condition into a file beside the model. An entry applies where all of CONDITIONS, and
the weights of model and drafter, are the ones of the measurement. Threads and the processor's name are recorded and not compared.

Methods of EAGLE's drafter draft with a parallel one where there is no other: see `with_parallel_drafter`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from os import F_OK, access
from pathlib import Path
from typing import Any

from lanternpp.api import calls
from lanternpp.api.model import (
    DEFAULTS,
    NETWORKS,
    fingerprint,
    latent_family,
    own_network,
    read_defaults,
    recognised,
    target_source,
)
from lanternpp.api.options import (
    AUTO,
    BASELINE,
    DIALS,
    EAGLE,
    METHODS,
    DraftDials,
    RuleDials,
    Settings,
    names,
)
from lanternpp.api.settings import TREE, network_needed, part, resolve
from lanternpp.drafters import DRAFTERS
from lanternpp.drafters.parallel import ParallelDrafter
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.models.vq.codes import cache_folder
from lanternpp.nn.sources import Source
from lanternpp.trees import build_tree
from lanternpp.util.jsonfile import checked, read_object, write_json
from lanternpp.util.registry import unknown

FILE = "tuned.json"
LOSSLESS = ", lossless"  # the end of a reason
CONDITIONS = ("device", "dtype", "batch_size", "compile", "proposer", "accept", "verify")
DRAFTED = tuple(name for name in names(DraftDials) if name != "verify")
CHOSEN = (*DRAFTED, *names(RuleDials))  # the settings that an entry may have


def conditions(settings: Settings, where: Mapping[str, Any]) -> dict[str, Any]:
    """The conditions that a tuning is valid for: where, a device type and a dtype; batch size, compilation and parts."""
    return {name: where[name] if name in where else getattr(settings, name) for name in CONDITIONS}


@dataclass(frozen=True)
class Chosen:
    """A method, and why it was taken."""

    method: str
    why: str | None = None  # None: it was named

    def reason(self, settings: Settings) -> str | None:
        """`why`, without "lossless" where these settings of the method have a rule that is not."""
        if self.why is None or part("accept", settings.accept).lossless:
            return self.why
        return self.why.removesuffix(LOSSLESS)


@dataclass(frozen=True)
class Defaults:
    """The defaults of a model in a folder, with a drafter in place of its own or None; nothing of them needs its weights."""

    folder: Path
    drafter: Path | None
    own: Mapping[str, Any]  # the model's recommended settings
    path: Path  # where its tuned file is, or would be
    tuned: tuple[dict[str, Any], ...]  # the entries of that file

    @classmethod
    def read(
        cls, folder: Path, drafter: Path | None = None, target: Target | None = None, tuned: bool = True
    ) -> Defaults:
        """Read the files; without a `defaults.json` a target, or a family of latents, has defaults of its own. InputError."""
        family, path = target or latent_family(folder) or Target, tuned_path(folder)
        entries = read_tuned(path) if tuned and access(path, F_OK) else ()
        own, place = read_defaults(folder) or dict(family.defaults), drafter or folder
        if network_of(place, drafter is not None) == "parallel" and not (place / "drafter").is_dir():
            own = with_parallel_drafter(own, lossless=drafter is not None)
        return cls(folder, drafter, own, path, entries)

    def holds(self, kind: str | None) -> bool:
        """Whether there is a network of this kind to draft with, or none is needed."""
        if kind is None:
            return True
        if self.drafter is None:
            return (self.folder / kind).is_dir()
        return (kind == "independent") == (self._network == "independent")

    def chosen(self, method: str | None = AUTO) -> Chosen:
        """The method that a name means on this model. Reads at most the headers of a drafter.

        Raises InputError where the model's default is no method.
        """
        name = AUTO if method is None else calls.text("method", method)
        return self._auto if name == AUTO else Chosen(name)

    def settings(
        self, method: str | None, overrides: Mapping[str, Any], where: Mapping[str, Any]
    ) -> Settings:
        """A method's settings, with the tuned ones under their conditions. where: device and dtype. InputError."""
        chosen, own = self.chosen(method), self.own
        auto = chosen.why is not None
        if self.tuned:
            # an override of the tree, or of a window's dial, leaves the other dials that were tuned
            rest = {name: value for name, value in overrides.items() if name not in DRAFTED}
            key = self._key(chosen.method, conditions(resolve(chosen.method, own, rest, auto), where))
            entry = next((entry for entry in self.tuned if key.items() <= entry.items()), None)
            own = with_tuned(own, chosen.method, entry["settings"]) if entry else own
        return resolve(chosen.method, own, overrides, auto)

    @cached_property
    def _network(self) -> str | None:
        """`network_of` the given drafter, or of the model's folder."""
        return network_of(self.drafter or self.folder, self.drafter is not None)

    @cached_property
    def _auto(self) -> Chosen:
        named = self.own.get("method")
        if named is not None and named not in METHODS:
            raise InputError(unknown(f"{self.folder / DEFAULTS}: method", str(named), METHODS))
        last = [entry["method"] for entry in self.tuned if entry["weights"] == self.weights][-1:]
        reasons = [(named, "the model's own default"), *((method, "tuned here last") for method in last)]
        for method, why in reasons:
            if method in METHODS and self.holds(network_needed(resolve(method, self.own, {}))):
                return Chosen(method, why)
        if kind := self._network:
            method, what = NETWORKS[kind]
            return Chosen(method, f"{'its' if self.drafter is None else 'the given'} {what}{LOSSLESS}")
        if latent_family(self.folder):
            return Chosen(BASELINE, "no drafter for its latents")
        return Chosen("jacobi-coupled", f"no drafter{LOSSLESS}")

    @cached_property
    def weights(self) -> str:
        """A hash of the model's and the drafter's weights."""
        return fingerprint(self.folder, self.drafter)

    def _key(self, method: str, conditions: Mapping[str, Any]) -> dict[str, Any]:
        """The part of an entry by which it is found."""
        return {"method": method, "weights": self.weights, "where": dict(conditions)}

    def is_tuned(self, settings: Settings) -> bool:
        """Whether the tree or the window of settings was found by a tuning of their method."""
        given = asdict(settings)
        return any(
            entry["method"] == settings.method
            and all(given[name] == value for name, value in entry["settings"].items() if name in DRAFTED)
            for entry in self.tuned
        )

    def add_tuned(
        self, method: str, conditions: Mapping[str, Any], settings: Mapping[str, Any], **more: Any
    ) -> None:
        """Write an entry in place of the one for the same method, weights and conditions. Raises InputError."""
        key = self._key(method, conditions)
        now = read_tuned(self.path) if self.path.is_file() else ()
        kept = [entry for entry in now if not key.items() <= entry.items()]
        entries = [*kept, key | {"settings": dict(settings), **more}]
        write_json(self.path, {"tuned": entries})


def network_of(place: Path, itself: bool) -> str | None:
    """The kind of network that a model folder holds to draft with, or, where `itself`, that a file or folder is."""
    if (kind := own_network(place)) or not itself:
        return kind
    try:
        entry = recognised("drafter", Source.open(place), DRAFTERS)
    except InputError:
        try:
            target_source(place)
        except InputError:
            return "drafter"  # the error is raised when it is read
        return "independent"
    return "parallel" if issubclass(entry, ParallelDrafter) else "drafter"


def tuned_path(model: Path) -> Path:
    """The tuned file: beside the model in a folder of the user's; else in the user's cache, under a hash of the weights.

    What the hub fetched is the hub's.
    """
    fetched = any(part.startswith("models--") for part in model.absolute().parts)
    folder = cache_folder(Path(__file__)) if fetched or not model.is_dir() else cache_folder(model)
    return folder / (FILE if folder == model else f"tuned-{fingerprint(model)}.json")


@dataclass(frozen=True)
class _Entry:
    """The keys of an entry that are read."""

    method: str
    weights: str
    where: Mapping[str, Any]
    settings: Mapping[str, Any]


def read_tuned(path: Path) -> tuple[dict[str, Any], ...]:
    """The entries of a tuned file. Raises InputError unless each can be applied, as far as `resolve` does not check it."""
    try:
        entries = read_object(path).get("tuned")
        for entry in checked("tuned", entries, tuple[_Entry, ...]):
            chosen = entry.settings
            if extra := chosen.keys() - set(CHOSEN):
                raise InputError(f"it sets {min(extra)}")
            if chosen.get("tree") is None and chosen.get("window") is None:
                raise InputError("it sets neither a tree nor a window")
            for name, value in chosen.items():
                checked(name, value, DIALS[name].kind)
            build_tree(chosen.get("tree") or TREE)
    except InputError as error:
        remedy = "run `lanternpp tune` again, or remove it"
        raise InputError(f"{path} is damaged ({error}); {remedy}") from None
    return tuple(entries or ())


def with_parallel_drafter(defaults: Mapping[str, Any], lossless: bool) -> dict[str, Any]:
    """A model's defaults for a parallel drafter in place of EAGLE's: relaxed methods draft in chains, as the method `parallel` does.

    lossless: whether lossless methods draft with it too, on their own trees.
    """
    rows, dials = dict(defaults.get("methods", {})), METHODS["parallel"].dials
    chain = {**dials, **defaults, **rows.get("parallel", {})}["tree"]
    for name, method in METHODS.items():
        relaxed = method.dials["accept"] != EAGLE["accept"]
        if method.dials["proposer"] == EAGLE["proposer"] and (relaxed or lossless):
            draft = {"proposer": dials["proposer"], "tree": chain if relaxed else method.dials["tree"]}
            rows[name] = {**draft, **rows.get(name, {})}
    return {**defaults, "methods": rows}


def with_tuned(defaults: Mapping[str, Any], method: str, tuned: Mapping[str, Any]) -> dict[str, Any]:
    """A model's defaults with the tuned settings of a method in place of theirs, whose draft is then not fitted."""
    rows = defaults.get("methods", {})
    return {**defaults, "methods": {**rows, method: {**rows.get(method, {}), **tuned, "fit": False}}}
