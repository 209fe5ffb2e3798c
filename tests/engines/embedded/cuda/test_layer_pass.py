import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional

from tests.triton_device import DEVICE  # noqa: F401

from penstock.engines.embedded.cuda import device_attention as attention, products, trials  # isort: skip
from penstock.engines.embedded.cuda.layer_pass import LayerPass  # isort: skip
from penstock.engines.embedded.cuda.products import Choice, Choices, Epilogue, Size  # isort: skip
from penstock.engines.embedded.cuda.kernels.reference import rotate
from penstock.engines.embedded.joined_projections import join_projections
from penstock.engines.embedded.model_runner import compile_layers
from penstock.models import attention as interface
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


HEADS, KV_HEADS, DIM = 4, 2, 16


def attend(query, key, value, pool):
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    return attention.attend_paged(
        query.contiguous(), key.contiguous(), value, pool, None, None, None, 1.0, 0.0, 0
    )


def left(x):
    return x[..., : DIM // 2]


def right(x):
    return x[..., DIM // 2 :]


def turn_with(other):
    """As `turn`, with other halves."""

    def turned(x, cos, sin):
        return x * cos.unsqueeze(1) + torch.cat(other(x), -1) * sin.unsqueeze(1)

    return turned


turn = turn_with(lambda x: (-right(x), left(x)))


def turn_some(x, cos, sin):
    few, rest = left(x), right(x)
    other = torch.cat((-few[..., DIM // 4 :], few[..., : DIM // 4]), -1)
    cos, sin = (angles[..., : DIM // 2].unsqueeze(1) for angles in (cos, sin))
    return torch.cat((few * cos + other * sin, rest), -1)


def turn_twice_as_far(x, cos, sin):
    other = torch.cat((-right(x), left(x)), -1)
    return torch.add(x * cos.unsqueeze(1), other * sin.unsqueeze(1), alpha=2)


def both(turn, angles=lambda angles: angles):
    """Queries and keys turned by `turn`, and by what `angles` makes of the angles."""

    def layer(query, key, value, cos, sin, pool):
        cos, sin = angles(cos), angles(sin)
        return attend(turn(query, cos, sin), turn(key, cos, sin), value, pool)

    return layer


def read_twice(query, key, value, cos, sin, pool):
    key = turn(key, cos, sin)
    return attend(turn(query, cos, sin), key, value, pool) + key.sum()


USUAL = {
    "plain": both(turn),
    "scaled before": lambda q, k, v, cos, sin, pool: attend(
        turn(2 * q, cos, sin), turn(k, cos, sin), v, pool
    ),
    "scaled angles": both(turn, lambda angles: 2 * angles),
}
UNUSUAL = {
    "turned back": both(turn_with(lambda x: (right(x), -left(x)))),
    "halves in place": both(turn_with(lambda x: (-left(x), right(x)))),
    "right half twice": both(turn_with(lambda x: (-right(x), right(x)))),
    "left half twice": both(turn_with(lambda x: (-left(x), left(x)))),
    "half of the dimensions": both(turn_some),
    "twice as far": both(turn_twice_as_far),
    "scaled after": lambda q, k, v, cos, sin, pool: attend(2 * turn(q, cos, sin), turn(k, cos, sin), v, pool),
    "query alone": lambda q, k, v, cos, sin, pool: attend(turn(q, cos, sin), k, v, pool),
    "keys by other angles": lambda q, k, v, cos, sin, pool: attend(
        turn(q, cos, sin), turn(k, sin, cos), v, pool
    ),
    "one angle for all": both(turn, lambda angles: angles[:, :1]),
    "angles without a batch": both(turn, lambda angles: angles[0, :1]),
    "narrower angles": both(turn, lambda angles: angles.half()),
    "strided angles": both(turn, lambda angles: angles.mT.contiguous().mT),
    "a second reader": read_twice,
}


@pytest.mark.parametrize("name", [*USUAL, *UNUSUAL])
def test_only_the_usual_rotation_is_taken_over(name, monkeypatch):
    """Whatever is written, numbers stay; what is not that to the letter stays as it is."""
    plan, results = Plain(), []
    monkeypatch.setattr(attention.Pass, "plan", plan)

    def make(module, inputs):
        LayerPass(join_additions=False)(module.graph)
        module.graph.lint()
        left = [node for node in module.graph.nodes if not node.users and node.op == "call_function"]
        assert all(node.is_impure() for node in left)
        module.recompile()
        return make_boxed_func(module)

    def layer(joined, cos, sin, pool):
        heads = joined.view(1, -1, HEADS + 2 * KV_HEADS, DIM).transpose(1, 2)
        query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
        return {**USUAL, **UNUSUAL}[name](query, key, value, cos, sin, pool)

    torch._dynamo.reset()
    compiled = torch.compile(
        layer, backend=aot_autograd(fw_compiler=make, decompositions=select_decomp_table()), dynamic=True
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for length in (9, 6):
            joined = torch.randn(1, length, (HEADS + 2 * KV_HEADS) * DIM, generator=generator)
            cos, sin = (torch.randn(1, length, DIM, generator=generator) for _ in range(2))
            pool = torch.zeros(1, 1, KV_HEADS, 2 * DIM)
            results.append([call(joined, cos, sin, pool) for call in (layer, compiled)])
    assert plan.were_turned == [True, name in UNUSUAL] * 2
    for before, after in results:
        torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


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
