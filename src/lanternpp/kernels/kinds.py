"""The kinds of CPU that the kernels are compiled for: what each needs of a CPU, and the options of a compiler.

`setup.py` runs this file alone to compile them, so it imports nothing of this package. Features of a CPU have the names that
`csrc/cpu.c` gives them, which are those of GCC's macros: `avx512bf16` for `__AVX512BF16__`.
"""

from __future__ import annotations

from collections.abc import Set

V3 = frozenset({"x86_64", "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt"})
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
BF16 = V4 | {"avx512vnni", "avx512bf16"}
ARM = frozenset({"aarch64"})
WIDE = ("-march=x86-64-v4", "-mprefer-vector-width=512")
BF16_WIDE = (*WIDE, "-mavx512vnni", "-mavx512bf16", "-mtune=sapphirerapids")
TILES = frozenset({"amx_tile", "amx_bf16", "amx_int8"})

# The features that a kind needs, and the options of GCC and clang for it. The best comes first.
KINDS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "amx": (BF16 | TILES, (*BF16_WIDE, "-mamx-tile", "-mamx-bf16", "-mamx-int8")),
    "avx512-bf16": (BF16, BF16_WIDE),
    "avx512-vnni": (V4 | {"avx512vnni"}, (*WIDE, "-mavx512vnni", "-mtune=tigerlake")),
    "x86-64-v4": (V4, (*WIDE, "-mtune=tigerlake")),
    "avx-vnni": (V3 | {"avxvnni"}, ("-march=x86-64-v3", "-mavxvnni", "-mtune=alderlake")),
    "x86-64-v3": (V3, ("-march=x86-64-v3", "-mtune=haswell")),
    "armv8.2-dotprod": (ARM | {"dotprod"}, ("-march=armv8.2-a+dotprod",)),
    "armv8-a": (ARM, ("-march=armv8-a",)),
}


def choose(features: Set[str]) -> list[str]:
    """Return the names of the kinds that a CPU with these features can run, best first."""
    return [name for name, (needs, _) in KINDS.items() if needs <= features]
