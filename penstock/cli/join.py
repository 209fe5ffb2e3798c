"""`penstock worker`: this machine joins a run that listens elsewhere."""

import asyncio
from pathlib import Path

from penstock.channel.address import host_and_port
from penstock.orchestration.launchers.joining import token_in
from penstock.orchestration.launchers.node_calls import VOLUNTEER
from penstock.worker.node_agent import attend


def join_run(address: str, token_file: Path) -> int:
    """Serve until the run ends; the exit code."""
    host, port = host_and_port(address, "--connect")
    token = token_in(token_file, "--token-file")
    print(f"joining the run at {address}", flush=True)
    return asyncio.run(attend(f"tcp:{host}:{port}", VOLUNTEER, token))
