"""The `model` section: which model is trained."""

from pydantic import Field

from penstock.config import Section


class ModelConfig(Section):
    """Which model is trained, and on what."""

    name: str = "builtin"
    """A Hugging Face causal LM by name or folder, or `builtin`: a tiny model made on the spot."""
    pad_token: str | None = None
    """The pad token that is saved with the trained model, where its tokenizer has none or another one is wanted: a
    token of the vocabulary, best a special one, since decoders leave it out. Nothing in training pads; it is for
    whoever loads the result."""
    trust_remote_code: bool = False
    """Whether Python code that comes with the model or its tokenizer may run, on this machine and with your rights.
    Without it, a model that needs such code is refused."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """`cpu`, `cuda`, or `auto`: cuda when there is one."""
