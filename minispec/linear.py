"""Linear layers at the speed of memory: on a CPU each weight is copied once into the form that is quickest to read.

A pass over a few tokens reads every weight once and computes little. The usual kernel reads a large row-major weight at
a third of the memory's speed; packed, one row runs several times as fast, and eight take hardly longer, which decides
whether speculation pays on a CPU. Weights that half precision holds as they are, as all of a file of 16 or 8 bits do,
are packed in half precision and multiplied in float32 (FBGEMM, x86 only): half the bytes, the same product. Other large
weights are packed for oneDNN, and other small ones, as those of a draft, lie in memory by columns. Everything else
(training, float64, GPUs, tiny weights, large ones where torch lacks the operators) takes `F.linear` and the weight.

A copy is made anew when its weight has changed. Only what torch itself does not see leaves no trace: numbers written in
place through `.data` or an array that shares them, or into a large weight that was made in inference mode, as those do
not count their changes. Say `model.float()` after it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

LARGE, WIDE = 1 << 18, 256  # elements, and the shorter side, from which packing pays: its call costs some 20 us more
TINY = 1 << 14  # elements below which no copy is made
transformed: Callable[[], Any] = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)
ROWS = 8  # rows to pack for: packed for one, several rows take twice as long; packed for 8, one row is as fast
AVX512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
LEAST = 4 if AVX512 else 1  # rows that fewer are filled up to: with AVX-512 oneDNN is slower with one than with four
HALF = True  # whether half precision is used: one row gains 1.6 and more by it, six or eight 1.1 with AVX-512
FEW = 64  # rows up to which a small weight in half precision is quicker: its operator uses one thread
ROUNDING = 2.0**-25  # of numbers below 2^-14 in half precision; no more than a sum of products in float32 loses


def available() -> bool:
    """Whether this torch has oneDNN and the two operators."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    there = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return there and all(hasattr(torch.ops.mkldnn, name) for name in names)


AVAILABLE = available()
Halves: Any = torch.classes.quantized.LinearPackedParamsBase  # a large weight in half precision


def multiply(x: Tensor, copy: Halves, bias: Tensor | None) -> Tensor:
    """x (R, in) times a large weight's copy in half precision, plus bias (out,)."""
    y: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, copy)
    return y if bias is None else y.add_(bias)


def multiply_few(x: Tensor, copy: Tensor, bias: Tensor) -> Tensor:
    """x (R, in) times a small weight's copy in half precision, plus bias (out,)."""
    return torch.fbgemm_linear_fp16_weight_fp32_activation(x, copy, bias)


if not hasattr(torch, "fbgemm_linear_fp16_weight_fp32_activation"):
    multiply_few = F.linear  # type: ignore[assignment]  # torch means to remove it: no weight is copied for it then


def pack_half(weight: Tensor) -> Any:
    """A copy in half precision: of a large weight an object of torch's, of a small one a tensor (uint8) around one."""
    if large(weight):
        return torch.ops.quantized.linear_prepack_fp16(weight, None)
    return torch.fbgemm_pack_gemm_matrix_fp16(weight)


@functools.cache
def halves() -> tuple[bool, bool]:
    """Whether torch has the operators for small weights, and those for large ones: they are asked."""
    x, found = torch.ones(1, WIDE, dtype=torch.float32), []
    for out in (1, LARGE // WIDE):
        weight = torch.ones(out, WIDE, dtype=torch.float32)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the small one is deprecated: without it, weights lie by columns
                copy = pack_half(weight)
                y = multiply_few(x, copy, weight[:, 0]) if out == 1 else multiply(x, copy, None)
            found.append(bool((y == WIDE + (out == 1)).all()))
        except (AttributeError, RuntimeError):
            found.append(False)
    return found[0], found[1]


def halved(weight: Tensor) -> Any:
    """A copy in half precision; None where that does not hold this weight, or torch would not multiply it so."""
    if not (HALF and halves()[large(weight)] and (weight.half().float() - weight).abs().max() <= ROUNDING):
        return None  # so with NaN, and beyond 65504
    try:
        return pack_half(weight)
    except RuntimeError:  # under another `torch.backends.quantized.engine`
        return None


def copy_of(weight: Tensor) -> Any:
    """A new copy of this weight, or the weight itself: see `Packed.of`."""
    shared = weight.is_shared()  # type: ignore[no-untyped-call]  # with another process, whose changes nobody counts
    if not copied(weight) or shared or (weight.is_inference() and not large(weight)):
        return weight
    data = weight.detach()
    if (half := halved(data)) is not None:
        return half
    return torch.ops.mkldnn._reorder_linear_weight(data, ROWS) if large(weight) else data.t().contiguous().t()


class Packed:
    """The copy of one weight, made when it is first needed and again when the weight has changed."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        # the weight, its version, its numbers (lest their place be given to another's), its copy: a tuple, for threads
        self.kept: tuple[Tensor, int, Tensor, Any] | None = None

    def __deepcopy__(self, memo: Any) -> Packed:
        return Packed()

    def __reduce__(self) -> tuple[type[Packed], tuple[()]]:
        return Packed, ()

    def clear(self) -> None:
        """Forget the copy."""
        self.kept = None

    def of(self, weight: Tensor) -> Any:
        """The copy of `weight` (out, in), made now if there is none or the weight has changed since.

        In half precision (`pack_half`) if that holds it. Else packed for oneDNN (`is_mkldnn`) if it is large, or the
        same matrix column by column in memory. The weight itself where no copy pays, or where it might change unseen.
        """
        version, kept = 0 if weight.is_inference() else weight._version, self.kept
        if kept is None or kept[0] is not weight or kept[1] != version or kept[2].data_ptr() != weight.data_ptr():
            kept = self.kept = (weight, version, weight.detach(), copy_of(weight))
        return kept[3]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
        """x (..., in) times weight (out, in) plus bias; activation "none" or "gelu" (its tanh form)."""
        if not usable(x, weight, bias) or not copied(weight):
            self.clear()  # a fused optimizer changes weights without a trace, but not without a training pass
            return gelu(F.linear(x, weight, bias), activation)
        copy, rows = self.of(weight), x.reshape(-1, x.shape[-1])  # (R, in)
        R = len(rows)
        if not isinstance(copy, Tensor):
            out = gelu(multiply(rows, copy, bias), activation)
        elif copy.is_mkldnn:
            rows = F.pad(rows, (0, 0, 0, LEAST - R)) if R < LEAST else rows
            algorithm = "" if activation == "none" else "tanh"
            out = torch.ops.mkldnn._linear_pointwise(rows, copy, bias, activation, [], algorithm)[:R]
        elif copy.dtype is torch.uint8 and R <= FEW:
            out = gelu(multiply_few(rows, copy, x.new_zeros(len(weight)) if bias is None else bias), activation)
        else:
            return gelu(F.linear(x, weight if copy.dtype is torch.uint8 else copy, bias), activation)
        return out.view(*x.shape[:-1], len(weight))

    def size(self, weight: Tensor) -> int:
        """Bytes that a product with this weight reads."""
        copy = weight if self.kept is None or self.kept[0] is not weight else self.kept[3]
        half = not isinstance(copy, Tensor) or copy.dtype is torch.uint8
        return weight.numel() * (2 if half else weight.element_size())


def gelu(y: Tensor, activation: str) -> Tensor:
    """GELU (tanh) of y, or y for the activation "none"."""
    return y if activation == "none" else F.gelu(y, approximate="tanh")


def copied(weight: Tensor) -> bool:
    """Whether a copy of a weight of this shape pays."""
    return weight.numel() >= TINY and (AVAILABLE or not large(weight))


def large(weight: Tensor) -> bool:
    """Whether packing pays for a weight of this shape."""
    return weight.numel() >= LARGE and min(weight.shape) >= WIDE


def usable(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether a call may take a copy: float32 on a CPU, nothing to differentiate, no autocast, plain tensors."""
    return (
        x.dtype is weight.dtype is torch.float32
        and x.is_cpu
        and weight.is_cpu
        and plain(x)
        and plain(weight)
        and not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)))
        and not in_training(weight)
        and not watched()
    )


def plain(x: Tensor) -> bool:
    """Whether it is a tensor of no subclass whose numbers lie in memory, one after the other or at strides."""
    return type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided


def in_training(weight: Tensor) -> bool:
    """Whether an optimizer is about to change it: a fused one leaves no trace."""
    return weight.requires_grad and weight.is_leaf and weight.grad is not None


def watched() -> bool:
    """Whether autocast, a compiler or a transformation like vmap looks at what is done now."""
    return torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling() or transformed() is not None


class Copying(nn.Module):
    """A module that keeps copies of weights, and forgets them when it gets others."""

    def forget(self) -> None:
        """Drop the copies."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.forget()  # .to(), .double(), .cuda()
        return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.forget()
        super()._load_from_state_dict(*args, **kwargs)


class Linear(Copying, nn.Linear):
    """`nn.Linear` that reads a copy of its weight; `gelu` applies GELU (tanh) in the same call."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.packed = Packed()

    def forget(self) -> None:
        self.packed.clear()

    def forward(self, x: Tensor) -> Tensor:
        return self.packed.linear(x, self.weight, self.bias)

    def gelu(self, x: Tensor) -> Tensor:
        return self.packed.linear(x, self.weight, self.bias, "gelu")
