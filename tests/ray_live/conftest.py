"""One Ray cluster for all tests: its nodes are namespaces of this machine (`benchmarks.cluster`)."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.cluster.namespaced_nodes import NamespacedCluster

HEAD = {"CPU": 4, "home": 4}
ENGINE = {"CPU": 2, "engine": 1}
HERE = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[NamespacedCluster]:
    """The head has room for a trainer and scorers, the others for an engine each."""
    if not request.config.getoption("--ray"):
        pytest.skip("needs --ray (make live-ray)")
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    with NamespacedCluster(resources=[HEAD, ENGINE, ENGINE], environment=environment) as nodes:
        yield nodes
