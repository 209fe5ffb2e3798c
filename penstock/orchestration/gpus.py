"""The GPUs of this machine as `nvidia-smi` lists them. So the controller needs no torch, and makes no CUDA context
beside the workers'."""

import importlib.metadata
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

COMMAND = "nvidia-smi"
QUERY = ("--query-gpu=index,uuid,memory.total,memory.free,compute_cap,name", "--format=csv,noheader,nounits")
MIB = 1 << 20
WITH_BFLOAT16 = 8.0
"""The first compute capability whose matmuls take bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU and its memory before the run has taken any."""

    name: str
    total_bytes: int
    free_bytes: int
    has_bfloat16: bool = True
    """Whether it multiplies bfloat16 matrices itself; older ones emulate that, slowly."""


def find_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that workers will see, in their order; none where torch was built without CUDA."""
    command = shutil.which(COMMAND, path=environ.get("PATH"))
    if command is None or "+cpu" in importlib.metadata.version("torch"):
        return ()
    try:
        told = subprocess.run(
            [command, *QUERY], capture_output=True, text=True, timeout=30, check=True, env=dict(environ)
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(told, environ.get("CUDA_VISIBLE_DEVICES"))


def parse_gpus(told: str, visible: str | None) -> tuple[Gpu, ...]:
    """GPUs from the tool's lines. As CUDA does, `visible` is followed up to its first unknown entry."""
    known: list[tuple[str, str, Gpu]] = []
    for line in told.splitlines():
        words = [word.strip() for word in line.split(",", 5)]
        if len(words) == 6 and words[2].isdigit() and words[3].isdigit():
            index, uuid, total, free, capability, name = words
            gpu = Gpu(
                name=name,
                total_bytes=int(total) * MIB,
                free_bytes=int(free) * MIB,
                has_bfloat16=_has_bfloat16(capability),
            )
            known.append((index, uuid, gpu))
    if visible is None:
        return tuple(gpu for _, _, gpu in known)
    chosen: list[Gpu] = []
    for wanted in visible.split(","):
        found = [gpu for index, uuid, gpu in known if _is(wanted.strip(), index, uuid)]
        if not found:
            break
        chosen.append(found[0])
    return tuple(chosen)


def _has_bfloat16(capability: str) -> bool:
    """From a number such as 8.6; a GPU that does not tell is taken for a recent one."""
    try:
        return float(capability) >= WITH_BFLOAT16
    except ValueError:
        return True


def _is(wanted: str, index: str, uuid: str) -> bool:
    return wanted == index or (wanted.startswith("GPU-") and uuid.startswith(wanted))
