"""The attention of a decoding step in few launches, in Triton's interpreter: the numbers of the torch backend whatever the cache holds, and
every hook, replaced module and forward of its own inside an attention block seen.
"""

import random
import sys
from collections import Counter
from types import MethodType

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4 import Dsv4, attention_step
from dsv4.call import plan_step
from dsv4.config import CSA, HCA, SLIDING
from dsv4.linear import Fp8BlockDiagonalLinear, Fp8Linear
from dsv4.testing import LIMITS, assert_close, fault_config, random_config, random_ids, relative_error
from dsv4.testing_kernels import interpreter

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

TOKENS = 18
# A block of each kind, by what it asks for in a step: projections of x, of the latent where there are two of it, then what follows.
OPS = {
    SLIDING: {"few_linears": 1, "latent_and_key": 1, "norm_rotary": 1, "ring_attention": 1},
    HCA: {"few_linears": 1, "latent_and_key": 1, "norm_rotary": 1, "ring_attention": 1, "pool_step": 1},
    CSA: {"few_linears": 2, "latent_and_key": 1, "turned_queries": 1, "ring_attention": 1, "pool_step": 2, "index_select": 1},
}


@pytest.fixture(scope="module")
def interpreted():
    with interpreter(sys.modules[__name__]) as run:
        yield run


def config_of(**overrides):
    given = {"layer_types": (SLIDING, CSA, HCA), "num_hash_layers": 1, "compress_rates": {CSA: 4, HCA: 8}}
    given |= {"sliding_window": 6, "index_topk": 3, "hc_sinkhorn_iters": 3}
    return fault_config(**given | overrides)


def models(dtype: torch.dtype = torch.float32, seed: int = 3, config=None, **overrides) -> tuple[Dsv4, Dsv4]:
    """The second one's attention is device code; tests/test_model_triton.py runs a whole model of it."""
    config = config_of(**overrides) if config is None else config
    plain, fused = (Dsv4.from_config(config, dtype=dtype, seed=seed).requires_grad_(False) for _ in range(2))
    for block in fused.layers:
        choose(block.self_attn)
    return plain, fused


def choose(attention: nn.Module) -> None:
    for module in attention.modules():
        if hasattr(module, "backend"):
            module.backend = "triton"


class Calls(TorchDispatchMode):
    """Counts calls of this package's ops."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "dsv4":
            self.count[func._opname] += 1
        return func(*args, **(kwargs or {}))


def filled(model: Dsv4, ids: Tensor, held: int, *, rewind: int | None = None, length: int = TOKENS, mask: Tensor | None = None):
    kv = model.new_kv_cache(len(ids), length, rewind=rewind)
    if held:
        model(ids[:, :held], kv_cache=kv, attention_mask=mask)
    return kv


def steps(model: Dsv4, ids: Tensor, kv, start: int, stop: int, width: int = 1) -> Tensor:
    return torch.cat([model.forward_static(ids[:, i : i + width], kv) for i in range(start, stop, width)], dim=1)


def check_steps(held: int, width: int, rewind: int | None, tokens: int = TOKENS, **overrides) -> None:
    """From `held` tokens on, over windows that close and rings that wrap, against the whole rows in torch."""
    plain, fused = models(**overrides)
    ids = random_ids(plain.config, 2, tokens, seed=1)
    with torch.no_grad():
        kv = filled(fused, ids, held, rewind=rewind, length=tokens)
        stop = held + (tokens - held) // width * width
        with Calls() as calls:
            got = steps(fused, ids, kv, held, stop, width)
        assert calls.count["ring_attention"] == (stop - held) // width * len(plain.config.layer_types)
        assert calls.count["sparse_attention"] == 0
        assert_close(got, plain(ids)[:, held:stop], "steps", "logits")
        # What it left in the cache serves any other way.
        if stop < tokens:
            assert_close(fused(ids[:, stop:], kv_cache=kv), plain(ids)[:, stop:], "steps", "afterwards")


def check_rows() -> None:
    """Rows of unequal length, rows that rest, a row without tokens."""
    plain, fused = models()
    ids = random_ids(plain.config, 3, 24, seed=2)
    mask = torch.ones(3, 13, dtype=torch.int64)
    mask[0, :2] = 0
    mask[1, 7:] = 0
    lengths = [11, 7, 13]
    rows = [ids[0, 2:], ids[1], ids[2]]
    with torch.no_grad():
        whole = [plain(row.unsqueeze(0))[0] for row in rows]
        kv = filled(fused, ids, 13, rewind=0, mask=mask, length=24)
        for i in range(6):
            active = torch.tensor([i % 3 != 1, i % 5 != 2, i % 4 != 3])
            token = torch.stack([row[n] for row, n in zip(rows, lengths, strict=True)]).unsqueeze(1)
            logits = fused.forward_static(token, kv, active)
            for r in range(3):
                if active[r]:
                    assert_close(logits[r, 0], whole[r][lengths[r]], "steps", f"row {r} at {lengths[r]}")
                    lengths[r] += 1
        assert kv.length.tolist() == lengths
        empty = fused.new_kv_cache(2, TOKENS)
        for i in range(2):
            logits = fused.forward_static(torch.stack((ids[2, i], ids[0, 2])).unsqueeze(1), empty, torch.tensor([True, False]))
            assert_close(logits[0, 0], whole[2][i], "steps", f"beside a row without tokens, {i}")


def check_to_and_fro() -> None:
    """The fixed form, then the other one, cut back, several tokens at a time, rows selected."""
    plain, fused = models()
    ids = random_ids(plain.config, 2, 24, seed=1)
    with torch.no_grad():
        full = plain(ids)
        kv = filled(fused, ids, 5, rewind=9, length=24)
        got = [steps(fused, ids, kv, 5, 8), fused(ids[:, 8:14], kv_cache=kv), steps(fused, ids, kv, 14, 17, width=3)]
        assert_close(torch.cat(got, dim=1), full[:, 5:17], "steps", "logits")
        kv.truncate(12)
        assert_close(steps(fused, ids, kv, 12, 15, width=3), full[:, 12:15], "steps", "after a cut")
        swapped = kv.select([1, 0, 1])
        assert_close(steps(fused, ids[[1, 0, 1]], swapped, 15, 17), full[[1, 0, 1], 15:17], "steps", "selected rows")
        assert_close(steps(fused, ids, kv, 15, 17, width=2), full[:, 15:17], "steps", "the rows themselves")


def check_dtypes() -> None:
    """Rounded as the usual way rounds; beyond few tokens each map by itself."""
    for dtype, rows in ((torch.bfloat16, 2), (torch.float16, 1)):
        plain, fused = models(dtype)
        ids = random_ids(plain.config, rows, 24, seed=1)
        with torch.no_grad():
            expected = steps(plain, ids, filled(plain, ids, 14, length=24), 14, 17)
            got = steps(fused, ids, filled(fused, ids, 14, length=24), 14, 17)
        assert relative_error(got, expected) <= 2 * LIMITS["bfloat16 way"].relative, dtype
    plain, fused = models(compress_rates={CSA: 2, HCA: 4})
    ids = random_ids(plain.config, 17, 5, seed=1)
    with torch.no_grad(), Calls() as calls:
        got = steps(fused, ids, filled(fused, ids, 4), 4, 5)
        assert_close(got, plain(ids)[:, 4:], "steps", "many rows")
    assert (calls.count["few_linears"], calls.count["ring_attention"]) == (0, 3)


def coded(linear: nn.Module) -> nn.Module:
    """An FP8 module of random codes in the place of a dense one."""
    generator = torch.Generator().manual_seed(linear.weight.numel())
    if hasattr(linear, "groups"):
        out = Fp8BlockDiagonalLinear(linear.in_features * linear.groups, linear.out_features // linear.groups, linear.groups)
    else:
        out = Fp8Linear(linear.in_features, linear.out_features)
    out.weight.data = torch.randn(linear.weight.shape, generator=generator).to(torch.float8_e4m3fn)
    exponents = torch.randint(123, 126, out.weight_scale_inv.shape, generator=generator)
    out.weight_scale_inv.data = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
    return out.requires_grad_(False)


def check_stored_weights() -> None:
    """FP8 codes: in the same launches; deployed numerics by the modules."""
    plain, fused = models()
    ids = random_ids(plain.config, 1, 20, seed=1)
    for model in (plain, fused):
        for name, module in list(model.named_modules()):
            if ".self_attn." in name and hasattr(module, "in_features") and "weights_proj" not in name:
                model.set_submodule(name, coded(module))
    for block in fused.layers:
        choose(block.self_attn)
    with torch.no_grad():
        for numerics, count in (("exact", 8), ("deployed", 0)):
            for module in (*plain.modules(), *fused.modules()):
                if isinstance(module, Fp8Linear):
                    module.numerics = numerics
                    module.backend = "torch" if numerics == "deployed" else module.backend
            expected = steps(plain, ids, filled(plain, ids, 14), 14, 16)
            with Calls() as calls:
                got = steps(fused, ids, filled(fused, ids, 14), 14, 16)
            assert calls.count["few_linears"] == count, numerics
            assert calls.count["ring_attention"] == 6, numerics
            assert_close(got, expected, "steps" if numerics == "exact" else "codes", numerics)


def check_counts() -> None:
    """What each kind of block asks for, and where the entries all fit no choice."""
    for kind, ops in OPS.items():
        (_, fused), counts = models(layer_types=(kind, kind), num_hash_layers=0), []
        ids = random_ids(fused.config, 1, 5, seed=1)
        for span in (TOKENS, 8):
            with torch.no_grad():
                kv = filled(fused, ids, 5).in_fixed_form(1)
                kv.span = span
                with Calls() as calls:
                    fused._step(ids[:, :1], kv, torch.ones(1, dtype=torch.bool))
            counts.append(calls.count)
        assert {name: n for name, n in counts[0].items() if n} == {name: 2 * n for name, n in ops.items()}, kind
        if kind == CSA:
            assert counts[1]["index_select"] == counts[1]["turned_queries"] == 0


# Points inside attention, and whether a step shows them on its way.
POINTS = {
    "attention_query_latent": True,
    "attention_queries": True,
    "attention_head_outputs": True,
    "attention_output": True,
    "attention_head_results": True,
    "attention_keys_unrotated": False,
    "attention_queries_unrotated": False,
    "attention_scores": False,
    "compressor.compressed_entries": False,
    "compressor.compressor_gates": False,
    "compressor.indexer.indexer_queries": False,
    "compressor.indexer.indexer_selection": False,
}


def run_step(model: Dsv4, ids: Tensor, kv) -> Tensor:
    """A step with points called: `forward_static` refuses them, and a block does not rely on that."""
    fixed = kv.in_fixed_form(ids.shape[1])
    active = torch.ones(len(ids), dtype=torch.bool)
    call = plan_step(model.config, model.rotary, ids, active, fixed)
    with model.stage.running():
        model.stage.begin(call, kv)
        logits = model.run(call, None, 0, None, None, fixed)
    fixed.length.copy_(call.lengths)
    fixed.host = None
    return logits


def check_points(names: tuple[str, ...]) -> None:
    """What a step hides moves its block to the usual way, and no other; what it shows is seen and edited."""
    plain, fused = models()
    ids = random_ids(plain.config, 1, TOKENS, seed=1)
    for name in names:
        path, results, seen = f"layers.1.self_attn.{name}", [], []
        for model in (plain, fused):
            found: list[Tensor] = []

            def edit(value, hook, found=found):
                found.append(value.clone())
                return None if value.dtype == torch.int64 else value * 1.25

            handle = model.get_submodule(path).add_hook(edit)
            with torch.no_grad(), Calls() as calls:
                kv = filled(model, ids, 14)
                calls.count.clear()
                found.clear()
                results.append(torch.cat([run_step(model, ids[:, i : i + 1], kv) for i in (14, 15)], dim=1))
            handle.remove()
            seen.append(found)
        assert calls.count["ring_attention"] == (6 if POINTS[name] else 4), name
        assert_close(results[1], results[0], "steps", name)
        assert len(seen[0]) == len(seen[1]) == 2, name
        for value, expected in zip(seen[1], seen[0], strict=True):
            assert_close(value, expected, "watched", name)


# A module inside attention that a step goes around, by its path in the block; or of the block itself, which it does not.
AROUND = ("q_a_proj", "q_a_norm", "q_b_norm", "kv_norm", "q_b_proj", "compressor", "compressor.kv_norm", "compressor.indexer.scorer")
CALLED = ("", "o_a_proj", "o_b_proj")


def moved(module: nn.Module, args, out: Tensor) -> Tensor:
    """What a norm behind it does not undo."""
    return out + 0.5


class Moved(nn.Module):
    """Another module in a linear map's place."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 0.5


def check_modules(paths: tuple[str, ...]) -> None:
    """PyTorch's hooks, a forward written into the module (nnsight's way), another module, a hook of all modules."""
    plain, fused = models()
    ids = random_ids(plain.config, 1, TOKENS, seed=1)

    def ran() -> tuple[Counter, Tensor, Tensor]:
        with torch.no_grad():
            expected = steps(plain, ids, filled(plain, ids, 15), 15, 16)
            kv = filled(fused, ids, 15)
            with Calls() as calls:
                got = steps(fused, ids, kv, 15, 16)
        return calls.count, got, expected

    _, still, _ = ran()
    for path in paths:
        modules = [model.get_submodule(f"layers.1.self_attn.{path}".rstrip(".")) for model in (plain, fused)]
        handles = [m.register_forward_hook(moved) for m in modules]
        counts, got, expected = ran()
        for handle in handles:
            handle.remove()
        assert counts["ring_attention"] == (3 if path in CALLED else 2), path
        assert_close(got, expected, "steps", f"hook at {path}")
        # The choice of entries may be as it was.
        assert path == "compressor.indexer.scorer" or relative_error(got, still) > 1e-3, path
        for m in modules:
            m.__dict__["forward"] = MethodType(lambda self, *args, **kw: type(self).forward(self, *args, **kw) + 0.5, m)
        counts, got, expected = ran()
        for m in modules:
            del m.__dict__["forward"]
        assert counts["ring_attention"] == (3 if path in CALLED else 2), path
        assert_close(got, expected, "steps", f"forward at {path}")
    for path in ("q_a_proj", "o_b_proj"):
        for model in (plain, fused):
            model.set_submodule(f"layers.1.self_attn.{path}", Moved(model.get_submodule(f"layers.1.self_attn.{path}")))
    counts, got, expected = ran()
    assert counts["ring_attention"] == 2
    assert_close(got, expected, "steps", "replaced modules")
    seen = Counter()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, *given: seen.update([type(m).__name__]))
    counts, got, expected = ran()
    handle.remove()
    assert counts["ring_attention"] == 0
    assert seen["RMSNorm"] > 0
    assert_close(got, expected, "steps", "a hook of all modules")


def check_classes() -> None:
    """A class over the block's own, or over one of its modules, computes something else."""

    class Louder(type(models()[1].layers[0].self_attn)):
        def fused(self, *given):
            return super().fused(*given) * 2

    plain, fused = models()
    ids = random_ids(plain.config, 1, TOKENS, seed=1)
    results = []
    for model in (plain, fused):
        model.layers[0].self_attn.__class__ = Louder
        with torch.no_grad(), Calls() as calls:
            results.append(steps(model, ids, filled(model, ids, 15), 15, 16))
    assert calls.count["ring_attention"] == 2
    assert_close(results[1], results[0], "steps", "a derived class")


def check_gradients_are_recorded_elsewhere() -> None:
    """With gradients on, the usual way; the step itself records none."""
    _, fused = models()
    ids = random_ids(fused.config, 1, TOKENS, seed=1)
    kv = filled(fused.requires_grad_(), ids, 15)
    x = torch.zeros(1, 1, fused.hidden_size)
    with torch.enable_grad():
        assert not attention_step.suits(fused.layers[0].self_attn, x)
        with Calls() as calls:
            assert not fused.forward_static(ids[:, 15:16], kv).requires_grad
    assert calls.count["ring_attention"] == 3
    with torch.no_grad():
        assert attention_step.suits(fused.layers[0].self_attn, x)
        assert not attention_step.suits(fused.layers[0].self_attn, x.expand(1, attention_step.MOST_TOKENS + 1, -1))


def check_traced() -> None:
    """In one graph, with what is written in place declared; the same step run again and again."""
    plain, fused = models()
    ids = random_ids(plain.config, 2, TOKENS, seed=1)
    with torch.no_grad():
        expected = plain(ids)
        kv = filled(fused, ids, 14)
        step = torch.compile(fused._step, fullgraph=True, backend="aot_eager")
        fixed, active = kv.fix(1), torch.ones(2, dtype=torch.bool)
        for i in range(14, 17):
            assert_close(step(ids[:, i : i + 1], fixed, active), expected[:, i : i + 1], "steps", f"step {i}")
        fixed.host = None
        assert kv.length.tolist() == [17, 17]
        assert_close(fused(ids[:, 17:], kv_cache=kv), expected[:, 17:], "steps", "afterwards")


def check_random(seed: int) -> None:
    draw = random.Random(seed)
    config = random_config(draw, num_hidden_layers=2, layer_types=draw.sample((SLIDING, CSA, HCA), 2), mlp_layer_types=("moe", "moe"))
    plain, fused = models(seed=seed, config=config)
    tokens, width = draw.choice((18, 26)), draw.choice((1, 1, 2, 5))
    ids = random_ids(config, 2, tokens, seed=seed)
    start = tokens % width + width * draw.randint(0, 1)
    with torch.no_grad():
        kv = filled(fused, ids, start, rewind=draw.choice((None, 0, 2)), length=tokens + draw.choice((0, 1, 30)))
        with Calls() as calls:
            got = steps(fused, ids, kv, start, tokens, width)
        assert calls.count["ring_attention"] == 2 * (tokens - start) // width
        assert relative_error(got, plain(ids)[:, start:]) <= LIMITS["steps"].relative


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("held", "width", "rewind"), [(9, 4, 0), pytest.param(0, 1, None, marks=SLOW), pytest.param(7, 8, 2, marks=SLOW)])
def test_steps(interpreted, held: int, width: int, rewind: int | None):
    interpreted(check_steps, held, width, rewind)


def check_sizes() -> None:
    """Windows longer than the row, windows of one token, choices of one entry and of more than there are."""
    for overrides in (
        {"sliding_window": 100, "index_topk": 1},
        {"sliding_window": 1, "index_topk": 64, "compress_rates": {CSA: 2, HCA: 3}},
        {"sliding_window": 8, "tokens": 60},
    ):
        check_steps(12, 2, 0, **overrides)


@pytest.mark.parametrize(
    "checked",
    [
        *(check_rows, check_to_and_fro, check_dtypes, check_stored_weights, check_counts, check_classes, check_traced),
        *(check_gradients_are_recorded_elsewhere, pytest.param(check_sizes, marks=SLOW)),
    ],
)
def test_attention_step(interpreted, checked):
    interpreted(checked)


def test_points(interpreted):
    interpreted(check_points, ("attention_queries", "compressor.compressed_entries"))


def test_modules(interpreted):
    interpreted(check_modules, ("", "compressor.kv_norm"))


@SLOW
def test_every_point(interpreted):
    interpreted(check_points, tuple(POINTS))


@SLOW
def test_every_module(interpreted):
    interpreted(check_modules, (*CALLED, *AROUND))


@SLOW
@pytest.mark.parametrize("seed", range(12))
def test_random_models(interpreted, seed: int):
    interpreted(check_random, seed)


@pytest.mark.gpu
def test_a_graph_serves_every_step():
    """On a CUDA device: captured once, replayed over windows that close and rings that wrap."""
    config = config_of(torch_dtype=torch.bfloat16)
    plain, fused = (
        Dsv4.from_config(config, dtype=torch.bfloat16, device="cuda", kernels=kernels, seed=3).requires_grad_(False)
        for kernels in ("torch", "triton")
    )
    ids = random_ids(config, 2, 40, seed=1).cuda()
    with torch.no_grad():
        expected = steps(plain, ids, filled(plain, ids, 14, length=40), 14, 40)
        held, active = ids[:, 14:15].clone(), torch.ones(2, dtype=torch.bool, device="cuda")
        kv = filled(fused, ids, 14, length=40, rewind=0)
        kv.fix(1)
        # Compiled before the capture, on a cache of its own.
        fused.forward_static(held, filled(fused, ids, 14, length=40, rewind=0), active)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = fused.forward_static(held, kv, active)
        for i in range(14, 40):
            held.copy_(ids[:, i : i + 1])
            graph.replay()
            assert relative_error(logits, expected[:, i - 14 : i - 13]) <= 2 * LIMITS["bfloat16 way"].relative, i
