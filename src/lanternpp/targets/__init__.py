"""Target families: one file each, named by the `kind` in a model's config.

A family is a `Target` with `read(folder, dtype, device)`, which makes one of a model folder.
"""

from __future__ import annotations

FAMILIES = {"words": "lanternpp.targets.words:WordsTarget"}
