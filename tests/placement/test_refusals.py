from typing import Any, ClassVar

import pytest
from transformers import GPT2Config, LlamaConfig, Qwen3_5TextConfig, Qwen3MoeConfig

from penstock.config.root import PenstockConfig
from penstock.engines.kinds import EngineKind
from penstock.errors import ConfigError, UserError
from penstock.models.support import RawConfig
from penstock.placement import refusals
from penstock.placement.gpus import Gpu
from penstock.placement.refusals import (
    check_capabilities,
    check_model,
    check_num_ranks,
    check_ranks,
    needed_capabilities,
)


def config(**sections: Any) -> PenstockConfig:
    return PenstockConfig.model_validate(sections)


def able(*capabilities: str) -> EngineKind:
    return EngineKind(opener="nowhere:none", can=lambda section, lora: capabilities)


def on_kind(monkeypatch: pytest.MonkeyPatch, *capabilities: str) -> dict[str, Any]:
    """The section of a kind by path with these capabilities."""
    monkeypatch.setattr(f"{__name__}.KIND", able(*capabilities))
    return {"kind": f"{__name__}:KIND"}


KIND = able()


def test_what_a_plain_run_needs() -> None:
    assert set(needed_capabilities(config())) == {"logprobs", "versions", "seed", "interrupt:inflight"}


def test_an_evaluation_needs_what_its_answers_are_drawn_with_and_nothing_of_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sections = {
        "rollout": {"top_p": 0.9, "stop": ["."]},
        "eval": {"temperature": 0, "tasks": {}},
        "model": {"lora": {}},
        "sync": {"interrupt": "inflight_recompute"},
    }
    needed = needed_capabilities(config(**sections, engine={"record_routing": "on"}), trains=False)
    assert needed == {
        "seed": "run.seed=0",
        "truncation": "rollout.top_p=0.9",
        "stop_strings": "rollout.stop=['.']",
        "greedy": "eval.temperature=0",
    }
    check_capabilities(config(**sections, engine=on_kind(monkeypatch, *needed)), trains=False)
    lacking = config(**sections, engine=on_kind(monkeypatch, "seed", "truncation", "stop_strings"))
    with pytest.raises(UserError, match=r"^engine.kind=.*:KIND lacks greedy \(for eval.temperature=0\); "):
        check_capabilities(lacking, trains=False)


@pytest.mark.parametrize(
    ("sections", "capability", "why"),
    [
        ({"rollout": {"top_p": 0.9}}, "sampling_mask", "rollout.top_p=0.9"),
        ({"rollout": {"top_k": 4}}, "sampling_mask", "rollout.top_k=4"),
        ({"model": {"lora": {}}}, "adapters", "model.lora"),
        ({"model": {"lora": {"dora": True}}}, "dora", "model.lora.dora=true"),
        ({"sync": {"selection": "delta"}}, "delta", "sync.selection=delta"),
        ({"trainer": {"parallel": {"shard": 2}}}, "shards", "trainer.parallel, of 2 ranks"),
        ({"rollout": {"stop": ["\n"]}}, "stop_strings", "rollout.stop=['\\n']"),
        ({"eval": {"temperature": 0, "tasks": {}}}, "greedy", "eval.temperature=0"),
    ],
)
def test_what_a_kind_lacks_is_refused_with_the_setting(
    sections: dict[str, Any], capability: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = needed_capabilities(config(**sections))
    assert needed[capability] == why
    check_capabilities(config(**sections, engine=on_kind(monkeypatch, *needed)))
    rest = [name for name in needed if name != capability]
    with pytest.raises(UserError) as caught:
        check_capabilities(config(**sections, engine=on_kind(monkeypatch, *rest)))
    assert str(caught.value) == (
        f"engine.kind={__name__}:KIND lacks {capability} (for {why}); change the setting, or choose another "
        "engine.kind"
    )


def test_an_interrupt_that_a_kind_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(UserError) as caught:
        check_capabilities(config(engine={"kind": "vllm"}, model={"lora": {}}))
    assert str(caught.value) == (
        "sync.interrupt must be drain with engine.kind=vllm and model.lora, got inflight"
    )
    check_capabilities(config(engine={"kind": "vllm"}, model={"lora": {}}, sync={"interrupt": "drain"}))
    check_capabilities(config(engine={"kind": "vllm"}))


@pytest.mark.parametrize("interrupt", ["inflight_recompute", "abort_resume"])
def test_experts_of_vllm_are_not_recorded_where_it_computes_again(interrupt: str) -> None:
    """It would compute with other experts than the record's, and the trainer with the record's."""
    engine = {"kind": "vllm", "record_routing": "on"}
    with pytest.raises(UserError) as caught:
        check_capabilities(config(engine=engine, sync={"interrupt": interrupt}))
    assert str(caught.value) == (
        "sync.interrupt must be inflight or drain or abort_retry with engine.kind=vllm and "
        f"engine.record_routing=on, got {interrupt}"
    )
    check_capabilities(config(engine={"kind": "vllm"}, sync={"interrupt": interrupt}))


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"rollout": {"top_p": 0.9}}, "engine.kind=vllm lacks sampling_mask (for rollout.top_p=0.9)"),
        ({"sync": {"selection": "delta"}}, "engine.kind=vllm lacks delta (for sync.selection=delta)"),
        (
            {"model": {"lora": {"dora": True}}, "sync": {"interrupt": "drain"}},
            "engine.kind=vllm lacks dora (for model.lora.dora=true)",
        ),
    ],
)
def test_what_vllm_lacks_is_known_before_a_server_starts(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        check_capabilities(config(**sections, engine={"kind": "vllm"}))
    assert str(caught.value).startswith(sentence)


def test_engines_beside_others_must_be_able_too() -> None:
    with pytest.raises(UserError, match=r"^engine.kind=vllm lacks sampling_mask"):
        check_capabilities(config(rollout={"top_p": 0.9}, engine={"beside": {"vllm": 1}}))


def test_vllm_serves_no_merged_adapter() -> None:
    with pytest.raises(UserError, match=r"lacks merged_adapters \(for model.adapter=a\)"):
        check_capabilities(config(engine={"kind": "vllm"}, model={"adapter": "a"}), trains=False)


def test_the_embedded_engine_has_all_that_a_config_can_ask_for() -> None:
    everything = config(
        rollout={"top_p": 0.9, "stop": ["."]},
        eval={"temperature": 0, "tasks": {}},
        sync={"interrupt": "inflight_recompute", "selection": "delta"},
        model={"lora": {"dora": True}},
        trainer={"parallel": {"shard": 2}},
        engine={"record_routing": "on"},
    )
    check_capabilities(everything)


DENSE = LlamaConfig(num_attention_heads=4, num_key_value_heads=2)


class PackedPlan(LlamaConfig):  # type: ignore[misc]
    base_model_tp_plan: ClassVar[dict[str, str]] = {"layers.*.mlp.gate_up_proj": "packed_colwise"}


def ranked(parallel: dict[str, int], **sections: Any) -> PenstockConfig:
    trainer = {"parallel": parallel}
    whole = {"tasks": {"source": "a.jsonl"}, "model": {"name": "m"}, "trainer": trainer, **sections}
    return PenstockConfig.model_validate(whole)


def test_sharded_ranks_over_a_collective_are_fine() -> None:
    check_ranks(ranked({"shard": 2, "data": 2}, sync={"transport": "collective"}), DENSE)


def test_sequences_of_a_mixture_are_not_split() -> None:
    model = Qwen3MoeConfig(num_experts=4, num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(ConfigError) as refusal:
        check_ranks(ranked({"context": 2}), model)
    assert str(refusal.value) == (
        "a mixture of experts can be trained with trainer.parallel.data and shard, got context=2"
    )
    check_ranks(ranked({"data": 2, "shard": 2}), model)


@pytest.mark.parametrize(
    ("model", "sections", "sentence"),
    [
        (
            Qwen3MoeConfig(num_experts=4, num_attention_heads=4, num_key_value_heads=2),
            {},
            "a mixture of experts can be trained with trainer.parallel.data and shard, got tensor=2",
        ),
        (
            GPT2Config(),
            {},
            "trainer.parallel.tensor must be 1 for gpt2, for which transformers has no plan, got tensor=2; use "
            "trainer.parallel.shard",
        ),
        (
            PackedPlan(),
            {},
            "trainer.parallel.tensor must be 1 for llama, whose plan splits weights by packed_colwise, got tensor=2; use "
            "trainer.parallel.shard",
        ),
        (
            DENSE,
            {"model": {"name": "m", "lora": {}}},
            "an adapter can be trained with trainer.parallel.data, shard and context, got tensor=2",
        ),
        (
            DENSE,
            {"trainer": {"parallel": {"tensor": 2}, "compile": True}},
            "trainer.compile must be off with trainer.parallel.tensor, got on (tensor=2)",
        ),
    ],
)
def test_what_can_not_split_its_matrices_is_refused(
    model: Any, sections: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_ranks(ranked({"tensor": 2}, **sections), model)
    assert str(refusal.value) == sentence
    check_ranks(ranked({"tensor": 2, "shard": 2}), DENSE)


GPU = Gpu(name="a GPU", total_bytes=10**10, free_bytes=10**10)
MIXTURE = Qwen3MoeConfig(num_experts=4, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "why_missing", lambda device, gpus: None if gpus else "needs a GPU")


RAW = RawConfig(model_type="qwen3_moe", num_experts=4)


@pytest.mark.parametrize("model", [Qwen3_5TextConfig(), RawConfig(model_type="qwen3_5_text")])
@pytest.mark.parametrize("kind", ["embedded", "vllm"])
def test_a_family_that_can_not_be_trained_is_refused_whichever_engine_serves_it(
    kind: str, model: Any
) -> None:
    with pytest.raises(
        UserError, match="^Qwen3_5ForCausalLM can't be served: not all of its layers are plain"
    ):
        check_model(config(engine={"kind": kind}), model)


def test_an_evaluation_on_vllm_takes_a_family_that_only_vllm_serves() -> None:
    check_model(config(engine={"kind": "vllm"}), Qwen3_5TextConfig(), trains=False)
    with pytest.raises(UserError, match="^Qwen3_5ForCausalLM can't be served"):
        check_model(config(), Qwen3_5TextConfig(), trains=False)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("model", [MIXTURE, RAW])
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_mixture_on_vllm_needs_a_gpu(device: str, model: Any) -> None:
    engine = {"kind": "vllm", "device": device}
    with pytest.raises(UserError) as refusal:
        check_model(config(engine=engine), model)
    assert str(refusal.value) == (
        "engine.kind=vllm lacks routing (for engine.record_routing=on) on a CPU; change the setting, or choose "
        "another engine.kind"
    )
    check_model(config(engine={**engine, "record_routing": "off"}), model)
    check_model(config(engine={"kind": "embedded"}), model)
    check_model(config(engine={**engine, "vllm": {"urls": ["http://h:8000"]}}), model)


@pytest.mark.usefixtures("no_gpu")
def test_a_mixture_on_vllm_is_served_on_a_gpu_and_where_none_is_known() -> None:
    check_model(config(engine={"kind": "vllm"}), MIXTURE, (GPU,))
    check_model(config(engine={"kind": "vllm"}, launcher={"kind": "ray"}), MIXTURE)


@pytest.mark.parametrize("model", [LlamaConfig(), RawConfig(model_type="llama")])
def test_experts_that_are_not_there_can_not_be_recorded(model: Any) -> None:
    recorded = config(engine={"record_routing": "on"})
    with pytest.raises(UserError) as refusal:
        check_model(recorded, model)
    assert str(refusal.value) == (
        "engine.record_routing=on needs a model with experts, and builtin has none; use auto or off"
    )
    check_model(recorded, RawConfig(model_type="mixtral"))  # its class may have them


@pytest.mark.parametrize("model", [MIXTURE, RAW])
def test_ranks_are_checked_by_the_models_config(model: Any) -> None:
    with pytest.raises(ConfigError, match="^a mixture of experts can be trained with .* got tensor=2$"):
        check_model(ranked({"tensor": 2}), model)


@pytest.mark.parametrize("model", [MIXTURE, RAW])
def test_adapters_on_all_layers_of_a_mixture_are_refused(model: Any) -> None:
    with pytest.raises(UserError) as refusal:
        check_model(config(model={"lora": {}}), model)
    assert str(refusal.value) == (
        "model.lora.targets=all-linear can't be used with qwen3_moe: adapters on the experts of a mixture are not "
        "supported; name its other layers, such as [q_proj, v_proj, o_proj]"
    )
    check_model(config(model={"lora": {"targets": ["q_proj"]}}), model)
    check_model(config(model={"adapter": "folder"}), model)


def test_a_plan_is_looked_for_where_the_class_is_known() -> None:
    raw = RawConfig(model_type="gpt2", num_attention_heads=12)
    check_ranks(ranked({"tensor": 2}), raw)
    check_ranks(ranked({"context": 3}), RawConfig(num_attention_heads=None))  # its class may have a number
    with pytest.raises(ConfigError, match="must be 1 for gpt2, for which transformers has no plan"):
        check_ranks(ranked({"tensor": 2}), GPT2Config())


def test_one_machine_has_so_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "usable_cores", lambda: 2)
    check_num_ranks(ranked({"data": 8}), ())
    with pytest.raises(UserError) as refusal:
        check_num_ranks(ranked({"data": 64}), ())
    assert str(refusal.value) == (
        "trainer.parallel has 64 ranks, and this machine can have 8 on a CPU (4 for each core); lower "
        "trainer.parallel, or name a launcher that reaches other machines"
    )
    check_num_ranks(ranked({"data": 64}, launcher={"kind": "ray"}), ())
    with pytest.raises(UserError, match=r"has 3 ranks, and this machine shows 2 GPUs; lower"):
        check_num_ranks(ranked({"data": 3}), (GPU, GPU))
    check_num_ranks(ranked({"data": 2}), (GPU, GPU))
