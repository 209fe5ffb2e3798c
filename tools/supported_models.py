"""Write docs/models.md: which families of transformers' causal LMs Penstock computes as their own code does.

Every family is tried as a small random model made from its default config, on a CPU: contexts past every window,
chunk and switch of its rotary embedding, in the trainer's packed rows and in the engine's paged cache. With names,
only those families are tried, and the table is printed.
"""

import argparse
import logging
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from penstock.engines.embedded.paged_attention_check import check_paged_attention
from penstock.errors import UserError
from penstock.models import attention_probe
from penstock.models.small_twin import limits_of
from penstock.models.support import refusal
from penstock.trainer.forward.packed_model import check_packed_attention

FAR = 1 << 30
"""A context past every limit."""
AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
}
"""Where the default config is of no published model: what theirs have."""
VARIANTS: dict[tuple[str, str], dict[str, Any]] = {
    ("granitemoehybrid", "dense"): {
        "layer_types": ["full_attention"] * 4,
        "num_hidden_layers": 4,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
    },
    ("gemma4_text", "shared keys"): {"num_hidden_layers": 35, "num_kv_shared_layers": 20},
    ("phi3", "longrope"): {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.1] * 48,
            "long_factor": [4.0] * 48,
            "original_max_position_embeddings": 4096,
        },
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
    },
}
"""Published models of a family that are computed in another way than the rest, each with a row of its own."""
PAGE = Path(__file__).parent.parent / "docs" / "models.md"
HEAD = """# Supported models

Your run decides: before it starts, engine and trainer compare Penstock's attention with the model's own (the
trainer its gradients too), on a small random model made from your model's config, past every sliding window and
switch of the rotary embedding that your contexts can reach. The table is a guide, made by
`python tools/supported_models.py` from the default config (or a published one) of every family in transformers
{version}.

Vision models are refused before anything starts. Those whose image class is in the table (`gemma3`, `gemma4`) are
served and trained on text alone.

- **exact**: trained and served as the model's own code computes it.
- **exact up to N tokens**: set `engine.max_context` to at most N.
- **refused**: the run ends at the start with a sentence. *Layers*: some are not plain attention. *Attentions*: a
  layer has several. *Interface*: the model's code does not use transformers' attention interface. *Differs*: its
  attention is another one.
- **not checked**: no small model could be made from the default config. A run that finds the same warns and
  continues, and nothing else shows a difference, since engine and trainer share the attention.
"""
IN_SHORT = {
    r".*not all of its layers are plain attention \((.*?)\).*": r"refused: layers (\1)",
    r".*does not use the attention interface.*": "refused: interface",
    r".*every layer has attention; \w+ has (\d+) layers and (\d+) .*": r"refused: attentions (\2 in \1 layers)",
    r".*attention differs from the model's own \((off by [\d.]+ nats|the gradient).*": r"refused: differs (\1)",
    r"not checked: .*": "not checked",
}
"""A run's sentences, and what the table says instead; the page's head explains it."""


def verdict(config: Any) -> str:
    """`exact`, `exact up to N tokens`, `refused: …` or `not checked: …`."""
    reason = refusal(config)
    if reason is not None:
        return f"refused: {reason}"
    for context in (FAR, *sorted({limit.tokens for limit in limits_of(config)}, reverse=True)):
        said = _try(config, context)
        if said is None:
            return "exact" if context == FAR else f"exact up to {context} tokens"
        reason = reason or said
    assert reason is not None
    return reason


def _try(config: Any, context: int) -> str | None:
    """Why contexts of this many tokens are refused, or were not checked; None when they are exact."""
    notes = Notes()
    attention_probe.log.addHandler(notes)
    try:
        check_packed_attention(config, context, say=attention_probe.log.warning)
        check_paged_attention(config, context)
    except UserError as error:
        return f"refused: {error}"
    finally:
        attention_probe.log.removeHandler(notes)
    return f"not checked: {notes.said}" if notes.said else None


class Notes(logging.Handler):
    """Keeps what a probe says when it can't be made."""

    said = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.said = record.getMessage()


def families() -> list[str]:
    """Every family with a causal LM."""
    return sorted(
        name for name, config in CONFIG_MAPPING.items() if config in AutoModelForCausalLM._model_mapping
    )


def table(names: list[str]) -> str:
    lines = ["| family | model | result |", "|---|---|---|"]
    for name in names:
        lines.append(row(name, f"`{name}`", AS_PUBLISHED.get(name, {})))
        lines += [
            row(name, f"`{name}`, {variant}", settings)
            for (family, variant), settings in VARIANTS.items()
            if family == name
        ]
    return "\n".join(lines) + "\n"


def row(name: str, label: str, settings: dict[str, Any]) -> str:
    """Of a family, with these settings over its default config."""
    config_class = CONFIG_MAPPING[name]
    model = AutoModelForCausalLM._model_mapping[config_class]
    model_name = getattr(model, "__name__", str(model))
    try:
        result = verdict(config_class(**settings))
    except Exception as error:
        result = f"not checked: its default config makes no model ({type(error).__name__})"
    print(f"{label}: {result}", file=sys.stderr)
    return f"| {label} | {model_name} | {in_short(result)} |"


def in_short(result: str) -> str:
    """Shorten a verdict for the table."""
    for sentence, words in IN_SHORT.items():
        if re.fullmatch(sentence, result, re.DOTALL):
            return re.sub(sentence, words, result, flags=re.DOTALL)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    chosen = parser.parse_args().families
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if chosen:
        print(table(chosen))
        return
    import transformers

    PAGE.write_text(
        HEAD.format(version=transformers.__version__) + "\n" + table(families()), encoding="utf-8"
    )
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
