import asyncio
import os
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from penstock.errors import ConfigError, DiskFull, OutOfMemory, StepTooLarge, UserError
from penstock.models.tensor_file import write_tensors
from penstock.observe.event_queue import EventQueue
from penstock.observe.events import LogLine
from penstock.records import AdapterSpec, StepPlan, StepResult
from penstock.sync.config import SyncConfig
from penstock.trainer.checkpoint.checkpoint_state import take_state
from penstock.trainer.checkpoint.host_copies import HostCopier
from penstock.trainer.checkpoint.state_files import load_state, write_state
from penstock.trainer.config import TrainerConfig
from penstock.trainer.trainer_start import TrainerStart
from penstock.worker import trainer_role as worker
from penstock.worker.trainer_role import bind_broadcasts
from penstock.worker.trainer_service import TrainerService, record_parts
from tests.small_disk import enlarge, small_filesystem
from tests.trainer.builders import tiny_model
from tests.trainer.parallel.rank_processes import on_ranks

PLAN = StepPlan(step=1, publishes=1, scores=(), micro_batches=(), num_loss_tokens=0, num_sequences=0)


class Publisher:
    def __init__(self):
        self.versions = []

    def snapshot(self, version, weights):
        self.versions.append(version)

    def send(self, version):
        assert threading.current_thread().name.startswith("publish")
        self.sent = version


class Trainer:
    checkpoint_ranks = None
    is_first = True
    saved_bytes = 1600

    def __init__(self, error=None):
        self.done = []
        self._error = error

    def weights(self):
        return {}

    @property
    def trained(self):
        return self

    def starting_weights(self):
        return [self.weights()]

    def warm_up(self):
        if self._error is not None:
            raise self._error
        self.done.append("warm-up")

    def step(self, plan):
        self.done.append("step")
        return StepResult(step=plan.step, metrics={}, seconds={"forward": 1.0})


class Channel:
    def serve(self, method, handler):
        pass

    def on_close(self, callback):
        pass


START = TrainerStart(
    model="",
    device="cpu",
    threads=1,
    total_steps=1,
    seed=0,
    folder="",
    sync={"transport": "shared_memory"},
    wire_dtype="float32",
    trainer={"dtype": "float32", "compile": "off"},
    algorithm={},
)


@pytest.fixture
def start(monkeypatch):
    """The service around a trainer, and the failures that it told of at once."""

    async def begin(trainer):
        failures = []
        events = EventQueue().of("trainer")
        service = TrainerService(trainer, Publisher(), None, events)
        monkeypatch.setattr(worker, "build_service", lambda request, events: service)
        await worker.start(Channel(), START, failures.append, events)
        await asyncio.wait([asyncio.wrap_future(service.warmed_up)])
        await asyncio.sleep(0)
        return service, failures

    return begin


def test_a_config_that_nobody_resolved_is_refused():
    unresolved = msgspec.structs.replace(START, wire_dtype="auto", trainer={"compile": "off"})
    with pytest.raises(ConfigError, match=r"trainer\.dtype and engine\.dtype, got 'auto'"):
        asyncio.run(worker.start(Channel(), unresolved, [].append, EventQueue().of("trainer")))


def test_steps_come_after_the_warm_up_and_each_ends_with_a_snapshot(start):
    trainer = Trainer()

    async def main():
        service, failures = await start(trainer)
        result = await service.step(PLAN)
        assert failures == []
        assert service._publisher.versions == [0, 1]
        assert result.seconds.keys() == {"forward", "snapshot"}

    asyncio.run(main())
    assert trainer.done == ["warm-up", "step"]


def test_a_plan_of_another_policy_is_refused(start):
    async def main():
        service, _ = await start(Trainer())
        with pytest.raises(ValueError, match="trains policy 'policy', got a plan of 'critic'"):
            await service.step(msgspec.structs.replace(PLAN, policy="critic"))
        assert service._publisher.versions == [0]

    asyncio.run(main())


def test_a_plan_that_publishes_nothing_takes_no_snapshot(start):
    async def main():
        service, _ = await start(Trainer())
        await service.step(msgspec.structs.replace(PLAN, publishes=None))
        assert service._publisher.versions == [0]

    asyncio.run(main())


def test_weights_are_sent_beside_the_steps(start):
    async def main():
        service, _ = await start(Trainer())
        await service.send(0)
        assert service._publisher.sent == 0

    asyncio.run(main())


def test_a_warm_up_that_fails_is_told_at_once(start):
    async def main():
        _, failures = await start(Trainer(TypeError("no compiler here")))
        assert [str(failure) for failure in failures] == ["no compiler here"]

    asyncio.run(main())


def test_the_parts_of_a_step_lie_end_to_end_inside_it():
    queue = EventQueue()
    events = queue.of("trainer")
    begin = events.now() - 10
    record_parts(events, 3, begin, {"prepare": 1.0, "forward": 4.0, "snapshot": 100.0})
    step, *parts = queue.take().events
    assert (step.name, step.start, step.attributes) == ("step", begin, {"step": 3})
    assert [(part.name, part.start - begin) for part in parts] == [
        ("prepare", 0.0),
        ("forward", 1.0),
        ("snapshot", 5.0),
    ]
    assert parts[0].time == parts[1].start
    assert parts[2].time == step.time


@pytest.mark.parametrize("what", ["step", "save"])
def test_running_out_of_memory_in_the_warm_up_is_answered_to_who_asks_next(start, what):
    async def main():
        service, failures = await start(Trainer(torch.OutOfMemoryError("out of memory")))
        assert failures == []
        with pytest.raises(UserError, match="the trainer ran out of GPU memory: set trainer.checkpointing"):
            await (service.step(PLAN) if what == "step" else service.save(""))

    asyncio.run(main())


class Full(Trainer):
    """Has no room for a step, before or after it has changed weights."""

    def __init__(self, changed):
        super().__init__()
        self._changed = changed

    def step(self, plan):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has …")

    def undo_step(self):
        self.done.append("undone")
        return not self._changed


@pytest.mark.parametrize("changed", [False, True])
def test_a_step_without_room_says_whether_it_can_be_tried_again(start, changed):
    async def main():
        trainer = Full(changed)
        service, _ = await start(trainer)
        with pytest.raises(
            OutOfMemory, match="ran out of GPU memory .tried to allocate 2.50 GiB.: set"
        ) as raised:
            await service.step(PLAN)
        assert isinstance(raised.value, StepTooLarge) is not changed
        assert trainer.done == ["warm-up", "undone"]

    asyncio.run(main())


class Saving(Trainer):
    def __init__(self, error=None):
        super().__init__()
        self._save_error = error

    def save(self, folder):
        (folder / "model.safetensors").write_text("weights")
        if self._save_error is not None:
            raise self._save_error
        return {}


class Tokenizer:
    def save(self, folder):
        (folder / "tokenizer.json").write_text("tokens")


def save_with(trainer, folder):
    service = TrainerService(trainer, Publisher(), Tokenizer(), EventQueue().of("trainer"))
    asyncio.run(service.save(str(folder)))


def test_a_model_is_saved_whole_or_not_at_all(tmp_path):
    with pytest.raises(OSError, match="broken"):
        save_with(Saving(OSError(5, "broken")), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    save_with(Saving(), tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "checksums.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    (tmp_path / "model" / "old").touch()
    save_with(Saving(), tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert not (tmp_path / "model" / "old").exists()


class Heavy(Saving):
    """Its weights take 900,000 bytes."""

    def save(self, folder):
        path = folder / "model.safetensors"
        return {path: write_tensors(path, {"w": torch.ones(225_000)})}


def test_a_model_that_finds_no_room_says_what_it_needs_and_is_saved_once_there_is(tmp_path):
    with small_filesystem(tmp_path / "disk", "512k") as disk:
        service = TrainerService(Heavy(), Publisher(), Tokenizer(), EventQueue().of("trainer"))
        folder = disk / "run" / "model"
        with pytest.raises(
            DiskFull,
            match=r"run/model can't be written: model.safetensors needs 900,\d\d\d bytes, and 5\d\d,\d\d\d bytes",
        ):
            asyncio.run(service.save(str(folder)))
        assert list(folder.parent.iterdir()) == []
        enlarge(disk)
        asyncio.run(service.save(str(folder)))
        assert (folder / "model.safetensors").stat().st_size > 900_000


def test_a_library_that_gives_the_systems_words_alone_is_understood(tmp_path):
    """As tokenizers and safetensors, which are written in Rust."""
    with pytest.raises(DiskFull, match="No space left"):
        save_with(Saving(Exception("No space left on device (os error 28)")), tmp_path / "model")
    with pytest.raises(DiskFull, match="quota"):
        save_with(Saving(Exception("Disk quota exceeded (os error 122)")), tmp_path / "model")


def test_a_disk_that_is_full_before_the_weights_are_written_still_tells_what_they_need(tmp_path):
    with pytest.raises(
        DiskFull,
        match=r"model can't be written: .*; its weights need 1,600 bytes, and [\d,]+ bytes are free$",
    ):
        save_with(Saving(OSError(28, "No space left on device")), tmp_path / "model")


def test_a_checkpoint_is_begun_and_waited_for(tmp_path):
    trainer = Saving()
    trainer.checkpoint_state = lambda: take_state(HostCopier(), {"num_updates": 3}, {"w": torch.ones(2)})
    trainer.write_config = lambda folder: None
    trainer.write_state = lambda folder, state: write_state(folder, state.plain, state.tensors)
    trainer.gather = lambda own: own
    trainer.write_weights = lambda folder, weights: trainer.done.append(weights["w"].tolist()) or {}
    service = TrainerService(trainer, Publisher(), Tokenizer(), EventQueue().of("trainer"))
    folder = tmp_path / "checkpoints" / "step-3"

    async def main():
        await service.checkpoint(str(folder), {"progress.json": b"{}"})
        return await service.checkpoint_written()

    assert asyncio.run(main()).num_bytes > 0
    assert trainer.done == ["warm-up", [1.0, 1.0]]
    assert load_state(folder / "trainer") == {"num_updates": 3}
    assert (folder / "progress.json").read_bytes() == b"{}"
    assert (folder / "model" / "tokenizer.json").read_text() == "tokens"


def test_a_checkpoint_of_16_bits_is_saved_in_16_bits(tiny_model, tmp_path):
    """It is trained with float32 weights all the same."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "half")
    start = msgspec.structs.replace(START, model=str(tmp_path / "half"), folder=str(tmp_path))
    service = worker.build_service(start, EventQueue().of("trainer"))
    try:
        assert {weight.dtype for weight in service._trainer.weights().values()} == {torch.float32}
        asyncio.run(service.save(str(tmp_path / "saved")))
    finally:
        service._publisher.close()
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


LORA = {"rank": 2, "targets": ["q_proj"]}


@pytest.fixture
def adapted(tiny_model, tmp_path):
    """Opens services that train an adapter of the tiny model."""
    opened = []

    def build(**changes):
        start = msgspec.structs.replace(
            START, model=str(tiny_model), folder=str(tmp_path), version=4, lora=LORA, **changes
        )
        opened.append(worker.build_service(start, EventQueue().of("trainer")))
        return opened[-1]

    yield build
    for service in opened:
        service._publisher.close()


def test_the_base_is_published_first_and_then_only_the_adapter(adapted, tiny_model):
    from penstock.models.load import load_model
    from penstock.models.published import published_tensors

    service = adapted(wire_dtype="bfloat16")
    full, first = (asyncio.run(service.publish(version)) for version in (4, 5))
    assert (full.selection, full.base, full.adapter) == ("full", None, None)
    assert {spec.name for spec in full.tensors} == set(published_tensors(load_model(str(tiny_model))))
    assert (first.selection, first.base) == ("adapter", 4)
    assert first.adapter == AdapterSpec(rank=2, alpha=32.0)
    names = {spec.name for spec in first.tensors}
    assert names == set(service._trainer.weights())
    assert all(".q_proj.lora_" in name for name in names)
    assert {spec.dtype for spec in (*full.tensors, *first.tensors)} == {"bfloat16"}
    assert first.fingerprint.keys() == names
    asyncio.run(service.release(4))
    service._publisher.snapshot(6, service._trainer.weights())
    assert asyncio.run(service.publish(6)).base == 4


def test_weights_that_stay_are_loaded_as_they_compute(adapted):
    service = adapted(trainer={"dtype": "bfloat16", "compile": "off"})
    below, own = service._trainer.trained.starting_weights()
    assert {tensor.dtype for tensor in (*below.values(), *own.values())} == {torch.bfloat16}
    assert {master.dtype for master in service._trainer._optimizer._masters} == {torch.float32}


def test_an_adapter_is_saved_and_a_checkpoint_of_it_goes_on(adapted, tmp_path):
    service = adapted()
    with torch.no_grad():
        for tensor in service._trainer.weights().values():
            tensor += 0.25
    folder = tmp_path / "step-3"

    async def checkpoint():
        await service.checkpoint(str(folder), {})
        await service.checkpoint_written()

    asyncio.run(checkpoint())
    saved = {path.name for path in (folder / "model").iterdir()}
    assert saved >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer_config.json"}
    assert not saved & {"config.json", "model.safetensors"}
    continued = adapted(adapter=str(folder / "model"))
    resumed = adapted(adapter="/gone", checkpoint=str(folder))
    for name, tensor in service._trainer.weights().items():
        assert torch.equal(continued._trainer.weights()[name], tensor)
        assert torch.equal(resumed._trainer.weights()[name], tensor)


def test_a_penalty_on_an_adapter_loads_no_second_model(adapted, monkeypatch):
    loaded = []
    load = worker.load_model
    monkeypatch.setattr(
        worker, "load_model", lambda *args, **kwargs: loaded.append(args) or load(*args, **kwargs)
    )
    adapted(algorithm={"kl_coef": 0.1})
    assert len(loaded) == 1


def test_a_model_that_can_not_replay_experts_is_refused_at_the_start(tiny_model, tmp_path):
    asked = msgspec.structs.replace(START, model=str(tiny_model), folder=str(tmp_path), replays_routing=True)
    with pytest.raises(UserError, match="routes were recorded, and the trained model has no experts"):
        worker.build_service(asked, EventQueue().of("trainer"))


def test_a_correction_that_does_nothing_is_told_at_the_start(tiny_model, tmp_path):
    algorithm = {"corrections": {"truncated_token": {"cap": 2.0}}}
    asked = msgspec.structs.replace(START, model=str(tiny_model), folder=str(tmp_path), algorithm=algorithm)
    queue = EventQueue()
    worker.build_service(asked, queue.of("trainer"))
    lines = [event.line for event in queue.take().events if isinstance(event, LogLine)]
    assert [line for line in lines if "algorithm" in line] == [
        "algorithm.corrections.truncated_token does nothing: algorithm.proximal=behaviour leaves the loss's own ratio "
        "no gap to correct; set algorithm.proximal=start, or take it out"
    ]


@pytest.mark.parametrize(
    ("transport", "device", "expected"),
    [
        ("collective", "cuda:1", {"NCCL_SOCKET_IFNAME": "=eth0"}),
        ("collective", "cpu", {}),
        ("http", "cuda", {}),
    ],
)
def test_nccl_is_bound_where_weights_are_broadcast_between_gpus(transport, device, expected):
    environ = {}
    bind_broadcasts(SyncConfig(transport=transport, interface="eth0"), device, environ)
    assert environ == expected


def join_with(rank: int, folder: Path, seeds: list[int], learning_rates: list[float]) -> str:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    settings = {"parallel": {"data": 2}, "learning_rate": learning_rates[rank]}
    request = msgspec.structs.replace(
        START, rank=rank, rendezvous=f"file://{folder}/meet", trainer=START.trainer | settings
    )
    config = TrainerConfig.model_validate(request.trainer)
    try:
        worker._join(request, config, "cpu", tiny_model("llama", seed=seeds[rank]))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("seeds", "learning_rates", "what"),
    [([0, 0], [0.1, 0.1], ""), ([0, 1], [0.1, 0.1], "model"), ([0, 0], [0.1, 0.2], "settings")],
)
def test_ranks_that_were_started_differently_are_refused(seeds, learning_rates, what) -> None:
    said = f"all ranks of a trainer must have the same {what}, and they differ; start them with the same settings"
    assert on_ranks(2, join_with, seeds, learning_rates) == [said if what else ""] * 2
