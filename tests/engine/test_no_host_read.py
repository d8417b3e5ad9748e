"""On a GPU a step reads nothing back: here on tensors without values ("meta"), and every operation is watched."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from helpers.toys import ToyTarget, eagle, neighbours, smaller
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lanternpp.accept.exact import Exact
from lanternpp.accept.mixture import DraftMixture
from lanternpp.accept.neighbours import Lantern, LanternPlusPlus
from lanternpp.accept.scaled import Cactus, Cool
from lanternpp.engine.decode import Engine
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.observers import AcceptanceByRank
from lanternpp.engine.sampling import Sampling
from lanternpp.engine.verify.choose import VERIFIERS
from lanternpp.proposers.draft_model import DraftModel
from lanternpp.proposers.jacobi import COUPLINGS, INITS, Jacobi
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees.dynamic import DepthTree, DynamicTree
from lanternpp.trees.shapes import chain
from lanternpp.trees.static import StaticTree

DEVICE = "meta"
BUSHY = ((0,), (1,), (0, 0), (0, 1))
READS = ("_local_scalar_dense", "nonzero", "masked_select", "multinomial", "unique", "is_nonzero", "equal")


class HostReadError(Exception):
    """A value was asked for, or a tensor of the host met one of the device."""


class Watch(TorchDispatchMode):
    """Raises on every operation that would make the host wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if name.startswith(READS) or (name == "index" and any(x.dtype == torch.bool for x in tensors[1:])):
            raise HostReadError(name)
        if len({x.device.type for x in tensors if x.dim()}) > 1:
            raise HostReadError(f"{name} of tensors on two devices")
        out = func(*args, **(kwargs or {}))
        if tensors and any(
            x.device.type != tensors[0].device.type for x in tree_leaves(out) if torch.is_tensor(x)
        ):
            raise HostReadError(f"{name} from one device to another")
        return out


PROPOSERS = {
    "none": lambda drafter, other: NoDraft(),
    "chain": lambda drafter, other: TreeProposer(drafter, StaticTree(chain(2))),
    "tree": lambda drafter, other: TreeProposer(drafter, StaticTree(BUSHY)),
    "eagle2": lambda drafter, other: TreeProposer(drafter, DynamicTree(3, 2, 8)),
    "ddd": lambda drafter, other: TreeProposer(drafter, DepthTree(3, 2, 8, 1)),
    "independent": lambda drafter, other: DraftModel(other, StaticTree(BUSHY)),
    "independent eagle2": lambda drafter, other: DraftModel(other, DynamicTree(3, 2, 8)),
    **{
        f"jacobi {coupling} {fresh}": lambda drafter, other, c=coupling, f=fresh: Jacobi(3, c, f)
        for coupling in COUPLINGS
        for fresh in INITS
    },
    "jacobi siblings": lambda drafter, other: Jacobi(3, "maximal", "mixed", 2),
    "jacobi rows": lambda drafter, other: Jacobi(3, "maximal", "mixed", 2, 2),
}
RULES = {
    "exact": lambda table: Exact(),
    "lantern": lambda table: Lantern(table, 0.3),
    "lantern optimal": lambda table: Lantern(table, 0.3, "optimal"),
    "lantern++": lambda table: LanternPlusPlus(table, 3.0),
    "lantern++ optimal": lambda table: LanternPlusPlus(table, 3.0, "optimal"),
    "cool": lambda table: Cool(1.5, 0.3),
    "cool paper": lambda table: Cool(1.5, 0.3, "paper"),
    "cactus": lambda table: Cactus(0.01, 0.3),
    "mixture": lambda table: DraftMixture(0.2, 0.3),
}
SAMPLINGS = {"greedy": Sampling(0), "T=1": Sampling(), "warped": Sampling(0.8, 6, 0.9)}


def engine(device, proposer="tree", rule="exact", sampling="T=1", cfg=3.0, measure_tv=False, verify="token"):
    target = ToyTarget()
    other, drafter, table = smaller(target), eagle(target), neighbours(target.codebook, 5)
    parts = PROPOSERS[proposer](drafter.to(device), other.to(device)), RULES[rule](table.to(device))
    return Engine(
        target.to(device), *parts, SAMPLINGS[sampling], Guidance(cfg), 2, measure_tv, VERIFIERS[verify]
    )


EVERY = [*product(PROPOSERS, ["exact"]), *product(["tree"], list(RULES)[1:]), ("eagle2", "lantern++ optimal")]


@pytest.mark.parametrize(("proposer", "rule"), EVERY)
@pytest.mark.parametrize(("sampling", "cfg"), [("greedy", 3.0), ("T=1", 1.0), ("warped", 3.0)])
def test_a_step_reads_nothing_back(proposer, rule, sampling, cfg):
    made = engine(DEVICE, proposer, rule, sampling, cfg, measure_tv=True)
    made.observers.append(AcceptanceByRank(made.target.length))
    made.step()  # makes the tree's constants
    with Watch():
        made.step()
    assert made.codes.device.type == DEVICE


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("proposer", "verify"),
    [
        ("chain", "block"),
        ("jacobi none uniform", "block"),
        ("jacobi maximal mixed", "block"),
        ("jacobi siblings", "traversal"),
        ("tree", "traversal"),
        ("independent", "traversal"),
    ],
)
def test_a_step_of_another_verifier_reads_nothing_back(proposer, verify, rule):
    made = engine(DEVICE, proposer, rule, "warped", 3.0, True, verify)
    made.step()
    with Watch():
        made.step()


def test_a_host_read_would_have_been_noticed():
    made = engine(DEVICE)
    mask = torch.ones(2, dtype=torch.bool, device=DEVICE)
    for read in (
        made.done,
        lambda: bool(mask.any()),
        lambda: made.count.max().item(),
        lambda: made.codes[mask],
        lambda: made.codes[torch.arange(2)],
        lambda: made.codes + torch.zeros(2, 1),
        lambda: made.codes.to("cpu"),
    ):
        with Watch(), pytest.raises((HostReadError, NotImplementedError)):
            read()
    with Watch(), pytest.raises(HostReadError):
        engine("cpu").step()  # a CPU may leave early, and does


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_everything_a_step_makes_stays_on_its_device_and_in_its_place(proposer):
    made = engine(DEVICE, proposer)
    made.step()
    holders = [made, made.cache, made.proposer, made.noise]
    holders += [made.proposer.cache] if hasattr(made.proposer, "cache") else []
    names = [(h, n) for h in holders for n in dir(h) if torch.is_tensor(getattr(h, n, None))]
    before = [getattr(h, n) for h, n in names]
    made.step()
    assert len(before) > 10
    for (holder, name), tensor in zip(names, before, strict=True):
        assert tensor.device.type == DEVICE, name
        assert getattr(holder, name) is tensor, f"{name} is replaced, which a CUDA graph would not see"
