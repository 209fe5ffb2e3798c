"""Holds the engines: token ids in, token ids out. They implement `penstock.records.interfaces.Engine`."""

from penstock.engines.config import EngineConfig

__all__ = ["EngineConfig"]
