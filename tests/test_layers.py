"""Imports go downward only, siblings of layer 2 never see each other, and the controller needs no torch."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "penstock"
LAYERS = {
    "types": 0,
    "sampling_masks": 0,
    "routing_records": 0,
    "errors": 0,
    "usercode": 0,
    "safe_files": 0,
    "checksums": 0,
    "interfaces": 0,
    "config": 1,
    "blobs": 1,
    "channel": 1,
    "http_server": 1,
    "observe": 1,
    "tasks": 2,
    "rollout": 2,
    "engines": 2,
    "scoring": 2,
    "buffer": 2,
    "algorithms": 2,
    "sync": 2,
    "models": 2,
    "demo": 2,
    "trainer": 3,
    "orchestration": 4,
    "dashboard": 4,
    "serve": 4,
    "planner": 5,
    "api": 5,
    "library": 5,
    "cli": 5,
    "worker": 5,
    "vllm_plugin": 5,
    "bench": 5,
}
ALLOWED_SIBLINGS = {
    ("engines", "models"),
    ("sync", "models"),
    ("demo", "models"),
    ("tasks", "demo"),
    ("tasks", "scoring"),
}
TRAINER_MAY_IMPORT = {"algorithms", "models"}
STARTED_AS_PROCESSES = {
    ("orchestration", "worker"),
    ("engines", "vllm_plugin"),
    ("orchestration", "dashboard"),
}
"""Named for the command line of another process, never loaded into this one."""
MODULE_PATH = re.compile(r"(penstock(?:\.\w+)+)(?::\w+)?")


def room(module: str) -> str:
    return module.split(".")[1]


def imports(source: str) -> set[str]:
    """Modules of the package that the source imports, or names in a string that is nothing but a path to one
    ("penstock.tasks.stream", "penstock.tasks.stream:TaskStream"). Sentences, docstrings among them, are not
    such strings."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = MODULE_PATH.fullmatch(node.value)
            if named and room(named[1]) in LAYERS:
                found.add(named[1])
    return {name for name in found if name.startswith("penstock.")}


def rooms_imported(path: Path) -> set[str]:
    return {room(module) for module in imports(path.read_text())}


def violation(importer: str, imported: str) -> bool:
    if importer == imported or (importer, imported) in STARTED_AS_PROCESSES:
        return False
    mine, theirs = LAYERS[importer], LAYERS[imported]
    if mine == theirs == 5:
        return False
    if mine == 2 and theirs == 2:
        return (importer, imported) not in ALLOWED_SIBLINGS
    if mine in (0, 1) and mine == theirs:
        return mine == 1 and imported != "config"
    if importer == "trainer" and theirs == 2:
        return imported not in TRAINER_MAY_IMPORT
    return theirs >= mine


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downward(path: Path) -> None:
    importer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    wrong = sorted(imported for imported in rooms_imported(path) if violation(importer, imported))
    assert not wrong, f"penstock.{importer} must not import {wrong}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("BUILTINS = {'auto': 'penstock.tasks.verification:reward'}", {"penstock.tasks.verification"}),
        ("importlib.import_module('penstock.demo.arithmetic')", {"penstock.demo.arithmetic"}),
        ("import penstock.tasks.stream", {"penstock.tasks.stream"}),
        ('"""See `penstock.tasks.stream`."""', set()),
        ("path = Path('penstock.yaml')", set()),
    ],
)
def test_a_path_in_a_string_is_an_import(source: str, found: set[str]) -> None:
    assert imports(source) == found
    assert all(violation("scoring", room(module)) for module in found)


def test_every_room_has_a_layer() -> None:
    rooms = {
        path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()
    }
    assert rooms - {"__init__", "__pycache__", "py.typed"} <= set(LAYERS)


@pytest.mark.parametrize(
    "module",
    [
        "penstock.orchestration.run",
        "penstock.cli.main",
        "penstock.api",
        "penstock.worker.rollout_role",
        "penstock.worker.scoring_role",
    ],
)
def test_the_controller_and_its_light_workers_import_without_torch(module: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; import {module}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
