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
from lanternpp.engine.verify import TOKEN, DraftTraits, best_for, unsupported_reason
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.proposers import PROPOSERS
from lanternpp.proposers.parallel import unshortened_reason
from lanternpp.trees import PATHS, TREES, build_tree, shape_name
from lanternpp.trees.base import TreeBuilder
from lanternpp.trees.static import check as check_shape
from lanternpp.util.jsonfile import read_json
from lanternpp.util.registry import check_class, check_instance, find, given, unknown

# By the kind of a part: its name in messages, its classes by name, its base class, and whether an object may take its place.
PARTS: dict[str, tuple[str, Mapping[str, Any], type, bool]] = {
    "accept": ("acceptance rule", RULES, Acceptance, True),
    "proposer": ("proposer", PROPOSERS, Proposer, False),
    "tree": ("tree", TREES, TreeBuilder, True),
}
PART_DIALS = names(DraftDials, RuleDials)  # the dials that parts read
NO_DRAFT = "none"  # the proposer of plain decoding
SHAPE_DIALS = {"tree", "window", "min_survival"}  # dials that decide the shape of a draft
DEFAULT_TREE = "eagle-25"  # of proposers that take a tree


def resolve(
    method: str, defaults: Mapping[str, Any], overrides: Mapping[str, Any], auto: bool = False
) -> Settings:
    """Merge overrides, the model's defaults for the method, its defaults for all methods, and the method's row.

    Overrides are the caller's own: the names in them may be imported, names in defaults may not.
    auto: the caller named no method; a message says so.
    Raises InputError where a name is unknown, or an override is a dial that no part of the method reads. Such a dial of the row or
    of the defaults is dropped: an override has replaced the part that read it. A draft whose shape is an override is not fitted.
    """
    overrides = {
        name: convert_override(name, value) for name, value in overrides.items() if value is not None
    }
    check_method(method)
    merged: dict[str, Any] = {name: dial.default for name, dial in DIALS.items()}
    merged |= {**METHODS[method].dials} | defaults_of(defaults, method) | overrides
    merged["fit"] = merged["fit"] and merged["proposer"] != NO_DRAFT and not overrides.keys() & SHAPE_DIALS
    if extra := merged.keys() - DIALS.keys():
        name = min(extra)
        if name in RENAMED:
            raise InputError(f"option {name!r} is now {RENAMED[name]!r}")
        raise InputError(unknown("option", name, DIALS))
    read = dials_read(merged["proposer"], merged["accept"])
    unread = [name for name in PART_DIALS if name not in read]
    if useless := [name for name in unread if name in overrides]:
        name = useless[0]
        takes = ", ".join(DIALS[dial].full_name for dial in PART_DIALS if dial in read)
        raise InputError(
            f"{DIALS[name].spoken} {overrides[name]} would change nothing: method {method!r}"
            f"{', which auto takes here,' if auto else ''} has the proposer {merged['proposer']!r} and the rule "
            f"{merged['accept']!r}, and they {'take ' + takes if takes else 'have no dials'}"
        )
    merged |= dict.fromkeys(unread)
    if "tree" in read and merged["tree"] is None:
        merged["tree"] = DEFAULT_TREE
    return _allowed(Settings(method=method, **merged), overrides)


def _allowed(settings: Settings, overrides: Container[str] = ()) -> Settings:
    """Drop dials that the draft does not allow, or raise InputError for an override, and choose a missing verifier."""
    for name in ("min_survival", "verify"):
        value, reason = getattr(settings, name), None
        if value and name == "verify":
            reason = unsupported_reason(_draft_traits(settings), value)
        elif value:
            reason = unshortened_reason(value, build_tree(settings.tree or DEFAULT_TREE), settings.compile)
        if reason:
            if name in overrides:
                raise InputError(reason)
            settings = replace(settings, **{name: None})
    return replace(settings, verify=settings.verify or best_verifier(settings))


def best_verifier(settings: Settings) -> str | None:
    """Return the verifier that accepts most of these drafts for the same output distribution; None without drafts."""
    drafted = "verify" in dials_read(settings.proposer, settings.accept)
    return best_for(_draft_traits(settings)) if drafted else None


def _draft_traits(settings: Settings, proposer: type[Proposer] | None = None) -> DraftTraits:
    """Return the traits that decide which verifiers support these drafts; proposer: in place of the settings'."""
    drafting = (proposer or part("proposer", settings.proposer)).draft_sampling(_parts(settings))
    rule = part("accept", settings.accept)
    return DraftTraits(drafting, rule, settings.temperature == 0, settings.residual)


def for_target(settings: Settings, target: Target, name: str, overrides: Mapping[str, Any]) -> Settings:
    """Check the sampling of a target named `name`, and lower dials that are no overrides to its greatest values. InputError."""
    if target.channels:
        from lanternpp.engine.latents import MixtureSampling

        MixtureSampling(settings.temperature, settings.top_k, settings.top_p)
        if settings.compile:
            raise InputError(f"{name} draws latents, whose steps are never compiled; leave --compile out")
    else:
        Sampling(settings.temperature, settings.top_k, settings.top_p)
    limits = {"top_k": target.vocab, **dial_limits(target)}
    limits = {dial: limit for dial, limit in limits.items() if overrides.get(dial) is None}
    if "top_k" not in limits and settings.top_k > target.vocab > 0:
        raise InputError(f"top-k {settings.top_k} exceeds the {target.vocab} codes of {name}")
    # Defaults are for pictures of many rows and codebooks of thousands.
    lowered = {dial: limit for dial, limit in limits.items() if (getattr(settings, dial) or 0) > limit}
    return replace(settings, **lowered)


def dial_limits(target: Target) -> dict[str, int]:
    """Return the greatest values of the dials that a target's codes and rows limit; latents limit none."""
    if target.channels:
        return {}
    max_codes, max_rows = target.vocab - 1, -(-target.length // target.width)
    return {"neighbours": max_codes, "alternatives": max_codes, "window_rows": max_rows}


def suits(settings: Settings, target: Target) -> bool:
    """Return whether a target has the codebook or diffusion head that the rule needs, and can verify the drafts."""
    has_needed_head = hasattr(target, "denoiser") or not part("accept", settings.accept).trajectories
    relaxed = "neighbours" in dials_read(settings.proposer, settings.accept)
    has_needed_codebook = not relaxed or target.codebook is not None
    return has_needed_head and has_needed_codebook and (not target.channels or suits_latents(settings))


def suits_latents(settings: Settings) -> bool:
    """Return whether latents can be drawn so: without a draft, or with EAGLE's chains under a rule for latents."""
    drafts = _draft_traits(settings)
    chain = drafts.drafting.chain and drafts.drafting.samples_from_q and settings.verify == TOKEN
    return (drafts.rule.lossless or drafts.rule.trajectories) and (
        settings.proposer == NO_DRAFT or (settings.proposer == "tree" and chain)
    )


def with_tree(settings: Settings, tree: str | None) -> Settings:
    """Return the settings with another tree. A verifier that is not the default stays where it supports the tree."""
    is_default = settings.verify == best_verifier(settings)
    return _allowed(replace(settings, tree=tree, verify=None if is_default else settings.verify))


def convert_override(name: str, value: Any) -> Any:
    """Convert an override to the type of its field: a part as `given`, a tree's paths or their file as text. Raises InputError."""
    dial = DIALS.get(name)
    if dial is None:
        return value  # `resolve` raises
    if name not in PARTS:
        return _read(dial, value, dial.spoken)
    if name == "tree" and isinstance(value, list | tuple):
        return shape_name(check_shape(value, "tree"))
    if isinstance(value, str | Path):
        value = _read(dial, value, dial.spoken)
        if value.startswith("["):  # the paths of a tree
            return value
        if name == "tree" and value.endswith(".json"):  # read now, as the file may change later
            return shape_name(check_shape(read_json(Path(value), PATHS), f"tree file {value}"))
    return given(PARTS[name][0], value)


def _read(dial: Dial, value: Any, label: str) -> Any:
    """Convert and check a dial's value, which messages call `label`; raise InputError."""
    value = calls.converted(dial.kind, label, value)
    dial.check(value, label)
    if dial.choices and dial.name not in PARTS and value not in dial.choices:
        raise InputError(unknown(label, value, dial.choices))
    return value


def defaults_of(defaults: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return a model's defaults for a method; raise InputError where a value cannot be used."""
    values = dict[str, Any]()
    row = defaults.get("methods", {}).get(method, {})
    try:
        for prefix, source in ("", defaults), (f"methods.{method}.", row):
            for name, value in source.items():
                if name not in ("method", "methods") and value is not None:
                    dial = DIALS.get(name)
                    values[name] = _read(dial, value, prefix + name) if dial else value
    except InputError as error:
        raise InputError(f"the model's defaults: {error}") from None
    return values


def part(kind: str, name: str) -> Any:
    """Return the class, or the object, of a name in `PARTS[kind]`; raise InputError."""
    label, classes_by_name, base, may_be_object = PARTS[kind]
    entry = find(label, name, classes_by_name)
    if not (may_be_object and isinstance(entry, base)):
        check_class(label, name, entry, base)
    return entry


def dials_read(proposer: str, accept: str) -> frozenset[str]:
    """Return the dials that the parts read: all for a part without `dials`, none for a rule that is an object. InputError."""
    read = set[str]()
    for entry in (part("proposer", proposer), part("accept", accept)):
        if not isinstance(entry, Acceptance):
            read.update(PART_DIALS if entry.dials is None else entry.dials)
    if unknown_dials := read - {*PART_DIALS}:
        reason = f"proposer {proposer!r} or rule {accept!r} reads {min(unknown_dials)!r}, which is no dial"
        raise InputError(f"{reason}; its `dials` are a set of {', '.join(PART_DIALS)}")
    return frozenset(read)


def is_joint(settings: Settings) -> bool:
    """Return whether a draft is verified jointly and not token by token."""
    return settings.verify not in (None, TOKEN)


def build_rule(settings: Settings, table: Callable[[int], Tensor]) -> Acceptance:
    """Build the acceptance rule; `table` returns the k nearest codes of every code. InputError where a dial is wrong."""
    residual = settings.residual or ("optimal" if is_joint(settings) else None)
    entry = part("accept", settings.accept)
    dials = asdict(settings) | {"residual": residual}
    rule: Acceptance = entry if isinstance(entry, Acceptance) else entry.build(Dials(table, **dials))
    check_instance("acceptance rule", settings.accept, rule, Acceptance)
    return rule


def build_proposer(settings: Settings, network: Callable[[str], Drafter | Target]) -> Proposer:
    """Build the proposer; `network` returns the network of the kind that it needs. InputError where a dial is wrong."""
    entry, parts = part("proposer", settings.proposer), _parts(settings)
    if entry.needs:
        parts.network = network(entry.needs)
    proposer: Proposer = entry.build(parts)
    check_instance("proposer", settings.proposer, proposer, Proposer, "size", "depth")
    # A drafter's config may name another proposer than the settings do.
    if reason := unsupported_reason(_draft_traits(settings, type(proposer)), settings.verify or TOKEN):
        raise InputError(reason)
    return proposer


def network_needed(settings: Settings) -> str | None:
    """Return the kind of network that drafts, the name of its folder in a model, or None; raise InputError for a wrong dial."""
    entry, parts = part("proposer", settings.proposer), _parts(settings)
    if entry.needs is None:
        entry.build(parts)
    return entry.needs


def _parts(settings: Settings) -> Parts:
    """Return the arguments of `Proposer.build`, without the network."""
    return Parts(**asdict(settings) | {"tree": build_tree(settings.tree or DEFAULT_TREE)})
