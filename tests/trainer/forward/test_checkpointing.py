import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, LlamaConfig

from penstock.models import attention
from penstock.trainer.forward.checkpointing import (
    compile_layers,
    compiler_settings,
    enable_checkpointing,
    layers_of,
)
from penstock.trainer.forward.packed_attention import PackedAttention
from tests.trainer.forward.operators import Counting, pretend_varlen

CONFIG = LlamaConfig(
    vocab_size=23,
    hidden_size=16,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)
IDS, POSITIONS = torch.tensor([[3, 14, 15, 9, 2, 6, 5]]), torch.tensor([[0, 1, 2, 0, 1, 2, 3]])


def make(lengths=(3, 4), members=()):
    torch.manual_seed(0)
    attention.register()
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="penstock").eval()
    backend = PackedAttention()
    backend.set_lengths(lengths, members=members)
    attention.attach(model, backend)
    return model


def run(model):
    """The output, the elements that layers keep for backward, and the gradients."""
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    weights = {parameter.data_ptr() for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        states = model.model(input_ids=IDS, position_ids=POSITIONS, use_cache=False).last_hidden_state
    gradients = torch.autograd.grad(states.square().sum(), list(model.model.parameters()))
    return states.detach(), sum(size for where, size in kept.items() if where not in weights), gradients


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_values_stay_and_less_is_kept(mode):
    plain, kept_by_all, want = run(make())
    model = make()
    names = [name for name, _ in model.named_parameters()]
    enable_checkpointing(model, mode)
    states, kept, gradients = run(model)
    assert torch.equal(states, plain)
    assert kept < 0.25 * kept_by_all
    for one, other in zip(gradients, want, strict=True):
        torch.testing.assert_close(one, other)
    assert [name for name, _ in model.named_parameters()] == names


def test_selective_computes_only_the_cheap_and_every_second_wide_matmul_again():
    model = make()
    enable_checkpointing(model, "selective")
    states = model.model(input_ids=IDS, position_ids=POSITIONS, use_cache=False).last_hidden_state
    with Counting() as counting:
        torch.autograd.grad(states.square().sum(), list(model.model.parameters()))
    assert counting.counts["aten::_scaled_dot_product_flash_attention_for_cpu"] == 0
    assert counting.counts["aten::silu"] == CONFIG.num_hidden_layers
    # The backward of each of a layer's seven matmuls is two matmuls, and one wide matmul runs again.
    assert counting.counts["aten::mm"] == CONFIG.num_hidden_layers * (7 * 2 + 1)


def test_a_mode_touches_only_its_own_model():
    first, second = make(), make()
    enable_checkpointing(first, "selective")
    assert type(layers_of(first)[0]) is not type(layers_of(second)[0])
    assert type(layers_of(first)[0]).__name__ == type(layers_of(second)[0]).__name__
    enable_checkpointing(second, "off")
    assert len(layers_of(second)) == CONFIG.num_hidden_layers


# Dynamo looks at the .grad of what it traces, leaf or not.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("mode", ["off", "full"])
@pytest.mark.parametrize("packing", [{}, {"lengths": (3, 2, 2), "members": (2,)}], ids=["plain", "shared"])
def test_compiled_layers_give_the_same(mode, packing):
    plain, _, want = run(make(**packing))
    model = make(**packing)
    enable_checkpointing(model, mode)
    compile_layers(model, backend="aot_eager")
    states, _, gradients = run(model)
    torch.testing.assert_close(states, plain)
    for one, other in zip(gradients, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


# Dynamo looks at the .grad of what it traces, leaf or not.
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_one_compilation_serves_rows_of_any_shape(monkeypatch):
    """Every micro-batch has its own lengths. A graph that knew them would be made anew for each, and after eight
    torch runs the layers uncompiled."""
    monkeypatch.setattr("penstock.trainer.forward.packed_attention.fits", lambda *_: True)
    model = make()
    enable_checkpointing(model, "selective")
    backend = PackedAttention(pretend_varlen)
    attention.attach(model, backend)
    compile_layers(model, backend="aot_eager")
    before = counters["stats"]["unique_graphs"]
    eager = make()
    attention.attach(eager, backend)
    rows = [((6, 3, 2, 4), (3,)), ((7, 4), (1,)), ((2, 3, 6, 4, 5, 9), (2, 2)), ((3, 8, 8, 8, 8), (4,))]
    rows += [((6, 9, 3), ()), ((11, 12), ()), ((4,), ())]
    for lengths, members in rows * 2:
        backend.set_lengths(lengths, members=members)
        ids = torch.arange(sum(lengths))[None] % CONFIG.vocab_size
        with compiler_settings():
            states = [
                one.model(input_ids=ids, position_ids=ids, use_cache=False).last_hidden_state
                for one in (model, eager)
            ]
        torch.testing.assert_close(*states)
        states[0].sum().backward()
    assert counters["stats"]["unique_graphs"] - before == 2  # with prompts that are shared, and without
