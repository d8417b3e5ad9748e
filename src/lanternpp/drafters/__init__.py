"""Drafters, named by the `kind` in their config.

Each is a `Drafter` with `read(folder, target, dtype)`, which makes one for a target, on the CPU.
"""

from __future__ import annotations

DRAFTERS = {"eagle": "lanternpp.drafters.eagle:EagleDrafter"}
