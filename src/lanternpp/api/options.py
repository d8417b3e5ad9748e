"""Every option of a picture, declared once, and the named methods.

A dial is one key of a TypedDict below: its type, limits, default, help, and how the page shows it. The command line, the HTTP schema,
the page, the typed keywords of `Pipeline`, `tuned.json` and the parts of a method read it from here.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from functools import partial
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    TypeAlias,
    TypedDict,
    TypeVar,
    get_args,
)

from lanternpp.errors import InputError
from lanternpp.util.options import Option, option_of
from lanternpp.util.registry import unknown

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from lanternpp.accept.base import Acceptance
    from lanternpp.api.results import Partial
    from lanternpp.engine.proposer import Proposer
    from lanternpp.trees.base import TreeBuilder

F = TypeVar("F", bound=Callable[..., Any])
Prompts: TypeAlias = str | Sequence[str]
Seeds: TypeAlias = int | Iterable[int] | None
Pictures: TypeAlias = "Image.Image | str | Path | Sequence[Image.Image | str | Path] | None"

MAX_CODES = 1 << 20  # above the codebook size of any model
MAX_SECONDS = 86_400  # seconds that a server gives a picture
MAX_STRENGTH = 1_000_000  # of a rule; its products with probabilities stay finite in float32


def check_prompt(prompt: str) -> None:
    """Raise InputError where a prompt is blank, or of bytes that are no UTF-8."""
    if not prompt.strip():
        raise InputError(f'prompt {prompt!r} is empty; say what to draw, such as "a photo of a red tulip"')
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise InputError(f"prompt {prompt!r} is no text in UTF-8") from None


@dataclass(frozen=True)
class Dial(Option):
    """An option of a picture. `name` and `kind` are the key and type in a TypedDict, `group` is the TypedDict's heading."""

    default: Any = None  # None: the method's
    short: str = ""  # in tables and in the methods of `bench`
    label: str = ""  # on the page; "": the page does not show the dial
    slider: tuple[float, float, float] = (0, 1, 0.01)  # low, high and step on the page
    folded: bool = False  # whether the page shows the dial under More dials
    name: str = ""
    kind: type = str

    @property
    def option(self) -> str:
        """The dial's option on the command line."""
        return self.names[0] if self.names else "--" + self.name.replace("_", "-")

    @property
    def spoken(self) -> str:
        """The dial's name in messages."""
        return self.option[2:].replace("-", "_")

    @property
    def full_name(self) -> str:
        """The dial's name in Python and over HTTP, and its option where the option has another name."""
        return f"{self.name} ({self.option})" if self.names else self.name


# fmt: off
class EngineDials(TypedDict, total=False):
    """How pictures are computed."""

    batch_size: Annotated[int | None, Dial("Pictures drawn at once; default: all of them, at most 8 (compare, bench, tune: one; "
        "serve has --slots instead). Above 64: at most as many as there are.", ge=1, le=1 << 20, default=1)]
    compile: Annotated[bool | None, Dial("Compile the steps (torch.compile), which the first picture waits for; on a GPU the default once "
        "`models warm` has.", default=False)]
    fit: Annotated[bool | None, Dial("Draft what is fastest on this machine, which is measured once; --no-fit: what the model's defaults "
        "say. A --tree or --window that you give is kept.", default=True)]


class PartDials(TypedDict, total=False):
    """The parts of a method."""

    proposer: Annotated["str | type[Proposer] | None", Dial("What drafts, in place of the method's proposer.",
        choices=("none", "tree", "parallel", "independent", "jacobi"))]
    accept: Annotated["str | Acceptance | type[Acceptance] | None", Dial("Another acceptance rule than the method's.",
        choices=("exact", "lantern", "lantern++", "cool", "cactus", "mixture", "cspd"), label="Rule", folded=True)]


class DraftDials(TypedDict, total=False):
    """The dials of a proposer."""

    tree: Annotated["str | Path | Sequence[Sequence[int]] | TreeBuilder | type[TreeBuilder] | None", Dial(
        "The tree of a draft, in place of the method's.", metavar="NAME|FILE.json|PATHS", label="Tree", folded=True)]
    window: Annotated[int | None, Dial("Jacobi: draft codes in every pass.", ge=1, le=256, label="Window", slider=(1, 64, 1))]
    coupling: Annotated[str | None, Dial("Jacobi: how a draft code follows the last one at its place.",
        choices=("none", "maximal", "gumbel"), label="Coupling", folded=True)]
    init: Annotated[str | None, Dial("Jacobi: what the first draft code at a place is drawn from.",
        choices=("uniform", "last", "above", "mixed"), label="First draft", folded=True)]
    alternatives: Annotated[int | None, Dial("Jacobi: other draft codes at the first place of the window.", ge=0, le=16,
        label="Alternatives", slider=(0, 16, 1), folded=True)]
    window_rows: Annotated[int | None, Dial("Jacobi: rows of the picture with a window each; beyond the first they wait for their turn.",
        ge=1, le=16, label="Window rows", slider=(1, 16, 1), folded=True)]
    verify: Annotated[str | None, Dial("How a draft is verified.", choices=("token", "block", "traversal"),
        more="token: a walk that ends at the first rejection; block: a chain as one block; traversal: a tree as one block. Default: the "
        "best that the draft allows.", label="Verification", folded=True)]
    min_survival: Annotated[float | None, Dial("End a chain before a draft code that is accepted with less than this probability; 0 never ends it "
        "early.", ge=0, le=1, more="For parallel drafters that predict it. The distribution of the pictures stays the same.",
        label="Least survival", folded=True)]


class RuleDials(TypedDict, total=False):
    """The dials of an acceptance rule."""

    neighbours: Annotated[int | None, Dial("Codebook neighbours whose probability a code may get.", ge=1, le=MAX_CODES,
        remedy="1 or more, below the number of codes", metavar="K", short="k", label="Neighbours k", slider=(1, 1000, 1))]
    delta: Annotated[float | None, Dial("How far a relaxed rule may go.", ge=0, le=MAX_STRENGTH,
        more="LANTERN: the most probability a code may get from neighbours, 0 (exact) to 1. COOL-SD: the weight at the first level; "
        "1 is exact. Cactus: the divergence a code may cost; 0 is exact. Mixture: the drafter's share, 0 (exact) to 1.",
        label="Delta", slider=(0, 3, 0.01))]
    lam: Annotated[float | None, Dial("LANTERN++: the factor by which a code's probability p may grow; 1 is exact.", ge=1, le=MAX_STRENGTH,
        more="Its k nearest codes give it at most (lambda - 1) p, which is the rule's linear_budget: a rule that derives from LANTERN++ "
        "may have another.", remedy=f"1 (exact) to {MAX_STRENGTH:,}", names=("--lambda",), label="Lambda", slider=(1, 20, 0.1))]
    nu: Annotated[float | None, Dial("How fast a rule's relaxation falls with the level of the draft; 0 keeps it.", ge=0, le=MAX_STRENGTH,
        remedy=f"0 (the same at every level) to {MAX_STRENGTH:,}", label="Nu", slider=(0, 2, 0.01))]
    residual: Annotated[str | None, Dial("What a relaxed rule draws from after a rejection.", choices=("paper", "optimal"),
        label="Residual", folded=True)]


class MeasureDials(TypedDict, total=False):
    """Measurements while drawing."""

    measure_tv: Annotated[bool | None, Dial("Measure the total variation that a relaxed rule costs, summed over the codes of a picture; "
        "takes time of its own.", default=False)]


class SamplingDials(TypedDict, total=False):
    """How codes are sampled."""

    cfg: Annotated[float | None, Dial("Classifier-free guidance, how closely to follow the prompt; 1 is none.", ge=1,
        remedy="1 (no guidance) or more", default=1.0, label="Guidance", slider=(1, 15, 0.1))]
    temperature: Annotated[float | None, Dial("0 takes the most probable code (greedy).", ge=0, remedy="0 (greedy) or more", default=1.0,
        label="Temperature", slider=(0, 2, 0.05), folded=True)]
    top_k: Annotated[int | None, Dial("Keep the K most probable codes; 0 keeps all.", ge=0, le=MAX_CODES,
        remedy="0 (all codes) or more", metavar="K", default=0)]
    top_p: Annotated[float | None, Dial("Keep the most probable codes up to this mass; 1 keeps all.", gt=0, le=1,
        remedy="above 0, at most 1 (all codes)", default=1.0)]
# fmt: on


class MethodDials(PartDials, DraftDials, RuleDials, total=False):
    """The parts and dials of a method; a dial that is left out or None is the method's."""


class PictureDials(EngineDials, MethodDials, MeasureDials, SamplingDials, total=False):
    """Every dial of a picture; one that is left out or None is the method's or the model's default."""


class StreamOptions(PictureDials, total=False):
    """The arguments of `Pipeline.stream` besides the prompt and n."""

    seed: Seeds
    method: str | None
    generator: "torch.Generator | None"
    image: "Pictures"


class CallOptions(StreamOptions, total=False):
    """The arguments of `Pipeline.__call__` besides the prompt, n and output_type."""

    progress: Callable[[int, int], None] | None
    callback: "Callable[[Partial], None] | None"


def _dial(name: str, hint: Any) -> Dial:
    """Return a key of a TypedDict as a dial with its name, kind and heading."""
    dial = option_of(hint)
    assert isinstance(dial, Dial)
    kind = (*get_args(get_args(hint)[0]), str)[0]  # of "int | None" int; types in quotes are text
    metavar = dial.metavar or ("NAME" if kind is str else None)
    groups = ((EngineDials, "Model"), (SamplingDials, "Sampling"), (PictureDials, "Method"))
    heading = next(heading for group, heading in groups if name in group.__annotations__)
    return replace(dial, name=name, kind=kind, metavar=metavar, group=heading, negative=kind is bool)


DIALS = {name: _dial(name, hint) for name, hint in PictureDials.__annotations__.items()}

# Dials of earlier versions, which are rejected with their new names.
RENAMED = {
    "fresh": "init",
    "siblings": "alternatives",
    "rows": "window_rows",
    "cut": "min_survival",
    "measure": "measure_tv",
}


def names(*groups: type) -> tuple[str, ...]:
    """Return the names of the dials of TypedDicts, in the order of their declaration."""
    return tuple(name for name in DIALS if any(name in group.__annotations__ for group in groups))


class Settings:
    """All settings of a picture except prompt and seed: `method`, and every dial. A dial that no part of the method reads is None.

    A frozen dataclass. `fit`: whether the draft is to be fitted to this machine, or has been.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init__(self, method: str, **dials: Any): ...

    def __getattr__(self, name: str) -> Any: ...


if not TYPE_CHECKING:
    fields = [("method", str), *((name, dial.kind | None, None) for name, dial in DIALS.items())]
    namespace = {"__module__": __name__, "__doc__": Settings.__doc__, "__deepcopy__": lambda self, _: self}
    Settings = make_dataclass("Settings", fields, frozen=True, namespace=namespace)


def listing(kind: type) -> Callable[[F], F]:
    """Return a decorator that adds the keys of a TypedDict to a function's signature, before its `**`.

    Completion in a notebook reads the signature, and transformers tells a function's arguments from the model's by it.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        *parameters, var_keyword = signature.parameters.values()
        keyword_only = inspect.Parameter.KEYWORD_ONLY
        for name, hint in kind.__annotations__.items():
            type_hint = get_args(hint)[0] if option_of(hint) else hint
            annotation = getattr(type_hint, "__forward_arg__", type_hint)
            parameters.append(inspect.Parameter(name, keyword_only, default=None, annotation=annotation))
        parameters.append(var_keyword)
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return decorate


@dataclass(frozen=True)
class Method:
    """A way of decoding. `dials` has the parts `proposer` and `accept`, and their dials; a missing dial has the part's default."""

    about: str
    dials: MethodDials


BASELINE = "ar"  # plain autoregressive decoding, the method without a draft
AUTO = "auto"  # the method that suits the model: see `Defaults.chosen`
EAGLE: MethodDials = {"proposer": "tree", "accept": "exact"}
LANTERN: MethodDials = {**EAGLE, "accept": "lantern", "neighbours": 1000, "delta": 0.2}
JACOBI: MethodDials = {"proposer": "jacobi", "accept": "exact", "window": 16}
COUPLED: MethodDials = {**JACOBI, "coupling": "maximal", "init": "mixed", "alternatives": 3}
RELAXED: MethodDials = {"accept": "lantern++", "neighbours": 1000, "lam": 2.0}
METHODS = {
    "ar": Method("plain autoregressive decoding, one code per pass", {"proposer": "none", "accept": "exact"}),
    "eagle": Method("EAGLE-1 on a static tree (arXiv 2401.15077)", {**EAGLE, "tree": "eagle-25"}),
    "eagle2": Method(
        "EAGLE-2: a tree that follows the drafter (arXiv 2406.16858)", {**EAGLE, "tree": "eagle2"}
    ),
    "ddd": Method("EAGLE-2 of a depth decided on the way (arXiv 2409.00142)", {**EAGLE, "tree": "ddd"}),
    "parallel": Method(
        "a drafter that predicts all levels of a draft in one pass",
        {"proposer": "parallel", "accept": "exact", "tree": "chain-6"},
    ),
    "independent": Method(
        "speculative sampling: a smaller target drafts (arXiv 2211.17192, 2302.01318)",
        {"proposer": "independent", "accept": "exact", "tree": "chain-4"},
    ),
    "lantern": Method(
        "LANTERN: additive relaxation on a dynamic tree (arXiv 2410.03355)", {**LANTERN, "tree": "eagle2-58"}
    ),
    "lantern-static": Method(
        "LANTERN's additive relaxation on EAGLE-1's static tree", {**LANTERN, "tree": "eagle-25"}
    ),
    "lantern++": Method(
        "LANTERN++: static tree, multiplicative relaxation (arXiv 2502.06352)",
        {**EAGLE, **RELAXED, "tree": "lantern-57"},
    ),
    "cool": Method(
        "COOL-SD: relaxation that falls with the level, optimal residual (arXiv 2601.09212)",
        {**EAGLE, "accept": "cool", "tree": "eagle-25", "delta": 1.5, "nu": 0.1},
    ),
    "jacobi": Method(
        "speculative Jacobi decoding: no drafter (arXiv 2410.01699)",
        {**JACOBI, "coupling": "none", "init": "uniform"},
    ),
    "jacobi-coupled": Method("Jacobi decoding whose draft codes rarely change (arXiv 2510.24211)", COUPLED),
    "lantern-jacobi": Method(
        "coupled Jacobi decoding under the relaxation of LANTERN++",
        {**COUPLED, **RELAXED, "verify": "traversal"},
    ),
}


def check_method(name: str) -> str:
    """Check that a name is a method's or `AUTO`, and return it; raise InputError with the methods' names."""
    if name in (*METHODS, AUTO):
        return name
    message = unknown("method", name, [*METHODS, AUTO])
    if "=" in name:
        message += "; dials such as lambda=3 stand beside the name in `bench --methods` alone, elsewhere they are options"
    raise InputError(message)


def drawn_with(method: str, auto: str | None, settings: Mapping[str, Any]) -> str:
    """Return a method in words, with the reason for which `auto` chose it, another rule than its own, and a fitted draft."""
    label = with_rule(method, settings)
    if auto is not None:
        label += f" (auto: {auto})"
    if not settings["fit"]:
        return label
    machine = "this CPU" if str(settings["device"]).startswith("cpu") else "this device"
    if (draft := draft_of(settings)) is None:
        return f"{method}, as plain decoding is the fastest on {machine}"
    return f"{label}, {draft}, fitted to {machine}"


def with_rule(method: str, settings: Mapping[str, Any]) -> str:
    """Return a method's name, with a proposer and a rule that are not the method's own."""
    dials, rule, proposer = METHODS[settings["method"]].dials, settings["accept"], settings["proposer"]
    # The defaults of a model may exchange the drafters of trees.
    if proposer != dials["proposer"] and not {proposer, dials["proposer"]} <= {"tree", "parallel"}:
        method += f", proposer {proposer}"
    return method if rule == dials["accept"] else f"{method}, rule {rule}"


def device_text(settings: Mapping[str, Any]) -> str:
    """Return the device and the precision of drawing, such as "cpu (int8 weights, bfloat16)"."""
    return f"{settings['device']} ({settings['dtype'].replace(',', ' weights,')})"


def draft_of(settings: Mapping[str, Any]) -> str | None:
    """Return the draft of settings in words; None without a draft."""
    if settings.get("window") is not None:
        return f"a window of {settings['window']}"
    tree = settings.get("tree")
    if tree is None:
        return None
    if tree.startswith("["):
        from lanternpp.trees.static import is_chain  # imports torch, which `--help` does not wait for

        shape = json.loads(tree)
        return f"a {'chain' if is_chain(shape) else 'tree'} of {len(shape)}"
    return f"a chain of {tree.removeprefix('chain-')}" if tree.startswith("chain-") else f"the tree {tree}"


ModelOption = partial(Option, group="Model")


@dataclass(frozen=True)
class DrawOptions:
    """A model as `Pipeline.from_pretrained` reads it, a method, and the dials that override its settings.

    drafter: Another drafter than the model's own.
    dtype: auto, float32, bfloat16, float16, float64, int8: the target's weights in 8 bits (auto's choice on a CPU; a GPU
        needs torchao), or int4: in 4 bits, on a CPU.
    size: Pixels, for a model that draws more than one size (most families, docs/models.md).
    method: A proposer, a tree and an acceptance rule by name. auto takes the method of the model's defaults or of `lanternpp
        tune`, else the fastest lossless one for the drafter that it has.
    """

    model: Annotated[str, ModelOption("The target.", metavar="NAME|DIR|HUB_ID")] = "nature-128"
    drafter: Annotated[str | None, ModelOption(metavar="NAME|DIR|HUB_ID")] = None
    device: Annotated[str, ModelOption("auto, cpu, cuda or cuda:N.")] = "auto"
    dtype: Annotated[str, ModelOption()] = "auto"
    size: Annotated[str | None, ModelOption(metavar="WxH")] = None
    method: Annotated[
        str,
        Option(metavar="NAME", group="Method", validate=check_method, more=f"One of: {', '.join(METHODS)}."),
    ] = AUTO
    overrides: Annotated[dict[str, Any], PictureDials] = field(default_factory=dict)

    @property
    def pretrained(self) -> dict[str, Any]:
        """The arguments of `Pipeline.from_pretrained`."""
        return {name: getattr(self, name) for name in ("model", "drafter", "device", "dtype", "size")}
