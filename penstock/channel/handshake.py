"""Lets a worker and its controller prove that they know the run's token, without sending it.

    worker ── Hello: name, nonce ──► controller
           ◄── Challenge: nonce ────
           ── Proof ───────────────►
           ◄── Welcome: proof ──────       or Refused, with the reason

The worker proves itself first, so that a stranger who asks a listener gets nothing to guess tokens by. Before
the worker has checked the controller's proof it accepts no files, code or settings. A proof is bound to its
role, so that it can't be sent back; to both nonces, so that it can't be replayed; and to the worker's name.
Later messages are neither encrypted nor signed, so an attacker on the path can alter them.
"""

import asyncio
import hmac
import secrets
from typing import Any

import msgspec

from penstock.errors import UserError

PROTOCOL = 1
"""Incremented when the messages between controller and workers change."""
NONCE_BYTES, MAX_BYTES = 32, 1024
WORKER, CONTROLLER = b"penstock worker", b"penstock controller"
SAME_VERSION = "install the same version of Penstock on both machines"


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    protocol: int
    name: str
    """As `incarnation_name` returns it."""
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    nonce: bytes


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    mac: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    mac: bytes


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    reason: str


NO_GREETING = (asyncio.IncompleteReadError, OSError, msgspec.MsgspecError, ValueError, RecursionError)
"""Errors that the other side of a handshake may cause instead of answering."""


async def introduce(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, name: str, token: str
) -> None:
    """Prove the worker's side. Raise `UserError` if it is refused, or if the other side does not know the token."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    _send(writer, Hello(PROTOCOL, name, nonce))
    challenge = _granted(await _receive(reader, Challenge | Refused))
    _send(writer, Proof(_mac(token, WORKER, nonce, challenge.nonce, name)))
    welcome = _granted(await _receive(reader, Welcome | Refused))
    if not hmac.compare_digest(welcome.mac, _mac(token, CONTROLLER, nonce, challenge.nonce, name)):
        raise UserError(
            "the process that answered does not know the run's token, so nothing was taken from it; check the "
            "address and the token file"
        )


async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, token: str) -> str | None:
    """Check a worker on the controller's side. Return its name if it knows the token, None if it was refused."""
    hello = await _receive(reader, Hello)
    if hello.protocol != PROTOCOL:
        said = f"the controller speaks version {PROTOCOL} of the channel, and the worker version {hello.protocol}"
        _send(writer, Refused(f"{said}; {SAME_VERSION}"))
        return None
    _check_nonce(hello.nonce)
    nonce = secrets.token_bytes(NONCE_BYTES)
    _send(writer, Challenge(nonce))
    proof = await _receive(reader, Proof)
    if not hmac.compare_digest(proof.mac, _mac(token, WORKER, hello.nonce, nonce, hello.name)):
        _send(writer, Refused("the token is not the run's; bring the one of launcher.token_file"))
        return None
    _send(writer, Welcome(_mac(token, CONTROLLER, hello.nonce, nonce, hello.name)))
    return str(hello.name)


def _granted(answer: Any) -> Any:
    if isinstance(answer, Refused):
        raise UserError(f"the controller refused this worker: {answer.reason}")
    if isinstance(answer, Challenge):
        _check_nonce(answer.nonce)
    return answer


def _check_nonce(nonce: bytes) -> None:
    if len(nonce) != NONCE_BYTES:
        raise ValueError(f"a nonce of {len(nonce)} bytes")


def _mac(token: str, role: bytes, worker_nonce: bytes, controller_nonce: bytes, name: str) -> bytes:
    said = b"%s %d:" % (role, PROTOCOL) + worker_nonce + controller_nonce + name.encode()
    return hmac.digest(token.encode(), said, "sha256")


def _send(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    writer.write(len(data).to_bytes(4, "big") + data)


async def _receive(reader: asyncio.StreamReader, kind: Any) -> Any:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > MAX_BYTES:
        raise ValueError(f"a greeting of {size} bytes")
    return msgspec.msgpack.decode(await reader.readexactly(size), type=kind)
