"""An engine's side in a process of its own: takes updates line by line, and dies in the middle of one if it is told to.

{"update": …, "dies": false}  ─►  {"version": 3, "sums": {…}}  or  {"error": "UpdateAbandoned", "took_s": 0.2, …}
"""

import json
import os
import sys
import time
from typing import Any

import msgspec
import torch

from penstock.errors import PenstockError
from penstock.records import WeightUpdate
from penstock.sync.bucket_receiver import StagingReceiver
from penstock.sync.fingerprint import fingerprints
from penstock.sync.transports import AnyReceiver, Rendezvous


class Mortal(AnyReceiver):
    """Dies while it fetches its second bucket; where nothing is fetched, before it loads."""

    def stage(self, update: WeightUpdate) -> Any:
        receiver = self._of(update)
        if isinstance(receiver, StagingReceiver):
            fetch = receiver._fetch

            def fetch_one(update: WeightUpdate, number: int, cancelled: Any) -> Any:
                return os._exit(9) if number == 1 else fetch(update, number, cancelled)

            receiver._fetch = fetch_one  # type: ignore[method-assign]
        super().stage(update)
        os._exit(9)


def main(device: str, token: str) -> None:
    at = Rendezvous(device=device, token=token)
    receiver, mortal = AnyReceiver(at), Mortal(at)
    live: dict[str, torch.Tensor] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        update = msgspec.convert(asked["update"], WeightUpdate)
        for spec in update.tensors:
            if spec.name not in live:
                live[spec.name] = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        started = time.monotonic()
        try:
            staged = (mortal if asked["dies"] else receiver).stage(update)
            receiver.load(staged, live)()
            receiver.drop(staged)
            answer = {"version": update.version}
        except PenstockError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        answer |= {"took_s": time.monotonic() - started, "sums": fingerprints(live)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
