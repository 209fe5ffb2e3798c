"""A plugin's modules are imported as `engine.kind` does it: its folder is on the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "plugins" / "sglang"))
