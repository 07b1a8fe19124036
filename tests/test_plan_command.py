"""`dsv4 plan`: its arithmetic against models and caches that exist, its options, and the figures of docs/scale.md."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4 import Dsv4, Dsv4Config, KVCache
from dsv4.cli import main
from dsv4.convert import inspect_checkpoint
from dsv4.placement import official_bytes
from dsv4.scale import Rates, experts_hit, gpu_bytes, kv_bytes, kv_read, scale, token_count
from dsv4.testing_checkpoints import Recipe, make_checkpoint
from dsv4.traffic import ALL_TO_ALL, EXCHANGE, GATHER, traffic

ROOT = Path(__file__).resolve().parents[1]
DOCS = (ROOT / "docs" / "scale.md").read_text()
PARALLEL = (ROOT / "docs" / "parallel.md").read_text()
FENCES = re.findall(r"```console\n\$ dsv4 (plan [^\n]*)\n(.*?)```", DOCS, re.DOTALL)
TINY = Dsv4Config.tiny(hidden_size=64, moe_intermediate_size=32)
GB = 10**9


@pytest.mark.parametrize(("command", "shown"), FENCES, ids=[command for command, _ in FENCES])
def test_the_figures_of_the_docs_are_the_program_s(capsys, command, shown):
    assert main(command.split()) == 0
    assert capsys.readouterr().out == shown


def test_the_docs_work_every_machine():
    assert {(c.split()[2], c.split()[4].partition("x")[0]) for c, _ in FENCES} >= {
        *(("flash", n) for n in "128"),
        *(("pro", n) for n in ("8", "16")),
    }
    assert any("--context 1M" in command for command, _ in FENCES)
    # Figures in the sentences.
    auto = next(shown for command, shown in FENCES if command == "plan --model flash --gpus 1x141GB --map auto")
    assert "layers 0-33," in auto
    assert "34 of 43 blocks fit" in DOCS
    assert "KV cache: 7.23 GB for 1 x 1,048,576 tokens" in DOCS
    assert "one row of Flash take 7.2 GB (calculated)" in DOCS
    assert "Every figure below is calculated" in DOCS


@pytest.mark.parametrize("config", [TINY, Dsv4Config.tiny(sliding_window=3, compress_rates={"heavily_compressed_attention": 5})])
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 40, 61])
def test_kv_bytes_are_those_of_a_cache(config, tokens):
    """Of what a cache without spare columns would hold: numbers that are kept, times their width."""
    config = replace(config, torch_dtype=torch.bfloat16)
    kv = KVCache(config, 1, 64, rewind=0)
    Dsv4.from_config(config, seed=0)(torch.arange(tokens) % config.vocab_size, kv_cache=kv)
    slots = iter(kv._slots)
    for layer, held in enumerate(kv.layers):
        expected = 0
        for slot in [next(slots) for _ in range(1 + 2 * sum(pool is not None for pool in (held.compressor, held.indexer)))]:
            columns = tokens // slot.rate if hasattr(slot, "rate") else min(tokens, slot.keep)
            expected += columns * slot.width * slot.dtype.itemsize
        assert kv_bytes(config, layer, tokens) == expected
        assert kv_read(config, layer, tokens) <= expected


def test_kv_bytes_of_flash_are_those_that_kvcache_states():
    flash = Dsv4Config.flash()
    for tokens in (1 << 17, 1 << 20):
        total = sum(kv_bytes(flash, i, tokens) for i in range(flash.num_hidden_layers))
        assert total - 6_880 * tokens == pytest.approx(17.5e6, rel=0.01)


def test_experts_hit():
    flash = Dsv4Config.flash()
    assert experts_hit(flash, 1) == pytest.approx(6)
    assert experts_hit(flash, 2) == pytest.approx(12 - 36 / 256)
    assert 255 < experts_hit(flash, 10_000) <= 256


def test_a_step_is_counted_by_hand():
    """One GPU with everything; then experts on the host, none of them hot."""
    sizes = official_bytes(TINY, "bf16")
    whole = scale(TINY, sizes, [GB], GB, title="t", rows=1, tokens=100)
    experts = sum(n for name, n in sizes.items() if "mlp.experts." in name)
    kv = sum(kv_read(TINY, i, 100) for i in range(6))
    used = experts * TINY.num_experts_per_tok // TINY.n_routed_experts
    rest = sum(sizes.values()) - experts - sizes["embed_tokens.weight"] + TINY.hidden_size * 2
    assert whole.step.resident == rest + used + kv
    assert (whole.step.pcie, whole.step.disk, whole.step.nvlink) == (0, 0, 0)
    assert whole.seconds == pytest.approx((rest + used + kv) / Rates().hbm)
    head = sum(n for name, n in sizes.items() if not name.startswith("layers."))
    blocks = sum(sizes.values()) - experts - head
    kv_held = sum(kv_bytes(TINY, i, 100) for i in range(6))
    one = experts // 6 // TINY.n_routed_experts
    tight = int((head + blocks + kv_held + 2 * TINY.num_experts_per_tok * one) / 0.9) + 2
    host = scale(TINY, sizes, [tight], GB, title="t", tokens=100, experts="host")
    assert host.placement.held == {"cuda:0": head + blocks, "cpu": experts}
    assert host.step.pcie == used
    disk = scale(TINY, sizes, [tight], GB, title="t", tokens=100, experts="disk")
    assert disk.step.disk == disk.step.pcie == used
    assert whole.exchanged == {}
    two = scale(TINY, sizes, [GB, GB], GB, title="t", rows=3)
    assert {n: moved.form for n, moved in two.exchanged.items()} == {3: GATHER, 8192: GATHER}
    assert scale(TINY, sizes, [GB] * 3, GB, title="t").exchanged == {}
    # There and back: streams in bfloat16.
    assert two.step.nvlink == 2 * 3 * TINY.hc_mult * TINY.hidden_size * 2


def test_the_exchange_of_experts_is_counted_by_hand():
    """Flash on 8 processes: 19 tokens are slices of 3; one process has the rest of the rows elsewhere in 7 of 8 cases."""
    found = traffic(tokens=19, top_k=6, hidden=4096, processes=8, experts=256)
    assert found.gather == 2 * 7 * 19 * 4096 * 4 // 8
    assert found.all_to_all == 2 * 7 * 3 * 6 * 4096 * 2 // 8 + 7 * 3 * 4096 * 2 + 7 * 32 * 8
    assert traffic(19, 6, 4096, 8, 256, width=4).all_to_all == 2 * (found.all_to_all - 7 * 32 * 8) + 7 * 32 * 8
    for processes in (2, 4, 8, 16, 32):
        for width in (2, 4):
            forms = [traffic(tokens, 6, 4096, processes, 256, width).form for tokens in (1, 64, 1 << 20)]
            # Rows pay from 2k/3 processes in bfloat16, from 2k in float32, and never for a few tokens.
            assert forms == [GATHER, GATHER, ALL_TO_ALL if processes > {2: 4, 4: 12}[width] else GATHER]
    border = next(n for n in range(1, 10_000) if traffic(n, 6, 4096, 8, 256).form == ALL_TO_ALL)
    fewer = traffic(border, 6, 4096, 8, 256)
    assert fewer.gather - fewer.all_to_all > 3 * EXCHANGE
    assert 290 < border < 310
    assert "from about 300 tokens on" in PARALLEL


def test_a_checkpoint_is_planned_from_its_headers(tmp_path, capsys):
    folder = make_checkpoint(tmp_path / "files", TINY, Recipe()).folder
    for weights, kind in (("native", "native"), ("bf16", "bfloat16")):
        command = ["plan", "--model", str(folder), "--gpus", "2x500kB", "--weights", weights, "--map", "auto", "--context", "64", "--json"]
        assert main(command) == 0
        found = json.loads(capsys.readouterr().out)
        report = inspect_checkpoint(folder)
        assert sum(found["weights"].values()) == report.memory[kind]
        rest, experts, token = report.offloaded[kind]
        assert rest + experts == report.memory[kind]
        model = Dsv4.from_pretrained(folder, weights="native" if weights == "native" else "dequantized", dtype=torch.bfloat16)
        banks = sum(t.nbytes for name, t in model.state_dict().items() if "mlp.experts." in name)
        assert experts == banks
        assert token == banks * TINY.num_experts_per_tok // TINY.n_routed_experts
        assert f"offloaded  {kind} " in str(report)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("--model flash --gpus 1x1GB", "may hold 900.00 MB, and embed_tokens, hc_head, norm and lm_head alone take 2.12 GB"),
        ("--model flash --gpus 8x14", "--gpus='14': expected bytes"),
        ("--model flash --gpus x", "--gpus='x': expected bytes"),
        ("--model flash --context 0", "--context 0: expected a number of tokens >= 1"),
        ("--model flash --context 1G", "--context 1G: expected"),
        ("--model flash --host much", "--host='much': expected bytes"),
        ("--model flash --disk-rate fast", "--disk-rate='fast': expected bytes"),
        ("--model flash --experts host --host 64GB", 'experts="host" needs 147.17 GB of host memory'),
        ("--model no/such/folder", "no/such/folder"),
    ],
)
def test_errors_are_one_line(command, said, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["plan", *command.split()]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_spellings():
    assert [token_count(x) for x in ("5", "128k", "1M", "2m")] == [5, 131_072, 1 << 20, 2 << 20]
    assert gpu_bytes("8x141GB") == [141 * GB] * 8
    assert gpu_bytes("24GiB") == [24 * 2**30]
    assert gpu_bytes("0") == []
