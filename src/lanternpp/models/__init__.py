"""Target families by the `kind` in a model's config, one file each.

A family is a `Target` with `claims(source)`, which recognises its published checkpoints, and `read(source, dtype, device)`.
"""

from __future__ import annotations

FAMILIES = {
    "words": "lanternpp.models.words:WordsTarget",
    "continuous": "lanternpp.models.latents:ContinuousTarget",
    "diffusion": "lanternpp.models.latents:DiffusionTarget",
    "llamagen": "lanternpp.models.llamagen:LlamaGenTarget",
    "lumina-mgpt-2": "lanternpp.models.transformers.lumina2:Lumina2",
    "lumina-mgpt": "lanternpp.models.transformers.lumina:Lumina",
    "chameleon": "lanternpp.models.transformers.chameleon:Chameleon",
    "janus": "lanternpp.models.transformers.janus:Janus",
    "emu3": "lanternpp.models.transformers.emu3:Emu3",
    "emu3.5": "lanternpp.models.transformers.emu35:Emu35",
    "liquid": "lanternpp.models.transformers.liquid:Liquid",
    "simplear": "lanternpp.models.transformers.simplear:SimpleAR",
    "glm-image": "lanternpp.models.transformers.glm_image:GlmImage",
}
