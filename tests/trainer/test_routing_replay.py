"""Routes on their whole way: recorded by an engine, carried by turns, replayed by steps, shown in their metrics."""

import asyncio
import copy

import msgspec
import numpy as np
import pytest
import torch

from penstock.algorithms.config import AlgorithmConfig
from penstock.errors import BlobLost, UserError
from penstock.records import Episode, Group, Score, ScoredGroup, StepPlan, metric_values
from penstock.records.routing_records import fetch_routes, store_routes
from penstock.rollout.episode_rollout import Rollout
from penstock.trainer.config import TrainerConfig
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.trainer.step.packing import plan_step
from penstock.trainer.step.step_preparation import Preparation
from tests.engines.embedded.tiny import make_engine
from tests.models.moe import VOCAB, moe_model
from tests.records.builders import with_turns
from tests.rollout.contract import spec_of
from tests.trainer.builders import tiny_model
from tests.trainer.test_policy_trainer import trainer_for

TURNS = 2


class Numbers:
    """A tokenizer of which only decoding is asked."""

    stop_token_ids = ()

    def decode(self, token_ids):
        return " ".join(map(str, token_ids))


async def episodes_of(engine, group: int, count: int) -> list[Episode]:
    """Two turns each, the second after three tokens of somebody else."""
    prompt = [(group * 7 + 3 * n) % VOCAB for n in range(9)]

    async def episode(index: int) -> Episode:
        spec = msgspec.structs.replace(spec_of(), group=group, index=index)
        rollout = Rollout(spec, engine, Numbers())
        context = prompt
        for _ in range(TURNS):
            turn = await rollout.generate(context, max_tokens=5 + index, temperature=1.0, seed=index)
            context = [*turn.token_ids.tolist(), 1, 2, 3]
        return Episode(task_id=str(group), turns=rollout.turns, index=index)

    return list(await asyncio.gather(*(episode(index) for index in range(count))))


def sample_groups(engine) -> list[ScoredGroup]:
    async def main() -> list[ScoredGroup]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(engine.run())
            groups = []
            for number in range(2):
                episodes = await episodes_of(engine, number, 3)
                group = Group(number=number, task=spec_of().task, episodes=tuple(episodes))
                scores = tuple(Score(value=float(index)) for index in range(3))
                groups.append(ScoredGroup(group=group, scores=scores))
            await engine.close()
        return groups

    return asyncio.run(main())


@pytest.fixture(scope="module")
def recorded():
    """A model, an engine that has served it, and what it sampled."""
    model = moe_model("qwen3-moe")
    engine = make_engine(copy.deepcopy(model), record_routing="on")
    return model, engine, sample_groups(engine)


def run_step(model, engine, groups, *, reference=None, expects_routes=True, **config):
    settings = {"micro_batch_tokens": 64, "learning_rate": 0.0, **config}
    trainer = PolicyTrainer(
        copy.deepcopy(model),
        config=TrainerConfig(**settings),
        algorithm=AlgorithmConfig(kl_coef=0.1 if reference is not None else 0.0),
        total_steps=10,
        reference=copy.deepcopy(reference),
        blobs=engine.blobs,
    )
    if expects_routes:
        trainer.expect_routes()
    plan: StepPlan = plan_step(1, groups, micro_batch_tokens=settings["micro_batch_tokens"])[0]
    assert len(plan.micro_batches) > 1
    return metric_values(trainer.step(plan).metrics)


@pytest.mark.parametrize("checkpointing", ["off", "full"])
def test_every_choice_of_a_step_is_replayed(recorded, checkpointing: str) -> None:
    model, engine, groups = recorded
    metrics = run_step(model, engine, groups, checkpointing=checkpointing, passes=2)
    assert (metrics["routing_replayed"], metrics["routing_fallbacks"]) == (1.0, 0.0)
    assert metrics["routing_flipped"] == 0.0
    assert metrics["logprob_gap_max"] < 1e-4
    assert metrics["routing_gap"] == pytest.approx(metrics["routing_gap_without"], abs=1e-6)
    assert metrics["routing_gap"] < 1e-4


def test_turns_refer_to_the_routes_of_those_before_them(recorded) -> None:
    for episode in (episode for group in recorded[2] for episode in group.group.episodes):
        first, second = episode.turns
        assert [ref.blob.key for ref in second.routing] == [
            f"group-{first.id[1]}/{turn.id}.routes" for turn in episode.turns
        ]
        assert second.routing[0] == first.routing[0]
        (sample,) = episode.samples()
        assert sample.routing == second.routing
        assert sample.routing[-1].end == len(sample.token_ids) - 1


def test_flips_after_the_weights_have_moved_are_shown(recorded) -> None:
    model, engine, groups = recorded
    moved = copy.deepcopy(model)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in moved.parameters():
            weight.mul_(1 + 0.2 * torch.randn(weight.shape, generator=noise))
    metrics = run_step(moved, engine, groups)
    assert metrics["routing_replayed"] == 1.0
    assert 0.02 < metrics["routing_flipped"] < 0.8
    assert metrics["routing_gap"] > 0
    assert metrics["routing_gap"] != metrics["routing_gap_without"]


def test_a_reference_replays_when_it_is_asked_to(recorded) -> None:
    """With routes of other experts, the policy and the same model as its reference agree only if both replay."""
    model, engine, groups = recorded
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in moved.named_parameters():
            if "gate.weight" in name:
                weight.neg_()
    free = run_step(moved, engine, groups, reference=moved)
    replayed = run_step(moved, engine, groups, reference=moved, replay_reference=True)
    assert free["routing_flipped"] > 0.2
    assert replayed["reference_kl"] < 1e-6 < 1e-3 < free["reference_kl"]


def without_routes(scored: ScoredGroup) -> ScoredGroup:
    return with_turns(scored, lambda turn: msgspec.structs.replace(turn, routing=()))


def test_groups_without_a_record_are_fallbacks(recorded) -> None:
    model, engine, groups = recorded
    metrics = run_step(model, engine, [groups[0], without_routes(groups[1])])
    assert 0.3 < metrics["routing_replayed"] < 0.7
    assert metrics["routing_fallbacks"] == pytest.approx(1 - metrics["routing_replayed"])
    none = [without_routes(group) for group in groups]
    metrics = run_step(model, engine, none)
    shown = {name: value for name, value in metrics.items() if name.startswith("routing_")}
    assert shown == {"routing_replayed": 0.0, "routing_fallbacks": 1.0}
    metrics = run_step(model, engine, none, expects_routes=False)
    assert not any(name.startswith("routing_") for name in metrics)


def test_a_dense_model_is_not_expected_to_have_routes(recorded) -> None:
    trainer = trainer_for(tiny_model("llama"))
    with pytest.raises(UserError, match="the trained model has no experts"):
        trainer.expect_routes()


def test_routes_of_another_model_stop_a_step_before_it_trains(recorded) -> None:
    _, engine, groups = recorded
    with pytest.raises(
        BlobLost, match="blob group-0/.*routes is a record of Qwen3MoeForCausalLM.*MixtralForCausal"
    ):
        run_step(moe_model("mixtral"), engine, groups)


def with_other_experts(scored: ScoredGroup, blobs, index: int) -> ScoredGroup:
    """One episode of the group as if an engine that chose other experts had computed it, its prompt too."""
    episodes = list(scored.group.episodes)
    turns = []
    for number, turn in enumerate(episodes[index].turns):
        end = turn.routing[-1].end
        routes = np.concatenate([fetch_routes(blobs, ref) for ref in turn.routing])
        shape = turn.routing[0].shape
        ref = store_routes(blobs, f"other/{index}.{number}", (routes + 1) % shape.num_experts, shape, start=0)
        assert ref.end == end
        turns.append(msgspec.structs.replace(turn, routing=(ref,)))
    episodes[index] = msgspec.structs.replace(episodes[index], turns=tuple(turns))
    return msgspec.structs.replace(
        scored, group=msgspec.structs.replace(scored.group, episodes=tuple(episodes))
    )


@pytest.mark.parametrize("micro_batch_tokens", [64, 400])
def test_each_episode_of_a_group_is_computed_with_its_own_experts(
    recorded, monkeypatch: pytest.MonkeyPatch, micro_batch_tokens: int
) -> None:
    """Whether its prompt is laid with the others' or not, and where the row is longer than planned."""
    model, engine, groups = recorded
    mixed = [with_other_experts(groups[0], engine.blobs, 1), groups[1]]
    rows = []
    pack = Preparation._lay_out
    monkeypatch.setattr(Preparation, "_lay_out", lambda self, plan: rows.append(pack(self, plan)) or rows[-1])
    plan = plan_step(1, mixed, micro_batch_tokens=micro_batch_tokens)[0]
    logprobs = {}
    for shared in (True, False):
        trainer = PolicyTrainer(
            copy.deepcopy(model),
            config=TrainerConfig(micro_batch_tokens=micro_batch_tokens, shared_prompts=shared),
            algorithm=AlgorithmConfig(),
            total_steps=10,
            blobs=engine.blobs,
        )
        laid = trainer._prepare(plan)
        with torch.no_grad():
            for one in laid:
                of_row = trainer._policy(one.row).logprobs.split(list(one.row.counts))
                for sequence, values in zip(one.row.sequences, of_row, strict=True):
                    logprobs.setdefault((sequence.group, sequence.episode), []).append(values)
    assert len(logprobs) == 6
    assert rows[0][0].num_shared_tokens > 0
    assert all(row.input_ids.shape[1] <= micro_batch_tokens or len(row.sequences) == 1 for row in rows[0])
    for shared_values, alone in logprobs.values():
        torch.testing.assert_close(shared_values, alone, rtol=0, atol=1e-5)
