"""A rank's side in a process of its own: publishes its rows of the weights that a number makes, line by line.

3  ─►  the update of version 3, as JSON
"""

import sys
from pathlib import Path

import msgspec

from penstock.sync.bucket_layout import Slice
from penstock.sync.slot_publisher import Publishing
from penstock.sync.transports import Rendezvous, make_publisher
from tests.sync.contract import Tensors, make_tensors, publish


def rows_of(whole: Tensors, rank: int) -> Tensors:
    """Half of the embedding; the rest is the first rank's."""
    mine = {"embed": whole["embed"][8 * rank : 8 * rank + 8]}
    return mine if rank else mine | {name: each for name, each in whole.items() if name != "embed"}


def main(transport: str, device: str, rank: int, folder: Path) -> None:
    publishing = Publishing(slices={"embed": Slice((16, 8), (8 * rank, 0))})
    mine = rows_of(make_tensors(0, device), rank)
    publisher = make_publisher(transport, mine, publishing, Rendezvous(folder, token="secret", device=device))
    for line in sys.stdin:
        version = int(line)
        if version > 1:
            publisher.release(version - 1)  # the engine has it
        update = publish(publisher, version, rows_of(make_tensors(version, device), rank))
        print(msgspec.json.encode(update).decode(), flush=True)
    publisher.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
