"""Codebook neighbours: the k nearest codes of every code in latent space (the papers' proximity set)."""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.nn.checkpoints import checksum
from lanternpp.util.files import replacing, user_cache
from lanternpp.util.progress import progress_bar

ROWS = 64  # codes whose distances are computed at once: they stay in the L2 cache
LARGE = 1 << 15  # codes from which on there is a progress bar
PAIRWISE = "donot_use_mm_for_euclid_dist"  # of torch.cdist: without the rounding of products


def neighbours(codebook: Tensor, k: int, folder: Path | None = None) -> Tensor:
    """codebook [V, C] -> [V, k] int32, nearest first by l2, the code itself excluded.

    Kept in `folder` under the codebook's checksum, and read from there the next time; where that folder cannot
    be written a warning says so. Raises InputError unless 1 <= k <= V - 1.
    """
    vocab = len(codebook)
    if not 1 <= k < vocab:
        raise InputError(f"{k} neighbours of a codebook of {vocab} codes; use 1 to {vocab - 1}")
    path = folder / f"neighbours-{checksum(codebook)}-{k}.safetensors" if folder else None
    if path and (kept := _kept(path, (vocab, k))) is not None:
        return kept
    book = codebook.detach().float()
    table = torch.empty(vocab, k, dtype=torch.int32, device=book.device)
    with progress_bar("codebook neighbours") if vocab >= LARGE else nullcontext() as progress:
        for own in torch.arange(vocab, device=book.device).split(ROWS):
            distance = torch.cdist(book[own], book, compute_mode=PAIRWISE)
            distance.scatter_(1, own[:, None], float("inf"))
            table[own] = distance.topk(k, 1, largest=False).indices.int()
            if progress:
                progress(int(own[-1]) + 1, vocab)
    if path:
        try:
            with replacing(path) as temporary:
                save_file({"neighbours": table.cpu()}, temporary)
        except InputError as error:
            warnings.warn(
                f"the table of codebook neighbours is not kept for the next run: {error}", stacklevel=2
            )
    return table


def _kept(path: Path, shape: tuple[int, int]) -> Tensor | None:
    """The table of an earlier run; None where there is none, or its file is damaged."""
    if not os.access(path, os.R_OK):
        return None
    try:
        table = load_file(path)["neighbours"]
    except (SafetensorError, OSError, KeyError):
        return None
    fits = table.shape == shape and table.dtype == torch.int32
    return table if fits and 0 <= int(table.min()) and int(table.max()) < shape[0] else None


def cache_folder(beside: Path) -> Path:
    """The folder for derived tables: the model's, or the user's cache where that is read-only or part of this package."""
    shipped = Path(__file__).parents[2]
    if os.access(beside, os.W_OK) and shipped not in beside.resolve().parents:
        return beside
    return user_cache()
