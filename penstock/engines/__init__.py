"""Engines: token ids in, token ids out. Implementations of `penstock.interfaces.Engine`."""

from penstock.engines.config import EngineConfig

__all__ = ["EngineConfig"]
