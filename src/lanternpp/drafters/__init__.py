"""Drafters, named by the `kind` in their config: classes of `Drafter`, which recognise checkpoints (`claims`) and `read` them."""

from __future__ import annotations

DRAFTERS = {
    "eagle": "lanternpp.drafters.eagle:EagleDrafter",
    "eagle-diffusion": "lanternpp.drafters.eagle:DiffusionDrafter",
    "parallel": "lanternpp.drafters.parallel:ParallelDrafter",
    "eagle-published": "lanternpp.drafters.eagle:PublishedDrafter",
}
