"""One bijective table between the names of this package and those of checkpoint files.

Naming schemes of files:

- official: DeepSeek's own names, as in the released files;
- hybrid: what transformers' `save_pretrained` writes by default: `model.layers.N.` in front of the
  official leaf names;
- transformers: module paths of transformers' deepseek_v4.

Our names are the state_dict names of dsv4. Where a file keeps an expert by itself, one of our
tensors is a stack of many of the file's: a `Place` says which tensor, which expert of the stack and
which half of its rows. A name is read by its dotted parts, never by substring: `layers.1` and
`layers.13`, `kv_norm` and `compressor.kv_norm`, `hc_attn_scale` and `wq_a.scale` cannot be
confused. The scale of `X.weight` has a row of its own.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Scheme = Literal["official", "hybrid", "transformers"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)

# The halves of a stacked gate_up_proj, in the order of their rows.
GATE, UP = 0, 1


@dataclass(frozen=True)
class Place:
    """Where a file's tensor goes: one of our tensors, or a slice of a stacked one.

    `name` is ours; `expert` its index on the first axis and `half` GATE or UP on the second, None
    where the file's tensor is the whole of that axis.
    """

    name: str
    expert: int | None = None
    half: int | None = None


@dataclass(frozen=True)
class Row:
    """One line of the table: templates with {layer} and {expert}; a scheme that has no such tensor
    has None."""

    ours: str
    official: str | None
    hybrid: str | None
    transformers: str | None
    half: int | None = None

    def template(self, scheme: Scheme) -> str | None:
        return getattr(self, scheme)


# ours, official, hybrid, transformers
TOP = (
    (
        "embed_tokens.weight",
        "embed.weight",
        "model.embed_tokens.weight",
        "model.embed_tokens.weight",
    ),
    ("hc_head.hc_fn", "hc_head_fn", "model.hc_head.hc_fn", "model.hc_head.hc_fn"),
    ("hc_head.hc_base", "hc_head_base", "model.hc_head.hc_base", "model.hc_head.hc_base"),
    ("hc_head.hc_scale", "hc_head_scale", "model.hc_head.hc_scale", "model.hc_head.hc_scale"),
    ("norm.weight", "norm.weight", "model.norm.weight", "model.norm.weight"),
    ("lm_head.weight", "head.weight", "head.weight", "lm_head.weight"),
)

# Below layers.{layer}.: ours, official. `model.` in front of the official name is the hybrid one
# and `model.` in front of ours the transformers one, with the exceptions below.
BLOCK = (
    ("attn_hc.fn", "hc_attn_fn"),
    ("attn_hc.base", "hc_attn_base"),
    ("attn_hc.scale", "hc_attn_scale"),
    ("input_layernorm.weight", "attn_norm.weight"),
    ("self_attn.sinks", "attn.attn_sink"),
    ("self_attn.q_a_norm.weight", "attn.q_norm.weight"),
    ("self_attn.kv_norm.weight", "attn.kv_norm.weight"),
    ("self_attn.compressor.position_bias", "attn.compressor.ape"),
    ("self_attn.compressor.kv_norm.weight", "attn.compressor.norm.weight"),
    ("self_attn.compressor.indexer.position_bias", "attn.indexer.compressor.ape"),
    ("self_attn.compressor.indexer.kv_norm.weight", "attn.indexer.compressor.norm.weight"),
    ("self_attn.compressor.indexer.scorer.weights_proj.weight", "attn.indexer.weights_proj.weight"),
    ("ffn_hc.fn", "hc_ffn_fn"),
    ("ffn_hc.base", "hc_ffn_base"),
    ("ffn_hc.scale", "hc_ffn_scale"),
    ("post_attention_layernorm.weight", "ffn_norm.weight"),
    ("mlp.router.weight", "ffn.gate.weight"),
    ("mlp.router.tid2eid", "ffn.gate.tid2eid"),
    ("mlp.router.e_score_correction_bias", "ffn.gate.bias"),
)

# Linear maps of a block: `X.weight` and its scale, ours `X.weight_scale_inv`, theirs `X.scale`.
LINEAR = (
    ("self_attn.q_a_proj", "attn.wq_a"),
    ("self_attn.q_b_proj", "attn.wq_b"),
    ("self_attn.kv_proj", "attn.wkv"),
    ("self_attn.o_a_proj", "attn.wo_a"),
    ("self_attn.o_b_proj", "attn.wo_b"),
    ("self_attn.compressor.kv_proj", "attn.compressor.wkv"),
    ("self_attn.compressor.gate_proj", "attn.compressor.wgate"),
    ("self_attn.compressor.indexer.kv_proj", "attn.indexer.compressor.wkv"),
    ("self_attn.compressor.indexer.gate_proj", "attn.indexer.compressor.wgate"),
    ("self_attn.compressor.indexer.q_b_proj", "attn.indexer.wq_b"),
    ("mlp.shared_experts.gate_proj", "ffn.shared_experts.w1"),
    ("mlp.shared_experts.down_proj", "ffn.shared_experts.w2"),
    ("mlp.shared_experts.up_proj", "ffn.shared_experts.w3"),
)

# Stacked expert tensors below layers.{layer}.: ours, the half of its rows, official name of one
# expert's part.
EXPERTS = (
    ("mlp.experts.gate_up_proj", GATE, "ffn.experts.{expert}.w1"),
    ("mlp.experts.gate_up_proj", UP, "ffn.experts.{expert}.w3"),
    ("mlp.experts.down_proj", None, "ffn.experts.{expert}.w2"),
)

# Official leaf -> hybrid leaf where they differ: transformers undoes `.norm.` -> `.kv_norm.` too
# often.
HYBRID_EXCEPTIONS = {"attn.kv_norm.weight": "attn.norm.weight"}
# Ours -> transformers, by path below the block.
TRANSFORMERS_EXCEPTIONS = {"mlp.router.": "mlp.gate."}

# What the released files hold beyond the language model, by official name: a label and the pattern
# of the whole name. `model.` in front is allowed, for files renamed by others.
EXTRAS = (
    ("mtp (draft layers)", re.compile(r"(model\.)?mtp\..+")),
    ("vision tower", re.compile(r"(model\.)?(vision|aligner)\..+")),
    ("image tokens", re.compile(r"(model\.)?image_(start|end|pad|newline)")),
    (
        "router bias for image tokens",
        re.compile(r"(model\.)?layers\.\d+\.(ffn|mlp)\.gate\.bias_vl"),
    ),
)
# Skipped on a hash block, where only image tokens would use it.
HASH_BLOCK_EXTRA = "mlp.router.e_score_correction_bias"
HASH_BLOCK_EXTRA_LABEL = "router bias of hash blocks (image tokens only)"

_FIELDS = ("{layer}", "{expert}")


def to_place(scheme: Scheme, name: str) -> Place | None:
    """Where a file's tensor of that name goes, None if the scheme has no such name."""
    parts, numbers = _generalise(name)
    row = _by_template(scheme).get(parts)
    # A part that is literally "#" would look like a number.
    if row is None or "#" in name.split("."):
        return None
    values = dict(zip(_fields(row.template(scheme)), numbers, strict=True))
    return Place(_fill(row.ours, values.get("{layer}"), None), values.get("{expert}"), row.half)


def count_known(stored: Iterable[str]) -> dict[Scheme, int]:
    """How many of the files' names each scheme knows."""
    templates = Counter(_generalise(name)[0] for name in stored)
    return {scheme: sum(count for template, count in templates.items() if template in _by_template(scheme)) for scheme in SCHEMES}


def from_place(scheme: Scheme, place: Place) -> str | None:
    """The name in that scheme, the inverse of to_place; None if the scheme has no such tensor."""
    parts, numbers = _generalise(place.name)
    row = _by_place(scheme).get((parts, place.expert is None, place.half))
    if row is None:
        return None
    return _fill(row.template(scheme), numbers[0] if numbers else None, place.expert)


def block_of(name: str) -> int | None:
    """The block number in one of our names, None for a tensor outside the blocks."""
    numbers = _generalise(name)[1]
    return numbers[0] if numbers else None


def without_block(name: str) -> str:
    """One of our names with its block number taken out: `layers.{layer}.self_attn.sinks`."""
    return ".".join("{layer}" if part == "#" else part for part in _generalise(name)[0].split("."))


def weight_of_scale(name: str) -> str | None:
    """Our name of the weight that a scale of our name belongs to, None if it is no scale."""
    return name.removesuffix("_scale_inv") if name.endswith("_scale_inv") else None


def scale_of(name: str) -> str:
    """Our name of the scale of a linear `X.weight` or of a stacked expert tensor."""
    return f"{name}_scale_inv"


def can_be_scaled(name: str) -> bool:
    """Whether a tensor of our name may be quantised: the linear maps of LINEAR and the stacked
    experts."""
    return _generalise(scale_of(name))[0] in _our_templates()


def extra_label(name: str) -> str | None:
    """The group of known extras that a file's tensor belongs to, None if it is not one."""
    for label, pattern in EXTRAS:
        if pattern.fullmatch(name):
            return label
    return None


def _rows() -> tuple[Row, ...]:
    plain = [(ours, official) for ours, official in BLOCK]
    for ours, official in LINEAR:
        plain += [
            (f"{ours}.weight", f"{official}.weight"),
            (f"{ours}.weight_scale_inv", f"{official}.scale"),
        ]
    rows = [Row(*names) for names in TOP]
    rows += [_block_row(ours, official) for ours, official in plain]
    for ours, half, official in EXPERTS:
        rows.append(_block_row(ours, f"{official}.weight", half))
        rows.append(_block_row(f"{ours}_scale_inv", f"{official}.scale", half))
    for ours in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        for name in (ours, f"{ours}_scale_inv"):
            block = f"layers.{{layer}}.{name}"
            rows.append(Row(block, None, None, f"model.{block}"))
    return tuple(rows)


def _block_row(ours: str, official: str, half: int | None = None) -> Row:
    theirs = ours
    for mine, other in TRANSFORMERS_EXCEPTIONS.items():
        theirs = theirs.replace(mine, other) if theirs.startswith(mine) else theirs
    hybrid = HYBRID_EXCEPTIONS.get(official, official)
    prefix = "layers.{layer}."
    return Row(
        ours=prefix + ours,
        official=prefix + official,
        hybrid=f"model.{prefix}{hybrid}",
        transformers=None if "{expert}" in official else f"model.{prefix}{theirs}",
        half=half,
    )


ROWS = _rows()


def _generalise(name: str) -> tuple[str, list[int]]:
    """The name with each part that is a number replaced by '#', and those numbers."""
    parts = name.split(".")
    numbers = []
    for at, part in enumerate(parts):
        # Plain decimal digits without leading zeros, as a number is written out.
        if part.isdigit() and part.isascii() and (part[0] != "0" or part == "0"):
            numbers.append(int(part))
            parts[at] = "#"
    return ".".join(parts), numbers


def _fields(template: str | None) -> list[str]:
    return [part for part in (template or "").split(".") if part in _FIELDS]


def _template_key(template: str) -> str:
    return ".".join("#" if part in _FIELDS else part for part in template.split("."))


def _fill(template: str | None, layer: int | None, expert: int | None) -> str:
    assert template is not None
    return template.replace("{layer}", str(layer)).replace("{expert}", str(expert))


@functools.cache
def _our_templates() -> frozenset[str]:
    return frozenset(_template_key(row.ours) for row in ROWS)


@functools.cache
def _by_template(scheme: Scheme) -> dict[str, Row]:
    return {_template_key(t): row for row in ROWS if (t := row.template(scheme)) is not None}


@functools.cache
def _by_place(scheme: Scheme) -> dict[tuple[str, bool, int | None], Row]:
    return {(_template_key(row.ours), "{expert}" not in t, row.half): row for row in ROWS if (t := row.template(scheme)) is not None}
