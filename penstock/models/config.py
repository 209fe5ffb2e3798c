"""The `model` section: which model is trained."""

from penstock.config import Section


class ModelConfig(Section):
    """Which model is trained, and on what."""

    name: str = "builtin"
    """A Hugging Face causal LM by name or folder, or `builtin`: a tiny model made on the spot."""
    pad_token: str | None = None
    """The pad token that is saved with the trained model, where its tokenizer has none or another one is wanted: a
    token of the vocabulary, best a special one, since decoders leave it out. Nothing in training pads; it is for
    whoever loads the result."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: cuda when there is one."""
