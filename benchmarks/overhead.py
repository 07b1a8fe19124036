"""What watching costs, and what it costs when nobody watches: pairs of runs in turn, as ratios of their CPU time.

    python benchmarks/overhead.py [--tokens 256] [--pairs 60] [--threads 1]

One model (small_model.py). Ours: the model against itself with its points stripped (every `tap.name(x)` in its source replaced by
`x`), a forward and a decoding step; then captures against the plain run. "**" is held against the spelled-out way, the same forward
with nobody reading. Peers, each against its own unwatched run: PyTorch forward hooks on transformers' blocks, nnsight on our model,
TransformerLens on transformers where it is installed. A ratio is the median over pairs, with the 95 % interval of that median.
The last line is JSON.
"""

import argparse
import ast
import importlib.util
import inspect
import json
import math
import statistics
import tempfile
import textwrap
import time
from collections.abc import Callable

import torch
from small_model import Ours, Theirs, about, build, ids_of
from torch import Tensor

from dsv4 import Dsv4
from dsv4.hooks import Probed

CONTEXT = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = {}
    with torch.no_grad():
        for title, (run, base) in ways(args.tokens).items():
            rows[title] = ratio(run, base, args.pairs)
            low, high = rows[title]["interval"]
            print(f"{title:<62} {rows[title]['ratio']:6.3f}  [{low:.3f}, {high:.3f}]  {rows[title]['base_ms']:8.2f} ms", flush=True)
    print(json.dumps({**about(args.threads), "tokens": args.tokens, "pairs": args.pairs, "rows": rows}))


def ways(tokens: int) -> dict[str, tuple[Callable, Callable]]:
    """title -> (what is measured, what it is measured against)."""
    model, bare, spelled = build(), stripped(), build()
    for other in (bare, spelled):
        other.load_state_dict(model.state_dict(), assign=True)
    spell_out(spelled)
    ids = ids_of(model, tokens)
    found = {
        "nobody listens, against no points": (lambda: model(ids), lambda: bare(ids)),
        "nobody listens, a decoding step": tuple(map(step_of, (model, bare))),
        "every layer_output": (lambda: model.run_with_cache(ids, "**.layer_output"), lambda: model(ids)),
        "the residual set": (lambda: model.run_with_cache(ids), lambda: model(ids)),
        'everything ("**"), against the spelled-out way': (
            lambda: model.run_with_cache(ids, "**", max_bytes=None),
            lambda: spelled(ids),
        ),
    }
    theirs = Theirs(model).model
    found["PyTorch hooks on every block of transformers"] = hooked(theirs, ids)
    if importlib.util.find_spec("nnsight"):
        found["nnsight on our model, every layer_output"] = traced(model, ids)
    if importlib.util.find_spec("transformer_lens"):
        found["TransformerLens on transformers, every hook_out of a block"] = bridged(Theirs(model).model, ids)
    return found


def ratio(run: Callable, base: Callable, pairs: int) -> dict:
    for once in (run, base, run, base):
        once()
    ratios, bases = [], []
    for i in range(pairs):
        first, second = (run, base) if i % 2 else (base, run)
        taken = {id(once): cpu_seconds(once) for once in (first, second)}
        ratios.append(taken[id(run)] / taken[id(base)])
        bases.append(taken[id(base)])
    ratios.sort()
    # Of the median of n values: between the order statistics n/2 -+ 0.98 sqrt(n).
    reach = math.ceil(0.98 * math.sqrt(pairs))
    low, high = max(pairs // 2 - reach, 0), min(pairs // 2 + reach, pairs - 1)
    return {
        "ratio": statistics.median(ratios),
        "interval": (ratios[low], ratios[high]),
        "base_ms": 1e3 * statistics.median(bases),
    }


def cpu_seconds(run: Callable) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def step_of(model: Dsv4) -> Callable:
    """A decoding step after a context; the cache is cut back each time it is nearly full."""
    side = Ours(model)
    ids = ids_of(model, CONTEXT)
    side.fill(ids, 10_000)
    return lambda: side.step(ids[:, :1])


def spell_out(model: Dsv4) -> None:
    """Every block takes the way that shows every value, with nobody there to see it."""
    for module in model.probed:
        module.listened = frozenset(name for name, point in module.points() if point.value is not None and point.value.read == "mat")
        module.spelled_out = bool(module.listened)


class Strip(ast.NodeTransformer):
    """tap.name(x), self.tap.name(x) -> x."""

    def visit_Call(self, node):
        self.generic_visit(node)
        function = node.func
        is_tap = isinstance(function, ast.Attribute) and ast.unparse(function.value) in ("tap", "self.tap")
        return node.args[0] if is_tap else node


def stripped() -> Dsv4:
    """A model whose methods have no taps."""
    model = build()
    for module in model.modules():
        if isinstance(module, Probed):
            module.__class__ = _bare(type(module))
    return model


_BARE: dict[type, type] = {}


def _bare(kind: type) -> type:
    if kind not in _BARE:
        methods = {}
        owners = [owner for owner in reversed(kind.__mro__) if issubclass(owner, Probed) and owner is not Probed]
        for owner in owners:
            methods |= {name: _without_taps(method, owner) for name, method in vars(owner).items() if inspect.isfunction(method)}
        _BARE[kind] = type(kind.__name__, (kind,), methods)
    return _BARE[kind]


def _without_taps(method: Callable, owner: type) -> Callable:
    source = textwrap.dedent(inspect.getsource(method))
    if "tap" not in source or "super()" in source:
        return method
    tree = ast.fix_missing_locations(Strip().visit(ast.parse(source)))
    names: dict = {}
    exec(compile(tree, f"<{owner.__name__} without taps>", "exec"), vars(inspect.getmodule(owner)), names)
    return names[method.__name__]


def hooked(model, ids: Tensor) -> tuple[Callable, Callable]:
    kept: list[Tensor] = []

    def run():
        kept.clear()
        handles = [block.register_forward_hook(lambda module, args, out: kept.append(out)) for block in model.model.layers]
        model(ids, use_cache=False)
        for handle in handles:
            handle.remove()

    return run, lambda: model(ids, use_cache=False)


def traced(model: Dsv4, ids: Tensor) -> tuple[Callable, Callable]:
    from nnsight import NNsight

    own = build()
    own.load_state_dict(model.state_dict(), assign=True)
    seen = NNsight(own)

    def run():
        kept = []
        with seen.trace(ids):
            for layer in seen.layers:
                kept.append(layer.layer_output.output.save())
        return kept

    return run, lambda: model(ids)


def bridged(model, ids: Tensor) -> tuple[Callable, Callable]:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        # It wants a tokenizer; which one makes no difference to a run on ids.
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()), eos_token="<eos>").save_pretrained(folder)
        bridge = TransformerBridge.boot_transformers(folder, hf_model=model)
    names = [f"blocks.{i}.hook_out" for i in range(model.config.num_hidden_layers)]
    return lambda: bridge.run_with_cache(ids, names_filter=names), lambda: model(ids, use_cache=False)


if __name__ == "__main__":
    main()
