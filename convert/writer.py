"""Writing a checkpoint folder: streamed shard by shard into a folder beside the target, synced, then renamed into place.

    stream of our tensors -> (pair codes with scales) -> (cut stacks) -> (cast or quantise) -> shards -> index, config.json

Whatever stops a run, under the target's name there is the old folder, the complete new one, or nothing.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from dsv4.config import Dsv4Config
from dsv4.convert import names
from dsv4.convert.folder import new_folder
from dsv4.convert.layout import FLOAT32, Spec, layout
from dsv4.convert.names import Place, Scheme
from dsv4.convert.plan import is_gate_up, part_shape, places, scale_place
from dsv4.convert.reader import CONFIG_NAME
from dsv4.convert.shards import ShardWriter
from dsv4.convert.tensors import decode, encode, parts_of

FileFormat = Literal["official", "transformers"]
FileDtype = Literal["stored", "official"] | torch.dtype

MAX_SHARD_BYTES = 5_000_000_000
PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODE_FORMATS = {torch.float8_e4m3fn: "fp8", torch.int8: "fp4"}
# As the released files say it; FP4 experts are declared by expert_dtype alone.
QUANTIZATION_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}

Part = tuple[Place, Tensor, Tensor | None]


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
        state: our state_dict names; FP8 or FP4 codes are accompanied by `..._scale_inv`. Read once, in any order; block
            by block keeps no more than one shard in memory.
        format: names and layout. "official": DeepSeek's names, one block per shard. "transformers": transformers' module
            names; where experts are quantised its hybrid style, the only one it can read back on every device.
        dtype: "stored" keeps each dtype and all codes bit for bit. A torch dtype dequantises and casts what follows the
            model's dtype. "official" quantises what the released files have quantised (codes given are kept) and rounds
            the rest to BF16. Except under "official", norms that BF16 does not hold exactly are written as F32, so that
            reading gives the same bits.
        overwrite: replace a checkpoint folder that is there already, as a whole.
        max_shard_bytes: a shard is closed before it would grow beyond this, unless a single tensor does.
        extra_files: copied under their own names.
    Raises:
        ValueError: tensors missing, unknown, of another shape or dtype; a weight that FP4 cannot hold.
        FileExistsError: the folder is not empty and overwrite is not given, or it is no checkpoint.
    """
    pairs = state.items() if isinstance(state, Mapping) else state
    parts = pair_scales((Place(name), tensor) for name, tensor in pairs)
    return write_parts(
        parts,
        config,
        folder,
        format=format,
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
    format: FileFormat,
    dtype: FileDtype,
    overwrite: bool,
    max_shard_bytes: int,
    extra_files: Iterable[str | Path],
) -> Path:
    """write_checkpoint for a stream that may hold experts one by one: (place, weight, its scale or None)."""
    if format not in ("official", "transformers"):
        raise ValueError(f"format is {format!r}; expected 'official' or 'transformers'")
    if dtype not in ("stored", "official", *PLAIN_DTYPES):
        raise ValueError(f"dtype is {dtype!r}; expected 'stored', 'official' or one of {PLAIN_DTYPES}")
    folder = Path(folder)
    with new_folder(folder, overwrite=overwrite, marker=CONFIG_NAME) as partial:
        for file in map(Path, extra_files):
            partial.copy(file)
        encoder = _Encoder(config, format, dtype)
        shards = ShardWriter(partial.path, max_shard_bytes, one_block_each=format == "official")
        for place, tensor in encoder.stored(parts):
            shards.add(names.block_of(place.name), place.name, encoder.name_of(place), tensor)
        encoder.check_complete()
        shards.finish()
        text = json.dumps(encoder.final_config().to_hf(format), indent=2) + "\n"
        partial.write(CONFIG_NAME, text)
    return folder
