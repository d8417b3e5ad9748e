"""The settings that a model is drawn with by default: its `defaults.json`, results of `lanternpp tune`, and the method of `auto`.

`auto` takes, in this order: the method that the model's `defaults.json` names; the method that `lanternpp tune` was last run for
with these weights; the parallel drafter's chain; EAGLE's drafter; coupled Jacobi decoding, which needs no drafter. A method whose
network is missing is passed over. The last three are lossless: `auto` relaxes only where the model or a tuning says so.

`lanternpp tune` writes one entry per method and condition into a file beside the model. An entry applies where all of CONDITIONS, and
the weights of model and drafter, equal those of the measurement. Threads and the processor's name are recorded and not compared.

Methods of EAGLE's drafter draft with a parallel drafter where there is no other: see `with_parallel_drafter`.
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
    network_inside,
    read_defaults,
    recognise,
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
from lanternpp.api.settings import DEFAULT_TREE, network_needed, part, resolve
from lanternpp.drafters import DRAFTERS
from lanternpp.drafters.parallel import ParallelDrafter
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.models.vq.codes import cache_folder
from lanternpp.nn.sources import Source
from lanternpp.trees import build_tree
from lanternpp.util.files import user_cache
from lanternpp.util.jsonfile import read_object, validated, write_json
from lanternpp.util.registry import unknown

FILE = "tuned.json"
LOSSLESS = ", lossless"  # the end of a reason
CONDITIONS = ("device", "dtype", "batch_size", "compile", "proposer", "accept", "verify")
DRAFT_DIALS = tuple(name for name in names(DraftDials) if name != "verify")
TUNED_DIALS = (*DRAFT_DIALS, *names(RuleDials))  # the settings that an entry may have


def conditions(settings: Settings, placement: Mapping[str, Any]) -> dict[str, Any]:
    """Return the conditions that a tuning is valid for. placement: device type and dtype; the rest are settings."""
    values = {**asdict(settings), **placement}
    return {name: values[name] for name in CONDITIONS}


@dataclass(frozen=True)
class Chosen:
    """A method, and the reason why `auto` took it."""

    method: str
    why: str | None = None  # None: the caller named the method

    def reason(self, settings: Settings) -> str | None:
        """Return `why`, without "lossless" where the rule of these settings is not lossless."""
        if self.why is None or part("accept", settings.accept).lossless:
            return self.why
        return self.why.removesuffix(LOSSLESS)


@dataclass(frozen=True)
class Defaults:
    """The defaults of a model in a folder, with a drafter in place of its own or None. No weights are read."""

    folder: Path
    drafter: Path | None
    model_defaults: Mapping[str, Any]  # the model's recommended settings
    path: Path  # of the tuned file, which need not exist
    tuned: tuple[dict[str, Any], ...]  # the entries of the tuned file

    @classmethod
    def read(
        cls, folder: Path, drafter: Path | None = None, target: Target | None = None, tuned: bool = True
    ) -> Defaults:
        """Read the model's and the tuned defaults; a target or a family of latents may have its own. InputError."""
        family, path = target or latent_family(folder) or Target, tuned_path(folder)
        entries = read_tuned(path) if tuned and access(path, F_OK) else ()
        own = read_defaults(folder) or dict(family.defaults)
        source = drafter or folder
        if network_kind(source, drafter is not None) == "parallel" and not (source / "drafter").is_dir():
            own = with_parallel_drafter(own, lossless=drafter is not None)
        return cls(folder, drafter, own, path, entries)

    def holds(self, kind: str | None) -> bool:
        """Return whether there is a network of this kind to draft with, or `kind` is None."""
        if kind is None:
            return True
        if self.drafter is None:
            return (self.folder / kind).is_dir()
        return (kind == "independent") == (self._network_kind == "independent")

    def chosen(self, method: str | None = AUTO) -> Chosen:
        """Return the method that a name means on this model, reading at most a drafter's headers; raise InputError."""
        name = AUTO if method is None else calls.text("method", method)
        return self._auto if name == AUTO else Chosen(name)

    def settings(
        self, method: str | None, overrides: Mapping[str, Any], placement: Mapping[str, Any]
    ) -> Settings:
        """Return a method's settings, tuned where their conditions hold. placement: device type and dtype. InputError."""
        chosen, own = self.chosen(method), self.model_defaults
        auto = chosen.why is not None
        if self.tuned:
            # A given draft, which a given verifier may need, does not decide whether an entry applies.
            others = {name: value for name, value in overrides.items() if name not in names(DraftDials)}
            untuned = resolve(chosen.method, own, others, auto)
            placement = {"verify": overrides.get("verify") or untuned.verify, **placement}
            key = self._key(chosen.method, conditions(untuned, placement))
            entry = next((entry for entry in self.tuned if key.items() <= entry.items()), None)
            if entry:
                rows = own.get("methods", {})
                row = {**rows.get(chosen.method, {}), **entry["settings"], "fit": False}
                own = {**own, "methods": {**rows, chosen.method: row}}
        return resolve(chosen.method, own, overrides, auto)

    @cached_property
    def _network_kind(self) -> str | None:
        """The kind of network that drafts by default."""
        return network_kind(self.drafter or self.folder, self.drafter is not None)

    @cached_property
    def _auto(self) -> Chosen:
        default = self.model_defaults.get("method")
        if default is not None and default not in METHODS:
            raise InputError(unknown(f"{self.folder / DEFAULTS}: method", str(default), METHODS))
        candidates = [(default, "the model's own default")]
        tuned = [entry["method"] for entry in self.tuned if entry["weights"] == self.weights]
        candidates += [(method, "tuned here last") for method in tuned[-1:]]
        for method, reason in candidates:
            if method in METHODS and self.holds(network_needed(resolve(method, self.model_defaults, {}))):
                return Chosen(method, reason)
        if kind := self._network_kind:
            method, label = NETWORKS[kind]
            return Chosen(method, f"{'its' if self.drafter is None else 'the given'} {label}{LOSSLESS}")
        if latent_family(self.folder):
            return Chosen(BASELINE, "no drafter for its latents")
        return Chosen("jacobi-coupled", f"no drafter{LOSSLESS}")

    @cached_property
    def weights(self) -> str:
        """A hash of the model's and the drafter's weights."""
        return fingerprint(self.folder, self.drafter)

    def _key(self, method: str, conditions: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of an entry that identifies it."""
        return {"method": method, "weights": self.weights, "where": dict(conditions)}

    def is_tuned(self, settings: Settings) -> bool:
        """Return whether a tuning of the method found the tree or window of the settings."""
        values = asdict(settings)
        for entry in self.tuned:
            draft = {name: value for name, value in entry["settings"].items() if name in DRAFT_DIALS}
            if entry["method"] == settings.method and draft.items() <= values.items():
                return True
        return False

    def add_tuned(
        self, method: str, conditions: Mapping[str, Any], settings: Mapping[str, Any], **facts: Any
    ) -> None:
        """Write an entry in place of the one for the same method, weights and conditions. Raises InputError."""
        key = self._key(method, conditions)
        entries = read_tuned(self.path) if self.path.is_file() else ()
        other_entries = [entry for entry in entries if not key.items() <= entry.items()]
        write_json(self.path, {"tuned": [*other_entries, key | {"settings": dict(settings), **facts}]})


def network_kind(path: Path, is_network: bool) -> str | None:
    """Return the kind of drafting network in a model folder, or of `path` itself where `is_network`; None without one."""
    if (kind := network_inside(path)) or not is_network:
        return kind
    try:
        drafter_class = recognise("drafter", Source.open(path), DRAFTERS)
    except InputError:
        try:
            target_source(path)
        except InputError:
            return "drafter"  # reading the drafter raises the error
        return "independent"
    return "parallel" if issubclass(drafter_class, ParallelDrafter) else "drafter"


def tuned_path(model: Path) -> Path:
    """Return the tuned file's path: in a model folder of the user's, else in the cache under a hash of the weights."""
    # Folders that the hub's client fetched are not the user's.
    fetched = any(part.startswith("models--") for part in model.absolute().parts)
    folder = user_cache() if fetched or not model.is_dir() else cache_folder(model)
    return folder / (FILE if folder == model else f"tuned-{fingerprint(model)}.json")


@dataclass(frozen=True)
class _Entry:
    """The keys of an entry that this module reads."""

    method: str
    weights: str
    where: Mapping[str, Any]
    settings: Mapping[str, Any]


def read_tuned(path: Path) -> tuple[dict[str, Any], ...]:
    """Read the entries of a tuned file; raise InputError for an entry that is damaged in a way that `resolve` does not check."""
    try:
        entries = read_object(path).get("tuned")
        for entry in validated("tuned", entries, tuple[_Entry, ...]):
            dials = entry.settings
            if extra := dials.keys() - set(TUNED_DIALS):
                raise InputError(f"it sets {min(extra)}")
            if dials.get("tree") is None and dials.get("window") is None:
                raise InputError("it sets neither a tree nor a window")
            for name, value in dials.items():
                validated(name, value, DIALS[name].kind)
            build_tree(dials.get("tree") or DEFAULT_TREE)
    except InputError as error:
        raise InputError(f"{path} is damaged ({error}); run `lanternpp tune` again, or remove it") from None
    return tuple(entries or ())


def with_parallel_drafter(defaults: Mapping[str, Any], lossless: bool) -> dict[str, Any]:
    """Return a model's defaults with a parallel drafter in place of EAGLE's: relaxed methods then draft the method `parallel`'s chains.

    lossless: whether lossless methods draft with it too, on their own trees.
    """
    rows, parallel = dict(defaults.get("methods", {})), METHODS["parallel"].dials
    chain = {**parallel, **defaults, **rows.get("parallel", {})}["tree"]
    for name, method in METHODS.items():
        relaxed = method.dials["accept"] != EAGLE["accept"]
        if method.dials["proposer"] == EAGLE["proposer"] and (relaxed or lossless):
            draft = {"proposer": parallel["proposer"], "tree": chain if relaxed else method.dials["tree"]}
            rows[name] = {**draft, **rows.get(name, {})}
    return {**defaults, "methods": rows}
