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
from minispec.trust import TRUST


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
    if rows is None or slots is None:
        store.narrow(3, start, T).copy_(qkv.narrow(0, 1, 2))
    else:
        store[:, rows, :, slots] = qkv[1:].permute(1, 3, 0, 2, 4)
    k, v = store.narrow(3, 0, start + T).unbind(0)
    y = F.scaled_dot_product_attention(qkv.select(0, 0), k, v, mask, 0.0, mask is None and T > 1)
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
    where = weights[1].narrow(0, start, T) if positions is None else torch.embedding(weights[1], positions)
    x = (torch.embedding(weights[0], tokens) + where).flatten(0, 1)  # (BT, C): all but attention looks at rows alone
    R, C = x.shape[0], x.shape[1]
    few = least > R
    if few:
        x = F.pad(x, [0, 0, 0, least - R])
    if mask is not None:  # what attention would do with a mask of booleans in each layer
        mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    kv = kv if kv.shape[2] == B else kv.narrow(2, 0, B)
    w, h = 2, 0  # of each layer two norms and four linear layers, a weight and a bias each
    for store in kv.unbind(0):
        y = torch.layer_norm(x, [C], weights[w], weights[w + 1])
        qkv = linear(y, weights[w + 2], halves[h], weights[w + 3])
        qkv = qkv.narrow(0, 0, R) if few else qkv
        y = attend(qkv.view(B, T, 3 * C), store, start, rows, slots, mask, heads)
        y = F.pad(y, [0, 0, 0, least - R]) if few else y
        x = linear(y, weights[w + 4], halves[h + 1], weights[w + 5]).add_(x)
        y = torch.layer_norm(x, [C], weights[w + 6], weights[w + 7])
        y = linear_gelu(y, weights[w + 8], halves[h + 2], weights[w + 9])
        x = linear(y, weights[w + 10], halves[h + 3], weights[w + 11]).add_(x)
        w, h = w + 12, h + 4
    x = torch.layer_norm(x, [C], weights[w], weights[w + 1])
    x = linear(x, weights[w + 2], halves[h], weights[w + 3])
    return (x.narrow(0, 0, R) if few else x).view(B, T, -1)


def chain(
    tokens: Tensor,
    mask: Tensor | None,
    weights: list[Tensor],
    halves: list[Halves | None],
    kv: Tensor,
    start: int,
    heads: int,
    least: int,
    noise: list[Tensor],
    count: int,
    divisor: float,
) -> tuple[Tensor, Tensor]:
    """`count` passes, each over the token drawn before, the first over `tokens` (B, T), of which the last and those
    drawn (B, K+1) come back, with their laws (B, K, V).

    The law is that of `Sampling.probs`, the draw that of `Randomness.pick` with this noise, K times (B, V); without
    noise it is the likeliest token.
    """
    drawn = [tokens.narrow(1, tokens.shape[1] - 1, 1)]
    laws: list[Tensor] = []
    for i in range(count):
        logits = stack(tokens, None, weights, halves, kv, start, None, None, mask, heads, least)
        law = logits.select(1, tokens.shape[1] - 1)  # (B, V)
        if divisor != 1.0:
            law = (law - law.amax(-1, keepdim=True)) / divisor
        law = torch.softmax(law, -1)
        start, mask = start + tokens.shape[1], None
        tokens = (law / noise[i] if len(noise) > 0 else law).argmax(-1, keepdim=True)  # (B, 1)
        drawn.append(tokens)
        laws.append(law)
    return torch.cat(drawn, 1), torch.stack(laws, 1)


@functools.cache
def script(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """A function as TorchScript; None where there is none (Python 3.14, or a torch or an installation without it)."""
    if sys.version_info >= (3, 14):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch would rather see models compiled by a C++ compiler
            return torch.jit.script(function)  # type: ignore[no-any-return]
    except Exception:
        return None


def compiled() -> Callable[..., Tensor] | None:
    """`stack` as TorchScript, or None."""
    return script(stack)


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
    no_bias = torch.zeros(len(model.wte.weight), dtype=torch.float32, device="cpu")
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
        run, kept = compiled(), self.ready(model, tokens, cache)
        if run is None or kept is None:
            return None
        place = (cache.kv, max(cache.lengths), cache.rows, cache.slots)
        try:
            return run(tokens, positions, kept.weights, kept.halves, *place, mask, model.config.n_head, kept.least)
        except RuntimeError:
            return None

    def chain(
        self,
        model: Any,
        tokens: Tensor,
        cache: KVCache,
        count: int,
        divisor: float,
        noise: Callable[[], Tensor] | None,
    ) -> tuple[Tensor, Tensor] | None:
        """`GPT.chain` of this model, for tokens (B, T); None, and nothing is done, where there is no such call.

        Nor where it fails, but then its noise is spent.
        """
        start, T, kept = max(cache.lengths), tokens.shape[1], self.ready(model, tokens, cache)
        if kept is None or min(cache.lengths) < start or (run := compiled() and script(chain)) is None:
            return None
        place = (kept.weights, kept.halves, cache.kv, start, model.config.n_head, kept.least)
        draws = [] if noise is None else [noise() for _ in range(count)]
        try:
            found: tuple[Tensor, Tensor] = run(tokens, cache.begin_write(T), *place, draws, count, divisor)
        except RuntimeError:
            return None
        cache.end_write(T + count - 1)
        return found

    def ready(self, model: Any, tokens: Tensor, cache: KVCache) -> Kept | None:
        """The weights for a pass over these tokens; None where it is not for a fused one."""
        known = TRUST.known
        if type(cache) is not KVCache:
            return None
        if known is not None and self in known:
            kept = self._kept
        else:
            kept = self.look(model) if usable(tokens, model.wte.weight) else None
            if known is not None and kept is not None:
                known.add(self)
        return None if kept is None or tokens.numel() > kept.most else kept

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
