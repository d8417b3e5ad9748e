"""Options of the command line, made from the annotations that declare them, and checks of their values.

A verb is a function under `@verb`. Each of its parameters is an option, or a group of options if it is a dataclass or a TypedDict.
The docstring of a verb or dataclass has the help of its options, a line `name: help` for each, unless `Option` has the help.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, TypeVar, get_args, get_type_hints, is_typeddict

from cyclopts import Group, Parameter

from lanternpp.api.options import DIALS, METHODS, DrawOptions, Settings, check_prompt
from lanternpp.errors import InputError
from lanternpp.util.options import Option, option_of
from lanternpp.util.terminal import on_terminal, say

if TYPE_CHECKING:
    from lanternpp.api.defaults import Defaults
    from lanternpp.api.pipeline import Pipeline

F = TypeVar("F", bound=Callable[..., Any])
# Headings of help, in this order.
HEADINGS = (
    "Arguments",
    "Options",
    "Many pictures",
    "Ray",
    "Server",
    "Model",
    "Method",
    "Sampling",
    "Quality",
)


def without(*names: str) -> Parameter:
    """Exclude the fields of these names from a group of options: `Annotated[DrawOptions, without("size", "method")]`."""
    return Parameter(parse=re.compile(rf"^(?!({'|'.join(names)})$)"))


def verb(function: F) -> F:
    """Decorate a function with annotations for Cyclopts, and with a docstring that has one line a paragraph."""
    function.__doc__, function.__annotations__ = _documented(function)
    return function


def heading(name: str) -> Group:
    """Return a heading of help."""
    return Group(name, sort_key=HEADINGS.index(name) if name in HEADINGS else len(HEADINGS))


def _documented(owner: Any) -> tuple[str, dict[str, Any]]:
    """Return a function's or class's docstring, one line a paragraph, without lines `name: help`; and by name annotations with the help."""
    hints = get_type_hints(owner, include_extras=True)
    paragraphs, helps, name = [""], dict[str, str](), ""
    text = "\n\n".join(documented.__doc__ or "" for documented in getattr(owner, "__mro__", (owner,)))
    for line in map(str.strip, text.splitlines()):
        word, colon, help = line.partition(": ")
        if colon and word in hints:
            name, helps[word] = word, help
        elif name and line:
            helps[name] += f" {line}"
        elif line:
            paragraphs[-1] = f"{paragraphs[-1]} {line}".strip()
        else:
            name = ""
            paragraphs += [""] if paragraphs[-1] else []
    annotations = {name: _annotation(name, hint, helps.get(name, "")) for name, hint in hints.items()}
    return "\n\n".join(paragraphs).strip(), annotations


def _annotation(name: str, hint: Any, help: str = "") -> Any:
    """Return the annotation by which Cyclopts reads a parameter or field. help: of an option without help of its own."""
    meta = getattr(hint, "__metadata__", ())
    kind = hint.__origin__ if meta else hint
    for group in (*meta, kind):
        if isinstance(group, type) and (is_typeddict(group) or dataclasses.is_dataclass(group)):
            section: dict[str, Any] = {"group": heading(group.heading)} if hasattr(group, "heading") else {}
            return Annotated[_group(group), *meta, Parameter(name="*", **section)]
    option = option_of(hint) or (Option() if help else None)
    if option is None:
        return hint
    option = dataclasses.replace(option, help=option.help or help)
    spellings = option.names or ("--" + name.replace("_", "-"),)
    spelling = next((text for text in spellings if len(text) > len("--n")), spellings[0])
    number_type = next((number for number in (int, float) if number in (kind, *get_args(kind))), None)
    # An explicit group of None would replace the heading of the group of options.
    section = {"group": heading(option.group)} if option.group else {}
    parameter = Parameter(
        name=option.names or None,
        help=option.about,
        metavar=option.metavar,
        negative=None if option.negative else "",
        validator=lambda _, value: option.check(value, spelling),
        converter=None if number_type is None else partial(_number, number_type),
        show_default=False if kind is bool else None,
        **section,
    )
    return Annotated[kind, option, parameter]


def _number(kind: type[int] | type[float], _: Any, tokens: Any) -> int | float:
    """Convert a number from the command line; Cyclopts itself would round 1.5 to a whole number."""
    try:
        return kind(tokens[0].value)
    except ValueError:
        raise ValueError(f"{tokens[0].value!r} is no {'whole ' if kind is int else ''}number") from None


@cache
def _group(kind: Any) -> Any:
    """Return a dataclass, or a TypedDict of dials, with annotations for Cyclopts."""
    if is_typeddict(kind):
        dials = [DIALS[name] for name in kind.__annotations__]
        annotations = {dial.name: _annotation(dial.name, Annotated[dial.kind | None, dial]) for dial in dials}
        return TypedDict(kind.__name__, annotations, total=False)  # type: ignore[operator]
    _, kind.__annotations__ = _documented(kind)
    return kind


# Options that several verbs share.
Prompt = Annotated[str, Option("What to draw.", metavar="PROMPT", validate=check_prompt)]
Count = Annotated[int, Option("Pictures.", ge=1, le=10_000, names=("-n", "--n"))]
Seed = Annotated[
    int, Option("Of the first picture; the next has the next seed.", ge=0, le=2**62, group="Sampling")
]
Folder = Option(names=("-o", "--output"), metavar="DIR")  # to write to
Switch = Option(negative=True)  # with a --no- form
Overwrite = Annotated[
    bool,
    Option("Replace pictures that were drawn with other settings, and with -o any file."),
]
Json = Annotated[bool, Option("Print one JSON object and nothing else.", names=("--json",))]
Prompts = Annotated[
    Path | None,
    Option(
        "One prompt per line, or MS-COCO's captions (.json), PartiPrompts.tsv, or GenEval's .jsonl, here or in a dataset on the "
        "hub; default: the model's own list.",
        metavar="FILE|OWNER/NAME/FILE",
    ),
]
Plots = Annotated[bool | None, Option("PNG plots. Default: where matplotlib is installed.", negative=True)]
Ray = Annotated[
    str | None,
    Option(
        "Use Ray: on this machine (local, the default), on the cluster that it is part of (auto), or on the one at an address. "
        "Needs lanternpp[ray].",
        metavar="[local|auto|HOST:PORT]",
        group="Ray",
    ),
]


def workers(noun: str) -> Option:
    """Return the option of the number of Ray's workers, with a noun for the workers."""
    help = f"{noun}; default: one for each GPU, else one for every four cores."
    return Option(help, ge=1, le=10_000, metavar="N", group="Ray")


def check_ray(ray: str | None, option: str, workers: int | None) -> None:
    """Raise InputError if Ray is not installed, the address is malformed, or workers are given without Ray."""
    if ray is not None:
        from lanternpp.jobs import cluster

        cluster.check(ray)
    elif workers is not None:
        raise InputError(f"{option} {workers} needs Ray; add --ray")


def read_numbers(
    text: str | None, kind: type, option: str, allowed: str, low: float, high: float
) -> list[Any]:
    """Read numbers separated by commas, ascending; raise InputError unless all are in the range [low, high]. None has no numbers."""
    if text is None:
        return []
    try:
        numbers = sorted({kind(word) for word in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not low <= numbers[0] <= numbers[-1] <= high:
        raise InputError(f"{option} {text!r} must be {allowed}, separated by commas")
    return numbers


def read_sizes(text: str | None) -> list[int]:
    """Read the batch sizes of --batch-sizes; raise InputError."""
    return read_numbers(text, int, "--batch-sizes", "whole numbers from 1 to 1024", 1, 1024)


def plots_enabled(plots: bool | None) -> bool:
    """Return whether to draw plots; raise InputError if --plots is given and matplotlib is missing."""
    has_matplotlib = find_spec("matplotlib") is not None
    if plots and not has_matplotlib:
        raise InputError("plots need matplotlib; install lanternpp[eval], or leave out --plots")
    if plots is None and not has_matplotlib:
        say("note", "no plots are drawn: they need matplotlib; install lanternpp[eval]")
    return has_matplotlib and plots is not False


def read(options: DrawOptions) -> Pipeline:
    """Read the model, and print the effect of weights in 8 bits; raise InputError, also if codes cannot become pictures here."""
    from lanternpp import Pipeline
    from lanternpp.api.results import check_output

    pipe = Pipeline.from_pretrained(**options.pretrained)
    check_output(pipe.target)
    if pipe.model.effect:
        say("int8", pipe.model.effect)
    return pipe


def advise(pipe: Pipeline, settings: Mapping[str, Any], options: DrawOptions) -> None:
    """Say on a terminal how to compile steps, if a GPU drew pictures by steps that could be compiled, and --no-compile was not given."""
    possible = not (settings["compile"] or settings["min_survival"] or pipe.target.channels)
    if possible and pipe.device.type == "cuda" and "compile" not in options.overrides and on_terminal():
        say("note", "`lanternpp models warm` compiles steps once, for 0.6 to 0.7 of the time on an H200")


def defaults_of(options: DrawOptions) -> Defaults:
    """Return the defaults of a model that is not read yet; raise InputError."""
    from lanternpp.api.defaults import Defaults
    from lanternpp.api.model import model_folder

    drafter = model_folder(options.drafter, "drafter") if options.drafter else None
    return Defaults.read(model_folder(options.model), drafter)


def check(options: DrawOptions, searched: bool = False) -> Settings:
    """Return the settings of a model that is not read yet; raise InputError for wrong or useless dials.

    A missing dial is an error too, unless it is `searched`.
    """
    import torch

    from lanternpp.accept import RULES
    from lanternpp.api.settings import build_rule, network_needed, resolve

    # A drafter is not fetched for a method without a drafter. METHODS has no auto.
    has_drafter = options.method not in METHODS or METHODS[options.method].dials["proposer"] == "tree"
    defaults = defaults_of(options if has_drafter else dataclasses.replace(options, drafter=None))
    chosen = defaults.chosen(options.method)
    settings = resolve(chosen.method, defaults.model_defaults, options.overrides, chosen.why is not None)
    # A tuning may have found the rule's dials, and a rule of another package might not take an empty table.
    if settings.accept in RULES and not (searched or defaults.tuned):
        build_rule(settings, lambda k: torch.empty(0, k, dtype=torch.int32))
    if network_needed(settings) is None and options.drafter is not None:
        raise InputError(
            f"--drafter {options.drafter} would change nothing: the proposer {settings.proposer!r} has no drafter"
        )
    return settings


def for_workers(options: DrawOptions) -> DrawOptions:
    """Return options for workers in other folders: absolute paths of models, and the paths of a tree in place of its file."""
    from lanternpp.api.model import MODELS
    from lanternpp.api.settings import convert_override

    models = {"model": options.model, "drafter": options.drafter}
    paths = {name: Path(model) for name, model in models.items() if model and model not in MODELS}
    full: dict[str, Any] = {name: str(path.absolute()) for name, path in paths.items() if path.exists()}
    overrides = options.overrides
    if str(overrides.get("tree")).endswith(".json"):
        full["overrides"] = overrides | {"tree": convert_override("tree", overrides["tree"])}
    return dataclasses.replace(options, **full)


def png_path(path: Path, overwrite: bool = False) -> Path:
    """Return the path of a PNG that can be written, whose folder may still be missing; raise InputError if it cannot be written.

    overwrite: whether the PNG may replace a file that is no picture of lanternpp.
    """
    if path.suffix.lower() != ".png":
        raise InputError(f"output {str(path)!r} does not end in .png; pictures are written as PNG")
    if path.exists() and not path.is_file():
        raise InputError(f"output {str(path)!r} is not a file; give a file name that ends in .png")
    if not overwrite and path.exists() and path.stat().st_size:
        from lanternpp.api.picture import png_notes

        if not (png_notes(path) or {}).keys() >= {"prompt", "seed", "settings"}:
            raise InputError(
                f"output {str(path)!r} is a file that lanternpp has not written; choose another name, or replace it with --overwrite"
            )
    check_writable(path, next(p for p in path.absolute().parents if p.exists()))
    return path


def writable_folder(path: Path) -> Path:
    """Return the path of a folder that can be written to, and may still be missing; raise InputError if it cannot be written to."""
    existing = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not existing.is_dir():
        raise InputError(f"output {str(path)!r} cannot be a folder: {existing} is a file")
    check_writable(path, existing)
    return path


def check_writable(path: Path, folder: Path) -> None:
    """Raise InputError, which names the path, if nothing can be written to the folder."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise InputError(f"output {str(path)!r} cannot be written: {folder}: {error.strerror}") from None
