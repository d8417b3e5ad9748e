"""On a GPU a step reads nothing back: here on tensors without values ("meta"), and every operation is watched."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toys import ToyTarget, eagle, neighbours

from lanternpp.accept.exact import Exact
from lanternpp.accept.lantern import Lantern
from lanternpp.accept.lantern_pp import LanternPlusPlus
from lanternpp.engine.decode import Engine
from lanternpp.engine.guidance import Guidance
from lanternpp.engine.sampling import Sampling
from lanternpp.proposers.nothing import Nothing
from lanternpp.proposers.tree import TreeProposer
from lanternpp.trees.shapes import EAGLE, chain
from lanternpp.trees.static import StaticTree

DEVICE = "meta"
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
    "nothing": lambda drafter: Nothing(),
    "chain": lambda drafter: TreeProposer(drafter, StaticTree(chain(3))),
    "tree": lambda drafter: TreeProposer(drafter, StaticTree(EAGLE)),
}
RULES = {
    "exact": lambda table: Exact(),
    "lantern": lambda table: Lantern(table, 0.3),
    "lantern++": lambda table: LanternPlusPlus(table, 3.0),
}
SAMPLINGS = {"greedy": Sampling(0), "T=1": Sampling(), "warped": Sampling(0.8, 6, 0.9)}


def engine(device, proposer="tree", rule="exact", sampling="T=1", cfg=3.0):
    target = ToyTarget()
    drafter, table = eagle(target), neighbours(target.codebook, 5)
    parts = PROPOSERS[proposer](drafter.to(device)), RULES[rule](table.to(device))
    return Engine(target.to(device), *parts, SAMPLINGS[sampling], Guidance(cfg), 2)


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("cfg", [1.0, 3.0])
def test_a_step_reads_nothing_back(proposer, rule, sampling, cfg):
    made = engine(DEVICE, proposer, rule, sampling, cfg)
    made.step()  # makes the tree's constants
    with Watch():
        made.step()
    assert made.codes.device.type == DEVICE


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


def test_everything_a_step_makes_stays_on_its_device_and_in_its_place():
    made = engine(DEVICE)
    made.step()
    holders = (made, made.cache, made.proposer, made.proposer.cache, made.noise)
    names = [(h, n) for h in holders for n in dir(h) if torch.is_tensor(getattr(h, n, None))]
    before = [getattr(h, n) for h, n in names]
    made.step()
    assert len(before) > 15
    for (holder, name), tensor in zip(names, before, strict=True):
        assert tensor.device.type == DEVICE, name
        assert getattr(holder, name) is tensor, f"{name} is replaced, which a CUDA graph would not see"
