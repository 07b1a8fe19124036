"""Attention of a decoding step: a definition written query by query, the plain torch ways, and the device code in Triton's interpreter,
natively where there is a CUDA device, and compiled for devices that are not here.
"""

import itertools
import sys
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dsv4.kernels.decode_attention import (
    decode_attention,
    decode_attention_reference,
    fused_decode_attention,
    ring_attention,
    ring_attention_reference,
    ring_positions,
)
from dsv4.kernels.norm_rotary import rotate_back
from dsv4.kernels.reach import Reach
from dsv4.kernels.sparse_attention import sparse_attention, sparse_attention_reference
from dsv4.testing import assert_close
from dsv4.testing_kernels import interpreter, resources

FLOATS = ("queries", "tokens", "entries", "sinks")
LIMIT = {torch.float32: "float32 op", torch.bfloat16: "bfloat16 device code", torch.float16: "bfloat16 device code"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of one call.

    Attributes:
        lasts: position of each row's last query, -1 for a row without tokens.
        queries: s; the first ones of a row with fewer tokens are at padding.
        slots: R; entries: E, 0 for none; kept: t, None for all closed entries.
    """

    lasts: tuple[int, ...]
    queries: int = 1
    slots: int
    window: int
    entries: int = 0
    kept: int | None = None
    rate: int = 1
    heads: int = 3
    width: int = 16
    dtype: torch.dtype = torch.float32

    def arguments(self, device: str = "cpu") -> dict:
        """Slots are in no order; those without a token, and entries not closed for a row's last query, hold NaN; a fifth of the selection
        is -1.
        """
        b, s, slots, width = len(self.lasts), self.queries, self.slots, self.width
        queries = torch.tensor([[max(p - s + 1 + i, -1) for i in range(s)] for p in self.lasts])
        held = torch.full((b, slots), -1)
        for row, p in zip(held, self.lasts, strict=True):
            tokens = torch.arange(max(p + 1 - slots, 0), p + 1)
            row[torch.randperm(slots)[: len(tokens)]] = tokens
        tokens, entries = torch.randn(b, slots, width), torch.randn(b, self.entries, width)
        tokens[held < 0] = torch.nan
        closed = (torch.tensor(self.lasts) + 1) // self.rate
        entries[torch.arange(self.entries) >= closed[:, None]] = torch.nan
        selection = None
        if self.kept is not None:
            selection = torch.rand(b, s, self.entries).argsort(-1)[..., : self.kept]
            selection = selection.masked_fill(torch.rand(selection.shape) < 0.2, -1).to(device)
        return {
            "queries": torch.randn(b, s, self.heads, width).to(self.dtype).to(device),
            "tokens": tokens.to(self.dtype).to(device),
            "entries": entries.to(self.dtype).to(device) if self.entries else None,
            "sinks": torch.randn(self.heads).to(device),
            "selection": selection,
            "query_positions": queries.to(device),
            "token_positions": held.to(device),
            "window": self.window,
            "rate": self.rate,
            "scale": width**-0.5,
        }


CASES = {
    "a wrapped ring": Case(lasts=(100, 7), slots=9, window=9, heads=2, width=5),
    "more slots than the window": Case(lasts=(50, 3, 20), slots=40, window=6),
    "fewer slots than the window": Case(lasts=(50, 3), slots=11, window=30),
    "window beyond the sequence": Case(lasts=(4, 0), slots=300, window=300),
    "empty row": Case(lasts=(-1, 9), slots=5, window=4, entries=6, kept=3, rate=2),
    "no slots": Case(lasts=(-1, 3), slots=0, window=2, entries=4, rate=2),
    "one slot": Case(lasts=(0, 12), slots=1, window=1),
    "selected": Case(lasts=(40, 3, 17), slots=20, window=16, entries=30, kept=19, rate=2),
    "dense": Case(lasts=(75, 2), slots=8, window=4, entries=60, rate=2, width=20),
    "one entry": Case(lasts=(5,), slots=4, window=2, entries=1, kept=1, rate=3),
    "one entry, not closed": Case(lasts=(1,), slots=4, window=2, entries=1, rate=3),
    "few queries": Case(lasts=(30, 2, 64), queries=4, slots=12, window=8, entries=40, kept=9, rate=2),
    "few queries, dense": Case(lasts=(30, 2), queries=8, slots=16, window=8, entries=33, rate=3, heads=1),
    "many entries, few closed": Case(lasts=(20,), slots=4, window=4, entries=500, rate=4),
    "17 heads": Case(lasts=(9,), slots=7, window=7, entries=3, kept=2, rate=2, heads=17, width=1),
    "130 heads": Case(lasts=(99,), slots=70, window=70, heads=130, width=32),
    "width 512": Case(lasts=(300,), slots=128, window=128, entries=80, kept=50, rate=4, heads=64, width=512),
    "width 512, few heads": Case(lasts=(90,), slots=32, window=32, entries=22, kept=15, rate=4, heads=5, width=512),
    "bfloat16": Case(lasts=(60, 5), queries=2, slots=20, window=12, entries=20, kept=9, rate=2, width=64, dtype=torch.bfloat16),
    "float16": Case(lasts=(8,), slots=6, window=6, entries=3, rate=2, width=64, dtype=torch.float16),
}


def definition(queries, tokens, entries, sinks, selection, query_positions, token_positions, window, rate, scale) -> tuple[Tensor, Tensor]:
    """One query and one key at a time, in float64."""
    out, lse = torch.zeros_like(queries, dtype=torch.float64), torch.full(queries.shape[:3], -torch.inf, dtype=torch.float64)
    for b, s in itertools.product(*map(range, queries.shape[:2])):
        p = query_positions[b, s].item()
        keys = [tokens[b, r] for r, q in enumerate(token_positions[b].tolist()) if q >= 0 and p - window < q <= p]
        if entries is not None:
            listed = range(entries.shape[1]) if selection is None else selection[b, s].tolist()
            keys += [entries[b, j] for j in listed if j >= 0 and j * rate + rate - 1 <= p]
        if not keys:
            continue
        keys = torch.stack(keys).double()
        for n, q in enumerate(queries[b, s].double()):
            scores = (keys @ q) * scale
            lse[b, s, n] = scores.logsumexp(0)
            total = torch.logaddexp(lse[b, s, n], sinks[n].double())
            out[b, s, n] = (scores - total).exp() @ keys
    return out, lse


@pytest.fixture(scope="module")
def interpreted():
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    with interpreter(sys.modules[__name__]) as run:
        yield run


@pytest.mark.parametrize("attend", [decode_attention_reference, decode_attention], ids=["reference", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_plain_torch(name: str, attend):
    case = CASES[name]
    given = case.arguments()
    limit = "float32 op" if case.dtype == torch.float32 else "bfloat16 rounding"
    for found, expected, what in zip(attend(**given), definition(**given), ("output", "log-sum-exp"), strict=True):
        assert_close(found, expected, limit, what)


def test_reference_in_float64():
    given = CASES["few queries"].arguments()
    wide = {k: given[k].double() for k in FLOATS}
    for found, expected in zip(decode_attention_reference(**given | wide), definition(**given | wide), strict=True):
        assert_close(found, expected, "float64")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": torch.zeros(3, 16)}, r"expected \[b s N D\] and \[b R D\]"),
        ({"tokens": torch.zeros(3, 20, 8)}, r"tokens \[3, 20, 8\] with queries \[3 1 3 16\]; expected \[3, 20, 16\]"),
        ({"entries": torch.zeros(2, 30, 16)}, r"entries \[2, 30, 16\]"),
        ({"entries": torch.zeros(3, 30, 16).half()}, "expected the dtype of the queries, torch.float32"),
        ({"sinks": torch.zeros(4)}, r"sinks \[4\]"),
        ({"selection": torch.zeros(3, 2, 5).long()}, r"selection \[3, 2, 5\]"),
        ({"selection": torch.zeros(3, 1, 5).int()}, "selection is torch.int32; expected torch.int64"),
        ({"query_positions": torch.zeros(3, 2).long()}, "query_positions"),
        ({"token_positions": torch.zeros(3, 4).long()}, "token_positions"),
        ({"entries": None}, "a selection without entries"),
        ({"window": 0}, "window=0, rate=2; expected at least 1"),
        ({"rate": 0}, "window=16, rate=0"),
        ({"backend": "fast"}, "backend='fast': expected one of"),
        ({"backend": "triton"}, "Triton needs a CUDA device, and this is cpu"),
    ],
)
def test_arguments_that_do_not_fit(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        decode_attention(**CASES["selected"].arguments() | change)


def check(case: Case, device: str = "cpu") -> None:
    """Output and log-sum-exp against the definition, of all keys at once and of shares; gradients against the reference's in float64."""
    from dsv4.kernels import _decode_attention_triton as device_code

    torch.manual_seed(0)
    given = case.arguments(device)
    limit = LIMIT[case.dtype]
    leaves = [k for k in FLOATS if given[k] is not None]
    fused = given | {k: given[k].detach().requires_grad_() for k in leaves}
    exact = given | {k: given[k].detach().double().requires_grad_() for k in leaves}
    out, lse = decode_attention(**fused, backend="triton")
    expected, expected_lse = definition(**{k: v.cpu() if isinstance(v, Tensor) else v for k, v in given.items()})
    results = [("op", (out, lse))]
    for splits in (1, 3):
        launch, _ = device_code.choose(out.shape[0] * out.shape[1], case.heads, case.slots, out.device)
        with patch.object(device_code, "choose", lambda *_, given=(launch, splits): given):
            results.append((f"{splits} shares", device_code.forward(*given.values())))
    for name, found in results:
        assert_close(found[0].cpu(), expected, limit, f"{name}, output")
        assert_close(found[1].cpu(), expected_lse, limit, f"{name}, log-sum-exp")
    weight = torch.linspace(-1, 1, out.numel(), device=device).view(out.shape)
    results = [
        torch.autograd.grad((x * weight).sum(), [a[k] for k in leaves])
        for x, a in ((out, fused), (decode_attention_reference(**exact)[0], exact))
    ]
    for name, grad, expected_grad in zip(leaves, *results, strict=True):
        assert_close(grad, expected_grad, f"{limit} gradient", f"gradient of {name}")


def but_large(names) -> list:
    """Published widths with as many heads take seconds in the interpreter."""
    return [pytest.param(name, marks=pytest.mark.slow) if name == "width 512" else name for name in names]


@pytest.mark.parametrize("name", but_large(CASES))
def test_numbers(interpreted, name: str):
    interpreted(check, CASES[name])


# A ring in order: it holds a window and the step's queries, or as many tokens as a row has.
RINGS = {
    "a wrapped ring": Case(lasts=(100, 7), slots=9, window=9, heads=2, width=6),
    "more slots than the window": Case(lasts=(50, 3, 20), slots=40, window=6),
    "a ring of the whole row": Case(lasts=(50, 3), slots=51, window=200),
    "several queries, wrapped": Case(lasts=(100, 3, 41), queries=5, slots=12, window=8, entries=40, kept=9, rate=2),
    "empty row": Case(lasts=(-1, 9), slots=5, window=4, entries=6, kept=3, rate=2),
    "first tokens": Case(lasts=(1, 0, 2), queries=3, slots=8, window=6, entries=3, rate=2),
    "one slot": Case(lasts=(0, 12), slots=1, window=1, width=2),
    "dense": Case(lasts=(75, 2), slots=8, window=4, entries=60, rate=2, width=20),
    "130 heads": Case(lasts=(99,), slots=70, window=70, heads=130, width=32),
    "width 512": Case(lasts=(300,), slots=200, window=128, entries=80, kept=50, rate=4, heads=64, width=512),
    "width 512, few heads": Case(lasts=(90,), slots=50, window=32, entries=22, kept=15, rate=4, heads=5, width=512),
    "bfloat16": Case(lasts=(60, 5), queries=2, slots=20, window=12, entries=20, kept=9, rate=2, width=64, dtype=torch.bfloat16),
    "float16": Case(lasts=(8,), slots=6, window=6, entries=3, rate=2, width=64, dtype=torch.float16),
}


def ring_arguments(case: Case, device: str = "cpu") -> dict:
    """As `Case.arguments`, with the tokens in order and an angle for each query; slots that no query sees hold NaN."""
    given = case.arguments(device)
    b, s, slots, width = len(case.lasts), case.queries, case.slots, case.width
    places = torch.full((b, slots), -1)
    for row, last in zip(places, case.lasts, strict=True):
        held = torch.arange(max(last + 1 - slots, 0), last + 1)
        row[held % slots] = held
    assert torch.equal(ring_positions(given["query_positions"].cpu(), slots), places)
    tokens = torch.randn(b, slots, width)
    first = torch.tensor(case.lasts).unsqueeze(1) - s + 2 - case.window
    tokens[(places < 0) | (places < first)] = torch.nan
    angles = torch.randn(b, s, min(width, 8) // 2, device=device)
    del given["token_positions"]
    more = {"tokens": tokens.to(case.dtype).to(device), "places": places.to(device), "cos": angles.cos(), "sin": angles.sin()}
    return given | more


def check_ring(name: str, device: str = "cpu", dtype: torch.dtype | None = None) -> None:
    """Against the definition over what the ring holds, turned back; in one share and in several; whatever lies in front."""
    from dsv4.kernels import _decode_attention_triton as device_code

    torch.manual_seed(0)
    case = RINGS[name] if dtype is None else replace(RINGS[name], dtype=dtype)
    given = ring_arguments(case, device)
    places, cos, sin = (given.pop(key) for key in ("places", "cos", "sin"))
    held = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in given.items()}
    expected, _ = definition(**held | {"token_positions": places.cpu()})
    expected = rotate_back(expected, *(angle.cpu().double().unsqueeze(2) for angle in (cos, sin)))
    *tensors, window, rate, scale = given.values()
    arguments = (*tensors, cos, sin, window, rate, scale)
    reference = ring_attention_reference(*(t.nan_to_num() if t is given["tokens"] else t for t in arguments))
    assert_close(reference.cpu(), expected, "float32 op" if case.dtype == torch.float32 else "bfloat16 sum", "reference")
    results = [ring_attention(*arguments)]
    for splits in (1, 3):
        launch, _ = device_code.choose(len(case.lasts) * case.queries, case.heads, case.window, cos.device)
        with patch.object(device_code, "choose", lambda *_, given=(launch, splits): given):
            results.append(device_code.ring(*arguments))
    for found in results:
        assert_close(found.cpu(), expected, LIMIT[case.dtype], name)


@pytest.mark.parametrize("name", but_large(RINGS))
def test_ring(interpreted, name: str):
    interpreted(check_ring, name)


def check_ring_op() -> None:
    """Registration, tracing; a long ring asks for no more programs than its window; what does not fit."""
    from dsv4.kernels import _decode_attention_triton as device_code

    given = ring_arguments(RINGS["several queries, wrapped"])
    del given["places"]
    *tensors, window, rate, scale, cos, sin = (given[k] for k in given if k not in ("tokens", "entries"))
    queries, sinks, selection, positions = tensors
    rows = (queries, given["tokens"].nan_to_num(), given["entries"].nan_to_num(), sinks, selection, positions)
    torch.library.opcheck(ring_attention, (*rows, cos, sin, window, rate, scale))
    long = torch.cat((rows[1], torch.zeros(3, 5000, 16)), dim=1)
    with patch.object(device_code, "choose", wraps=device_code.choose) as chosen:
        ring_attention(queries, long, *rows[2:], cos, sin, window, rate, scale)
    assert chosen.call_args.args[2] == window + selection.shape[2]
    for change, message in (
        ((cos[:, :1], sin), r"cos \[3, 1, 4\] torch.float32 for heads of 16; expected \[3 5 turned/2\]"),
        ((cos, sin.double()), r"sin \[3, 5, 4\] torch.float64"),
        ((cos.repeat(1, 1, 3), sin), r"cos \[3, 5, 12\]"),
    ):
        with pytest.raises(ValueError, match=message):
            ring_attention(*rows, *change, window, rate, scale)
    with pytest.raises(ValueError, match=r"tokens \[3, 12, 8\] with queries"):
        ring_attention(queries, rows[1][..., :8], *rows[2:], cos, sin, window, rate, scale)


def check_shares() -> None:
    """However many programs share the keys: one, few, more than there are tiles; twice the same, to the last bit."""
    from dsv4.kernels import _decode_attention_triton as device_code

    cases = {name: CASES[name] for name in ("dense", "empty row")}
    for name, case in (cases | {"few queries": replace(CASES["few queries"], lasts=(30, 2), queries=2)}).items():
        given = case.arguments()
        expected = definition(**given)
        for splits in (2, 17):
            with patch.object(device_code, "choose", lambda *_, n=splits: (device_code.NARROW["interpreter"][0], n)):
                first, again = (fused_decode_attention(*given.values()) for _ in range(2))
            for found, same, value in zip(first, again, expected, strict=True):
                assert_close(found, value, "float32 op", f"{name}, {splits} shares")
                assert torch.equal(found, same)


def check_choices() -> None:
    """On a device of 132 processors: tokens, heads, keys -> keys of a tile, shares."""
    from dsv4.kernels import _decode_attention_triton as device_code

    expected = {
        (1, 64, 640): (32, 20),
        (1, 64, 128): (32, 1),
        (1, 128, 1152): (32, 36),
        (32, 64, 640): (64, 4),
        (128, 64, 640): (64, 1),
        (148, 64, 640): (64, 2),
        (512, 64, 640): (64, 1),
        (1, 16, 640): (32, 20),
        (4, 64, 1 << 16): (64, 32),
    }
    with patch.multiple(device_code, architecture=lambda _: "sm_90", processors=lambda _: 132):
        for sizes, (keys, splits) in expected.items():
            launch, found = device_code.choose.__wrapped__(*sizes, torch.device("cuda"))
            assert (launch.keys, found) == (keys, splits), sizes


def check_blind() -> None:
    """Nobody sees anything, with sinks and without."""
    case = Case(lasts=(-1, -1), queries=2, slots=40, window=4, entries=50, kept=20)
    for sink in (0.0, -torch.inf):
        given = case.arguments() | {"sinks": torch.full((case.heads,), sink)}
        for more in ({}, {"selection": None}):
            out, lse = decode_attention(**given | more, backend="triton")
            assert torch.equal(out, torch.zeros_like(out))
            assert torch.equal(lse, torch.full_like(lse, -torch.inf))


def check_sinks() -> None:
    torch.manual_seed(0)
    given = CASES["selected"].arguments()
    for sink in (-torch.inf, 10.0, 1e4):
        given["sinks"] = torch.full_like(given["sinks"], sink)
        out, lse = decode_attention(**given, backend="triton")
        expected, expected_lse = definition(**given)
        # A sink that large leaves others' shares beneath the smallest float32.
        assert_close(out, expected, "float32 op") if sink < 1e4 else assert_close(out, torch.zeros_like(out), "equal")
        assert_close(lse, expected_lse, "float32 op")


def check_ties() -> None:
    """Keys that are equal, and scores far apart and far from zero."""
    given = CASES["dense"].arguments()
    given["tokens"] = torch.where(given["tokens"].isnan(), given["tokens"], 1.0)
    for size in (1.0, 300.0):
        given["queries"] = size * torch.sign(given["queries"])
        for found, expected in zip(decode_attention(**given, backend="triton"), definition(**given), strict=True):
            assert_close(found, expected, "float32 op")


def check_strides() -> None:
    """Arguments that are views: of larger buffers, of another order of axes, at odd addresses."""
    given = CASES["few queries"].arguments()
    expected = decode_attention(**given, backend="triton")
    room = torch.full((3, 64, 16), torch.nan)
    room[:, :40] = given["entries"]
    odd = torch.cat((torch.zeros(1), given["tokens"].flatten()))[1:].view(given["tokens"].shape)
    wide = torch.full((*given["selection"].shape[:2], 11), 3)
    wide[..., 1:10] = given["selection"]
    views = {
        "queries": given["queries"].transpose(1, 2).contiguous().transpose(1, 2),
        "entries": room[:, :40],
        "tokens": odd,
        "selection": wide[..., 1:10],
        "token_positions": given["token_positions"].t().contiguous().t(),
    }
    for found, value in zip(decode_attention(**given | views, backend="triton"), expected, strict=True):
        assert torch.equal(found, value)


def check_as_prefill() -> None:
    """The op of the dynamic path hands few queries to this kernel: the same numbers, gradients too."""
    torch.manual_seed(0)
    b, s, earlier, entries = 1, 2, 5, 160
    places = torch.arange(300 - earlier, 300 + s).expand(b, -1)
    reach = Reach(6, places[:, earlier:], places, 0, 2)
    floats = [torch.randn(b, s, 3, 16), torch.randn(b, earlier + s, 16), torch.randn(b, entries, 16), torch.randn(3)]
    floats = [x.requires_grad_() for x in floats]
    selection = torch.rand(b, s, entries).argsort(-1)[..., :150]
    from dsv4.kernels import _decode_attention_triton as device_code

    with patch.object(device_code, "forward", wraps=device_code.forward) as called:
        for chosen in (None, selection):
            out = sparse_attention(*floats, reach, chosen, 0.25, backend="triton")
            exact = sparse_attention_reference(*(x.double() for x in floats), reach, chosen, 0.25)
            assert_close(out, exact, "float32 op")
            for one, other in zip(*(torch.autograd.grad(x.square().sum(), floats) for x in (out, exact)), strict=True):
                assert_close(one, other, "float32 op gradient")
    assert called.call_count == 2


def check_launch_reads_no_value() -> None:
    """The host's part runs on tensors that have no values, and asks for the same programs whatever they would be."""
    from dsv4.kernels import _decode_attention_triton as device_code

    class Recorder:
        def __init__(self):
            self.grids = []

        def __getitem__(self, grid):
            self.grids.append(grid)
            return lambda *args, **constants: None

    given = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in CASES["few queries"].arguments().items()}
    split, combine = Recorder(), Recorder()
    with patch.object(device_code, "split_kernel", split), patch.object(device_code, "combine_kernel", combine):
        for _ in range(2):
            device_code.forward(*given.values())
    assert len(split.grids) == 2
    assert split.grids[0] == split.grids[1]


def check_op() -> None:
    """The registration: schema, fake tensors, autograd, tracing; a gradient of a gradient."""
    given = CASES["selected"].arguments()
    floats = {k: given[k].nan_to_num().requires_grad_() for k in FLOATS}
    given |= floats
    torch.library.opcheck(fused_decode_attention, tuple(given.values()))
    results = []
    for attend in (fused_decode_attention, decode_attention_reference):
        (first,) = torch.autograd.grad(attend(*given.values())[0].square().sum(), [given["queries"]], create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), list(floats.values())))
    for name, second, expected in zip(FLOATS, *results, strict=True):
        assert_close(second, expected, "float32 op gradient", f"second gradient of {name}")


def check_far_addresses() -> None:
    """Rows that begin 2^31 elements from the first (pages that nobody touched take no memory)."""
    case = Case(lasts=(9,), slots=3, window=3, entries=3, kept=3, rate=2, dtype=torch.float16)
    given = case.arguments()
    step = 1 << 30
    far = {}
    for name in ("tokens", "entries"):
        room = torch.zeros(2 * step + case.width, dtype=torch.float16)
        far[name] = room.as_strided((1, 3, case.width), (0, step, 1))
        far[name].copy_(given[name])
    for chosen in (torch.tensor([[[2, 0, -1]]]), None):
        results = (decode_attention(**given | more | {"selection": chosen}, backend="triton") for more in ({}, far))
        for near, distant in zip(*results, strict=True):
            assert torch.equal(near, distant)


@pytest.mark.parametrize(
    "checked",
    [
        *(check_shares, check_choices, check_blind, check_sinks, check_ties, check_strides, check_as_prefill),
        *(check_launch_reads_no_value, check_op, check_ring_op),
        pytest.param(check_far_addresses, marks=pytest.mark.slow),
    ],
)
def test_properties(interpreted, checked):
    interpreted(checked)


# Bytes of shared memory that one program may take.
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
CAPABILITY = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
INTEGERS = ("query_b", "query_s", "query_n", "token_b", "token_k", "entry_b", "entry_e")
# Architecture, heads, keys, width, is_selected, is_split.
CI = {("sm_90", 64, 64, 512, True, True), ("sm_90", 16, 64, 512, False, False)}
TILES = [*((arch, 16, keys) for arch in CAPABILITY for keys in (32, 64)), ("sm_80", 32, 32)]
TILES += [(arch, 64, keys) for arch in ("sm_90", "sm_100") for keys in (32, 64)]
COMPILED = [
    pytest.param(*tile, *more, marks=[] if (*tile, *more) in CI else pytest.mark.slow, id=" ".join(map(str, (*tile, *more))))
    for tile, more in itertools.product(TILES, itertools.product((16, 64, 128, 256, 512), (True, False), (True, False)))
]


def test_every_tile_is_compiled():
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    from dsv4.kernels import _decode_attention_triton as device_code

    tables = device_code.NARROW, device_code.WIDE
    assert {(arch, x.heads, x.keys) for table in tables for arch in CAPABILITY for x in table[arch]} == set(TILES)


# Without a selection in narrow tiles alone.
RING_CI = {("sm_90", 64, 64, 512, True, False), ("sm_90", 64, 32, 512, False, True)}
RING_COMPILED = [
    pytest.param(*tile, *more, marks=[] if (*tile, *more) in RING_CI else pytest.mark.slow, id=" ".join(map(str, (*tile, *more))))
    for tile, more in itertools.product(TILES, itertools.product((64, 512), (True, False), (True, False)))
    if more[1] or tile[2] == 32
]


@pytest.mark.parametrize(("arch", "heads", "keys", "width", "is_selected", "is_split"), COMPILED)
def test_compiled(arch: str, heads: int, keys: int, width: int, is_selected: bool, is_split: bool):
    check_compiled(arch, heads, keys, width, is_selected, is_split)


@pytest.mark.parametrize(("arch", "heads", "keys", "width", "is_selected", "is_split"), RING_COMPILED)
def test_compiled_ring(arch: str, heads: int, keys: int, width: int, is_selected: bool, is_split: bool):
    check_compiled(arch, heads, keys, width, is_selected, is_split, is_ordered=True, turned=64)


@pytest.mark.parametrize("arch", ["sm_90", pytest.param("sm_80", marks=pytest.mark.slow), pytest.param("sm_100", marks=pytest.mark.slow)])
def test_combine_compiled(arch: str):
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    from dsv4.kernels import _decode_attention_triton as device_code

    kernel = device_code.combine_kernel
    for width, turned in ((512, 64), (64, 64), (512, 0)):
        found = resources(kernel, types_of(kernel), device_code.combine_options(width, turned), CAPABILITY[arch], aligned=())
        assert found.stack == 0
        assert found.shared <= SHARED[arch]


def check_compiled(arch: str, heads: int, keys: int, width: int, is_selected: bool, is_split: bool, **ring) -> None:
    """Nothing spills, the tile fits, each product is issued once per step and on tensor cores."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    from dsv4.kernels import _decode_attention_triton as device_code

    launches = (*device_code.NARROW[arch], *device_code.WIDE[arch])
    launch = next(x for x in launches if (x.heads, x.keys) == (heads, keys))
    options = device_code.split_options(launch, width, is_selected, is_split, **ring)
    kernel = device_code.split_kernel
    found = resources(kernel, types_of(kernel), options, CAPABILITY[arch], aligned=INTEGERS)
    assert found.stack == 0
    assert found.shared <= SHARED[arch]
    assert found.tensor_memory <= 512
    assert found.instructions["cp.async.c"] > 0
    if heads < 64:
        assert found.instructions["mma.sync"] > 0
    elif arch == "sm_90":
        assert found.instructions["wgmma.mma_async"] == width // 16 + keys // 16
    else:
        assert found.instructions["tcgen05.mma"] > 0


def types_of(kernel) -> dict[str, str]:
    """Triton's type of each argument, for bfloat16 queries and keys."""
    words = {"position": "*i64", "selection": "*i64"} | dict.fromkeys(("sink", "cos", "sin", "lse", "mixed", "largest", "total"), "*fp32")
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
@pytest.mark.parametrize("name", RINGS)
def test_native_ring(name: str):
    check_ring(name, "cuda", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [512, None])
@pytest.mark.parametrize(("heads", "batch"), [(8, 1), (16, 32), (64, 1), (64, 32), (128, 1), (64, 128)])
def test_native_at_full_width(heads: int, batch: int, kept: int | None):
    case = Case(
        lasts=tuple(4000 - 13 * i for i in range(batch)),
        slots=128,
        window=128,
        entries=1100,
        kept=kept,
        rate=4,
        heads=heads,
        width=512,
        dtype=torch.bfloat16,
    )
    given = case.arguments("cuda")
    wide = {k: given[k].double() for k in FLOATS}
    results = decode_attention(**given, backend="triton"), decode_attention_reference(**given | wide)
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected, "bfloat16 device code")


@pytest.mark.gpu
def test_a_graph_serves_every_step():
    """Captured once, replayed with other positions, selections and keys."""
    case = Case(lasts=(2000, 41), slots=128, window=128, entries=600, kept=512, rate=4, heads=64, width=512, dtype=torch.bfloat16)
    held = case.arguments("cuda")
    decode_attention(**held, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = decode_attention(**held, backend="triton")
    for lasts in ((3, -1), (2399, 700)):
        given = replace(case, lasts=lasts).arguments("cuda")
        for name, value in given.items():
            if isinstance(value, Tensor):
                held[name].copy_(value)
        graph.replay()
        for found, expected in zip(results, decode_attention(**given, backend="triton"), strict=True):
            assert torch.equal(found, expected)
