"""An engine of `python -m benchmarks scale`, as far as its weights go.

`python -m benchmarks.scale.reading_engine SIZE`. Each line is an update; the answer is how long it took to
load, its fingerprint checked, and how much of that on a core.
"""

import json
import sys
import time

import msgspec
import torch

from benchmarks.scale.scale_model import make_model
from penstock.models.published import published_tensors
from penstock.records import WeightUpdate
from penstock.sync.shared_memory import SharedMemoryReceiver
from penstock.worker.quiet import quieten


def main() -> None:
    quieten()
    torch.set_num_threads(1)
    receiver = SharedMemoryReceiver()
    tensors = {name: tensor.detach() for name, tensor in published_tensors(make_model(sys.argv[1])).items()}
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        update = msgspec.json.decode(line, type=WeightUpdate)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        staged = receiver.stage(update)
        receiver.load(staged, tensors)()
        receiver.drop(staged)
        took = {"seconds": time.perf_counter() - begin, "cpu_s": time.process_time() - begin_cpu}
        print(json.dumps(took), flush=True)


if __name__ == "__main__":
    main()
