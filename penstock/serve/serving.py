"""Implements `penstock serve`: load a model, and answer over HTTP until a signal arrives."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from penstock.blob_stores import MemoryBlobs
from penstock.channel.address import allow_many_connections, is_loopback
from penstock.engines.config import EngineConfig
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.embedded.opening import open_embedded, without_auto
from penstock.engines.kinds import EngineParts
from penstock.errors import UserError
from penstock.http_server.guard import guard_for
from penstock.http_server.web_server import HttpServer
from penstock.models.load import resolve_device, resolve_dtype
from penstock.models.tokenizer import ChatTokenizer
from penstock.records import DEFAULT_POLICY
from penstock.serve.bodies import ALL_BODIES_BYTES, BodyBudget, body_limit
from penstock.serve.control_routes import ControlRoutes, Pauses
from penstock.serve.engine_answers import EngineAnswers
from penstock.serve.openai_routes import OpenAiRoutes
from penstock.serve.served_model import ServedModel
from penstock.serve.server_app import MAX_BODY_BYTES, make_app
from penstock.serve.weight_routes import WeightRoutes
from penstock.sync.transports import AnyReceiver, Rendezvous

CLOSING_S = 5.0
"""How long running answers may take when the server shuts down."""
LEAST_BODY_BYTES = 4 * 2**20
"""Space for many short prompts in one request, however short the context is."""
DESCRIBED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
)
"""The sizes in which the models of trainer and server must agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    model: str
    adapter: str = ""
    """The folder of an adapter that is merged into the model; "" takes the model as it is."""
    name: str = ""
    """What clients call the model; empty: the model's name or folder."""
    host: str = "127.0.0.1"
    port: int = 8000
    token: str = ""
    allow_hosts: tuple[str, ...] = ()
    """Further host names that the server answers to."""
    max_requests: int = 4096
    updates: bool = False
    """Whether a trainer may send new weights."""
    trust_remote_code: bool = False
    all_bodies_bytes: int = ALL_BODIES_BYTES
    """The most bytes that the bodies of all unanswered requests may have together."""

    def of_folder(self, folder: str, adapter: str = "") -> "ServeSettings":
        """Return these settings for the model in another folder, with an adapter merged into it."""
        return replace(self, model=folder, adapter=adapter)

    def check(self) -> None:
        """Refuse an address that other machines can reach without a token."""
        if not self.token and not is_loopback(self.host):
            raise UserError(
                f"penstock serve on {self.host} can be reached from other machines and needs a token: give "
                "--token-file FILE, or serve on 127.0.0.1"
            )


@dataclass(frozen=True, slots=True)
class Opened:
    """Holds a loaded model before it is served."""

    engine: EmbeddedEngine
    receiver: AnyReceiver
    on_gpu: bool
    described: dict[str, Any]


async def open_engine(settings: ServeSettings, config: EngineConfig) -> Opened:
    """Load the model into an engine, with a receiver for new weights and `auto` settings resolved as in a run."""
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    receiver = AnyReceiver(Rendezvous(device=device))
    config = config.model_copy(update={"device": device, "dtype": dtype})
    engine = await open_embedded(
        EngineParts(
            name="engine0",
            model=settings.model,
            device=device,
            config=await asyncio.to_thread(
                without_auto, settings.model, config, trust_remote_code=settings.trust_remote_code
            ),
            receiver=receiver,
            blobs=MemoryBlobs(),
            versions={DEFAULT_POLICY: 0},
            trust_remote_code=settings.trust_remote_code,
            adapter=settings.adapter,
        )
    )
    described = await asyncio.to_thread(describe, settings, device, dtype)
    return Opened(engine, receiver, device != "cpu", described)


def describe(settings: ServeSettings, device: str, dtype: str) -> dict[str, Any]:
    """Return what a trainer compares with its own model."""
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(
        settings.model, trust_remote_code=settings.trust_remote_code
    ).get_text_config()
    sizes = {name: getattr(text, name, None) for name in DESCRIBED}
    return {
        "sizes": {name: size for name, size in sizes.items() if size is not None},
        "dtype": dtype,
        "num_workers": 1,
        "transfer": "penstock",
        "device": device,
    }


@dataclass(frozen=True, slots=True)
class Serving:
    """Holds a running server's address and its engine's task, which ends early only if the engine fails."""

    address: str
    running: asyncio.Task[None]


@asynccontextmanager
async def served(settings: ServeSettings, opened: Opened) -> AsyncIterator[Serving]:
    """Serve the engine while the context lasts, and give the server's address."""
    settings.check()
    engine = opened.engine
    pauses = Pauses(engine)
    model = ServedModel(
        name=settings.name or settings.model,
        engine=pauses,
        tokenizer=ChatTokenizer(settings.model, trust_remote_code=settings.trust_remote_code),
        max_context=(await engine.report()).max_context,
        window=engine.config.window if opened.on_gpu else 1,
        max_requests=settings.max_requests,
        created=int(time.time()),
        blobs=engine.blobs,
    )
    routes = [
        *ControlRoutes(model, engine, pauses).routes(),
        *OpenAiRoutes(model, EngineAnswers(model)).routes(),
    ]
    if settings.updates:
        routes += WeightRoutes(engine, opened.receiver, opened.described).routes()
    advice = "ask by the printed address, or name the host with --allow-host"
    app = make_app(
        routes,
        guard=guard_for(settings.host, allowed=settings.allow_hosts, advice=advice),
        token=settings.token,
        bodies=bodies_of(settings, model.max_context),
    )
    allow_many_connections()
    # A client that leaves cancels its request, which frees its slot in the batch.
    server = HttpServer(app, closing_s=CLOSING_S)
    running = asyncio.create_task(engine.run())
    try:
        await _listen(server, settings)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        yield Serving(f"http://{host}:{server.port}", running)
    finally:
        await engine.close()
        await server.close()
        await asyncio.gather(running, return_exceptions=True)


def bodies_of(settings: ServeSettings, max_context: int) -> BodyBudget:
    """Return the limits for bodies. An update names every tensor of its model, so a server that takes updates
    accepts larger ones."""
    limit = body_limit(max_context, least=LEAST_BODY_BYTES)
    return BodyBudget(
        max_bytes=max(limit, MAX_BODY_BYTES) if settings.updates else limit,
        all_bytes=settings.all_bodies_bytes,
    )


async def serve(settings: ServeSettings, config: EngineConfig, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM, or until the engine fails."""
    settings.check()
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    opened = await open_engine(settings, config)
    async with served(settings, opened) as serving:
        say(f"{settings.name or settings.model} is served at {serving.address}/v1 (Ctrl-C ends)")
        signalled = asyncio.create_task(ended.wait())
        await asyncio.wait({signalled, serving.running}, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if serving.running.done():
            serving.running.result()  # raises what broke the engine
        say("ending: running answers are cut off")


async def _listen(server: HttpServer, settings: ServeSettings) -> None:
    try:
        await server.open((settings.host, settings.port))
    except OSError as error:
        raise UserError(
            f"penstock serve can't listen on {settings.host}:{settings.port}: {error.strerror or error}; "
            "choose another --port"
        ) from error
