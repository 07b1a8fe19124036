"""Checkpoints by hub id: the files a model needs, into the cache that huggingface_hub keeps.

huggingface_hub does the transfer and reads its environment (HF_HOME, HF_HUB_CACHE, HF_ENDPOINT,
HF_TOKEN, HF_HUB_OFFLINE). A connection that breaks is resumed where it broke; after a killed
process the shards that were complete are kept. What is added here: only the files of the format,
a check of the disk before the first large byte, and errors that say what to do.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status
from huggingface_hub.utils import tqdm as hub_tqdm

from dsv4.convert.header import INDEX_NAME, MAX_HEADER_BYTES, SINGLE_NAME
from dsv4.convert.problems import CheckpointError

CONFIG_NAME = "config.json"
SMALL_FILES = (
    CONFIG_NAME,
    INDEX_NAME,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# Enough for the header of most shards: one request each.
FIRST_BYTES = 200_000
REQUESTS_AT_ONCE = 8

# What the library raises, what we raise for it, what the caller can do. The first match counts.
# {0} is the id, {1} the revision, {2} the hub, {3} the cache, {4} the library's own words.
ADVICE: tuple[tuple[type[Exception], type[OSError], str], ...] = (
    (
        GatedRepoError,
        PermissionError,
        "{0} is gated: accept its terms at {2}/{0}, then pass token=... or run `hf auth login`",
    ),
    (
        RepositoryNotFoundError,
        FileNotFoundError,
        "{2} has no model {0} that this token may see, and there is no folder of that name: check "
        "the spelling; for a private model pass token=... or run `hf auth login`",
    ),
    (
        RevisionNotFoundError,
        FileNotFoundError,
        "{0} has no revision {1!r}: pass a branch, a tag or a commit of {2}/{0}, or leave revision out",
    ),
    (
        RemoteEntryNotFoundError,
        FileNotFoundError,
        "{0} lost a file while it was read ({4}); call again",
    ),
    (
        OfflineModeIsEnabled,
        FileNotFoundError,
        "{0} (revision {1!r}) is not complete in the cache {3}, and downloads are off "
        "(HF_HUB_OFFLINE or local_files_only=True): fetch it once with them on, or pass a folder",
    ),
    (
        HfHubHTTPError,
        ConnectionError,
        "{2} did not serve {0}: {4}. Try again later; files that are complete are kept",
    ),
    (
        Exception,
        ConnectionError,
        "{0} could not be fetched from {2}: {4}. Check the connection (proxy, HF_ENDPOINT) and "
        "call again; files that are complete are kept",
    ),
)


@dataclass(frozen=True)
class _Request:
    """One hub id and how to get at it."""

    repo: str
    revision: str
    token: str | bool | None
    cache_dir: str | Path
    offline: bool

    def download(self, revision: str, names: Collection[str], **options: Any) -> Path:
        """The snapshot folder, after those of the named files that the hub has are in it."""
        return Path(
            snapshot_download(
                self.repo,
                revision=revision,
                token=self.token,
                cache_dir=self.cache_dir,
                local_files_only=self.offline,
                allow_patterns=list(names),
                **options,
            )
        )


def fetch(
    repo_or_path: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool | None = None,
    files: Collection[str] | None = None,
    weights: bool = True,
) -> Path:
    """The folder that holds a checkpoint: a local one as it is, a hub id downloaded if need be.

    A string that names no folder here is a hub id if it reads `organisation/name`. Downloads
    config.json, the index, tokenizer and generation files, and the weight files that the index
    names (or those in `files`; or, with `weights=False`, none).

    FileNotFoundError: no such folder, id, revision or file, or not in the cache while offline.
    PermissionError: gated or private. ConnectionError: the hub cannot be reached.
    OSError (ENOSPC): the disk is too small, said before any weights are read. CheckpointError: the
    repository holds no checkpoint of this format.
    """
    if files is not None and not weights:
        raise ValueError(f"files={list(files)} with weights=False: pass one of the two")
    folder = _local(repo_or_path)
    if folder is not None:
        return folder
    request = _request(repo_or_path, revision, token, cache_dir, local_files_only)
    with _explained(request):
        folder = _small_files(request)
        if weights:
            _large_files(request, folder, weight_files(folder) if files is None else files)
    return folder


@contextmanager
def fetch_headers(
    repo_or_path: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool | None = None,
) -> Iterator[Path]:
    """A folder to look at without its weights; inside the `with` only.

    A local folder is given as it is. Of a hub id the small files and each shard's header are
    fetched (a few hundred kB per shard); the shards have their true length, but everything after
    the header is a hole. Raises as `fetch`.
    """
    folder = _local(repo_or_path)
    if folder is not None:
        yield folder
        return
    request = _request(repo_or_path, revision, token, cache_dir, local_files_only)
    with TemporaryDirectory(prefix="dsv4-headers-") as temporary:
        hollow = Path(temporary)
        with _explained(request):
            folder = _small_files(request)
            for name in SMALL_FILES:
                if (folder / name).exists():
                    (hollow / name).symlink_to((folder / name).resolve())
            names = weight_files(folder)
            cached = [name for name in names if (folder / name).exists()]
            for name in cached:
                (hollow / name).symlink_to((folder / name).resolve())
            missing = sorted(set(names) - set(cached))
            if missing and request.offline:
                raise OfflineModeIsEnabled(f"no {missing[0]}")
            with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
                headers = pool.map(lambda name: _header(request, folder.name, name), missing)
                for name, (start, size) in zip(missing, headers, strict=True):
                    (hollow / name).write_bytes(start)
                    os.truncate(hollow / name, size)
        yield hollow


def weight_files(folder: Path) -> list[str]:
    """The names of a checkpoint's weight files, by its index, else the single file's."""
    index = folder / INDEX_NAME
    if not index.exists():
        return [SINGLE_NAME]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{index} is not an index with a weight_map: {error!r}") from error
    odd = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if odd:
        raise CheckpointError(f"{index} names {odd[0]!r}, which is not a file beside it")
    return sorted(names)


def _local(repo_or_path: str | Path) -> Path | None:
    """The local folder meant, or None for a hub id."""
    text = str(repo_or_path)
    if text.startswith(("http://", "https://")):
        raise ValueError(f"{text} is an address; pass the hub id in it (organisation/name)")
    path = Path(text).expanduser()
    if text and path.is_dir():
        return path
    if path.is_file():
        raise NotADirectoryError(f"{path} is a file; pass the folder that holds it")
    if isinstance(repo_or_path, str) and HUB_ID.fullmatch(repo_or_path):
        return None
    raise FileNotFoundError(
        f"there is no folder {text!r} (seen from {Path.cwd()}), and a hub id reads organisation/name, as in deepseek-ai/DeepSeek-V4-Flash"
    )


def _request(
    repo: str | Path,
    revision: str | None,
    token: str | bool | None,
    cache_dir: str | Path | None,
    local_files_only: bool | None,
) -> _Request:
    return _Request(
        repo=str(repo),
        revision=revision or constants.DEFAULT_REVISION,
        token=token,
        cache_dir=constants.HF_HUB_CACHE if cache_dir is None else Path(cache_dir).expanduser(),
        offline=bool(local_files_only) or constants.is_offline_mode(),
    )


class _Quiet(hub_tqdm):
    """No bars for files that take no time."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **{**options, "disable": True})


def _small_files(request: _Request) -> Path:
    folder = request.download(request.revision, SMALL_FILES, tqdm_class=_Quiet)
    if not (folder / CONFIG_NAME).exists():
        if request.offline:
            raise OfflineModeIsEnabled(f"no {CONFIG_NAME}")
        raise CheckpointError(f"{request.repo} has no {CONFIG_NAME}: it is not a model's repository")
    return folder


def _large_files(request: _Request, folder: Path, names: Collection[str]) -> None:
    missing = [name for name in names if not (folder / name).exists()]
    if not missing:
        return
    if request.offline:
        raise OfflineModeIsEnabled(f"no {missing[0]}")
    # The folder is named by its commit: all files are of one state of the repository.
    commit = folder.name
    tree = HfApi(token=request.token).list_repo_tree(request.repo, revision=commit)
    sizes = {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}
    absent = [name for name in missing if name not in sizes]
    if absent:
        raise CheckpointError(
            f"{request.repo} has no {', '.join(absent[:10])} ({len(absent)} of {len(names)} weight "
            f"files); it holds {', '.join(sorted(sizes)[:20])}"
        )
    needed = sum(sizes[name] for name in missing)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"{request.repo} needs {needed / 1e9:.1f} GB more, but {request.cache_dir} has "
            f"{free / 1e9:.1f} GB free: make room, or pass cache_dir=... (or set HF_HOME)",
        )
    request.download(commit, missing)


def _header(request: _Request, commit: str, name: str) -> tuple[bytes, int]:
    """The bytes of a shard up to the end of its header, and the shard's size."""
    url = hf_hub_url(request.repo, name, revision=commit)
    start, size = _range(request, url, 0, FIRST_BYTES)
    end = 8 + int.from_bytes(start[:8], "little")
    # A length beyond the limit is no header; the reader of the folder says so.
    if len(start) < end <= 8 + MAX_HEADER_BYTES and len(start) < size:
        start += _range(request, url, len(start), end)[0]
    return start[:end], size


def _range(request: _Request, url: str, begin: int, end: int) -> tuple[bytes, int]:
    """Bytes begin to end (or to the file's end, if that comes first), and the file's size."""
    headers = {**build_hf_headers(token=request.token), "Range": f"bytes={begin}-{end - 1}"}
    with get_session().stream("GET", url, headers=headers) as response:
        hf_raise_for_status(response)
        total = re.fullmatch(r"bytes \d+-\d+/(\d+)", response.headers.get("Content-Range", ""))
        if total is None:
            raise ConnectionError(f"{url} cannot be read in parts")
        return response.read(), int(total[1])


@contextmanager
def _explained(request: _Request) -> Iterator[None]:
    """Turns what huggingface_hub raises into an OSError that says what to do."""
    try:
        yield
    # RuntimeError is what hf_xet, which moves the large files of the real hub, raises.
    except (HTTPError, OSError, RuntimeError) as error:
        # An errno is the operating system's: a full disk, a cache that may not be written.
        if getattr(error, "errno", None) is not None:
            raise
        cause: BaseException = error
        if isinstance(error, LocalEntryNotFoundError):
            # Nothing in the cache; its cause is why the hub was not asked.
            cause = error.__cause__ or OfflineModeIsEnabled(str(error))
        status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
        _, kind, advice = next(row for row in ADVICE if isinstance(cause, row[0]))
        if kind is ConnectionError and status in (401, 403):
            kind, advice = (
                PermissionError,
                "{2} refused access to {0}: {4}. Pass a valid token=..., or renew it with `hf auth login`",
            )
        words = " ".join(str(cause).split()) or type(cause).__name__
        where = (request.repo, request.revision, constants.ENDPOINT, request.cache_dir, words)
        raise kind(advice.format(*where)) from error
