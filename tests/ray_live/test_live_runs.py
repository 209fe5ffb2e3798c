"""The demo over several Ray nodes: it learns, a node is cut off in the middle, another one is added, and every group
is trained exactly once."""

import subprocess
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.cluster.clustered_run import PENSTOCK, ClusteredRun
from benchmarks.cluster.namespaced_nodes import NamespacedCluster
from benchmarks.cluster.ray_bench import OUTSTANDING_STEPS, node_of, workers_on
from penstock.bench.chaos.run_audit import complaints_of
from penstock.cli.scale import scale_run
from penstock.durability.kept_checkpoints import checkpoints_of
from tests.ray_live.conftest import ENGINE

GROUPS_PER_STEP = 16


@pytest.mark.timeout(300)
def test_where_nodes_do_not_reach_each_other_a_sentence_names_the_disk_and_weights_take_it(
    cluster: NamespacedCluster, tmp_path: Path
) -> None:
    nodes = ("node1", "node2")
    cluster.keep_apart(*nodes)
    places = "launcher.resources={trainer: {engine: 1}, engine: {engine: 1}, scorer: {home: 1}}"
    settings = (places, "engine.count=1", "run.steps=3")
    for name in ("network", "disk"):
        (tmp_path / name).mkdir()
    try:
        with ClusteredRun(cluster, tmp_path / "network", *settings, "sync.retries=0") as run:
            assert run.wait() != 0
        assert "can't be fetched from the trainer at 10.77.0." in run.said()
        assert "set sync.transport=filesystem where all of them see one disk" in run.said()
        with ClusteredRun(cluster, tmp_path / "disk", *settings, "sync.transport=filesystem") as run:
            assert run.wait() == 0, run.said()
    finally:
        cluster.keep_apart(*nodes, apart=False)
    assert run.steps == 3
    assert not list((tmp_path / "disk" / "demo" / "weights").iterdir())


@pytest.mark.timeout(300)
def test_the_ranks_of_a_trainer_spread_over_nodes_on_a_network_that_they_trust(
    cluster: NamespacedCluster, tmp_path: Path
) -> None:
    places = "launcher.resources={trainer: {engine: 1}, engine: {home: 1}, scorer: {home: 1}}"
    network = ("sync.interface=eth0", "sync.transport=http")
    ranks = ("trainer.parallel.data=2", "engine.count=1", "run.steps=200")
    with ClusteredRun(cluster, tmp_path, places, *network, *ranks) as run:
        run.wait_for_step(2, patience_s=200)
        nodes = {node_of(cluster, "trainer").name, node_of(cluster, "trainer1").name}
        assert nodes == {"node1", "node2"}
        assert run.stop() == 0, run.said()


@pytest.mark.smoke
@pytest.mark.timeout(300)
def test_a_driver_outside_of_the_cluster_trains_over_its_nodes(
    cluster: NamespacedCluster, tmp_path: Path
) -> None:
    pytest.importorskip("grpc", reason="Ray's client needs grpcio: pip install 'ray[client]'")
    laptop = cluster.add_laptop()
    settings = ("launcher.address=ray://10.77.0.1:10001", "engine.count=1", "run.steps=20")
    with ClusteredRun(cluster, tmp_path, *settings, "eval.tasks=null", node=laptop) as run:
        run.wait_for_step(1, patience_s=200)
        assert node_of(cluster, "engine0").name in ("node1", "node2")
        assert node_of(cluster, "trainer") is cluster.head
        assert run.wait() == 0, run.said()
    assert run.steps == 20
    assert "Traceback" not in run.said()
    assert "SIGTERM handler" not in run.said()


@pytest.mark.timeout(300)
def test_a_worker_of_another_machine_joins_without_ray(cluster: NamespacedCluster, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a token of the test")
    token = f"{tmp_path}/token"
    settings = ("launcher.kind=local", "launcher.listen=0.0.0.0:7000", f"launcher.token_file={token}")
    worker = (*PENSTOCK, "worker", "--connect", "10.77.0.1:7000", "--token-file", token)
    with ClusteredRun(cluster, tmp_path, *settings, "engine.count=1", "run.steps=2000") as run:
        run.wait_for_step(1, patience_s=200)
        guest = subprocess.Popen(
            cluster.command(*worker, node=cluster.nodes["node1"]),
            env=cluster.environment,
            stdout=subprocess.DEVNULL,
        )
        run.wait_for("engine1 joins after")
        assert run.stop() == 0, run.said()
        assert guest.wait(30) == 0


@pytest.mark.timeout(560)
def test_a_run_loses_a_node_and_gets_another(cluster: NamespacedCluster, tmp_path: Path) -> None:
    cluster.add(ENGINE)  # room for a replacement
    settings = ("engine.count=2", "run.steps=2000", "run.checkpoint_every=5")
    with ClusteredRun(cluster, tmp_path, *settings) as run:
        run.wait_for("verifying weights", patience_s=300)
        run.wait_for_step(10)
        lost, used = node_of(cluster, "engine1"), node_of(cluster, "engine0")
        assert lost is not used
        cluster.cut(lost.name)
        cut_at, step = time.monotonic(), run.steps
        noticed_at, _ = run.wait_for("engine1 (pid ")
        assert "is lost: its node has not answered for" in run.said()
        trained_at = run.wait_for_step(step + OUTSTANDING_STEPS + 1)
        back_at, _ = run.wait_for("engine1 is back at work")
        assert node_of(cluster, "engine1") not in (lost, used, cluster.head)
        added = cluster.add(ENGINE)
        assert scale_run(str(run.folder), "engines=3").endswith("from 2 to 3 engines")
        run.wait_for("engine2 joins after")
        assert node_of(cluster, "engine2") is added
        run.wait_for_step(160)  # it has learned by then, also where all of the above took no time
        orphans = psutil.wait_procs(workers_on(lost), timeout=30)[1] if lost.process.poll() is None else []
        lost.end()
        assert run.stop() == 0, run.said()
    print(f"noticed {noticed_at - cut_at:.1f} s, {trained_at - cut_at:.1f} s, back {back_at - cut_at:.1f} s")
    assert noticed_at - cut_at < 5.0
    assert trained_at - cut_at < 15.0
    assert back_at - cut_at < 45.0
    assert orphans == []
    steps = max(checkpoints_of(run.folder))
    assert complaints_of(run.folder, steps=steps, groups_per_step=GROUPS_PER_STEP) == []
    assert run.rewards[-1] > 0.85
