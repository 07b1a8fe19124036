"""How a model is split over the processes of a mesh: data, by module path.

A mesh names its dimensions. "tp" splits heads, output groups, index heads, the shared expert and the vocabulary; "ep" splits the
routed experts, which go over "tp" as well (over all processes of a stage); "pp" gives each stage a run of blocks. What no rule names
is whole on every process of a stage: compressors, routers, hyper-connections, norms, the low-rank query and the key projections.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dsv4.config import CSA, Dsv4Config
from dsv4.linear import SCALE_BLOCK, Fp8Linear

NAMES = ("pp", "ep", "tp")


@dataclass(frozen=True)
class Rule:
    """One row of the plan: which modules, how they are split, over which dimension."""

    pattern: str
    how: str
    over: str


ATTENTION = "layers.*.self_attn"
INDEXER = f"{ATTENTION}.compressor.indexer"
SHARED = "layers.*.mlp.shared_experts"
PLAN = (
    Rule("embed_tokens", "vocabulary", "tp"),
    Rule(ATTENTION, "heads", "tp"),
    Rule(f"{ATTENTION}.q_b_proj", "rows", "tp"),
    Rule(f"{ATTENTION}.o_a_proj", "groups", "tp"),
    Rule(f"{ATTENTION}.o_b_proj", "columns", "tp"),
    Rule(INDEXER, "index heads", "tp"),
    Rule(f"{INDEXER}.q_b_proj", "rows", "tp"),
    Rule(f"{INDEXER}.scorer.weights_proj", "rows", "tp"),
    Rule("layers.*.mlp.experts", "experts", "ep"),
    Rule(f"{SHARED}.gate_proj", "rows", "tp"),
    Rule(f"{SHARED}.up_proj", "rows", "tp"),
    Rule(f"{SHARED}.down_proj", "columns", "tp"),
    Rule("lm_head", "logits", "tp"),
)
# How -> the axis along which each of the module's own tensors is cut.
CUTS: Mapping[str, Mapping[str, int]] = {
    "vocabulary": {"weight": 0},
    "logits": {"weight": 0},
    "heads": {"sinks": 0},
    "index heads": {},
    "rows": {"weight": 0, "weight_scale_inv": 0},
    "groups": {"weight": 0, "weight_scale_inv": 0},
    "columns": {"weight": 1, "weight_scale_inv": 1},
    "experts": {"gate_up_proj": 0, "gate_up_proj_scale_inv": 0, "down_proj": 0, "down_proj_scale_inv": 0},
}
# Values of which a process of "tp" has a part, and the axis of the parts. All others it has whole.
PARTS = {
    "attention_queries_unrotated": "N",
    "attention_queries": "N",
    "attention_scores": "N",
    "attention_sink_logits": "N",
    "attention_probabilities": "N",
    "attention_sink_probability": "N",
    "attention_head_outputs": "N",
    "attention_premix": "N*D",
    "attention_low_rank_output": "o_groups",
    "attention_head_results": "N",
    "indexer_queries": "ih",
    "indexer_head_weights": "ih",
    "indexer_head_scores": "ih",
    "mlp_gate": "I",
    "mlp_up": "I",
    "mlp_activation": "I",
    "mlp_neurons": "I",
}


@dataclass(frozen=True)
class Dims:
    """A mesh by what its dimensions are for.

    Attributes:
        tp, ep, pp: meshes of one dimension, None where there is one process. ep spans every process of a stage that holds experts.
        world: all processes of the mesh, in one dimension.
    """

    tp: DeviceMesh | None
    ep: DeviceMesh | None
    pp: DeviceMesh | None
    world: DeviceMesh

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "Dims":
        """Raises ValueError for dimensions that have no meaning here."""
        names = mesh.mesh_dim_names
        if names is None:
            raise ValueError(f"mesh {tuple(mesh.shape)} has no names: init_device_mesh(..., mesh_dim_names=...) with names of {NAMES}")
        unknown = [name for name in names if name not in NAMES]
        if unknown or list(names) != sorted(names, key=NAMES.index):
            raise ValueError(f"mesh dimensions are {names}; expected names of {NAMES}, in that order")

        def one(*wanted: str) -> DeviceMesh | None:
            found = tuple(name for name in wanted if name in names)
            if not found:
                return None
            inner = mesh if found == names else mesh[found if len(found) > 1 else found[0]]
            inner = inner if inner.ndim == 1 else inner._flatten("_".join(found))
            return inner if inner.size() > 1 else None

        world = mesh if mesh.ndim == 1 else mesh._flatten("_".join(names))
        return cls(one("tp"), one("ep", "tp"), one("pp"), world)

    def over(self, name: str) -> DeviceMesh | None:
        return getattr(self, name)


@dataclass(frozen=True)
class Split:
    """One module to be split: its path, how, and over which processes."""

    path: str
    how: str
    mesh: DeviceMesh


@dataclass(frozen=True)
class Units:
    """What a dimension deals out: `count` of them, each `coded` rows or columns of FP8 codes, 0 where it is no codes.

    A part holds whole scale blocks, so that codes are kept as stored.
    """

    label: str
    count: int
    coded: int = 0

    def divides(self, n: int) -> bool:
        return self.count % n == 0 and (n == 1 or self.count // n * self.coded % SCALE_BLOCK == 0)

    def __str__(self) -> str:
        return f"{self.count} {self.label}" + (f" ({self.coded} x FP8, in blocks of {SCALE_BLOCK})" if self.coded else "")


class Cut(NamedTuple):
    """The part [begin, end) along `axis` that a process holds of one tensor."""

    axis: int
    begin: int
    end: int


def splits(model: nn.Module, dims: Dims) -> Iterator[Split]:
    """The modules of a model that the plan splits over these processes, in the order of the plan."""
    for rule in PLAN:
        mesh = dims.over(rule.over)
        if mesh is None:
            continue
        for path, _ in model.named_modules():
            if fnmatchcase(path, rule.pattern) and path.count(".") == rule.pattern.count("."):
                yield Split(path, rule.how, mesh)


def stage_of(layer: int, layers: int, stages: int) -> int:
    """The stage of "pp" that holds a block: runs of blocks, as equal as can be."""
    return layer * stages // layers


def check(model: nn.Module, config: Dsv4Config, dims: Dims) -> None:
    """ValueError, naming the legal sizes, where a dimension does not divide what it splits."""
    counts = {"tp": _tensor_units(model, config), "ep": (Units("routed experts", config.n_routed_experts),)}
    for name, units in counts.items():
        mesh = dims.over(name)
        misfits = [] if mesh is None else [str(unit) for unit in units if not unit.divides(mesh.size())]
        if misfits:
            most = min(unit.count for unit in units)
            legal = [str(n) for n in range(1, most + 1) if all(unit.divides(n) for unit in units)]
            raise ValueError(
                f'mesh: {mesh.size()} processes over "{name}" do not divide {", ".join(misfits)}; legal sizes for this model are '
                f"{', '.join(legal)}"
            )
    stages = 1 if dims.pp is None else dims.pp.size()
    if stages > config.num_hidden_layers:
        blocks = config.num_hidden_layers
        raise ValueError(f'mesh: {stages} stages over "pp" for {blocks} blocks; legal sizes for this model are 1 to {blocks}')


def _tensor_units(model: nn.Module, config: Dsv4Config) -> tuple[Units, ...]:
    """What "tp" divides."""
    coded = [path for path, module in model.named_modules() if isinstance(module, Fp8Linear)]

    def rows(size: int, *patterns: str) -> int:
        return size if any(fnmatchcase(path, pattern) for path in coded for pattern in patterns) else 0

    units = (
        Units("attention heads", config.num_attention_heads, rows(config.head_dim, f"{ATTENTION}.q_b_proj")),
        Units("output groups", config.o_groups, rows(config.o_lora_rank, f"{ATTENTION}.o_?_proj")),
        Units("neurons of the shared expert", config.moe_intermediate_size, rows(1, f"{SHARED}.*_proj")),
        Units("tokens of the vocabulary", config.vocab_size),
    )
    if CSA not in config.layer_types:
        return units
    return (*units, Units("index heads", config.index_n_heads, rows(config.index_head_dim, f"{INDEXER}.q_b_proj")))
