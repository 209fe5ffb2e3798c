"""`config.yaml` of a run folder: the run's config with secrets hidden, and a last line that tells whether it is
whole. An empty file, or half of one, would be a config with default settings."""

import zlib
from pathlib import Path
from typing import Any

import yaml

from penstock.config.secrets import hidden
from penstock.errors import UserError
from penstock.orchestration.config import PenstockConfig
from penstock.safe_files import write_private

FILE = "config.yaml"
LAST_LINE = "# checksum: "


def write_config(run: Path, config: PenstockConfig) -> None:
    text = to_yaml(config)
    write_private(run / FILE, f"{text}{last_line(text)}\n")


def to_yaml(config: PenstockConfig) -> str:
    """With secrets hidden: a run folder is what people show each other."""
    return yaml.safe_dump(shown(config), sort_keys=False, allow_unicode=True)


def shown(config: PenstockConfig) -> dict[str, Any]:
    """The config's sections with secrets hidden. Keys of `algorithm` and `launcher.resources` are names of
    functions, settings and resources: a `truncated_token` is none to hide."""
    sections = config.model_dump(mode="json")
    resources = sections["launcher"].pop("resources")
    found = {name: hidden(section, only_texts=name == "algorithm") for name, section in sections.items()}
    found["launcher"]["resources"] = hidden(resources, only_texts=True)
    return found


def last_line(text: str) -> str:
    """Of a file with this text before it. How an editor ends lines does not count."""
    lines = [line.rstrip() for line in text.strip().splitlines()]
    return f"{LAST_LINE}{zlib.crc32(chr(10).join(lines).encode()):08x}"


def check_config(run: Path) -> None:
    """Refuse a file that is not as Penstock wrote it, unless somebody has written its last line anew."""
    path = run / FILE
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}; restore it from a copy") from error
    body, found, last = text.rpartition(LAST_LINE)
    body = body if found else text
    if not body.strip():
        raise UserError(
            f"{path} is empty, which would be a run with default settings; restore it from a copy"
        )
    wanted = last_line(body)
    if found + last.strip() != wanted:
        raise UserError(
            f"{path} is not as Penstock wrote it: it is damaged or was edited. Restore it, and give changes on the "
            f"command line (penstock resume {run} run.steps=500); if the file is right as it is, let its last line "
            f"be: {wanted}"
        )
