"""The `generate` that transformers takes from a repository: `model.generate(..., custom_generate="OWNER/NAME")`."""

import lanternpp


def generate(model, **arguments):
    """Draw pictures with drafts; `arguments` are those of `model.generate`, `method`, `drafter` and a method's dials."""
    return lanternpp.generate(model, **{"generation_mode": "image", **arguments})
