"""Published settings: a paper's sampling, and the methods of its table. This module does not import torch, so that help is quick."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lanternpp.api.options import AUTO, BASELINE, METHODS, SamplingDials
from lanternpp.errors import InputError
from lanternpp.util.registry import unknown

if TYPE_CHECKING:
    from lanternpp.evaluation.race import Entry


@dataclass(frozen=True)
class Paper:
    """The settings of one paper for one target."""

    source: str
    sampling: SamplingDials
    methods: str  # as `bench --methods` takes them

    def entry(self, entry: Entry) -> Entry:
        """Return an entry with its method's own draft, verified by token, so that no default of a model and no tuning changes the entry."""
        if entry.method in (BASELINE, AUTO):
            return entry
        return replace(entry, overrides=METHODS[entry.method].dials | {"verify": "token"} | entry.overrides)


# Defaults of autoregressive/sample/sample_t2i.py in FoundationVision/LlamaGen (5a50452), for both stages.
LLAMAGEN: SamplingDials = {"cfg": 7.5, "temperature": 1.0, "top_k": 1000, "top_p": 1.0}
# Defaults of entrypoints/generate_images.py in jadohu/LANTERN (3a56e45), and the values of test_lumina_mgpt.py in
# tyshiwo1/Accelerating-T2I-AR-with-SJD (3d0b4e0).
CHAMELEON: SamplingDials = {"cfg": 3.0, "temperature": 1.0, "top_k": 2000, "top_p": 1.0}
# models/ea_model_llamagen.py and ea_model_anole.py in jadohu/LANTERN: beam 10, 5 levels, 59 nodes with the root.
EAGLE2 = "eagle2 tree=eagle2-58"
# k and delta: 1000 and 0.1 are the defaults of generate_images.py; 0.4 is the greatest delta of the paper's figures.
LANTERN = "lantern tree=eagle2-58 k=1000 delta="
# Pairs (k, lambda) of run.sh in jadohu/LANTERN.
PAIRS = "lantern++ k=10 lambda=5, lantern++ k=5 lambda=10, lantern++ k=5 lambda=20"
PLUS = f"eagle tree=lantern-57, lantern++ k=1000 lambda=2, {PAIRS}"
# ea_model_lumina_mgpt.py drafts EAGLE-1's tree for both.
LUMINA = f"eagle, {PAIRS.replace('++', '++ tree=eagle-25')}"
# A pass of 16 codes (max_num_new_tokens in test_lumina_mgpt.py): one is decided, 15 are drafted.
SJD = "jacobi window=15 alternatives=0 window_rows=1"

PAPERS = {
    "eagle2-llamagen": Paper("EAGLE-2 (arXiv 2406.16858) as LANTERN's baseline", LLAMAGEN, EAGLE2),
    "lantern-llamagen": Paper(
        "LANTERN (arXiv 2410.03355, table 2)", LLAMAGEN, f"{EAGLE2}, {LANTERN}0.1, {LANTERN}0.4"
    ),
    "lantern-anole": Paper("LANTERN (arXiv 2410.03355)", CHAMELEON, f"{EAGLE2}, {LANTERN}0.1"),
    "lantern++-llamagen": Paper("LANTERN++ (arXiv 2502.06352)", LLAMAGEN, PLUS),
    "lantern++-anole": Paper("LANTERN++ (arXiv 2502.06352)", CHAMELEON, PLUS),
    "lantern++-lumina": Paper("LANTERN++ (arXiv 2502.06352)", CHAMELEON, LUMINA),
    "sjd-lumina": Paper("Speculative Jacobi decoding (arXiv 2410.01699)", CHAMELEON, SJD),
}


def find_paper(name: str) -> Paper:
    """Return the paper of this name; raise InputError, which lists the names, if there is none."""
    if name not in PAPERS:
        raise InputError(unknown("paper", name, PAPERS))
    return PAPERS[name]
