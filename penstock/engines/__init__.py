"""Engines: token ids in, token ids out. Implementations of `penstock.records.interfaces.Engine`."""

from penstock.engines.config import EngineConfig

__all__ = ["EngineConfig"]
