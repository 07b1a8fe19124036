"""`dsv4 demo`: what it finds on the shipped checkpoint, and what it says on others."""

import random
import sys
import time

import pytest
import torch

from dsv4 import Dsv4, Dsv4Config, demo, picture
from dsv4.config import CSA, HASH_MOE, HCA, MOE, SLIDING
from dsv4.convert import inspect_checkpoint, write_checkpoint
from dsv4.demo import checkpoint_folder
from dsv4.values import VALUES, absent

PNG = b"\x89PNG\r\n"
SECTIONS = [
    *("MODEL", "PROMPT", "ANSWER", "VALUES", "ROUTING", "STREAMS"),
    *("LENS", "INDEXER", "EXPERT", "STEER", "PICTURE"),
]
# The language of the shipped checkpoint.
NAMES, THINGS, WEATHER, SYLLABLES = (
    words.split()
    for words in (
        "mira tom ana ben lia sam eva max ida leo zoe kai nora finn ruby otto",
        "key cup map lamp book rope coin drum kite ring vase bell flag boot sock fork",
        "sun rain snow wind",
        "ba ko ti lu me no pa ri so du fe gi",
    )
)
NUM_WORDS = 192
NUM_DOCUMENTS = 12


def run_demo(folder, *arguments, **options):
    """(lines, findings) of a run whose picture goes to `folder`."""
    lines = []

    def write(text):
        lines.extend(text.split("\n"))

    findings = demo.run(*arguments, out=str(folder / "picture.png"), write=write, **options)
    return lines, findings


def sections(lines):
    """Section -> its text, in the order of the demo."""
    found = {}
    for line in lines:
        word = line.split(" ")[0]
        if word:
            found[word] = ""
        found[[*found][-1]] += line + "\n"
    return found


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """(lines, findings, bytes of the picture, seconds)."""
    folder, start = tmp_path_factory.mktemp("demo"), time.perf_counter()
    lines, findings = run_demo(folder)
    seconds = time.perf_counter() - start
    return lines, findings, (folder / "picture.png").read_bytes(), seconds


def test_finds_the_known_mechanisms(shipped):
    _, findings, _, _ = shipped
    scene = findings.scene
    assert scene.word(scene.answer) == "ben"
    assert float(scene.probabilities[-1, scene.answer]) > 0.99
    true, *others = sorted(findings.picks, key=lambda pick: pick.words != "ben has lamp .")
    assert (true.layer, true.entry) == (2, 5)
    assert max(true.mass) > 0.9
    assert true.dropped.best != "ben"
    assert true.dropped.answer_probability < 0.01
    assert len(others) == 3
    assert all(pick.dropped.answer_probability > 0.99 for pick in others)
    _, word, before, after = findings.ablation.moved[0]
    assert (word, before > 0.99, after < 0.1) == (".", True, True)
    assert findings.ablation.outcome.answer_probability > 0.99
    assert (findings.steering.layer, findings.steering.reader) == (1, 2)
    assert findings.steering.outcome.best == "mira"
    assert findings.steering.picked[0] == "mira has key ."


def test_tells_it(shipped):
    lines, findings, image, seconds = shipped
    told = sections(lines)
    assert list(told) == SECTIONS
    assert max(map(len, lines)) <= 120
    for value in VALUES.values():
        if not absent(value.name, CSA, MOE):
            (row,) = [line for line in lines if line.split()[:2] == [value.name, value.layout]]
            assert f" {value.axes} " in row
            assert row.split()[-2:] == [value.read, value.edit]
    assert "'ben' 0.99" in told["ANSWER"]
    kinds = [line.split()[1] for line in told["ROUTING"].splitlines()[2:-1]]
    assert kinds == ["sliding", "sliding", "CSA", "HCA", "CSA", "HCA"]
    assert told["ROUTING"].count("hash") == 2
    weights = told["STREAMS"].splitlines()[2:-1]
    assert [len(line.split()) for line in weights] == [1 + 4 * 4] * 6
    assert told["LENS"].count("'ben'") >= 4
    assert "'ben has lamp .'" in told["INDEXER"]
    assert f"says {findings.picks[0].dropped.best!r}" in told["INDEXER"]
    assert "'mira has key .'" in told["STEER"]
    assert image.startswith(PNG)
    assert seconds < 60


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("2 3 makes", "5"),
        ("mira", "has"),
        ("tom has cup . max has boot . whose boot ?", "max"),
        ("say lu me pa again lu me", "pa"),
    ],
)
def test_takes_a_prompt(tmp_path, prompt, answer):
    lines, findings = run_demo(tmp_path, prompt)
    assert list(sections(lines)) == SECTIONS
    assert findings.scene.word(findings.scene.answer) == answer
    assert findings.scene.words == prompt.split()


def test_takes_a_contrast(tmp_path):
    facts = "tom has cup . max has boot . ida has sock . "
    _, findings = run_demo(tmp_path, facts + "whose boot ?", contrast=facts + "whose sock ?")
    assert findings.steering.outcome.best == "ida"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("whose zeppelin ?", "does not know 'zeppelin'; its words are: has whose"),
        ("Mira has key .", "does not know 'Mira'"),
        (" ", "the prompt is empty"),
    ],
)
def test_refuses_what_the_model_cannot_read(tmp_path, prompt, message):
    with pytest.raises(ValueError, match=message):
        run_demo(tmp_path, prompt)
    with pytest.raises(ValueError, match=message):
        run_demo(tmp_path, "whose key ?", contrast=prompt)


def test_says_that_the_folder_of_the_picture_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        run_demo(tmp_path / "absent")


def test_without_matplotlib_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    lines, _ = run_demo(tmp_path)
    assert lines[-1] == picture.NOT_INSTALLED
    assert list(tmp_path.iterdir()) == []


OTHERS = {
    "every kind": {},
    "sliding": {"layer_types": [SLIDING] * 2, "mlp_layer_types": [MOE, HASH_MOE]},
    "hca": {"layer_types": [HCA], "mlp_layer_types": [MOE]},
    "csa": {
        "layer_types": [CSA] * 5,
        "mlp_layer_types": [MOE] * 5,
        "n_routed_experts": 32,
        "num_experts_per_tok": 6,
        "hc_mult": 2,
        "index_topk": 64,
    },
}


@pytest.mark.parametrize("prompt", [None, "7", "1 2 3 4 5"])
@pytest.mark.parametrize("kind", OTHERS)
def test_shows_what_applies_on_other_checkpoints(tmp_path, kind, prompt):
    fields = dict(OTHERS[kind])
    if "layer_types" in fields:
        fields["num_hidden_layers"] = len(fields["layer_types"])
    config = Dsv4Config.tiny(**fields)
    state = Dsv4.from_config(config, seed=3).state_dict()
    folder = write_checkpoint(state, config, tmp_path / "checkpoint")
    lines, findings = run_demo(tmp_path, prompt, model=str(folder))
    told = sections(lines)
    assert list(told) == SECTIONS
    assert "no tokenizer.json" in told["PROMPT"]
    assert (tmp_path / "picture.png").read_bytes().startswith(PNG)
    if CSA not in config.layer_types:
        assert "no compressed_sparse_attention block" in told["INDEXER"]
        assert "indexer_scores" in told["VALUES"].partition("absent")[2]
    elif prompt == "7":
        assert "nothing: one entry closes with every 4th token, here are 1" in told["INDEXER"]
    else:
        tried = [pick for pick in findings.picks if pick.dropped is not None]
        assert 0 < len(tried) <= 4
        assert ("not tried" in told["INDEXER"]) == (len(findings.picks) > len(tried))


def test_without_a_tokenizer_text_is_refused(tmp_path):
    config = Dsv4Config.tiny()
    state = Dsv4.from_config(config, seed=3).state_dict()
    folder = write_checkpoint(state, config, tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="give token ids, as in"):
        run_demo(tmp_path, "whose key ?", model=str(folder))


def test_the_shipped_files_have_every_official_format():
    report = inspect_checkpoint(checkpoint_folder())
    assert report.scheme == "official"
    assert set(report.dtypes) == {"BF16", "F32", "F8_E4M3", "F8_E8M0", "I64", "I8"}
    assert report.problems is None
    assert report.skipped == {}
    assert report.parameters == 2_049_057
    assert report.file_bytes < 2_300_000
    names = {path.name for path in checkpoint_folder().iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= names


def document(draw):
    """(words, [(task, place of the word to be predicted)])."""
    names, things = draw.sample(NAMES, len(NAMES)), draw.sample(THINGS, len(THINGS))
    num_facts, likely = draw.randint(8, 13), draw.choice(WEATHER)
    ask_weather = [draw.uniform(0.35, 0.75) * NUM_WORDS, 0.9 * NUM_WORDS]
    words, tasks, facts, asked, seen = [], [], [], [], []
    while len(words) < NUM_WORDS:
        counts = sorted(map(seen.count, WEATHER))
        is_early = len(words) < 0.35 * NUM_WORDS
        unasked = [fact for fact in facts if fact not in asked]
        if ask_weather and len(words) >= ask_weather[0] and counts[-1] > counts[-2]:
            ask_weather.pop(0)
            words += ["mostly", "sky", "?", max(WEATHER, key=seen.count)]
            tasks.append(("weather", len(words) - 1))
            continue
        if len(facts) < num_facts and draw.random() < (0.6 if is_early else 0.2):
            facts.append((names.pop(), things.pop()))
            words += [facts[-1][0], "has", facts[-1][1], "."]
            continue
        kind = draw.choices(("recall", "weather", "copy", "sum"), (36, 38, 12, 14))[0]
        if kind == "recall" and unasked:
            asked.append(unasked[0] if draw.random() < 0.5 else draw.choice(unasked))
            words += ["whose", asked[-1][1], "?", asked[-1][0]]
            tasks.append(("recall", len(words) - 1))
        elif kind == "weather":
            others = [word for word in WEATHER if word != likely]
            seen.append(likely if draw.random() < 0.55 else draw.choice(others))
            words += ["sky", "shows", seen[-1], "."]
        elif kind == "copy":
            said = draw.sample(SYLLABLES, draw.choice((3, 5, 7)))
            words += ["say", *said, "again", *said]
            tasks += [("copy", len(words) - 1 - i) for i in range(len(said))]
        elif kind == "sum":
            first, second = draw.randint(0, 4), draw.randint(0, 4)
            words += [str(first), str(second), "makes", str(first + second)]
            tasks.append(("sum", len(words) - 1))
    return words, tasks


def accuracies(model, documents):
    """Task -> share of right words."""
    hits = {}
    for words, tasks in documents:
        ids = model.to_tokens(" ".join(words))
        with torch.no_grad():
            best = model(ids)[0].argmax(-1)
        for task, place in tasks:
            hits.setdefault(task, []).append(bool(best[place - 1] == ids[0, place]))
    return {task: sum(found) / len(found) for task, found in hits.items()}


def test_the_shipped_checkpoint_knows_its_language():
    draw = random.Random(0)
    documents = [document(draw) for _ in range(NUM_DOCUMENTS)]
    model = Dsv4.from_pretrained(checkpoint_folder())
    found = accuracies(model, documents)
    assert {"recall", "copy", "sum", "weather"} == set(found)
    assert min(found["recall"], found["copy"], found["sum"]) >= 0.98
    assert found["weather"] >= 0.9


def test_recall_hangs_on_the_entries_of_block_2():
    draw = random.Random(1)
    documents = [document(draw) for _ in range(NUM_DOCUMENTS)]
    model = Dsv4.from_pretrained(checkpoint_folder())
    names = "layers.{}.self_attn.compressor.indexer.indexer_selection"
    found = {}
    for layer in (2, 4):
        drop_all = (names.format(layer), lambda selection, hook: torch.full_like(selection, -1))
        with model.hooks([drop_all]):
            found[layer] = accuracies(model, documents)
    assert found[2]["recall"] < 0.3
    assert found[2]["sum"] >= 0.98
    assert found[4]["recall"] >= 0.98
