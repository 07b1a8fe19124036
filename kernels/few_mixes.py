"""Mixing numbers of a hyper-connection for a token or two, in Python's floats: less work than to call torch a hundred times for 24 numbers.

Equations: dsv4.kernels.hyper_connection, of which this is the same with double precision inside and each result rounded once.
"""

from array import array
from collections.abc import Callable, Sequence
from functools import cache
from math import exp, inf

from torch import Tensor, float64

from dsv4.kernels.numeric import is_plain

FEW_TOKENS = 2
# Rounds that change no row's sum by more are not gone through: 20 of them would change nothing that float32 shows.
SETTLED = 1e-10


def takes(x: Tensor, tokens: int) -> bool:
    """Whether numbers of so many tokens like those of x may be read one by one."""
    return tokens <= FEW_TOKENS and is_plain(x)


def rounded(values: Sequence[float], like: Tensor) -> list[float]:
    """Values as a tensor like that one would hold them."""
    return list(values) if like.dtype == float64 else array("f", values).tolist()


def sigmoids(logits: Sequence[float], scale: float, base: Sequence[float]) -> list[float]:
    """sigmoid(scale * logits + base)."""
    return [_sigmoid(x * scale + b) for x, b in zip(logits, base, strict=True)]


def _sigmoid(z: float) -> float:
    if z < 0.0:
        e = exp(z)
        return e / (1.0 + e)
    return 1.0 / (1.0 + exp(-z))


def start(logits: Sequence[float], scale: float, base: Sequence[float], eps: float, n: int) -> list[float]:
    """The matrix from which the rounds start, [n * n] -> [n * n]: softmax of each row + eps."""
    found = []
    for row in range(0, n * n, n):
        line = [logits[i] * scale + base[i] for i in range(row, row + n)]
        top = max(line)
        if not top < inf:
            # A softmax over infinity, or over what is no number, is no number.
            return [float("nan")] * (n * n)
        line = [exp(z - top) for z in line]
        total = sum(line)
        found += [e / total + eps for e in line]
    return found


def every(
    logits: Sequence[Sequence[float]], scale: Sequence[float], base: Sequence[float], n: int, iters: int, eps: float, like: Tensor
) -> list[list[float]]:
    """Each token's (2 + n) n logits -> pre, post and comb after the last round, one behind another."""
    found = []
    go = rounds(n, every=False)
    for row in logits:
        pre = [w + eps for w in sigmoids(row[:n], scale[0], base[:n])]
        post = [2.0 * w for w in sigmoids(row[n : 2 * n], scale[1], base[n : 2 * n])]
        # Rounded, as between the steps.
        begun = rounded(start(row[2 * n :], scale[2], base[2 * n :], eps, n), like)
        found.append(pre + post + go(begun, iters, eps))
    return found


@cache
def rounds(n: int, *, every: bool) -> Callable[[Sequence[float], int, float], list[float]]:
    """The Sinkhorn rounds over n * n positive numbers in a row, written out: loops over 4 numbers take longer than the numbers do.

    every: the matrices after all rounds, one behind another, else the last.
    """
    rows = [[f"c{i}{j}" for j in range(n)] for i in range(n)]
    flat = ", ".join(name for row in rows for name in row) + ","
    sums = [f"t{i}" for i in range(n)]
    by_row = [
        line
        for total, row in zip(sums, rows, strict=True)
        for line in (f"{total} = {' + '.join(row)} + eps", *(f"{name} /= {total}" for name in row))
    ]
    by_column = [
        line for column in zip(*rows, strict=True) for line in (f"t = {' + '.join(column)} + eps", *(f"{name} /= t" for name in column))
    ]
    change = " + ".join(f"abs({total} - before_{total})" for total in sums)
    keep = [f"found += [{flat}]"] if every else []
    lines = [
        "def rounds(comb, iters, eps):",
        "    found = []",
        f"    {flat} = comb",
        *(f"    {line}" for line in (*by_column, *keep)),
        f"    {' = '.join(f'before_{total}' for total in sums)} = 0.0",
        "    for i in range(1, iters):",
        *(f"        {line}" for line in (*by_row, *by_column, *keep)),
        f"        if {change} < {SETTLED}:",
        f"            found += [{flat}] * (iters - 1 - i)" if every else "            break",
        *(["            break"] if every else []),
        *(f"        before_{total} = {total}" for total in sums),
        "    return found" if every else f"    return [{flat}]",
    ]
    names: dict = {}
    exec("\n".join(lines), names)
    return names["rounds"]
