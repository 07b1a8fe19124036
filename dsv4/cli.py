"""The command `dsv4`. An error of the caller is one line on stderr and exit code 2."""

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version

PROGRAM = "dsv4"
DTYPES = ("float32", "bfloat16", "float16", "official", "stored")
RUN_DTYPES = ("float32", "bfloat16")
# Equal to what the modules they come from hold (a test), which importing would make --help slow.
READOUTS = ("head", "mean", "each", "final_pre")
UNITS = ("sublayer", "head", "expert", "slot", "neuron")
PICTURES = ("token_pattern", "routing", "streams", "lens", "attribution")
PLACES = ("resident", "host", "disk")
RATES = (
    ("hbm", "4.8TB", "memory of a GPU"),
    ("host", "300GB", "memory of the host"),
    ("pcie", "55GB", "link from the host to a GPU"),
    ("disk", "7GB", "disk"),
    ("nvlink", "450GB", "link between GPUs"),
)
# What wrong paths, prompts, files and options raise; anything else keeps its traceback.
CALLERS = (ValueError, OSError, NotImplementedError)
FAILED, INTERRUPTED = 2, 130
SHORT_WIDTH, AXES_WIDTH = 120, 28


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (argparse exits by itself on wrong usage, with 2)."""
    arguments = parser().parse_args(argv)
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has what it wanted; Python would complain once more on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except CALLERS as error:
        print(f"{PROGRAM}: {' '.join(str(error).split())}", file=sys.stderr)
        return FAILED
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog=PROGRAM,
        description="DeepSeek-V4, written to be watched: every value can be read and edited.",
    )
    top.add_argument("--version", action="version", version=f"{PROGRAM} {version('dsv4')}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="watch one prompt on a checkpoint",
        description=(
            "Watch one prompt: the answer, the values there are, routing, streams, lens, the "
            "indexer's picks, an expert switched off, a vector added; saves one picture. "
            "Downloads nothing without --model."
        ),
    )
    demo.add_argument("prompt", nargs="?", help="text; token ids where the checkpoint has no tokenizer")
    demo.add_argument("--model", metavar="PATH_OR_ID", help="a folder or hub id (default: the shipped checkpoint)")
    demo.add_argument(
        "--contrast",
        metavar="PROMPT",
        help="steer by what this prompt's end has and the prompt's has not",
    )
    demo.add_argument("--out", default="dsv4_demo.png", metavar="FILE", help="the picture (default: %(default)s)")
    demo.add_argument("--device", help="cpu (default), cuda, ...")
    demo.set_defaults(run=run_demo)

    inspect = commands.add_parser("inspect", help="what a checkpoint holds, without reading its weights")
    inspect.add_argument("model", metavar="PATH_OR_ID")
    inspect.set_defaults(run=run_inspect)

    convert = commands.add_parser("convert", help="rewrite a checkpoint in another format")
    convert.add_argument("src", metavar="SRC", help="folder or hub id")
    convert.add_argument("dst", metavar="DST", help="folder to write; refused if it holds something")
    convert.add_argument(
        "--to",
        default="bf16",
        metavar="FORMAT",
        help=(
            "bf16 or fp32 (official names, dequantised), official (as the released files: FP8, "
            "FP4 experts), transformers, hybrid (default: %(default)s)"
        ),
    )
    convert.add_argument(
        "--dtype",
        choices=DTYPES,
        help="in place of the dtype that FORMAT implies; stored keeps each",
    )
    convert.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is in DST")
    convert.set_defaults(run=run_convert)

    add_plan(commands)
    add_watching(commands)

    listing = commands.add_parser("values", help="every standard value: name, layout, axes, cost, meaning")
    listing.add_argument("--short", action="store_true", help="names only, by module and axes")
    listing.set_defaults(run=run_values)

    support = commands.add_parser("support", help="the values that one checkpoint has, from its config alone")
    support.add_argument("--model", metavar="PATH_OR_ID", help="a folder or hub id (default: the shipped checkpoint)")
    support.add_argument("--layer", type=int, help="one block (default: all, as layers.*)")
    support.set_defaults(run=run_support)
    return top


def add_plan(commands) -> None:
    plan = commands.add_parser(
        "plan",
        help="what a model needs on given machines: layout, bytes, and a bound of its speed",
        description=(
            "Layout, bytes by device, KV cache, bytes moved by a decoding step and the time that bounds it, calculated from the config "
            "(and, of a checkpoint, its headers). Bytes are written as 141GB (powers of ten) or 80GiB, rates as bytes a second."
        ),
    )
    plan.add_argument("--model", required=True, metavar="flash|pro|PATH_OR_ID")
    plan.add_argument("--gpus", default="1x141GB", metavar="NxBYTES", help="0 for none (default: %(default)s)")
    plan.add_argument("--host", default="1TB", metavar="BYTES", help="host memory (default: %(default)s)")
    plan.add_argument("--experts", choices=PLACES, default="resident", help="where routed experts stay (default: %(default)s)")
    plan.add_argument("--weights", choices=("native", "bf16"), default="native", help="(default: %(default)s)")
    plan.add_argument("--map", choices=("auto", "balanced"), default="balanced", help="as device_map (default: %(default)s)")
    plan.add_argument("--context", default="8192", metavar="N", help="tokens held of each row, also as 128k or 1M (default: %(default)s)")
    plan.add_argument("--batch", type=positive, default=1, metavar="N", help="rows that decode together (default: %(default)s)")
    for name, rate, what in RATES:
        plan.add_argument(f"--{name}-rate", default=rate, metavar="BYTES", help=f"{what}, a second (default: %(default)s)")
    plan.add_argument("--json", action="store_true", help="one line of JSON in place of a table")
    plan.set_defaults(run=run_plan)


def add_watching(commands) -> None:
    """The commands that look at one prompt: dsv4/commands.py."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("prompt", nargs="?", help="text; token ids where the checkpoint has no tokenizer")
    shared.add_argument("--model", metavar="PATH_OR_ID", help="a folder or hub id (default: the shipped checkpoint)")
    shared.add_argument("--device", help="cpu (default), cuda, ...")
    shared.add_argument("--dtype", choices=RUN_DTYPES, help="what to compute in (default: what the config says)")
    shared.add_argument("--json", action="store_true", help="one line of JSON in place of a table")
    place = argparse.ArgumentParser(add_help=False)
    place.add_argument("--pos", type=int, default=-1, help="position in the prompt (default: -1, the last token)")

    def add(name: str, about: str, *parents) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.", parents=parents)
        command.set_defaults(run=run_watching, command=name)
        return command

    lens = add("lens", "every block's streams read as the next token", shared, place)
    lens.add_argument("--readout", choices=READOUTS, default="head", help="(default: %(default)s)")
    lens.add_argument("--top", type=positive, default=5, metavar="K", help="(default: %(default)s)")

    attribute = add("attribute", "what each part of the model put into a logit", shared, place)
    attribute.add_argument("--token", metavar="T", help="(default: the model's answer)")
    attribute.add_argument("--against", metavar="T", help="subtract the logit of this token")
    attribute.add_argument(
        "--unit",
        action="append",
        choices=UNITS,
        help="split attentions by head, mixtures by expert, slot or neuron; may be given twice",
    )
    attribute.add_argument("--top", type=positive, default=12, metavar="K", help="(default: %(default)s)")

    route = add("route", "experts of the prompt's tokens, by block", shared, place)
    route.add_argument("--layer", type=int, help="one block (default: all)")

    cache = add("cache", "write the values of a run to a safetensors file", shared)
    cache.add_argument("--out", required=True, metavar="FILE", help="refused if it exists")
    cache.add_argument(
        "--names",
        nargs="+",
        metavar="NAME",
        help="names or globs, as `dsv4 values` lists them (default: the residual set)",
    )
    cache.add_argument("--pos", type=int, help="one token's values only")

    add("compare", "the error of every value against transformers, same checkpoint", shared)

    view = add("view", "one HTML file of the run, or one picture", shared)
    view.add_argument("--out", default="run.html", metavar="FILE", help="run.html (default), or a picture's name")
    view.add_argument(
        "--picture",
        choices=PICTURES,
        help="with --out FILE.png, .svg or .pdf: this picture, drawn with matplotlib",
    )
    view.add_argument("--layer", type=int, help="the picture's block")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: expected at least 1")
    return number


# Each command imports what it needs: `dsv4 --version` and `dsv4 values` are quick.


def check_device(device: str | None) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    # An unknown name is a RuntimeError; a torch without CUDA asserts.
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from error


def run_watching(arguments: argparse.Namespace) -> None:
    from dsv4 import commands

    check_device(arguments.device)
    getattr(commands, f"run_{arguments.command}")(arguments)


def run_demo(arguments: argparse.Namespace) -> None:
    from dsv4 import demo

    check_device(arguments.device)
    demo.run(
        arguments.prompt,
        model=arguments.model,
        contrast=arguments.contrast,
        device=arguments.device,
        out=arguments.out,
        write=lambda text: print(text, flush=True),
    )


def run_inspect(arguments: argparse.Namespace) -> None:
    from dsv4.convert import inspect_checkpoint
    from dsv4.convert.hub import fetch_headers

    with fetch_headers(arguments.model) as folder:
        # A hub id's headers lie in a temporary folder.
        print(replace(inspect_checkpoint(folder), folder=arguments.model))


def run_plan(arguments: argparse.Namespace) -> None:
    from dsv4.scale import plan_of

    rates = {name: getattr(arguments, f"{name}_rate") for name, _, _ in RATES}
    found = plan_of(
        arguments.model,
        arguments.gpus,
        arguments.host,
        experts=arguments.experts,
        weights=arguments.weights,
        strategy=arguments.map,
        context=arguments.context,
        rows=arguments.batch,
        rates=rates,
    )
    print(json.dumps(found.as_dict()) if arguments.json else "\n".join(found.lines()))


def run_convert(arguments: argparse.Namespace) -> None:
    import torch
    from tqdm import tqdm

    from dsv4.convert import convert_checkpoint
    from dsv4.convert.hub import fetch

    dtype = arguments.dtype
    dtype = dtype if dtype in (None, "official", "stored") else getattr(torch, dtype)
    source = fetch(arguments.src)
    with tqdm(unit="B", unit_scale=True, desc="converting", leave=False, delay=1) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        options = {"to": arguments.to, "dtype": dtype, "overwrite": arguments.overwrite}
        try:
            folder = convert_checkpoint(source, arguments.dst, **options, progress=show)
        except FileExistsError as error:
            # The same advice, in the words of the command.
            said = str(error).replace("overwrite=True", "--overwrite")
            raise FileExistsError(said) from error
    print(f"wrote {folder}; `{PROGRAM} inspect {folder}` tells what it holds")


def run_values(arguments: argparse.Namespace) -> None:
    print("\n".join(short_values() if arguments.short else all_values()))


def all_values() -> list[str]:
    """One line for each standard value."""
    from dsv4.values import VALUES

    rows = [("name", "kind", "layout", "axes", "dtype", "read", "edit", "meaning")]
    for value in VALUES.values():
        name = value.full_name("*") if value.module else value.name
        about = (value.kind, value.layout, value.axes, value.dtype, value.read, value.edit)
        rows.append((name, *about, value.meaning))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(row).rstrip() for row in cells]


def short_values() -> list[str]:
    """Names under their module, by axes; README shows these lines."""
    from dsv4.values import VALUES

    modules: dict[str, dict[str, list[str]]] = {}
    for value in VALUES.values():
        by_axes = modules.setdefault(value.module, {})
        by_axes.setdefault(value.axes, []).append(value.name)
    lines = []
    for module, by_axes in modules.items():
        lines.append(module or "model")
        for axes, names in by_axes.items():
            wrapped = textwrap.wrap(" ".join(names), SHORT_WIDTH - AXES_WIDTH)
            starts = [f"  {axes}", *[""] * (len(wrapped) - 1)]
            lines += [s.ljust(AXES_WIDTH) + n for s, n in zip(starts, wrapped, strict=True)]
    return lines


def run_support(arguments: argparse.Namespace) -> None:
    import torch

    from dsv4.config import Dsv4Config
    from dsv4.convert.hub import fetch
    from dsv4.demo import checkpoint_folder
    from dsv4.model import Dsv4

    folder = fetch(arguments.model or checkpoint_folder(), weights=False)
    config = Dsv4Config.from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    # Without memory: the table depends on the config alone.
    with torch.device("meta"):
        model = Dsv4(config)
    print(model.support(arguments.layer))
