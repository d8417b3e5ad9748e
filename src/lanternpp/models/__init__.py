"""Target families by the `kind` in a model's config, one file each.

A family is a `Target` with `claims(source)`, which recognises its published checkpoints, and `read(source, dtype, device)`. Of two
families that claim a checkpoint, the later row reads it.
"""

from __future__ import annotations

FAMILIES = {
    "glm-image": "lanternpp.models.transformers.glm_image:GlmImage",
    "simplear": "lanternpp.models.transformers.simplear:SimpleAR",
    "liquid": "lanternpp.models.transformers.liquid:Liquid",
    "emu3.5": "lanternpp.models.transformers.emu35:Emu35",
    "emu3": "lanternpp.models.transformers.emu3:Emu3",
    "janus": "lanternpp.models.transformers.janus:Janus",
    "chameleon": "lanternpp.models.transformers.chameleon:Chameleon",
    "lumina-mgpt": "lanternpp.models.transformers.lumina:Lumina",
    "lumina-mgpt-2": "lanternpp.models.transformers.lumina2:Lumina2",
    "llamagen": "lanternpp.models.llamagen:LlamaGenTarget",
    "diffusion": "lanternpp.models.latents:DiffusionTarget",
    "continuous": "lanternpp.models.latents:ContinuousTarget",
    "words": "lanternpp.models.words:WordsTarget",
}
