"""All settings of a picture except prompt and seed: a method's row, a model's defaults, and overrides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from lanternpp.accept import RULES
from lanternpp.accept.base import Acceptance, Dials
from lanternpp.api import calls
from lanternpp.api.options import (
    DIALS,
    METHODS,
    RENAMED,
    DraftDials,
    RuleDials,
    Settings,
    check_method,
    names,
    spoken,
)
from lanternpp.drafters.base import Drafter
from lanternpp.engine.proposer import Parts, Proposer
from lanternpp.engine.verify.choose import (
    TOKEN,
    VERIFIERS,
    DraftTraits,
    Verifier,
    best_for,
    why_unsupported,
    with_native,
)
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.nn.backend import PYTORCH, Backend
from lanternpp.proposers import PROPOSERS
from lanternpp.proposers.parallel import why_not_shortened
from lanternpp.trees import build_tree, shape_name
from lanternpp.trees.base import TreeBuilder
from lanternpp.trees.shapes import check as check_shape
from lanternpp.util.registry import Given, check_class, find, importable, unknown
from lanternpp.util.schema import checked

KINDS = {"accept": "acceptance rule", "proposer": "proposer", "tree": "tree"}
PARTS: dict[str, tuple[type, bool]] = {  # what a part derives from, and whether an object of it may be given
    "accept": (Acceptance, True),
    "proposer": (Proposer, False),
    "tree": (TreeBuilder, True),
}
PLAIN: dict[type, Callable[[str, Any], Any]] = {
    int: calls.whole,
    float: calls.real,
    bool: calls.switch,
}
READ = names(DraftDials, RuleDials)  # the dials that parts read
NO_DRAFT = "none"  # the proposer of plain decoding
SHAPES = {"tree", "window", "min_survival"}  # dials that decide the shape of a draft
TREE = "eagle-25"  # default of proposers that take a tree


def resolve(
    method: str, defaults: Mapping[str, Any], overrides: Mapping[str, Any], auto: bool = False
) -> Settings:
    """Overrides, then the model's defaults for the method, then its defaults for all, then the method's row.

    Overrides are the caller's own: their names may be imported (`Importable`), those of defaults may not.
    auto: the caller named no method; a message says so.
    Raises InputError where a name is unknown, or an override is a dial that no part of the method reads.
    Where the row or the defaults have such a dial, because the part that read it was overridden, it is dropped. A draft whose
    shape is given is not fitted to the machine.
    """
    given = {k: typed(k, v) for k, v in overrides.items() if v is not None}
    check_method(method)
    usual: dict[str, Any] = {name: dial.default for name, dial in DIALS.items()}
    merged = usual | {**METHODS[method].dials} | defaults_of(defaults, method) | given
    merged["fit"] = merged["fit"] and merged["proposer"] != NO_DRAFT and not given.keys() & SHAPES
    if extra := merged.keys() - DIALS.keys():
        name = min(extra)
        now = RENAMED.get(name)
        raise InputError(f"option {name!r} is now {now!r}" if now else unknown("option", name, DIALS))
    read = dials_read(merged["proposer"], merged["accept"])
    for name in READ:
        if name not in read:
            if name in given:
                raise InputError(_unread(name, given[name], method, merged, read, auto))
            merged[name] = None
    if "tree" in read and merged["tree"] is None:
        merged["tree"] = TREE
    requested = merged.pop("verify")
    if merged["min_survival"] and (
        wrong := why_not_shortened(merged["min_survival"], build_tree(merged["tree"]), merged["compile"])
    ):
        if "min_survival" in given:
            raise InputError(wrong)
        merged["min_survival"] = None
    settings = Settings(method=method, **merged)
    if requested is not None:
        find("verifier", requested, VERIFIERS)
        if wrong := why_unsupported(_draft_traits(settings), requested):
            if "verify" in given:
                raise InputError(wrong)
            requested = None
    return replace(settings, verify=requested or best_verifier(settings))


def best_verifier(settings: Settings) -> str | None:
    """The verifier that accepts most of these drafts for the same output distribution; None where nothing is drafted."""
    if "verify" not in dials_read(settings.proposer, settings.accept):
        return None
    return best_for(_draft_traits(settings))


def _draft_traits(settings: Settings, proposer: type[Proposer] | None = None) -> DraftTraits:
    """The properties that decide which verifiers support these settings' drafts; proposer: in place of the settings'."""
    drafting = (proposer or _proposer(settings)).draft_sampling(_parts(settings))
    return DraftTraits(drafting, _rule(settings), settings.temperature == 0, settings.residual)


def fitted(settings: Settings, target: Target, name: str, given: Mapping[str, Any]) -> Settings:
    """The settings for a target that is called `name`; `given`: the overrides. InputError where it cannot be sampled so."""
    if target.channels:
        from lanternpp.engine.latents import MixtureSampling

        MixtureSampling(settings.temperature, settings.top_k, settings.top_p)
    if settings.top_k > target.vocab > 0:
        raise InputError(f"top-k {settings.top_k} exceeds the {target.vocab} codes of {name}")
    if (settings.neighbours or 0) >= target.vocab > 0 and given.get("neighbours") is None:
        return replace(settings, neighbours=target.vocab - 1)  # a default for codebooks of thousands
    return settings


def suits(settings: Settings, target: Target) -> bool:
    """Whether a target has what the settings' rule needs, a codebook or a diffusion head, and their drafts suit what it draws."""
    rule = find("acceptance rule", settings.accept, RULES)
    lends = "neighbours" in dials_read(settings.proposer, settings.accept)
    able = hasattr(target, "denoiser") or not rule.trajectories
    return (
        able and (not target.channels or suits_latents(settings)) and not (lends and target.codebook is None)
    )


def suits_latents(settings: Settings) -> bool:
    """Whether latents can be drawn with these settings: without a draft, or in a chain of EAGLE's under a rule for latents."""
    drafts = _draft_traits(settings)
    chain = drafts.drafting.chain and drafts.drafting.samples_from_q and settings.verify == TOKEN
    return (drafts.rule.lossless or drafts.rule.trajectories) and (
        settings.proposer == NO_DRAFT or (settings.proposer == "tree" and chain)
    )


def with_tree(settings: Settings, tree: str | None) -> Settings:
    """The same settings with another tree. A verifier that is not the default is kept where it supports the tree."""
    made = replace(settings, tree=tree)
    if made.min_survival and why_not_shortened(made.min_survival, build_tree(tree or TREE), made.compile):
        made = replace(made, min_survival=None)
    requested = settings.verify != best_verifier(settings) and not why_unsupported(
        _draft_traits(made), settings.verify or TOKEN
    )
    return made if requested else replace(made, verify=best_verifier(made))


def typed(name: str, value: Any) -> Any:
    """An override converted to the type of its field. A part may also be a class, and a rule an object. InputError."""
    dial = DIALS.get(name)
    if dial is None:
        return value  # refused with the names that are known
    if read := PLAIN.get(dial.kind):
        value = read(dial.spoken, value)
        dial.check(value, dial.spoken)
        return value
    if name == "tree" and isinstance(value, list | tuple):
        return shape_name(check_shape(value, "tree"))
    base, objects = PARTS.get(name, (None, False))
    if base is not None and not isinstance(value, str) and (isinstance(value, type) or objects):
        check_class(KINDS[name], Given(value), value if isinstance(value, type) else type(value), base)
        return Given(value)
    return importable(calls.text(dial.spoken, value))


def defaults_of(defaults: Mapping[str, Any], method: str) -> dict[str, Any]:
    """A model's defaults for a method. InputError where one cannot be used."""
    found = dict[str, Any]()
    row, at = defaults.get("methods", {}).get(method, {}), f"methods.{method}."
    try:
        for within, values in ("", defaults), (at, row):
            for name, value in values.items():
                if name not in ("method", "methods") and value is not None:
                    found[name] = value
                    if dial := DIALS.get(name):
                        found[name] = checked(within + name, value, dial.kind)
                        dial.check(value, within + name)
    except InputError as error:
        raise InputError(f"the model's defaults: {error}") from None
    return found


def dials_read(proposer: str, accept: str) -> frozenset[str]:
    """The dials that these parts read: all of them where a part does not say. InputError if one is unknown.

    A rule given as an instance reads none.
    """
    parts = find("proposer", proposer, PROPOSERS), find("acceptance rule", accept, RULES)
    read: frozenset[str] = frozenset()
    for part in parts:
        if isinstance(part, Acceptance):
            continue
        read_by_part = getattr(part, "dials", None)
        read |= frozenset(READ) if read_by_part is None else read_by_part
    return read


def build_rule(
    settings: Settings,
    table: Callable[[int], Tensor],
) -> Acceptance:
    """The acceptance rule; `table` gives the k nearest codes of every code. InputError where a dial is wrong."""
    residual = settings.residual or ("optimal" if settings.verify not in (None, TOKEN) else None)
    entry = _rule(settings)
    dials = asdict(settings) | {"residual": residual}
    return entry if isinstance(entry, Acceptance) else entry.build(Dials(table, **dials))


def _rule(settings: Settings) -> Acceptance | type[Acceptance]:
    """The rule that settings name: a class or an instance."""
    entry: Acceptance | type[Acceptance] = find("acceptance rule", settings.accept, RULES)
    if not isinstance(entry, Acceptance):
        check_class("acceptance rule", settings.accept, entry, Acceptance)
    return entry


def build_proposer(settings: Settings, network: Callable[[str], Drafter | Target]) -> Proposer:
    """The proposer, with the network that it needs, by its kind. InputError where a dial is wrong."""
    entry, parts = _proposer(settings), _parts(settings)
    if entry.needs:
        parts.network = network(entry.needs)
    made = entry.build(parts)
    # a drafter may have named another proposer than the settings do
    if wrong := why_unsupported(_draft_traits(settings, type(made)), settings.verify or TOKEN):
        raise InputError(wrong)
    return made


def network_needed(settings: Settings) -> str | None:
    """The kind of network that these settings draft with, by the name of its folder in a model; None where they need none.

    No weights are read. Raises InputError where a dial of the proposer is wrong.
    """
    entry, parts = _proposer(settings), _parts(settings)
    if entry.needs is None:
        entry.build(parts)
    return entry.needs


def _proposer(settings: Settings) -> type[Proposer]:
    """The proposer that settings name."""
    entry: type[Proposer] = find("proposer", settings.proposer, PROPOSERS)
    check_class("proposer", settings.proposer, entry, Proposer)
    return entry


def _parts(settings: Settings) -> Parts:
    """The arguments of `Proposer.build`, without the network."""
    return Parts(**asdict(settings) | {"tree": build_tree(settings.tree or TREE)})


def build_verifier(settings: Settings, backend: Backend = PYTORCH) -> Verifier:
    """The function that verifies drafts; backend: what may do it for PyTorch."""
    return with_native(find("verifier", settings.verify or TOKEN, VERIFIERS), backend.verifier())


def _unread(
    name: str, value: object, method: str, merged: Mapping[str, Any], read: frozenset[str], auto: bool
) -> str:
    """The sentence for a dial that would change nothing."""
    named = [spoken(dial) for dial in READ if dial in read]
    takes = f"they take {', '.join(named)}" if named else "they have no dials"
    return (
        f"{spoken(name)} {value} would change nothing: method {method!r}{', which auto takes here,' if auto else ''} has "
        f"the proposer {merged['proposer']!r} and the rule {merged['accept']!r}, and {takes}"
    )
