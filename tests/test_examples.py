"""The scripts of examples/ and the example of README, run as written."""

import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
# What each script must print, in this order; what stands between is free.
TOLD = {
    "read": [
        r"layers\.2\.mlp\.mlp_output +\[b s hidden\]",
        r"torch\.Size\(\[1, 19, 4, 128\]\)",
        r"torch\.Size\(\[6, 1, 19, 4, 128\]\)",
        r"whose cup \? -> tom",
        r"entry 1, 'tom has cup \.'",
        r"head 0 gives (0\.9\d|1\.00) of its attention to entry 1",
    ],
    "patch": [
        r"clean   P\(tom\) = 0\.99",
        r"corrupt P\(tom\) = 0\.00",
        r"after block 0: P\(tom\) = 0\.00",
        r"after block 1: P\(tom\) = 0\.99",
        r"only entry 1: P\(tom\) = 0\.9",
    ],
    "steer": [r"plain: +ben", r"x 0\.5: tom", r"x 1\.0: tom 0\.9", r"by hand: +tom 0\.9"],
    "ablate_expert": [
        r"2 makes -> 2",
        r"without expert 0 .* = 0\.00",
        r"without expert 1 .* = 0\.99",
    ],
    "gradients": [
        r"token  [4-7]:",
        r"token  [4-7]:",
        r"token  [4-7]:",
        r"layers\.0\.layer_output: ",
    ],
}


@pytest.fixture(autouse=True)
def _gradients_stay_on():
    """Some scripts turn gradients off for the process, as a user's script may."""
    is_on = torch.is_grad_enabled()
    yield
    torch.set_grad_enabled(is_on)


def test_every_script_is_run():
    assert {path.stem for path in (ROOT / "examples").iterdir() if path.suffix == ".py"} == set(
        TOLD
    )


@pytest.mark.parametrize("name", TOLD)
def test_script(name, capsys):
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    rest = capsys.readouterr().out
    for pattern in TOLD[name]:
        found = re.search(pattern, rest)
        assert found, f"{pattern} is not in the rest of the output:\n{rest}"
        rest = rest[found.end() :]


def test_readme_example(capsys):
    """Each `print` of the example is followed by a comment that says what it prints."""
    code = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    said = re.findall(r"^\s*print\(.*\)  # (.*)$", code, re.M)
    assert len(said) == code.count("print(")
    assert capsys.readouterr().out.splitlines() == said
