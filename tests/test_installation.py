"""What `pip install` may take is what was tested."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ALLOWED = {
    requirement.name: requirement
    for text in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["gpu"])
    for requirement in (Requirement(text),)
}
TESTED = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if "==" in line and not line.startswith("#")
]


@pytest.mark.parametrize("pin", [pin for pin in TESTED if pin.name in ALLOWED], ids=str)
def test_the_tested_version_is_allowed(pin: Requirement) -> None:
    (version,) = (specifier.version for specifier in pin.specifier)
    assert version in ALLOWED[pin.name].specifier


@pytest.mark.parametrize(("name", "version"), [("torch", "2.10.0"), ("torch", "2.14.0"), ("triton", "3.9.0")])
def test_what_was_not_tested_or_is_known_to_be_bad_is_not_taken(name: str, version: str) -> None:
    assert version not in ALLOWED[name].specifier


def test_every_file_of_the_package_is_shipped() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "penstock"
    ]
    matched = {pattern: set((ROOT / "penstock").glob(pattern)) for pattern in patterns}
    assert all(matched.values()), "a pattern of package-data names nothing"
    files = {
        path for path in (ROOT / "penstock").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert {path for path in files if path.suffix != ".py"} <= set().union(*matched.values())
