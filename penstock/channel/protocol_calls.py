"""Makes calls between processes from a protocol: `remote` makes them on one side, `serve` answers on the other.

    class Adder(Protocol):
        async def add(self, one: int, other: int = 0) -> int: ...
        def count(self, to: int) -> AsyncIterator[int]: ...

    serve(Adder, adder, channel)   ◄── channel ──►   await remote(Adder, channel).add(1, other=2)

A coroutine method is a call, and a method that returns an `AsyncIterator` is a stream. Arguments and answers travel
as their annotations say and are checked where they arrive. `close` is never served: it closes the channel.
"""

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from penstock.channel.connection import Channel, Method
from penstock.errors import ChannelClosed

P = TypeVar("P")


class Place(Protocol):
    """Has a channel to the present process, which may be replaced; `ChannelClosed` if there is none."""

    @property
    def channel(self) -> Channel: ...


@dataclass(frozen=True, slots=True)
class ProtocolMethod:
    """Describes one method of a protocol as a message: its arguments are the fields of a struct, in their order."""

    name: str
    wire: Method[Any, Any]
    request: Callable[..., Any]
    positional: tuple[str, ...]
    keywords: tuple[str, ...]
    is_stream: bool

    def calling(self, function: Callable[..., Any]) -> Callable[[Any], Any]:
        """Return a handler that calls the function with a request's arguments."""

        def handle(request: Any) -> Any:
            arguments = [getattr(request, name) for name in self.positional]
            return function(*arguments, **{name: getattr(request, name) for name in self.keywords})

        return handle


def remote(
    protocol: type[P],
    at: Channel | Place,
    *,
    lost: Callable[[str], Exception] | None = None,
    **own: Callable[..., Any],
) -> P:
    """Return an object whose methods are calls to the process at the other end of a channel, or to the present
    process of a `Place`. On a closed channel, calls raise `lost` with the known reason if it is given; otherwise,
    and in streams, `ChannelClosed` is raised. `own` holds methods that do more than pass their arguments on."""

    def channel() -> Channel:
        return at if isinstance(at, Channel) else at.channel

    async def close() -> None:
        await channel().close()

    def make(name: str) -> Callable[..., Any]:
        if name == "close":
            return close
        method = methods_of(protocol)[name]  # type: ignore[arg-type]
        return _streaming(method, channel) if method.is_stream else _asking(method, channel, lost)

    return implement(protocol, make, **own)


def serve(protocol: type[P], target: P, channel: Channel) -> None:
    """Let the other side call the methods of an object."""
    for name, method in methods_of(protocol).items():  # type: ignore[arg-type]
        take = channel.serve_stream if method.is_stream else channel.serve
        take(method.wire, method.calling(getattr(target, name)))


def implement(protocol: type[P], make: Callable[[str], Callable[..., Any]], **own: Callable[..., Any]) -> P:
    """Return an object with all methods of a protocol: those in `own`, and the others made from their names."""
    made = type(f"Made{protocol.__name__}", (), {})()
    for name, _ in inspect.getmembers(protocol, inspect.isfunction):
        if not name.startswith("_"):
            setattr(made, name, own[name] if name in own else make(name))
    return made  # type: ignore[no-any-return]


@functools.cache
def methods_of(protocol: type[Any]) -> dict[str, ProtocolMethod]:
    """Return all methods that can be called over a channel."""
    functions = inspect.getmembers(protocol, inspect.isfunction)
    return {
        name: _method(protocol.__name__, name, function)
        for name, function in functions
        if not name.startswith("_") and name != "close"
    }


def _method(owner: str, name: str, function: Callable[..., Any]) -> ProtocolMethod:
    hints = get_type_hints(function)
    answer = hints.get("return", type(None))
    is_stream = get_origin(answer) is AsyncIterator
    if not is_stream and not inspect.iscoroutinefunction(function):
        raise TypeError(
            f"{owner}.{name} must be a coroutine or return an AsyncIterator to be called from afar"
        )
    parameters = list(inspect.signature(function).parameters.values())[1:]
    fields = [
        (one.name, hints[one.name]) if one.default is one.empty else (one.name, hints[one.name], one.default)
        for one in parameters
    ]
    request = msgspec.defstruct(f"{owner}_{name}", fields, frozen=True, array_like=True)
    return ProtocolMethod(
        name=name,
        wire=Method(f"{owner.lower()}.{name}", request, get_args(answer)[0] if is_stream else answer),
        request=request,
        positional=tuple(one.name for one in parameters if one.kind is not one.KEYWORD_ONLY),
        keywords=tuple(one.name for one in parameters if one.kind is one.KEYWORD_ONLY),
        is_stream=is_stream,
    )


def _asking(
    method: ProtocolMethod, channel: Callable[[], Channel], lost: Callable[[str], Exception] | None
) -> Callable[..., Awaitable[Any]]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return await channel().call(method.wire, method.request(*args, **kwargs))
        except ChannelClosed as error:
            if lost is None:
                raise
            raise lost(str(error)) from None

    return call


def _streaming(method: ProtocolMethod, channel: Callable[[], Channel]) -> Callable[..., AsyncIterator[Any]]:
    """Return a method that passes items straight from the channel, since engines stream their tokens through it."""
    return lambda *args, **kwargs: channel().stream(method.wire, method.request(*args, **kwargs))
