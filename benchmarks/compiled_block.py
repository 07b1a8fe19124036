"""The kernels of a block around attention and experts, for `compiled.py`: at V4-Flash's sizes, one token unless a name says many."""

from collections.abc import Iterator

import triton
from compiled import MEMORY, WIDTH, Spec

HIDDEN, LATENT, HEADS, STREAMS, TURNED, ITERS = 4096, 1024, 64, 4, 64, 20
INDEX_HEADS, INDEX_WIDTH, KEPT, EXPERTS, CHOSEN, INNER = 64, 128, 512, 256, 6, 2048
# Rows of weights in one launch of linears: what a CSA block maps its input to, and its latent.
OF_INPUT, OF_LATENT = 4160, 40960
ALIGNED = (
    *(
        "hidden",
        "experts",
        "K",
        "strides",
        "x_t",
        "x_n",
        "x_r",
        "out_t",
        "query_b",
        "query_s",
        "query_t",
        "query_n",
        "key_b",
        "key_e",
        "key_t",
    ),
    *("index_t", "index_n", "latent_t", "ring_b", "ring_r", "new_t", "entries_b", "entries_e", "projected_b", "projected_t"),
)
FLOATS = (
    "comb",
    "post",
    "fn",
    "scale",
    "base",
    "partial",
    "square",
    "pre",
    "norm",
    "weight",
    "cos",
    "sin",
    "bias",
    "projected",
    "score",
    "new_ptr",
)
OTHERS = {
    **dict.fromkeys(("position_ptr", "index_ptr", "past_ptr", "after_ptr", "table_ptr", "id_ptr"), "*i64"),
    **dict.fromkeys(("present_ptr", "filled_ptr", "valid_ptr"), "*i1"),
    **dict.fromkeys(("counter_ptr", "order_ptr", "tile_expert_ptr", "tile_row_ptr", "end_ptr", "entry_ptr", "kept_entry_ptr"), "*i32"),
}


def types_of(kernel, **changed) -> dict:
    """Triton's type of each argument, for a model in bfloat16."""
    found = {}
    for name in kernel.arg_names:
        if not name.endswith("_ptr"):
            found[name] = "fp32" if name.endswith("eps") or name in ("scale", "factor", "least") else "i32"
        elif name in OTHERS:
            found[name] = OTHERS[name]
        else:
            found[name] = "*fp32" if any(word in name for word in FLOATS) else "*bf16"
    return found | changed


def spec(
    name: str, kernel, options: dict, read: int, operations: int, ahead: int, programs: float = float("inf"), written: int = 0, **changed
) -> Spec:
    return Spec(name, kernel, types_of(kernel, **changed), options, ALIGNED, read, operations, ahead, programs, written)


def linears(arch: str) -> Iterator[Spec]:
    """By the tile that is chosen for what a CSA block maps its input to, and its latent."""
    from dsv4.kernels import _few_linears_triton as code

    for form, held, size in (("dense", ("*bf16", "*bf16"), 2), ("fp8", ("*fp8e4nv", "*u8"), 1)):
        for what, rows, width, norms in (
            ("input", OF_INPUT, HIDDEN, False),
            ("latent", OF_LATENT, LATENT, False),
            ("latent normed", OF_LATENT, LATENT, True),
        ):
            tiles = code.LAUNCH.get((arch, form, 8), ())
            for tile in [tile for tile in tiles if rows / tile.rows >= code.PROGRAMS_EACH * MEMORY[arch][1]][:1] or tiles[-1:]:
                step = tile.rows * tile.parts * tile.depth
                changed = {
                    **{"weights": (held[0],), "scales": (held[1],), "outputs": ("*bf16",), "rows": ("i32",), "strides": ("i32",)},
                    **{"x": "*bf16", "norm_weight": "*fp32", "normed": "*bf16", "eps": "fp32"},
                }
                name = f"linears of {what}, {form}, {tile.rows} rows"
                each = rows / tile.rows / MEMORY[arch][1]
                options = code.options(tile, 8, width) | code.norm_options(width, norms)
                yield spec(name, code.few_linears_kernel, options, size * step, 2 * step, tile.stages - 1, each, **changed)


def shared_expert(arch: str) -> Iterator[Spec]:
    from dsv4.kernels import _few_linears_triton as code

    for form, held, size in (("dense", ("*bf16", "*bf16"), 2), ("fp8", ("*fp8e4nv", "*u8"), 1)):
        for tile in code.LAUNCH.get((arch, form, 8), ())[-1:]:
            step, each = tile.rows * tile.parts * tile.depth, INNER / tile.rows / MEMORY[arch][1]
            pointers = dict.fromkeys(("gate", "up"), held[0]) | dict.fromkeys(("gate_scales", "up_scales"), held[1])
            changed = pointers | {"x": "*bf16", "y": "*bf16", "limit": "fp32"}
            kernel, options = code.few_gate_up_kernel, code.options(tile, 8, HIDDEN)
            yield spec(
                f"shared gate and up, {form}, {tile.rows} rows", kernel, options, size * step, 2 * step, tile.stages - 1, each, **changed
            )


def hyper(arch: str) -> Iterator[Spec]:
    from dsv4.kernels import _hyper_connection_triton as code

    mixes = (2 + STREAMS) * STREAMS
    for name, table in (("read", code.READ), ("write and read", code.WRITE_READ)):
        for launch, tokens, sums in zip(table[arch], (1, 8192), (code.LAST, code.WHOLE), strict=True):
            options = code.read_options(launch, STREAMS, ITERS, HIDDEN, tokens, sums, writes=name != "read", norms=True)
            # The projection's weight, which many tokens find in L2.
            own = 4 * mixes * STREAMS * launch.hidden if tokens == 1 else 0
            streams = min(tokens, launch.tokens) * STREAMS * launch.hidden
            few = "" if tokens == 1 else ", many tokens"
            work = 2 * streams * (mixes + 1 + (STREAMS + 1) * (name != "read"))
            each = code.PROGRAMS if tokens == 1 else tokens / launch.tokens / MEMORY[arch][1]
            writes = name != "read"
            read = 2 * streams + own + writes * 2 * streams // STREAMS
            yield spec(f"hyper {name}{few}", code.read_kernel, options, read, work, launch.stages - 1, each, writes * 2 * streams)
    launch = code.WRITE[arch]
    tile = launch.tokens * STREAMS * launch.hidden
    yield spec(
        "hyper write, many tokens",
        code.write_kernel,
        code.write_options(launch, STREAMS),
        2 * tile,
        2 * tile * (STREAMS + 1),
        1,
        written=2 * tile,
    )


def rows(arch: str) -> Iterator[Spec]:
    from dsv4.kernels import _norm_rotary_triton as code
    from dsv4.kernels import _step_rows_triton as step

    launch = code.ROWS[arch]
    options = code.options(launch, WIDTH, TURNED, True, False, False, False)
    yield spec(
        "norm and rotary, many tokens",
        code.norm_rotary_kernel,
        options,
        2 * launch.numbers,
        5 * launch.numbers,
        1,
        written=2 * launch.numbers,
    )
    options = step.latent_and_key_options(step.ROWS[arch], LATENT, WIDTH, TURNED)
    yield spec("latent and key of a step", step.latent_and_key_kernel, options, 2 * LATENT, 5 * LATENT, 0)
    options = step.turned_queries_options(step.ROWS[arch], WIDTH, INDEX_WIDTH, TURNED)
    numbers = step.ROWS[arch].numbers
    yield spec("queries of a step", step.turned_queries_kernel, options, 2 * numbers, 5 * numbers, 0, index_ptr="*bf16")


def pools(arch: str) -> Iterator[Spec]:
    from dsv4.kernels import _pooling_triton as code

    for kind, slots, series in (("CSA", 8, 2), ("HCA", 128, 1)):
        launch = code.pick(arch, slots)
        read = 8 * launch.slots * WIDTH
        ahead = max(1, launch.stages - 1)
        options = code.options(launch, WIDTH, series, TURNED)
        yield spec(f"pool {kind}, many tokens", code.pool_kernel, options, read, read, ahead)
        options = code.step_options(launch, WIDTH, series, TURNED)
        yield spec(f"pool {kind} of a step", code.step_kernel, options, read, read, 0, ring_ptr="*fp32")


def indexer(arch: str) -> Iterator[Spec]:
    from dsv4.kernels import _index_scores_triton as code

    for name, size, keys in (("bf16", 2, "*bf16"), ("fp8", 1, "*fp8e4nv")):
        if arch == "sm_80" and size == 1:
            continue
        for launch, few in zip(code.SCORES[arch], ("", ", many tokens"), strict=True):
            options = code.score_options(launch, INDEX_HEADS, INDEX_WIDTH, size == 1, False)
            read, work = size * launch.entries * INDEX_WIDTH, 2 * launch.queries * launch.entries * INDEX_HEADS * INDEX_WIDTH
            ahead = launch.stages - 1 if few == "" else 0
            programs = code.PROGRAMS if few == "" else float("inf")
            yield spec(f"index scores, {name}{few}", code.score_kernel, options, read, work, ahead, programs, key_ptr=keys)
    for launch in code.CHOICES[arch]:
        if launch.entries > KEPT:
            options = code.select_options(launch, KEPT, False, True)
            name = f"selection of {launch.entries}"
            yield spec(name, code.select_kernel, options, 4 * launch.entries, 0, 0, out_ptr="*i64")


def router(arch: str) -> Iterator[Spec]:
    from dsv4.kernels import _router_triton as code

    options = code.options(1, HIDDEN, EXPERTS, CHOSEN, is_hash=False, is_masked=False)
    read = 2 * options["BLOCK_E"] * options["BLOCK_H"]
    given = dict.fromkeys(("weight_ptr", "x_ptr"), "*bf16") | dict.fromkeys(
        ("logit_ptr", "selection_ptr", "share_ptr", "bias_ptr"), "*fp32"
    )
    programs = triton.cdiv(EXPERTS, options["BLOCK_E"]) / MEMORY[arch][1]
    yield spec("router", code.router_kernel, options, read, read, 1, programs, **given, valid_ptr="*u8")


def specs(arch: str) -> Iterator[Spec]:
    for kernels in (linears, shared_expert, hyper, rows, pools, indexer, router):
        yield from kernels(arch)
