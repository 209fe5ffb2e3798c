"""Python files that are in no package, as modules."""

import importlib.util
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).parents[2] / "tools"


def load_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
