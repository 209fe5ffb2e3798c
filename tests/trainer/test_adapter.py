import copy
import json
import sys
from functools import partial

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from penstock.algorithms.config import AlgorithmConfig
from penstock.errors import MissingExtraError, UserError
from penstock.models import attention
from penstock.models.adapter_folder import CONFIG, PREFIX, TENSORS, read_adapter
from penstock.models.config import LoraConfig
from penstock.models.lora_targets import adapter_shapes
from penstock.models.published import published_tensors
from penstock.trainer.adapter import TrainedAdapter
from penstock.trainer.forward.checkpointing import compile_layers, compiler_settings, enable_checkpointing
from penstock.trainer.forward.packed_attention import PackedAttention
from penstock.trainer.step.packing import plan_step
from tests.trainer.builders import VOCAB, make_groups, tiny_model
from tests.trainer.forward.operators import Counting, pretend_varlen
from tests.trainer.test_policy_trainer import CLIP, SGD, reference_loop, trainer_for

LORA = LoraConfig(rank=3, alpha=6.0)


def adapted(name="qwen3", lora=LORA, *, seed=7, folder=None):
    """A model with an adapter that changes it, where a fresh one would not."""
    model = tiny_model(name)
    adapter = TrainedAdapter(model, lora, base=f"some/{name}", folder=folder)
    generator = torch.Generator().manual_seed(seed)
    if folder is None:
        with torch.no_grad():
            for tensor in adapter.tensors().values():
                tensor += 0.05 * torch.randn(tensor.shape, generator=generator)
    return model, adapter


def plan_of(groups, step=1):
    return plan_step(step, groups, micro_batch_tokens=64, shared_prompts=True)[0]


def gradients_of(model, adapter, plan, **config):
    trainer = trainer_for(model, adapter=adapter, **config)
    keeper = SGD(trainer)
    loss = trainer.step(plan).values()["loss"]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return loss, {names[key]: gradient for key, gradient in keeper.gradients.items()}


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(9)[None], use_cache=False).logits


@pytest.mark.parametrize("dora", [False, True])
def test_tensors_are_named_as_peft_saves_them(tmp_path, dora):
    lora = LoraConfig(rank=3, alpha=6.0, dora=dora, targets=("q_proj", "down_proj"))
    _, adapter = adapted(lora=lora)
    adapter.save(tmp_path)
    saved = {name.removeprefix(PREFIX): value for name, value in load_file(tmp_path / TENSORS).items()}
    assert saved.keys() == adapter.tensors().keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in adapter.tensors().items())
    first = "model.layers.0.self_attn.q_proj"
    assert f"{first}.lora_A.weight" in saved
    assert (f"{first}.lora_magnitude_vector" in saved) == dora
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == adapter_shapes(
        tiny_model("qwen3"), lora
    )


def test_weights_below_are_those_of_a_model_without_an_adapter():
    _, adapter = adapted()
    plain = published_tensors(tiny_model("qwen3"))
    below = adapter.base_tensors()
    assert below.keys() == plain.keys()
    assert all(torch.equal(below[name], plain[name]) for name in plain)


@pytest.mark.parametrize("dora", [False, True])
def test_off_it_is_the_model_that_training_began_with(dora):
    model, adapter = adapted(lora=LoraConfig(rank=3, alpha=6.0, dora=dora))
    on, base = logits_of(model), logits_of(tiny_model("qwen3"))
    assert (on - base).abs().max() > 0.1
    with adapter.off():
        assert torch.equal(logits_of(model), base)
    assert torch.equal(logits_of(model), on)
    assert all(parameter.requires_grad == (".lora_" in name) for name, parameter in model.named_parameters())


@pytest.mark.parametrize(
    "options", [{"dora": True}, {"rslora": True, "targets": ("q_proj", "o_proj")}, {"dropout": 0.3}, {}]
)
def test_peft_loads_what_was_saved_and_training_goes_on_from_it(tmp_path, options):
    lora = LoraConfig(rank=3, alpha=6.0, **options)
    model, adapter = adapted(lora=lora)
    adapter.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG, TENSORS]
    by_peft = PeftModel.from_pretrained(tiny_model("qwen3"), str(tmp_path)).eval()
    assert torch.allclose(logits_of(by_peft), logits_of(model), atol=1e-6)
    config = json.loads((tmp_path / CONFIG).read_text())
    assert (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM")
    assert config["base_model_name_or_path"] == "some/qwen3"
    saved = read_adapter(tmp_path)
    ends = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    assert saved.lora == lora.model_copy(
        update={"targets": (options.get("targets") and ("o_proj", "q_proj")) or ends}
    )
    again, going_on = adapted(lora=saved.lora, folder=tmp_path)
    assert torch.equal(logits_of(again), logits_of(model))
    assert going_on.tensors().keys() == adapter.tensors().keys()


ON_HEAD = {"rank": 3, "alpha": 6.0, "targets": ("q_proj", "down_proj", "lm_head")}


@pytest.mark.parametrize(
    ("checkpointing", "name", "lora"),
    [
        ("off", "qwen3", LORA),
        ("selective", "qwen3", LORA),
        ("full", "qwen3", LORA),
        ("off", "llama", LoraConfig(**ON_HEAD)),
        ("off", "llama", LoraConfig(**ON_HEAD, dora=True)),
    ],
)
def test_gradients_are_those_of_peft_in_a_plain_loop(checkpointing, name, lora):
    groups = make_groups(3)
    model, _ = adapted(name, lora)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    loss, expected = reference_loop(model, groups)
    ours, adapter = adapted(name, lora)
    found_loss, found = gradients_of(
        ours, adapter, plan_of(groups), checkpointing=checkpointing, logprob_chunk_tokens=5
    )
    assert found_loss == pytest.approx(loss, abs=1e-5)
    assert found.keys() == {name for name in expected if ".lora_" in name}
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in found)
    assert max(float(gradient.abs().max()) for gradient in found.values()) > 1e-3


@pytest.mark.parametrize(
    "config",
    [
        {"optimizer_states": "float32"},
        {"optimizer_states": "8bit"},
        {"optimizer_states": "cpu"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "optimizer_states": "cpu"},
    ],
)
def test_a_step_changes_the_adapter_and_nothing_else(config):
    model, adapter = adapted()
    trainer = trainer_for(model, adapter=adapter, learning_rate=1e-2, **config)
    before = {name: tensor.clone() for name, tensor in adapter.tensors().items()}
    below = {name: tensor.clone() for name, tensor in adapter.base_tensors().items()}
    trainer.step(plan_of(make_groups(1)))
    assert all(torch.equal(below[name], tensor) for name, tensor in adapter.base_tensors().items())
    assert all(not torch.equal(before[name], tensor) for name, tensor in adapter.tensors().items())
    masters = trainer.state_dict()["optimizer"]["masters"]
    assert sum(master.numel() for master in masters) == sum(tensor.numel() for tensor in before.values())
    assert trainer.weights().keys() == before.keys()
    assert [weights.keys() for weights in trainer.trained.starting_weights()] == [below.keys(), before.keys()]


def matmuls_of_backward(mode):
    """How many there are, by the shape of their weights, (in, out)."""
    model, _ = adapted()
    enable_checkpointing(model, mode)
    states = model.model(input_ids=torch.arange(9)[None], use_cache=False).last_hidden_state
    with Counting(lambda name, args: tuple(args[1].shape) if name == "aten::mm" else None) as matmuls:
        torch.autograd.grad(states.sum(), [each for each in model.parameters() if each.requires_grad])
    return matmuls.counts


def test_selective_runs_matmuls_of_the_adapter_again_and_keeps_those_of_the_weights():
    again = matmuls_of_backward("selective") - matmuls_of_backward("off")
    of_weights = {shape: count for shape, count in again.items() if LORA.rank not in shape}
    # In each of two layers one of gate and up, the wide ones, and nothing else.
    assert of_weights == {(32, 48): 2}
    # Of the adapters all but the last matmul of a layer, whose result nothing needs.
    assert sum(again.values()) == 2 + 2 * (2 * 7 - 1)


# Dynamo looks at the .grad of what it traces, leaf or not.
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_trainer_gives_the_same_gradients(monkeypatch):
    quickly = partial(compile_layers, backend="aot_eager")
    monkeypatch.setattr("penstock.trainer.forward.packed_model.compile_layers", quickly)
    groups = make_groups(3)
    model, adapter = adapted()
    _, expected = gradients_of(model, adapter, plan_of(groups))
    other, own = adapted()
    _, found = gradients_of(other, own, plan_of(groups), compile=True, checkpointing="full")
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in expected)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_one_compilation_serves_all_adapted_layers(monkeypatch):
    monkeypatch.setattr("penstock.trainer.forward.packed_attention.fits", lambda *_: True)
    torch._dynamo.reset()
    attention.register()
    model = tiny_model("qwen3", num_hidden_layers=3)
    model.set_attn_implementation(attention.IMPLEMENTATION)
    TrainedAdapter(model, LORA, base="x")
    enable_checkpointing(model, "full")
    backend = PackedAttention(pretend_varlen)
    attention.attach(model, backend)
    compile_layers(model, backend="aot_eager")
    before = counters["stats"]["unique_graphs"]
    for lengths, members in [((6, 3, 2, 4), (3,)), ((7, 4), (1,)), ((6, 9, 3), ()), ((11, 12), ())] * 2:
        backend.set_lengths(lengths, members=members)
        ids = torch.arange(sum(lengths))[None] % VOCAB
        with compiler_settings():
            states = model.model(input_ids=ids, position_ids=ids, use_cache=False).last_hidden_state
        states.sum().backward()
    assert counters["stats"]["unique_graphs"] - before == 2  # with prompts that are shared, and without


def test_the_reference_is_the_base_with_the_adapter_off():
    """The same KL and gradients as with a second model, without one."""
    algorithm = AlgorithmConfig(**CLIP, kl_coef=0.3)
    groups = make_groups(5)
    found = {}
    for kind in ("adapter off", "second model"):
        model, adapter = adapted()
        second = tiny_model("qwen3") if kind == "second model" else None
        trainer = trainer_for(model, adapter=adapter, algorithm=algorithm, reference=second)
        keeper = SGD(trainer)
        found[kind] = trainer.step(plan_of(groups)).values()["reference_kl"], list(keeper.gradients.values())
    assert found["adapter off"][0] > 0.01
    assert found["adapter off"][0] == pytest.approx(found["second model"][0], abs=1e-6)
    for ours, theirs in zip(found["adapter off"][1], found["second model"][1], strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_off_it_is_off_the_output_embedding_too():
    """A penalty against a second model is the same as against the adapter's own."""
    found = []
    for second in (None, tiny_model("llama")):
        model, adapter = adapted("llama", LoraConfig(**ON_HEAD))
        algorithm = AlgorithmConfig(**CLIP, kl_coef=0.3)
        trainer = trainer_for(model, adapter=adapter, algorithm=algorithm, reference=second)
        found.append(trainer.step(plan_of(make_groups(5))).values()["reference_kl"])
    assert found[0] > 0.01
    assert found[0] == pytest.approx(found[1], abs=1e-6)


def test_a_fresh_adapter_has_no_distance_from_its_reference():
    model = tiny_model("qwen3")
    adapter = TrainedAdapter(model, LORA, base="x")
    trainer = trainer_for(model, adapter=adapter, algorithm=AlgorithmConfig(**CLIP, kl_coef=0.3))
    assert trainer.step(plan_of(make_groups(5))).values()["reference_kl"] == 0.0


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_recomputed_layers_drop_the_same_inputs(checkpointing):
    lora = LoraConfig(rank=3, alpha=6.0, dropout=0.4)
    found = {}
    for mode in ("off", checkpointing):
        model, adapter = adapted(lora=lora)
        torch.manual_seed(11)
        found[mode] = gradients_of(model, adapter, plan_of(make_groups(3)), checkpointing=mode)
    assert found["off"][0] == pytest.approx(found[checkpointing][0], abs=1e-6)
    for name, gradient in found["off"][1].items():
        assert torch.allclose(gradient, found[checkpointing][1][name], atol=1e-5)


def test_dropout_is_off_without_gradient():
    model, _ = adapted(lora=LoraConfig(rank=3, alpha=6.0, dropout=0.4))
    plain, _ = adapted()
    assert torch.equal(logits_of(model), logits_of(plain))
    first, second = (model(input_ids=torch.arange(9)[None], use_cache=False).logits for _ in range(2))
    assert not torch.equal(first, second)


def test_a_trainer_goes_on_from_its_state():
    plans = [plan_of(make_groups(step), step) for step in (1, 2, 3)]
    model, adapter = adapted()
    straight = trainer_for(model, adapter=adapter, learning_rate=1e-2)
    for plan in plans:
        straight.step(plan)
    model, adapter = adapted()
    first = trainer_for(model, adapter=adapter, learning_rate=1e-2)
    for plan in plans[:2]:
        first.step(plan)
    state = copy.deepcopy(first.state_dict())
    fresh = tiny_model("qwen3")
    second = trainer_for(fresh, adapter=TrainedAdapter(fresh, LORA, base="x"), learning_rate=1e-2)
    second.load_state_dict(state)
    second.step(plans[2])
    assert all(torch.equal(second.weights()[name], tensor) for name, tensor in straight.weights().items())


def test_without_peft_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'penstock\[lora\]'"):
        TrainedAdapter(tiny_model("llama"), LORA, base="x")


def test_what_can_not_be_adapted_is_refused():
    with pytest.raises(UserError, match="no such layer"):
        TrainedAdapter(tiny_model("llama"), LoraConfig(targets=("query",)), base="x")


def test_a_warm_up_runs_the_reference_too(monkeypatch):
    monkeypatch.setattr("penstock.trainer.forward.packed_model.compile_layers", lambda model: None)
    model, adapter = adapted()
    algorithm = AlgorithmConfig(**CLIP, kl_coef=0.3)
    trainer = trainer_for(model, adapter=adapter, algorithm=algorithm, compile=True, micro_batch_tokens=64)
    passes = []
    off = adapter.off
    monkeypatch.setattr(adapter, "off", lambda: passes.append(torch.is_grad_enabled()) or off())
    before = {name: tensor.clone() for name, tensor in adapter.tensors().items()}
    trainer.warm_up()
    assert passes == [False]
    assert all(torch.equal(before[name], tensor) for name, tensor in adapter.tensors().items())
