"""Fetching by hub id, from a server on this machine that speaks the hub's API.

huggingface_hub reads its environment when it is imported, so every fetch runs in a process of its
own kind: a worker that takes calls as JSON lines.
"""

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from dsv4.convert.header import read_shards
from dsv4.convert.hub import fetch, fetch_headers

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_good"
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]

WORKER = """
import json, sys
from pathlib import Path
from dsv4.convert.hub import fetch, fetch_headers

def look(folder):
    return {p.name: [p.stat().st_size, p.stat().st_blocks * 512] for p in folder.iterdir()}

def headers(name, **options):
    from dsv4.convert.header import read_shards
    with fetch_headers(name, **options) as folder:
        shards, problems = read_shards(folder)
        names = {s.file: sorted(s.tensors) for s in shards}
        return dict(path=str(folder), files=look(folder), names=names, problems=problems.by_kind)

def whole(name, **options):
    folder = fetch(name, **options)
    return dict(path=str(folder), files=look(folder))

for line in sys.stdin:
    call, name, options = json.loads(line)
    try:
        answer = {"headers": headers, "fetch": whole}[call](name, **options)
    except Exception as error:
        answer = dict(error=type(error).__name__, message=str(error))
    print(json.dumps(answer), flush=True)
"""


def shard(*names, numel=8):
    return save({name: torch.zeros(numel, dtype=torch.uint8) for name in names})


def index(weight_map):
    return json.dumps({"metadata": {}, "weight_map": weight_map}).encode()


CONFIG = {"config.json": b'{"model_type": "deepseek_v4"}'}
# Files of equal content would be one file to the cache.
TOKENIZER = {"tokenizer.json": b'{"a": 1}', "tokenizer_config.json": b'{"b": 1}'}
SHARDED = {
    **CONFIG,
    **TOKENIZER,
    "generation_config.json": b"{}",
    "model.safetensors.index.json": index({"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[2]}),
    SHARDS[0]: shard("a"),
    SHARDS[1]: shard("b", numel=20_000),
    SHARDS[2]: shard("c", numel=300_000),
    "README.md": b"not needed",
    "pytorch_model.bin": b"not needed",
    "inference/config.json": b"not needed",
    "extra.safetensors": b"not needed",
}
FETCHED = {*CONFIG, *TOKENIZER, "generation_config.json", "model.safetensors.index.json", *SHARDS}
MANY_NAMES = [f"layers.0.a_rather_long_name_for_one_tensor.{i:05d}" for i in range(4000)]
CUT = shard("a", numel=24_000_000)

REPOS = {
    "org/model": SHARDED,
    "org/private": SHARDED,
    "org/gated": SHARDED,
    "org/hangs": SHARDED,
    "org/single": {**CONFIG, "model.safetensors": shard(*MANY_NAMES, numel=1)},
    "org/cut": {**CONFIG, "model.safetensors": CUT},
    "org/huge": {**CONFIG, "model.safetensors": shard("a")},
    "org/no-config": {"README.md": b""},
    "org/no-weights": {**CONFIG, "model.gguf": b""},
    "org/lost-shard": {k: v for k, v in SHARDED.items() if k != SHARDS[1]},
    "org/bad-index": {**CONFIG, "model.safetensors.index.json": index({"a": "../a.safetensors"})},
}


class Hub(ThreadingHTTPServer):
    """The part of the hub that huggingface_hub talks to, with the faults the tests need."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.served: list[tuple[str, int, int]] = []
        self.cut_at: int | None = 15_000_000
        self.hang = threading.Event()
        self.broken = False

    def bytes_of(self, path):
        """Body bytes sent for one file, over all its requests."""
        return sum(sent for name, _, sent in self.served if name == path)

    def weights_served(self):
        return {path for path, _, _ in self.served if path.endswith(".safetensors")}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self):
        path = self.path.partition("?")[0]
        api = re.fullmatch(r"/api/models/(\w+/[\w-]+)/(revision|tree)/(\w+)", path)
        file = re.fullmatch(r"/(\w+/[\w-]+)/resolve/(\w+)/(.+)", path)
        data = re.fullmatch(r"/data/(\w+/[\w-]+)/(.+)", path)
        if data:
            return self.send_data(data[1], data[2])
        if not api and not file:
            return self.refuse(404, "", "no such address")
        repo, revision = (api[1], api[3]) if api else (file[1], file[2])
        if self.server.broken:
            return self.refuse(403, "", "the hub is having a day off")
        authorization = self.headers.get("Authorization")
        if authorization not in (None, f"Bearer {TOKEN}"):
            return self.refuse(401, "", "Invalid credentials in Authorization header")
        if repo == "org/gated":
            return self.refuse(403, "GatedRepo", "Access to model org/gated is restricted")
        if repo not in REPOS or (repo == "org/private" and authorization is None):
            return self.refuse(401, "RepoNotFound", "Repository not found")
        if revision not in ("main", "tagged", COMMIT):
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = REPOS[repo]
        if api and api[2] == "revision":
            siblings = [{"rfilename": name} for name in files]
            return self.send_json({"id": repo, "sha": COMMIT, "siblings": siblings})
        if api:
            return self.send_json([self.entry(repo, name) for name in files])
        if file[3] not in files:
            return self.refuse(404, "EntryNotFound", "Entry not found")
        if file[3].endswith(".safetensors"):
            return self.redirect(repo, file[3])
        return self.send_data(repo, file[3])

    def do_HEAD(self):
        self.do_GET()

    def entry(self, repo, name):
        content = REPOS[repo][name]
        size = 10**18 if repo == "org/huge" and name == "model.safetensors" else len(content)
        return {"type": "file", "path": name, "size": size, "oid": self.etag(content)[:40]}

    def etag(self, content):
        return hashlib.sha256(content).hexdigest()

    def redirect(self, repo, name):
        content = REPOS[repo][name]
        self.send_response(302)
        self.send_header("Location", f"{self.server.url}/data/{repo}/{name}")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Linked-ETag", f'"{self.etag(content)}"')
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_json(self, value):
        self.send_body(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def refuse(self, status, code, message):
        body = json.dumps({"error": message}).encode()
        self.send_body(status, body, {"X-Error-Code": code, "X-Error-Message": message})

    def send_body(self, status, body, headers):
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            if value:
                self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def send_data(self, repo, name):
        content = REPOS[repo][name]
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        begin = int(wanted[1]) if wanted else 0
        end = min(int(wanted[2]) + 1, len(content)) if wanted and wanted[2] else len(content)
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{self.etag(content)}"')
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command == "HEAD":
            return
        if repo == "org/hangs" and name == SHARDS[2] and not self.server.hang.is_set():
            self.server.served.append((f"{repo}/{name}", begin, 0))
            self.server.hang.wait(60)
            self.close_connection = True
            return
        cut = self.server.cut_at if repo == "org/cut" and name == "model.safetensors" else None
        if cut is not None and begin < cut < end:
            end, self.server.cut_at, self.close_connection = cut, None, True
        self.wfile.write(content[begin:end])
        self.server.served.append((f"{repo}/{name}", begin, end - begin))

    def log_message(self, *args):
        pass


class Worker:
    """A process with its own environment that runs fetch calls one by one."""

    def __init__(self, url, home, **environment):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE_"))}
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=home,
            env={
                **kept,
                "NO_PROXY": "127.0.0.1",
                "HF_ENDPOINT": url,
                "HF_HOME": str(home),
                "HF_HUB_DISABLE_TELEMETRY": "1",
                "TOKENIZERS_PARALLELISM": "false",
                **environment,
            },
        )
        self.cache = str(home)

    def ask(self, call, name, **options):
        options = {"cache_dir": self.cache, **options}
        self.process.stdin.write(json.dumps([call, name, options]) + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        assert line, "the worker ended"
        return json.loads(line)

    def fetch(self, name, **options):
        self.ask("fetch", name, **options)
        return self.answer()

    def headers(self, name, **options):
        self.ask("headers", name, **options)
        return self.answer()

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def server():
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.hang.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def processes(server, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    online = Worker(server.url, home)
    offline = Worker(server.url, home, HF_HUB_OFFLINE="1")
    yield online, offline
    online.end()
    offline.end()


@pytest.fixture
def hub(server):
    server.served.clear()
    server.broken = False
    return server


@pytest.fixture
def worker(hub, processes, tmp_path):
    processes[0].cache = str(tmp_path)
    return processes[0]


@pytest.fixture
def offline(hub, processes, tmp_path):
    processes[1].cache = str(tmp_path)
    return processes[1]


def test_only_the_files_needed_and_only_once(hub, worker):
    found = worker.fetch("org/model")
    assert set(found["files"]) == FETCHED
    assert all(found["files"][name][0] == len(SHARDED[name]) for name in FETCHED)
    assert Path(found["path"]).name == COMMIT
    before = list(hub.served)
    assert {path for path, _, _ in before} == {f"org/model/{name}" for name in FETCHED}
    assert all(hub.bytes_of(f"org/model/{name}") == len(SHARDED[name]) for name in FETCHED)
    # A second time, and by a tag of the same commit.
    assert worker.fetch("org/model") == found
    assert worker.fetch("org/model", revision="tagged") == found
    assert hub.served == before


def test_some_files_then_the_rest(hub, worker, tmp_path):
    bare = worker.fetch("org/model", weights=False, cache_dir=str(tmp_path / "elsewhere"))
    assert set(bare["files"]) == FETCHED - set(SHARDS)
    assert bare["path"].startswith(str(tmp_path / "elsewhere"))
    assert hub.weights_served() == set()
    one = worker.fetch("org/model", files=[SHARDS[1]])
    assert set(one["files"]) == FETCHED - {SHARDS[0], SHARDS[2]}
    assert set(worker.fetch("org/model")["files"]) == FETCHED
    assert hub.bytes_of(f"org/model/{SHARDS[1]}") == len(SHARDED[SHARDS[1]])
    both = worker.fetch("org/model", files=[SHARDS[0]], weights=False)
    assert both["error"] == "ValueError"
    assert "weights=False: pass one of the two" in both["message"]


def test_headers_without_weights(hub, worker):
    found = worker.headers("org/model")
    assert found["names"] == {SHARDS[0]: ["a"], SHARDS[1]: ["b"], SHARDS[2]: ["c"]}
    assert found["problems"] == {}
    assert all(found["files"][name][0] == len(SHARDED[name]) for name in SHARDS)
    # Holes: the largest shard takes a block or two of the disk.
    assert found["files"][SHARDS[2]][1] < 20_000
    assert hub.bytes_of(f"org/model/{SHARDS[2]}") == 200_000
    assert not Path(found["path"]).exists()
    # What is in the cache is looked at there.
    worker.fetch("org/model")
    before = list(hub.served)
    assert worker.headers("org/model")["names"] == found["names"]
    assert hub.served == before


def test_a_header_longer_than_the_first_request(hub, worker):
    found = worker.headers("org/single")
    assert found["names"] == {"model.safetensors": MANY_NAMES}
    assert found["problems"] == {}
    begins = [begin for path, begin, _ in hub.served if path == "org/single/model.safetensors"]
    assert begins == [0, 200_000]
    # The same as what the whole file says.
    path = worker.fetch("org/single")["path"]
    shards, problems = read_shards(Path(path))
    assert sorted(shards[0].tensors) == MANY_NAMES
    assert not problems


def test_a_connection_cut_half_way_is_resumed(hub, worker):
    found = worker.fetch("org/cut")
    requests = [(begin, sent) for path, begin, sent in hub.served if path.endswith(".safetensors")]
    assert [begin > 0 for begin, _ in requests] == [False, True]
    # What had arrived (in chunks of 10 MB) was kept.
    assert sum(sent for _, sent in requests) < len(CUT) + 10_000_000
    path = Path(found["path"]) / "model.safetensors"
    assert path.read_bytes() == CUT


def test_a_killed_download_keeps_the_shards_that_were_complete(hub, tmp_path):
    first = Worker(hub.url, tmp_path)
    first.ask("fetch", "org/hangs")
    snapshot = tmp_path / "models--org--hangs" / "snapshots" / COMMIT
    deadline = time.monotonic() + 60
    while not all((snapshot / name).exists() for name in SHARDS[:2]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    first.end()
    assert not (snapshot / SHARDS[2]).exists()
    hub.hang.set()
    second = Worker(hub.url, tmp_path)
    found = second.fetch("org/hangs")
    second.end()
    assert set(found["files"]) == FETCHED
    for name in SHARDS:
        assert hub.bytes_of(f"org/hangs/{name}") == len(SHARDED[name])


def test_offline(hub, worker, offline):
    advice = r"downloads are off \(HF_HUB_OFFLINE or local_files_only=True\): fetch it once"
    for answer in (
        offline.fetch("org/model"),
        offline.fetch("org/model", local_files_only=False),
        offline.headers("org/model"),
        worker.fetch("org/model", local_files_only=True),
    ):
        assert answer["error"] == "FileNotFoundError"
        assert re.search(advice, answer["message"])
    assert hub.served == []
    part = worker.fetch("org/model", files=SHARDS[:2])
    for answer in (
        offline.fetch("org/model"),
        offline.headers("org/model"),
        worker.fetch("org/model", local_files_only=True),
    ):
        assert re.search(advice, answer["message"])
    assert offline.fetch("org/model", weights=False) == part
    assert offline.fetch("org/model", files=SHARDS[:2]) == part
    whole = worker.fetch("org/model")
    before = list(hub.served)
    assert offline.fetch("org/model") == whole
    assert offline.fetch("org/model", revision=COMMIT) == whole
    assert worker.fetch("org/model", local_files_only=True) == whole
    assert set(offline.headers("org/model")["names"]) == set(SHARDS)
    assert hub.served == before


def test_a_hub_that_cannot_be_reached(worker, tmp_path):
    whole = worker.fetch("org/model")
    with socket.socket() as nobody:
        # Bound and never listened to: a connection to it is refused.
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        alone = Worker(url, tmp_path)
        cached, answer = alone.fetch("org/model"), alone.fetch("org/other")
        alone.end()
    assert cached == whole
    assert answer["error"] == "ConnectionError"
    assert f"org/other could not be fetched from {url}" in answer["message"]
    assert "Check the connection (proxy, HF_ENDPOINT)" in answer["message"]


def test_a_private_model_needs_the_token(worker):
    answer = worker.fetch("org/private")
    assert answer["error"] == "FileNotFoundError"
    assert "has no model org/private that this token may see" in answer["message"]
    assert set(worker.fetch("org/private", token=TOKEN)["files"]) == FETCHED
    assert set(worker.headers("org/private", token=TOKEN)["names"]) == set(SHARDS)


@pytest.mark.parametrize(
    ("repo", "options", "error", "message"),
    [
        ("org/gated", {}, "PermissionError", "org/gated is gated: accept its terms at http"),
        ("org/nothing", {}, "FileNotFoundError", "there is no folder of that name: check the sp"),
        ("org/model", {"revision": "v9"}, "FileNotFoundError", "has no revision 'v9': pass a br"),
        ("org/model", {"token": "hf_old"}, "PermissionError", "Pass a valid token=..., or renew"),
        ("org/huge", {}, "OSError", "needs 1000000000.0 GB more, but .* GB free: make room, or"),
        ("org/no-config", {}, "CheckpointError", "has no config.json: it is not a model's repo"),
        ("org/no-weights", {}, "CheckpointError", "has no model.safetensors .*holds config.json,"),
        ("org/lost-shard", {}, "CheckpointError", r"00002-of-00003.safetensors \(1 of 3 weight"),
        ("org/bad-index", {}, "CheckpointError", "'../a.safetensors', which is not a file beside"),
        ("org/model", {"files": ["x.bin"]}, "CheckpointError", r"has no x.bin \(1 of 1 weight"),
    ],
)
def test_refusals_say_what_to_do_before_any_weights_are_read(hub, worker, repo, options, error, message):
    answer = worker.fetch(repo, **options)
    assert answer["error"] == error
    assert re.search(message, answer["message"])
    assert hub.weights_served() == set()


def test_a_hub_out_of_order(hub, worker):
    hub.broken = True
    answer = worker.fetch("org/model")
    assert answer["error"] == "PermissionError"
    assert "refused access to org/model" in answer["message"]
    assert "the hub is having a day off" in answer["message"]


def test_local_folders_come_first(hub, worker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert fetch("org/model") == Path("org/model")
    assert fetch(tmp_path) == tmp_path
    assert fetch("org/model", weights=False) == Path("org/model")
    with fetch_headers("org/model") as folder:
        assert folder == Path("org/model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch("~/org") == tmp_path / "org"


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("./org/model", FileNotFoundError, r"no folder './org/model' \(seen from .*organisation/n"),
        ("../model", FileNotFoundError, "no folder"),
        ("/no/such/folder", FileNotFoundError, "no folder"),
        ("~/model", FileNotFoundError, "no folder"),
        ("model", FileNotFoundError, "a hub id reads organisation/name"),
        ("org/model/more", FileNotFoundError, "no folder"),
        ("org/model/", FileNotFoundError, "no folder"),
        ("", FileNotFoundError, "no folder"),
        (Path("org/model"), FileNotFoundError, "no folder"),
        ("model.safetensors", NotADirectoryError, "is a file; pass the folder that holds it"),
        ("https://hub.example/org/model", ValueError, "is an address; pass the hub id in it"),
    ],
)
def test_what_is_neither_a_folder_nor_an_id(tmp_path, monkeypatch, name, error, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(error, match=message):
        fetch(name)
