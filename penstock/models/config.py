"""The `model` section: which model is trained."""

from penstock.config import Section


class ModelConfig(Section):
    """Which model is trained, and on what."""

    name: str = "builtin"
    """A Hugging Face causal LM by name or folder, or `builtin`: a tiny model made on the spot."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: cuda when there is one."""
