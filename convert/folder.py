"""A folder that appears whole: written beside its target, synced to disk, then renamed.

The target's name never shows half of it. Replacing an old folder takes two renames, with nothing
under the name between them; the old one is removed last. What a killed run leaves beside the target
is hidden (`.NAME.partial-...`, `.NAME.old-...`) and for the user to delete.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO


@dataclass(frozen=True)
class PartialFolder:
    """The folder while it is written."""

    path: Path

    def write(self, name: str, text: str) -> None:
        with (self.path / name).open("xb") as stream:
            stream.write(text.encode())
            sync(stream)

    def copy(self, file: Path) -> None:
        """Copy a file under its own name."""
        with file.open("rb") as source, (self.path / file.name).open("xb") as stream:
            shutil.copyfileobj(source, stream)
            sync(stream)


@contextmanager
def new_folder(target: Path, *, overwrite: bool, marker: str) -> Iterator[PartialFolder]:
    """Yield a folder beside `target`; it takes its name at the end, and is removed on an exception.

    Raises FileExistsError, before anything is written, where `target` is not an empty folder:
    unless `overwrite` is given and it holds `marker`, the file by which a folder of this kind is
    known.
    """
    # The folder itself and not a link to it is what gets renamed.
    target = target.resolve()
    _refuse(target, overwrite, marker)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = _beside(target, "partial")
    partial.mkdir()
    try:
        yield PartialFolder(partial)
        _sync_folder(partial)
        _refuse(target, overwrite, marker)
        _put_in_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync(stream: BinaryIO) -> None:
    """Flush a file to the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def _put_in_place(partial: Path, target: Path) -> None:
    if not target.exists() or not any(target.iterdir()):
        # A rename replaces an empty folder.
        partial.rename(target)
        _sync_folder(target.parent)
        return
    old = _beside(target, "old")
    target.rename(old)
    try:
        partial.rename(target)
    except BaseException:
        old.rename(target)
        raise
    _sync_folder(target.parent)
    shutil.rmtree(old)


def _beside(target: Path, what: str) -> Path:
    """A hidden name of its own in the folder of the target, so that a rename is enough."""
    return target.parent / f".{target.name}.{what}-{secrets.token_hex(4)}"


def _refuse(target: Path, overwrite: bool, marker: str) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(f"{target} is a file; pass the name of a folder")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(f"{target} is not empty; pass overwrite=True to replace it, or another folder")
    if not (target / marker).is_file():
        raise FileExistsError(
            f"{target} is not empty and holds no {marker}, so it is no checkpoint and is not replaced; pass another folder"
        )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
