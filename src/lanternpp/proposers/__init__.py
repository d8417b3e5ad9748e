"""Proposers, which give the decoding loop its drafts, by the name that `--proposer` takes."""

from __future__ import annotations

from lanternpp.proposers.independent import Independent
from lanternpp.proposers.jacobi import Jacobi
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.proposers.parallel import Parallel
from lanternpp.proposers.tree import TreeProposer

PROPOSERS = {
    "nothing": NoDraft,
    "tree": TreeProposer,
    "parallel": Parallel,
    "independent": Independent,
    "jacobi": Jacobi,
}
