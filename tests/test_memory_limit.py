"""Runs from disk whose own memory is limited (RLIMIT_DATA) to less than the weights take: mapped pages of the files do not count."""

import hashlib
import sys

import pytest
import torch

from dsv4 import Dsv4
from dsv4.testing_large import narrow_blocks, run_limited, small_two_blocks, two_blocks, write_random

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts private memory on Linux alone")

MB = 10**6
IDS = [[5, 900, 17, 3, 250, 44, 81, 6, 640, 12, 9, 33]]


def weights(folder):
    model = Dsv4.from_pretrained(folder, progress=False)
    with torch.no_grad():
        logits, generated = model(torch.tensor(IDS)), model.generate(torch.tensor(IDS), 2)
    digest = hashlib.sha256(logits.contiguous().numpy().tobytes()).hexdigest()
    return sum(t.nbytes for t in model.state_dict().values()), digest, generated.tolist()


@pytest.mark.parametrize(
    ("config", "allowance", "gradient"),
    [
        pytest.param(small_two_blocks, 160 * MB, True, id="two blocks"),
        # A graph over 43 blocks takes as much again.
        pytest.param(narrow_blocks, 150 * MB, False, id="43 narrow blocks"),
        pytest.param(two_blocks, 2_500 * MB, False, id="two blocks of Flash's shapes", marks=pytest.mark.slow),
    ],
)
def test_a_model_larger_than_its_memory_runs_from_disk(tmp_path, config, allowance, gradient):
    write_random(config(), tmp_path / "files")
    nbytes, digest, generated = weights(tmp_path / "files")
    assert nbytes > 1.3 * allowance
    for place in ({"device_map": {"": "disk"}}, *([{"experts": "disk"}] if gradient else [])):
        found, error = run_limited(tmp_path / "files", allowance, place, IDS, gradient=gradient and "experts" not in place)
        assert found is not None, error
        assert (found["digest"], found["generated"]) == (digest, generated)
    if not gradient:
        return
    # The limit is one: what is resident does not fit.
    found, error = run_limited(tmp_path / "files", allowance, {}, IDS)
    assert found is None
    assert "memory" in error.lower()
