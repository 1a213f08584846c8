"""The packed linear layer: equal to the plain one, used where it should be, never stale."""

from __future__ import annotations

import copy
import pickle
import platform

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from minispec import GPT, GPTConfig, KVCache
from minispec.linear import AVAILABLE, FEW, LARGE, ROUNDING, TINY, Linear, halves


@pytest.fixture(autouse=True, params=["float32", "half"])
def precision(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Weights that need float32, then such as half precision holds, where that is tried on every machine."""
    monkeypatch.setattr("minispec.linear.HALF", True)
    monkeypatch.setattr("test_linear.rounded", lambda w: w.bfloat16().float() if request.param == "half" else w)
    return str(request.param)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    return weight


def layer(out: int = 1024, width: int = 256) -> Linear:
    torch.manual_seed(0)
    linear = Linear(width, out).requires_grad_(False)
    linear.weight.copy_(rounded(linear.weight))
    return linear


def copied(linear: Linear) -> bool:
    return linear.packed.kept is not None


def packed(linear: Linear) -> bool:
    return copied(linear) and (halved(linear) or linear.packed.of(linear.weight).is_mkldnn)


def halved(linear: Linear) -> bool:
    copy = linear.packed.of(linear.weight)
    return not isinstance(copy, torch.Tensor) or copy.dtype is torch.uint8


@pytest.mark.parametrize("shape", [(256,), (1, 256), (2, 1, 256), (2, 40, 256)])
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_smaller_weights_lie_by_columns_or_in_half_precision(
    shape: tuple[int, ...], activation: str, precision: str
) -> None:
    linear, x = layer(100), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    got = linear(x) if activation == "none" else linear.gelu(x)
    want = F.linear(x, linear.weight, linear.bias)
    want = want if activation == "none" else F.gelu(want, approximate="tanh")
    assert halved(linear) == (precision == "half" and halves()[0])
    if not halved(linear):
        copy = linear.packed.of(linear.weight)
        assert (copy.shape, copy.stride()) == ((100, 256), (1, 100))
        assert torch.equal(copy, linear.weight)
    assert got.shape == want.shape
    assert (got - want).abs().max() < 1e-5


def test_without_onednn_large_weights_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minispec.linear.AVAILABLE", False)
    large, small, x = layer(), layer(100), torch.randn(2, 256)
    assert torch.equal(large(x), F.linear(x, large.weight, large.bias))
    small(x)
    assert not copied(large)
    assert copied(small)


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 8, 9, 33, 200])
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_packed_equals_plain(rows: int, activation: str, precision: str) -> None:
    linear, x = layer(), torch.randn(2, rows, 256, generator=torch.Generator().manual_seed(rows))
    got = linear(x) if activation == "none" else linear.gelu(x)
    want = F.linear(x, linear.weight, linear.bias)
    want = want if activation == "none" else F.gelu(want, approximate="tanh")
    assert packed(linear) == AVAILABLE
    assert halved(linear) == (precision == "half" and halves()[1] and AVAILABLE)
    assert (got - want).abs().max() < 1e-5


def test_half_precision_where_a_machine_has_it() -> None:
    """torch for x86 has both operators; elsewhere nothing is asked of them."""
    x86 = platform.machine().lower() in ("x86_64", "amd64") and "fbgemm" in torch.backends.quantized.supported_engines
    assert halves() == (x86, x86)


@pytest.mark.parametrize("out", [1024, 100])
@pytest.mark.parametrize(
    ("value", "held"),
    [
        (2.0**-13 * (1 + 2**-10), True),  # 11 binary digits, as half precision has
        (2.0**-13 * (1 + 2**-11), False),
        (1 / 3, False),
        (65504.0, True),
        (65536.0, False),
        (2.0**-15 * (1 + 2**-9), True),  # below 2^-14 it has fewer
        (2.0**-20 * 1.1, True),  # not to the last digit, but nearer than ROUNDING
        (1e-30, True),
        (float("nan"), False),
        (float("inf"), False),
    ],
)
def test_only_what_half_precision_holds_is_kept_in_it(value: float, held: bool, out: int, precision: str) -> None:
    linear = layer(out)
    linear.weight[3, 5] = value
    got, want = linear(x := torch.ones(2, 256)), F.linear(torch.ones(2, 256), linear.weight, linear.bias)
    assert halved(linear) == (held and precision == "half" and halves()[out == 1024] and AVAILABLE)
    assert linear.weight[3, 5] == value or value != value
    assert torch.allclose(got, want, 1e-5, 1e-5, equal_nan=True)
    assert torch.allclose(linear.gelu(x), F.gelu(want, approximate="tanh"), 1e-5, 1e-5, equal_nan=True)


@pytest.mark.parametrize("out", [1024, 100])
def test_nothing_is_rounded_but_sums_and_the_tiniest_weights(out: int) -> None:
    linear, rows = layer(out), torch.eye(256)[:8]
    linear.bias.zero_()
    assert torch.equal(linear(rows), linear.weight[:, :8].t())
    linear.weight[:, ::2] *= 2.0**-18  # half precision has few digits left for these
    assert 0 < (linear(rows) - linear.weight[:, :8].t()).abs().max() <= ROUNDING < 1e-7 or not halved(linear)
    x = torch.randn(9, 2048, generator=torch.Generator().manual_seed(1))
    linear = layer(out, 2048)  # a long sum
    true = F.linear(x.double(), linear.weight.double(), linear.bias.double())
    assert (linear(x) - true).abs().max() < 1e-5


def test_many_rows_of_a_small_layer_take_the_usual_kernel() -> None:
    linear, x = layer(100), torch.randn(FEW + 1, 256)
    assert torch.allclose(linear(x), F.linear(x, linear.weight, linear.bias), 0, 1e-5)
    if halved(linear):
        assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))


@pytest.mark.parametrize("missing", [0, 1])
def test_without_an_operator_for_halves_the_other_copies_are_made(
    missing: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    have = halves()
    monkeypatch.setattr("minispec.linear.halves", lambda: (have[0] and missing != 0, have[1] and missing != 1))
    small, large, x = layer(100), layer(), torch.randn(3, 256)
    for linear in (small, large):
        assert (linear(x) - F.linear(x, linear.weight, linear.bias)).abs().max() < 1e-5
        there = have[linear is large] and missing != (linear is large) and (AVAILABLE or linear is small)
        assert halved(linear) == (precision == "half" and there)


def test_an_operator_that_is_gone_or_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(weight: torch.Tensor) -> None:
        raise AttributeError

    def fails(weight: torch.Tensor) -> None:
        raise NotImplementedError

    for broken in (gone, fails):
        monkeypatch.setattr("minispec.linear.pack_half", broken)
        assert halves.__wrapped__() == (False, False)


@pytest.mark.parametrize("engine", torch.backends.quantized.supported_engines)
def test_the_engine_for_quantised_models_may_be_any(engine: str) -> None:
    """Some refuse to pack halves."""
    linear, x, before = layer(), torch.randn(3, 256), torch.backends.quantized.engine
    halves()  # which a pass before may have asked, under another engine
    torch.backends.quantized.engine = engine
    try:
        got = linear(x)
    finally:
        torch.backends.quantized.engine = before
    assert packed(linear) == AVAILABLE
    assert (got - F.linear(x, linear.weight, linear.bias)).abs().max() < 1e-5


@pytest.mark.parametrize("shape", [(256,), (1, 256), (1, 1, 256)])
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_a_single_row_is_one_row(shape: tuple[int, ...], activation: str) -> None:
    """It is computed as some, whatever its rank; one comes out."""
    linear, x = layer(), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    got = linear(x) if activation == "none" else linear.gelu(x)
    want = F.linear(x, linear.weight, linear.bias)
    want = want if activation == "none" else F.gelu(want, approximate="tanh")
    assert packed(linear) == AVAILABLE
    assert got.shape == want.shape
    assert (got - want).abs().max() < 1e-5


def test_what_takes_the_plain_path() -> None:
    for change in (
        lambda m: m.double(),
        lambda m: m.bfloat16(),
        lambda m: m.requires_grad_(True),
        lambda m: Linear(64, 64).requires_grad_(False),
    ):
        linear = change(layer())
        x = torch.randn(2, linear.in_features, dtype=linear.weight.dtype)
        assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))
        assert not copied(linear)
    assert 64 * 64 < TINY < LARGE <= 1024 * 256
    linear = layer()
    x = torch.randn(2, 256, requires_grad=True)
    linear(x).sum().backward()
    assert x.grad is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(torch.randn(2, 256)).dtype == torch.bfloat16


def changes():  # type: ignore[no-untyped-def]
    def in_place(m: Linear) -> None:
        with torch.no_grad():
            m.weight.mul_(2)

    def state_dict(m: Linear) -> None:
        m.load_state_dict({name: 3 * value for name, value in m.state_dict().items()})

    def round_trip(m: Linear) -> None:
        m.bfloat16().float()

    def trained(m: Linear) -> None:
        m.requires_grad_(True)
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.1, fused=True)
        m(torch.ones(1, 256)).sum().backward()
        optimizer.step()
        m.requires_grad_(False)

    def replaced(m: Linear) -> None:
        m.weight = torch.nn.Parameter(torch.randn(m.weight.shape), requires_grad=False)

    def other_data(m: Linear) -> None:
        m.weight.data = 2 * m.weight

    def behind_its_back(m: Linear) -> None:
        m.weight.data.mul_(2)
        m.float()

    def other_data_at_the_same_place(m: Linear) -> None:
        for factor in (2, 0.5, 3, 0.5):  # the numbers before the last ones lie free, and the next may get their place
            m.weight.data = factor * m.weight.data

    def sampled_before_the_step(m: Linear) -> None:
        m.requires_grad_(True)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, fused=True)
        m(torch.ones(1, 256)).sum().backward()
        with torch.no_grad():
            m(torch.ones(1, 256))
        optimizer.step()
        optimizer.zero_grad()
        m.requires_grad_(False)

    def another_process(m: Linear) -> None:
        m.share_memory()
        m(torch.ones(1, 256))
        m.weight.data.mul_(2)  # as seen from here: no version of this process's counts it

    def swapped(m: Linear) -> None:
        torch.utils.swap_tensors(m.weight, torch.nn.Parameter(2 * m.weight, requires_grad=False))

    return [value for value in locals().values() if callable(value)]


@pytest.mark.parametrize("out", [1024, 100])
@pytest.mark.parametrize("change", changes(), ids=lambda f: f.__name__)
def test_a_changed_weight_is_copied_again(change, out: int) -> None:  # type: ignore[no-untyped-def]
    linear, x = layer(out), torch.randn(3, 256)
    linear(x)
    assert copied(linear) or not AVAILABLE
    change(linear)
    assert (linear(x) - F.linear(x, linear.weight, linear.bias)).abs().max() < 1e-4


@pytest.mark.parametrize("out", [1024, 100])
def test_a_state_dict_loaded_in_inference_mode(out: int) -> None:
    """Weights made there do not count their changes."""
    with torch.inference_mode():
        linear, x = layer(out), torch.randn(3, 256)
        linear(x)
        linear.load_state_dict({name: 3 * value for name, value in linear.state_dict().items()})
        assert (linear(x) - F.linear(x, linear.weight, linear.bias)).abs().max() < 1e-4
    small = layer(100)
    with torch.inference_mode():
        small.weight = torch.nn.Parameter(small.weight.clone(), requires_grad=False)
        small(x)
        small.weight.mul_(3)
        assert torch.equal(small(x), F.linear(x, small.weight, small.bias))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch.func's own
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize("out", [1024, 100])
def test_transformations_and_tensors_of_other_kinds_see_plain_products(out: int) -> None:
    linear, x, many = layer(out), torch.randn(3, 256), torch.randn(2, out, 256)
    linear(x)
    with torch.no_grad():
        stacked = torch.func.vmap(lambda w: torch.func.functional_call(linear, {"weight": w}, (x,)))(many)
        assert (stacked - torch.stack([F.linear(x, w, linear.bias) for w in many])).abs().max() < 1e-4
        _, tangent = torch.func.jvp(linear, (x,), (x,))
        assert (tangent - F.linear(x, linear.weight)).abs().max() < 1e-5
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert linear(torch.empty(2, 256)).shape == (2, out)
        assert type(linear(x)) is torch.Tensor
    assert linear(torch.empty(0, 256)).shape == (0, out)
    linear.bias.requires_grad_(True)
    linear(x).sum().backward()
    assert torch.equal(linear.bias.grad, torch.full((out,), 3.0))
    linear.weight = torch.nn.Parameter(linear.weight.detach().to_sparse_csr(), requires_grad=False)
    with torch.no_grad():
        assert (linear(x) - F.linear(x, linear.weight.to_dense(), linear.bias)).abs().max() < 1e-4


@pytest.mark.filterwarnings("ignore:You are using `torch.load`:FutureWarning")  # torch 2.4, unpickling its own
def test_copies_pack_for_themselves() -> None:
    linear, x = layer(), torch.randn(3, 256)
    want = linear(x)
    for other in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        assert not packed(other)
        assert (other(x) - want).abs().max() < 1e-6


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        linear, x = layer(), torch.randn(3, 256)
        assert (linear(x) - F.linear(x, linear.weight, linear.bias)).abs().max() < 1e-5


def test_a_whole_model_agrees_with_its_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(1024, 64, 2, 4, 256)).requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(rounded(parameter))
    tokens = torch.randint(1024, (2, 40))
    cache = KVCache(model.config, 2, 64)
    got = torch.cat([model(part, cache) for part in tokens.split([20, 1, 5, 1, 13], 1)], 1)
    assert packed(model.h[0].mlp.c_fc) == AVAILABLE
    monkeypatch.setattr("minispec.linear.usable", lambda *_: False)  # no copy of any kind
    assert (got - model(tokens)).abs().max() < 1e-5
    assert sorted(model.state_dict()) == sorted(n for n, _ in model.named_parameters())


@pytest.mark.parametrize(
    "config", [GPTConfig(300, 64, 1, 4, 64), GPTConfig(1024, 64, 1, 4, 256)], ids=["small", "large"]
)
def test_a_compiler_sees_plain_products(config: GPTConfig) -> None:
    """What torch.compile traces is one graph, whatever was copied before; a copy would be a constant in it."""
    torch.manual_seed(0)
    model, tokens = GPT(config).requires_grad_(False), torch.tensor([[1, 2, 3]])
    want = model(tokens)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert (compiled(tokens) - want).abs().max() < 1e-5
    model.h[0].mlp.c_fc.weight.mul_(3)
    changed = model(tokens)
    assert (changed - want).abs().max() > 1e-3
    assert (compiled(tokens) - changed).abs().max() < 1e-5
