"""What every test gets: its own seed, few threads, NaN in fresh tensors."""

import hashlib
import importlib.util
import random
import sys
from pathlib import Path

import numpy
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure() -> None:
    for name in ("kernels", "convert"):
        spec = importlib.util.find_spec(name)
        places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
        if any(place and Path(place).resolve().is_relative_to(ROOT / name) for place in places):
            pytest.exit(
                f"`import {name}` finds this repository's folder, which hides any installed "
                "distribution of that name and loads our files twice: run `pytest`, not "
                "`python -m pytest`, and keep the repository root out of PYTHONPATH.",
                returncode=4,
            )
    # Tensors of this size gain nothing from a second thread; waiting for it on a busy machine costs minutes.
    torch.set_num_threads(1)
    _fill_with_nan()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Seeds from the test's id: a test draws the same numbers alone and in any order."""
    seed = int.from_bytes(hashlib.sha256(request.node.nodeid.encode()).digest()[:4], "big")
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def _fill_with_nan() -> None:
    """Make `torch.empty` and its kin, called from dsv4, return NaN (integers: the largest value).

    Fresh memory is often zero, so a forgotten write would pass by luck.
    """
    # The table of functions that torch.set_default_device acts on is built at its first use;
    # it has to hold the originals, which is what the wrappers call.
    with torch.device("cpu"):
        torch.empty(0)
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(original):
    def empty(*args, **kwargs):
        out = original(*args, **kwargs)
        # A compiler traces through this function; reading frames is not something it can do.
        if torch.compiler.is_compiling():
            return out
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] != "dsv4":
            return out
        if out.dtype.is_floating_point or out.dtype.is_complex:
            out.detach().fill_(torch.nan)
        elif out.dtype != torch.bool:
            out.fill_(torch.iinfo(out.dtype).max)
        return out

    return empty
