"""Fetch what the chat loop of `verifiers` installs at its first episode, so that it can do so without a network.

    python tools/verifiers_wheels.py FOLDER          with the Python that has verifiers

The chat loop is a script that names its packages in its head (PEP 723); `uv` installs them when it first starts.
The folder becomes a package index (PEP 503): with `UV_DEFAULT_INDEX=file://FOLDER` they come from there."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE


def wanted() -> list[str]:
    """The packages that the chat loop names."""
    lines = CHAT_PROGRAM_SOURCE.splitlines()
    begin = lines.index("# /// script")
    head = lines[begin + 1 : lines.index("# ///", begin)]
    return list(tomllib.loads("\n".join(line.removeprefix("# ") for line in head))["dependencies"])


def make_index(folder: Path) -> None:
    """Every wheel into the folder of its package, beside a page that names it."""
    for wheel in folder.glob("*.whl"):
        place = folder / re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()
        place.mkdir(exist_ok=True)
        wheel.rename(place / wheel.name)
        (place / "index.html").write_text(f'<!DOCTYPE html><a href="{wheel.name}">{wheel.name}</a>')


folder = Path(sys.argv[1])
pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
subprocess.run([*pip, "download", "--only-binary=:all:", "--dest", str(folder), *wanted()], check=True)
make_index(folder)
