"""Carries messages between the controller and its workers: typed, framed, never pickled."""

from penstock.channel.connection import Channel, Method
from penstock.channel.protocol_calls import implement, remote, serve

__all__ = ["Channel", "Method", "implement", "remote", "serve"]
