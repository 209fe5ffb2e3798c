"""Which vLLM a program starts: asked when a server has ended before it answered, since one that is too old does not
know our flags."""

import asyncio
import contextlib
import re

NEEDED = "0.32"
"""The first vLLM with every route and flag that the engine uses."""
ASK_S = 120.0
"""`vllm --version` loads all of vLLM."""


async def too_old(command: str) -> str:
    """The version that `command` starts, where that is too old; else, and where it does not say, ""."""
    process = await asyncio.create_subprocess_exec(
        command,
        "--version",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), ASK_S)
    except TimeoutError:
        return ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    found = re.search(r"\d+\.\d+(\.\d+)?", said.decode(errors="replace"))
    return found.group() if found is not None and _numbers(found.group()) < _numbers(NEEDED) else ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
