"""Runs the engine of `penstock bench sync` in the trainer's own process, for transports that need that. It serves
in a thread with an event loop of its own, and takes the same commands as the engine in another process."""

import asyncio
import queue
import sys
import threading
from typing import Any

import torch

from penstock.bench.child import ANSWER_S, END_S, ChildDied
from penstock.bench.sync.serving_process import Serving, serve
from penstock.sync.transports import AnyReceiver, Rendezvous


class EngineBeside:
    """Starts with the first command, so that it does not disturb measurements of other engines before."""

    def __init__(self, serving: Serving, exchange: dict[str, torch.Tensor]) -> None:
        """Set up the engine, which takes buckets from `exchange`."""
        self._serving = serving
        self._receiver = AnyReceiver(Rendezvous(device=serving.device, exchange=exchange))
        self._answers: queue.Queue[dict[str, Any] | BaseException] = queue.Queue()
        self._lines: asyncio.Queue[bytes] = asyncio.Queue()
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None

    def tell(self, line: bytes) -> None:
        if self._thread is None:
            self._switches_s = sys.getswitchinterval()
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()
        self._loop.call_soon_threadsafe(self._lines.put_nowait, line + b"\n")

    def read(self) -> dict[str, Any]:
        try:
            answer = self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            raise ChildDied(f"the engine did not answer within {ANSWER_S:.0f} s") from None
        if isinstance(answer, BaseException):
            raise ChildDied(f"the engine ended: {answer!r}") from answer
        return answer

    def ask(self, line: bytes) -> dict[str, Any]:
        self.tell(line)
        return self.read()

    def close(self) -> None:
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._lines.put_nowait, b"")
            self._thread.join(timeout=END_S)
            sys.setswitchinterval(self._switches_s)
            self._thread = None
        if not self._loop.is_running():
            self._loop.close()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(
                serve(self._serving, self._receiver, self._lines.get, self._answers.put)
            )
        except BaseException as error:
            self._answers.put(error)
