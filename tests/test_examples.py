"""The scripts of examples/, the example of README and the Python of docs/, run as written."""

import re
import runpy
from pathlib import Path

import pytest
import torch

from dsv4 import Dsv4
from dsv4.demo import checkpoint_folder

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
        r"layers=\d pos=-1 +13\.\d",
    ],
    "attribution_patch": [
        r"2047 tokens",
        r"tom - ben: 1\d\.\d+, with the other fact -1\d\.\d+",
        r"after block 0: token 1024: -",
        r"after block 1: token 1024: -",
        r"after block 2: token 2046: -1\d\.",
        r"brings it: block 2, estimate -1\d\.",
        r"layers=2 pos=2046 +-2\d\.",
        r"layers=0 pos=1024 +-2\d\.",
    ],
    "head_attribution": [
        r"tom - ben: (13\.\d{3}).*sum to \1",
        r"layer 2 attention +1[23]\.",
        r"layer 2 attention \d +\d\.",
        r"weight of block 2's attention in the logits: \d\.\d+",
        r"from 'tom' \(token 4\)",
        r"all paths: (1[23]\.\d{2}).*attention: \1",
    ],
    "select_entries": [
        r"12 questions, 12 right",
        r"block 2: keeps the fact's entry in 12",
        r"block 2 without the fact's entry: 0 right",
        r"block 4 without the fact's entry: 12 right",
        r"block 2, tokens of entry \d knocked out: P\(answer\) = 0\.0",
        r"block 4, tokens of entry \d knocked out: P\(answer\) = 0\.9",
        r"frozen: the same",
    ],
    "splice_sae": [
        r"unexplained: 0\.[01]",
        r"plain: tom",
        r"the SAE alone: tom",
        r"layers\.2\.self_attn\.attention_output\.splice\.latents",
        r"with the error term: tom, P\(tom\) = 0\.9999",
        r"active at '\?': (\d+ \([+-]\d\.\d+\)(, )?){1,4}\n",
        r"latent \d+ off: ",
    ],
    "steer": [
        r"plain: +ben",
        r"x 0\.5: tom",
        r"x 1\.0: tom 0\.9",
        r"by hand: +tom 0\.9",
        r"generated, plain: +ben ",
        r"generated, steered: tom ",
        r"steered at `\?` only: tom ",
        r"token by token: \[(\d, ){4}\d\]",
        r"stream 0 alone: ",
    ],
    "ablate_expert": [
        r"2 makes -> 2",
        r"slots per expert",
        r"without expert 0 .* = 0\.00",
        r"without expert 1 .* = 0\.99",
        r"sum +block 0: worst without expert \d, P = 0\.[0-8]",
        r"without expert 0, zero: P\(2\) = 0\.0",
        r"without expert 0, mean: P\(2\) = 0\.0",
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
    assert {path.stem for path in (ROOT / "examples").iterdir() if path.suffix == ".py"} == set(TOLD)


@pytest.mark.parametrize("name", TOLD)
def test_script(name, capsys):
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    rest = capsys.readouterr().out
    for pattern in TOLD[name]:
        found = re.search(pattern, rest)
        assert found, f"{pattern} is not in the rest of the output:\n{rest}"
        rest = rest[found.end() :]


# Fragments of classes, which only the model has around them; what takes several processes, GPUs, or minutes of compiling (tests of
# their own run those: test_parallel, test_placement, test_compiling).
NOT_RUN = {"design", "parallel", "scale", "speed"}


@pytest.fixture(scope="module")
def around():
    """What the pages speak of without making it: a model, two rows of ids, one of them padded."""
    model = Dsv4.from_pretrained(checkpoint_folder(), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, model.vocab_size, (2, 40), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    return {"model": model, "ids": ids, "mask": mask, "torch": torch}


@pytest.mark.parametrize("page", sorted(p.stem for p in (ROOT / "docs").glob("*.md")))
def test_docs_run(page, around, capsys, tmp_path, monkeypatch):
    """The blocks of one page, in order, in one namespace."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / f"{page}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    names = {"__name__": "__main__", **around}
    with torch.no_grad():
        for block in blocks if page not in NOT_RUN else []:
            exec(compile(block, f"docs/{page}.md", "exec"), names)


def test_readme_example(capsys):
    """Each `print` of the example is followed by a comment that says what it prints."""
    code = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    said = re.findall(r"^\s*print\(.*\)  # (.*)$", code, re.M)
    assert len(said) == code.count("print(")
    assert capsys.readouterr().out.splitlines() == said
