"""A Ray cluster whose autoscaler adds nodes by itself: Ray's `fake_multinode` provider starts them as processes
beside the head, in its namespaces. It is Ray's own autoscaler, and only its cloud is not real."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cluster.namespaced_nodes import NamespacedCluster

HEAD_TYPE = "ray.head.default"
EMPTY: Mapping[str, Any] = {
    "auth": {},
    "docker": {},
    "file_mounts": {},
    "cluster_synced_files": [],
    "initialization_commands": [],
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
}
"""What Ray's schema of a cluster wants, and a cluster of processes has not."""


def autoscaled_cluster(
    folder: Path,
    *,
    head: Mapping[str, float],
    worker: Mapping[str, float],
    max_workers: int,
    idle_s: float,
    environment: Mapping[str, str] | None = None,
) -> NamespacedCluster:
    """A head, and up to `max_workers` nodes that come when something waits for their resources, and go after
    `idle_s` without work."""
    types = {
        HEAD_TYPE: {"resources": dict(head), "node_config": {}, "max_workers": 0},
        "worker": {
            "resources": dict(worker),
            "node_config": {},
            "min_workers": 0,
            "max_workers": max_workers,
        },
    }
    config = {
        **EMPTY,
        "cluster_name": "penstock",
        "provider": {"type": "fake_multinode", "use_node_id_as_ip": True},
        "max_workers": max_workers,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": idle_s / 60,
        "available_node_types": types,
        "head_node_type": HEAD_TYPE,
    }
    file = folder / "autoscaler.json"
    file.write_text(json.dumps(config))
    own = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
    return NamespacedCluster(
        resources=[head],
        environment={**(os.environ if environment is None else environment), **own},
        head_options=[f"--autoscaling-config={file}"],
    )
