"""A CUDA device without a GPU: tensors with shapes and without values, on which every operation of a step is checked."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lanternpp

DEVICE = torch.device("cuda:0")
CUDA, META = 1, 14  # of c10::DeviceType
PACKAGE = str(Path(lanternpp.__file__).parent)
# Operations whose result the host must wait for, as their value or their size goes to it.
READS = ("_local_scalar_dense", "nonzero", "masked_select", "multinomial", "unique", "is_nonzero", "equal")
# Operations with indices; the number of places that a mask has goes to the host.
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")
# Operations that make a tensor and compute nothing.
FREE = ("empty", "empty_like", "new_empty", "empty_strided", "lift_fresh", "_unsafe_view", "_reshape_alias")
# Functions that are one kernel on a GPU and have no kernel here.
FUSED = ("scaled_dot_product_attention", "_fused_rms_norm")
T = TypeVar("T")
Answer = Callable[..., Any]


class HostReadError(Exception):
    """The host read a value, or an operation had tensors of the host and of the device."""


class _WithoutValues(FakeTensorMode):
    """Does not keep the values of tensors that are made from numbers, with which it would compute on the host."""

    def may_turn_const(self, t: Tensor) -> bool:
        return False


@contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """New tensors are fake; those of `DEVICE` are as if on a GPU. A tensor with values is an error.

    PyTorch without CUDA has no device guard for it, which indexing needs: that of the meta device, which does nothing, takes
    its place.
    """
    library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.*"))))
    guards = (ctypes.c_void_p * META).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    all_guards = (ctypes.c_void_p * (META + 1)).from_address(ctypes.addressof(guards))
    before = all_guards[CUDA]
    all_guards[CUDA] = before or all_guards[META]
    try:
        free = patch("lanternpp.util.devices.free_memory", return_value=None)
        with free, _WithoutValues(allow_non_fake_inputs=False) as mode:
            yield mode
    finally:
        all_guards[CUDA] = before


def moved(thing: T, mode: FakeTensorMode) -> T:
    """A network, or an object of ours that holds some, after all tensors were replaced by fake ones on `DEVICE`."""

    def there(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return moved(value, mode)
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        fake = mode.from_tensor(value).detach().to(DEVICE)
        return nn.Parameter(fake, requires_grad=False) if isinstance(value, nn.Parameter) else fake

    for part in thing.modules() if isinstance(thing, nn.Module) else (thing,):
        for held in (vars(part), getattr(part, "_parameters", {}), getattr(part, "_buffers", {})):
            held.update({name: there(value) for name, value in held.items()})
    return thing


class Watch(TorchDispatchMode):
    """Raises HostReadError on every operation that would make the host wait for the device, or that has a tensor of the host.

    answers: functions of the package that may read, and what the host reads there, called with the operation's arguments;
    `reads` counts how often they do. launched: the operations that start kernels. strict: whether tensors of the host are errors.
    """

    def __init__(self, answers: Mapping[str, Answer] | None = None, strict: bool = True):
        super().__init__()
        self.answers, self.strict = answers or {}, strict
        self.reads: Counter[str] = Counter()
        self.launched: Counter[str] = Counter()
        self._last: object = None  # where the last read was; `tolist` reads its numbers one after another

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks for a device
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name not in FUSED and func._can_decompose():
            with self:  # in inference mode functions of several operations come here as one
                return func.decompose(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        masks = name in INDEXED and any(x.dtype == torch.bool for x in tree_leaves(args[1]) if x is not None)
        if name.startswith(READS) or masks:
            return self._read(name, args)
        out = func(*args, **kwargs)
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        # Numbers of the host without dimensions are arguments of a kernel; made of others, they are copies.
        copies = made if any(x.device == DEVICE for x in given) else []
        host = [x for x in (*given, *made) if x.dim()] + copies
        if self.strict and any(x.device != DEVICE for x in host):
            raise HostReadError(f"{name} of a tensor that is not on the device")
        if not func.is_view and name not in FREE:
            self.launched[name] += 1
            self._last = None
        return out

    def _read(self, name: str, args: Any) -> Any:
        """The answer of the function of the package that reads."""
        frame = sys._getframe()
        while frame.f_back is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        reader = frame.f_code.co_name
        if reader not in self.answers:
            raise HostReadError(f"{name} in {reader}")
        where = frame, frame.f_lasti
        self.reads[reader] += where != self._last
        self._last = where
        return self.answers[reader](*args)
