"""Target families: one file each, named by the `kind` in a model's config.

A family is a `Target` with `read(folder, dtype)`, which makes one of a model folder, on the CPU.
"""

from __future__ import annotations

FAMILIES = {"words": "lanternpp.targets.words:WordsTarget"}
