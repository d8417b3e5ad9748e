"""What products with weights in 8 bits round their inputs to."""

from __future__ import annotations

from ctypes import CDLL
from pathlib import Path

# Kinds of CPU that multiply numbers of 8 bits with a scale for every 64 inputs; others have inputs of 16 bits.
GROUPED = ("avx512-vnni", "avx512-bf16", "avx-vnni", "emulated bfloat16", "armv8.2-dotprod", "armv8.6-i8mm")


def groups_inputs(library: CDLL) -> bool:
    """Whether inputs have 8 bits too, which is coarser than bfloat16."""
    return Path(library._name).stem.startswith(GROUPED)
