"""The whole forward pass as one call: what `GPT.forward` does by modules, run by TorchScript on a CPU.

A pass over a few tokens is some 30 operators a layer, each a few microseconds of work and as many of Python, which
the weights that stream by push out of the processor's caches again and again. One compiled call leaves a quarter
of a pass's time out, a third with a small draft. The values are the same to the last bit (where some layers are packed
and others are not, to rounding). Training, float64, GPUs, models with hooks or other modules, and a torch or a Python
without TorchScript take the modules.
"""

from __future__ import annotations

import functools
import operator
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as registry

from minispec.cache import KVCache
from minispec.linear import FEW, LEAST, Halves, Packed, in_training, multiply, multiply_few, plain, watched


def linear(x: Tensor, weight: Tensor, half: Halves | None, bias: Tensor) -> Tensor:
    """x (R, in) times `weight` (out, in), as `Packed` keeps it, plus bias (out,)."""
    if half is not None:
        return multiply(x, half, bias)
    if weight.dtype == torch.uint8:
        return multiply_few(x, weight, bias)
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)


def linear_gelu(x: Tensor, weight: Tensor, half: Halves | None, bias: Tensor) -> Tensor:
    """GELU (tanh) of the same."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "gelu", [], "tanh")  # type: ignore[no-any-return]
    return F.gelu(linear(x, weight, half, bias), approximate="tanh")


def attend(
    qkv: Tensor, store: Tensor, start: int, rows: Tensor | None, slots: Tensor | None, mask: Tensor | None, heads: int
) -> Tensor:
    """Attention without its linear layers: qkv (B, T, 3C) and one layer's cache (2, B, H, S, D) give (BT, C)."""
    B, T, C = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    qkv = qkv.view(B, T, 3, heads, C // heads).permute(2, 0, 3, 1, 4)  # (3, B, H, T, D)
    store = store[:, :B]
    if rows is None or slots is None:
        store.narrow(3, start, T).copy_(qkv[1:])
    else:
        store[:, rows, :, slots] = qkv[1:].permute(1, 3, 0, 2, 4)
    kv = store.narrow(3, 0, start + T)
    y = F.scaled_dot_product_attention(qkv[0], kv[0], kv[1], attn_mask=mask, is_causal=mask is None and T > 1)
    return y.transpose(1, 2).reshape(B * T, C)


def stack(
    tokens: Tensor,
    positions: Tensor | None,
    weights: list[Tensor],
    halves: list[Halves | None],
    kv: Tensor,
    start: int,
    rows: Tensor | None,
    slots: Tensor | None,
    mask: Tensor | None,
    heads: int,
    least: int,
) -> Tensor:
    """Logits (B, T, V) of `tokens` (B, T) at `positions` (B, T), or at start..start + T - 1.

    `weights` and `halves` are those of `keep`. kv (L, 2, B, H, S, D), start, rows and slots are a `KVCache`'s between
    `begin_write` and `end_write`, mask (B or 1, 1, T, S) is what that returned. Linear layers get at least `least`
    rows, as `Packed.linear` sees to in each of them.
    """
    B, T = tokens.shape[0], tokens.shape[1]
    where = weights[1].narrow(0, start, T) if positions is None else F.embedding(positions, weights[1])
    x = (F.embedding(tokens, weights[0]) + where).flatten(0, 1)  # (BT, C): all but attention looks at rows alone
    R, C = x.shape[0], x.shape[1]
    few, more = least > R, x.new_zeros([max(least - R, 0), C])
    x = torch.cat([x, more]) if few else x
    if mask is not None:  # what attention would do with a mask of booleans in each layer
        mask = x.new_zeros(mask.shape).masked_fill_(mask.logical_not(), float("-inf"))
    for layer in range(kv.shape[0]):
        w = weights[2 + 12 * layer : 14 + 12 * layer]  # two norms, four linear layers, a weight and a bias each
        h = halves[4 * layer : 4 * layer + 4]
        qkv = linear(F.layer_norm(x, [C], w[0], w[1]), w[2], h[0], w[3])
        y = attend(qkv[:R].view(B, T, 3 * C), kv[layer], start, rows, slots, mask, heads)
        x = x + linear(torch.cat([y, more]) if few else y, w[4], h[1], w[5])
        x = x + linear(linear_gelu(F.layer_norm(x, [C], w[6], w[7]), w[8], h[2], w[9]), w[10], h[3], w[11])
    x = F.layer_norm(x, [C], weights[-4], weights[-3])
    return linear(x, weights[-2], halves[-1], weights[-1])[:R].view(B, T, -1)


@functools.cache
def compiled() -> Callable[..., Tensor] | None:
    """`stack` as TorchScript; None where there is none (Python 3.14, or a torch or an installation without it)."""
    if sys.version_info >= (3, 14):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch would rather see models compiled by a C++ compiler
            return torch.jit.script(stack)  # type: ignore[no-any-return]
    except Exception:
        return None


class Kept(NamedTuple):
    """The weights as `stack` takes them, and all that must still be so for them to be right."""

    weights: list[Tensor]
    halves: list[Any]  # of each linear layer, in order, the copy that is no tensor, or None
    packed: list[Packed]
    copies: list[Any]  # what each of them keeps
    originals: list[Tensor]  # the weights that they are copies of
    addresses: list[int]
    counting: list[Tensor]  # those of them that count their changes, as none made in inference mode does
    versions: list[int]
    places: list[dict[str, Any]]  # in each of these dictionaries of children and parameters
    names: list[str]  # this name
    values: list[Any]  # is this
    spaces: list[dict[str, Any]]  # the modules' attributes, which are so many: none has got a method of its own
    sizes: list[int]
    hooks: list[dict[int, Any]]  # all empty
    least: int = 1  # rows that fewer are filled up to
    most: int = sys.maxsize  # rows beyond which the modules take other copies

    def fresh(self) -> bool:
        """Whether this is still the model: some 0.1 ms with 8 layers, all of them out of the processor's caches."""
        return (
            not any(self.hooks)
            and list(map(len, self.spaces)) == self.sizes
            and all(map(operator.is_, map(dict.get, self.places, self.names), self.values))
            and all(map(operator.is_, map(KEPT, self.packed), self.copies))
            and list(map(ADDRESS, self.originals)) == self.addresses
            and list(map(VERSION, self.counting)) == self.versions
        )


KEPT, ADDRESS, VERSION = operator.attrgetter("kept"), Tensor.data_ptr, operator.attrgetter("_version")


def keep(model: Any) -> Kept:
    """Look up what a fused pass of this GPT needs."""
    kept = Kept([model.wte.weight, model.wpe.weight], [], [], [], [], [], [], [], [], [], [], [], [], [])

    def copy(weight: Tensor, by: Packed) -> Tensor:
        copy = by.of(weight)
        kept.halves.append(None if isinstance(copy, Tensor) else copy)
        kept.packed.append(by)
        kept.copies.append(by.kept)
        kept.originals.append(weight)
        kept.addresses.append(weight.data_ptr())
        if not weight.is_inference():
            kept.counting.append(weight)
            kept.versions.append(weight._version)
        return copy if isinstance(copy, Tensor) else weight

    for block in model.h:
        attention, mlp = (block.attn.c_attn, block.attn.c_proj), (block.mlp.c_fc, block.mlp.c_proj)
        for norm, layers in ((block.ln_1, attention), (block.ln_2, mlp)):
            kept.weights.extend((norm.weight, norm.bias))
            for layer in layers:
                kept.weights.extend((copy(layer.weight, layer.packed), layer.bias))
    no_bias = torch.zeros(len(model.wte.weight), dtype=torch.float32)
    kept.weights.extend((model.ln_f.weight, model.ln_f.bias, copy(model.wte.weight, model.head), no_bias))

    kept.hooks.extend((registry._global_forward_hooks, registry._global_forward_pre_hooks))
    for module in model.modules():
        for place in (module._modules, module._parameters):
            kept.places.extend([place] * len(place))
            kept.names.extend(place.keys())
            kept.values.extend(place.values())
        kept.spaces.append(vars(module))
        kept.sizes.append(len(vars(module)))
        kept.hooks.extend((module._forward_hooks, module._forward_pre_hooks))
    if any(weight.is_mkldnn for weight in kept.weights):
        kept = kept._replace(least=LEAST)
    return kept._replace(most=FEW) if any(weight.dtype is torch.uint8 for weight in kept.weights) else kept


class Fused:
    """The fused pass of one GPT. Its weights are looked up once; then it is checked that they are still the model's."""

    kinds: ClassVar[Mapping[type[nn.Module], Any]] = {}  # the modules that `stack` stands for, each with its `forward`

    def __init__(self) -> None:
        self._kept: Kept | None = None

    def __deepcopy__(self, memo: Any) -> Fused:
        return Fused()

    def __reduce__(self) -> tuple[type[Fused], tuple[()]]:
        return Fused, ()

    def __call__(
        self, model: Any, tokens: Tensor, positions: Tensor | None, cache: KVCache, mask: Tensor | None
    ) -> Tensor | None:
        """Logits (B, T, V), the cache written, between its `begin_write` and `end_write`; None: ask the modules.

        That is so while training, off the CPU, in another dtype than float32, and where the model or the cache is
        not as this package makes them. An error in here is left to the modules, which name it better.
        """
        run = compiled()
        if run is None or type(cache) is not KVCache or not usable(tokens, model.wte.weight):
            return None
        if (kept := self.look(model)) is None or tokens.numel() > kept.most:
            return None
        place = (cache.kv, max(cache.lengths), cache.rows, cache.slots)
        try:
            return run(tokens, positions, kept.weights, kept.halves, *place, mask, model.config.n_head, kept.least)
        except RuntimeError:
            return None

    def look(self, model: Any) -> Kept | None:
        """The weights; None where the modules would not do what `stack` does."""
        if any(kind.forward is not forward for kind, forward in self.kinds.items()):
            return None
        if self._kept is None or not self._kept.fresh():
            ours = all(type(module) in self.kinds and not patched(module) for module in model.modules())
            ours = ours and all(plain(p) and not in_training(p) for p in model.parameters())
            self._kept = keep(model) if ours else None
            if self._kept is not None and any(self._kept.hooks):
                self._kept = None
        return self._kept


def patched(module: nn.Module) -> bool:
    """Whether an attribute of this module hides a method of its class, or its norm has another epsilon."""
    hidden = any(callable(getattr(type(module), name, None)) for name in vars(module))
    return hidden or (isinstance(module, nn.LayerNorm) and module.eps != 1e-5)


def usable(tokens: Tensor, weight: Tensor) -> bool:
    """Whether a pass may be fused: float32 on a CPU, nothing to differentiate, no autocast, nobody compiling it."""
    return (
        plain(tokens)
        and tokens.is_cpu
        and weight.is_cpu
        and weight.dtype is torch.float32
        and not torch.is_grad_enabled()
        and not watched()
    )
