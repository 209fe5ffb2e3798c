"""Messages between the controller and its workers: typed, framed, never pickled."""

from penstock.channel.connection import Channel, Method

__all__ = ["Channel", "Method"]
