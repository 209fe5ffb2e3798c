"""Uses Ray to choose nodes for node agents, and for nothing else: no records, no weights and no liveness go
through it.

Each worker gets a placement group of its own, or a share in one where several belong together (the ranks of a
trainer). When a group does not fit, the error lists what the cluster has. Ray's calls block, so they run in
threads.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

from penstock.channel import Channel
from penstock.errors import UserError
from penstock.processes.launchers import Launcher, worker_kind
from penstock.processes.launchers.config import LauncherConfig
from penstock.processes.launchers.joining import read_token
from penstock.processes.launchers.launcher_kinds import LauncherParts
from penstock.processes.launchers.ray_connection import AgentEnd, PlacingActor, connect_to_ray, first_line
from penstock.processes.launchers.remote import RemoteLauncher
from penstock.processes.launchers.signals import restore_handlers

NODE_ID = "ray.io/node-id"
HOST = "NodeManagerHostname"
LOOK_AGAIN_S = 0.25
AVOID_S = 90.0
SAY_AGAIN_S = 30.0


class RayAgent:
    """Implements `remote.Placed`: an actor that runs an agent."""

    channel: Channel | None = None

    def __init__(
        self,
        actor: Any,
        running: "Future[AgentEnd]",
        give_back: Callable[[], None],
        avoid: Callable[[], None],
    ) -> None:
        self._actor = actor
        self._running = running
        self._give_back = give_back
        self._avoid = avoid
        self._is_removed = False

    def avoid(self) -> None:
        self._avoid()

    async def failed(self) -> str:
        import ray

        try:
            end = await _outcome_of(self._running)
        except (ray.exceptions.RayError, ConnectionError) as error:
            return f"Ray could not start it: {first_line(error)}"
        why = _last_line(end.last_lines)
        if "No module named" in why:
            return f"{end.host} has no Penstock ({why}); install it there, in the same version"
        return why or f"its agent on {end.host} ended with code {end.code}"

    async def remove(self) -> None:
        if not self._is_removed:
            self._is_removed = True
            await asyncio.to_thread(self._end)

    def _end(self) -> None:
        import ray

        ray.kill(self._actor)
        self._give_back()


class RayPlacer:
    """Implements `remote.Placer` on the cluster that this process is connected to (`ray_connection`)."""

    def __init__(
        self,
        *,
        resources: Callable[[str, int], Mapping[str, float]],
        together: Sequence[Sequence[str]] = (),
        may_spread: bool = False,
        joins: Callable[[str], bool] = lambda name: False,
        wait_s: float = 60.0,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`resources` returns what a worker with this name and number of threads takes.

        Workers that are named `together` share a placement group. They are placed at once, on one node, or on
        several where they `may_spread` and no single one has room. A worker that `joins` a running run waits
        for room as long as it takes: its pending placement group is what makes an autoscaler add a node.
        """
        self._joins = joins
        self._may_spread = may_spread
        self._resources = resources
        self._together = [tuple(names) for names in together]
        self._wait_s = wait_s
        self._log = log
        self._groups: dict[tuple[str, ...], Any] = {}
        self._avoided: dict[str, float] = {}
        """Nodes that do not answer, and until when no worker is placed there: Ray may take a minute to notice."""
        self._asking = asyncio.Lock()
        """Ranks ask at the same time, and must share the group that the first of them requested."""
        self._stale: set[tuple[str, ...]] = set()
        """Members of placement groups with a node that does not answer."""

    async def place(self, name: str, incarnation: int, *, address: str, token: str, threads: int) -> RayAgent:
        members = next((names for names in self._together if name in names), (name,))
        bundle = dict(self._resources(name, threads))
        group = await self._find_room(members, bundle, is_first=incarnation == 1 and not self._joins(name))
        arguments = ["-m", "penstock.worker.node_agent", "--connect", address]
        arguments += ["--name", name, "--incarnation", str(incarnation)]
        index = members.index(name)
        actor, running, node = await asyncio.to_thread(self._start, group, index, bundle, arguments, token)
        return RayAgent(actor, running, lambda: self._give_back(members), lambda: self._avoid(node, members))

    def _avoid(self, node: str, members: tuple[str, ...]) -> None:
        self._avoided[node] = time.monotonic() + AVOID_S
        self._stale.add(members)

    def _to_avoid(self) -> tuple[str, ...]:
        now = time.monotonic()
        return tuple(sorted(node for node, until in self._avoided.items() if until > now))

    async def close(self) -> None:
        await asyncio.to_thread(self._leave)

    def _leave(self) -> None:
        import ray

        for members in list(self._groups):
            self._remove(members)
        ray.shutdown()

    def _ask(self, bundle: Mapping[str, float], count: int, avoided: Sequence[str]) -> Any:
        from ray.util import placement_group

        strategy = "PACK" if self._may_spread else "STRICT_PACK"
        selector = {"bundle_label_selector": [{NODE_ID: f"!in({', '.join(avoided)})"}] * count}
        return placement_group([dict(bundle)] * count, strategy=strategy, **(selector if avoided else {}))

    def _start(
        self, group: Any, index: int, bundle: Mapping[str, float], arguments: list[str], token: str
    ) -> Any:
        import ray
        from ray.util import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        own = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
        actor = (
            ray.remote(PlacingActor)
            .options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                resources=own,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            )
            .remote()
        )
        node = placement_group_table(group)["bundles_to_node_id"][index]
        return actor, actor.run.remote(arguments, token).future(), node

    async def _find_room(
        self, members: tuple[str, ...], bundle: Mapping[str, float], *, is_first: bool
    ) -> Any:
        """Return a placement group that is ready.

        The first worker of a name waits for a limited time; one that replaces another, or joins, as long as
        it takes. A cancelled wait leaves no group behind.
        """
        try:
            return await self._wait_for_room(members, bundle, is_first=is_first)
        except asyncio.CancelledError:
            async with self._asking:  # a group that was requested meanwhile is removed too
                await asyncio.to_thread(self._give_back, members)
            raise

    async def _wait_for_room(
        self, members: tuple[str, ...], bundle: Mapping[str, float], *, is_first: bool
    ) -> Any:
        started = said = time.monotonic()
        avoided = self._to_avoid()
        while True:
            group = await asyncio.shield(asyncio.ensure_future(self._group_of(members, bundle, avoided)))
            if await asyncio.to_thread(group.wait, LOOK_AGAIN_S):
                return group
            now = time.monotonic()
            if is_first and now - started > self._wait_s:
                raise UserError(
                    await asyncio.to_thread(self._what_is_missing, members, bundle, now - started)
                )
            if now - said > SAY_AGAIN_S:
                said = now
                self._log(await asyncio.to_thread(self._what_is_missing, members, bundle, now - started))
            if self._to_avoid() != avoided:  # the nodes to avoid have changed
                avoided = self._to_avoid()
                await asyncio.to_thread(self._remove, members)

    async def _group_of(
        self, members: tuple[str, ...], bundle: Mapping[str, float], avoided: Sequence[str]
    ) -> Any:
        async with self._asking:
            if members in self._stale:
                self._stale.discard(members)
                await asyncio.to_thread(self._remove, members)
            if members not in self._groups:
                self._groups[members] = await asyncio.to_thread(self._ask, bundle, len(members), avoided)
            return self._groups[members]

    def _what_is_missing(self, members: Sequence[str], bundle: Mapping[str, float], waited_s: float) -> str:
        import ray

        needs = f"{_amounts(bundle, bundle)} on one node of the Ray cluster"
        if len(members) > 1:
            where = "on the Ray cluster" if self._may_spread else "all on one node of the Ray cluster"
            needs = f"{_amounts(bundle, bundle)} for each of {len(members)} ranks, {where}"
        hint = "" if len(members) == 1 or self._may_spread else ", or let the ranks spread (sync.interface)"
        nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node[HOST])
        has = "; ".join(f"{node[HOST]} has {_amounts(node['Resources'], bundle)}" for node in nodes)
        free = _amounts(ray.available_resources(), bundle)
        return (
            f"{members[0]} needs {needs}, and has waited "
            f"{waited_s:.0f} s: {has or 'there is no node'}; free are {free} in all; add a node, or lower "
            f"launcher.resources{hint}"
        )

    def _give_back(self, members: tuple[str, ...]) -> None:
        """Remove the placement group of a single worker. A shared group stays for the ranks that restart."""
        if len(members) == 1:
            self._remove(members)

    def _remove(self, members: tuple[str, ...]) -> None:
        from ray.util import remove_placement_group

        group = self._groups.pop(members, None)
        if group is not None:
            remove_placement_group(group)


async def _outcome_of(running: "Future[AgentEnd]") -> AgentEnd:
    """Wait for the future without cancelling it when the caller is cancelled. Ray's client still sets it, and
    complains when it can't."""
    loop, is_done = asyncio.get_running_loop(), asyncio.Event()

    def tell(done: "Future[AgentEnd]") -> None:
        with contextlib.suppress(RuntimeError):  # the run may be over, and its loop closed
            loop.call_soon_threadsafe(is_done.set)

    running.add_done_callback(tell)
    await is_done.wait()
    return running.result()


def _amounts(resources: Mapping[str, float], wanted: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in wanted) or "nothing"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


@asynccontextmanager
async def open_ray(parts: LauncherParts) -> AsyncIterator[Launcher]:
    config, files = parts.config, parts.files()
    host = await asyncio.to_thread(connect_to_ray, config.address, parts.environ, parts.log)
    restore_handlers()
    placer = RayPlacer(
        resources=lambda name, threads: resources_of(config, parts.on_gpu, name, threads),
        together=parts.together,
        may_spread=parts.may_spread,
        joins=parts.joins,
        wait_s=config.wait_s,
        log=parts.log,
    )
    remote = RemoteLauncher(
        parts.folder / "logs",
        placer,
        address=f"tcp:{config.listen or f'{host}:0'}",
        token=read_token(config) or secrets.token_hex(16),
        blobs=parts.folder / "blobs",
        files=files,
        on_launch=parts.on_launch,
    )
    async with remote as launcher:
        yield launcher


def resources_of(
    config: LauncherConfig, on_gpu: Sequence[str], name: str, threads: int
) -> Mapping[str, float]:
    kind = worker_kind(name)
    if kind in config.resources:
        return config.resources[kind]
    return {"CPU": float(threads), **({"GPU": 1.0} if kind in on_gpu else {})}
