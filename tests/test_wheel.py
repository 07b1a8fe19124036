"""The wheel holds one top-level package, all of it, and works away from the repository."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE")
FOLDERS = {"dsv4": "dsv4", "kernels": "dsv4/kernels", "convert": "dsv4/convert"}

IMPORT_ALL = """
import importlib, importlib.util, pkgutil, sys
from pathlib import Path

root = Path(sys.argv[1]).resolve()
sys.path.insert(0, str(root))
import dsv4

names = ["dsv4", *(m.name for m in pkgutil.walk_packages(dsv4.__path__, "dsv4."))]
for name in names:
    if not name.rpartition(".")[2].startswith("_"):
        module = importlib.import_module(name)
        assert Path(module.__file__).is_relative_to(root), module.__file__
for name in ("kernels", "convert"):
    spec = importlib.util.find_spec(name)
    assert spec is None or not Path(spec.origin).is_relative_to(root), spec
for name in dsv4.__all__:
    getattr(dsv4, name)
print(*names)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: a build leaves folders behind, and old ones would end up in the wheel."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copy(ROOT / name, source)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    command = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out)]
    subprocess.run([sys.executable, "-m", "pip", "-q", *command, str(source)], cwd=out, check=True)
    (path,) = out.glob("*.whl")
    return path


def test_the_wheel_holds_dsv4_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        info = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
        assert {name.partition("/")[0] for name in names} == {"dsv4", info}
        expected = {
            f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
            for folder, place in FOLDERS.items()
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert {name for name in names if not name.startswith(info)} == expected
        assert "dsv4/py.typed" in expected
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        assert "dsv4 = dsv4.cli:main" in entry_points
        metadata = archive.read(f"{info}/METADATA").decode()
    assert "License-Expression: MIT" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert "Requires-Dist: torch>=2.11\n" in metadata


def test_the_unpacked_wheel_imports_elsewhere(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT_ALL, str(site)],
        cwd=elsewhere,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert {"dsv4.kernels", "dsv4.convert", "dsv4.text"} <= set(done.stdout.split())
