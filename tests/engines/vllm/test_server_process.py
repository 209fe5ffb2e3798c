import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.engines.vllm.server_client import ServerClient
from penstock.engines.vllm.server_process import (
    MARK,
    ServerProcess,
    ServerSettings,
    end_leftovers,
    lora_room,
    marked,
)
from penstock.errors import UserError

pytestmark = pytest.mark.processes

SERVER = """#!{python}
import http.server, os, socketserver, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{{}}")
    def address_string(self): return ""
    def log_message(self, *words): pass
path = sys.argv[sys.argv.index("--uds") + 1]
socketserver.UnixStreamServer(path, Handler).serve_forever()
"""


def program(folder: Path, text: str) -> str:
    path = folder / "vllm"
    path.write_text(text.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


def settings(command: str, **options: object) -> ServerSettings:
    return ServerSettings(model="m", command=command, max_context=64, **options)  # type: ignore[arg-type]


def test_it_starts_answers_and_ends(tmp_path: Path) -> None:
    async def main() -> None:
        process = ServerProcess("engine0", settings(program(tmp_path, SERVER)), folder=str(tmp_path))
        await process.start()
        first = process.url
        async with ServerClient("engine0", process.url) as client:
            assert await client.get("/weight_info") == {}
        assert process.pid is not None
        os.kill(process.pid, 9)
        assert str(await process.died()) == "engine0: its vLLM server ended (killed by SIGKILL)"
        await process.start()
        assert process.url != first
        pid = process.pid
        await process.stop()
        await process.stop()
        process.remove()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(main())


def test_a_server_that_ends_before_it_answers_is_one_sentence(tmp_path: Path) -> None:
    process = ServerProcess(
        "engine0", settings(program(tmp_path, "#!{python}\nraise SystemExit(3)\n")), folder=str(tmp_path)
    )
    with pytest.raises(UserError, match="`vllm serve` ended with exit code 3 before it answered"):
        asyncio.run(process.start())


def test_a_vllm_that_is_too_old_is_named(tmp_path: Path) -> None:
    """One that does not know our flags ends with what argparse says."""
    text = "#!{python}\nimport sys\nprint('0.25.1') if '--version' in sys.argv else sys.exit(2)\n"
    process = ServerProcess("engine0", settings(program(tmp_path, text)), folder=str(tmp_path))
    with pytest.raises(UserError, match="starts vLLM 0.25.1, which is too old; update it to 0.32 or newer"):
        asyncio.run(process.start())


def test_a_program_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    process = ServerProcess("engine0", settings("/nowhere/vllm"), folder=str(tmp_path))
    with pytest.raises(
        UserError, match="engine.vllm.command must be a program that starts vLLM, got '/nowhere"
    ):
        asyncio.run(process.start())


def test_a_server_that_never_answers_is_ended(tmp_path: Path) -> None:
    command = program(tmp_path, "#!{python}\nimport time\ntime.sleep(100)\n")
    process = ServerProcess("engine0", settings(command, start_timeout_s=0.5), folder=str(tmp_path))
    with pytest.raises(UserError, match="did not answer within engine.vllm.start_timeout_s=0.5 s"):
        asyncio.run(process.start())
    assert process.pid is None
    assert not list(tmp_path.glob("penstock-vllm-*"))


def test_what_a_server_on_a_cpu_is_started_with() -> None:
    words = settings("vllm", adapter_rank=5, arguments=("--seed", "3")).argv(Path("/s"))
    line = " ".join(words)
    assert line.startswith("vllm serve m --uds /s --dtype float32 --max-model-len 64 --max-num-seqs 64")
    for part in (
        "--enforce-eager",
        "--enable-scale-out",
        "--logprobs-mode processed_logprobs",
        "--max-lora-rank 8",
    ):
        assert part in line
    assert words[-2:] == ["--seed", "3"]
    assert settings("vllm", cache_gb=2.4).environment()["VLLM_CPU_KVCACHE_SPACE"] == "2"


def test_what_a_server_on_a_gpu_is_started_with() -> None:
    line = " ".join(settings("vllm", device="cuda:0", memory_share=0.5, tensor_parallel=2).argv(Path("/s")))
    assert "--gpu-memory-utilization 0.5 --tensor-parallel-size 2" in line
    assert "--enforce-eager" not in line
    assert "--enable-return-routed-experts" not in line


def test_a_server_tells_experts_where_they_are_recorded_and_only_on_a_gpu(tmp_path: Path) -> None:
    wanted = settings("vllm", device="cuda:0", returns_experts=True)
    assert "--enable-return-routed-experts" in wanted.argv(Path("/s"))
    with pytest.raises(UserError, match="engine.record_routing=on with engine.kind=vllm needs a GPU"):
        ServerProcess("engine0", settings("vllm", returns_experts=True), folder=str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (16, 16), (17, 32)])
def test_room_for_a_rank(rank: int, room: int) -> None:
    assert lora_room(rank) == room


def test_a_rank_that_vllm_has_no_room_for_is_refused() -> None:
    with pytest.raises(UserError, match="at most 512 with engine.kind=vllm, got 600"):
        lora_room(600)


def test_processes_with_the_mark_are_found_and_ended() -> None:
    command = [sys.executable, "-c", "print(flush=True); import time; time.sleep(100)"]
    environ = {"PATH": "/usr/bin"}
    children = [
        subprocess.Popen(command, env={**environ, MARK: mark}, stdout=subprocess.PIPE)
        for mark in ("this one", "another")
    ]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()  # it runs, with its own environment
        assert marked("this one") == [children[0].pid]
        assert end_leftovers("this one") == 1
        assert children[0].wait() == -9
        assert children[1].poll() is None
        assert end_leftovers("this one") == 0
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_what_can_not_be_read_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "12").mkdir()
    assert marked("x", tmp_path) == []
