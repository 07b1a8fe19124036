"""Weights that stay on disk: tokens and bytes a second of runs that read them from the checkpoint's files, beside plain reads of the files.

    python benchmarks/offload.py [--model small|narrow|flash] [--folder DIR] [--tokens 64] [--new 16] [--threads 1]

Writes a random checkpoint (flash: two blocks of Flash's true shapes, about 9 GB), then in processes of their own:
raw     reads of 8 MB, one after another, of the files that hold experts, after their pages were dropped (posix_fadvise), and again;
pages   every expert's pages in turn, asked for ahead and touched once as a run reads them, but neither decoded nor multiplied;
disk    loading with device_map={"": "disk"} under RLIMIT_DATA (own memory may grow by --share of the model), pages dropped; a prefill that
        meets most experts, then decoding. Then the same again with the pages in memory;
resident the same runs with every weight in memory, without a limit;
guess   how often the guess of a block's experts is right, token by token: the demo's trained model on text of its own, and a random model
        of 256 experts, 6 for a token.
Bytes read are those that the system fetched from storage for the process (/proc/self/io), readahead included. The last line is JSON.
"""

import argparse
import json
import multiprocessing
import os
import platform
import re
import resource
import shutil
import tempfile
import time
from pathlib import Path

import torch

from dsv4.testing_large import Peak, narrow_blocks, small_two_blocks, two_blocks, write_random

MODELS = {"small": small_two_blocks, "narrow": narrow_blocks, "flash": two_blocks}
CHUNK = 8 << 20


def shards(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*.safetensors"))


def drop_pages(folder: str) -> None:
    """Have the system forget the files' pages, as far as it does."""
    for file in shards(folder):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def from_storage() -> int:
    """Bytes fetched from storage for this process."""
    return int(re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)[1])


def raw(folder: str, args: dict) -> dict:
    drop_pages(folder)
    result = {}
    for name in ("raw_cold", "raw_again"):
        before, start, total = from_storage(), time.perf_counter(), 0
        for file in shards(folder):
            with file.open("rb", buffering=0) as stream:
                while chunk := stream.read(CHUNK):
                    total += len(chunk)
        seconds = time.perf_counter() - start
        result |= {f"{name}_MB_s": total / seconds / 1e6, f"{name}_fetched_MB": (from_storage() - before) / 1e6}
    return result


def pages(folder: str, args: dict) -> dict:
    from dsv4.model import Dsv4
    from dsv4.offload import AHEAD, LEAVES

    torch.set_num_threads(1)
    model = Dsv4.from_pretrained(folder, progress=False, experts="disk")
    drop_pages(folder)
    before, start, total = from_storage(), time.perf_counter(), 0
    for layer in model.layers:
        home = layer.mlp.experts.home
        for leaf in LEAVES:
            for expert in range(model.num_experts):
                for later in range(AHEAD) if expert == 0 else [expert + AHEAD - 1]:
                    if later < model.num_experts:
                        home.ahead(leaf, later)
                for part in home.parts(leaf, expert):
                    for t in part[:2]:
                        t.view(torch.uint8).max()
                        total += t.nbytes
    seconds = time.perf_counter() - start
    return {"pages_MB_s": total / seconds / 1e6, "pages_fetched_MB": (from_storage() - before) / 1e6}


def timed(model, ids, new: int) -> dict:
    with torch.no_grad():
        before, start = from_storage(), time.perf_counter()
        model(ids)
        middle, at_middle = time.perf_counter(), from_storage()
        kv = model.new_kv_cache(1, ids.shape[1] + new, rewind=0)
        model(ids[:, :1], kv_cache=kv)
        begin, at_begin = time.perf_counter(), from_storage()
        generator = torch.Generator().manual_seed(2)
        for token in torch.randint(0, model.vocab_size, (new, 1, 1), generator=generator):
            model(token, kv_cache=kv)
        end = time.perf_counter()
    prefill, decode = middle - start, end - begin
    return {
        "prefill_tokens_s": ids.shape[1] / prefill,
        "prefill_fetched_MB": (at_middle - before) / 1e6,
        "prefill_MB_s": (at_middle - before) / prefill / 1e6,
        "decode_tokens_s": new / decode,
        "decode_fetched_MB": (from_storage() - at_begin) / 1e6,
    }


def run(folder: str, args: dict, place: dict, limit: int | None) -> dict:
    from dsv4.model import Dsv4

    torch.set_num_threads(args["threads"])
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    if limit is not None:
        own = int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (own + limit, own + limit))
        drop_pages(folder)
    start = time.perf_counter()
    model = Dsv4.from_pretrained(folder, progress=False, **place)
    load_s = time.perf_counter() - start
    ids = torch.randint(0, model.vocab_size, (1, args["tokens"]), generator=torch.Generator().manual_seed(1))
    with Peak() as peak:
        first = timed(model, ids, args["new"])
        again = timed(model, ids, args["new"])
    return {"load_s": load_s, **first, **{f"again_{name}": value for name, value in again.items()}, "anon_MB": peak.anon / 1e6}


def disk(folder: str, args: dict) -> dict:
    return {f"disk_{name}": v for name, v in run(folder, args, {"device_map": {"": "disk"}}, args["limit"]).items()}


def resident(folder: str, args: dict) -> dict:
    return {f"resident_{name}": v for name, v in run(folder, args, {}, None).items()}


def guess(folder: str, args: dict) -> dict:
    from dsv4 import Dsv4, Dsv4Config
    from dsv4.demo import checkpoint_folder

    torch.set_num_threads(args["threads"])
    random = Dsv4Config.tiny(hidden_size=256, num_hidden_layers=8, n_routed_experts=256, num_experts_per_tok=6, moe_intermediate_size=32)
    trained = Dsv4.from_pretrained(checkpoint_folder(), progress=False, dtype=torch.float32)
    starts = torch.randint(5, trained.vocab_size, (8, 4), generator=torch.Generator().manual_seed(0))
    text = trained.generate(starts, 188, temperature=1.0, seed=list(range(8)), eos_token_id=None)
    found = {}
    for name, model, ids in (("trained", trained, text), ("random", Dsv4.from_config(random, seed=0), starts % random.vocab_size)):
        found |= {f"guess_{name}_{what}": share for what, share in guessed_right(model, ids).items()}
    return found


@torch.no_grad()
def guessed_right(model, ids: torch.Tensor) -> dict[str, float]:
    """Means over the blocks that route by score: `all`, share of a token's experts that its guess has; `asked`, share of them that are
    asked for; `right`, share of what is asked for that is used. `all` of other guesses: `before`, this router on what the mixture of the
    block before reads; `last`, the experts of the token before; `chance`, any.
    """
    from dsv4.lookahead import TOKENS, believed_of, likely

    names = ["layers.*.layer_input", "layers.*.mlp_norm_output", "layers.*.mlp.expert_indices"]
    _, cache = model.run_with_cache(ids, names, max_bytes=None)
    rows, others, k = [], [], model.top_k
    for i, block in enumerate(model.layers):
        if i and block.mlp.scoring != "hash":
            used, router = cache["expert_indices", i], block.mlp.router
            # As many at a time as a guess looks at.
            parts = cache["layer_input", i].flatten(0, 1).split(TOKENS)
            chosen = torch.cat([likely(block, part.unsqueeze(0)) for part in parts]).view(used.shape)
            rows.append(is_among(chosen, used).mean((0, 1)))
            before = router.choose(router.selection_scores(router.scores(router.logits(cache["mlp_norm_output", i - 1]))))
            others.append(torch.stack([is_among(before, used).mean(), is_among(used[:, :-1], used[:, 1:]).mean()]))
    ranks, (before, last) = torch.stack(rows).mean(0), torch.stack(others).mean(0).tolist()
    believed = ranks[: believed_of(k)]
    found = {"all": ranks.mean().item(), "asked": believed.sum().item() / k, "right": believed.mean().item()}
    return found | {"before": before, "last": last, "chance": k / model.num_experts}


def is_among(chosen: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """[... k] float64: which of those chosen are used."""
    return (chosen.unsqueeze(-1) == used.unsqueeze(-2)).any(-1).double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--folder", help="where the checkpoint goes (default: a temporary folder)")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint there, and reuse it when it is there")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.7, help="of the model's bytes, that own memory may grow by (default: %(default)s)")
    args = parser.parse_args()
    folder = Path(args.folder or tempfile.mkdtemp(prefix="offload_"))
    try:
        if not (args.keep and (folder / "config.json").exists()):
            write_random(MODELS[args.model](), folder)
        nbytes = sum(file.stat().st_size for file in shards(str(folder)))
        given = {"tokens": args.tokens, "new": args.new, "threads": args.threads, "limit": int(args.share * nbytes)}
        result = {"device": platform.processor() or platform.machine(), "torch": torch.__version__, "model": args.model, **given}
        result["model_MB"] = nbytes / 1e6
        context = multiprocessing.get_context("spawn")
        for stage in (raw, pages, disk, resident, guess):
            with context.Pool(1) as pool:
                result |= pool.apply(stage, (str(folder), given))
        result["pages_of_raw"] = result["pages_MB_s"] / result["raw_cold_MB_s"]
    finally:
        if not args.keep:
            shutil.rmtree(folder)
    for key, value in result.items():
        print(f"{key:32s} {value:,.2f}" if isinstance(value, float) else f"{key:32s} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
