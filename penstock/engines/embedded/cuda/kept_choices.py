"""Choices of earlier starts, in a file beside torch's compiled code: a second start need not try everything again.

They count for the same kind of GPU, libraries and code only, and each is used only after it has given the same
numbers as torch once more. Where torch's caches are switched off nothing is kept; deleting the file has everything
tried again.
"""

import hashlib
import json
import logging
import os
from pathlib import Path

import torch

log = logging.getLogger(__name__)

FILE = "penstock-products.json"


class KeptChoices:
    """Algorithms by a key, as the library writes them; None where torch's own was the best."""

    def __init__(self, path: Path | None, setting: str) -> None:
        """`setting` is all that choices depend on beside their keys; without a path nothing is kept."""
        self._path = path
        self._setting = setting
        self._news: dict[str, str | None] = {}
        self._found = _read(path).get(setting, {})

    def __contains__(self, key: str) -> bool:
        return key in self._found

    def __getitem__(self, key: str) -> bytes | None:
        written = self._found[key]
        return None if written is None else bytes.fromhex(written)

    def __setitem__(self, key: str, algorithm: bytes | None) -> None:
        self._found[key] = self._news[key] = None if algorithm is None else algorithm.hex()

    def save(self) -> None:
        """Others may have written meanwhile: only what is new is added to what they left."""
        if self._path is None or not self._news:
            return
        content = _read(self._path)
        content[self._setting] = {**content.get(self._setting, {}), **self._news}
        mine = self._path.with_name(f"{FILE}.{os.getpid()}")
        try:
            mine.write_text(json.dumps(content, indent=1))
            os.replace(mine, self._path)
        except OSError as error:
            log.info("choices of products are not kept: %s", error)
        self._news = {}


def keep_choices(device: torch.device, library_version: int, files: tuple[str, ...]) -> KeptChoices:
    """Those of a device, this version of the library, and what `files` of code say."""
    code = hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()
    name = torch.cuda.get_device_name(device)
    setting = f"{name}, cuBLASLt {library_version}, torch {torch.__version__}, code {code[:16]}"
    return KeptChoices(_path(), setting)


def _path() -> Path | None:
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        return None if config.force_disable_caches else Path(cache_dir()) / FILE
    except OSError as error:
        log.info("choices of products are not kept: %s", error)
        return None


def _read(path: Path | None) -> dict[str, dict[str, str | None]]:
    """By setting and key; nothing where there is no file, or not one of ours."""
    try:
        content = json.loads(path.read_text()) if path is not None else {}
        for choices in content.values():
            for written in choices.values():
                bytes.fromhex(written or "")
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return dict(content)
