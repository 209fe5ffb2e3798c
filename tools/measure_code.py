"""How large the package is, and how far a group of episodes travels through it.

    python tools/measure_code.py [--tree CHECKOUT] [--without bench] [--trace] [--json FILE]

Sizes are read from the source. `--trace` runs the demo for four steps with a profile function in every Python
process, and adds what ran:

- `functions`, `modules`: what was called at all, and what was called at least once for each group (in the trainer:
  for each step);
- `hops`: the functions that stand between the places where a group changes hands. Whenever one of LANDMARKS is
  called, the package's frames on its stack are collected; hops are the distinct functions among them that ran at
  least once a step, over all processes. A function that only computes (it calls no landmark) is no hop, and neither
  is what starts, observes or saves.

The trace knows no names but the landmarks, so it runs on any commit.
"""

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STEPS, GROUPS_PER_STEP = 4, 16
LANDMARKS = {
    "admission": (
        "StalenessGate.admit",
        "StalenessGate.finish",
        "StalenessGate.select",
        "StalenessGate.trained",
    ),
    "message": ("Channel.call", "Channel.stream"),
    "engine": ("Scheduler.add", "cut_chunk", "BucketReceiver.load"),
    "scoring": ("exact_match",),
    "trainer": ("PolicyTrainer.step", "SlotPublisher.describe"),
}
"""The last function before a group, its tokens, its score or the weights trained on it are in other hands."""
NOT_OF_GROUPS = (".start", ".report", ".take", ".save")
"""Messages that carry no group: how the names of their methods end."""
PROFILE = """
import os, sys, threading
_folder, _root = os.environ["MEASURE_FOLDER"], os.environ["MEASURE_ROOT"]
_landmarks = set(os.environ["MEASURE_LANDMARKS"].split(","))
_not_of_groups = tuple(os.environ["MEASURE_NOT_OF_GROUPS"].split(","))
_marks = {int(mark) for mark in os.environ["MEASURE_COUNTS"].split(",")}
_counts, _hops = {}, set()

def _name(code):
    return code.co_filename[len(_root):] + ":" + code.co_qualname

def _is_of_no_group(frame):
    method = frame.f_locals.get("method")
    return str(getattr(method, "name", method)).endswith(_not_of_groups)

def _profile(frame, event, arg, *, root=_root, counts=_counts):
    if event != "call":
        return
    code = frame.f_code
    if not code.co_filename.startswith(root):
        return
    count = counts[code] = counts.get(code, 0) + 1
    if count in _marks:
        _file.write(f"count {count} {_name(code)}\\n")
    if code.co_qualname in _landmarks and not _is_of_no_group(frame):
        while frame is not None:
            if frame.f_code.co_filename.startswith(root):
                _hops.add(frame.f_code)
            frame = frame.f_back
    if len(_reported) < len(counts) + len(_hops):
        _report(code)

_reported = set()
_file = open(os.path.join(_folder, f"{os.getpid()}.txt"), "w", buffering=1)
_file.write("argv " + " ".join(sys.orig_argv) + "\\n")

def _report(code):
    for kind, codes in (("called", [code]), ("hop", list(_hops))):
        for one in codes:
            if (kind, one) not in _reported:
                _reported.add((kind, one))
                _file.write(f"{kind} {_name(one)}\\n")

threading.setprofile(_profile)
sys.setprofile(_profile)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--tree", type=Path, default=Path(__file__).parent.parent, help="a checkout; this one"
    )
    parser.add_argument(
        "--without", action="append", default=[], help="a folder of the package that is left out"
    )
    parser.add_argument("--trace", action="store_true", help="run the demo for four steps (about a minute)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = sizes(options.tree / "penstock", options.without)
    if options.trace:
        found |= {"trace": trace(options.tree.resolve())}
    print(json.dumps(found, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def sizes(package: Path, without: list[str]) -> dict[str, Any]:
    files = [
        path for path in sorted(package.rglob("*.py")) if path.relative_to(package).parts[0] not in without
    ]
    lines = {path: path.read_text().count("\n") for path in files}
    trees = {path: ast.parse(path.read_text()) for path in files}
    functions = [function for tree in trees.values() for function in functions_of(tree)]
    lengths = [length(function) for function in functions]
    docstrings = [text for tree in trees.values() for text in docstrings_of(tree)]
    by_folder: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for path, count in lines.items():
        parts = path.relative_to(package).parts
        folder = parts[0] if len(parts) > 1 else "."
        by_folder[folder] += count
        modules[folder] += 1
    importers = importers_of(package, trees)
    crumbs = [path for path, by in importers.items() if len(by) == 1 and lines[path] < 70]
    return {
        "modules": len(files),
        "lines": sum(lines.values()),
        "median_module": statistics.median(lines.values()),
        "over_400": [str(path.relative_to(package)) for path, count in lines.items() if count > 400],
        "functions": len(functions),
        "median_function": statistics.median(lengths),
        "functions_over_50": sum(count > 50 for count in lengths),
        "classes": sum(isinstance(node, ast.ClassDef) for tree in trees.values() for node in ast.walk(tree)),
        "lambdas": sum(isinstance(node, ast.Lambda) for tree in trees.values() for node in ast.walk(tree)),
        "docstrings": len(docstrings),
        "one_importer": sum(len(by) == 1 for by in importers.values()),
        "one_importer_under_70": len(crumbs),
        "folders": {name: [modules[name], by_folder[name]] for name in sorted(by_folder)},
    }


def functions_of(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def docstrings_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def importers_of(package: Path, trees: dict[Path, ast.Module]) -> dict[Path, set[Path]]:
    """Who imports each module; a package's `__init__` counts as itself."""
    by_name = {module_name(package, path): path for path in trees}
    importers: dict[Path, set[Path]] = defaultdict(set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
            for name in names:
                target = by_name.get(name)
                if target is not None and target != path:
                    importers[target].add(path)
                    break
    return importers


def module_name(package: Path, path: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def trace(tree: Path) -> dict[str, Any]:
    """The demo's four steps, with a profile function that every Python process loads as it starts."""
    with tempfile.TemporaryDirectory() as folder:
        site, found = Path(folder) / "site", Path(folder) / "found"
        site.mkdir()
        found.mkdir()
        (site / "sitecustomize.py").write_text(PROFILE)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(site), str(tree))),
            "MEASURE_FOLDER": str(found),
            "MEASURE_ROOT": str(tree / "penstock") + os.sep,
            "MEASURE_NOT_OF_GROUPS": ",".join(NOT_OF_GROUPS),
            "MEASURE_COUNTS": f"{STEPS},{STEPS * GROUPS_PER_STEP}",
            "MEASURE_LANDMARKS": ",".join(name for names in LANDMARKS.values() for name in names),
        }
        command = ("-c", "from penstock.cli import main; main()", "train", f"run.steps={STEPS}")
        subprocess.run(
            [sys.executable, *command, "observe.view=plain"],
            cwd=folder,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return joined(list(found.iterdir()))


def joined(files: list[Path]) -> dict[str, Any]:
    """What the processes wrote, as one."""
    called: set[str] = set()
    per_group: set[str] = set()
    hops: set[str] = set()
    for path in files:
        rows = [line.split(" ", 1) for line in path.read_text().splitlines()]
        counts = Counter[str]()
        for count, name in (rest.split(" ", 1) for kind, rest in rows if kind == "count"):
            counts[name] = max(counts[name], int(count))
        called |= {rest for kind, rest in rows if kind == "called"}
        is_trainer = any(name.endswith(":PolicyTrainer.step") for name in counts)
        least = STEPS if is_trainer else STEPS * GROUPS_PER_STEP
        per_group |= {name for name, count in counts.items() if count >= least}
        hops |= {rest for kind, rest in rows if kind == "hop" and counts[rest] >= STEPS}
    return {
        "processes": len(files),
        "functions": len(called),
        "modules": len({name.split(":")[0] for name in called}),
        "functions_per_group": len(per_group),
        "modules_per_group": len({name.split(":")[0] for name in per_group}),
        "hops": len(hops),
        "modules_of_hops": len({name.split(":")[0] for name in hops}),
        "hops_by_name": sorted(hops),
    }


if __name__ == "__main__":
    main()
