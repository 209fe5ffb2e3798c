import pytest
import torch
from torch.nn import functional

from tests.models.kernels.device import DEVICE  # noqa: F401

from penstock.engines.embedded.cuda import attention, products, trials  # isort: skip
from penstock.engines.embedded.cuda.products import Choice, Choices, Epilogue, Size  # isort: skip
from penstock.engines.embedded.runner import compile_layers
from penstock.models import attention as interface
from penstock.models.joined import join_projections
from penstock.models.kernels.reference import rotate
from tests.engines.embedded.tiny import make_model


class Plain:
    """A plan that attends to everything before, without a pool, and writes down who turned queries and keys."""

    def __init__(self):
        self.were_turned = []
        self.query_rows = set()

    def attend(self, query, key, value, pool, *, scaling, sliding_window, softcap, sinks, rotary):
        self.were_turned.append(rotary is None)
        self.query_rows.add(query.stride(0))
        if rotary is not None:
            query, key = rotate(query, *rotary), rotate(key, *rotary)
        group = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(group, 1) for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * scaling
        later = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value).contiguous()


@pytest.mark.parametrize(
    ("family", "turned_by_us"),
    [("llama", True), ("qwen2", True), ("qwen3", True), ("gemma3", True), ("gpt_oss", False)],
)
def test_attention_turns_queries_and_keys_of_compiled_layers(family, turned_by_us, monkeypatch):
    """gpt-oss writes it in another way, and stays as it is."""
    model = make_model(family)
    interface.register()
    model.set_attn_implementation(interface.IMPLEMENTATION)
    interface.attach(model, attention.DeviceAttention())
    layers = model.config.num_hidden_layers
    attention.hang_pools(model, {layer: torch.zeros(1, 1, 2, 16) for layer in range(layers)})
    join_projections(model)
    plan = Plain()
    monkeypatch.setattr(attention.Pass, "plan", plan)
    results = []
    with torch.inference_mode():
        for compiled in (False, True):
            if compiled:
                compile_layers(model, layers)
            for length in (9, 4):
                places = torch.arange(3, 3 + length)[None]
                results.append(model(input_ids=places * 5, position_ids=places, use_cache=False).logits)
    assert plan.were_turned == [True] * 2 * layers + [not turned_by_us] * 2 * layers
    if family in ("llama", "qwen2"):  # queries are read where the joined product left them
        assert model.config.hidden_size * 2 in plan.query_rows
    for before, after in zip(results[:2], results[2:], strict=True):
        torch.testing.assert_close(after, before, atol=2e-5, rtol=2e-5)


class Counts:
    """What torch does, and how often."""

    def __init__(self):
        self.calls = 0

    def run(self, algorithm, x, weight, out, *, bias=None, added=None):
        self.calls += 1
        out.copy_(functional.linear(x, weight, bias) + (0 if added is None else added))


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_compiled_layers_add_with_their_products(family, monkeypatch):
    """Both sums of a Qwen layer; Gemma's have a norm between product and sum, and stay as they are."""
    monkeypatch.setattr(products, "ALIGNMENT", 1)
    monkeypatch.setattr(Choices, "known", {})
    model = make_model(family)
    join_projections(model)
    monkeypatch.setattr(trials, "TYPES", {torch.float32: 0})
    for sites in trials.by_size(model).values():
        for site in sites:
            site.switch()
    counted = Counts()
    for outer, inner in {tuple(layer.shape) for layer in model.parameters() if layer.dim() == 2}:
        Choices.known[Size(torch.device("cpu"), torch.float32, 5, outer, inner, Epilogue.SUM)] = Choice(
            counted, None
        )
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        before = model(ids).logits
        compile_layers(model, model.config.num_hidden_layers, join_additions=True)
        after = model(ids).logits
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    layers = model.config.num_hidden_layers
    assert counted.calls == (2 * layers if family == "qwen2" else 0)
