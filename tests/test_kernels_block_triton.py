"""The device code of hyper-connections, norm and rotary, pooled entries and the indexer: numbers in Triton's interpreter and, where there
is a CUDA device, natively; what it needs of each architecture, compiled for devices that are not here.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dsv4.kernels import hyper_connection, index_scores, norm_rotary, pooling
from dsv4.testing import assert_close
from dsv4.testing_kernels import interpreter, resources

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Given:
    """An op, its definition, and one call of both: tensors first, then numbers; `exactly`: the numbers of the float64 call."""

    op: Callable
    definition: Callable
    tensors: tuple[Tensor | None, ...]
    numbers: tuple
    exactly: tuple

    def exact(self) -> tuple[Tensor | None, ...]:
        """The tensors in float64, apart from codes and what is not floating."""
        return tuple(t.double() if is_real(t) else t for t in self.tensors)


def is_real(t: Tensor | None) -> bool:
    return t is not None and t.is_floating_point() and t.dtype.itemsize > 1


def results(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (out,) if isinstance(out, Tensor) else out


@dataclass(frozen=True, kw_only=True)
class HyperCase:
    """`way`: "read", "write" or "write_read"."""

    way: str = "write_read"
    tokens: tuple[int, int] = (2, 3)
    streams: int = 4
    hidden: int = 33
    iters: int = 20
    eps: float = 1e-6
    normed: bool = True
    dtype: torch.dtype = torch.float32

    def given(self, device: str) -> Given:
        (b, s), n, h = self.tokens, self.streams, self.hidden
        mixes = (2 + n) * n
        x, out = torch.randn(b, s, n, h), torch.randn(b, s, h)
        write = (x.to(self.dtype), torch.rand(b, s, n, n), torch.rand(b, s, n), out.to(self.dtype))
        read = (torch.randn(mixes, n * h) * (n * h) ** -0.5, 1 + 0.2 * torch.randn(3), torch.randn(mixes))
        read = (*read, 1 + 0.2 * torch.randn(h) if self.normed else None)
        numbers = (self.iters, self.eps, 1e-6, 1e-5)
        tensors, numbers = {
            "read": ((write[0], *read), numbers),
            "write": (write, ()),
            "write_read": ((*write, *read), numbers),
        }[self.way]
        definition = {
            "read": hyper_connection.read_definition,
            "write": hyper_connection.write_back,
            "write_read": hyper_connection.write_read_definition,
        }[self.way]
        op = getattr(hyper_connection, f"fused_{self.way}")
        return Given(op, definition, on(device, tensors), numbers, numbers)


@dataclass(frozen=True, kw_only=True)
class RowCase:
    shape: tuple[int, int, int, int] = (2, 3, 5, 16)
    turned: int = 8
    weighted: bool = True
    normed: bool = True
    masked: bool = False
    back: bool = False
    dtype: torch.dtype = torch.float32

    def given(self, device: str) -> Given:
        b, s, _, d = self.shape
        angles = torch.randn(b, s, self.turned // 2)
        cos, sin = (angles.cos(), angles.sin()) if self.turned else (None, None)
        valid = torch.rand(b, s) < 0.6 if self.masked else None
        weight = 1 + 0.2 * torch.randn(d) if self.weighted else None
        tensors = (torch.randn(self.shape).to(self.dtype), weight, cos, sin, valid)
        numbers = (1e-6, self.normed, self.back)
        return Given(norm_rotary.fused_norm_rotary, norm_rotary.norm_rotary_definition, on(device, tensors), numbers, numbers)


@dataclass(frozen=True, kw_only=True)
class PoolCase:
    """`series`: 2 overlapping windows, 1 not. A third of the slots hold no token, the first entry none at all; the last is not filled."""

    batch: int = 2
    tokens: int = 20
    entries: int = 3
    rate: int = 4
    series: int = 2
    width: int = 16
    turned: int = 8
    dtype: torch.dtype = torch.float32

    def given(self, device: str) -> Given:
        b, e, m, c, d = self.batch, self.entries, self.rate * self.series, self.series, self.width
        angles = torch.randn(b, e, self.turned // 2)
        present, filled = torch.rand(b, e, m) < 0.66, torch.ones(b, e, dtype=torch.bool)
        if e > 1:
            present[0, 0] = False
            filled[-1, -1] = False
        tensors = (
            *(torch.randn(b, self.tokens, 2 * c * d), torch.randn(self.rate, c * d), 1 + 0.2 * torch.randn(d)),
            *(angles.cos(), angles.sin(), torch.randint(0, self.tokens, (b, e, m)), present, filled),
        )
        return Given(pooling.fused_pool, pooling.pool_definition, on(device, tensors), (1e-6, self.dtype), (1e-6, torch.float64))


@dataclass(frozen=True, kw_only=True)
class ScoreCase:
    """`past`: tokens of each row before its queries; the first query is padding. `coded`: keys in FP8. `whole`: small whole numbers, of
    which many scores are equal.
    """

    past: tuple[int, ...] = (0, 30)
    queries: int = 5
    heads: int = 3
    width: int = 16
    entries: int = 17
    rate: int = 2
    coded: bool = False
    whole: bool = False
    dtype: torch.dtype = torch.float32

    def draw(self, *sizes: int) -> Tensor:
        return torch.randint(-1, 2, sizes).float() if self.whole else torch.randn(sizes)

    def given(self, device: str) -> Given:
        b, s = len(self.past), self.queries
        positions = torch.tensor(self.past)[:, None] + torch.arange(s)
        positions[0, 0] = -1
        keys, scale = self.draw(b, self.entries, self.width).to(self.dtype), None
        if self.coded:
            keys, scale = keys.to(torch.float8_e4m3fn), 0.5 + torch.rand(b, self.entries)
        queries = self.draw(b, s, self.heads, self.width).to(self.dtype)
        tensors = (queries, keys, scale, self.draw(b, s, self.heads), positions)
        return Given(index_scores.fused_index_scores, index_scores.score_definition, on(device, tensors), (self.rate,), (self.rate,))

    @property
    def lead(self) -> int:
        return max(self.past)


def on(device: str, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(t if t is None else t.to(device) for t in tensors)


CASES = {
    "hyper read": HyperCase(way="read"),
    "hyper read, shared among programs": HyperCase(way="read", tokens=(1, 2), hidden=130),
    "hyper read, the last program finishes sixteen": HyperCase(way="read", tokens=(4, 4), hidden=70, iters=2),
    "hyper read, a launch to finish": HyperCase(way="read", tokens=(1, 17), hidden=70, iters=2),
    "hyper read, no norm": HyperCase(way="read", normed=False, tokens=(1, 1), iters=1),
    "hyper read, large tile": HyperCase(way="read", tokens=(1, 19), hidden=20, streams=3, iters=2),
    "hyper read, one stream": HyperCase(way="read", streams=1, hidden=40, iters=3),
    "hyper read, no tokens": HyperCase(way="read", tokens=(2, 0)),
    "hyper write": HyperCase(way="write", tokens=(3, 6), hidden=70),
    "hyper write_read": HyperCase(),
    "hyper write_read, two streams": HyperCase(streams=2, hidden=16, iters=7, eps=1e-2),
    "hyper write_read, shared among programs": HyperCase(tokens=(2, 1), hidden=100, iters=2, normed=False),
    "hyper write_read, a launch to finish": HyperCase(tokens=(2, 9), hidden=50, iters=2),
    "hyper write_read, whole rows over two tiles": HyperCase(tokens=(1, 67), hidden=10, iters=2),
    "hyper write_read, seven streams": HyperCase(streams=7, hidden=8, iters=2, tokens=(1, 2)),
    "hyper read, bfloat16": HyperCase(way="read", hidden=64, dtype=torch.bfloat16, tokens=(1, 3)),
    "hyper write_read, bfloat16": HyperCase(hidden=48, dtype=torch.bfloat16, tokens=(1, 3)),
    "hyper write_read, float16": HyperCase(hidden=48, dtype=torch.float16, tokens=(1, 2), iters=2),
    "rows: norm and rotary": RowCase(),
    "rows: queries": RowCase(weighted=False, shape=(1, 3, 9, 20), turned=4),
    "rows: keys at padding": RowCase(shape=(2, 4, 1, 16), masked=True),
    "rows: norm alone": RowCase(turned=0, shape=(1, 1, 7, 33)),
    "rows: rotary alone": RowCase(weighted=False, normed=False),
    "rows: rotary back, whole row": RowCase(weighted=False, normed=False, back=True, turned=6, shape=(1, 2, 3, 6)),
    "rows: three channels": RowCase(turned=0, shape=(1, 2, 1, 3)),
    "rows: wide": RowCase(shape=(1, 2, 3, 512), turned=64),
    "rows: none": RowCase(shape=(2, 0, 3, 16)),
    "rows: bfloat16": RowCase(shape=(1, 3, 3, 64), dtype=torch.bfloat16, masked=True),
    "entries of overlapping windows": PoolCase(),
    "entries of windows over tiles": PoolCase(rate=19, series=1, width=20, turned=4),
    "entries of 128 slots": PoolCase(batch=1, rate=128, series=1, tokens=140, entries=1, width=32),
    "one slot": PoolCase(rate=1, series=1, width=2, turned=2, entries=2),
    "no entries": PoolCase(entries=0),
    "entries in bfloat16": PoolCase(dtype=torch.bfloat16),
    "scores": ScoreCase(),
    "scores of one query": ScoreCase(past=(40, 3, 0), queries=1, heads=8, width=24, entries=20),
    "scores of one entry": ScoreCase(past=(1,), entries=1, heads=1, width=2),
    "scores of nothing closed": ScoreCase(past=(0,), queries=3, rate=9, entries=40),
    "scores over tiles": ScoreCase(past=(100,), queries=3, rate=1, entries=103, heads=5),
    "scores of FP8 keys": ScoreCase(coded=True, dtype=torch.bfloat16, heads=4, width=32),
    "scores in bfloat16": ScoreCase(dtype=torch.bfloat16, heads=8, width=32),
}


@pytest.fixture(scope="module")
def interpreted():
    with interpreter(sys.modules[__name__]) as run:
        yield run


def check(name: str, device: str = "cpu", dtype: torch.dtype | None = None) -> None:
    """Outputs and gradients against the definition in float64. Sums of scores are exact in every dtype but for their order."""
    torch.manual_seed(0)
    case = CASES[name] if dtype is None else replace(CASES[name], dtype=dtype)
    given = case.given(device)
    narrow = "bfloat16 device code" if case.dtype in NARROW and not isinstance(case, ScoreCase) else "float32 op"
    outputs, gradients = compared(given)
    for out, expected in zip(*outputs, strict=True):
        # What was written has been rounded before it is read.
        limit = "float32 op" if out.dtype == torch.float32 and given.op is not hyper_connection.fused_write_read else narrow
        assert_close(out, expected, limit, name)
    for gradient, expected in zip(*gradients, strict=True):
        assert (gradient is None) == (expected is None)
        if gradient is not None:
            assert_close(gradient, expected, f"{limit_of(gradient, narrow)} gradient", f"gradient, {name}")


def limit_of(gradient: Tensor, narrow: str) -> str:
    return "bfloat16 device code" if gradient.dtype in NARROW else narrow


def compared(given: Given) -> tuple[list, list]:
    """(outputs, gradients), each of the op and of the definition in float64."""
    outputs, gradients = [], []
    for call, tensors, numbers in ((given.op, given.tensors, given.numbers), (given.definition, given.exact(), given.exactly)):
        leaves = [t.detach().requires_grad_() if is_real(t) else t for t in tensors]
        outs = results(call(*leaves, *numbers))
        outputs.append(outs)
        pulled = sum((out.masked_fill(out.isinf(), 0.0).double() * weight_of(out)).sum() for out in outs)
        gradients.append(torch.autograd.grad(pulled, [leaf for leaf in leaves if is_real(leaf)], allow_unused=True))
    return outputs, gradients


def weight_of(out: Tensor) -> Tensor:
    return torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device).view(out.shape)


@pytest.mark.parametrize("name", CASES)
def test_numbers(interpreted, name: str):
    interpreted(check, name)


OPS = {
    "read": HyperCase(way="read", tokens=(1, 2), hidden=8, iters=2),
    "write": HyperCase(way="write", tokens=(1, 2), hidden=8),
    "write_read": HyperCase(streams=2, tokens=(1, 2), hidden=8, iters=2),
    "rows": RowCase(masked=True),
    "entries": PoolCase(batch=1, entries=2, rate=2, width=4, turned=2),
    "scores": ScoreCase(past=(3,), queries=2, entries=3, width=4),
}


def check_registration(name: str) -> None:
    """Schema, fake tensors, autograd, tracing; a gradient of a gradient is that of the definition."""
    torch.manual_seed(0)
    given = OPS[name].given("cpu")
    leaves = [t.requires_grad_() if is_real(t) else t for t in given.tensors]
    torch.library.opcheck(given.op, (*leaves, *given.numbers))
    seconds = []
    for call in (given.op, given.definition):
        outs = results(call(*leaves, *given.numbers))
        pulled = sum(out.masked_fill(out.isinf(), 0.0).square().sum() for out in outs)
        (first,) = torch.autograd.grad(pulled, leaves[:1], create_graph=True)
        wanted = [t for t in leaves if is_real(t)]
        seconds.append(torch.autograd.grad(first.square().sum(), wanted, allow_unused=True))
    for second, expected in zip(*seconds, strict=True):
        assert (second is None) == (expected is None)
        if second is not None:
            assert_close(second, expected, "float32 op gradient", "second gradient")


@pytest.mark.parametrize("name", OPS)
def test_registration(interpreted, name: str):
    interpreted(check_registration, name)


SELECTED = {
    "unequal rows": (ScoreCase(), 4),
    "more than there are": (ScoreCase(queries=2), 18),
    "one query a row": (ScoreCase(past=(50, 0, 7), queries=1, entries=25, heads=8), 9),
    "ties": (ScoreCase(past=(60,), queries=4, rate=1, entries=64, heads=4, whole=True), 20),
    "ties, all kept": (ScoreCase(past=(12, 0), queries=3, rate=3, entries=5, heads=2, whole=True), 5),
    "nothing closed": (ScoreCase(past=(0,), queries=2, rate=9, entries=20), 3),
    "no entries": (ScoreCase(past=(0,), queries=2, entries=0), 3),
    "FP8 keys": (ScoreCase(coded=True, dtype=torch.bfloat16), 6),
}


def check_selected(name: str, device: str = "cpu") -> None:
    """The very entries that `select_entries` takes from the op's own scores; in float32 those of the torch way."""
    torch.manual_seed(0)
    case, k = SELECTED[name]
    given = case.given(device)
    scores = index_scores.fused_index_scores(*given.tensors, case.rate)
    for chunk in (1 << 26, 40):
        index_scores.DEVICE_CHUNK = chunk
        chosen = index_scores.fused_select(*given.tensors, case.rate, k, case.lead)
        assert torch.equal(chosen, index_scores.select_entries(scores, k))
    if not case.coded:
        queries, keys, _, weights, positions = given.tensors
        assert torch.equal(chosen, index_scores.select_by_index(queries, keys, weights, positions, case.rate, k, case.lead))
        turned = index_scores.fused_select(queries, keys, None, -weights, positions, case.rate, k, case.lead, -1.0)
        assert torch.equal(chosen, turned)


@pytest.mark.parametrize("name", SELECTED)
def test_selection(interpreted, name: str):
    interpreted(check_selected, name)


def check_rows_of_parts() -> None:
    """More entries than one program holds, equal scores and -0.0 among them, minus infinities, and NaN, which is nobody's choice."""
    from dsv4.kernels import _index_scores_triton as device_code

    torch.manual_seed(0)
    b, s, entries, kept = 2, 2, 20000, 50
    scores = torch.randint(-3, 4, (b, s, entries)).float() * torch.where(torch.rand(b, s, entries) < 0.5, 1.0, -1.0)
    scores[0, 0, 7000:] = -torch.inf
    scores[1] = torch.randn(s, entries)
    positions = torch.tensor([[entries - 1, 9000], [entries + 5, 100]])
    rows = device_code.Rows(scores, scores, None, scores, positions, 1)
    for begin, chunk in ((0, 2), (1, 1)):
        out = torch.full((b, s, kept), 77)
        rows.select(out, begin, chunk, scores[:, begin : begin + chunk].contiguous())
        closed = index_scores.closed_entries(positions, 1, entries)
        expected = index_scores.select_entries(scores.masked_fill(~closed, -torch.inf), kept)
        assert torch.equal(out[:, begin:], expected[:, begin:])
        assert bool((out[:, :begin] == 77).all())
    scores[0, 0, 3] = torch.nan
    rows.select(out, 0, 2, scores)
    assert 3 not in out[0, 0].tolist()


def check_blind() -> None:
    """What masked tokens, slots and entries hold does not matter."""
    torch.manual_seed(0)
    given = PoolCase().given("cpu")
    projected, *rest, index, present, filled = given.tensors
    unread = torch.ones_like(projected[..., 0], dtype=torch.bool)
    for b in range(2):
        unread[b, index[b][present[b] & filled[b, :, None]]] = False
    spoiled = projected.masked_fill(unread.unsqueeze(-1), torch.nan)
    assert bool(unread.any())
    expected = given.op(*given.tensors, *given.numbers)
    assert torch.equal(given.op(spoiled, *rest, index, present, filled, *given.numbers), expected)
    assert torch.equal(expected[0, 0], torch.zeros(16))

    case = ScoreCase(past=(4, 9))
    queries, keys, scale, weights, positions = case.given("cpu").tensors
    expected = index_scores.fused_select(queries, keys, scale, weights, positions, 2, 5, case.lead)
    keys = keys.clone()
    keys[:, 7:] = torch.nan
    assert torch.equal(index_scores.fused_select(queries, keys, scale, weights, positions, 2, 5, case.lead), expected)

    x, *rest = RowCase(masked=True).given("cpu").tensors
    spoiled = x.masked_fill(~rest[-1][..., None, None], torch.nan)
    out = norm_rotary.fused_norm_rotary(spoiled, *rest, 1e-6, True, False)
    assert torch.equal(out, norm_rotary.fused_norm_rotary(x, *rest, 1e-6, True, False))


def check_extremes() -> None:
    """Streams of any size, one-hot rows that all want one column."""
    for size in (0.0, 1e-20, 1e15):
        given = HyperCase(way="read", hidden=8).given("cpu")
        x, fn, _, base, norm = given.tensors
        base[8:] = torch.tensor([50.0, 0.0, 0.0, 0.0]).repeat(4)
        for scale in (0.0, 1e4):
            for value in given.op(x * size, fn, torch.full((3,), scale), base, norm, *given.numbers):
                assert bool(value.isfinite().all())


def check_views() -> None:
    """Streams that are one storage seen n times, rows of another order of axes, a cache's part, odd addresses."""
    torch.manual_seed(0)
    given = HyperCase(way="read", hidden=16).given("cpu")
    x, *rest = given.tensors
    seen = x[:, :, :1].expand_as(x)
    for got, expected in zip(given.op(seen, *rest, *given.numbers), given.op(seen.contiguous(), *rest, *given.numbers), strict=True):
        assert torch.equal(got, expected)

    given = RowCase().given("cpu")
    x, *rest = given.tensors
    expected = given.op(*given.tensors, *given.numbers)
    for view in (x.transpose(1, 2).contiguous().transpose(1, 2), torch.cat((torch.zeros(1), x.flatten()))[1:].view(x.shape)):
        assert torch.equal(given.op(view, *rest, *given.numbers), expected)

    given = ScoreCase().given("cpu")
    queries, keys, *rest = given.tensors
    room = torch.full((2, 40, 16), torch.nan)
    room[:, :17] = keys
    assert torch.equal(given.op(queries, room[:, :17], *rest, 2), given.op(*given.tensors, 2))

    given = PoolCase().given("cpu")
    projected, *rest = given.tensors
    room = torch.full((2, 33, 64), torch.nan)
    room[:, :20] = projected
    assert torch.equal(given.op(room[:, :20], *rest, *given.numbers), given.op(*given.tensors, *given.numbers))


FAR = {
    "streams": HyperCase(tokens=(1, 3), hidden=16, streams=2, dtype=torch.float16, iters=2),
    "streams written": HyperCase(way="write", tokens=(1, 3), hidden=16, streams=2, dtype=torch.float16),
    "rows": RowCase(shape=(1, 3, 1, 16), dtype=torch.float16),
    "keys": ScoreCase(past=(9,), queries=1, entries=3, dtype=torch.float16),
}


def check_far_addresses(name: str) -> None:
    """Rows that begin 2^31 elements from the first. (Projections are float32, of which these would be 8 GiB.)"""
    torch.manual_seed(0)
    given = FAR[name].given("cpu")
    which = 1 if name == "keys" else 0
    near = given.tensors[which]
    step, rows = 1 << 30, near.shape[1]
    far = torch.zeros((rows - 1) * step + near[0, 0].numel(), dtype=torch.float16)
    far = far.as_strided(near.shape, (0, step, *near.stride()[2:]))
    far.copy_(near)
    tensors = [far if i == which else t for i, t in enumerate(given.tensors)]
    with torch.no_grad():
        for got, expected in zip(
            results(given.op(*tensors, *given.numbers)), results(given.op(*given.tensors, *given.numbers)), strict=True
        ):
            assert torch.equal(got, expected)


def check_arrivals() -> None:
    """The last program to arrive finds the same numbers in any order of arrival, and leaves the counter as it was."""
    from triton.runtime import interpreter as interpreting

    from dsv4.kernels import _arrival_triton as arrivals

    torch.manual_seed(0)
    builder = interpreting.interpreter_builder
    given = HyperCase(tokens=(2, 1), hidden=300, iters=2).given("cpu")
    expected = given.op(*given.tensors, *given.numbers)
    place = builder.set_grid_idx
    for order in (lambda i, n: n - 1 - i, lambda i, n: (3 * i + 1) % n):
        builder.set_grid_idx = lambda x, y, z, order=order: place(x, order(y, builder.grid_dim[1]), z)
        for got, value in zip(given.op(*given.tensors, *given.numbers), expected, strict=True):
            assert torch.equal(got, value)
    builder.set_grid_idx = place
    assert builder.grid_dim[:2] == (1, 10)
    assert not bool(arrivals.counters(torch.device("cpu"), arrivals.OF_STREAM).any())


def check_refusals() -> None:
    given = HyperCase(way="read").given("cpu")
    x, fn, *rest = given.tensors
    with pytest.raises(ValueError, match=r"fn \[24, 132\] torch\.float64 over streams .*expected \[24, 132\] torch\.float32"):
        given.op(x, fn.double(), *rest, *given.numbers)
    with pytest.raises(ValueError, match=r"got torch\.float64; use backend=\"torch\""):
        given.op(x.double(), fn, *rest, *given.numbers)
    given = HyperCase(way="write").given("cpu")
    with pytest.raises(ValueError, match=r"out \[2, 3, 33\] torch\.float16 to write into \[2, 3, 4, 33\]; expected"):
        given.op(*given.tensors[:3], given.tensors[3].half())
    x, weight, cos, sin, _ = RowCase().given("cpu").tensors
    with pytest.raises(ValueError, match="cos and sin of 8 channels over rows of 16: expected both or none"):
        norm_rotary.fused_norm_rotary(x, weight, cos, None, None, 1e-6, True, False)
    with pytest.raises(ValueError, match=r"cos \[2, 1, 4\] .*expected \[2, 3, 4\]"):
        norm_rotary.fused_norm_rotary(x, weight, cos[:, :1], sin, None, 1e-6, True, False)
    given = PoolCase().given("cpu")
    with pytest.raises(ValueError, match=r"projected \[2, 20, 63\]"):
        given.op(given.tensors[0][..., 1:], *given.tensors[1:], *given.numbers)
    queries, keys, _, weights, positions = ScoreCase().given("cpu").tensors
    with pytest.raises(ValueError, match=r"keys \[2, 17, 16\] torch\.float16 for queries"):
        index_scores.fused_index_scores(queries, keys.half(), None, weights, positions, 2)
    with pytest.raises(ValueError, match="keeps at most 2048 entries of a query, got 4000"):
        index_scores.fused_select(queries, keys, None, weights, positions, 2, 4000, 30)
    assert "at most 8 streams, got 9" in hyper_connection.refusal("triton", torch.device("cpu"), torch.float32, 9, 64)
    assert "at most 8192 wide, got 9000" in hyper_connection.refusal("triton", torch.device("cpu"), torch.float32, 4, 9000)
    assert "even and at most 512 wide, got 33" in pooling.refusal("triton", torch.device("cpu"), torch.float32, 33)
    assert "got 65 of 128" in index_scores.refusal("triton", torch.device("cpu"), torch.float32, 65, 128, 9)


@pytest.mark.parametrize("checked", [check_rows_of_parts, check_blind, check_extremes, check_views, check_arrivals, check_refusals])
def test_properties(interpreted, checked):
    interpreted(checked)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAR)
def test_far_addresses(interpreted, name: str):
    interpreted(check_far_addresses, name)


def test_triton_where_it_cannot_run():
    for module, sizes in ((hyper_connection, (4, 64)), (norm_rotary, (64,)), (pooling, (64,)), (index_scores, (8, 64, 5))):
        reason = module.refusal("triton", torch.device("cpu"), torch.bfloat16, *sizes)
        assert reason.startswith("Triton needs a CUDA device, and this is cpu")
        assert module.refusal("torch", torch.device("cpu"), torch.float64, *sizes) is None
    given = RowCase().given("cpu")
    with pytest.raises(ValueError, match=r'backend="triton": Triton needs a CUDA device.*use backend="torch"'):
        given.op(*given.tensors, *given.numbers)


# Bytes of shared memory that one program may take.
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
CAPABILITY = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
# Strides that are multiples of 16 in models of the published sizes.
ALIGNED = ("hidden", "x_t", "x_n", "x_r", "out_t", "query_b", "query_s", "key_b", "key_e", "projected_b", "projected_t")
FLOATS = ("comb", "post", "fn", "scale", "base", "partial", "square", "pre", "norm", "weight", "cos", "sin", "bias", "projected", "score")
TYPES = {"position_ptr": "*i64", "index_ptr": "*i64", "present_ptr": "*i1", "filled_ptr": "*i1", "valid_ptr": "*i1"}


def types_of(kernel, **changed: str) -> dict[str, str]:
    """Triton's type of each argument, for a model in bfloat16."""
    types = {}
    for name in kernel.arg_names:
        if not name.endswith("_ptr"):
            types[name] = "fp32" if name.endswith("eps") or name == "scale" else "i32"
        elif name in TYPES:
            types[name] = TYPES[name]
        else:
            types[name] = "*fp32" if any(word in name for word in FLOATS) else "*bf16"
    return types | changed


def compiled(arch: str, what: str):
    """(kernel, its options, types that differ) of one launch-table entry at a published model's sizes."""
    from dsv4.kernels import _hyper_connection_triton as hyper
    from dsv4.kernels import _index_scores_triton as scores
    from dsv4.kernels import _norm_rotary_triton as rows
    from dsv4.kernels import _pooling_triton as pools

    kind, *numbers = what.split()
    at = [int(number) for number in numbers if number.isdigit()]
    if kind in ("read", "write_read"):
        launch = (hyper.READ if kind == "read" else hyper.WRITE_READ)[arch][at[0]]
        options = hyper.read_options(launch, 4, 20, at[1], at[2], numbers[-1], writes=kind == "write_read", norms=True)
        return hyper.read_kernel, options, {"counter_ptr": "*i32"}
    if kind == "finish":
        return hyper.finish_kernel, hyper.finish_options(4, 20, at[0], True), {}
    if kind == "write":
        return hyper.write_kernel, hyper.write_options(hyper.WRITE[arch], 4), {}
    if kind == "rows":
        return rows.norm_rotary_kernel, rows.options(rows.ROWS[arch], at[0], at[1], True, True, False, True), {}
    if kind == "pool":
        return pools.pool_kernel, pools.options(pools.pick(arch, at[0]), at[1], 1 + (at[0] == 8), 64), {}
    if kind == "scores":
        coded = {"key_ptr": "*fp8e4nv"} if "fp8" in numbers else {}
        return scores.score_kernel, scores.score_options(scores.SCORES[arch][at[0]], 64, 128, bool(coded), False), coded
    choice = scores.CHOICES[arch][at[0]]
    types = {"entry_ptr": "*i32", "kept_entry_ptr": "*i32", "out_ptr": "*i64"}
    return scores.select_kernel, scores.select_options(choice, at[1], "listed" in numbers, "part" not in numbers), types


# What it is, and the tensor cores' instruction it has to use on sm_90, with how many of it: of a read, 4 streams by 3 products by one or
# two steps of 16 columns.
CODE = {
    **{f"{way} 0 {width} {few} last": ("mma.sync", 24) for way in ("read", "write_read") for width, few in ((4096, 1), (7168, 16))},
    "read 0 4096 1 whole": ("mma.sync", 24),
    "read 1 4096 64 left": ("wgmma.mma_async", 24),
    "read 1 4096 64 whole": ("wgmma.mma_async", 24),
    "read 1 7168 64 whole": ("wgmma.mma_async", 24),
    "write_read 0 4096 1 whole": ("mma.sync", 24),
    "write_read 1 4096 64 left": ("wgmma.mma_async", 12),
    "write_read 1 4096 64 whole": ("wgmma.mma_async", 12),
    "write_read 1 7168 64 whole": ("wgmma.mma_async", 12),
    "finish 4096": None,
    "finish 7168": None,
    "write": None,
    "rows 128 64": None,
    "rows 512 64": None,
    "rows 4096 0": None,
    "rows 7168 0": None,
    "pool 8 512": None,
    "pool 8 128": None,
    "pool 128 512": None,
    # A product of 64 or 128 entries with the heads of 1 or 2 queries, once: 128 channels, 16 deep.
    "scores 0": ("wgmma.mma_async", 8),
    "scores 0 fp8": ("wgmma.mma_async", 8),
    "scores 1": ("wgmma.mma_async", 8),
    "scores 1 fp8": ("wgmma.mma_async", 8),
    "select 0 512": None,
    "select 1 512": None,
    "select 1 1024 part": None,
    "select 2 512": None,
    "select 2 1024": None,
    "select 2 1024 part": None,
    "select 2 1024 part listed": None,
}
CI = {
    *("read 0 4096 1 last", "write_read 1 4096 64 whole", "finish 4096"),
    *("rows 512 64", "pool 8 512", "scores 1", "scores 1 fp8"),
}


@pytest.mark.parametrize(
    ("arch", "what"),
    [
        pytest.param(arch, what, marks=[] if arch == "sm_90" and what in CI else pytest.mark.slow, id=f"{arch} {what}")
        for arch in CAPABILITY
        for what in CODE
        # There is no FP8 to widen on sm_80.
        if not (arch == "sm_80" and "fp8" in what)
    ],
)
def test_compiled(arch: str, what: str):
    """Nothing spills, the tile fits, products are on tensor cores and issued once; the last to arrive sees what the others left."""
    kernel, options, changed = compiled(arch, what)
    found = resources(kernel, types_of(kernel, **changed), options, CAPABILITY[arch], aligned=ALIGNED)
    assert found.stack == 0
    assert found.shared <= SHARED[arch]
    assert found.tensor_memory <= 512
    assert found.complaints == ()
    assert what.endswith("last") == found.arrives
    if CODE[what] is not None:
        instruction, count = CODE[what]
        if arch == "sm_90":
            assert found.instructions[instruction] == count
        elif arch == "sm_80":
            assert found.instructions["mma.sync"] > 0
        else:
            assert found.instructions["tcgen05.mma"] + found.instructions["mma.sync"] > 0
        assert found.instructions["cp.async.c"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_native(name: str):
    check(name, "cuda", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in SELECTED if name != "ties"])
def test_native_selection(name: str):
    case, k = SELECTED[name]
    SELECTED[name] = (replace(case, dtype=torch.bfloat16), k)
    check_selected(name, "cuda")
