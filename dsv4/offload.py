"""Banks of experts whose weights stay in host memory or in the checkpoint's files: only the experts that a batch hits are brought to
the block's device, one matrix at a time, and decoded there.

    bank.gate_up(rows, ends)        for each expert hit, in order: bring, decode, multiply, forget

They have the methods of the resident banks and stand in their place (`mlp.experts`), so that no forward knows of it. The weights take
no gradient; activations and routing weights do, of every order: the backward pass brings the experts again and no graph keeps them.
Axes: E experts, I neurons, H width, n row.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from dsv4.experts import Experts, StoredExperts
from dsv4.hot import Hot
from dsv4.kernels import few_tokens
from dsv4.kernels.fp8_activations import as_quantized
from dsv4.kernels.grouped_experts import CHUNK, ROWS, Stored, grouped_experts, is_deployed, slots_in_order, sort_by_expert, swiglu
from dsv4.kernels.grouped_linear import decode, groups
from dsv4.kernels.numeric import wide

# Experts asked for before the one in turn is multiplied.
AHEAD = 8
# Where torch's own tensors begin, and dtypes whose products depend on it.
ALIGNMENT = 64
ORDERED = (torch.float32, torch.float64)
LEAVES = ("gate_up_proj", "down_proj")

# Codes (or values) of rows of a matrix, scales or None, grids of scales one over the other; as in dsv4.convert.pages.
Part = tuple[Tensor, Tensor | None, int]


class Home(Protocol):
    """Where the matrices of one bank stay, in memory that the CPU can read."""

    def parts(self, leaf: str, expert: int) -> list[Part]:
        """One expert's matrix, top to bottom."""

    def ahead(self, leaf: str, expert: int) -> None:
        """It is about to be asked for."""

    def check(self, leaf: str, expert: int, parts: list[Part], decoded: Tensor) -> None:
        """Raises if the file holds what its header cannot tell."""


class OffloadedExperts(Experts):
    """What both kinds share. `device`: where the experts are used; `hot`: copies on it, None where the home is used as it is.

    `kept_dtype`: None decodes to the activations' dtype, as a bank of codes does; else to that one first, as a dense bank holds it.
    """

    is_offloaded = True
    # Who guessed what this bank will be asked for (dsv4.lookahead.Lookahead), and has to know what it is.
    lookahead = None

    def __init__(self, bank: Experts, device: torch.device, hot: Hot | None, kept_dtype: torch.dtype | None):
        nn.Module.__init__(self)
        self.num_experts, self.neurons, self.width = bank.num_experts, bank.neurons, bank.width
        self.limit, self.backend, self.form, self.numerics = bank.limit, bank.backend, bank.form, bank.numerics
        self.device, self.hot, self.kept_dtype = device, hot, kept_dtype

    @property
    def home(self) -> Home:
        raise NotImplementedError

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor, valid: Tensor | None = None) -> Tensor:
        flat = [t.flatten(0, 1) for t in (x, indices, weights)]
        if valid is None:
            return self._routed(*flat).view(x.shape)
        # Nothing is brought for padding.
        rows = valid.flatten().nonzero().squeeze(-1)
        out = self._routed(*(t.index_select(0, rows) for t in flat))
        return out.new_zeros(flat[0].shape).index_copy(0, rows, out).view(x.shape)

    def _routed(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """x [t H], indices and weights [t k] -> [t H] float32."""
        if self.backend == "triton":
            # The device code reads one bank: that of the experts hit, numbered anew.
            hit, local = indices.unique(return_inverse=True)
            experts = hit.tolist()
            self.used(experts)
            return grouped_experts(x, local, weights, self.compact(experts, x.dtype), self.limit, self.backend, numerics=self.numerics)
        t, k = indices.shape
        step = max(1, max(CHUNK // self.width, ROWS * self.num_experts) // k)
        parts = [self._of_chunk(*(each[i : i + step] for each in (x, indices, weights))) for i in range(0, max(t, 1), step)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _of_chunk(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        is_dense = self.form == "dense" or self.kept_dtype is not None
        if is_dense and not is_deployed(self.numerics) and few_tokens.takes_slots(x, weights, self.neurons):
            # As the resident bank.
            return few_tokens.add_experts(x, weights, self._in_turn(indices[0].tolist(), x.dtype), self.limit)
        order, ends = sort_by_expert(indices, self.num_experts)
        rounded = self._rounding()
        gate, up = self.gate_up(rounded(x.index_select(0, order // indices.shape[-1])), ends).chunk(2, dim=-1)
        slots = slots_in_order(self.down(rounded(swiglu(gate, up, self.limit)), ends), order).unflatten(0, indices.shape)
        return (weights.unsqueeze(-2) @ wide(slots)).squeeze(-2)

    def _in_turn(self, experts: list[int], dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """(gate over up, down) of each, one after another."""
        self.used(experts)
        for expert in experts[:AHEAD]:
            for leaf in LEAVES:
                self.ahead(leaf, expert)
        for expert in experts:
            yield tuple(self.matrix(leaf, expert, dtype) for leaf in LEAVES)

    def _rounding(self) -> Callable[[Tensor], Tensor]:
        """What becomes of the rows that a matrix multiplies."""
        if not is_deployed(self.numerics):
            return lambda rows: rows
        if self.form != "fp8":
            raise ValueError(f'numerics="deployed" is for fp8 experts, and these are {self.form}; use numerics="exact"')
        return as_quantized

    def gate_up(self, rows: Tensor, ends: Tensor) -> Tensor:
        return Brought.apply(rows, ends, self, "gate_up_proj", False)

    def down(self, rows: Tensor, ends: Tensor) -> Tensor:
        return Brought.apply(rows, ends, self, "down_proj", False)

    def gate_up_matrix(self, expert: int, dtype: torch.dtype) -> Tensor:
        return self._copied("gate_up_proj", expert, dtype)

    def down_matrix(self, expert: int, dtype: torch.dtype) -> Tensor:
        return self._copied("down_proj", expert, dtype)

    def stored(self, dtype: torch.dtype) -> Stored:
        """Every expert brought to the device: a bank of its own memory."""
        return self.compact(range(self.num_experts), dtype)

    def compact(self, experts: Sequence[int], dtype: torch.dtype) -> Stored:
        """The experts named, in that order, as the device code reads a bank."""
        tensors: list[Tensor | None] = []
        for leaf in LEAVES:
            if self.form == "dense":
                tensors += torch.stack([self.matrix(leaf, e, dtype) for e in experts]), None
                continue
            parts = [self.brought(leaf, e) for e in experts]
            tensors.append(_stacked([[codes for codes, _, _ in each] for each in parts]))
            tensors.append(_stacked([[scale for _, scale, _ in each] for each in parts]))
        return Stored(*tensors)

    def matrix(self, leaf: str, expert: int, dtype: torch.dtype) -> Tensor:
        """One expert's matrix on the device in `dtype`; perhaps the very pages of a file, so not to be written to."""
        parts = self.brought(leaf, expert)
        return aligned(decoded_parts(parts, self.kept_dtype or dtype, lambda m: self.home.check(leaf, expert, parts, m)).to(dtype))

    def brought(self, leaf: str, expert: int) -> list[Part]:
        """The parts on the device."""
        if self.hot is None:
            return self.home.parts(leaf, expert)
        parts = self.home.parts(leaf, expert)
        copies = iter(self.hot.take(self.key(leaf, expert), lambda: _flat(parts)))
        return [(next(copies), next(copies), grids) for _, _, grids in parts]

    def ahead(self, leaf: str, expert: int, *, is_guess: bool = False) -> None:
        """One expert is about to be used, or likely to be."""
        if self.hot is None:
            self.home.ahead(leaf, expert)
        else:
            self.hot.ahead(self.key(leaf, expert), lambda: _flat(self.home.parts(leaf, expert)), is_guess=is_guess)

    def key(self, leaf: str, expert: int) -> tuple[int, str, int]:
        """Of a copy among the hot ones."""
        return id(self), leaf, expert

    def used(self, experts: Sequence[int]) -> None:
        """The tokens go to these."""
        if self.lookahead is not None:
            self.lookahead.used(self, experts)

    def dequantized(self, dtype: torch.dtype = torch.bfloat16) -> Experts:
        """The dense bank on the device, new parameters."""
        dense = Experts.__new__(Experts)
        nn.Module.__init__(dense)
        for name in ("num_experts", "neurons", "width", "limit", "backend"):
            setattr(dense, name, getattr(self, name))
        for leaf in LEAVES:
            setattr(dense, leaf, nn.Parameter(torch.stack([self.matrix(leaf, e, dtype) for e in range(self.num_experts)])))
        return dense

    def _copied(self, leaf: str, expert: int, dtype: torch.dtype) -> Tensor:
        """A tensor that belongs to the caller."""
        if not -self.num_experts <= expert < self.num_experts:
            raise IndexError(f"expert {expert} of a bank of {self.num_experts}")
        found = self.matrix(leaf, int(expert) % self.num_experts, dtype)
        held = [codes.untyped_storage().data_ptr() for codes, _, _ in self.brought(leaf, int(expert) % self.num_experts)]
        return found.clone() if found.untyped_storage().data_ptr() in held else found

    def _apply(self, fn, recurse=True):
        # Weights stay at home; where a model with such banks may go is for the model to say.
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.form}, {self.where}"


class HostExperts(OffloadedExperts):
    """The bank in host memory, under the names it always has."""

    where = "on the host"

    def __init__(self, bank: Experts, device: torch.device, hot: Hot | None, kept_dtype: torch.dtype | None):
        super().__init__(bank, device, hot, kept_dtype)
        self.grids = {leaf: grids if isinstance(bank, StoredExperts) else 1 for leaf, grids in zip(LEAVES, (2, 1), strict=True)}
        for name, parameter in bank._parameters.items():
            self.register_parameter(name, nn.Parameter(parameter.detach(), requires_grad=False))

    @property
    def home(self) -> Home:
        return self

    def parts(self, leaf: str, expert: int) -> list[Part]:
        scale = self._parameters.get(f"{leaf}_scale_inv")
        return [(self._parameters[leaf].detach()[expert], None if scale is None else scale.detach()[expert], self.grids[leaf])]

    def ahead(self, leaf: str, expert: int, *, is_guess: bool = False) -> None:
        if self.hot is not None:
            super().ahead(leaf, expert, is_guess=is_guess)

    def check(self, leaf: str, expert: int, parts: list[Part], decoded: Tensor) -> None:
        """Loading has checked it."""


class DiskExperts(OffloadedExperts):
    """The bank in the files it was saved in. `home`: `dsv4.shelves.BankPages`."""

    where = "on disk"

    def __init__(self, bank: Experts, device: torch.device, hot: Hot | None, kept_dtype: torch.dtype | None, home: Home):
        super().__init__(bank, device, hot, kept_dtype)
        object.__setattr__(self, "_home", home)

    @property
    def home(self) -> Home:
        return self._home

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        raise refuse_state(prefix)

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        raise refuse_state(prefix)


class Brought(torch.autograd.Function):
    """rows [n in] sorted by expert through the matrices of an offloaded bank -> [n out]; transposed: [n out] -> [n in]."""

    @staticmethod
    def forward(rows: Tensor, ends: Tensor, bank: OffloadedExperts, leaf: str, transposed: bool) -> Tensor:
        hits = groups(ends)
        bank.used([expert for expert, _, _ in hits])
        for expert, _, _ in hits[:AHEAD]:
            bank.ahead(leaf, expert)
        width = {("gate_up_proj", False): 2 * bank.neurons, ("down_proj", True): bank.neurons}.get((leaf, transposed), bank.width)
        out = rows.new_empty(rows.shape[0], width)
        for number, (expert, i, j) in enumerate(hits):
            for later, _, _ in hits[number + AHEAD : number + AHEAD + 1]:
                bank.ahead(leaf, later)
            matrix = bank.matrix(leaf, expert, rows.dtype)
            out[i:j] = nn.functional.linear(rows[i:j], matrix.t() if transposed else matrix)
        return out

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, ends, ctx.bank, ctx.leaf, ctx.transposed = inputs
        ctx.save_for_backward(ends)
        ctx.save_for_forward(ends)

    @staticmethod
    def backward(ctx, dy: Tensor):
        (ends,) = ctx.saved_tensors
        return Brought.apply(dy.contiguous(), ends, ctx.bank, ctx.leaf, not ctx.transposed), None, None, None, None

    @staticmethod
    def jvp(ctx, rows: Tensor, *_):
        (ends,) = ctx.saved_tensors
        return Brought.apply(rows, ends, ctx.bank, ctx.leaf, ctx.transposed)


def decoded_parts(parts: Sequence[Part], dtype: torch.dtype, check) -> Tensor:
    """Parts -> one matrix in `dtype`; a view where there is one part that is that already."""
    pieces = [codes.to(dtype) if scale is None else decode(codes, scale, dtype, grids) for codes, scale, grids in parts]
    found = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    check(found)
    return found


def aligned(x: Tensor) -> Tensor:
    """A copy of a float32 or float64 matrix on the CPU that begins elsewhere than torch's own tensors do (pages of a file): products
    over it add up in another order.
    """
    is_elsewhere = x.dim() > 1 and x.device.type == "cpu" and x.dtype in ORDERED and x.untyped_storage().data_ptr() % ALIGNMENT
    return x.clone() if is_elsewhere else x


def refuse_state(prefix: str) -> ValueError:
    return ValueError(
        f"{prefix.rstrip('.')} stays in the checkpoint's files and has no tensors to hand out or to take: save_pretrained writes a model "
        'with such weights file by file; load with experts="resident" (and no "disk" in device_map) for a state_dict'
    )


def _flat(parts: Sequence[Part]) -> list[Tensor | None]:
    return [t for codes, scale, _ in parts for t in (codes, scale)]


def _stacked(experts: list[list[Tensor]]) -> Tensor:
    """Parts of each expert -> [E rows columns], through bytes: not every one-byte dtype has kernels for it."""
    dtype = experts[0][0].dtype
    as_bytes = [[t.view(torch.uint8) if dtype.itemsize == 1 else t for t in parts] for parts in experts]
    return torch.stack([torch.cat(parts) if len(parts) > 1 else parts[0] for parts in as_bytes]).view(dtype)
