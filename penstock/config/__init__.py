"""Defines config sections: frozen pydantic models that sit with their owners, read from YAML and overrides."""

from penstock.config.section import Section

__all__ = ["Section"]
