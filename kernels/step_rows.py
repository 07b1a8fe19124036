"""Norm and rotary of what a decoding step projects, several kinds of row in one launch.

    latent  = norm(latent)                           key = rotary(norm(key)), written to column p mod R of a ring
    queries = rotary(norm(queries)) per head         index queries = rotary(index queries) per head

Every norm and every rotary is that of `dsv4.kernels.norm_rotary`, with its roundings. Both ops are registered (`dsv4::latent_and_key`,
`dsv4::turned_queries`) over device code that is imported when it is first asked for. They have no gradient.
Axes: b row, s token of the step, R column of a ring, N head, D head width.
"""

import torch
from torch import Tensor

from dsv4.kernels.norm_rotary import refusal, rms_norm, rotate


def columns_of(past: Tensor, after: Tensor, tokens: int, columns: int) -> tuple[Tensor, Tensor]:
    """(column of a ring [b s] of each of a step's tokens, whether the row takes it [b s]): past, after [b] tokens of each row."""
    place = past.unsqueeze(1) + torch.arange(tokens, device=past.device)
    return place % columns, place < after.unsqueeze(1)


def write_ring(ring: Tensor, new: Tensor, past: Tensor, after: Tensor) -> None:
    """new [b s width] into ring [b R width], in place; tokens that a row does not take are not written."""
    place, takes = columns_of(past, after, new.shape[1], ring.shape[1])
    rows = torch.arange(len(ring), device=ring.device).unsqueeze(1)
    ring[rows, place] = torch.where(takes.unsqueeze(-1), new.to(ring.dtype), ring[rows, place])


def latent_and_key_definition(
    latent: Tensor,
    key: Tensor,
    ring: Tensor,
    latent_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    past: Tensor,
    after: Tensor,
    latent_eps: float,
    key_eps: float,
) -> Tensor:
    """What `latent_and_key` does, in plain torch."""
    write_ring(ring, rotate(rms_norm(key, key_weight, key_eps), cos, sin), past, after)
    return rms_norm(latent, latent_weight, latent_eps)


@torch.library.custom_op("dsv4::latent_and_key", mutates_args=("ring",))
def latent_and_key(
    latent: Tensor,
    key: Tensor,
    ring: Tensor,
    latent_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    past: Tensor,
    after: Tensor,
    latent_eps: float,
    key_eps: float,
) -> Tensor:
    """The query latent normed; the keys normed, turned and written into their ring.

    Args:
        latent: [b s L]. key: [b s D] of the same dtype. ring: [b R D] of that dtype, R >= s; written in place at the columns of the
            tokens that the rows take: token p in column p mod R.
        latent_weight: [L] float32. key_weight: [D] float32. cos, sin: [b s turned / 2] float32.
        past, after: [b] int64 tokens of each row before and after the step; a row takes after - past of its s tokens, the first ones.
    Returns:
        [b s L], dense.
    Raises:
        ValueError: shapes or dtypes that do not fit, or a device on which it cannot run.
    """
    (b, s, width), half = key.shape, cos.shape[-1]
    _check(key, max(width, latent.shape[-1]), width, half)
    _check_all(
        {
            "latent": (latent, (b, s, latent.shape[-1]), key.dtype),
            "ring": (ring, (b, ring.shape[1], width), key.dtype),
            "latent_weight": (latent_weight, latent.shape[-1:], torch.float32),
            "key_weight": (key_weight, (width,), torch.float32),
            "cos": (cos, (b, s, half), torch.float32),
            "sin": (sin, (b, s, half), torch.float32),
            "past": (past, (b,), torch.int64),
            "after": (after, (b,), torch.int64),
        },
        f"keys {list(key.shape)}",
    )
    if ring.shape[1] < s or ring.stride(-1) != 1:
        raise ValueError(f"ring {list(ring.shape)}, strides {ring.stride()}, for {s} tokens; expected a column for each, and dense rows")
    from dsv4.kernels import _step_rows_triton as device_code

    return device_code.latent_and_key(latent, key, ring, latent_weight, key_weight, cos, sin, past, after, latent_eps, key_eps)


@latent_and_key.register_fake
def _(latent, key, ring, latent_weight, key_weight, cos, sin, past, after, latent_eps, key_eps):
    return latent.new_empty(latent.shape)


def turned_queries_definition(queries: Tensor, index_queries: Tensor, cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What `turned_queries` computes, in plain torch."""
    angles = cos.unsqueeze(2), sin.unsqueeze(2)
    return rotate(rms_norm(queries, None, eps), *angles), rotate(index_queries, *angles)


@torch.library.custom_op("dsv4::turned_queries", mutates_args=())
def turned_queries(queries: Tensor, index_queries: Tensor, cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The queries normed per head, and turned; the indexer's queries turned.

    Args:
        queries: [b s N D]. index_queries: [b s ih id] of the same dtype. cos, sin: [b s turned / 2] float32.
    Returns:
        Both, dense.
    Raises:
        ValueError: shapes or dtypes that do not fit, or a device on which it cannot run.
    """
    (b, s, _, width), half = queries.shape, cos.shape[-1]
    _check(queries, max(width, index_queries.shape[-1]), min(width, index_queries.shape[-1]), half)
    _check_all(
        {
            "index_queries": (index_queries, (b, s, *index_queries.shape[2:]), queries.dtype),
            "cos": (cos, (b, s, half), torch.float32),
            "sin": (sin, (b, s, half), torch.float32),
        },
        f"queries {list(queries.shape)}",
    )
    from dsv4.kernels import _step_rows_triton as device_code

    return device_code.turned_queries(queries, index_queries, cos, sin, eps)


@turned_queries.register_fake
def _(queries, index_queries, cos, sin, eps):
    return queries.new_empty(queries.shape), index_queries.new_empty(index_queries.shape)


def _check(x: Tensor, widest: int, turned_width: int, half: int) -> None:
    reason = refusal("triton", x.device, x.dtype, widest)
    if reason is not None:
        raise ValueError(f'backend="triton": {reason}; use backend="torch" (of a model: model.use_kernels("torch"))')
    if (half and turned_width % 2) or 2 * half > turned_width:
        raise ValueError(f"cos and sin of {2 * half} channels over rows of {turned_width}: expected an even width, no more than the row")


def _check_all(expected: dict, over: str) -> None:
    for name, (t, shape, dtype) in expected.items():
        if tuple(t.shape) != tuple(shape) or t.dtype != dtype:
            raise ValueError(f"{name} {list(t.shape)} {t.dtype} over {over}; expected {list(shape)} {dtype}")
