"""Pictures of a run: the HTML page, parsed and opened in a browser, and the matplotlib figures."""

import base64
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import numpy
import pytest
import torch

from dsv4 import Dsv4, view
from dsv4.activation_cache import ActivationCache
from dsv4.cells import Cells
from dsv4.config import CSA
from dsv4.demo import checkpoint_folder
from dsv4.page import SCALE, page_data
from dsv4.page_template import HEAD, SCRIPT
from dsv4.reading import Reading
from dsv4.testing_probes import padded_batch, watched_model
from dsv4.values import RESIDUAL_SET

PROMPT = "mira has key . tom has cup . ana has map . ben has lamp . sky shows sun . whose cup ?"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
# Elements that HTML closes by itself.
VOID = {"meta", "link", "input", "br", "img"}


@pytest.fixture(scope="module")
def model():
    return Dsv4.from_pretrained(checkpoint_folder(), dtype=torch.float32)


@pytest.fixture(scope="module")
def cache(model):
    with torch.no_grad():
        return model.run_with_cache(PROMPT, view.page_names(model))[1]


@pytest.fixture(scope="module")
def random_model():
    return watched_model()


@pytest.fixture(scope="module")
def padded(random_model):
    """Two rows of a model without a tokenizer, one of them padded."""
    ids, mask = padded_batch(random_model.vocab_size)
    names = view.page_names(random_model)
    with torch.no_grad():
        return random_model.run_with_cache(ids, names, attention_mask=mask)[1]


class Parsed(HTMLParser):
    """What is in a page; raises where an element is closed that is not open."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.references, self.data, self.scripts = [], set(), [], "", 0
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if "id" in found:
            assert found["id"] not in self.ids
            self.ids.add(found["id"])
        self.references += [found[key] for key in ("src", "href", "srcset", "action") if key in found]
        self.scripts += tag == "script"
        if tag not in VOID:
            self.open.append((tag, found.get("id")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == ("script", "data"):
            self.data += data


# The page.


def test_page_is_one_file_that_loads_nothing(cache, tmp_path):
    about = view.page(cache, tmp_path / "run.html")
    assert about == {"tokens": 23, "cells": 23, "blocks": 6, "heads": 4}
    assert [path.name for path in tmp_path.iterdir()] == ["run.html"]
    text = (tmp_path / "run.html").read_text()
    parsed = Parsed(text)
    assert parsed.references == ["data:,"]
    assert "default-src 'none'" in text
    assert re.search(r"https?:|//[a-z]|url\(|@import|fetch\(|XMLHttp|import\(", HEAD) is None
    assert re.search(r"https?:|url\(|fetch\(|XMLHttp|WebSocket|import\(", SCRIPT) is None
    # Every element that the script asks for is there.
    assert set(re.findall(r"\$\('(\w+)'\)", SCRIPT)) <= parsed.ids
    assert json.loads(parsed.data) == page_data(cache)


def test_a_token_cannot_end_the_data(cache, tmp_path, monkeypatch):
    word = "</script><b>'\"&\u2028"
    monkeypatch.setattr("dsv4.cells.spell", lambda model, ids: [word] * len(ids))
    view.page(cache, tmp_path / "run.html")
    parsed = Parsed((tmp_path / "run.html").read_text())
    assert parsed.scripts == 2
    assert json.loads(parsed.data)["words"][0] == repr(word)


def decoded(block, cells):
    flat = numpy.frombuffer(base64.b64decode(block["pattern"]), dtype="<i2").astype("float32")
    return torch.from_numpy(flat / SCALE).view(-1, cells, cells)


@pytest.mark.parametrize("which", ["cache", "padded"])
def test_page_data_is_the_run(which, request):
    cache = request.getfixturevalue(which)
    model = cache.model
    for row in range(len(cache.positions)):
        data = page_data(cache, row)
        real = (cache.positions[row] >= 0).nonzero().flatten()
        cells = len(real)
        assert len(data["words"]) == data["tokens"] == cells
        patterns = cache.attention.token_pattern()
        for i, block in enumerate(data["blocks"]):
            ours = patterns[i][row][:, real][:, :, real]
            shown = decoded(block, cells)
            assert torch.allclose(shown[0], ours.mean(0), atol=1 / SCALE)
            assert torch.allclose(shown[1:], ours, atol=1 / SCALE)
            for site in ("attention", "mlp"):
                for part in ("pre", "post", "comb"):
                    value = cache[f"layers.{i}.{site}_{part}"][row, real]
                    assert torch.allclose(torch.tensor(block[site][part]), value, rtol=1e-3)
            assert torch.allclose(torch.tensor(block["mass"]).sum(-1), torch.ones(cells), atol=1e-3)
            weights = torch.tensor(block["expertWeights"])
            theirs = cache["expert_weights", i][row, real]
            assert torch.allclose(weights, theirs.sort(-1, descending=True).values, rtol=1e-3)
        values = torch.tensor(data["attribution"]["values"])
        total = torch.tensor(data["attribution"]["total"])
        assert torch.allclose(values.sum(0), total, atol=2e-3 * float(values.abs().sum(0).max()))
        logits = model.lm_head(cache["final_norm_output"][row, real])
        assert torch.allclose(total, logits.max(-1).values, rtol=2e-3)


def test_page_lens_is_the_lens(model, cache):
    data = page_data(cache)
    with torch.no_grad():
        lens = model.logit_lens(PROMPT, pos=None)
    probabilities, ids = lens.top(5)
    for layer, shown in enumerate(data["lens"]):
        for token, best in enumerate(shown):
            assert [w for w, _ in best] == model.to_str_tokens(ids[layer, 0, token].tolist())
            p = torch.tensor([p for _, p in best])
            assert torch.allclose(p, probabilities[layer, 0, token], rtol=2e-3, atol=1e-6)


def test_page_entries_are_the_selection(model, cache):
    data = page_data(cache)
    for i, block in enumerate(data["blocks"]):
        if model.config.rate(i) is None:
            assert block["entries"] is None
            continue
        for token, entries in enumerate(block["entries"]):
            assert entries["closed"] == (token + 1) // model.config.rate(i)
            listed = [entry for entry, _, _, _ in entries["listed"]]
            if model.layer_types[i] == CSA:
                kept = cache["indexer_selection", i][0, token]
                assert sorted(listed) == sorted(kept[kept >= 0].tolist())
            for entry, _, score, mass in entries["listed"]:
                seen = cache["attention_probabilities", i][0, :, token, 23 + entry].mean()
                assert mass == pytest.approx(float(seen), rel=1e-3, abs=1e-9)
                if score is not None:
                    real = float(cache["indexer_scores", i][0, token, entry])
                    assert score == pytest.approx(real, rel=1e-3)
    assert data["blocks"][2]["entries"][-1]["listed"][0][:2] == [1, "tom has cup ."]


def test_page_says_what_is_missing(model, cache, tmp_path):
    with torch.no_grad():
        _, few = model.run_with_cache(PROMPT)
        _, last = model.run_with_cache(PROMPT, view.page_names(model), pos=-1)
    with pytest.raises(ValueError, match=r"page needs .* capture names=.*input_ids"):
        view.page(few, tmp_path / "run.html")
    with pytest.raises(ValueError, match="without pos="):
        view.page(last, tmp_path / "run.html")
    with pytest.raises(ValueError, match="row=1: the cache holds 1 rows"):
        view.page(cache, tmp_path / "run.html", row=1)
    for left in (
        "layers.2.self_attn.attention_premix",
        "layers.3.self_attn.compressor.compressor_gates",
    ):
        others = [name for name in view.page_names(model) if name != left]
        with torch.no_grad():
            _, less = model.run_with_cache(PROMPT, others)
        with pytest.raises(ValueError, match=re.escape(left)):
            view.page(less, tmp_path / "run.html")
    assert list(tmp_path.iterdir()) == []


def test_page_of_a_saved_cache(model, cache, tmp_path):
    cache.save(tmp_path / "run.safetensors")
    loaded = ActivationCache.load(tmp_path / "run.safetensors").with_model(model)
    assert page_data(loaded) == page_data(cache)


def opened(path, tmp_path, fragment=""):
    """The page as the browser has it after its scripts ran."""
    command = [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        *("--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"),
        f"file://{path}{fragment}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@pytest.mark.skipif(BROWSER is None, reason=f"no browser here: looked for {', '.join(BROWSERS)}")
def test_page_in_a_browser(cache, tmp_path):
    """The slider and hovering are tried by a script put behind the page's own."""
    path = tmp_path / "run.html"
    view.page(cache, path)
    shown = opened(path, tmp_path, "#block=2&token=22")
    assert "data-error" not in shown.partition("<body")[2][:200]
    assert 'data-drawn="2/22"' in shown
    assert "block 2 of 6: CSA, score router" in shown
    assert re.search(r"<td>tom has cup \.</td>", shown)
    assert "Kept 2 of 5 closed entries" in shown
    assert "Logit of tom after ?" in shown

    use = """<script>
      const slider = document.getElementById('block');
      slider.value = 5; slider.dispatchEvent(new Event('input'));
      const canvas = document.getElementById('pattern'), at = canvas.getBoundingClientRect();
      const over = (x, y) => new MouseEvent('mousemove', { clientX: x, clientY: y, bubbles: true });
      canvas.dispatchEvent(over(at.left + 70, at.top + 2));
      document.body.setAttribute('data-hover', document.getElementById('tip').textContent);
      document.querySelector('path[data-t]').dispatchEvent(over(0, 0));
      document.body.setAttribute('data-stream', document.getElementById('tip').textContent);
      document.querySelectorAll('.word')[3].click();
    </script></body>"""
    path.write_text(path.read_text().replace("</body>", use))
    shown = opened(path, tmp_path)
    body = re.search(r"<body[^>]*>", shown)[0]
    assert "data-error" not in body
    assert 'data-drawn="5/3"' in body
    assert "query mira (position 0)\nsees mira (position 0)" in body
    assert re.search(r'data-stream="attention_comb: stream \d to stream \d: [\d.]+"', body)
    assert "block 5 of 6: HCA" in shown


# Cells.


@pytest.mark.parametrize(("tokens", "most"), [(1, 5), (5, 5), (6, 5), (23, 5), (100, 7)])
def test_cells(tokens, most):
    positions = torch.arange(-2, tokens).clamp(min=-1).unsqueeze(0)
    value = torch.randn(1, tokens + 2)
    cache = ActivationCache({"x": value}, {"x": "b s"}, positions, num_layers=1)
    cells = Cells.of(Reading(cache), most)
    assert len(cells) <= most
    assert (cells.width == 1) == (tokens <= most) == (cells.note == "")
    assert (cells.starts[0], cells.ends[-1]) == (0, tokens)
    assert {e - s for s, e in zip(cells.starts[1:], cells.ends[1:], strict=True)} <= {cells.width}
    assert cells.at(value)[-1] == value[0, -1]

    pattern = torch.rand(3, tokens + 2, tokens + 2)
    pooled = cells.pool(pattern)
    real = pattern[:, 2:, 2:]
    for i, (a, b) in enumerate(zip(cells.starts, cells.ends, strict=True)):
        for j, (c, d) in enumerate(zip(cells.starts, cells.ends, strict=True)):
            by_hand = real[:, a:b, c:d].sum(-1).mean(-1)
            assert torch.allclose(pooled[:, i, j], by_hand, rtol=1e-5)


def test_long_prompts_are_drawn_in_cells_and_say_so(model, monkeypatch, tmp_path):
    for module in ("page", "view"):
        monkeypatch.setattr(f"dsv4.{module}.MAX_CELLS", 8)
    with torch.no_grad():
        _, cache = model.run_with_cache(PROMPT, view.page_names(model))
    assert view.page(cache, tmp_path / "run.html") == {
        "tokens": 23,
        "cells": 8,
        "blocks": 6,
        "heads": 4,
    }
    data = page_data(cache)
    assert data["note"] == "23 tokens, 3 to a cell"
    assert data["texts"][-2:] == ["shows sun .", "whose cup ?"]
    last = cache.attention.token_pattern(layers=2)[2][0].mean(0)
    want = last[20:].mean(0)[20:].sum()
    assert torch.allclose(decoded(data["blocks"][2], 8)[0, -1, -1], want, atol=1 / SCALE)
    pytest.importorskip("matplotlib", reason="the figures need matplotlib")
    for figure in (view.token_pattern(cache, 2), view.routing_map(cache)):
        assert "23 tokens, 3 to a cell" in figure.axes[0].get_title()
    monkeypatch.setattr("dsv4.view.MAX_LENS_TOKENS", 4)
    assert "last 4 of 23 tokens" in view.lens_table(cache).axes[0].get_title()


# Figures.


def test_importing_view_imports_no_matplotlib():
    code = "import sys, dsv4.view; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_without_matplotlib(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in view.PICTURES:
        with pytest.raises(ValueError, match=r"matplotlib is not installed.*extra `demo`"):
            view.picture(name, cache)


@pytest.mark.parametrize("which", ["cache", "padded"])
@pytest.mark.parametrize("name", view.PICTURES)
def test_every_picture_is_drawn(name, which, request, tmp_path):
    pytest.importorskip("matplotlib", reason="the figures need matplotlib")
    cache = request.getfixturevalue(which)
    with torch.no_grad():
        _, own = cache.model.run_with_cache(cache["input_ids"][:1], view.picture_names(cache.model, name))
    for source in (cache, own):
        view.picture(name, source).savefig(tmp_path / f"{name}.png", dpi=40)
    assert (tmp_path / f"{name}.png").stat().st_size > 2000


def test_figures_show_the_values(model, cache):
    pytest.importorskip("matplotlib", reason="the figures need matplotlib")

    def shown(axes):
        return torch.from_numpy(numpy.asarray(axes.images[0].get_array(), dtype="float32"))

    pattern = cache.attention.token_pattern(layers=3)[3][0]
    assert torch.allclose(shown(view.token_pattern(cache, 3).axes[0]), pattern.mean(0))
    assert torch.allclose(shown(view.token_pattern(cache, 3, head=2).axes[0]), pattern[2])
    chosen = cache["expert_weights", 4][0].argmax(-1, keepdim=True)
    experts = cache["expert_indices", 4][0].gather(-1, chosen).flatten()
    assert torch.equal(shown(view.routing_map(cache).axes[0])[4].long(), experts)
    panels = view.stream_mixing(cache, layer=1, pos=4).axes
    assert torch.allclose(shown(panels[1]), cache["layers.1.attention_comb"][0, 4])
    assert torch.allclose(shown(panels[5]).flatten(), cache["layers.1.mlp_post"][0, 4])
    pre = torch.stack([cache[f"layers.{i}.{s}_pre"][0, -1] for i in range(6) for s in ("attention", "mlp")])
    assert torch.allclose(shown(view.stream_mixing(cache).axes[0]), pre.T)
    words = [text.get_text() for text in view.lens_table(cache, pos=-1, k=3).axes[0].texts]
    assert len(words) == 18
    assert words[-3] == "tom 1.000"
    found = cache.residual.logit_attribution("tom", against="ben")
    bars = [bar.get_width() for bar in view.attribution_bars(found, k=3).axes[0].patches]
    assert bars[0] == pytest.approx(float(found[2, "attention"][0, -1]), rel=1e-5)
    assert sum(bars) == pytest.approx(float(found.total[0, -1]), rel=1e-4)


def test_figures_refuse_what_is_not_there(model, cache):
    pytest.importorskip("matplotlib", reason="the figures need matplotlib")
    with pytest.raises(ValueError, match="head=4: expected 0 <= head < 4"):
        view.token_pattern(cache, 2, head=4)
    with pytest.raises(ValueError, match="pos=23: the row holds 23 real tokens"):
        view.stream_mixing(cache, pos=23)
    with pytest.raises(ValueError, match="picture 'nonsense': expected one of token_pattern"):
        view.picture("nonsense", cache)
    with torch.no_grad():
        _, few = model.run_with_cache(PROMPT, ["layers.*.layer_output"])
    for draw in (view.routing_map, view.stream_mixing, lambda c: view.token_pattern(c, 2)):
        with pytest.raises(ValueError, match="capture names="):
            draw(few)
    view.lens_table(few)


def test_names_are_those_of_the_model(random_model):
    names = set(view.page_names(random_model))
    assert names <= set(random_model.hook_dict)
    leaves = {name.rsplit(".", 1)[-1] for name in names}
    assert leaves > set(RESIDUAL_SET)
    assert view.picture_names(random_model, "token_pattern", layer=0)[1].startswith("layers.0.")
