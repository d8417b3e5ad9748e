"""Target families: one file each, named by the `kind` in a model's config.

A family is a `Target` with `claims(source)`, which recognises its published checkpoints, and
`read(source, dtype, device)`, which makes a target of one.
"""

from __future__ import annotations

FAMILIES = {
    "words": "lanternpp.models.words:WordsTarget",
    "continuous": "lanternpp.continuous.target:ContinuousTarget",
    "diffusion": "lanternpp.continuous.diffusion:DiffusionTarget",
    "llamagen": "lanternpp.models.llamagen:LlamaGenTarget",
    "chameleon": "lanternpp.models.chameleon:ChameleonTarget",
    "janus": "lanternpp.models.janus:JanusTarget",
    "emu3": "lanternpp.models.emu3:Emu3Target",
    "glm-image": "lanternpp.models.glm_image:GlmImageTarget",
}
