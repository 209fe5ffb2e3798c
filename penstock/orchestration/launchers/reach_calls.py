"""How workers find out who reaches whom, before the first weights travel. One worker opens a door: it listens where
its weights would be served, and writes a small file. Another one looks: does it come through, does it see the file?
The workers' side is `penstock.worker.reach`."""

import msgspec

from penstock.channel import Method

DOOR_S = 30.0
"""How long a door stays open."""
LOOK_S = 15.0
"""How long one may take to come through. Firewalls often say nothing, and a trainer at work answers late."""


class DoorWanted(msgspec.Struct, frozen=True, kw_only=True):
    interface: str = ""
    """`sync.interface`; "" is the address by which the worker has reached the controller."""
    folder: str = ""
    """Where the file goes; "": nowhere."""


class Door(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    port: int
    folder: str = ""
    file: str = ""
    """Its name in the folder; "" where none could be written."""
    mark: str
    """What comes through the door, and stands in the file."""


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker has found."""

    machine: str
    connects: bool
    why: str = ""
    """Why it does not connect."""
    sees: bool
    """Whether it sees the file."""


OPEN_DOOR = Method("reach.open", DoorWanted, Door)
LOOK_AT_DOOR = Method("reach.look", Door, Reach)
