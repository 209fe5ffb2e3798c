"""Ray nodes on one machine, each in namespaces of its own: processes, network, host name, `/tmp/ray` and
`/dev/shm`.

    node0 (the head, and where drivers run)  10.77.0.1 ── bridge ──┬── 10.77.0.2  node1
                                                                   ├── 10.77.0.3  node2
                                                                   └── 10.77.0.200  laptop (no Ray there)

They reach each other over the bridge alone and share the disk, so a run on them is one of several machines.
No other Ray on this machine is touched, and nothing is left when they are closed. Needs Linux and root.
"""

import contextlib
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from penstock.errors import PenstockError, UserError

SUBNET = "10.77.0"
NETWORK = "eth0"
"""How every node calls the network between them."""
PORT = 6379
START_S = 180.0
LAPTOP = 199
"""The number of the machine that is no node of Ray's."""
LOOK_AGAIN_S = 0.05
STORE_BYTES = 80 << 20


class NamespacedNode:
    """One node. Its first process is `ray start --block`, or on the laptop one that sleeps; everything on it ends
    with that."""

    def __init__(
        self,
        number: int,
        *,
        resources: Mapping[str, float],
        environment: Mapping[str, str],
        options: Sequence[str] = (),
    ) -> None:
        """`options` are more of `ray start`."""
        self._options = options
        self.name = "laptop" if number == LAPTOP else f"node{number}"
        self.address = f"{SUBNET}.{number + 1}"
        self._number = number
        self.log = Path("/tmp") / f"penstock-{self.name}-{os.getpid()}-{secrets.token_hex(2)}.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(
                        "unshare",
                        "--net",
                        "--mount",
                        "--pid",
                        "--uts",
                        "--fork",
                        "--kill-child",
                        "--mount-proc",
                    ),
                    *("sh", "-c", self._script(resources)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
            )
        self.init = self._find_init()

    def _script(self, resources: Mapping[str, float]) -> str:
        own = json.dumps({name: amount for name, amount in resources.items() if name != "CPU"})
        role = (
            f"--head --port={PORT} --include-dashboard=false"
            if self._number == 0
            else f"--address={SUBNET}.1:{PORT}"
        )
        ray = (
            f"{sys.executable} -m ray.scripts.scripts start {role} --node-ip-address={self.address} "
            f"--num-cpus={resources.get('CPU', 0):g} --block --disable-usage-stats "
            f"--object-store-memory={STORE_BYTES} --resources={shlex.quote(own)} {shlex.join(self._options)}"
        )
        return (
            f"hostname {self.name} && mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray && "
            "mount -t tmpfs none /dev/shm && ip link set lo up && "
            f"until ip -4 addr show 2>/dev/null | grep -q {self.address}/; do sleep 0.05; done; "
            f"exec {'sleep infinity' if self._number == LAPTOP else ray}"
        )

    def _find_init(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            found = children.read_text().split()
            if found:
                return int(found[0])
            time.sleep(LOOK_AGAIN_S)
        raise UserError(f"{self.name} has no namespaces of its own: {self.death_report()}")

    def death_report(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def enter(self) -> list[str]:
        """Before a command: it runs on this node."""
        spaces = ("--net", "--mount", "--pid", "--uts", f"--wdns={Path.cwd()}")
        return ["nsenter", f"--target={self.init}", *spaces, "--"]

    def end(self) -> None:
        """All its processes at once. Idempotent."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.log.unlink(missing_ok=True)


class NamespacedCluster:
    """`with` it. Node 0 is the head; `add` and `cut` change the others."""

    def __init__(
        self,
        *,
        resources: Sequence[Mapping[str, float]],
        environment: Mapping[str, str] | None = None,
        head_options: Sequence[str] = (),
    ) -> None:
        """A node for each of the `resources`, which are Ray's: `{"CPU": 2, "spot": 1}`. `head_options` are more of
        `ray start` on the head."""
        self._head_options = head_options
        if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("nsenter") is None:
            raise UserError("Ray nodes in namespaces need Linux, root, unshare, nsenter and ip")
        self._resources = resources
        self.environment = {
            **(os.environ if environment is None else environment),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "GRPC_ENABLE_FORK_SUPPORT": "0",  # or the client server of a driver outside dies as it is forked
        }
        self.nodes: dict[str, NamespacedNode] = {}
        self._num_started = 0

    def __enter__(self) -> "NamespacedCluster":
        try:
            for resources in self._resources:
                self.add(resources)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def head(self) -> NamespacedNode:
        return self.nodes["node0"]

    def add(self, resources: Mapping[str, float]) -> NamespacedNode:
        """Start a node, and return when its Ray answers."""
        number = self._num_started
        self._num_started += 1
        options = () if number else self._head_options
        node = NamespacedNode(number, resources=resources, environment=self.environment, options=options)
        self.nodes[node.name] = node
        if number == 0:
            self._run(node, "ip", "link", "add", NETWORK, "type", "bridge")
            self._run(node, "ip", "addr", "add", f"{node.address}/24", "dev", NETWORK)
            self._run(node, "ip", "link", "set", NETWORK, "up")
        else:
            self._plug(node)
        self._wait(node)
        return node

    def add_laptop(self) -> NamespacedNode:
        """A machine on the same network that is no node of the cluster."""
        laptop = NamespacedNode(LAPTOP, resources={}, environment=self.environment)
        self.nodes[laptop.name] = laptop
        self._plug(laptop)
        return laptop

    def cut(self, name: str) -> NamespacedNode:
        """Pull the plug: nothing comes from the node any more, and nobody is told. Its processes go on; `end` ends
        them."""
        node = self.nodes.pop(name)
        self._run(self.head, "ip", "link", "set", f"to-{name}", "down")
        return node

    def plug_in(self, node: NamespacedNode) -> None:
        """A node that was cut off comes back."""
        self._run(self.head, "ip", "link", "set", f"to-{node.name}", "up")
        self.nodes[node.name] = node

    def keep_apart(self, *names: str, apart: bool = True) -> None:
        """These nodes reach the head, and not each other; or they do again."""
        for name in names:
            isolation = ("type", "bridge_slave", "isolated", "on" if apart else "off")
            self._run(self.head, "ip", "link", "set", "dev", f"to-{name}", *isolation)

    def command(self, *words: str, node: NamespacedNode | None = None) -> list[str]:
        return [*(node or self.head).enter(), *words]

    def close(self) -> None:
        for node in reversed(list(self.nodes.values())):
            node.end()
        self.nodes.clear()

    def _plug(self, node: NamespacedNode) -> None:
        link = f"to-{node.name}"
        peer = ("peer", "name", "eth0", "netns", str(node.init))
        self._run(self.head, "ip", "link", "add", link, "type", "veth", *peer)
        self._run(self.head, "ip", "link", "set", link, "master", NETWORK)
        self._run(self.head, "ip", "link", "set", link, "up")
        self._run(node, "ip", "addr", "add", f"{node.address}/24", "dev", "eth0")
        self._run(node, "ip", "link", "set", "eth0", "up")

    def _run(self, node: NamespacedNode, *words: str) -> None:
        only_network = ["nsenter", f"--target={node.init}", "--net", "--"]
        subprocess.run([*only_network, *words], check=True)

    def _wait(self, node: NamespacedNode) -> None:
        """Until Ray says that it runs."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if node.process.poll() is not None:
                raise PenstockError(f"Ray did not start on {node.name}: {node.death_report()}")
            with contextlib.suppress(OSError):
                if "Ray runtime started" in node.log.read_text(errors="replace"):
                    return
            time.sleep(LOOK_AGAIN_S)
        raise PenstockError(f"Ray did not start on {node.name} within {START_S:.0f} s: {node.death_report()}")
