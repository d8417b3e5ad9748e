"""Codebook neighbours: the k nearest codes of every code in latent space (the papers' proximity set)."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
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

ROWS, COLUMNS = 64, 4096  # codes whose distances are computed at once: they stay in the L2 cache
SPARE = 8  # groups looked into beyond those that hold the neighbours if nothing is rounded
ROOM = 1 << 24  # numbers of candidates at once
LARGE = 1 << 15  # codes from which on there are groups and a progress bar
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
    nearest = _nearest(book, k)
    with progress_bar("codebook neighbours") if vocab >= LARGE else nullcontext() as progress:
        for own in torch.arange(vocab, device=book.device).split(ROWS):
            table[own] = nearest(own).int()
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


def _nearest(book: Tensor, k: int) -> Callable[[Tensor], Tensor]:
    """What gives the k nearest codes of some codes, [n] -> [n, k].

    The k nearest lie in the k groups of codes with the smallest minima. The groups are found by products of matrices, whose
    rounding has a bound, and the distances within them are computed as they are. Where the bound does not decide, and where
    there are few codes, all distances are.
    """
    vocab, dim = book.shape
    size = 1 << max(0, int(math.log2(vocab / k) / 2))  # of a group
    count = vocab // size
    # lower precisions multiply in bfloat16 or TF32
    if vocab < LARGE or size < 4 or torch.get_float32_matmul_precision() != "highest":
        return lambda own: _of_all(book, k, own)
    grouped = count * size
    rest = torch.arange(grouped, vocab, device=book.device)  # codes that fill no group
    members = torch.arange(grouped, device=book.device).view(count, size)
    norm = book.square().sum(1)
    most = norm.max()

    def nearest(own: Tensor) -> Tensor:
        least = book.new_empty(count, len(own))
        other = (-2 * book[own]).t().contiguous()
        for start in range(0, grouped, step := max(size, COLUMNS)):
            end = min(start + step, grouped)
            product = torch.addmm(norm[start:end, None], book[start:end], other)
            torch.amin(product.view(-1, size, len(own)), 1, out=least[start // size : end // size])
        # one more than k, since a code is in a group of its own
        found = least.t().contiguous().topk(k + 1 + SPARE, 1, largest=False)
        candidates = torch.cat((members[found.indices].flatten(1), rest.expand(len(own), -1)), 1)
        at_once = max(1, ROOM // (candidates.shape[1] * dim))
        parts = zip(own.split(at_once), candidates.split(at_once), strict=True)
        index = torch.cat([_among(book, k, *part) for part in parts])
        farthest = (book[own] - book[index[:, -1]]).square().sum(1)
        error = 2.0**-22 * (dim + 4) * (most + norm[own]) * 2
        undecided = farthest + error >= found.values[:, -1] + norm[own]
        if bool(undecided.any()):
            index[undecided] = _of_all(book, k, own[undecided])
        return index

    return nearest


def _of_all(book: Tensor, k: int, own: Tensor) -> Tensor:
    """The k nearest of all codes, as `_nearest`."""
    distance = torch.cdist(book[own], book, compute_mode=PAIRWISE)
    distance.scatter_(1, own[:, None], float("inf"))
    return distance.topk(k, 1, largest=False).indices


def _among(book: Tensor, k: int, own: Tensor, candidates: Tensor) -> Tensor:
    """The k nearest of candidates [n, M], as `_nearest`."""
    distance = torch.cdist(book[own, None], book[candidates], compute_mode=PAIRWISE)[:, 0]
    distance.masked_fill_(candidates == own[:, None], float("inf"))
    return candidates.gather(1, distance.topk(k, 1, largest=False).indices)


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
