"""The dials: all settings of a picture except method, prompt and seed, one row each.

The command line, the HTTP API, the page, `Settings` and the files of tunings take names, ranges and texts from here.
Nothing here imports the parts that read a dial, so that help is quick.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lanternpp.errors import InputError

CODES = 1 << 20  # above the codebook size of any model
LONGEST = 86_400  # seconds that a server gives a picture
STRONGEST = 1_000_000  # of a rule; its products with probabilities stay finite in float32


class Group(Enum):
    """What a dial belongs to."""

    ENGINE = "how pictures are computed"
    PARTS = "the parts of a method"
    DRAFT = "the dials of a proposer"
    RULE = "the dials of an acceptance rule"
    MEASURE = "what is measured while drawing"
    SAMPLING = "how codes are sampled"


ENGINE, PARTS, DRAFT, RULE, MEASURE, SAMPLING = Group
EVERY = tuple(Group)


@dataclass(frozen=True)
class Dial:
    """One setting of a picture: a number in [low, high], or in (low, high] with `above`; a switch; or a text."""

    name: str  # in `Settings` and in a request
    kind: type[int] | type[float] | type[bool] | type[str]
    group: Group
    help: str
    more: str = ""  # what the command line and the API's document say besides
    default: Any = None  # None: the method's
    low: float | None = None
    high: float = math.inf
    above: bool = False
    remedy: str = ""  # the range in words; "": as it is
    choices: tuple[str, ...] = ()  # the names that a text may be; a user's own parts may have others
    metavar: str | None = None
    called: str = ""  # on the command line and in messages; "": by its name
    short: str = ""  # in tables and in the methods of `bench`
    label: str = ""  # on the page; "": it is not shown there
    slider: tuple[float, float, float] = (0, 1, 0.01)  # low, high and step on the page
    folded: bool = False  # on the page, whether it stands under More dials

    @property
    def spoken(self) -> str:
        """Its name in messages."""
        return self.called or self.name

    @property
    def option(self) -> str:
        """Its option on the command line."""
        return "--" + self.spoken.replace("_", "-")

    @property
    def about(self) -> str:
        """The full help text, with its possible values."""
        names = f"One of: {', '.join(self.choices)}." if self.choices and not self.more else self.more
        return f"{self.help} {names}".strip()

    def check(self, value: Any, called: str = "") -> None:
        """InputError, which says what the value is called, where it is a number out of range."""
        if self.low is not None and value is not None:
            check_range(called or self.spoken, value, self.low, self.high, self.remedy, self.above)


def check_range(
    called: str, value: float, low: float, high: float = math.inf, remedy: str = "", above: bool = False
) -> None:
    """InputError unless a number is finite and in [low, high], or in (low, high] with `above`; remedy: the range in words."""
    fine = low < value <= high if above else low <= value <= high
    if not (fine and math.isfinite(value)):
        usual = f"{low:g} to {high:.17g}" if high < math.inf else f"{low:g} or more"
        raise InputError(f"{called} {value} is out of range; use {remedy or usual}")


# fmt: off
_ROWS = (
    Dial("batch_size", int, ENGINE, "Pictures drawn at once; default: all of them, at most 8 (compare: one). Above 64: at most as many as there are.",
         default=1, low=1, high=1 << 20),
    Dial("compile", bool, ENGINE, "Compile the steps (torch.compile), which the first picture waits for; on a GPU the default once `warm` has.",
         default=False),
    Dial("fit", bool, ENGINE, "Draft what is fastest on this machine, which is measured once; --no-fit: what the model's defaults say. "
         "A --tree or --window that you give is kept.", default=True),
    Dial("proposer", str, PARTS, "What drafts, in place of the method's proposer.", metavar="NAME",
         choices=("none", "tree", "parallel", "independent", "jacobi")),
    Dial("tree", str, DRAFT, "The tree of a draft, in place of the method's.", metavar="NAME|FILE.json|PATHS",
         label="Tree", folded=True),
    Dial("accept", str, PARTS, "Another acceptance rule than the method's.", metavar="NAME",
         choices=("exact", "lantern", "lantern++", "cool", "cactus", "mixture", "cspd"), label="Rule", folded=True),
    Dial("neighbours", int, RULE, "Codebook neighbours that may lend a code their probability.", metavar="K",
         low=1, high=CODES, remedy="1 or more, below the number of codes", short="k",
         label="Neighbours k", slider=(1, 1000, 1)),
    Dial("delta", float, RULE, "How far a relaxed rule may go.",
         "LANTERN: the most probability neighbours may lend, 0 (exact) to 1. COOL-SD: the weight at the first level; "
         "1 is exact. Cactus: the divergence a code may cost; 0 is exact. Mixture: the drafter's share, 0 (exact) to 1.",
         metavar="D", low=0, high=STRONGEST, label="Delta", slider=(0, 3, 0.01)),
    Dial("lam", float, RULE, "LANTERN++: the factor by which a code's probability may grow; 1 is exact.",
         called="lambda", metavar="L", low=1, high=STRONGEST, remedy=f"1 (exact) to {STRONGEST:,}", label="Lambda", slider=(1, 20, 0.1)),
    Dial("nu", float, RULE, "How fast a rule's relaxation falls with the level of the draft; 0 keeps it.",
         metavar="NU", low=0, high=STRONGEST, remedy=f"0 (the same at every level) to {STRONGEST:,}", label="Nu", slider=(0, 2, 0.01)),
    Dial("residual", str, RULE, "What a relaxed rule draws from after a refusal.", metavar="NAME",
         choices=("paper", "optimal"), label="Residual", folded=True),
    Dial("window", int, DRAFT, "Jacobi: guesses in every pass.", metavar="W", low=1, high=256,
         label="Window", slider=(1, 64, 1)),
    Dial("coupling", str, DRAFT, "Jacobi: how a guess follows its last one.", metavar="NAME",
         choices=("none", "maximal", "gumbel"), label="Coupling", folded=True),
    Dial("init", str, DRAFT, "Jacobi: what a first guess is drawn from.", metavar="NAME",
         choices=("uniform", "last", "above", "mixed"), label="First guesses", folded=True),
    Dial("alternatives", int, DRAFT, "Jacobi: other guesses at the first place of the window.", metavar="N", low=0, high=16,
         label="Alternatives", slider=(0, 16, 1), folded=True),
    Dial("window_rows", int, DRAFT, "Jacobi: rows of the picture with a window each; beyond the first they wait for their turn.",
         metavar="N", low=1, high=16, label="Window rows", slider=(1, 16, 1), folded=True),
    Dial("verify", str, DRAFT, "How a draft is verified.",
         "token: a walk that ends at the first refusal; block: a whole chain at once; traversal: a whole tree at once. "
         "Default: the best that the draft allows.", metavar="NAME", choices=("token", "block", "traversal"),
         label="Verification", folded=True),
    Dial("min_survival", float, DRAFT, "End a chain before a guess that is kept with less than this probability; 0 never ends it early.",
         "For parallel drafters that predict it. The distribution of the pictures stays the same.", metavar="P", low=0, high=1,
         label="Least survival", folded=True),
    Dial("measure_tv", bool, MEASURE, "Measure the total variation that a relaxed rule spends; takes time of its own.",
         default=False),
    Dial("cfg", float, SAMPLING, "Classifier-free guidance, how closely to follow the prompt; 1 is none.",
         default=1.0, low=1, remedy="1 (no guidance) or more", label="Guidance", slider=(1, 15, 0.1)),
    Dial("temperature", float, SAMPLING, "0 takes the most probable code (greedy).",
         default=1.0, low=0, remedy="0 (greedy) or more", label="Temperature", slider=(0, 2, 0.05), folded=True),
    Dial("top_k", int, SAMPLING, "Keep the K most probable codes; 0 keeps all.",
         default=0, low=0, high=CODES, remedy="0 (all codes) or more"),
    Dial("top_p", float, SAMPLING, "Keep the most probable codes up to this mass; 1 keeps all.",
         default=1.0, low=0, high=1, above=True, remedy="above 0, at most 1 (all codes)"),
)
# fmt: on
DIALS = {dial.name: dial for dial in _ROWS}


def dials(*groups: Group) -> tuple[Dial, ...]:
    """The dials of some groups, in the order of the table."""
    return tuple(dial for dial in _ROWS if dial.group in groups)


def names(*groups: Group) -> tuple[str, ...]:
    """The names of the dials of some groups."""
    return tuple(dial.name for dial in dials(*groups))


def spoken(name: str) -> str:
    """A setting in messages."""
    return DIALS[name].spoken if name in DIALS else name


def option(name: str) -> str:
    """A setting as an option of the command line."""
    return DIALS[name].option if name in DIALS else "--" + name.replace("_", "-")
