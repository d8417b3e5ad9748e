"""Target families: one file each, named by the `kind` in a model's config.

A family is a `Target` with `claims(source)`, which recognises its published checkpoints, and
`read(source, dtype, device)`, which makes a target of one.
"""

from __future__ import annotations

FAMILIES = {
    "words": "lanternpp.targets.words:WordsTarget",
    "continuous": "lanternpp.continuous.target:ContinuousTarget",
    "diffusion": "lanternpp.continuous.diffusion:DiffusionTarget",
    "llamagen": "lanternpp.targets.llamagen:LlamaGenTarget",
    "chameleon": "lanternpp.targets.chameleon:ChameleonTarget",
    "janus": "lanternpp.targets.janus:JanusTarget",
    "emu3": "lanternpp.targets.emu3:Emu3Target",
    "glm-image": "lanternpp.targets.glm_image:GlmImageTarget",
}
