"""Starts one `vllm serve`, waits until it answers, and ends it."""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path

from penstock.engines.vllm.server_check import NEEDED, too_old
from penstock.engines.vllm.server_client import ServerClient
from penstock.errors import EngineLost, UserError

LOOK_S = 0.25
"""How often a starting server is asked whether it is healthy."""
END_S = 10.0
"""How long a server may take to end before it is killed."""
EXTENSION = "penstock.vllm_plugin.worker_extension.PenstockWorker"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Holds the settings that a server is started with."""

    model: str
    command: str = "vllm"
    device: str = "cpu"
    dtype: str = "float32"
    max_context: int
    max_batch: int = 64
    threads: int = 1
    cache_gb: float = 0.0
    memory_share: float = 0.9
    tensor_parallel: int = 1
    trust_remote_code: bool = False
    adapter_rank: int = 0
    """Rank of the adapters that it serves; 0 for none."""
    returns_experts: bool = False
    """Whether its answers include the experts of a mixture-of-experts model."""
    arguments: tuple[str, ...] = ()
    start_timeout_s: float = 600.0

    def check(self) -> None:
        """Raise `UserError` if no server can be started with these settings."""
        if self.returns_experts and self.is_cpu:
            raise UserError(
                "engine.record_routing=on with engine.kind=vllm needs a GPU: on a CPU vLLM does not return the "
                "experts that it chooses; use engine.kind=embedded, or engine.record_routing=off to train without"
            )

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    def argv(self, socket: Path) -> list[str]:
        """Return the command line, with which the server ignores the model folder's sampling settings."""
        more: list[str] = []
        if self.is_cpu:
            more += ["--enforce-eager"]
        else:
            more += ["--gpu-memory-utilization", f"{self.memory_share:g}"]
            more += ["--tensor-parallel-size", str(self.tensor_parallel)]
        if self.adapter_rank:
            more += [
                "--enable-lora",
                "--max-loras",
                "2",
                "--max-lora-rank",
                str(lora_room(self.adapter_rank)),
            ]
        if self.returns_experts:
            more += ["--enable-return-routed-experts"]
        if self.trust_remote_code:
            more += ["--trust-remote-code"]
        return [
            *(self.command, "serve", self.model, "--uds", str(socket)),
            *("--dtype", self.dtype, "--max-model-len", str(self.max_context)),
            *("--max-num-seqs", str(self.max_batch), "--generation-config", "vllm"),
            *("--scheduling-policy", "priority", "--enable-scale-out"),
            *("--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log"),
            *(
                "--weight-transfer-config",
                '{"backend": "penstock"}',
                "--worker-extension-cls",
                EXTENSION,
            ),
            *more,
            *self.arguments,
        ]

    def environment(self) -> dict[str, str]:
        """Return the variables that are set in addition to the inherited ones."""
        own = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "OMP_NUM_THREADS": str(self.threads),
        }
        if Path(self.model).is_dir():
            own["HF_HUB_OFFLINE"] = "1"
        if self.is_cpu:
            own["VLLM_CPU_KVCACHE_SPACE"] = f"{max(1, round(self.cache_gb))}"
            own["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        return own


def lora_room(rank: int) -> int:
    """Return the smallest maximum rank that vLLM supports and that holds this rank."""
    for room in (1, 8, 16, 32, 64, 128, 256, 320, 512):
        if rank <= room:
            return room
    raise UserError(f"model.lora.rank must be at most 512 with engine.kind=vllm, got {rank}")


class ServerProcess:
    """Runs one server of our own. It listens on a socket in a private folder, so no other user reaches it."""

    def __init__(self, name: str, settings: ServerSettings, *, folder: str = "") -> None:
        """`folder` is where the server's private folder is made; "" is the system's folder for temporary files."""
        settings.check()
        self.name = name
        self.settings = settings
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-vllm-", dir=folder or None))
        self._process: asyncio.subprocess.Process | None = None
        self._starts = 0
        self._mark = secrets.token_hex(8)

    @property
    def url(self) -> str:
        return f"unix:{self._socket}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def _socket(self) -> Path:
        return self._folder / f"server{self._starts}"

    async def start(self) -> None:
        """Start the server and wait until it answers. Raise `UserError` if it ends instead or takes too long."""
        settings = self.settings
        if shutil.which(settings.command) is None:
            raise UserError(
                f"engine.vllm.command must be a program that starts vLLM, got {settings.command!r}, which is not "
                "there; install vLLM (docs/engines.md), or name its bin/vllm"
            )
        self._starts += 1
        self._folder.mkdir(exist_ok=True)
        self._process = await asyncio.create_subprocess_exec(
            *settings.argv(self._socket),
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, **settings.environment(), MARK: self._mark},
        )
        try:
            await self._until_ready(self._process)
        except BaseException:
            await self.stop()
            self.remove()
            raise

    async def died(self) -> EngineLost:
        """Wait for the process to end, and return the error to raise."""
        assert self._process is not None
        code = await self._process.wait()
        end_leftovers(self._mark)
        return EngineLost(f"{self.name}: its vLLM server ended{_how(code)}")

    async def stop(self) -> None:
        """End the server with everything that it started. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        end_leftovers(self._mark)

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _until_ready(self, process: asyncio.subprocess.Process) -> None:
        limit = self.settings.start_timeout_s
        ending = asyncio.ensure_future(process.wait())
        try:
            async with asyncio.timeout(limit), ServerClient(self.name, self.url) as client:
                while not await _is_healthy(client):
                    await asyncio.wait({ending}, timeout=LOOK_S)  # a server sends no signal when ready
                    if ending.done():
                        raise await self._ended_early(ending.result())
        except TimeoutError as error:
            raise UserError(
                f"{self.name}: vLLM did not answer within engine.vllm.start_timeout_s={limit:g} s; its own words "
                "are in the engine's log"
            ) from error
        finally:
            ending.cancel()

    async def _ended_early(self, code: int) -> UserError:
        old = await too_old(self.settings.command)
        if old:
            return UserError(
                f"{self.name}: engine.vllm.command starts vLLM {old}, which is too old; update it to {NEEDED} or "
                "newer"
            )
        return UserError(
            f"{self.name}: `vllm serve` ended{_how(code)} before it answered; its output is in the engine's log"
        )


async def _is_healthy(client: ServerClient) -> bool:
    try:
        return await client.status("GET", "/health") == 200
    except EngineLost:
        return False


def _how(code: int) -> str:
    return f" (killed by {signal.Signals(-code).name})" if code < 0 else f" with exit code {code}"


MARK = "PENSTOCK_SERVER"
"""The environment variable that holds a server's mark. vLLM's engine and its workers are separate processes; when
their server is killed, they continue and keep its memory. They inherit the mark, by which they are found."""


def marked(mark: str, processes: Path = Path("/proc")) -> list[int]:
    """Return the processes with this mark, except this one. Without `/proc` the list is empty."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in processes.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if wanted in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return sorted(found)


def end_leftovers(mark: str) -> int:
    """Kill all processes with this mark, and return how many there were."""
    found = marked(mark)
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return len(found)
