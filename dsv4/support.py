"""What there is to see: every value with its layout, what listening to it costs, and why a block has not got it."""

from dataclasses import dataclass

from dsv4 import values
from dsv4.config import Dsv4Config
from dsv4.table import Table
from dsv4.values import VALUES, Value


@dataclass(frozen=True)
class Support:
    """One row. `read` and `edit`: "free", "mat" (the block is spelled out while it is listened to) or "-" (read-only)."""

    name: str
    layout: str
    axes: str
    dtype: str
    read: str
    edit: str
    available: bool
    reason: str | None


def support(config: Dsv4Config, layer: int | None = None) -> Table:
    """Rows for the whole model (`layers.*.<value>`, the reason naming the layers that lack it), or for the model and one layer.

    The whole model's table also answers `table["layers.3.mlp.expert_weights"]`, and both answer a leaf name.
    """
    if layer is None:
        rows = [_over_layers(config, v) if v.module else _row(v, v.name, None) for v in VALUES.values()]
        return Table(rows, title="values of the model", find=lambda name: _find(config, rows, name))
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < config.num_layers:
        raise ValueError(f"layer {layer!r}: expected 0 <= layer < {config.num_layers}")
    rows = [_of_layer(config, v, layer) if v.module else _row(v, v.name, None) for v in VALUES.values()]
    return Table(rows, title=f"values of layer {layer}", find=lambda name: _by_leaf(rows, name))


def _row(value: Value, name: str, reason: str | None, available: bool | None = None) -> Support:
    available = reason is None if available is None else available
    return Support(name, value.layout, value.axes, value.dtype, value.read, value.edit, available, reason)


def _of_layer(config: Dsv4Config, value: Value, layer: int) -> Support:
    name = value.full_name(layer)
    return _row(value, name, values.absent_reason(config, name))


def _over_layers(config: Dsv4Config, value: Value) -> Support:
    reasons = [values.absent_reason(config, value.full_name(i)) for i in range(config.num_layers)]
    name = value.full_name("*")
    missing = [i for i, reason in enumerate(reasons) if reason]
    if not missing:
        return _row(value, name, None)
    if len(missing) == config.num_layers:
        return _row(value, name, "; ".join(dict.fromkeys(reasons)))
    return _row(value, name, f"not on layers {', '.join(map(str, missing))}", available=True)


def _by_leaf(rows: list[Support], name: str) -> Support | None:
    return next((row for row in rows if row.name.rsplit(".", 1)[-1] == name), None)


def _find(config: Dsv4Config, rows: list[Support], name: str) -> Support | None:
    parts = name.split(".")
    value = VALUES.get(parts[-1])
    if value is not None and value.module and len(parts) > 2 and parts[1] in map(str, range(config.num_layers)):
        row = _of_layer(config, value, int(parts[1]))
        return row if row.name == name else None
    return _by_leaf(rows, name)
