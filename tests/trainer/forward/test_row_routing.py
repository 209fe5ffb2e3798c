import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from penstock.blob_stores import MemoryBlobs
from penstock.errors import BlobLost, UserError
from penstock.models.routing import Recording, find_routers
from penstock.records import RoutingShape, TrainSequence
from penstock.records.routing_records import store_routes
from penstock.trainer.forward.checkpointing import compile_layers
from penstock.trainer.forward.packed_model import PackedModel
from penstock.trainer.forward.packed_row import PackedRow
from tests.models.moe import EXPERTS, VOCAB, moe_model
from tests.records.builders import make_sample
from tests.trainer.builders import tiny_model
from tests.trainer.forward.operators import pretend_varlen

PROMPT, LENGTH = 9, 26


def plain(model: nn.Module, tokens: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
    """Logprobs of each token after the first by transformers' own forward pass, and the routes (tokens, layers, k)."""
    ids = torch.from_numpy(tokens).long()[None]
    routers = find_routers(model, lambda: model(input_ids=ids[:, :1]))
    routers.watch()
    recording = Recording(routers.shape.num_layers)
    with routers.observed_by(recording), torch.no_grad():
        logits = model(input_ids=ids).logits[0].float()
    logprobs = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return logprobs, torch.stack(recording.ids, dim=1).numpy()


class Recorded:
    """Samples of one group with one prompt, recorded by plain forward passes of a model."""

    def __init__(self, model: nn.Module, *, count: int = 4, length: int = LENGTH, store: bool = True) -> None:
        rng = np.random.default_rng(0)
        self.blobs = MemoryBlobs()
        prompt = rng.integers(0, VOCAB, PROMPT)
        self.sequences, self.logprobs = [], []
        twin = copy.deepcopy(model)
        self.shape = find_routers(twin, lambda: twin(input_ids=torch.zeros(1, 1, dtype=torch.long))).shape
        for number in range(count):
            tokens = np.concatenate([prompt, rng.integers(0, VOCAB, length - PROMPT - number)]).astype(
                np.int32
            )
            logprobs, routes = plain(twin, tokens)
            self.logprobs.append(logprobs[PROMPT - 1 :])
            ref = store_routes(self.blobs, f"s/{number}", routes[:-1], self.shape, start=0)
            self.sequences.append(self._sequence(tokens, number, (ref,) if store else ()))

    def _sequence(self, tokens: np.ndarray, episode: int, routing: tuple) -> TrainSequence:
        sample = make_sample(tokens, np.arange(len(tokens)) >= PROMPT, routing=routing)
        return TrainSequence(sample=sample, group=0, episode=episode)

    def row(self, *, shared: bool, replays: bool = True) -> PackedRow:
        row = PackedRow.of(
            self.sequences, shared_prompts=shared, blobs=self.blobs, routing=self.shape if replays else None
        )
        assert row is not None
        return row


def gradients(model: nn.Module, policy: PackedModel, row: PackedRow) -> tuple[torch.Tensor, list]:
    model.zero_grad()
    outputs = policy(row)
    (outputs.logprobs * torch.linspace(-1, 1, row.num_loss_tokens)).sum().backward()
    return outputs, [None if each.grad is None else each.grad.clone() for each in model.parameters()]


@pytest.mark.parametrize(
    ("family", "checkpointing", "shared"),
    [
        ("qwen3-moe", "off", False),
        ("qwen3-moe", "selective", True),
        ("gpt-oss", "full", True),
        ("deepseek-v3", "selective", False),
        ("olmoe", "off", True),
        ("mixtral", "selective", True),
        ("glm4-moe", "full", True),
        ("ernie4.5-moe", "off", True),
        ("granite-moe", "full", False),
    ],
)
def test_in_float32_replay_changes_nothing(family: str, checkpointing: str, shared: bool) -> None:
    model = moe_model(family)
    recorded = Recorded(model)
    policy = PackedModel(model, chunk_tokens=16, checkpointing=checkpointing)
    free, free_gradients = gradients(model, policy, recorded.row(shared=shared, replays=False))
    row = recorded.row(shared=shared)
    assert row.num_shared_tokens == (3 * PROMPT if shared else 0)
    replayed, replayed_gradients = gradients(model, policy, row)
    assert float((replayed.logprobs - free.logprobs).detach().abs().max()) <= 1e-6
    assert all(
        ours is theirs or torch.equal(ours, theirs)
        for ours, theirs in zip(replayed_gradients, free_gradients, strict=True)
    )
    num_choices = recorded.shape.num_layers * row.input_ids.shape[1]
    assert replayed.routing.tolist() == [0, num_choices, num_choices]
    assert free.routing is None


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_layers_that_are_computed_again_replay_too(checkpointing: str) -> None:
    """Other experts than the live ones: gradients equal those without recomputation."""
    model = moe_model("qwen3-moe")
    recorded = Recorded(model)
    moved = moved_by(model, 0.3)
    row = recorded.row(shared=True)
    want, expected = gradients(moved, PackedModel(moved, chunk_tokens=16), row)
    assert int(want.routing[0]) > 10
    again = copy.deepcopy(moved)
    got, found = gradients(again, PackedModel(again, chunk_tokens=16, checkpointing=checkpointing), row)
    assert torch.equal(got.routing, want.routing)
    torch.testing.assert_close(got.logprobs, want.logprobs, rtol=0, atol=1e-6)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def moved_by(model: nn.Module, share: float) -> nn.Module:
    """A copy with relative noise on every weight."""
    moved = copy.deepcopy(model)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in moved.parameters():
            weight.mul_(1 + share * torch.randn(weight.shape, generator=noise))
    return moved


def test_tokens_without_a_record_are_left_to_the_router_and_counted() -> None:
    model = moe_model("qwen3-moe")
    recorded = Recorded(model)
    half = recorded.sequences[0].sample.routing[0].within(0, 12)
    first = recorded._sequence(recorded.sequences[0].sample.token_ids, 0, (half,))
    recorded.sequences = [first, *recorded.sequences[1:]]
    row = recorded.row(shared=False)
    outputs = PackedModel(model, chunk_tokens=16)(row)
    missing = LENGTH - 1 - 12
    assert row.routing.num_replayed == 3 * (row.input_ids.shape[1] - missing)
    torch.testing.assert_close(outputs.logprobs, torch.cat(recorded.logprobs), rtol=0, atol=1e-5)


def test_a_reference_chooses_anew() -> None:
    model = moe_model("qwen3-moe")
    recorded = Recorded(model)
    moved = moved_by(model, 0.3)
    reference = PackedModel(moved, chunk_tokens=16, replays_routing=False)
    free = PackedModel(copy.deepcopy(moved), chunk_tokens=16)
    with torch.no_grad():
        ours, theirs = reference(recorded.row(shared=False)), free(recorded.row(shared=False, replays=False))
    assert ours.routing is None
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, torch.uint8), (300, torch.int16)])
def test_records_with_gaps_are_laid_where_their_tokens_are(num_experts: int, dtype: torch.dtype) -> None:
    """Two sequences that share a prompt of three tokens; of the first, tokens 2 and 5 have no record."""
    shape = RoutingShape(family="any", num_layers=2, num_experts=num_experts, top_k=2)
    blobs = MemoryBlobs()
    ids = np.arange(7 * 2 * 2).reshape(7, 2, 2) * 9 + num_experts - 256  # up to the last expert of each
    sequences = []
    for episode, pieces in enumerate([[(0, 2), (3, 5), (6, 7)], [(0, 2), (3, 7)]]):
        refs = tuple(
            store_routes(blobs, f"s/{episode}.{start}", ids[start:end], shape, start=start)
            for start, end in pieces
        )
        tokens = [1, 2, 3, 4 + episode, 5, 6, 7, 8]
        sample = make_sample(tokens, np.arange(8) >= 3, routing=refs)
        sequences.append(TrainSequence(sample=sample, group=0, episode=episode))
    row = PackedRow.of(sequences, shared_prompts=True, blobs=blobs, routing=shape)
    assert row is not None
    assert row.routing is not None
    tokens = [0, 1, 2, 3, 4, 5, 6, 3, 4, 5, 6]  # the prompt once, then the rest of each
    known = [True, True, False, True, True, False, True, True, True, True, True]
    assert (row.lengths, row.num_shared_tokens) == ((3, 4, 4), 3)
    assert (row.routing.known.tolist(), row.routing.num_known) == (known, 9)
    assert row.routing.ids.dtype == dtype
    expected = np.where(np.array(known)[:, None, None], ids[tokens], 0).transpose(1, 0, 2)
    assert row.routing.ids.tolist() == expected.tolist()


def test_routes_of_another_model_cost_their_group() -> None:
    recorded = Recorded(moe_model("qwen3-moe"))
    other = RoutingShape(family="MixtralForCausalLM", num_layers=3, num_experts=EXPERTS, top_k=2)
    with pytest.raises(
        BlobLost, match="s/0 is a record of Qwen3MoeForCausalLM with 3 routers.*MixtralForCausalLM"
    ):
        PackedRow.of(recorded.sequences, blobs=recorded.blobs, routing=other)


def test_a_missing_blob_costs_its_group() -> None:
    recorded = Recorded(moe_model("qwen3-moe"))
    recorded.blobs.delete("s")
    with pytest.raises(BlobLost, match="blob s/0 is not in this process's memory"):
        recorded.row(shared=False)


def test_a_dense_model_can_not_replay() -> None:
    recorded = Recorded(moe_model("qwen3-moe"))
    with pytest.raises(UserError, match="the trained model has no experts"):
        PackedModel(tiny_model("llama"), chunk_tokens=16)(recorded.row(shared=False))


# Dynamo looks at the .grad of what it traces, leaf or not.
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("checkpointing", ["off", "selective"])
def test_compiled_layers_replay_with_one_graph_for_all_rows(
    checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of any length, recorded wholly, in part or not at all; all layers, forward and recomputation."""
    torch._dynamo.reset()
    compile_whole_layers(monkeypatch)
    model = moe_model("olmoe")
    model.set_experts_implementation(
        "batched_mm"
    )  # in float32, compiled code can't differentiate `grouped_mm`
    recorded = Recorded(model)
    moved = moved_by(model, 0.3)
    eager_model, policies = copy.deepcopy(moved), []
    for each, compiled in ((eager_model, False), (moved, True)):
        policies.append(PackedModel(each, chunk_tokens=16, checkpointing=checkpointing, compiled=compiled))
        policies[-1].expect_routes()
    full, half = recorded.sequences, recorded.sequences[0].sample.routing[0].within(0, 12)
    begun = recorded._sequence(full[0].sample.token_ids, 0, (half,))
    before = counters["stats"]["unique_graphs"]
    for number, (sequences, replays) in enumerate(
        [(full, True), (full, False), (full[:3], True), ([begun, *full[1:]], True), (full[1:], False)]
    ):
        recorded.sequences = sequences
        row = recorded.row(shared=True, replays=replays)
        (want, expected), (got, found) = (
            gradients(each, policy, row) for each, policy in zip((eager_model, moved), policies, strict=True)
        )
        torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        if replays:
            assert int(want.routing[0]) > 10
            assert torch.equal(got.routing, want.routing), number
    assert counters["stats"]["unique_graphs"] - before == 1


def compile_whole_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: attention is one operator, which compiled code calls. Here it does not attend."""
    monkeypatch.setattr("penstock.trainer.forward.packed_attention.fits", lambda *_: True)
    monkeypatch.setattr(
        "penstock.trainer.forward.packed_attention.find_varlen",
        lambda device: pretend_varlen,
    )
    monkeypatch.setattr(PackedModel, "_verify", lambda *_: None)
    compile_with = partial(compile_layers, backend="aot_eager")
    monkeypatch.setattr("penstock.trainer.forward.packed_model.compile_layers", compile_with)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_on_a_gpu_compiled_layers_replay_and_nothing_waits() -> None:
    torch._dynamo.reset()
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_experts": 16}
    recorded = Recorded(moe_model("olmoe", **sizes), count=6, length=60)
    moved = moved_by(moe_model("olmoe", **sizes), 0.05).to("cuda", torch.bfloat16)
    row = PackedRow.of(
        recorded.sequences, "cuda", shared_prompts=True, blobs=recorded.blobs, routing=recorded.shape
    )
    assert row is not None
    exact, eager = (
        PackedModel(copy.deepcopy(moved).to(dtype), chunk_tokens=64, checkpointing="selective")
        for dtype in (torch.float32, torch.bfloat16)
    )
    compiled = PackedModel(moved, chunk_tokens=64, checkpointing="selective", compiled=True)
    want = eager(row)
    want.logprobs.mean().backward()
    compiled(row).logprobs.mean().backward()
    before = counters["stats"]["unique_graphs"]
    moved.zero_grad()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = compiled(row)
        got.logprobs.mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counters["stats"]["unique_graphs"] == before >= 1
    assert got.routing.tolist()[1:] == want.routing.tolist()[1:] == [got.routing[1]] * 2
    assert abs(int(got.routing[0]) - int(want.routing[0])) < 0.05 * int(want.routing[1])
    with torch.no_grad():
        true = exact(row).logprobs
        off, expected = (float((each.logprobs - true).abs().mean()) for each in (got, want))
    assert off < 1.5 * expected  # what bfloat16 costs, and no more
    for name, weight in moved.named_parameters():
        assert weight.grad is not None and bool(weight.grad.abs().sum() > 0), name
