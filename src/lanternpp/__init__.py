"""lanternpp: visual autoregressive models that draw faster, by speculative decoding with relaxed acceptance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lanternpp.errors import InputError

if TYPE_CHECKING:
    from lanternpp.accept import RULES
    from lanternpp.api.accelerate import accelerate, custom_generate, generate, restore
    from lanternpp.api.options import METHODS
    from lanternpp.api.pipeline import Pipeline
    from lanternpp.engine.sampling import Sampling
    from lanternpp.trees import TREES

__version__ = "0.2.0"

__all__ = [
    "METHODS",
    "RULES",
    "TREES",
    "InputError",
    "Pipeline",
    "Sampling",
    "__version__",
    "accelerate",
    "custom_generate",
    "generate",
    "restore",
]

_HOMES = {
    "Pipeline": "lanternpp.api.pipeline",
    "Sampling": "lanternpp.engine.sampling",
    "METHODS": "lanternpp.api.options",
    "RULES": "lanternpp.accept",
    "TREES": "lanternpp.trees",
    "accelerate": "lanternpp.api.accelerate",
    "custom_generate": "lanternpp.api.accelerate",
    "generate": "lanternpp.api.accelerate",
    "restore": "lanternpp.api.accelerate",
}


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that `import lanternpp` alone does not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lanternpp' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
