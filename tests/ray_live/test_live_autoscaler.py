"""Ray's own autoscaler, with nodes that are processes: a run makes it add nodes, and gives them back."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.cluster.autoscaled import autoscaled_cluster
from benchmarks.cluster.clustered_run import ClusteredRun
from benchmarks.cluster.namespaced_nodes import NamespacedCluster
from penstock.cli.scale import scale_run
from tests.ray_live.conftest import ENGINE, HEAD, HERE

COUNT = """
import json, ray
ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
print(json.dumps(sum(node["Alive"] and "engine" in node["Resources"] for node in ray.nodes())))
"""


def num_engine_nodes(cluster: NamespacedCluster) -> int:
    words = cluster.command(sys.executable, "-c", COUNT)
    done = subprocess.run(words, env=cluster.environment, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.timeout(400)
def test_the_autoscaler_adds_a_node_for_each_engine_and_takes_it_back(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if not request.config.getoption("--ray"):
        pytest.skip("needs --ray (make live-ray)")
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    with autoscaled_cluster(
        tmp_path, head=HEAD, worker=ENGINE, max_workers=2, idle_s=6.0, environment=environment
    ) as cluster:
        assert num_engine_nodes(cluster) == 0
        settings = ("engine.count={min: 1, max: 2}", "run.steps=4000")
        with ClusteredRun(cluster, tmp_path, *settings) as run:
            run.wait_for_step(1, patience_s=200)
            scale_run(str(run.folder), "engines=2")
            run.wait_for("engine1 joins after")
            assert num_engine_nodes(cluster) == 2
            scale_run(str(run.folder), "engines=1")
            run.wait_for("engine1 leaves")
            deadline = time.monotonic() + 60
            while num_engine_nodes(cluster) > 1:
                assert time.monotonic() < deadline
            assert run.stop() == 0, run.said()
