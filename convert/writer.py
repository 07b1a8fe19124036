"""Writing a checkpoint: shard by shard into a folder beside the target, synced, then renamed.

    tensors -> codes paired with scales -> stacks cut -> cast or quantised -> shards, index, config

Whatever stops a run, under the target's name there is the old folder, the complete new one, or
nothing.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from torch import Tensor

from dsv4.config import Dsv4Config
from dsv4.convert.encoder import CODE_FORMATS, PLAIN_DTYPES, Encoder, FileDtype, Part, pair_scales
from dsv4.convert.folder import new_folder
from dsv4.convert.names import SCHEMES, Place, Scheme
from dsv4.convert.plan import is_gate_up
from dsv4.convert.reader import CONFIG_NAME
from dsv4.convert.shards import ShardWriter

FileFormat = Literal["official", "transformers", "hybrid"]
MAX_SHARD_BYTES = 5_000_000_000


def write_checkpoint(
    state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    config: Dsv4Config,
    folder: str | Path,
    *,
    format: FileFormat = "official",
    dtype: FileDtype = "stored",
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    extra_files: Iterable[str | Path] = (),
) -> Path:
    """Write every tensor of a model under `folder` and return its path.

    Args:
        state: our state_dict names; FP8 or FP4 codes are accompanied by `..._scale_inv`. Read once,
            in any order; in the order of the blocks no more than one shard is held.
        format: "official": DeepSeek's names, a shard for each block. "hybrid": what transformers
            writes by default. "transformers": its module names; of a mapping with quantised experts
            the hybrid ones, since transformers reads quantised stacks back on a GPU only.
        dtype: "stored" keeps each dtype, and codes bit for bit. A torch dtype dequantises and casts
            all that follows the model's dtype. "official" quantises what the released files have
            quantised (codes given are kept) and rounds the rest to BF16. Float32 parameters stay
            F32; norms are BF16 in official files where BF16 holds them exactly (under
            dtype="official" always), so that reading gives the same bits.
        overwrite: replace a checkpoint that is there already; the folder is replaced as a whole.
        max_shard_bytes: a shard is closed before it grows beyond this, unless by a single tensor.
        extra_files: copied under their own names.
    Raises:
        ValueError: tensors that are missing, unknown, or of another shape or dtype; weights that
            FP4 cannot hold.
        FileExistsError: the folder is not empty and overwrite is not given, or it is no checkpoint.
    """
    scheme: Scheme = format
    if format == "transformers" and isinstance(state, Mapping) and _will_quantise_experts(state, dtype):
        scheme = "hybrid"
    pairs = state.items() if isinstance(state, Mapping) else state
    parts = pair_scales((Place(name), tensor) for name, tensor in pairs)
    return write_parts(
        parts,
        config,
        folder,
        scheme=scheme,
        dtype=dtype,
        overwrite=overwrite,
        max_shard_bytes=max_shard_bytes,
        extra_files=extra_files,
    )


def write_parts(
    parts: Iterable[Part],
    config: Dsv4Config,
    folder: str | Path,
    *,
    scheme: Scheme,
    dtype: FileDtype,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    extra_files: Iterable[str | Path] = (),
) -> Path:
    """write_checkpoint for a stream that may bring experts one by one."""
    if scheme not in SCHEMES:
        raise ValueError(f"format is {scheme!r}; expected one of {', '.join(SCHEMES)}")
    if dtype not in ("stored", "official", *PLAIN_DTYPES):
        raise ValueError(f"dtype is {dtype!r}; expected 'stored', 'official' or one of {PLAIN_DTYPES}")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; expected a positive number")
    folder = Path(folder).expanduser()
    with new_folder(folder, overwrite=overwrite, marker=CONFIG_NAME) as partial:
        encoder = Encoder(config, scheme, dtype)
        shards = ShardWriter(partial.path, max_shard_bytes, encoder.group_sizes() if scheme == "official" else None)
        for place, tensors in encoder.encode(parts):
            shards.add(encoder.group_of(place), tensors)
        shards.finish()
        for file in map(Path, extra_files):
            partial.copy(file)
        style = "official" if scheme == "official" else "transformers"
        partial.write(CONFIG_NAME, json.dumps(encoder.final_config().to_hf(style), indent=2) + "\n")
    return folder


def _will_quantise_experts(state: Mapping[str, Tensor], dtype: FileDtype) -> bool:
    if dtype == "stored":
        return any(tensor.dtype in CODE_FORMATS for name, tensor in state.items() if is_gate_up(name))
    return dtype == "official"
