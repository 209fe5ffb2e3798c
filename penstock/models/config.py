"""The `model` section says which model is trained, and whether all of it or an adapter on top of it."""

from typing import Annotated, Final, Literal

from pydantic import Field, field_validator, model_validator

from penstock.config import Section
from penstock.errors import UserError
from penstock.records import AdapterSpec

ALL_LINEAR: Final = "all-linear"
Targets = tuple[Annotated[str, Field(min_length=1)], ...] | Literal["all-linear"]


def adapters_on_experts(family: str) -> UserError:
    return UserError(
        f"model.lora.targets={ALL_LINEAR} can't be used with {family}: adapters on the experts of a mixture are "
        "not supported; name its other layers, such as [q_proj, v_proj, o_proj]"
    )


class LoraConfig(Section):
    """Trains an adapter, two small matrices beside each chosen layer, while the model's own weights stay as they
    are."""

    rank: int = Field(default=16, ge=1, le=4096)
    """The inner width of the matrices. Weights, gradients, AdamW's states and what is sent to engines grow with
    it."""
    alpha: float = Field(default=32.0, gt=0)
    """The matrices' product is scaled by alpha / rank (with `rslora`, by alpha / √rank)."""
    targets: Targets = ALL_LINEAR
    """The layers to adapt: a list of names or ends of names (`[q_proj, v_proj]`), or `all-linear` for every linear
    layer but the output embedding, which can be named (`lm_head`) if it is not tied to the input embedding."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the matrices' inputs in training passes. It makes the trainer's logprobs noisy, so leave it
    at 0 unless the adapter overfits."""
    rslora: bool = False
    """Scale by alpha / √rank, so that large ranks learn as fast as small ones."""
    dora: bool = False
    """Train a magnitude per row of the weights too (DoRA). Slower, and engines serve it merged."""

    @field_validator("targets", mode="before")
    @classmethod
    def _are_a_list(cls, targets: object) -> object:
        if isinstance(targets, str) and targets != ALL_LINEAR:
            raise ValueError(f"targets must be a list of names or {ALL_LINEAR!r}, got {targets!r}")
        if isinstance(targets, list | tuple) and not targets:
            raise ValueError(f"targets must name at least one layer, got none; {ALL_LINEAR!r} is all of them")
        return targets

    @model_validator(mode="after")
    def _dora_draws_nothing(self) -> "LoraConfig":
        if self.dora and self.dropout:
            raise ValueError(f"dropout must be 0 with dora, got {self.dropout:g}")
        return self

    @property
    def spec(self) -> AdapterSpec:
        """Return what an engine must know about the adapter."""
        return AdapterSpec(rank=self.rank, alpha=self.alpha, rslora=self.rslora, dora=self.dora)


class ModelConfig(Section):
    """Sets which model is trained, whole or by an adapter, and on which device."""

    name: str = "builtin"
    """A Hugging Face causal LM by name or folder, or a tiny model made on the spot: `builtin`, `builtin-moe` (a
    mixture of experts) or `builtin-tools` (which chats and can call a calculator)."""
    lora: LoraConfig | None = None
    """Train a LoRA adapter instead of all weights; needs `penstock[lora]`. See docs/lora.md."""
    adapter: str | None = None
    """A folder with a LoRA adapter in peft's format to continue from; its own settings apply, so omit `lora`."""
    pad_token: str | None = None
    """The pad token to save with the trained model, if its tokenizer has none or you want another one: a token of
    the vocabulary, best a special one, since decoders leave it out. Training never pads; programs that load the
    trained model may."""
    trust_remote_code: bool = False
    """Whether Python code that comes with the model or its tokenizer may run, on this machine and with your
    permissions. If false, a model that needs such code is refused."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """`cpu`, `cuda`, or `auto`: cuda when there is one."""

    @property
    def trains_adapter(self) -> bool:
        """Return whether the model's own weights stay as they are."""
        return self.lora is not None or self.adapter is not None
