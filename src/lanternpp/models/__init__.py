"""Target families: one file each, named by the `kind` in a model's config.

A family is a `Target` with `claims(source)`, which recognises its published checkpoints, and
`read(source, dtype, device)`, which makes a target of one.
"""

from __future__ import annotations

FAMILIES = {
    "words": "lanternpp.models.words:WordsTarget",
    "continuous": "lanternpp.models.latents.target:ContinuousTarget",
    "diffusion": "lanternpp.models.latents.target:DiffusionTarget",
    "llamagen": "lanternpp.models.llamagen:LlamaGenTarget",
    "chameleon": "lanternpp.models.transformers.chameleon:Chameleon",
    "janus": "lanternpp.models.transformers.janus:Janus",
    "emu3": "lanternpp.models.transformers.emu3:Emu3",
    "glm-image": "lanternpp.models.transformers.glm_image:GlmImage",
}
