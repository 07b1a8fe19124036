"""What watching costs: one forward of a random model, plain and with values captured or hooked.

    python benchmarks/watching.py [--device cuda] [--dtype bfloat16] [--layers 12] [--hidden 1024]
    [--seq 1024]

Prints the fastest of `--repeats` interleaved rounds for each way, as a multiple of the plain run,
and the bytes captured.
The last line is JSON. `--bytes` prints what sets of values take on V4-Flash instead, from its
config alone.
"""

import argparse
import json
import time

import torch

from dsv4 import Dsv4, Dsv4Config
from dsv4.config import CSA, HASH_MOE, HCA, MOE, SLIDING

# What is captured in each way; None is the residual set.
WAYS = {
    "the residual set": None,
    "every layer_output": "layers.*.layer_output",
    "every mlp_output, expert_weights, expert_indices": [
        "**.mlp_output",
        "**.expert_weights",
        "**.expert_indices",
    ],
    "attention_probabilities of one CSA block": "layers.2.self_attn.attention_probabilities",
    "attention_probabilities of every block": "**.attention_probabilities",
    "attention_head_results of every block": "**.attention_head_results",
    "expert_outputs of every block": "**.expert_outputs",
    "everything": "**",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bytes", action="store_true", help="sizes on V4-Flash, no run")
    options = parser.parse_args()
    if options.bytes:
        sizes()
        return
    model = random_model(options)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocab_size, (1, options.seq), generator=generator).to(options.device)
    ways = {"plain": lambda: model(ids)}
    for title, names in WAYS.items():
        ways[title] = lambda names=names: model.run_with_cache(ids, names, max_bytes=None)
    keep = [("layers.2.layer_output", lambda value, hook: None)]
    ways["a hook at one layer_output"] = lambda: model.run_with_hooks(ids, keep)
    best = {title: float("inf") for title in ways}
    with torch.no_grad():
        for _ in range(options.repeats + 1):
            for title, run in ways.items():
                best[title] = min(best[title], seconds(run, options.device))
    rows = {}
    for title, taken in best.items():
        names = WAYS.get(title, [])
        nbytes = model.estimate(names, 1, options.seq)["total"] if title in WAYS else 0
        rows[title] = {
            "ms": round(1e3 * taken, 1),
            "times": round(taken / best["plain"], 2),
            "bytes": nbytes,
        }
        print(f"{title:<50} {1e3 * taken:>9.1f} ms  {taken / best['plain']:>5.2f} x  {nbytes / 2**20:>9.1f} MiB")
    print(json.dumps({"options": vars(options), "torch": torch.__version__, "rows": rows}))


def random_model(options) -> Dsv4:
    kinds = [SLIDING, SLIDING, *[CSA, HCA] * options.layers][: options.layers]
    width = options.hidden
    config = Dsv4Config.tiny(
        num_hidden_layers=options.layers,
        layer_types=kinds,
        mlp_layer_types=[HASH_MOE] * 2 + [MOE] * (options.layers - 2),
        hidden_size=width,
        moe_intermediate_size=width // 2,
        num_attention_heads=8,
        head_dim=64,
        n_routed_experts=16,
        num_experts_per_tok=4,
        sliding_window=128,
        vocab_size=4096,
        max_position_embeddings=max(options.seq, 1024),
    )
    return Dsv4.from_config(config, seed=0, dtype=getattr(torch, options.dtype)).to(options.device)


def seconds(run, device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    begun = time.perf_counter()
    run()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def sizes() -> None:
    with torch.device("meta"):
        model = Dsv4(Dsv4Config.flash()).bfloat16()
    names = {
        **WAYS,
        "one layer_output": "layers.20.layer_output",
        "layer_output, mlp_output and attention_output of every block": [
            "**.layer_output",
            "**.mlp_output",
            "**.attention_output",
        ],
    }
    for title, chosen in names.items():
        found = [model.estimate(chosen, 1, seq)["total"] for seq in (1024, 8192)]
        print(f"{title:<62} " + "  ".join(f"{n / 2**30:>10.3f} GiB" for n in found))


if __name__ == "__main__":
    main()
