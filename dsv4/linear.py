"""Linear layers, by how their weight is held: dense, or FP8 codes with 128x128 scales as the checkpoint stores them."""

import torch
from torch import Tensor, nn

from dsv4.kernels.block_scaled_linear import block_scaled_linear
from dsv4.kernels.few_tokens import linear
from dsv4.kernels.numeric import wide
from dsv4.kernels.quantize import dequantize_fp8

SCALE_BLOCK = 128


class Linear(nn.Module):
    """y = W x with a dense weight [out, in]; no bias."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.matrix(x.dtype))

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """[out, in] in `dtype`."""
        return self.weight.to(dtype)

    def whole_matrix(self, dtype: torch.dtype) -> Tensor:
        """The same, also where a process of a mesh holds a part (then every process has to ask)."""
        return self.matrix(dtype)

    def in_float32(self, x: Tensor) -> Tensor:
        """W x with both sides widened: for projections whose result decides (routing, pooling, index weights)."""
        x = wide(x)
        return linear(x, self.matrix(x.dtype))

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}"


class Coded(nn.Module):
    """A module whose weights are codes with scales, kept as stored. Reading one as a matrix is explicit: `dequantized()`."""

    CODES: torch.dtype

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in PyTorch, which assignment calls too; ValueError for values in place of codes."""
        allowed = (torch.float8_e8m0fnu, torch.float32) if name.endswith("_scale_inv") else (self.CODES,)
        if param is not None and param.dtype not in allowed:
            raise ValueError(
                f"{type(self).__name__}.{name} holds codes as the checkpoint stores them, {' or '.join(map(str, allowed))}; got "
                f"{param.dtype}. To edit the weight, put the dense module of the same weight in its place: "
                "model.set_submodule(name, module.dequantized()), or model.dequantize()"
            )
        super().register_parameter(name, param)


class Fp8Linear(Coded, Linear):
    """The same over E4M3 codes [out, in] and scales [ceil(out / 128), ceil(in / 128)] (E8M0 or float32), kept as stored.

    The product is that of the dequantised weight, which no graph keeps. Codes take no gradient; activations do.

    Attributes:
        backend: who computes; chosen once, when the model is built (pretrained.use_kernels).
        numerics: "exact", or "deployed": activations are rounded to E4M3 first, as served models do, which changes the numbers.
    """

    CODES = torch.float8_e4m3fn
    backend = "torch"
    numerics = "exact"
    groups = 1

    def __init__(self, in_features: int, out_features: int):
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        grid = (-(-out_features // SCALE_BLOCK), -(-in_features // SCALE_BLOCK))
        self.weight = _frozen(torch.empty(out_features, in_features, dtype=torch.float8_e4m3fn))
        self.weight_scale_inv = _frozen(torch.empty(grid, dtype=torch.float8_e8m0fnu))

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x, self.backend, self.numerics)

    def in_float32(self, x: Tensor) -> Tensor:
        return self._product(wide(x), "torch", "exact")

    def _product(self, x: Tensor, backend: str, numerics: str) -> Tensor:
        return block_scaled_linear(x, self.weight, self.weight_scale_inv, self.groups, backend, numerics)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        return dequantize_fp8(self.weight, self.weight_scale_inv, dtype)

    def dequantized(self, dtype: torch.dtype = torch.bfloat16) -> Linear:
        """The dense layer of the same weight, a new parameter."""
        return self._dense(Linear, self.in_features, self.out_features, dtype=dtype)

    def _dense(self, kind: type[Linear], *sizes: int, dtype: torch.dtype) -> Linear:
        with torch.device("meta"):
            dense = kind(*sizes)
        dense.weight = nn.Parameter(self.matrix(dtype))
        return dense

    def _apply(self, fn, recurse=True):
        return apply_to_codes(self, fn)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, FP8"


class BlockDiagonalLinear(Linear):
    """Block-diagonal projection: input group g [in / groups] goes through rows g of the weight [groups * out_per_group, in / groups]."""

    def __init__(self, in_features: int, out_per_group: int, groups: int):
        super().__init__(in_features // groups, out_per_group * groups)
        # A process of a mesh computes `groups` of `all_groups`.
        self.groups = self.all_groups = groups

    def forward(self, x: Tensor) -> Tensor:
        """x [b s in] -> [b s groups out_per_group]."""
        return block_diagonal_product(x, self.by_group(x.dtype))

    def by_group(self, dtype: torch.dtype) -> Tensor:
        """[groups, out_per_group, in / groups]."""
        return self.matrix(dtype).unflatten(0, (self.groups, -1))


class Fp8BlockDiagonalLinear(Fp8Linear):
    """BlockDiagonalLinear over FP8 codes."""

    def __init__(self, in_features: int, out_per_group: int, groups: int):
        super().__init__(in_features // groups, out_per_group * groups)
        self.groups = self.all_groups = groups

    def forward(self, x: Tensor) -> Tensor:
        """x [b s in] -> [b s groups out_per_group]."""
        return super().forward(x).unflatten(-1, (self.groups, -1))

    by_group = BlockDiagonalLinear.by_group

    def dequantized(self, dtype: torch.dtype = torch.bfloat16) -> BlockDiagonalLinear:
        sizes = (self.in_features * self.groups, self.out_features // self.groups, self.groups)
        return self._dense(BlockDiagonalLinear, *sizes, dtype=dtype)


def block_diagonal_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [b s g*i], weight [g o i] -> [b s g o]."""
    b, s, _ = x.shape
    g, o, i = weight.shape
    return torch.bmm(x.reshape(b * s, g, i).transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1).reshape(b, s, g, o)


def apply_to_codes(module: nn.Module, fn) -> nn.Module:
    """`nn.Module._apply` for stored codes: they follow to another device and never change dtype."""

    def move(t: Tensor) -> Tensor:
        moved = fn(t)
        return moved if moved.dtype == t.dtype else t.to(moved.device)

    return nn.Module._apply(module, move)


def _frozen(t: Tensor) -> nn.Parameter:
    return nn.Parameter(t, requires_grad=False)
