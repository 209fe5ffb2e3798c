"""Imports go downward only, siblings of layer 2 never see each other, and the controller needs no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "penstock"
LAYERS = {
    "types": 0,
    "sampling_masks": 0,
    "errors": 0,
    "usercode": 0,
    "interfaces": 0,
    "config": 1,
    "channel": 1,
    "observe": 1,
    "transfer": 1,
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
    "serve": 4,
    "planner": 4,
    "api": 5,
    "cli": 5,
    "worker": 5,
    "bench": 5,
}
ALLOWED_SIBLINGS = {("engines", "models"), ("sync", "models"), ("demo", "models"), ("tasks", "demo")}
TRAINER_MAY_IMPORT = {"algorithms", "models"}


def room(module: str) -> str:
    return module.split(".")[1]


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return {name for name in found if name.startswith("penstock.")}


def rooms_imported(path: Path) -> set[str]:
    return {room(module) for module in imports(path)}


def violation(importer: str, imported: str) -> bool:
    if importer == imported:
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


def test_every_room_has_a_layer() -> None:
    rooms = {
        path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()
    }
    assert rooms - {"__init__", "__pycache__", "py.typed"} <= set(LAYERS)


@pytest.mark.parametrize("module", ["penstock.orchestration.session", "penstock.cli.main", "penstock.api"])
def test_the_controller_imports_without_torch(module: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; import {module}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
