"""The launcher contract on Ray nodes, and what a run says that Ray can't place. The tests of the class run on the head
node, in a pytest of their own."""

import subprocess
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from benchmarks.cluster.namespaced_nodes import NamespacedCluster
from penstock.processes.launchers import Launcher
from penstock.processes.launchers.config import LauncherConfig
from penstock.processes.launchers.launcher_kinds import LauncherParts, open_launcher
from penstock.processes.launchers.user_files import UserFiles
from tests.processes.launchers.contract import LauncherContract

pytestmark = pytest.mark.timeout(300)  # the first test waits for the cluster

PENSTOCK = (sys.executable, "-c", "from penstock.cli import main; main()")


class TestOnNode(LauncherContract):
    @pytest.fixture(autouse=True)
    def _on_a_node(self, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        if not request.config.getoption("--ray-node"):
            pytest.skip("runs on a node of the cluster, by the test below")
        self.path = tmp_path

    def open_launcher(self) -> AbstractAsyncContextManager[Launcher]:
        parts = LauncherParts(
            config=LauncherConfig(kind="ray"),
            folder=self.path,
            files=UserFiles,
            environ={"RAY_AUTH_MODE": "token"},
            log=print,
        )
        return open_launcher(parts)


def test_the_launcher_contract_holds_on_ray(cluster: NamespacedCluster) -> None:
    words = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--ray-node")
    done = subprocess.run(
        cluster.command(*words, f"{__file__}::TestOnNode"),
        env=cluster.environment,
        capture_output=True,
        text=True,
    )
    assert "4 passed" in done.stdout, done.stdout + done.stderr


def test_without_the_resources_the_sentence_says_what_there_is(
    cluster: NamespacedCluster, tmp_path: Path
) -> None:
    wanted = ("launcher.kind=ray", "launcher.wait_s=1", "launcher.resources={engine: {GPU: 2}}")
    done = subprocess.run(
        cluster.command(*PENSTOCK, "train", f"run.folder={tmp_path}", *wanted),
        env=cluster.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "engine0 needs 2 GPU on one node of the Ray cluster" in done.stderr
    assert "node0 has 0 GPU; node1 has 0 GPU; node2 has 0 GPU" in done.stderr


def test_nodes_that_do_not_reach_the_controller_say_so(cluster: NamespacedCluster, tmp_path: Path) -> None:
    places = "launcher.resources={trainer: {engine: 1}, engine: {engine: 1}}"
    done = subprocess.run(
        cluster.command(
            *PENSTOCK,
            "train",
            f"run.folder={tmp_path}",
            "launcher.kind=ray",
            "launcher.listen=127.0.0.1:0",
            places,
        ),
        env=cluster.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "can't reach the controller at 127.0.0.1:" in done.stderr, done.stdout + done.stderr
    assert "Connection refused; open this port for the nodes, or set launcher.listen" in done.stderr


def test_a_cluster_that_is_not_there_is_one_sentence(cluster: NamespacedCluster, tmp_path: Path) -> None:
    environment = {**cluster.environment, "RAY_AUTH_TOKEN": "0" * 32}
    done = subprocess.run(
        cluster.command(*PENSTOCK, "train", f"run.folder={tmp_path}", "launcher=ray"),
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "there is no Ray cluster at launcher.address=auto" in done.stderr
