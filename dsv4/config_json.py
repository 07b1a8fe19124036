"""config.json of the hub in both its styles, as the fields of `Dsv4Config` and back.

- official: `compress_ratios` (one per block, entries past `num_hidden_layers` belong to the MTP
  stages; 0 = sliding window, exactly 4 = CSA, anything else = HCA), `num_hash_layers`,
  `rope_theta` + `compress_rope_theta` + `rope_scaling`;
- transformers: `layer_types`, `mlp_layer_types`, `compress_rates`, `rope_parameters`.

Where a file carries both, the explicit second style is read and the first has to agree with it.
Plain data in, plain data out; what the values may be is checked by `Dsv4Config` itself.
"""

import difflib
import math
import warnings
from collections.abc import Mapping
from typing import Any

MODEL_TYPE = "deepseek_v4"
SLIDING = "sliding_attention"
CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"
HASH_MOE = "hash_moe"
MOE = "moe"
DEFAULT_RATES = {CSA: 4, HCA: 128}
DEFAULT_ROTARY_FACTOR = 64 / 512
ROPE_THETA = 10000.0
COMPRESS_ROPE_THETA = 160000.0
YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0}
YARN_KEYS = ("rope_theta", "factor", *YARN_DEFAULTS, "original_max_position_embeddings")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Fields whose official spelling is another key.
EXPLICIT = ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters")
# Keys that become fields of other names.
TRANSLATED = (
    *("model_type", "compress_ratios", "num_hash_layers", "rope_scaling", "rope_theta", "dtype"),
    *("compress_rope_theta", "compress_rate_csa", "compress_rate_hca", "partial_rotary_factor"),
    *("intermediate_size", "num_local_experts"),
)
# Keys whose null means absent. The token ids keep it; anywhere else it is an error by name.
NULLABLE = (
    *(*EXPLICIT, *TRANSLATED, "torch_dtype", "quantization_config", "expert_dtype"),
    *("qk_rope_head_dim", "mtp_compress_ratios"),
)
# Keys that change no value of a forward pass in eval mode; most are PretrainedConfig's.
HARMLESS_PREFIXES = ("dspark_", "vision_")
HARMLESS = (
    *("architectures", "transformers_version", "auto_map", "use_cache", "attention_dropout"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "pretraining_tp"),
    *("_name_or_path", "name_or_path", "_commit_hash", "_attn_implementation"),
    *("_attn_implementation_internal", "_attn_implementation_autoset", "attn_implementation"),
    *("_experts_implementation", "_experts_implementation_internal", "experts_implementation"),
    *("_output_attentions", "output_attentions", "output_hidden_states", "return_dict"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "add_cross_attention"),
    *("tie_encoder_decoder", "cross_attention_hidden_size", "id2label", "label2id", "num_labels"),
    *("problem_type", "finetuning_task", "prefix", "task_specific_params", "tokenizer_class"),
    *("sep_token_id", "decoder_start_token_id", "torchscript", "use_bfloat16", "tf_legacy_loss"),
    *("tie_last_hidden_states", "max_length", "max_new_tokens", "min_length", "do_sample"),
    *("early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature"),
    *("top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
    *("num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id"),
    *("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty"),
    *("suppress_tokens", "begin_suppress_tokens"),
)
# Keys that would change the model if they held anything.
HARMLESS_IF_EMPTY = ("per_layer_config", "pruned_heads")


def error(field: str, got: Any, expected: str) -> ValueError:
    """The one form of every complaint about a config."""
    return ValueError(f"{field}: got {got!r}, expected {expected}")


def count(field: str, value: Any, low: int) -> int:
    """`value`, which must be an int (not a bool) of at least `low`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise error(field, value, f"an int >= {low}")
    return value


def number(field: str, value: Any, zero: bool = False) -> float:
    """`value` as a float: finite, and positive or (with `zero`) not negative."""
    isnumber = isinstance(value, int | float) and not isinstance(value, bool)
    if not isnumber or not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise error(field, value, "a finite number " + (">= 0" if zero else "> 0"))
    return float(value)


def agreed(found: Mapping[str, Any]) -> Any:
    """The value that several keys give, None where none is given; they must not contradict."""
    given = {key: value for key, value in found.items() if value is not None}
    values = list(given.values())
    if any(value != values[0] for value in values):
        said = " but ".join(f"{key} = {value!r}" for key, value in given.items())
        raise ValueError(f"config.json contradicts itself: {said}; expected them to agree")
    return values[0] if values else None


def hash_blocks_first(num_layers: int, num_hash: int) -> tuple[str, ...]:
    """mlp_layer_types of a model whose first `num_hash` blocks route by token id."""
    return tuple(HASH_MOE if layer < num_hash else MOE for layer in range(num_layers))


def rotary_width(head_dim: int, factor: float) -> int:
    """Rotated channels of a head; the small addend undoes the rounding of width / head_dim."""
    return int(head_dim * number("partial_rotary_factor", factor) + 1e-6)


def read(mapping: Mapping[str, Any], fields: Mapping[str, Any], strict: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Values for the fields a config.json sets, and the rotary tables it describes (one or two).

    `fields` maps every field of Dsv4Config to its default. An absent key means what it means to
    transformers. Two tables come back when both styles give one; the caller compares them.
    """
    given = dict(mapping)
    _check_model_type(given.pop("model_type", None))
    _check_keys(given, fields, strict)
    given = {key: v for key, v in given.items() if v is not None or key not in NULLABLE}
    values = {key: given[key] for key in fields if key in given}
    for alias, field in (
        ("intermediate_size", "moe_intermediate_size"),
        ("num_local_experts", "n_routed_experts"),
    ):
        if alias in given:
            values[field] = agreed({alias: given[alias], field: given.get(field)})
    dtypes = {key: given[key] for key in ("torch_dtype", "dtype") if key in given}
    if dtypes:
        said = {key: str(dtype).removeprefix("torch.") for key, dtype in dtypes.items()}
        values["torch_dtype"] = agreed(said)
    n = count("num_hidden_layers", given.get("num_hidden_layers", fields["num_hidden_layers"]), 1)
    head_dim = count("head_dim", given.get("head_dim", fields["head_dim"]), 1)
    values |= _read_quantization(given) | _read_layers(given, n) | _read_mlp_layers(given, n)
    values["qk_rope_head_dim"] = _read_rotary_width(given, head_dim)
    values.pop("rope_parameters", None)
    return values, _read_rope(given)


def _check_model_type(model_type: Any) -> None:
    if model_type == "deepseek_v41":
        raise ValueError(
            "model_type: got 'deepseek_v41'; DeepSeek-V4.1 is another architecture (32x32 scales, "
            "engram tables, its own ratios) that this package does not build; load a deepseek_v4."
        )
    if model_type != MODEL_TYPE:
        raise error("model_type", model_type, f"{MODEL_TYPE!r} (config.json next to the weights)")


def _check_keys(given: Mapping[str, Any], fields: Mapping[str, Any], strict: bool) -> None:
    known = {*fields, *TRANSLATED, *HARMLESS}
    unknown = [
        key
        for key, value in given.items()
        if key not in known and not key.startswith(HARMLESS_PREFIXES) and not (key in HARMLESS_IF_EMPTY and not value)
    ]
    if not unknown:
        return
    named = ", ".join(f"{key} = {given[key]!r}"[:120] for key in unknown[:10])
    near = sorted({n for key in unknown for n in difflib.get_close_matches(key, known, 1, 0.8)})
    message = (
        f"config.json has {len(unknown)} key(s) this model does not know: {named}"
        + (f"; did you mean {', '.join(near)}?" if near else "")
        + "; a key may change the model, so strict loading stops here (strict=False ignores them)"
    )
    if strict:
        raise ValueError(message)
    warnings.warn(message, stacklevel=4)


def _mapping(given: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = given.get(key, {})
    if not isinstance(value, Mapping):
        raise error(key, value, "a mapping")
    return value


def _per_layer(given: Mapping[str, Any], key: str) -> list[Any] | None:
    value = given.get(key)
    if value is not None and not isinstance(value, list | tuple):
        raise error(key, value, "a list with one entry per block")
    return None if value is None else list(value)


def _read_quantization(given: Mapping[str, Any]) -> dict[str, Any]:
    """transformers moves expert_dtype into quantization_config; here it has one place."""
    quantization = dict(_mapping(given, "quantization_config"))
    inner = quantization.pop("expert_dtype", None)
    expert_dtype = agreed({"expert_dtype": given.get("expert_dtype"), "quantization_config.expert_dtype": inner})
    return {"quantization_config": quantization or None, "expert_dtype": expert_dtype}


def kind_of_ratio(ratio: int) -> str:
    """What a ratio of the official list builds: exactly 4 means overlap and indexer."""
    return SLIDING if ratio == 0 else CSA if ratio == DEFAULT_RATES[CSA] else HCA


def _read_layers(given: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    rates = dict(_mapping(given, "compress_rates"))
    for kind, key in ((CSA, "compress_rate_csa"), (HCA, "compress_rate_hca")):
        rate = agreed({key: given.get(key), f"compress_rates[{kind!r}]": rates.get(kind)})
        rates |= {} if rate is None else {kind: rate}
    kinds, ratios = _per_layer(given, "layer_types"), _per_layer(given, "compress_ratios")
    mtp = _per_layer(given, "mtp_compress_ratios")
    if ratios is not None:
        ratios = [count("compress_ratios", ratio, 0) for ratio in ratios]
        if len(ratios) < num_layers:
            raise error("compress_ratios", len(ratios), f">= num_hidden_layers = {num_layers}")
        main, tail = ratios[:num_layers], ratios[num_layers:]
        kinds = [kind_of_ratio(ratio) for ratio in main] if kinds is None else kinds
        mtp = agreed({"compress_ratios past the blocks": tail, "mtp_compress_ratios": mtp})
        for layer, (kind, ratio) in enumerate(zip(kinds, main, strict=False)):
            if kind in DEFAULT_RATES and ratio != 0:
                rates.setdefault(kind, ratio)
            expected = rates.get(kind, 0 if kind == SLIDING else "a rate")
            if ratio != expected and kind in (SLIDING, *DEFAULT_RATES):
                raise error(f"compress_ratios[{layer}]", ratio, f"{expected}: it is a {kind} block")
    kinds = None if kinds is None else kinds[:num_layers]
    return {"compress_rates": rates, "mtp_compress_ratios": mtp or (), "layer_types": kinds}


def _read_mlp_layers(given: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    kinds, hashes = _per_layer(given, "mlp_layer_types"), given.get("num_hash_layers")
    kinds = None if kinds is None else kinds[:num_layers]
    if hashes is not None:
        named = list(hash_blocks_first(num_layers, count("num_hash_layers", hashes, 0)))
        if kinds is not None and kinds != named:
            at = [layer for layer, kind in enumerate(kinds) if kind == HASH_MOE]
            raise error("num_hash_layers", hashes, f"mlp_layer_types to agree; it has them at {at}")
        kinds = named
    return {"mlp_layer_types": kinds}


def _read_rotary_width(given: Mapping[str, Any], head_dim: int) -> int:
    width, factor = given.get("qk_rope_head_dim"), given.get("partial_rotary_factor")
    if factor is None and width is None:
        return rotary_width(head_dim, DEFAULT_ROTARY_FACTOR)
    of_factor = None if factor is None else rotary_width(head_dim, factor)
    said = {"qk_rope_head_dim": width, f"head_dim * partial_rotary_factor {factor}": of_factor}
    return agreed(said)


def _read_rope(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    theta = given.get("rope_theta", ROPE_THETA)
    compress_theta = given.get("compress_rope_theta", COMPRESS_ROPE_THETA)
    tables = []
    for key in ("rope_parameters", "rope_scaling"):
        table = _mapping(given, key)
        if "main" in table or "compress" in table:
            # transformers keeps stale bases beside the nested form, which alone counts
            tables.append(dict(table))
        elif table:
            own_theta = table.get("rope_theta", theta)
            if own_theta not in (theta, compress_theta):
                raise error(f"{key}.rope_theta", own_theta, f"{theta} or {compress_theta}")
            flat = {**table, "rope_theta": compress_theta}
            tables.append({"main": {"rope_theta": theta}, "compress": flat})
    plain = {"main": {"rope_theta": theta}, "compress": {"rope_theta": compress_theta}}
    return tables or [plain]


def rope_tables(tables: Any, head_dim: int, width: int, max_positions: int) -> dict[str, dict[str, Any]]:
    """{"main", "compress"} in one form, whichever way they were written.

    Each has rope_type and rope_theta, and all of YaRN's numbers where rope_type is "yarn". A
    partial_rotary_factor is dropped, once it is found to agree with `width` of `head_dim` channels.
    """
    labels = ("main", "compress")
    if not isinstance(tables, Mapping) or not set(labels) <= set(tables):
        raise error("rope_parameters", tables, "a mapping with 'main' and 'compress'")
    # transformers drops what an older version left beside the two
    left = set(tables) - {*labels, *YARN_KEYS, "type", "rope_type", "partial_rotary_factor"}
    if left:
        raise error("rope_parameters", sorted(left), "'main' and 'compress'")
    normal = {}
    for label in labels:
        where, table = f"rope_parameters.{label}", tables[label]
        if not isinstance(table, Mapping):
            raise error(where, table, "a mapping with rope_theta and rope_type")
        given = {key: value for key, value in table.items() if value is not None}
        factor = given.pop("partial_rotary_factor", width / head_dim)
        if rotary_width(head_dim, factor) != width:
            raise error(f"{where}.partial_rotary_factor", factor, f"{width} / {head_dim}")
        normal[label] = _rope_table(where, given, max_positions)
    return normal


def _rope_table(where: str, given: dict[str, Any], max_positions: int) -> dict[str, Any]:
    names = {f"{where}.{key}": given.pop(key, None) for key in ("rope_type", "type")}
    rope_type = agreed(names) or "default"
    if rope_type not in ("default", "yarn"):
        raise error(f"{where}.rope_type", rope_type, "'default' or 'yarn'")
    if rope_type == "default":
        keys = ("rope_theta",)
    else:
        # the ramp between the corrected channels is rounded to whole ones, never interpolated
        if given.pop("truncate", True) is not True:
            raise error(f"{where}.truncate", False, "True")
        keys = YARN_KEYS
        given = YARN_DEFAULTS | {"original_max_position_embeddings": max_positions} | given
    if set(given) != set(keys):
        said = f"exactly {', '.join(keys)} for rope_type {rope_type!r}"
        raise error(where, sorted(given), said)
    numbers: dict[str, Any] = {key: number(f"{where}.{key}", given[key]) for key in keys}
    if rope_type == "yarn":
        length = "original_max_position_embeddings"
        numbers[length] = count(f"{where}.{length}", given[length], 1)
    return {"rope_type": rope_type, **numbers}


def write(fields: Mapping[str, Any], style: str) -> dict[str, Any]:
    """The config.json of the given field values (lists and dicts, no tuples), as JSON data."""
    if style not in ("official", "transformers"):
        raise error("style", style, "'official' or 'transformers'")
    rope = fields["rope_parameters"]
    written = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": MODEL_TYPE,
        "attention_dropout": 0.0,
        "use_cache": True,
        "rope_theta": rope["main"]["rope_theta"],
        "compress_rope_theta": rope["compress"]["rope_theta"],
    }
    for key, value in fields.items():
        elsewhere = key in (*EXPLICIT, "torch_dtype", "mtp_compress_ratios")
        if not elsewhere and (value is not None or key in TOKEN_IDS):
            written[key] = value
    dtype = str(fields["torch_dtype"]).removeprefix("torch.")
    if style == "official":
        return written | {"torch_dtype": dtype} | _official(fields)
    head_dim, width = fields["head_dim"], fields["qk_rope_head_dim"]
    factor = width / head_dim
    # transformers truncates the product, which must not lose a channel to rounding
    factor = math.nextafter(factor, 2.0) if int(head_dim * factor) < width else factor
    written |= {key: fields[key] for key in EXPLICIT}
    written |= _mtp(fields)
    nested = {label: {**rope[label], "partial_rotary_factor": factor} for label in rope}
    shares = {"partial_rotary_factor": factor, "rope_parameters": nested}
    return written | {"dtype": dtype} | shares


def _mtp(fields: Mapping[str, Any]) -> dict[str, Any]:
    ratios = fields["mtp_compress_ratios"]
    return {"mtp_compress_ratios": ratios} if ratios else {}


def _official(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The official spelling, and the explicit one of what official keys cannot say."""
    kinds, mlps, rates, rope = (fields[key] for key in EXPLICIT)
    keys: dict[str, Any] = {}
    ratios = [rates.get(kind, 0) for kind in kinds]
    is_sayable = [kind_of_ratio(ratio) for ratio in ratios] == kinds
    if is_sayable:
        keys["compress_ratios"] = ratios + fields["mtp_compress_ratios"]
    else:
        keys |= _mtp(fields)
    if not is_sayable or rates != DEFAULT_RATES:
        keys |= {"layer_types": kinds, "compress_rates": rates}
    num_hash = mlps.count(HASH_MOE)
    if mlps == list(hash_blocks_first(len(mlps), num_hash)):
        keys["num_hash_layers"] = num_hash
    else:
        keys["mlp_layer_types"] = mlps
    if rope["main"]["rope_type"] != "default":
        keys["rope_parameters"] = rope
    elif rope["compress"]["rope_type"] == "yarn":
        yarn = {key: v for key, v in rope["compress"].items() if not key.startswith("rope_")}
        if yarn["attention_factor"] == YARN_DEFAULTS["attention_factor"]:
            del yarn["attention_factor"]
        keys["rope_scaling"] = {"type": "yarn", **yarn}
    return keys
