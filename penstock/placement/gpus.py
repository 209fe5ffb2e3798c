"""Lists the GPUs of this machine with `nvidia-smi`, so that the controller needs no torch and makes no CUDA
context beside those of the workers."""

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

COMMAND = "nvidia-smi"
QUERY = ("--query-gpu=index,uuid,memory.total,memory.free,compute_cap,name", "--format=csv,noheader,nounits")
DEVICE_FILES = ("nvidia[0-9]*", "nvidia-caps", "kfd", "dxg", "nvhost-*")
"""Device files that show a GPU: NVIDIA, AMD, WSL, and Jetson."""
MIB = 1 << 20
WITH_BFLOAT16 = 8.0
"""The first compute capability whose matmuls take bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Describes one GPU, and its memory before the run has taken any."""

    name: str
    total_bytes: int
    free_bytes: int
    has_bfloat16: bool = True
    """Whether it multiplies bfloat16 matrices in hardware; older GPUs emulate that, slowly."""


def find_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that workers will see, in their order; none without a working `nvidia-smi` or with a torch
    built without CUDA."""
    command = shutil.which(COMMAND, path=environ.get("PATH"))
    if command is None or "+cpu" in importlib.metadata.version("torch"):
        return ()
    try:
        listing = subprocess.run(
            [command, *QUERY], capture_output=True, text=True, timeout=30, check=True, env=dict(environ)
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(listing, environ.get("CUDA_VISIBLE_DEVICES"))


def why_missing(device: str, gpus: Sequence[Gpu], *, devices: Path = Path("/dev")) -> str | None:
    """Return why a worker on this machine can't compute on `device`, as far as that is known without torch.

    Containers may have GPUs but not the tool that lists them; then the worker finds out.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return None
    if gpus:
        if not number.isdigit() or int(number) < len(gpus):
            return None
        seen = "1 GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
        return (
            f"needs more than the {seen} that this machine shows, numbered from 0; use cuda:{len(gpus) - 1}"
        )
    version, can_use = _torch_build()
    if not can_use:
        return f"needs torch with CUDA, and torch {version} is built for the CPU alone; install another, or use cpu"
    if not any(next(devices.glob(name), None) for name in DEVICE_FILES):
        return "needs a GPU, and this machine has none; use cpu"
    return None


def _torch_build() -> tuple[str, bool]:
    """Return torch's version and whether it was built for GPUs, from a small file, since importing torch takes
    seconds."""
    version = importlib.metadata.version("torch")
    spec = importlib.util.find_spec("torch")
    try:
        built = (Path(spec.origin).parent / "version.py").read_text() if spec and spec.origin else ""
    except OSError:
        built = ""
    is_for_cpu = "+cpu" in version or (built and not re.search(r"^(cuda|hip)\b.*= ?'", built, re.MULTILINE))
    return version, not is_for_cpu


def parse_gpus(listing: str, visible: str | None) -> tuple[Gpu, ...]:
    """Parse the tool's lines. As CUDA does, `visible` is followed up to its first unknown entry."""
    known: list[tuple[str, str, Gpu]] = []
    for line in listing.splitlines():
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
    """Return whether a compute capability such as 8.6 has bfloat16. An unknown one counts as recent."""
    try:
        return float(capability) >= WITH_BFLOAT16
    except ValueError:
        return True


def _is(wanted: str, index: str, uuid: str) -> bool:
    return wanted == index or (wanted.startswith("GPU-") and uuid.startswith(wanted))
