from pathlib import Path
from typing import Any


def ensure_builtin_model(cache: Path, *, log: Any, threads: int = 2) -> Path:
    raise NotImplementedError
