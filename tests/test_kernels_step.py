"""The device code of a decoding step around its attention: rows normed, turned and written into their ring, projections kept and pooled.
Numbers in Triton's interpreter and, where there is a CUDA device, natively; what it needs of each architecture, compiled.
"""

import sys
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dsv4.kernels import pooling, step_rows
from dsv4.kernels.norm_rotary import rms_norm, rotate
from dsv4.testing import assert_close
from dsv4.testing_kernels import interpreter, resources

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

LIMIT = {torch.float32: "float32 op", torch.bfloat16: "bfloat16 device code", torch.float16: "bfloat16 device code"}


@pytest.fixture(scope="module")
def interpreted():
    with interpreter(sys.modules[__name__]) as run:
        yield run


@dataclass(frozen=True, kw_only=True)
class Rows:
    """`past`: tokens of each row before the step; a row in `resting` takes none."""

    past: tuple[int, ...]
    resting: tuple[int, ...] = ()
    tokens: int = 1
    columns: int = 9
    latent: int = 24
    heads: int = 3
    index_heads: int = 5
    width: int = 16
    index_width: int = 12
    turned: int = 8
    dtype: torch.dtype = torch.float32

    def counts(self, device: str) -> tuple[Tensor, Tensor]:
        after = [n + (0 if r in self.resting else self.tokens) for r, n in enumerate(self.past)]
        past, after = (torch.tensor(n, dtype=torch.int64, device=device) for n in (self.past, after))
        return past, after

    def angles(self, device: str) -> tuple[Tensor, Tensor]:
        angles = torch.randn(len(self.past), self.tokens, self.turned // 2, device=device)
        return angles.cos(), angles.sin()

    def draw(self, *sizes: int, device: str) -> Tensor:
        return torch.randn(len(self.past), *sizes).to(self.dtype).to(device)


ROWS = {
    "one token": Rows(past=(7, 0, 30)),
    "a ring that wraps within the step": Rows(past=(7, 16, 3), tokens=4, columns=9),
    "a row that rests": Rows(past=(5, 8), resting=(1,), tokens=2),
    "as many columns as tokens": Rows(past=(4,), tokens=3, columns=3),
    "odd widths": Rows(past=(2, 5), latent=33, width=6, index_width=10, turned=6, heads=7, index_heads=1),
    "many heads": Rows(past=(40,), heads=40, index_heads=33, latent=1),
    "no rotary": Rows(past=(1,), turned=0),
    "no rows": Rows(past=()),
    "published widths": Rows(past=(130,), latent=1536, width=512, index_width=128, turned=64, columns=128, heads=9),
    "bfloat16": Rows(past=(9, 2), width=64, index_width=32, dtype=torch.bfloat16),
    "float16": Rows(past=(9,), tokens=2, width=64, dtype=torch.float16),
}


def check_rows(name: str, device: str = "cpu", dtype: torch.dtype | None = None) -> None:
    """Against the definitions in float64; no column of the ring but those of the step's tokens changes a bit."""
    torch.manual_seed(0)
    case = ROWS[name] if dtype is None else replace(ROWS[name], dtype=dtype)
    (past, after), (cos, sin), limit = case.counts(device), case.angles(device), LIMIT[case.dtype]
    b, s = len(case.past), case.tokens
    latent, key = case.draw(s, case.latent, device=device), case.draw(s, case.width, device=device)
    weights = [1 + 0.2 * torch.randn(size, device=device) for size in (case.latent, case.width)]
    # Columns that nobody wrote hold NaN, and what is not to be read is not.
    ring = torch.full((b, case.columns, case.width), torch.nan, dtype=case.dtype, device=device)
    normed = step_rows.latent_and_key(latent, key, ring, *weights, cos, sin, past, after, 1e-6, 1e-5)
    assert_close(normed, rms_norm(latent.double(), weights[0].double(), 1e-6), limit, "latent")
    keys = rotate(rms_norm(key.double(), weights[1].double(), 1e-5), cos.double(), sin.double())
    written = torch.zeros(b, case.columns, dtype=torch.bool)
    for r in range(b):
        for i in range(0 if r in case.resting else s):
            column = (case.past[r] + i) % case.columns
            written[r, column] = True
            assert_close(ring[r, column], keys[r, i], limit, f"key {r} {i}")
    assert bool(ring.cpu()[~written].isnan().all())
    plain = torch.full_like(ring, torch.nan)
    again = step_rows.latent_and_key_definition(latent, key, plain, *weights, cos, sin, past, after, 1e-6, 1e-5)
    assert_close(normed, again, limit, "definition")
    assert_close(ring.nan_to_num(), plain.nan_to_num(), limit, "definition's ring")

    queries = case.draw(s, case.heads, case.width, device=device)
    index_queries = case.draw(s, case.index_heads, case.index_width, device=device)
    found = step_rows.turned_queries(queries, index_queries, cos, sin, 1e-6)
    exact = step_rows.turned_queries_definition(queries.double(), index_queries.double(), cos.double(), sin.double(), 1e-6)
    for got, expected in zip(found, exact, strict=True):
        assert got.dtype == case.dtype
        assert_close(got, expected, limit, name)


@pytest.mark.parametrize("name", ROWS)
def test_rows(interpreted, name: str):
    interpreted(check_rows, name)


@dataclass(frozen=True, kw_only=True)
class Pools:
    """`past`: tokens of each row before the step; a row in `resting` takes none. `series`: 2 overlapping windows, 1 not. `columns`: 0 for
    the fewest that there may be. `room`: columns of entries at most.
    """

    past: tuple[int, ...]
    resting: tuple[int, ...] = ()
    tokens: int = 1
    rate: int = 4
    series: int = 2
    width: int = 16
    turned: int = 8
    columns: int = 0
    room: int = 99
    dtype: torch.dtype = torch.float32

    @property
    def touched(self) -> int:
        return 1 + (self.tokens + self.rate - 2) // self.rate


POOLS = {
    "a window closes, another does not": Pools(past=(3, 6, 11)),
    "the first window": Pools(past=(3, 0), rate=4),
    "a step that closes several": Pools(past=(5, 2, 8), tokens=9),
    "a step that ends where a window does": Pools(past=(4, 3), tokens=4),
    "rows that rest": Pools(past=(3, 7, 15), resting=(0, 2)),
    "one series": Pools(past=(2, 5, 9), rate=3, series=1, width=20, turned=4),
    "windows over tiles": Pools(past=(18, 37), rate=19, series=1, turned=16),
    "windows of one token": Pools(past=(0, 4), rate=1, series=1, tokens=2, width=2, turned=2),
    "overlapping windows of one token": Pools(past=(0, 4), rate=1, tokens=3, width=6, turned=0),
    "a long ring": Pools(past=(11, 3), columns=40),
    "no rows": Pools(past=()),
    "entries without a column": Pools(past=(11, 2), tokens=5, room=2),
    "published widths": Pools(past=(7,), width=512, turned=64),
    "128 tokens": Pools(past=(127, 60), rate=128, series=1, width=32),
    "bfloat16": Pools(past=(7, 3), tokens=2, dtype=torch.bfloat16),
    "float16": Pools(past=(7,), dtype=torch.float16),
}


def pool_arguments(case: Pools, device: str = "cpu") -> dict:
    """What the row was told token by token, the last ones standing in the ring; entries hold NaN."""
    b, s, c, d = len(case.past), case.tokens, case.series, case.width
    columns = case.columns or s + c * case.rate - 1
    longest = max(case.past, default=0) + s
    told = torch.randn(b, longest, 2 * c * d)
    ring = torch.full((b, columns, 2 * c * d), torch.nan)
    for r, n in enumerate(case.past):
        for p in range(max(0, n - columns), n):
            ring[r, p % columns] = told[r, p]
    past = torch.tensor(case.past, dtype=torch.int64)
    after = past + torch.tensor([0 if r in case.resting else s for r in range(b)], dtype=torch.int64)
    new = torch.stack([told[r, n : n + s] for r, n in enumerate(case.past)]) if b else told[:, :s]
    angles = torch.randn(b, case.touched, case.turned // 2)
    given = {
        "projected": new,
        "ring": ring,
        "entries": torch.full((b, min(longest // case.rate + 3, case.room), d), torch.nan, dtype=case.dtype),
        "bias": torch.randn(case.rate, c * d),
        "weight": 1 + 0.2 * torch.randn(d),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "past": past,
        "after": after,
        "told": told,
    }
    return {k: v.to(device) for k, v in given.items()}


def closed(case: Pools, given: dict, r: int, j: int, e: int) -> Tensor:
    """Entry j of row r, the e-th that the step may close, out of all tokens of the row, in float64."""
    rate, c, d = case.rate, case.series, case.width
    told, bias = given["told"][r].double().cpu(), given["bias"].double().cpu()
    kv, gates = [], []
    for half in range(c):
        for i in range(rate):
            p = (j + half - (c - 1)) * rate + i
            if p >= 0:
                kv.append(told[p, half * d : (half + 1) * d])
                gates.append(told[p, (c + half) * d : (c + half + 1) * d] + bias[i, half * d : (half + 1) * d])
    pooled = (torch.stack(gates).softmax(0) * torch.stack(kv)).sum(0)
    normed = rms_norm(pooled, given["weight"].double().cpu(), 1e-6)
    return rotate(normed, given["cos"][r, e].double().cpu(), given["sin"][r, e].double().cpu())


def check_pools(name: str, device: str = "cpu", dtype: torch.dtype | None = None) -> None:
    """Entries that close against single numbers; no other column of entries or ring changes a bit; the definition does the same."""
    torch.manual_seed(0)
    case = POOLS[name] if dtype is None else replace(POOLS[name], dtype=dtype)
    given = pool_arguments(case, device)
    told = given.pop("told")
    ring, entries, limit = given["ring"].clone(), given["entries"].clone(), LIMIT[case.dtype]
    plain = given | {"ring": ring.clone(), "entries": entries.clone()}
    expected_ring = ring.clone()
    pooling.pool_step(*given.values(), 1e-6)
    pooling.pool_step_definition(*plain.values(), 1e-6)
    for r, n in enumerate(case.past):
        takes = 0 if r in case.resting else case.tokens
        for i in range(takes):
            expected_ring[r, (n + i) % ring.shape[1]] = told[r, n + i]
        made = range(n // case.rate, (n + takes) // case.rate)
        for e, j in enumerate(j for j in made if j < entries.shape[1]):
            for found in (given["entries"], plain["entries"]):
                assert_close(found[r, j].cpu(), closed(case, given | {"told": told}, r, j, e), limit, f"entry {j} of row {r}")
        others = [j for j in range(entries.shape[1]) if j not in made]
        for found in (given["entries"], plain["entries"]):
            assert bool(found[r, others].isnan().all())
    for found in (given["ring"], plain["ring"]):
        assert torch.equal(found.nan_to_num(7.0), expected_ring.nan_to_num(7.0))


@pytest.mark.parametrize("name", POOLS)
def test_pools(interpreted, name: str):
    interpreted(check_pools, name)


def check_registration() -> None:
    """Schema (what is written is declared), fake tensors, tracing."""
    torch.manual_seed(0)
    case = Rows(past=(7, 2), tokens=2)
    (past, after), (cos, sin) = case.counts("cpu"), case.angles("cpu")
    ring = torch.zeros(2, 9, 16)
    rows = (case.draw(2, 24, device="cpu"), case.draw(2, 16, device="cpu"), ring, torch.ones(24), torch.ones(16), cos, sin, past, after)
    torch.library.opcheck(step_rows.latent_and_key, (*rows, 1e-6, 1e-6))
    queries = case.draw(2, 3, 16, device="cpu"), case.draw(2, 5, 12, device="cpu")
    torch.library.opcheck(step_rows.turned_queries, (*queries, cos, sin, 1e-6))
    given = pool_arguments(POOLS["a step that closes several"])
    del given["told"]
    torch.library.opcheck(pooling.pool_step, (*(t.nan_to_num() if t.is_floating_point() else t for t in given.values()), 1e-6))


def check_views() -> None:
    """Queries out of a wider product, rows at odd addresses, rings and entries that are a part of larger buffers."""
    torch.manual_seed(0)
    case = Rows(past=(7, 2), tokens=2)
    (past, after), (cos, sin) = case.counts("cpu"), case.angles("cpu")
    wide = case.draw(2, 48 + 60 + 3, device="cpu")
    queries, index_queries = wide[..., :48].unflatten(-1, (3, 16)), wide[..., 49:109].unflatten(-1, (5, 12))
    found = step_rows.turned_queries(queries, index_queries, cos, sin, 1e-6)
    dense = step_rows.turned_queries(queries.contiguous(), index_queries.contiguous(), cos, sin, 1e-6)
    assert all(torch.equal(a, b) for a, b in zip(found, dense, strict=True))
    room, ring = torch.zeros(2, 20, 16), torch.zeros(2, 9, 16)
    both = case.draw(2, 41, device="cpu")
    latent, key, rest = both[..., :24], both[..., 25:41], (torch.ones(24), torch.ones(16), cos, sin, past, after, 1e-6, 1e-6)
    assert torch.equal(
        step_rows.latent_and_key(latent, key, room[:, 5:14], *rest),
        step_rows.latent_and_key(latent.contiguous(), key.contiguous(), ring, *rest),
    )
    assert torch.equal(room[:, 5:14], ring)
    assert int(room.count_nonzero()) == int(ring.count_nonzero())
    given = pool_arguments(POOLS["a step that closes several"])
    del given["told"]
    spacious = {name: torch.full((3, given[name].shape[1] + 7, given[name].shape[2]), torch.nan) for name in ("ring", "entries")}
    parts = {name: t[:, 3 : 3 + given[name].shape[1]].copy_(given[name]) for name, t in spacious.items()}
    pooling.pool_step(*(given | parts).values(), 1e-6)
    pooling.pool_step(*given.values(), 1e-6)
    for name, part in parts.items():
        assert torch.equal(part.nan_to_num(7.0), given[name].nan_to_num(7.0))


def check_refusals() -> None:
    torch.manual_seed(0)
    case = Rows(past=(7, 2), tokens=2)
    (past, after), (cos, sin) = case.counts("cpu"), case.angles("cpu")
    rows = {
        "latent": case.draw(2, 24, device="cpu"),
        "key": case.draw(2, 16, device="cpu"),
        "ring": torch.zeros(2, 9, 16),
        "latent_weight": torch.ones(24),
        "key_weight": torch.ones(16),
        "cos": cos,
        "sin": sin,
        "past": past,
        "after": after,
    }
    for change, message in (
        ({"ring": torch.zeros(2, 9, 12)}, r"ring \[2, 9, 12\] torch.float32 over keys \[2, 2, 16\]; expected \[2, 9, 16\]"),
        ({"ring": torch.zeros(2, 1, 16)}, "expected a column for each"),
        ({"ring": torch.zeros(2, 16, 9).transpose(1, 2)}, "dense rows"),
        ({"latent": rows["latent"].half()}, r"latent .* torch.float16"),
        ({"past": past.int()}, r"past \[2\] torch.int32"),
        ({"cos": cos.repeat(1, 1, 3)}, "cos and sin of 24 channels over rows of 16"),
    ):
        with pytest.raises(ValueError, match=message):
            step_rows.latent_and_key(*(rows | change).values(), 1e-6, 1e-6)
    with pytest.raises(ValueError, match="index_queries"):
        step_rows.turned_queries(torch.zeros(2, 2, 3, 16), torch.zeros(2, 1, 3, 12), cos, sin, 1e-6)
    given = pool_arguments(Pools(past=(3, 6)))
    del given["told"]
    for change, message in (
        ({"projected": given["projected"][..., 1:]}, r"projected \[2, 1, 63\]"),
        ({"ring": given["ring"].double()}, r"ring .* torch.float64"),
        ({"entries": torch.zeros(2, 5, 12)}, r"entries \[2, 5, 12\]"),
        ({"cos": given["cos"].repeat(1, 2, 1)}, r"cos \[2, 2, 4\]"),
        ({"entries": torch.zeros(2, 16, 5).transpose(1, 2)}, "expected dense rows"),
        ({"entries": torch.zeros(2, 5, 16, dtype=torch.float64)}, "its entries are"),
    ):
        with pytest.raises(ValueError, match=message):
            pooling.pool_step(*(given | change).values(), 1e-6)


@pytest.mark.parametrize("checked", [check_registration, check_views, check_refusals])
def test_properties(interpreted, checked):
    interpreted(checked)


# What each architecture needs.

SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
CAPABILITY = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
ALIGNED = ("latent_t", "key_t", "ring_b", "ring_r", "query_t", "query_n", "index_t", "index_n", "new_t", "entries_b", "entries_e")
FLOATS = ("weight", "cos", "sin", "bias", "new_ptr")
CODE = ("rows 1024", "rows 1536", "queries", "pool 4 512", "pool 4 128", "pool 128 512")
CI = {"rows 1536", "queries", "pool 4 512", "pool 128 512"}


def compiled(arch: str, what: str):
    """(kernel, its options, pointers to float32) at a published model's sizes."""
    from dsv4.kernels import _pooling_triton as pools
    from dsv4.kernels import _step_rows_triton as rows

    kind, *numbers = what.split()
    at = [int(number) for number in numbers]
    if kind == "rows":
        return rows.latent_and_key_kernel, rows.latent_and_key_options(rows.ROWS[arch], at[0], 512, 64), FLOATS
    if kind == "queries":
        return rows.turned_queries_kernel, rows.turned_queries_options(rows.ROWS[arch], 512, 128, 64), FLOATS
    series = 1 + (at[0] == 4)
    return pools.step_kernel, pools.step_options(pools.pick(arch, at[0] * series), at[1], series, 64), (*FLOATS, "ring_ptr")


@pytest.mark.parametrize(
    ("arch", "what"),
    [
        pytest.param(arch, what, marks=[] if arch == "sm_90" and what in CI else pytest.mark.slow, id=f"{arch} {what}")
        for arch in CAPABILITY
        for what in CODE
    ],
)
def test_compiled(arch: str, what: str):
    """Nothing spills, the tile fits."""
    kernel, options, floats = compiled(arch, what)
    types = {}
    for name in kernel.arg_names:
        if not name.endswith("_ptr"):
            types[name] = "fp32" if name.endswith("eps") else "i32"
        elif name in ("past_ptr", "after_ptr"):
            types[name] = "*i64"
        else:
            types[name] = "*fp32" if any(word in name for word in floats) else "*bf16"
    found = resources(kernel, types, options, CAPABILITY[arch], aligned=ALIGNED)
    assert found.stack == 0
    assert found.shared <= SHARED[arch]
    assert found.complaints == ()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROWS)
def test_native_rows(name: str):
    check_rows(name, "cuda", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", POOLS)
def test_native_pools(name: str):
    check_pools(name, "cuda", torch.bfloat16)
