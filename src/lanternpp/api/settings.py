"""All settings of a picture except prompt and seed: a method's row, a model's defaults, and overrides."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lanternpp.accept import RULES
from lanternpp.accept.base import Acceptance, Dials
from lanternpp.api import calls
from lanternpp.api.options import (
    DIALS,
    METHODS,
    RENAMED,
    Dial,
    DraftDials,
    RuleDials,
    Settings,
    check_method,
    names,
)
from lanternpp.drafters.base import Drafter
from lanternpp.engine.proposer import Parts, Proposer
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify.choose import TOKEN, DraftTraits, best_for, why_unsupported
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.proposers import PROPOSERS
from lanternpp.proposers.parallel import why_not_shortened
from lanternpp.trees import TREES, build_tree, shape_name
from lanternpp.trees.base import TreeBuilder
from lanternpp.trees.static import check as check_shape
from lanternpp.util.registry import Given, check_class, check_made, find, importable, unknown

# By the kind of a part: its name in messages, its entries by name, its base class, and whether it may be given as an object.
PARTS: dict[str, tuple[str, Mapping[str, Any], type, bool]] = {
    "accept": ("acceptance rule", RULES, Acceptance, True),
    "proposer": ("proposer", PROPOSERS, Proposer, False),
    "tree": ("tree", TREES, TreeBuilder, True),
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
    unread = [name for name in READ if name not in read]
    for name in (name for name in unread if name in given):
        named = ", ".join(DIALS[dial].full_name for dial in READ if dial in read)
        raise InputError(
            f"{DIALS[name].spoken} {given[name]} would change nothing: method {method!r}"
            f"{', which auto takes here,' if auto else ''} has the proposer {merged['proposer']!r} and the rule "
            f"{merged['accept']!r}, and they {'take ' + named if named else 'have no dials'}"
        )
    merged |= dict.fromkeys(unread)
    if "tree" in read and merged["tree"] is None:
        merged["tree"] = TREE
    return _allowed(Settings(method=method, **merged), given)


def _allowed(settings: Settings, given: Container[str] = ()) -> Settings:
    """The settings with a verifier, the best one by default. A default that their draft does not allow is dropped.

    Raises InputError where it is `given`.
    """
    for name in ("min_survival", "verify"):
        value, wrong = getattr(settings, name), None
        if value and name == "verify":
            wrong = why_unsupported(_draft_traits(settings), value)
        elif value:
            wrong = why_not_shortened(value, build_tree(settings.tree or TREE), settings.compile)
        if wrong:
            if name in given:
                raise InputError(wrong)
            settings = replace(settings, **{name: None})
    return replace(settings, verify=settings.verify or best_verifier(settings))


def best_verifier(settings: Settings) -> str | None:
    """The verifier that accepts most of these drafts for the same output distribution; None where nothing is drafted."""
    drafted = "verify" in dials_read(settings.proposer, settings.accept)
    return best_for(_draft_traits(settings)) if drafted else None


def _draft_traits(settings: Settings, proposer: type[Proposer] | None = None) -> DraftTraits:
    """The properties that decide which verifiers support these settings' drafts; proposer: in place of the settings'."""
    drafting = (proposer or part("proposer", settings.proposer)).draft_sampling(_parts(settings))
    rule = part("accept", settings.accept)
    return DraftTraits(drafting, rule, settings.temperature == 0, settings.residual)


def for_target(settings: Settings, target: Target, name: str, given: Mapping[str, Any]) -> Settings:
    """The settings for a target that is called `name`; `given`: the overrides. InputError where it cannot be sampled so."""
    if target.channels:
        from lanternpp.engine.latents import MixtureSampling

        MixtureSampling(settings.temperature, settings.top_k, settings.top_p)
    else:
        Sampling(settings.temperature, settings.top_k, settings.top_p)
    if settings.top_k > target.vocab > 0:
        raise InputError(f"top-k {settings.top_k} exceeds the {target.vocab} codes of {name}")
    free = {name: most for name, most in greatest(target).items() if given.get(name) is None}
    # defaults are for pictures of many rows and codebooks of thousands
    return replace(settings, **{k: most for k, most in free.items() if (getattr(settings, k) or 0) > most})


def greatest(target: Target) -> dict[str, int]:
    """The greatest values of the dials that a target's codes and rows limit; none of latents."""
    if target.channels:
        return {}
    others = target.vocab - 1
    return {"neighbours": others, "alternatives": others, "window_rows": -(-target.length // target.width)}


def suits(settings: Settings, target: Target) -> bool:
    """Whether a target has what the settings' rule needs, a codebook or a diffusion head, and their drafts suit what it draws."""
    relaxed = "neighbours" in dials_read(settings.proposer, settings.accept)
    return (
        (hasattr(target, "denoiser") or not part("accept", settings.accept).trajectories)
        and (not target.channels or suits_latents(settings))
        and (target.codebook is not None or not relaxed)
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
    default = settings.verify == best_verifier(settings)
    return _allowed(replace(settings, tree=tree, verify=None if default else settings.verify))


def typed(name: str, value: Any) -> Any:
    """An override converted to the type of its field. A part may also be a class, and a rule an object. InputError."""
    dial = DIALS.get(name)
    if dial is None:
        return value  # `resolve` raises
    if name == "tree" and isinstance(value, list | tuple):
        return shape_name(check_shape(value, "tree"))
    called, _, base, objects = PARTS.get(name, ("", {}, object, False))
    if name in PARTS and not isinstance(value, str | Path) and (isinstance(value, type) or objects):
        check_class(called, Given(value), value if isinstance(value, type) else type(value), base)
        return Given(value)
    return importable(_read(dial, value, dial.spoken))


def _read(dial: Dial, value: Any, called: str) -> Any:
    """A value as a dial takes it; `called` in messages. Raises InputError."""
    value = calls.converted(dial.kind, called, value)
    dial.check(value, called)
    if dial.choices and dial.name not in PARTS and value not in dial.choices:
        raise InputError(unknown(called, value, dial.choices))
    return value


def defaults_of(defaults: Mapping[str, Any], method: str) -> dict[str, Any]:
    """A model's defaults for a method. InputError where one cannot be used."""
    found = dict[str, Any]()
    row, at = defaults.get("methods", {}).get(method, {}), f"methods.{method}."
    try:
        for within, values in ("", defaults), (at, row):
            for name, value in values.items():
                if name not in ("method", "methods") and value is not None:
                    dial = DIALS.get(name)
                    found[name] = _read(dial, value, within + name) if dial else value
    except InputError as error:
        raise InputError(f"the model's defaults: {error}") from None
    return found


def part(kind: str, name: str) -> Any:
    """The class, or the object, of a name in `PARTS[kind]`. InputError."""
    called, table, base, objects = PARTS[kind]
    entry = find(called, name, table)
    if not (objects and isinstance(entry, base)):
        check_class(called, name, entry, base)
    return entry


def dials_read(proposer: str, accept: str) -> frozenset[str]:
    """The dials that these parts read: all of them where a part does not say. InputError if one is unknown.

    A rule given as an instance reads none.
    """
    parts = part("proposer", proposer), part("accept", accept)
    read = (
        () if isinstance(each, Acceptance) else READ if each.dials is None else each.dials for each in parts
    )
    found = frozenset[str]().union(*read)
    if wrong := found - {*READ}:
        what = f"proposer {proposer!r} or rule {accept!r} reads {min(wrong)!r}"
        raise InputError(f"{what}, which is no dial; its `dials` are a set of {', '.join(READ)}")
    return found


def is_joint(settings: Settings) -> bool:
    """Whether a draft is verified jointly and not token by token."""
    return settings.verify not in (None, TOKEN)


def build_rule(settings: Settings, table: Callable[[int], Tensor]) -> Acceptance:
    """The acceptance rule; `table` gives the k nearest codes of every code. InputError where a dial is wrong."""
    residual = settings.residual or ("optimal" if is_joint(settings) else None)
    entry = part("accept", settings.accept)
    dials = asdict(settings) | {"residual": residual}
    return entry if isinstance(entry, Acceptance) else entry.build(Dials(table, **dials))


def build_proposer(settings: Settings, network: Callable[[str], Drafter | Target]) -> Proposer:
    """The proposer, with the network that it needs, by its kind. InputError where a dial is wrong."""
    entry, parts = part("proposer", settings.proposer), _parts(settings)
    if entry.needs:
        parts.network = network(entry.needs)
    made: Proposer = entry.build(parts)
    check_made("proposer", settings.proposer, made, Proposer, "size", "depth")
    # a drafter may have named another proposer than the settings do
    if wrong := why_unsupported(_draft_traits(settings, type(made)), settings.verify or TOKEN):
        raise InputError(wrong)
    return made


def network_needed(settings: Settings) -> str | None:
    """The kind of network that these settings draft with, by the name of its folder in a model; None where they need none.

    No weights are read. Raises InputError where a dial of the proposer is wrong.
    """
    entry, parts = part("proposer", settings.proposer), _parts(settings)
    if entry.needs is None:
        entry.build(parts)
    return entry.needs


def _parts(settings: Settings) -> Parts:
    """The arguments of `Proposer.build`, without the network."""
    return Parts(**asdict(settings) | {"tree": build_tree(settings.tree or TREE)})
