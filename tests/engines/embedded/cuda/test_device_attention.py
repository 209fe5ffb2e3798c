import pytest
import torch

from tests.triton_device import DEVICE  # noqa: F401

from penstock.engines.embedded.cuda import device_attention as attention  # isort: skip
from penstock.engines.embedded.joined_projections import join_projections
from penstock.engines.embedded.model_preparation import compile_layers
from penstock.models import attention as interface
from tests.engines.embedded.tiny import make_model


class Averages:
    """A plan whose attention is the mean of all values, and that writes down who asked."""

    def __init__(self):
        self.pools = []

    def attend(self, query, key, value, pool, options):
        self.pools.append(int(pool[0, 0, 0, 0]))
        group = query.shape[1] // value.shape[1]
        return value.mean(0, keepdim=True).repeat_interleave(group, 1).expand_as(query).contiguous()


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests():
    """All compiled modules share one list of graphs, which has a bound."""
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_one_compiled_graph_serves_all_layers_lengths_and_plans(family, monkeypatch):
    from torch._dynamo.testing import CompileCounter

    model, counter = make_model(family), CompileCounter()
    interface.register()
    model.set_attn_implementation(interface.IMPLEMENTATION)
    interface.attach(model, attention.DeviceAttention())
    current = attention.CurrentPass()
    pools = {layer: torch.full((1, 1, 2, 16), float(layer)) for layer in range(3)}
    attention.attach_pools(model, pools, current)
    join_projections(model)

    def logits(length):
        ids = torch.arange(length)[None]
        return model(input_ids=ids, position_ids=ids, use_cache=False).logits

    plans = [Averages(), Averages()]
    with torch.no_grad():
        current.plan = plans[0]
        expected = logits(9)
        monkeypatch.setattr("torch.nn.Module.compile", lambda layer, **options: compile_with(layer, counter))
        compile_layers(model, 3)
        torch.testing.assert_close(logits(9), expected, atol=1e-5, rtol=1e-5)
        current.plan = plans[1]
        for length in (4, 17):
            logits(length)
    assert plans[0].pools == [0, 1, 2] * 2
    assert plans[1].pools == [0, 1, 2] * 2
    assert counter.frame_count == 3  # one for all layers, and one each for rotary embedding and last norm


def test_engines_that_share_compiled_code_find_each_their_own_pass(monkeypatch):
    from torch._dynamo.testing import CompileCounter

    counter, plans, models = CompileCounter(), [], []
    monkeypatch.setattr("torch.nn.Module.compile", lambda layer, **options: compile_with(layer, counter))
    interface.register()
    for number in range(2):
        model, current = make_model(seed=number), attention.CurrentPass()
        model.set_attn_implementation(interface.IMPLEMENTATION)
        interface.attach(model, attention.DeviceAttention())
        pools = {layer: torch.full((1, 1, 2, 16), 10.0 * number + layer) for layer in range(3)}
        attention.attach_pools(model, pools, current)
        join_projections(model)
        compile_layers(model, 3)
        current.plan = Averages()
        plans.append(current.plan)
        models.append(model)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        for model in (models[0], models[1], models[0]):
            model(input_ids=ids, position_ids=ids, use_cache=False)
    assert plans[0].pools == [0, 1, 2] * 2
    assert plans[1].pools == [10, 11, 12]
    assert counter.frame_count == 3


def compile_with(layer, counter):
    layer._compiled_call_impl = torch.compile(layer._call_impl, backend=counter, dynamic=True)
