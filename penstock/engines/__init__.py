"""Holds the engines, which take token ids and return token ids. Each implements
`penstock.records.interfaces.Engine`."""

from penstock.engines.config import EngineConfig

__all__ = ["EngineConfig"]
