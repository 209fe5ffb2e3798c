"""Trains an adapter: peft's LoRA layers are put inside the model's own, and the model keeps its class.

    model.layers.0.self_attn.q_proj    a LoRA layer: base_layer (frozen), lora_A, lora_B, for DoRA a magnitude

The code that runs the model (packing, checkpointing, compilation, the head) need not know that it has an adapter.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from penstock.errors import MissingExtraError
from penstock.models.adapter_folder import PREFIX, TENSORS
from penstock.models.config import LoraConfig
from penstock.models.lora_targets import all_linear, target_layers
from penstock.models.published import published_tensors
from penstock.records import AdapterSpec
from penstock.trainer.forward.checkpointing import GradientDropout

if TYPE_CHECKING:
    from peft import PeftModel

NAME = "default"
"""peft's default adapter name."""
BASE, OWN = ".base_layer.", ".lora_"


class TrainedAdapter:
    """Puts the adapter into a model, in place, and tells the adapter's tensors from the base model's."""

    def __init__(self, model: nn.Module, lora: LoraConfig, *, base: str, folder: Path | None = None) -> None:
        """`base` is the model name to record in the saved adapter; `folder` holds an adapter to continue from."""
        self.lora = lora
        self._model = model
        self._peft = _inject(model, lora, base)
        if folder is not None:
            self._load(folder)
        if lora.dropout:
            for layer in self._layers():
                layer.lora_dropout[NAME] = GradientDropout(lora.dropout)

    @property
    def spec(self) -> AdapterSpec:
        return self.lora.spec

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the adapter's tensors, not copied, by the names under which they are sent and saved."""
        return adapter_tensors(self._model)

    def base_tensors(self) -> dict[str, torch.Tensor]:
        """Return the frozen base weights, named as in a model without an adapter."""
        return {
            name.replace(BASE, "."): tensor.detach()
            for name, tensor in published_tensors(self._model).items()
            if OWN not in name
        }

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disable the adapter in this block, which leaves the base model."""
        with self._peft.disable_adapter():
            yield

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the adapter's tensors, not copied, by peft's names, for `save`."""
        return {name: tensor for name, tensor in self._peft.state_dict().items() if OWN in name}

    def save(self, folder: Path, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write the adapter in peft's format. `tensors` are those of `state_dict`, or copies of them."""
        state = self.state_dict() if tensors is None else dict(tensors)
        self._peft.save_pretrained(str(folder), save_embedding_layers=False, state_dict=state)
        (folder / "README.md").unlink(missing_ok=True)  # an unfilled model card template

    def _load(self, folder: Path) -> None:
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        tensors = load_file(folder / TENSORS)
        set_peft_model_state_dict(self._peft, tensors)

    def _layers(self) -> list[Any]:
        return [module for module in self._model.modules() if hasattr(module, "lora_dropout")]


def adapter_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the adapter's tensors in a model, such as a copy of a trained one, by the names under which they are
    sent."""
    return {
        _own_name(name): parameter.detach() for name, parameter in model.named_parameters() if OWN in name
    }


def _inject(model: Any, lora: LoraConfig, base: str) -> "PeftModel":
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("model.lora needs peft: pip install 'penstock[lora]'") from error
    target_layers(model, lora)
    targets = all_linear(model) if isinstance(lora.targets, str) else lora.targets
    model.name_or_path = base
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(targets),
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
    )
    return peft.get_peft_model(model, config)


def _own_name(name: str) -> str:
    """Drop peft's name of the adapter: `….lora_A.default.weight` is sent as `….lora_A.weight`."""
    name = name.removeprefix(PREFIX).replace(f".{NAME}.", ".")
    return name.removesuffix(".weight") if "lora_magnitude_vector" in name else name
