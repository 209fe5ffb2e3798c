"""`penstock worker`: this machine joins a run that listens elsewhere."""

import asyncio
from pathlib import Path

from penstock.channel.address import host_and_port
from penstock.errors import UserError
from penstock.orchestration.launchers.config import is_loopback
from penstock.orchestration.launchers.launcher_choice import token_in
from penstock.orchestration.launchers.node_calls import VOLUNTEER
from penstock.worker.node_agent import attend


def join_run(address: str, token_file: Path | None) -> int:
    """Serve until the run ends; the exit code."""
    host, port = host_and_port(address, "--connect")
    if token_file is None and not is_loopback(host):
        raise UserError(
            f"--token-file must name a file with the run's token when the run is not on this machine, got none for "
            f"{address}; the run was started with launcher.token_file"
        )
    token = "" if token_file is None else token_in(token_file, "--token-file")
    print(f"joining the run at {address}", flush=True)
    return asyncio.run(attend(f"tcp:{host}:{port}", VOLUNTEER, token))
