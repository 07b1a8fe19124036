"""The device code of sparse attention: its numbers in Triton's interpreter and, where there is a
CUDA device, natively; what it needs of each architecture, compiled for devices that are not here.
"""

import itertools
import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4 import Dsv4, Dsv4Config
from dsv4.config import CSA, HASH_MOE, HCA, MOE, SLIDING
from dsv4.kernels.backend import available
from dsv4.kernels.sparse_attention import (
    fused_sparse_attention,
    refusal,
    sparse_attention,
    sparse_attention_reference,
    visible_entries,
    visible_tokens,
)
from dsv4.testing import assert_close
from dsv4.testing_kernels import AttentionCase, interpreter, resources

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

FLOATS = ("queries", "tokens", "entries", "sinks")
LIMIT = {
    torch.float32: "float32 op",
    torch.bfloat16: "bfloat16 device code",
    torch.float16: "bfloat16 device code",
}
CASES = {
    "unequal rows": AttentionCase(rows=((0, 0, 5), (7, 2, 3), (90, 0, 1)), columns=5, window=3, width=5),
    "empty row": AttentionCase(rows=((0, 0, 0), (2, 1, 2)), columns=3, window=2, entries=2),
    "window beyond the sequence": AttentionCase(rows=((0, 0, 7),), columns=7, window=300),
    "window over tiles": AttentionCase(rows=((70, 0, 2), (3, 0, 2)), columns=2, window=45, heads=1),
    "gap": AttentionCase(rows=((30, 5, 2), (0, 0, 7)), columns=7, window=9, heads=1),
    "selected": AttentionCase(rows=((0, 0, 6), (40, 1, 5)), columns=6, window=4, entries=30, kept=19, rate=2),
    "dense": AttentionCase(rows=((0, 0, 4), (75, 0, 3)), columns=4, window=2, entries=37, rate=2, width=20),
    "one entry": AttentionCase(rows=((1, 0, 4),), columns=4, window=2, entries=1, kept=1, rate=3),
    "one entry, dense": AttentionCase(rows=((1, 0, 4),), columns=4, window=1, entries=1, rate=3),
    "many entries, few columns": AttentionCase(rows=((400, 0, 1),), columns=1, window=1, entries=200, rate=2, heads=1),
    "small": AttentionCase(rows=((0, 0, 2), (9, 1, 1)), columns=2, window=3, entries=5, kept=3, rate=2, heads=2),
    "few heads, dense": AttentionCase(rows=((40, 0, 9), (0, 3, 6), (5, 9, 0)), columns=9, window=7, entries=25, rate=2, heads=2),
    "8 heads": AttentionCase(rows=((3, 0, 5),), columns=5, window=4, heads=8, width=12),
    "17 heads": AttentionCase(rows=((0, 0, 2),), columns=2, window=2, entries=2, kept=2, heads=17, width=1),
    "130 heads": AttentionCase(rows=((99, 0, 1),), columns=1, window=70, heads=130, width=32),
    "width 512": AttentionCase(rows=((150, 0, 1),), columns=1, window=9, entries=70, kept=50, heads=64, width=512),
    "bfloat16": AttentionCase(
        rows=((0, 0, 5), (20, 1, 4)),
        columns=5,
        window=6,
        entries=20,
        kept=9,
        width=64,
        dtype=torch.bfloat16,
    ),
    "float16": AttentionCase(rows=((0, 0, 3),), columns=3, window=6, entries=3, width=64, dtype=torch.float16),
}
TINY = replace(
    Dsv4Config.tiny(),
    num_hidden_layers=3,
    layer_types=(SLIDING, CSA, HCA),
    mlp_layer_types=(HASH_MOE, MOE, MOE),
    hc_sinkhorn_iters=3,
)
# Strides that are multiples of 16 at every head width that is.
INTEGERS = (
    *("query_b", "query_s", "query_n", "token_b", "token_k", "entry_b", "entry_e"),
    *("grad_b", "grad_s", "grad_n"),
)


@pytest.fixture(scope="module")
def interpreted():
    with interpreter(sys.modules[__name__]) as run:
        yield run


class Calls(TorchDispatchMode):
    """Counts calls of the registered op."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.dsv4.sparse_attention.default
        return func(*args, **(kwargs or {}))


def exactly(arguments: dict) -> dict:
    wide = {k: None if arguments[k] is None else arguments[k].double() for k in FLOATS}
    return arguments | wide


def exact_lse(queries, tokens, entries, sinks, reach, selection, scale):
    """[b s N], of the scores alone."""
    seen = visible_tokens(reach.query_positions, reach.token_positions, reach.window)
    keys = tokens
    if entries is not None:
        closed = visible_entries(reach.query_positions, reach.rate, entries.shape[1], selection)
        keys, seen = torch.cat((tokens, entries), 1), torch.cat((seen, closed), -1)
    scores = torch.einsum("bsnd,bkd->bsnk", queries, keys) * scale
    return scores.masked_fill(~seen.unsqueeze(2), -torch.inf).logsumexp(-1)


def check(case: AttentionCase, seed: int = 0, device: str = "cpu", **changed) -> None:
    """Output, log-sum-exp and gradients against the definition in float64."""
    torch.manual_seed(seed)
    arguments = case.arguments(device) | changed
    exact = exactly(arguments)
    leaves = [k for k in FLOATS if arguments[k] is not None]
    results = []
    for attend, given, more in (
        (sparse_attention, arguments, {"backend": "triton"}),
        (sparse_attention_reference, exact, {}),
    ):
        given = given | {k: given[k].detach().requires_grad_() for k in leaves}
        out = attend(**given, **more)
        weight = torch.linspace(-1, 1, out.numel(), device=device).to(case.dtype)
        weight = weight.to(out.dtype).view(out.shape)
        results.append((out, torch.autograd.grad((out * weight).sum(), [given[k] for k in leaves])))
    (out, grads), (expected, expected_grads) = results
    assert_close(out, expected, LIMIT[case.dtype], "output")
    for name, grad, expected_grad in zip(leaves, grads, expected_grads, strict=True):
        assert_close(grad, expected_grad, f"{LIMIT[case.dtype]} gradient", f"gradient of {name}")
    for name, results in ways(**arguments).items():
        for found, value in zip(results, (expected, exact_lse(**exact)), strict=True):
            assert_close(found, value, LIMIT[case.dtype], name)


def ways(queries, tokens, entries, sinks, reach, selection, scale) -> dict[str, tuple[Tensor, Tensor]]:
    """Output and log-sum-exp from each of the kernels that can take these arguments, whichever the op chooses."""
    from dsv4.kernels import _decode_attention_triton as split
    from dsv4.kernels import _packed_attention_triton as packed
    from dsv4.kernels import _sparse_attention_triton as single

    given = queries, tokens, entries, sinks, selection, reach.query_positions, reach.token_positions, reach.window
    found = {
        "op": fused_sparse_attention(*given, reach.gap, reach.rate, scale),
        "single": single.forward(*given, reach.gap, reach.rate, scale),
        "split": split.forward(*given, reach.rate, scale),
    }
    if packed.suits(queries, selection):
        found["packed"] = packed.forward(*given, reach.gap, reach.rate, scale)
    return found


@pytest.mark.parametrize("name", CASES)
def test_numbers(interpreted, name: str):
    interpreted(check, CASES[name])


def check_blind() -> None:
    """Nobody sees anything, with sinks and without; what masked keys hold does not matter."""
    case = AttentionCase(rows=((0, 0, 0),), columns=3, window=4, entries=5, kept=2)
    for sink in (0.0, -torch.inf):
        check(case, sinks=torch.full((case.heads,), sink))
    arguments = case.arguments() | {"entries": torch.full((1, 5, case.width), torch.nan)}
    out = sparse_attention(**arguments, backend="triton")
    assert torch.equal(out, torch.zeros_like(out))


def check_sinks() -> None:
    case = CASES["small"]
    check(case, sinks=torch.full((case.heads,), -torch.inf))
    out = sparse_attention(**case.arguments() | {"sinks": torch.full((case.heads,), 1e4)}, backend="triton")
    assert torch.equal(out, torch.zeros_like(out))


def check_strides() -> None:
    """Rows that are views: of a larger cache, of another order of axes, at odd addresses."""
    arguments = CASES["small"].arguments()
    expected = sparse_attention(**arguments, backend="triton")
    queries = arguments["queries"].transpose(1, 2).contiguous().transpose(1, 2)
    room = torch.full((2, 50, 16), torch.nan)
    room[:, :5] = arguments["entries"]
    tokens = torch.cat((torch.zeros(1), arguments["tokens"].flatten()))[1:]
    tokens = tokens.view(arguments["tokens"].shape)
    out = sparse_attention(
        **arguments | {"queries": queries, "entries": room[:, :5], "tokens": tokens},
        backend="triton",
    )
    assert torch.equal(out, expected)


def check_far_addresses() -> None:
    """Rows that begin 2^31 elements from the first (pages that nobody touched take no memory)."""
    case = AttentionCase(rows=((9, 0, 2),), columns=2, window=2, entries=3, kept=3, dtype=torch.float16)
    arguments = case.arguments()
    step = 1 << 30
    entries = torch.zeros(2 * step + case.width, dtype=torch.float16)
    entries = entries.as_strided((1, 3, case.width), (0, step, 1))
    entries.copy_(arguments["entries"])
    selection = torch.tensor([[[2, 0, -1], [0, -1, 2]]])
    for chosen in (selection, None):
        given = arguments | {"selection": chosen}
        near, far = ways(**given), ways(**given | {"entries": entries})
        assert ("packed" in far) == (chosen is None)
        for name, results in far.items():
            for found, expected in zip(results, near[name], strict=True):
                assert torch.equal(found, expected), name


def check_order_of_sums() -> None:
    """Where torch is to be deterministic, gradients are torch's, to the last bit."""
    arguments = CASES["small"].arguments()
    given = [arguments[k].requires_grad_() for k in FLOATS]
    torch.use_deterministic_algorithms(True)
    fused, plain = (torch.autograd.grad(sparse_attention(**arguments, backend=backend).sum(), given) for backend in ("triton", "torch"))
    torch.use_deterministic_algorithms(False)
    for gradient, expected in zip(fused, plain, strict=True):
        assert torch.equal(gradient, expected)


def check_op() -> None:
    """The registration: schema, fake tensors, autograd, tracing; a gradient of a gradient."""
    arguments = CASES["small"].arguments()
    reach = arguments["reach"]
    places = (reach.query_positions, reach.token_positions, reach.window, reach.gap, reach.rate)
    given = [arguments[k].requires_grad_() for k in FLOATS]
    args = (*given, arguments["selection"], *places, arguments["scale"])
    torch.library.opcheck(fused_sparse_attention, args)

    results = []
    for attend, more in ((sparse_attention, {"backend": "triton"}), (sparse_attention, {})):
        out = attend(**arguments, **more)
        (first,) = torch.autograd.grad(out.square().sum(), given[:1], create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), given))
    for name, second, expected in zip(FLOATS, *results, strict=True):
        assert_close(second, expected, "float32 op gradient", f"second gradient of {name}")


@pytest.mark.parametrize(
    "checked",
    [
        check_blind,
        check_sinks,
        check_strides,
        check_order_of_sums,
        check_op,
        pytest.param(check_far_addresses, marks=pytest.mark.slow),
    ],
)
def test_properties(interpreted, checked):
    interpreted(checked)


def check_model() -> None:
    """Three kinds of block, padding, a prompt in two pieces with a KV cache: as without this kernel. tests/test_model_triton.py runs a
    model of all of them.
    """
    plain, fused = (Dsv4.from_config(TINY, dtype=torch.float32) for _ in range(2))
    for block in fused.layers:
        block.self_attn.backend = "triton"
    torch.manual_seed(0)
    ids = torch.randint(0, TINY.vocab_size, (2, 13))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    results = []
    for model in (plain, fused):
        cache = model.new_kv_cache(2, 16)
        with torch.no_grad(), Calls() as calls:
            whole = model(ids, attention_mask=mask)
            first = model(ids[:, :9], kv_cache=cache, attention_mask=mask[:, :9])
            results.append((whole, first, model(ids[:, 9:], kv_cache=cache)))
        assert calls.count == (0 if model is plain else 9)
    # At padding nothing is promised.
    for got, expected, real in zip(results[1], results[0], (mask, mask[:, :9], torch.ones(2, 4)), strict=True):
        assert_close(got[real.bool()], expected[real.bool()], "watched", "logits")

    # Listening moves that block, and no other, to the spelled-out way.
    name = "layers.1.self_attn.attention_probabilities"
    with torch.no_grad(), Calls() as calls:
        logits, kept = fused.run_with_cache(ids[:, :6], name)
    assert calls.count == 2
    expected, expected_kept = plain.run_with_cache(ids[:, :6], name)
    assert_close(logits, expected, "watched", "logits")
    assert_close(kept[name], expected_kept[name], "watched", name)


def test_model(interpreted):
    interpreted(check_model)


def test_triton_where_it_cannot_run():
    arguments = CASES["selected"].arguments()
    with pytest.raises(ValueError, match=r'Triton needs a CUDA device, and this is cpu.*"torch"'):
        sparse_attention(**arguments, backend="triton")
    with pytest.raises(ValueError, match='kernels="triton": Triton needs a CUDA device'):
        Dsv4.from_config(TINY, kernels="triton")
    with pytest.raises(ValueError, match='kernels="triton": Triton needs a CUDA device'):
        Dsv4.from_pretrained("no/such-model", kernels="triton")
    with pytest.raises(ValueError, match="kernels='fast': expected"):
        Dsv4.from_config(TINY, kernels="fast")
    with pytest.raises(ValueError, match="backend='fast': expected one of 'torch', 'triton'"):
        available("fast", "cpu")
    assert available("torch", "cpu") is None
    assert {block.self_attn.backend for block in Dsv4.from_config(TINY).layers} == {"torch"}


def check_refusals() -> None:
    arguments = CASES["dense"].arguments()
    with pytest.raises(ValueError, match=r"or torch\.float32, got torch\.float64"):
        sparse_attention(**exactly(arguments), backend="triton")
    wide = torch.zeros(1, 1, 1, 513)
    with pytest.raises(ValueError, match="at most 512 wide, got 513"):
        sparse_attention(**arguments | {"queries": wide}, backend="triton")
    assert {x.self_attn.backend for x in Dsv4.from_config(TINY).layers} == {"torch"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float8_e4m3fn])
def test_dtypes_of_a_cuda_device(dtype: torch.dtype):
    with patch("dsv4.kernels.sparse_attention.available", lambda backend, device: None):
        assert f"got {dtype}" in refusal("triton", torch.device("cuda"), dtype, 512)
        assert refusal("triton", torch.device("cuda"), torch.bfloat16, 512) is None


def test_refusals(interpreted):
    interpreted(check_refusals)


def test_kernels_are_not_imported_before_they_are_asked_for():
    code = (
        "import sys; sys.modules['triton'] = None; import torch, dsv4.model, dsv4.pretrained; "
        "from dsv4.kernels.backend import available; assert available('torch', 'cpu') is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Bytes of shared memory that one program may take.
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
CAPABILITY = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
PACKED_CI = {("sm_90", 16, 512)}
CI = {
    ("forward", "sm_90", 64, 512, True),
    ("forward", "sm_90", 16, 512, False),
    ("of keys", "sm_90", 64, 512, True),
    ("of queries", "sm_90", 64, 512, False),
}
COMPILED = [
    pytest.param(*case, marks=[] if case in CI else pytest.mark.slow, id=" ".join(map(str, case)))
    for case in itertools.product(
        ("forward", "of keys", "of queries"),
        ("sm_80", "sm_90", "sm_100"),
        (16, 32, 64),
        (16, 64, 128, 256, 512),
        (True, False),
    )
    # The tiles of the launch tables.
    if case[2] in (((16, 32) if case[0] == "forward" else (16,)) if case[1] == "sm_80" else (16, 64))
]


@pytest.mark.parametrize(("direction", "arch", "heads", "width", "is_selected"), COMPILED)
def test_compiled(direction: str, arch: str, heads: int, width: int, is_selected: bool):
    """Nothing spills, the tile fits, each product is issued once per step and on tensor cores."""
    from dsv4.kernels import _sparse_attention_gradient_triton as gradient
    from dsv4.kernels import _sparse_attention_triton as device_code

    is_forward = direction == "forward"
    table = device_code.FORWARD if is_forward else gradient.BACKWARD
    launch = device_code.pick(table, arch, heads)
    assert launch.heads == heads
    kernel = device_code.forward_kernel if is_forward else gradient.backward_kernel
    options = device_code.options(launch, width, is_selected)
    if not is_forward:
        options |= {"OF_KEYS": direction == "of keys"}
    found = resources(kernel, types_of(kernel), options, CAPABILITY[arch], aligned=INTEGERS)
    if (direction, arch, width) == ("of keys", "sm_80", 512) and newer_triton():
        # Triton 3.9 keeps the queries in registers twice, once transposed.
        assert found.stack <= 256
    else:
        assert found.stack == 0
    assert found.shared <= SHARED[arch]
    assert found.tensor_memory <= 512
    assert found.instructions["cp.async.c"] > 0
    if heads < 64:
        assert found.instructions["mma.sync"] > 0
    elif arch == "sm_90" and direction == "of keys" and width < 128:
        # Its rows are fewer than two warp groups take; the scores are still issued once.
        assert found.instructions["wgmma.mma_async"] >= 2 * (width // 16)
    elif arch == "sm_90":
        assert found.instructions["wgmma.mma_async"] == issued(direction, launch.keys, width)
    else:
        assert found.instructions["tcgen05.mma"] > 0


def newer_triton() -> bool:
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) > (3, 7)


@pytest.mark.parametrize(
    ("arch", "heads", "width"),
    [
        pytest.param(*case, marks=[] if case in PACKED_CI else pytest.mark.slow, id=" ".join(map(str, case)))
        for case in itertools.product(("sm_80", "sm_90", "sm_100"), (8, 16), (16, 64, 128, 256, 512))
    ],
)
def test_packed_compiled(arch: str, heads: int, width: int):
    """Few heads, of several tokens, in the rows of one program: wgmma, the scores issued once."""
    from dsv4.kernels import _packed_attention_triton as device_code

    launch, kernel = device_code.PACKED[arch], device_code.packed_kernel
    options = device_code.packed_options(launch, width, heads)
    found = resources(kernel, types_of(kernel), options, CAPABILITY[arch], aligned=INTEGERS)
    assert found.stack == 0
    assert found.shared <= SHARED[arch]
    assert found.tensor_memory <= 512
    assert found.instructions["cp.async.c"] > 0
    if arch == "sm_80":
        assert found.instructions["mma.sync"] > 0
    elif arch == "sm_90":
        assert found.instructions["wgmma.mma_async"] == issued("forward", launch.keys, width)
    else:
        assert found.instructions["tcgen05.mma"] > 0


def issued(direction: str, keys: int, width: int) -> int:
    """wgmma of one step, each 64 rows by 16 deep by at most 256 wide, shared among warp groups."""
    over_width, over_keys = width // 16, keys // 16
    if direction == "forward":
        return over_width + over_keys
    if direction == "of queries":
        return 2 * over_width + over_keys
    # The keys' gradient is transposed: the width makes its rows, 64 heads its depth.
    return 2 * over_width + 2 * (64 // 16) * (width // 128)


def types_of(kernel) -> dict[str, str]:
    """Triton's type of each argument, for bfloat16 queries and keys."""
    words = {"position": "*i64", "selection": "*i64", "sink": "*fp32", "lse": "*fp32"}
    words |= {"whole": "*fp32", "pull": "*fp32", "token_grad": "*fp32", "entry_grad": "*fp32"}
    types = {}
    for name in kernel.arg_names:
        kind = next((kind for word, kind in words.items() if word in name), "*bf16")
        types[name] = kind if name.endswith("_ptr") else "fp32" if name == "scale" else "i32"
    return types


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_native(name: str):
    check(replace(CASES[name], dtype=torch.bfloat16), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [512, None])
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
def test_native_at_full_width(heads: int, kept: int | None):
    case = AttentionCase(
        rows=((0, 0, 300), (2000, 3, 250)),
        columns=300,
        window=128,
        entries=560,
        kept=kept,
        rate=4,
        heads=heads,
        width=512,
        dtype=torch.bfloat16,
    )
    check(case, device="cuda")
