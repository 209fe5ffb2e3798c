"""Every room imports what it may know, and no more; the controller needs no torch."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "penstock"
KNOWS = {
    "errors": "",
    "records": "",
    "safe_files": "records",
    "checksums": "records",
    "usercode": "records",
    "blob_stores": "records",
    "config": "records safe_files usercode",
    "channel": "records",
    "algorithms": "config records usercode",
    "loop": "algorithms config records",
    "models": "checksums config records safe_files",
    "sync": "config models records usercode",
    "http_server": "config records",
    "observe": "config records safe_files",
    "page": "http_server observe records safe_files",
    "demo": "records",
    "scoring": "channel config http_server records usercode",
    "rollout": "channel config http_server records usercode",
    "tasks": "config demo http_server observe records scoring usercode",
    "engines": "blob_stores channel config models records sync usercode",
    "trainer": "algorithms blob_stores channel checksums config models records safe_files usercode",
    "serve": "blob_stores channel engines http_server models records rollout sync",
    "processes": "channel config engines observe records safe_files sync trainer usercode",
    "config.root": "algorithms config engines loop models observe processes records rollout scoring sync tasks trainer",
    "durability": "blob_stores checksums config.root loop observe records rollout safe_files tasks trainer",
    "placement": "config config.root engines models processes records sync trainer",
    "vllm_plugin": "models records sync",
}
"""What each room may import beside `errors`, from the heart outwards. A room that is not here is around them all."""
AROUND = ("run", "planner", "worker", "api", "library", "bench", "cli")
"""These may import every room above, and those before them."""
CONFIG_ROOT = ("penstock.config.root", "penstock.config.repeatable")
"""The sections of all rooms together: their owners know `config`, and not this."""
STARTED_AS_PROCESSES = {("processes", "worker"), ("engines", "vllm_plugin"), ("run", "page")}
"""Named for the command line of another process, never loaded into this one."""
MODULE_PATH = re.compile(r"(penstock(?:\.\w+)+)(?::\w+)?")


def room(module: str) -> str:
    return "config.root" if module.startswith(CONFIG_ROOT) else module.split(".")[1]


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
            if named and (PACKAGE / room(named[1]).split(".")[0]).exists():
                found.add(named[1])
    return {name for name in found if name.startswith("penstock.")}


def rooms_imported(path: Path) -> set[str]:
    return {room(module) for module in imports(path.read_text())}


def may_import(importer: str, imported: str) -> bool:
    if imported in (importer, "errors") or (importer, imported) in STARTED_AS_PROCESSES:
        return True
    if importer in KNOWS:
        return imported in KNOWS[importer].split()
    return imported in (*KNOWS, *AROUND[: AROUND.index(importer)])


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_what_it_may_know(path: Path) -> None:
    importer = room(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
    wrong = sorted(imported for imported in rooms_imported(path) if not may_import(importer, imported))
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
    assert not any(may_import("models", room(module)) for module in found)


def test_no_room_knows_one_that_knows_it() -> None:
    def known(name: str, path: tuple[str, ...] = ()) -> set[str]:
        assert name not in path, f"{' imports '.join((*path, name))}"
        direct = set(KNOWS[name].split())
        return direct.union(*(known(other, (*path, name)) for other in direct))

    assert all(known(name) <= set(KNOWS) for name in KNOWS)


def test_every_room_says_what_it_knows() -> None:
    rooms = {
        path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()
    }
    assert rooms - {"__init__", "__pycache__", "py.typed"} == {*KNOWS, *AROUND} - {"config.root"}


@pytest.mark.parametrize(
    "module",
    [
        "penstock.run.run",
        "penstock.cli.main",
        "penstock.api",
        "penstock.worker.rollout_role",
        "penstock.worker.scoring_role",
    ],
)
def test_the_controller_and_its_light_workers_import_without_torch(module: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; import {module}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
