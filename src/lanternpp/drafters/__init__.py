"""Drafters, named by the `kind` in their config.

Each is a `Drafter` with `claims(source)`, which recognises published checkpoints, and
`read(source, target, dtype)`, which makes one for a target, on the CPU.
"""

from __future__ import annotations

DRAFTERS = {
    "eagle": "lanternpp.drafters.eagle:EagleDrafter",
    "eagle-diffusion": "lanternpp.drafters.eagle:DiffusionDrafter",
    "parallel": "lanternpp.drafters.parallel:ParallelDrafter",
    "eagle-published": "lanternpp.drafters.published:PublishedDrafter",
}
