"""Compiled code for one or two tokens on a CPU: each function against its definition in float64, what is left to torch, and machines on
which numba does not run or cannot keep what it compiled.
"""

import os
import subprocess
import sys
import textwrap
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.functional import linear as torch_linear
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4 import Dsv4, KVCache
from dsv4.kernels import _grouped_experts_cpu, few_tokens
from dsv4.kernels import hyper_connection as hyper
from dsv4.kernels.grouped_experts import Stored, few_tokens_experts, swiglu
from dsv4.kernels.norm_rotary import norm_and_rotate, rms_norm, rotate, rotate_back
from dsv4.kernels.reach import Reach
from dsv4.kernels.sparse_attention import sparse_attention, sparse_attention_reference
from dsv4.testing import assert_close, fault_config, random_ids

device_code = pytest.importorskip("dsv4.kernels._few_tokens_numba", reason="numba runs on this Python")
WIDTHS = [1, 3, 7, 33, 64, 96]
ROUNDING = {torch.float32: "float32 op", torch.bfloat16: "bfloat16 rounding", torch.float16: "bfloat16 rounding"}
DTYPES = list(ROUNDING)
WORST = [float("nan"), float("inf"), -float("inf")]
EPS = 1e-6


class Counted:
    """The compiled module, which counts the calls of each function."""

    def __init__(self):
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str):
        self.calls[name] += 1
        return getattr(device_code, name)


@pytest.fixture
def calls(monkeypatch) -> Counter[str]:
    counted = Counted()
    monkeypatch.setattr(few_tokens, "device_code", lambda: counted)
    return counted.calls


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def doubled(x):
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def loose(x: Tensor) -> Tensor:
    """The same numbers with others between them."""
    return torch.stack((x, torch.full_like(x, 77)), dim=-1)[..., 0]


def compare(function, *given, limit: str = "float32 op", definition=None, **numbers) -> None:
    """`function` against itself over float64, which is left to torch."""
    found, expected = function(*given, **numbers), (definition or function)(*map(doubled, given), **numbers)
    pairs = [(found, expected)] if isinstance(found, Tensor) else zip(found, expected, strict=True)
    for value, exact in pairs:
        assert_close(value, exact, limit if value.dtype == torch.float32 else ROUNDING[value.dtype])


def same_numbers(found: Tensor, expected: Tensor) -> None:
    """NaN and infinities included."""
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-5, atol=1e-6)


def site(n: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    mixes = (2 + n) * n
    return torch.randn(mixes, n * hidden) * (n * hidden) ** -0.5, 1 + 0.2 * torch.randn(3), torch.randn(mixes)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("n", [1, 2, 4, 5])
@pytest.mark.parametrize("hidden", WIDTHS)
def test_streams(calls, shape, n: int, hidden: int):
    dtype = DTYPES[(n + hidden) % 3]
    x, out = torch.randn(*shape, n, hidden).to(dtype), torch.randn(*shape, hidden).to(dtype)
    fn, scale, base = site(n, hidden)
    comb, post = torch.rand(*shape, n, n), torch.rand(*shape, n)
    compare(hyper.read, x, fn, scale, base, iters=5, eps=1e-3, rms_eps=EPS)
    compare(hyper.mix_logits, x, fn, rms_eps=EPS)
    compare(hyper.collapse, x, post)
    compare(hyper.write_back, x, comb, post, out)
    compare(hyper.write_back, loose(x), comb, post, loose(out))
    compare(hyper.read, x[..., :1, :].expand(x.shape), fn, scale, base, iters=1, eps=EPS, rms_eps=1e-3)
    assert calls == {"read": 2, "mix_logits": 1, "collapse": 1, "write": 2}
    # What is held is dense, or torch reads it.
    compare(hyper.write_back, x, loose(comb), loose(post), out)
    compare(hyper.read, x, loose(fn), loose(scale), loose(base), iters=1, eps=EPS, rms_eps=1e-3)
    assert calls["write"] == 2 + (n == 1 and shape == (1, 1))
    assert calls["read"] == 2


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_steps_of_the_mixing(calls, shape, n: int):
    logits, base, one = loose(torch.randn(*shape, n * n)), torch.randn(n * n), torch.tensor(1.3)
    compare(hyper.read_weights, logits, one, base, eps=1e-3)
    compare(hyper.write_weights, logits, one, base)
    compare(hyper.mixing_start, logits, one.view(1), base, eps=1e-3, n=n)
    compare(hyper.sinkhorn_rounds, torch.rand(*shape, n, n).transpose(-1, -2) + 0.1, iters=7, eps=EPS)
    assert calls == {"stream_weights": 2, "mixing_start": 1, "sinkhorn_rounds": 1}


@pytest.mark.parametrize("hidden", WIDTHS)
def test_a_read_norms_what_it_collapsed(hidden: int):
    n, x = 4, torch.randn(2, 1, 4, hidden)
    given, norm = site(n, hidden), torch.randn(hidden)
    *_, collapsed, normed = few_tokens.read(x, *given, norm, 20, EPS, EPS, 1e-5)
    exact = hyper.read(x.double(), *map(doubled, given), iters=20, eps=EPS, rms_eps=EPS)[3]
    assert_close(collapsed, exact, "float32 op")
    assert_close(normed, rms_norm(exact, norm.double(), 1e-5), "row alone")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_norm(calls, width: int, dtype):
    x, weight = loose(torch.randn(1, 1, width)).to(dtype), torch.randn(width)
    compare(rms_norm, x, weight, EPS)
    compare(rms_norm, x, None, 1e-2)
    assert calls == {"norm": 2}


@pytest.mark.parametrize(("width", "half"), [(2, 1), (3, 1), (7, 2), (33, 16), (64, 8), (96, 48)])
@pytest.mark.parametrize("rows", [1, 8])
def test_one_token_is_turned(calls, width: int, half: int, rows: int):
    x, weight, angle = torch.randn(1, rows, 1, width).transpose(1, 2), torch.randn(width), torch.randn(1, 1, 1, half)
    cos, sin = angle.cos(), angle.sin()
    for given in (x, loose(x)):
        compare(rotate, given, cos, sin)
        compare(rotate_back, given, cos, sin)
        compare(norm_and_rotate, given, weight, cos, sin, EPS)
        compare(norm_and_rotate, given, None, cos, sin, EPS)
    assert calls == {"turn": 8}
    compare(rotate, x, loose(cos), loose(sin))
    assert calls == {"turn": 8 + (half == 1)}


@pytest.mark.parametrize("width", [w for w in WIDTHS if w > 1])
@pytest.mark.parametrize("rows", [1, 8])
def test_in_one_call_or_in_two_it_is_the_same_to_the_last_bit(width: int, rows: int):
    """A norm that somebody looks at is called by itself."""
    x, weight, angle = torch.randn(1, 1, rows, width), torch.randn(width), torch.randn(1, 1, 1, width // 2)
    for w in (weight, None):
        turned = norm_and_rotate(x, w, angle.cos(), angle.sin(), EPS)
        assert torch.equal(turned, rotate(rms_norm(x, w, EPS), angle.cos(), angle.sin()))
    for tokens in (1, 2):
        streams, given, norm = torch.randn(1, tokens, 4, width), site(4, width), torch.randn(width)
        *_, collapsed, normed = few_tokens.read(streams, *given, norm, 20, EPS, EPS, 1e-5)
        assert torch.equal(normed, rms_norm(collapsed, norm, 1e-5))
        assert torch.equal(collapsed, hyper.read(streams, *given, iters=20, eps=EPS, rms_eps=EPS)[3])


@pytest.mark.parametrize("outputs", [1, 5, 64])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_through_a_matrix(calls, width: int, outputs: int):
    weight = nn.Parameter(torch.randn(outputs, width))
    for x in (torch.randn(width), loose(torch.randn(1, 1, width)), torch.randn(1).expand(1, width)):
        compare(few_tokens.linear, x, weight)
    assert calls == {"linear": 3}
    same_numbers(few_tokens.linear(torch.ones(2, width), weight), torch_linear(torch.ones(2, width), weight))
    compare(few_tokens.linear, torch.randn(1, width), weight.t().contiguous().t())


def gated_half(x: Tensor, gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return swiglu(x @ gate.T, x @ up.T, limit)


@pytest.mark.parametrize("limit", [0.3, 10.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_gated_half(width: int, limit: float):
    x, gate, up = torch.randn(1, 1, 7), torch.randn(width, 7), torch.randn(width, 7)
    compare(few_tokens.gated, x, gate, up, limit, definition=gated_half)
    for worst in WORST:
        # Clamped or not: no clamp hides what is no number.
        for given in ((x, gate * worst, up), (x, gate, up * worst), (x * worst, gate, up)):
            same_numbers(few_tokens.gated(*given, limit), gated_half(*given, limit))


@pytest.mark.parametrize(("hidden", "inner"), [(1, 1), (7, 3), (33, 32), (64, 96)])
@pytest.mark.parametrize("chosen", [[0], [2, 0], [1, 1], [2, 1, 2, 2]])
def test_one_token_through_a_bank(calls, hidden: int, inner: int, chosen):
    x, weights, indices = torch.randn(1, hidden), torch.rand(1, len(chosen)), torch.tensor([chosen])
    first, second = torch.randn(3, 2 * inner, hidden), torch.randn(3, hidden, inner)
    exact = few_tokens_experts(*map(doubled, (x, indices, weights, first, second)), 0.5)
    bank = Stored(first, None, second, None)
    assert_close(_grouped_experts_cpu.run(x, indices, weights, bank, 0.5), exact, "float32 op")
    assert_close(_grouped_experts_cpu.run(loose(x), loose(indices), weights, bank, 0.5), exact, "float32 op")
    assert calls == {"experts": 2}


@pytest.mark.parametrize("outside", [-1, 3, 2**40, -(2**63)])
def test_an_expert_that_is_not_there(outside: int):
    bank = Stored(torch.randn(3, 64, 8), None, torch.randn(3, 8, 32), None)
    with pytest.raises(IndexError, match=f"expert {outside} of a bank of 3"):
        _grouped_experts_cpu.run(torch.randn(1, 8), torch.tensor([[0, outside]]), torch.rand(1, 2), bank, 1.0)


@pytest.mark.parametrize("selection", [None, [], [0], [-1, 3, -1, 0], [9, 12, 39, 2, 10, 11], [5, -1, 7]])
@pytest.mark.parametrize("entries", [0, 1, 40])
@pytest.mark.parametrize(("heads", "width"), [(1, 1), (8, 7), (2, 64)])
@pytest.mark.parametrize(("position", "window"), [(0, 1), (43, 5), (-1, 5)])
def test_one_query(calls, selection, entries: int, heads: int, width: int, position: int, window: int):
    places = torch.tensor([[-1, -1, position - 6, position - 4, position - 2, position - 1, position]])
    chosen = None if selection is None or not entries else torch.tensor([[[e for e in selection if e < entries]]], dtype=torch.int64)
    reach = Reach(window, torch.tensor([[position]]), loose(places.clamp(min=-1)), rate=4)
    queries, sinks = torch.randn(1, heads, 1, width).transpose(1, 2), torch.randn(heads)
    tokens, kept = torch.randn(1, 7, width), torch.randn(1, entries, width) if entries else None
    compare(
        sparse_attention, queries, tokens, kept, sinks, reach, chosen, width**-0.5, limit="row alone", definition=sparse_attention_reference
    )
    assert calls == {"attend": 1}


@pytest.mark.parametrize("entry", [-2, 3, 2**40])
def test_an_entry_that_is_not_there(calls, entry: int):
    given = torch.randn(1, 1, 2, 8), torch.randn(1, 5, 8), torch.randn(1, 3, 8), torch.randn(2)
    reach = Reach(9, torch.tensor([[11]]), torch.tensor([[7, 8, 9, 10, 11]]), rate=4)
    with pytest.raises(IndexError, match=f"entry {entry} is selected of 3"):
        sparse_attention(*given, reach, torch.tensor([[[0, entry]]]), 0.3)


@pytest.mark.parametrize("worst", WORST)
@pytest.mark.parametrize("where", range(4))
def test_numbers_that_are_none_in_attention(calls, worst: float, where: int):
    given = [torch.randn(1, 1, 2, 8), torch.randn(1, 5, 8), torch.randn(1, 3, 8), torch.randn(2)]
    given[where].view(-1)[0] = worst
    reach = Reach(9, torch.tensor([[11]]), torch.tensor([[7, 8, 9, 10, 11]]), rate=4)
    found = sparse_attention(*given, reach, None, 0.3)
    assert calls == {"attend": 1}
    with torch.enable_grad():
        same_numbers(found, sparse_attention(*given, reach, None, 0.3))


@pytest.mark.parametrize("worst", WORST)
def test_numbers_that_are_none_spread_as_in_torch(worst: float):
    x, weight, angle, slots = torch.randn(1, 1, 1, 8), torch.randn(8), torch.randn(1, 1, 1, 2), (torch.tensor([[2, 0]]), torch.rand(1, 2))
    x[..., 5] = worst
    matrix, first, second = torch.randn(6, 8), torch.randn(3, 64, 8), torch.randn(3, 8, 32)

    def run() -> list[Tensor]:
        return [
            rms_norm(x, weight, EPS),
            norm_and_rotate(x, weight, angle.cos(), angle.sin(), EPS),
            rotate(x, angle.cos(), angle.sin()),
            few_tokens.linear(x, matrix),
            hyper.write_back(x, torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1), torch.ones(1, 1, 8)),
            hyper.collapse(x, torch.zeros(1, 1, 1)),
        ]

    found, bank = run(), Stored(first, None, second, None)
    same_numbers(_grouped_experts_cpu.run(x.view(1, 8), *slots, bank, 1.0), few_tokens_experts(x.view(1, 8), *slots, first, second, 1.0))
    with torch.enable_grad():
        for value, other in zip(found, run(), strict=True):
            same_numbers(value, other)


LAID = {
    "strided": loose,
    "expanded": lambda t: t.flatten()[:1].expand(t.shape),
    "float64": Tensor.double,
    "bfloat16": Tensor.bfloat16,
    "one number": lambda t: t[:1],
    "negated view": lambda t: torch._neg_view(t.clone()),
}


@pytest.mark.parametrize("how", LAID)
@pytest.mark.parametrize("name", ["norm.weight", "layernorm.weight", "hc.fn", "hc.scale", "hc.base", "hc_scale", "sinks", "proj.weight"])
def test_a_model_over_weights_of_another_kind(monkeypatch, how: str, name: str):
    """Whatever it gives without compiled code, an error among it."""
    model = Dsv4.from_config(fault_config(), seed=1)
    for path, p in list(model.named_parameters()):
        if path.endswith(name):
            owner, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(LAID[how](p.detach())))
    ids = random_ids(model.config, 1, 1)
    found = outcome(model, ids)
    monkeypatch.setattr(few_tokens, "FEW_TOKENS", 0)
    expected = outcome(model, ids)
    assert type(found) is type(expected), f"{found}, with torch {expected}"
    if isinstance(expected, Tensor):
        assert_close(found, expected, "row alone")


# What is left to torch.


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Own(Tensor):
    pass


X, W = torch.ones(1, 8), torch.ones(4, 8)


OTHER_WEIGHTS = (W.bfloat16(), W.double(), W[:, :7].contiguous(), W.to("meta"), W.as_subclass(Own), W.expand(2, 4, 8))
OTHER_ROWS = (X.double(), X.bfloat16(), X.to("meta"), X.as_subclass(Own), nn.Parameter(X), X[:0], X.expand(3, 8))


@pytest.mark.parametrize(("x", "weight"), [*((X, w) for w in OTHER_WEIGHTS), *((x, W) for x in OTHER_ROWS), (X.double(), W.double())])
def test_what_does_not_fit_is_left_to_torch(calls, x: Tensor, weight: Tensor):
    found, expected = (outcome(function, x, weight) for function in (few_tokens.linear, torch_linear))
    assert calls == {}
    assert type(found) is type(expected)
    if isinstance(expected, Exception):
        assert str(found) == str(expected)
    elif not x.is_meta and not weight.is_meta:
        torch.testing.assert_close(found, expected)


def outcome(function, *args) -> Tensor | Exception:
    try:
        return function(*args)
    except (RuntimeError, IndexError) as error:
        return error


def recorded(run, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return run(x)


def seen_by_a_mode(run, x: Tensor) -> Tensor:
    with Passing():
        return run(x)


def on_a_dual_level(run, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return run(x)


WAYS = {
    "recorded": recorded,
    "dispatch mode": seen_by_a_mode,
    "dual level": on_a_dual_level,
    "vmap": lambda run, x: torch.func.vmap(run)(x.unsqueeze(0))[0],
    "jvp": lambda run, x: torch.func.jvp(run, (x,), (torch.ones_like(x),))[0],
    "functionalize": lambda run, x: torch.func.functionalize(run)(x),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
def test_recording_and_transforms_are_left_to_torch(calls, way: str):
    given, fn = torch.randn(1, 1, 4, 8), torch.randn(24, 32)

    def run(x: Tensor) -> Tensor:
        return rms_norm(hyper.mix_logits(x, fn, EPS), torch.ones(24), EPS)

    found = WAYS[way](run, given)
    assert calls == {}
    assert_close(found, run(given), "row alone")


def test_tensors_without_memory_are_left_to_torch(calls):
    freed = nn.Parameter(torch.randn(4, 8))
    freed.untyped_storage().resize_(0)
    for x, weight in ((X, freed), (torch._efficientzerotensor((1, 8)), W), (X, torch._efficientzerotensor((4, 8)))):
        found, expected = (outcome(function, x, weight) for function in (few_tokens.linear, torch_linear))
        assert type(found) is type(expected)
    compare(rms_norm, torch._neg_view(torch.arange(1.0, 8.0)), None, EPS)
    for shape, iters in (((1, 1, 4, 4), 0), ((1, 1, 2, 4), 3), ((1, 1, 4, 2), 3)):
        assert isinstance(outcome(hyper.sinkhorn_rounds, torch.rand(shape), iters, EPS), Exception | Tensor)
    assert calls == {}


def test_a_compiler_is_left_to_torch(calls):
    compiled = torch.compile(few_tokens.linear, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X, W), X @ W.t())
    with FakeTensorMode() as mode:
        assert few_tokens.linear(mode.from_tensor(X), mode.from_tensor(W)).shape == (1, 4)
    assert calls == {}


def decoded(model: Dsv4, ids: Tensor) -> Tensor:
    cache = KVCache(model.config, len(ids), ids.shape[1], dtype=model.dtype)
    return torch.cat([model(one, kv_cache=cache) for one in ids.split(1, dim=1)], dim=1)


def test_forty_tokens_one_by_one(calls):
    model = Dsv4.from_config(fault_config(moe_intermediate_size=32), seed=2)
    ids = random_ids(model.config, 1, 40)
    whole = model(ids)
    calls.clear()
    assert_close(decoded(model, ids), whole, "row alone")
    blocks = model.config.num_hidden_layers
    assert calls["read"] == calls["write"] == 2 * 40 * blocks
    assert calls["attend"] == calls["experts"] == calls["gated"] == 40 * blocks
    assert min(calls[name] for name in ("linear", "norm", "turn", "collapse", "mix_logits", "stream_weights")) >= 40


def test_two_rows_and_several_threads():
    models = [Dsv4.from_config(fault_config(), seed=2) for _ in range(4)]
    ids = random_ids(models[0].config, 2, 12)
    whole = models[0](ids)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(torch.no_grad()(decoded), models, [ids] * 4):
            assert_close(found, whole, "row alone")


# Other machines.


def test_without_numba_torch_computes_and_says_so_once(monkeypatch):
    model = Dsv4.from_config(fault_config(), seed=2)
    ids = random_ids(model.config, 1, 3)
    expected = decoded(model, ids)
    few_tokens.device_code.cache_clear()
    with monkeypatch.context() as without:
        # What stands for a module that cannot be imported.
        without.delattr("dsv4.kernels._few_tokens_numba")
        without.setitem(sys.modules, "dsv4.kernels._few_tokens_numba", None)
        with pytest.warns(RuntimeWarning, match="numba cannot be imported") as told:
            found = decoded(model, ids)
    few_tokens.device_code.cache_clear()
    assert len(told) == 1
    assert_close(found, expected, "row alone")


PROGRAM = """
    import sys, torch
    from dsv4.kernels import few_tokens
    from dsv4.kernels.norm_rotary import rms_norm
    x = torch.randn(1, 1, 33)
    with torch.no_grad():
        found = rms_norm(x, None, 1e-6), few_tokens.linear(x, torch.ones(2, 33))[0, 0, 0]
    torch.testing.assert_close(found, (rms_norm(x.double(), None, 1e-6).float(), x.sum()))
    print(few_tokens.device_code() is not None)
"""


def run_elsewhere(*before: str, **environment: str) -> str:
    """What PROGRAM prints in an interpreter of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    program = "\n".join((*before, textwrap.dedent(PROGRAM)))
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", program], env=kept | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_where_numba_is_told_not_to_compile():
    assert run_elsewhere(NUMBA_DISABLE_JIT="1") == "False"


def test_where_nothing_can_be_kept(tmp_path: Path):
    """No folder that numba would keep compiled code in can be made: a file stands in each place."""
    (tmp_path / "file").touch()
    deny = (
        "import numba.core.caching as caching",
        "def deny(self): raise OSError('read-only')",
        "for kind in caching.CacheImpl._locator_classes: kind.ensure_cache_path = deny",
    )
    assert run_elsewhere(*deny, HOME=str(tmp_path / "file"), XDG_CACHE_HOME=str(tmp_path / "file")) == "True"


@pytest.mark.parametrize("damage", ["full", "truncated"])
def test_where_what_was_kept_is_damaged(tmp_path: Path, damage: str):
    """It is compiled anew, with a word about it."""
    with pytest.raises(AssertionError, match="numba's cache of compiled code failed"):
        run_elsewhere(*DAMAGES[damage], NUMBA_CACHE_DIR=str(tmp_path))
    assert run_elsewhere(*DAMAGES[damage], "import warnings; warnings.simplefilter('ignore')", NUMBA_CACHE_DIR=str(tmp_path)) == "True"


DAMAGES = {
    "full": (
        "import numba.core.caching as caching",
        "def full(*given): raise OSError(28, 'No space left on device')",
        "caching.IndexDataCacheFile.save = full",
    ),
    "truncated": (
        "import numba.core.caching as caching, pickle",
        "def truncated(*given): raise pickle.UnpicklingError('pickle data was truncated')",
        "caching.IndexDataCacheFile.load = truncated",
    ),
}
