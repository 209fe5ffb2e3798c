"""Takes new weights over HTTP: vLLM's routes, with the methods of penstock's vLLM plugin behind `/collective_rpc`.

    stage (beside generation) ─► pause ─► update_weights ─► finish ─► resume

So a client that trains on vLLM's servers trains on this one too. `/update_weights` also takes a whole `update`.
"""

import asyncio
import time
from typing import Any

import msgspec
from aiohttp import web

from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.errors import PenstockError
from penstock.records import DEFAULT_POLICY, Interrupt, WeightUpdate
from penstock.serve.api_error import ApiError
from penstock.serve.bodies import answer, read_body
from penstock.sync.transports import AnyReceiver

_decode = msgspec.json.Decoder(WeightUpdate).decode
INTACT = {"kind": "", "message": "", "is_intact": True, "load_s": 0.0, "verify_s": 0.0, "unverified": []}


class InitInfo(msgspec.Struct, kw_only=True):
    interface: str = ""
    token: str = ""


class InitBody(msgspec.Struct, kw_only=True):
    init_info: InitInfo


class VersionBody(msgspec.Struct, kw_only=True):
    new_version: str


class UpdateInfo(msgspec.Struct, kw_only=True):
    version: int


class UpdateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Names a staged update by its version, or holds a whole update."""

    update_info: UpdateInfo | None = None
    update: msgspec.Raw = msgspec.Raw()
    interrupt: Interrupt = "inflight"


class CallBody(msgspec.Struct, kw_only=True):
    method: str
    args: list[str] = []


class WeightRoutes:
    def __init__(self, engine: EmbeddedEngine, receiver: AnyReceiver, sizes: dict[str, Any]) -> None:
        """Set up the routes; `sizes` describe the model, so that a trainer can compare them with its own."""
        self._engine = engine
        self._receiver = receiver
        self._sizes = sizes
        self._staged: WeightUpdate | None = None
        self._staging: asyncio.Task[None] | None = None
        self._outcome: dict[str, Any] = dict(INTACT)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/init_weight_transfer_engine", self.init),
            web.post("/update_weight_version", self.name_version),
            web.get("/weight_info", self.info),
            web.post("/start_weight_update", self.nothing),
            web.post("/update_weights", self.update),
            web.post("/finish_weight_update", self.nothing),
            web.post("/collective_rpc", self.call),
            web.get("/get_world_size", self.world_size),
        ]

    async def init(self, request: web.Request) -> web.Response:
        body = await read_body(request, InitBody)
        self._receiver.join(interface=body.init_info.interface, token=body.init_info.token)
        return answer({"status": "ok"})

    async def name_version(self, request: web.Request) -> web.Response:
        body = await read_body(request, VersionBody)
        try:
            version = int(body.new_version)
        except ValueError as error:
            raise ApiError(f"new_version must be a number, got {body.new_version!r}") from error
        self._engine.name_version(version)
        return await self.info(request)

    async def info(self, request: web.Request) -> web.Response:
        return answer({"weight_version": str(self._engine.versions[DEFAULT_POLICY])})

    async def nothing(self, request: web.Request) -> web.Response:
        """Answer a call that vLLM needs before or after an update; this engine loads an update in one step."""
        return answer({"status": "ok"})

    async def world_size(self, request: web.Request) -> web.Response:
        return answer({"world_size": 1})

    async def update(self, request: web.Request) -> web.Response:
        body = await read_body(request, UpdateBody)
        if bytes(body.update):
            try:
                update = _decode(body.update)
            except (msgspec.MsgspecError, ValueError) as error:
                raise ApiError(f"update is not a penstock update: {error}", param="update") from error
            receipt = await self._engine.update(update, body.interrupt)
            return answer(msgspec.to_builtins(receipt))
        staged = self._staged
        if body.update_info is None or staged is None or staged.version != body.update_info.version:
            raise ApiError(
                "no such update is staged; call penstock_stage first, or give `update`", status=409
            )
        self._outcome = await self._load(staged)
        return answer({"status": "ok"})

    async def call(self, request: web.Request) -> web.Response:
        """Call a method of the plugin's worker. There is one worker, so there is one result."""
        body = await read_body(request, CallBody)
        match body.method, body.args:
            case "penstock_describe", []:
                result: Any = self._sizes
            case "penstock_stage", [update]:
                result = await self._stage(update)
            case "penstock_staged", []:
                result = self._progress()
            case "penstock_drop", []:
                await self._drop()
                result = None
            case "penstock_outcome", []:
                result = self._outcome
            case _:
                raise ApiError(f"method {body.method!r} with {len(body.args)} arguments is not known here")
        return answer({"results": [result]})

    async def _stage(self, text: str) -> dict[str, Any]:
        try:
            update = _decode(text)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ApiError(f"penstock_stage needs an update: {error}") from error
        await self._drop()
        self._staged = update
        self._staging = asyncio.create_task(self._engine.stage(update))
        return self._progress()

    def _progress(self) -> dict[str, Any]:
        task = self._staging
        if task is None or not task.done():
            return {"is_done": task is None, "kind": "", "message": ""}
        error = task.exception() if not task.cancelled() else asyncio.CancelledError("staging was given up")
        if error is None:
            return {"is_done": True, "kind": "", "message": ""}
        return {"is_done": True, "kind": type(error).__name__, "message": str(error)}

    async def _drop(self) -> None:
        task, self._staging, self._staged = self._staging, None, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _load(self, update: WeightUpdate) -> dict[str, Any]:
        started = time.perf_counter()
        try:
            receipt = await self._engine.update(update)
        except PenstockError as error:
            # A half-loaded update makes the engine unhealthy.
            return dict(INTACT) | {
                "kind": type(error).__name__,
                "message": str(error),
                "is_intact": self._engine.is_healthy,
            }
        finally:
            await self._drop()
        took_s = time.perf_counter() - started
        return dict(INTACT) | {"load_s": took_s, "verify_s": receipt.verify_s}
