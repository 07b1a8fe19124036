"""From one checkpoint folder to another without building a model: what `dsv4 convert` does."""

from collections.abc import Iterator
from pathlib import Path

import torch

from dsv4.convert.encoder import PLAIN_DTYPES, FileDtype, pair_scales
from dsv4.convert.names import Place, Scheme
from dsv4.convert.reader import Checkpoint, Progress, open_checkpoint
from dsv4.convert.writer import MAX_SHARD_BYTES, write_parts

# --to: the names to write, and the dtype unless another is asked for.
TARGETS: dict[str, tuple[Scheme, FileDtype]] = {
    "bf16": ("official", torch.bfloat16),
    "fp32": ("official", torch.float32),
    "official": ("official", "official"),
    "transformers": ("transformers", torch.bfloat16),
    "hybrid": ("hybrid", torch.bfloat16),
}
# What stands beside the weights and belongs to them.
COMPANIONS = (
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
    ),
    *("chat_template.jinja", "LICENSE", "LICENSE.txt"),
)


def convert_checkpoint(
    src: str | Path,
    dst: str | Path,
    *,
    to: str = "bf16",
    dtype: FileDtype | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    strict_config: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Rewrite the checkpoint in `src` as `dst`, tokenizer files included, and return its path.

    Args:
        to: "bf16" or "fp32": official names, everything dequantised. "official": the formats of the
            released files (FP8, FP4 experts); codes that are there are kept bit for bit.
            "transformers", "hybrid": those names, BF16.
        dtype: in place of the dtype that `to` says: a torch dtype, "stored" (keep everything as it
            is), "official".
        progress: called with (bytes read, bytes to read).
    Memory: one shard of the target and one stored tensor, for "transformers" one stack of experts
        beside.
    Raises what open_checkpoint and write_checkpoint raise, and ValueError where `src` lies inside
    `dst`.
    """
    if to not in TARGETS:
        raise ValueError(f"to is {to!r}; expected one of {', '.join(TARGETS)}")
    scheme, target = TARGETS[to]
    target = target if dtype is None else dtype
    src, dst = Path(src).expanduser(), Path(dst).expanduser()
    if dst.resolve() in src.resolve().parents:
        raise ValueError(f"{src} lies inside {dst}, which is to be replaced; pass another target")
    checkpoint = open_checkpoint(src, strict_config=strict_config).check()
    has_codes = any(form != "dense" for name, form in checkpoint.formats.items() if name.endswith("mlp.experts"))
    if scheme == "transformers" and (target == "official" or (target == "stored" and has_codes)):
        # As write_checkpoint: quantised stacks are nothing that transformers reads on every device.
        scheme = "hybrid"
    return write_parts(
        pair_scales(_read(checkpoint, scheme, target, progress)),
        checkpoint.config,
        dst,
        scheme=scheme,
        dtype=target,
        overwrite=overwrite,
        max_shard_bytes=max_shard_bytes,
        extra_files=[src / name for name in COMPANIONS if (src / name).is_file()],
    )


def _read(checkpoint: Checkpoint, scheme: Scheme, target: FileDtype, progress: Progress | None) -> Iterator:
    """The source in the dtype of the target: experts one by one, unless the target stacks them."""
    is_plain = target in PLAIN_DTYPES
    options = {"dtype": target if is_plain else None, "native": not is_plain}
    if scheme != "transformers":
        return checkpoint.parts(**options, progress=progress)
    return ((Place(name), tensor) for name, tensor in checkpoint.tensors(**options, progress=progress))
