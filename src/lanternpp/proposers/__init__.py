"""Proposers, which give the decoding loop its drafts, by the name that `--proposer` takes."""

from __future__ import annotations

from lanternpp.proposers.draft_model import DraftModel
from lanternpp.proposers.jacobi import Jacobi
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.proposers.parallel import Parallel
from lanternpp.proposers.tree import TreeProposer

PROPOSERS = {
    "none": NoDraft,
    "tree": TreeProposer,
    "parallel": Parallel,
    "independent": DraftModel,
    "jacobi": Jacobi,
}
