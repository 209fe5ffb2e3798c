import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from penstock.bench.shapes import SHAPES
from penstock.models.outline import outline
from penstock.trainer.config import TrainerConfig
from penstock.trainer.memory_estimate import estimate_bytes
from penstock.trainer.optimizers.optimizer import MasterAdamW

GB = 1e9
OUTLINE = outline(Qwen2Config(**SHAPES["1.5b"]))
MEASURED = {
    "dtype": "bfloat16",
    "micro_batch_tokens": 16384,
    "logprob_chunk_tokens": 4096,
    "checkpointing": "selective",
}


def estimate(**options):
    return estimate_bytes(OUTLINE, TrainerConfig(**{**MEASURED, **options}))


def test_states_by_mode_are_exact():
    parameters = OUTLINE.num_parameters
    plain, coded, away = (estimate(optimizer_states=mode) for mode in ("float32", "8bit", "cpu"))
    assert plain.weights == 2 * parameters
    assert plain.gradients == plain.masters == 4 * parameters
    assert plain.moments == 8 * parameters
    assert coded.moments == pytest.approx(parameters * (2 + 8 / 256), abs=1)
    assert (away.masters, away.moments) == (0, 0)
    assert away.host == pytest.approx(12 * parameters, rel=0.03)
    assert plain.host == coded.host == 0
    assert plain.total - away.total == 12 * parameters
    single = estimate(dtype="float32")
    assert (single.weights, single.masters) == (4 * parameters, 0)


@pytest.mark.parametrize(
    ("checkpointing", "with_states", "measured_gb"),
    [("selective", False, 24.5), ("selective", True, 43.0), ("full", False, 12.0)],
)
def test_near_the_peaks_that_were_measured(checkpointing, with_states, measured_gb):
    """On an H200, of one forward and backward without gradients from before. The code of that measurement kept a
    chunk of float32 logits while it made the next one."""
    found = estimate(checkpointing=checkpointing)
    without = found.gradients + (0 if with_states else found.masters + found.moments)
    chunk = 4 * 4096 * OUTLINE.vocabulary
    assert (found.total - without + chunk) / GB == pytest.approx(measured_gb, rel=0.05)


def test_more_tokens_a_reference_and_less_recomputation_need_more():
    base = estimate()
    assert estimate(micro_batch_tokens=32768).activations == 2 * base.activations
    assert estimate(checkpointing="full").total < base.total < estimate(checkpointing="off").total
    longer = estimate_bytes(OUTLINE, TrainerConfig(**MEASURED), tokens=32768, reference=True)
    assert longer.activations == 2 * base.activations
    assert longer.reference == 4 * OUTLINE.num_parameters
    small = estimate(micro_batch_tokens=1, logprob_chunk_tokens=1, optimizer_states="cpu")
    assert small.total >= small.loading


@pytest.mark.parametrize("states", ["float32", "8bit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_stays_is_what_the_optimizer_really_holds(states, dtype):
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    options = TrainerConfig(dtype=dtype, optimizer_states=states)
    optimizer = MasterAdamW(model, options)
    for parameter in model.parameters():
        parameter.sum().backward()
    found = estimate_bytes(outline(config), options)
    parameters, masters = list(model.parameters()), optimizer._masters
    assert sum(p.nbytes for p in parameters) == found.weights
    assert sum(holder.grad.nbytes for holder in optimizer._gradients) == found.gradients
    copies = sum(m.nbytes for p, m in zip(parameters, masters, strict=True) if p is not m)
    assert copies == found.masters
    optimizer.update(1e-3, 1.0)
    held = sum(tensor.nbytes for tensor in tensors_in(optimizer.state_dict()["adamw"]) if tensor.numel() > 1)
    assert held == pytest.approx(found.moments, rel=0.05)


def tensors_in(state):
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_in(value)
    elif isinstance(state, list):
        for value in state:
            yield from tensors_in(value)
