"""A device that is not there, to test with where there is no GPU: the CPU behind tensors that say they are elsewhere.

Inside `Elsewhere()` the device `DEVICE` computes what the CPU does, refuses operators that mix its tensors with the
CPU's, as a GPU would, and counts how often the host waits to read a result (`waits`) or to write (`uploads`).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")  # a name that every torch knows; what torch itself does on it is not used
READS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal"}  # operators whose outcome the host needs
MOVES = {"_to_copy", "to"}
TAKES_BOTH = {"copy_", "index", "index_put_", "_has_compatible_shallow_copy_type"}


class There(Tensor):
    """A tensor of that device; `here` is what it holds."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> There:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=DEVICE,
        )
        made.here = here
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} outside of Elsewhere")


def here(x: Any) -> Any:
    """What stands for x on the CPU."""
    if isinstance(x, torch.device):
        return torch.device("cpu")
    return x.here if isinstance(x, There) else x


class _Functions(TorchFunctionMode):
    """The two functions that torch does not take apart into operators first."""

    def __init__(self, owner: Elsewhere) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.tensor and torch.device(kwargs.get("device") or "cpu") == DEVICE:
            return There(torch.tensor(*args, **{**kwargs, "device": "cpu"}))
        if function is Tensor.tolist and isinstance(args[0], There):
            self.owner.waits += 1
            return args[0].here.tolist()
        return function(*args, **kwargs)


class _Operators(TorchDispatchMode):
    def __init__(self, owner: Elsewhere) -> None:
        super().__init__()
        self.owner = owner

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name, inputs = function._schema.name.split("::")[-1], tree_flatten((args, kwargs))[0]
        asked = next((x for x in inputs if isinstance(x, torch.device)), None)
        there = any(isinstance(x, There) for x in inputs)
        mixed = [x for x in inputs if isinstance(x, Tensor) and not isinstance(x, There) and x.ndim]
        if there and mixed and name not in TAKES_BOTH:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")
        if there and any(isinstance(x, torch.Generator) for x in inputs):
            raise RuntimeError(f"{name}: expected a generator of the tensor's device, found one of the CPU")
        self.owner.waits += there and (name in READS or (name in MOVES and asked is not None and asked != DEVICE))
        if asked is not None:
            self.owner.uploads += name in MOVES and asked == DEVICE and not there and not kwargs.get("non_blocking")
            there = asked == DEVICE
        out = function(*tree_map(here, args), **tree_map(here, kwargs))
        if there and function._schema.is_mutable:
            return args[0]
        return tree_map(lambda x: There(x) if isinstance(x, Tensor) else x, out) if there else out


class Elsewhere(ExitStack):
    """`with Elsewhere() as device:` and then `model.to(DEVICE)`. `device` counts what the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = self.uploads = 0

    def __enter__(self) -> Elsewhere:
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        self.callback(torch.__future__.set_overwrite_module_params_on_conversion, before)
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # else parameters keep their class
        for mode in (torch.inference_mode(), _Functions(self), _Operators(self)):
            self.enter_context(mode)
        return self
