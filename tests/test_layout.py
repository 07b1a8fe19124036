"""What the tree promises: packages, direction of imports, file sizes, README, commands."""

import ast
import fnmatch
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IGNORED = (".git", *(line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()))
FOLDERS = {"dsv4": "dsv4", "dsv4.kernels": "kernels", "dsv4.convert": "convert"}
MAX_LINES = 400

DEMO_COMMAND = 'python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e ".[demo]" && .venv/bin/dsv4 demo'
TEST_COMMAND = 'python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e ".[test]" && .venv/bin/pytest'

# Every file of dsv4/ belongs to one group.
GROUPS = {
    "words": {
        *("config", "config_json", "values", "names", "handle", "hooks", "stage", "table"),
        "origin",
    },
    "call": {"call", "inputs"},
    "layers": {
        *("float32", "norm", "rope", "linear", "hyper_connection", "compressor", "indexer"),
        *("attention", "attention_step", "router", "experts", "moe", "block"),
    },
    "watching": {
        *("activation_cache", "budget", "capture", "interventions", "lens", "loss", "steps"),
        *("support", "watch"),
    },
    "analyses": {
        *("residual", "attribution", "reading", "attention_analysis", "moe_analysis", "replay"),
        *("ablation", "freezing", "knockout", "splicing", "patching", "sweep", "effects"),
        *("part", "bench"),
    },
    "text": {"text", "chat"},
    "model": {
        *("model", "initialize", "kv_cache", "tape", "slots", "generate", "sampling", "loading"),
        *("compiling", "fixed_cache"),
        *("placement", "scale", "placed", "offload", "shelves", "hot", "lookahead"),
        *("traffic", "collectives", "parallel_plan", "sharded", "mesh_stage", "pipeline", "parallel"),
        "pretrained",
    },
    "programs": {
        *("cli", "commands", "demo", "findings", "picture", "__main__", "testing"),
        *("view", "page", "page_template", "cells"),
        *("testing_checkpoints", "testing_feeding", "testing_kernels", "testing_parallel", "testing_probes"),
        *("testing_devices", "testing_large", "testing_uses"),
    },
    "public": {"__init__"},
}
# Left may import right; imports that only a type checker runs are free.
MAY_IMPORT = {
    "words": {"words"},
    "call": {"words", "call", "kernels"},
    "layers": {"words", "call", "layers", "kernels"},
    "watching": {"words", "call", "watching", "analyses", "kernels"},
    "analyses": {"words", "call", "watching", "analyses", "kernels"},
    "text": {"words", "text"},
    "model": {
        *("words", "call", "layers", "watching", "analyses", "text", "model", "kernels"),
        "convert",
    },
    "programs": set(GROUPS) | {"kernels", "convert"},
    "public": set(),
    "kernels": {"kernels"},
    "convert": {"convert", "dsv4.config", "dsv4.kernels.quantize"},
}
# What these may import from outside dsv4 and the standard library.
LIGHT = {
    "dsv4": set(),
    "dsv4.config": {"torch"},
    "dsv4.config_json": {"torch"},
    "dsv4.kernels": {"torch"},
}


def files(pattern="*"):
    """Files of the repository, without what .gitignore leaves out."""
    pending = [ROOT]
    while pending:
        for path in sorted(pending.pop().iterdir()):
            if not any(fnmatch.fnmatch(path.name, mask) for mask in IGNORED):
                if path.is_dir():
                    pending.append(path)
                elif path.match(pattern):
                    yield path


def modules():
    """Dotted name -> file, for the three packages."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).glob("*.py")):
            found[package if path.stem == "__init__" else f"{package}.{path.stem}"] = path
    return found


MODULES = modules()


def imports(path, is_top_level=False):
    """Dotted names that a file imports, outside `if TYPE_CHECKING`; of dsv4, the modules."""
    pending = list(ast.parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                yield member if member in MODULES else node.module
        elif not (is_top_level and isinstance(node, (ast.FunctionDef, ast.Lambda))):
            pending += ast.iter_child_nodes(node)


def group(module):
    for package in ("dsv4.kernels", "dsv4.convert"):
        if module == package or module.startswith(package + "."):
            return package.partition(".")[2]
    name = module.partition(".")[2] or "__init__"
    found = [group for group, names in GROUPS.items() if name in names]
    assert found, f"{module} is new: put it into one of GROUPS in {Path(__file__).name}"
    return found[0]


def test_packages_are_listed_and_mapped():
    setuptools = PROJECT["tool"]["setuptools"]
    assert setuptools["packages"] == list(FOLDERS)
    assert setuptools["package-dir"] == FOLDERS
    assert not (ROOT / "dsv4" / "kernels").exists()
    assert not (ROOT / "dsv4" / "convert").exists()
    for folder in FOLDERS.values():
        assert (ROOT / folder / "__init__.py").is_file()
        nested = [path for path in files("*.py") if path.parent.parent == ROOT / folder]
        assert nested == []
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_data_files_are_packaged():
    masks = PROJECT["tool"]["setuptools"]["package-data"]["dsv4"]
    for folder in FOLDERS.values():
        for path in files():
            if path.is_relative_to(ROOT / folder) and path.suffix != ".py":
                name = path.relative_to(ROOT / folder).as_posix()
                assert folder == "dsv4"
                assert any(fnmatch.fnmatch(name, mask) for mask in masks), name


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    allowed = MAY_IMPORT[group(module)]
    for imported in imports(MODULES[module]):
        if imported.partition(".")[0] == "dsv4":
            assert imported in allowed or group(imported) in allowed, imported
            device_code = imported.rpartition(".")[2].startswith("_")
            assert not device_code or module.startswith("dsv4.kernels"), imported


def test_no_import_cycles():
    graph = {module: {name for name in imports(path, is_top_level=True) if name in MODULES} - {module} for module, path in MODULES.items()}
    # Raises CycleError with the modules of the circle.
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


def test_light_modules_import_little():
    for module, path in MODULES.items():
        limit = LIGHT.get("dsv4.kernels" if module.startswith("dsv4.kernels") else module)
        if limit is not None:
            allowed = {"dsv4", *limit, *sys.stdlib_module_names}
            if path.name.endswith("_triton.py"):
                allowed.add("triton")
            if path.name.endswith("_numba.py"):
                allowed |= {"numba", "numpy"}
            assert {name.partition(".")[0] for name in imports(path)} <= allowed, module


def test_mapped_folders_have_one_name():
    for path in files("*.py"):
        for name in imports(path):
            assert name.partition(".")[0] not in ("kernels", "convert"), path


def test_import_is_light():
    code = (
        "import sys, dsv4; assert 'torch' not in sys.modules; "
        "assert {'Dsv4', 'HookPoint'} <= set(dir(dsv4)); assert not hasattr(dsv4, 'Transformer'); "
        "import dsv4.kernels; "
        "heavy = {'transformers', 'huggingface_hub', 'matplotlib', 'nnsight'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tests", check=True)


def test_public_names():
    import dsv4

    assert dsv4.__all__ == ["ActivationCache", "Dsv4", "Dsv4Config", "HookPoint", "KVCache"]
    for name in dsv4.__all__:
        assert getattr(dsv4, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Transformer'; it has ActivationCache"):
        dsv4.Transformer  # noqa: B018


@pytest.mark.parametrize("folder", FOLDERS.values())
def test_files_are_short(folder):
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / folder).glob("*.py")}
    assert {path.name: n for path, n in lengths.items() if n > MAX_LINES} == {}


def test_python_files_are_ascii():
    assert [path for path in files("*.py") if not path.read_bytes().isascii()] == []


def test_no_paths_of_one_machine():
    # Spelled in parts, so that this file does not hold what it forbids.
    homes = "|".join(("work", "root", "home", "opt", "Users", "mnt"))
    place = re.compile(rf"(?<![\w.\-/:])/({homes})/\w|\.\./shar" + "ed/")
    for path in files():
        if path.suffix not in (".safetensors", ".png", ".pt"):
            found = place.search(path.read_text(encoding="utf-8"))
            assert found is None, f"{path}: {found[0]}"


def test_readme_names_the_two_commands_and_ci_runs_the_second():
    readme = (ROOT / "README.md").read_text().splitlines()
    assert DEMO_COMMAND in [line.strip() for line in readme]
    assert TEST_COMMAND in [line.strip() for line in readme]
    script = ROOT / ".ci" / "run"
    lines = script.read_text().splitlines()
    assert lines[:2] == ["#!/usr/bin/env bash", "set -euo pipefail"]
    assert lines[-1] == TEST_COMMAND
    assert script.stat().st_mode & 0o100


def test_the_commands_fit_the_project():
    project = PROJECT["project"]
    for command in (DEMO_COMMAND, TEST_COMMAND):
        extra = re.search(r"\.\[(\w+)\]", command)[1]
        assert extra in project["optional-dependencies"]
    assert project["scripts"] == {"dsv4": "dsv4.cli:main"}
    body = ast.parse((ROOT / "dsv4" / "cli.py").read_text()).body
    assert "main" in [node.name for node in body if isinstance(node, ast.FunctionDef)]
    assert (ROOT / "dsv4" / "__main__.py").is_file()


def test_constraints_pin_what_the_project_asks_for():
    project = PROJECT["project"]
    extras = project["optional-dependencies"].values()
    asked = [*project["dependencies"], *(name for extra in extras for name in extra)]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {pin.name.lower().replace("-", "_"): pin.specifier for pin in pins}
    for requirement in map(Requirement, asked):
        name = requirement.name.lower().replace("-", "_")
        # torch asks for setuptools itself, and every virtual environment brings one.
        if name != "setuptools":
            (pin,) = versions[name]
            assert pin.operator == "=="
            assert pin.version in requirement.specifier, requirement
    assert "torch>=2.11" in project["dependencies"]


def readme_tree():
    """Folder ("" for the root) -> names, from the fenced block under README's heading Files."""
    text = (ROOT / "README.md").read_text()
    block = re.search(r"^## Files\n.*?^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block, "README.md has no heading `## Files` with a fenced tree under it"
    tree, folder = {"": set()}, ""
    for line in filter(str.strip, block[1].splitlines()):
        name = line.split()[0]
        if line.startswith("  "):
            tree.setdefault(folder, set()).add(name)
        else:
            tree[""].add(name)
            folder = name.rstrip("/")
    return tree


def test_readme_tree_is_the_repository():
    tree = readme_tree()
    disk = {}
    for path in files():
        parts = path.relative_to(ROOT).parts
        names = [part + "/" for part in parts[:-1]] + [parts[-1]]
        disk.setdefault("", set()).add(names[0])
        if len(parts) > 1:
            disk.setdefault(parts[0], set()).add(names[1])
    hidden = {name for name in disk[""] if name.startswith(".")}
    assert tree[""] - hidden == disk[""] - hidden
    assert set(FOLDERS.values()) <= set(tree)
    # A folder may be left closed; one that is opened shows everything.
    for folder in set(tree) - {""}:
        assert tree[folder] == disk[folder], folder
