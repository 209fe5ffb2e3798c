"""The scheduler without a model: a ledger of what each block holds stands in for keys and values."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engines.embedded.blocks import BlockPool
from penstock.engines.embedded.prefix_cache import PrefixCache
from penstock.engines.embedded.scheduler import Batch, Scheduler
from penstock.engines.embedded.sequence import Sequence, sequence_of
from penstock.records import DEFAULT_POLICY, Parent
from tests.engines.contract import ask

CONTEXT = 64
OTHER = "other"


@dataclass
class World:
    """A scheduler of two policies, a memory that holds (policy, history) instead of keys, and scripted tokens."""

    num_blocks: int = 32
    block_size: int = 4
    max_batch: int = 8
    prefill_chunk: int = 16
    prefix_cache: bool = True
    keep_finished: int = 8
    memory: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    arrivals: int = 0
    finished: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, self.block_size)
        self.cache = PrefixCache(
            self.pool,
            enabled=self.prefix_cache,
            keep_finished=self.keep_finished,
            versions={DEFAULT_POLICY: 0, OTHER: 0},
        )
        self.scheduler = Scheduler(self.cache, max_batch=self.max_batch, prefill_chunk=self.prefill_chunk)

    def add(self, name: str, prompt: list[int], max_tokens: int = 4, **options: Any) -> Sequence:
        self.arrivals += 1
        request = ask(name, prompt, max_tokens=max_tokens, **options)
        seq = sequence_of(request, arrival=self.arrivals, max_context=CONTEXT, seed=0)
        self.scheduler.add(seq)
        return seq

    def step(self) -> Batch:
        """One pass. A token's key is its policy and the history up to it, so a wrong share or copy can't go unseen."""
        batch = self.scheduler.schedule()
        snapshot = dict(self.memory)
        for source, target in batch.copies:
            for offset in range(self.block_size):
                if (source, offset) in snapshot:
                    self.memory[target, offset] = snapshot[source, offset]
        written: set[tuple[int, int]] = set()
        for seq, first, count in batch.spans:
            for place in range(first, first + count):
                where = (seq.blocks[place // self.block_size], place % self.block_size)
                assert where not in written, "two sequences write to one slot"
                written.add(where)
                self.memory[where] = (seq.policy, tuple(seq.tokens[: place + 1]))
        for seq, first, count in batch.spans:
            for place in range(first + count):
                where = (seq.blocks[place // self.block_size], place % self.block_size)
                key = (seq.policy, tuple(seq.tokens[: place + 1]))
                assert self.memory[where] == key, "it reads another's keys"
        for _, seq in self.scheduler.commit(batch):
            seq.tokens.append(100 + (7 * seq.num_tokens + sum(seq.tokens) + seq.arrival) % 5)
            if seq.num_tokens >= seq.limit:
                self.finished.append(seq.request.id)
                self.scheduler.finish(seq)
        assert len(self.scheduler.running) <= self.max_batch
        return batch

    def drain(self, limit: int = 2000) -> int:
        steps = 0
        while self.scheduler.has_work:
            self.step()
            steps += 1
            assert steps < limit, "the scheduler makes no progress"
        return steps

    def free_after_forgetting(self) -> int:
        self.cache.clear_kept()
        self.pool.clear_index()
        return self.pool.num_free


def test_a_prompt_is_computed_in_chunks_and_then_a_token_a_step() -> None:
    world = World()
    seq = world.add("a", list(range(20)), max_tokens=3)
    assert [world.step().spans[0][1:] for _ in range(4)] == [(0, 16), (16, 4), (20, 1), (21, 1)]
    assert seq.num_tokens == 23
    assert not world.scheduler.has_work


def test_decoding_goes_on_while_a_long_prompt_comes_in() -> None:
    world = World()
    world.add("a", [1, 2], max_tokens=10)
    world.step()
    world.add("b", list(range(30, 62)), max_tokens=2)
    counts = [[(seq.request.id, count) for seq, _, count in world.step().spans] for _ in range(3)]
    assert counts == [[("a", 1), ("b", 16)], [("a", 1), ("b", 16)], [("a", 1), ("b", 1)]]


def test_a_group_that_arrives_together_computes_its_prompt_once() -> None:
    world = World()
    group = [world.add(f"g{n}", [5, 6, 7, 8, 9, 10], max_tokens=3) for n in range(4)]
    batch = world.step()
    assert [(seq.request.id, first, count) for seq, first, count in batch.spans] == [("g0", 0, 6)]
    assert batch.num_prefill == 6
    assert batch.num_cached == 18
    assert all(seq.num_output == 1 for seq in group)
    assert len({block for seq in group for block in seq.blocks}) == 2
    batch = world.step()
    assert len(batch.copies) == 3
    assert len({seq.blocks[0] for seq in group}) == 1
    assert len({seq.blocks[1] for seq in group}) == 4
    world.drain()
    assert world.free_after_forgetting() == 32


def test_a_long_group_prompt_is_shared_over_several_chunks() -> None:
    world = World()
    for n in range(3):
        world.add(f"g{n}", list(range(40)), max_tokens=2)
    assert [world.step().num_prefill for _ in range(3)] == [16, 16, 8]
    assert world.drain() == 1
    assert sorted(world.finished) == ["g0", "g1", "g2"]


def test_followers_go_on_when_their_leader_is_cancelled() -> None:
    world = World()
    leader = world.add("g0", list(range(40)))
    world.add("g1", list(range(40)))
    world.step()
    world.scheduler.cancel(leader)
    world.drain()
    assert world.finished == ["g1"]
    assert world.free_after_forgetting() == 32


def test_a_later_request_reuses_whole_blocks_of_an_equal_prefix() -> None:
    world = World()
    world.add("a", list(range(10)), max_tokens=2)
    world.drain()
    later = world.add("b", [*range(8), 50, 51], max_tokens=2)
    batch = world.step()
    assert batch.num_cached == 8
    assert [(first, count) for _, first, count in batch.spans] == [(8, 2)]
    assert later.num_computed == 10


def test_prefixes_are_shared_within_one_pass_already() -> None:
    world = World()
    world.add("a", [*range(8), 20])
    world.add("b", [*range(8), 30])
    batch = world.step()
    assert [(seq.request.id, first, count) for seq, first, count in batch.spans] == [("a", 0, 9), ("b", 8, 1)]


def test_new_weights_make_old_prefixes_useless() -> None:
    world = World()
    world.add("a", list(range(10)), max_tokens=8)
    world.step()
    world.scheduler.new_version(DEFAULT_POLICY, 1, recompute_kv=False)
    world.add("b", list(range(10)), max_tokens=8)
    batch = world.step()
    assert [(seq.request.id, first, count) for seq, first, count in batch.spans] == [
        ("a", 10, 1),
        ("b", 0, 10),
    ]
    world.drain()
    world.add("c", list(range(10)), max_tokens=2)
    assert world.step().num_cached == 8, "what b computed under the new weights is known"


@pytest.mark.parametrize("known_before", [3, 6])
def test_blocks_of_mixed_weights_are_never_found(known_before: int) -> None:
    world = World(keep_finished=0)
    a = world.add("a", list(range(known_before)), max_tokens=20)
    world.step()
    world.scheduler.new_version(DEFAULT_POLICY, 1, recompute_kv=False)
    world.drain()
    world.add("b", a.tokens[:20], max_tokens=2)
    assert world.step().num_cached == 0


def test_rebuilding_caches_computes_running_sequences_again() -> None:
    world = World()
    seq = world.add("a", list(range(6)), max_tokens=8)
    world.step()
    world.step()
    tokens = list(seq.tokens)
    world.scheduler.new_version(DEFAULT_POLICY, 1, recompute_kv=True)
    assert seq.tokens == tokens
    batch = world.step()
    assert [(first, count) for _, first, count in batch.spans] == [(0, 8)]
    assert seq.tokens[:8] == tokens


def test_a_fork_continues_its_parent_to_the_token() -> None:
    world = World()
    parent = world.add("p", list(range(10)), max_tokens=9)
    world.drain()
    fork = world.add("f", [*parent.tokens[:15], 55], parent=Parent(id="p", keep=15), max_tokens=3)
    batch = world.step()
    assert [(first, count) for _, first, count in batch.spans] == [(15, 1)]
    assert batch.num_cached == 15
    assert len(batch.copies) == 1
    world.drain()
    assert fork.num_tokens == 19


def test_a_fork_of_a_running_request() -> None:
    world = World()
    parent = world.add("p", list(range(10)), max_tokens=20)
    for _ in range(5):
        world.step()
    world.add("f", parent.tokens[:13], parent=Parent(id="p", keep=13), max_tokens=3)
    batch = world.step()
    assert [(seq.request.id, first, count) for seq, first, count in batch.spans] == [
        ("p", 14, 1),
        ("f", 12, 1),
    ]
    world.drain()
    assert world.free_after_forgetting() == 32


def test_a_fork_of_a_block_that_is_itself_copied_in_this_pass() -> None:
    world = World()
    parent = world.add("g0", list(range(6)), max_tokens=9)
    world.add("g1", list(range(6)), max_tokens=9)
    world.step()
    shared = parent.blocks[1]
    fork = world.add("f", [*range(6), 55], parent=Parent(id="g0", keep=6))
    batch = world.step()
    assert batch.copies == [(shared, parent.blocks[1]), (shared, fork.blocks[1])]
    world.drain()


def test_a_fork_of_nobody_computes_all_of_it() -> None:
    world = World(prefix_cache=False)
    world.add("f", list(range(6)), parent=Parent(id="gone", keep=5))
    assert [(first, count) for _, first, count in world.step().spans] == [(0, 6)]


def test_a_fork_that_differs_from_its_parent_shares_nothing() -> None:
    world = World(prefix_cache=False)
    world.add("p", list(range(10)), max_tokens=2)
    world.drain()
    world.add("f", [0, 1, 2, 60, 4, 5], parent=Parent(id="p", keep=5))
    assert world.step().num_cached == 0


def test_a_fork_that_overwrites_a_known_block_makes_it_unknown() -> None:
    world = World()
    parent = world.add("p", list(range(8)), max_tokens=2)
    world.drain()
    world.add("f", [*parent.tokens[:6], 60, 61, 62], parent=Parent(id="p", keep=6), max_tokens=2)
    world.scheduler.schedule = _dropping_kept_first(world)  # type: ignore[method-assign]
    world.drain()
    again = world.add("q", list(range(9)), max_tokens=2)
    world.drain()
    assert again.num_output == 2


def _dropping_kept_first(world: World) -> Any:
    """Make the fork the only owner of its parent's blocks before it writes to them."""
    schedule = Scheduler.schedule
    grow = world.scheduler._grow

    def wrapped() -> Batch:
        def grow_alone(seq: Sequence, count: int, batch: Batch) -> bool:
            world.cache.clear_kept()
            return grow(seq, count, batch)

        world.scheduler._grow = grow_alone  # type: ignore[method-assign]
        return schedule(world.scheduler)

    return wrapped


def test_the_youngest_is_preempted_and_keeps_its_tokens() -> None:
    world = World(num_blocks=6, prefix_cache=False)
    old = world.add("old", list(range(7)), max_tokens=12)
    young = world.add("young", list(range(20, 27)), max_tokens=12)
    while not young.num_preempted:
        tokens = list(young.tokens)
        world.step()
    assert young.tokens == tokens
    assert young.blocks == []
    assert old.num_preempted == 0
    world.drain()
    assert world.finished == ["old", "young"]
    assert young.num_tokens == 19
    assert world.free_after_forgetting() == 6


def test_smaller_priorities_go_first_and_equals_in_order_of_arrival() -> None:
    world = World(max_batch=1)
    for name, priority in (("late", 2), ("first", 0), ("second", 1), ("third", 1)):
        world.add(name, [1, 2, len(name)], priority=priority)
    world.drain()
    assert world.finished == ["first", "second", "third", "late"]


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    world = World(num_blocks=10, keep_finished=0, prefix_cache=False)
    for n in range(3):
        world.add(f"s{n}", [n, 1, 2, 3], max_tokens=8)
    world.step()
    world.add("large", list(range(30)), max_tokens=6)
    for n in range(20):
        world.add(f"t{n}", [n, 4, 5, 6], max_tokens=8)
    world.drain()
    assert world.finished.index("large") <= 4


def test_cancelling_gives_everything_back() -> None:
    world = World(keep_finished=0, prefix_cache=False)
    seqs = [world.add(f"a{n}", list(range(n, n + 9)), max_tokens=9) for n in range(12)]
    for _ in range(3):
        world.step()
    for seq in seqs:
        world.scheduler.cancel(seq)
    assert not world.scheduler.has_work
    assert world.pool.num_free == 32


@pytest.mark.parametrize("keep_finished", [0, 3])
def test_kept_requests_give_way_to_running_ones(keep_finished: int) -> None:
    world = World(num_blocks=8, keep_finished=keep_finished)
    for n in range(10):
        world.add(f"a{n}", [n, 1, 2, 3, 4, 5], max_tokens=20)
    world.drain()
    assert len(world.finished) == 10
    assert world.free_after_forgetting() == 8


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_schedule_is_exact_and_leaks_nothing(data: st.DataObject) -> None:
    """Random arrivals of two policies, shared prefixes, forks, cancellations, swaps and shortages. `World.step`
    checks that nobody reads another's keys, nor another policy's."""
    world = World(
        num_blocks=data.draw(st.integers(12, 24), label="blocks"),
        max_batch=data.draw(st.integers(1, 6), label="batch"),
        prefill_chunk=data.draw(st.integers(1, 20), label="chunk"),
        prefix_cache=data.draw(st.booleans(), label="prefix cache"),
        keep_finished=data.draw(st.integers(0, 4), label="kept"),
    )
    seqs: list[Sequence] = []
    cancelled = 0
    for _ in range(data.draw(st.integers(1, 40), label="moves")):
        move = data.draw(st.sampled_from(["add", "group", "fork", "cancel", "swap", "step", "step", "step"]))
        if move in ("add", "group"):
            length = data.draw(st.integers(1, 24))
            prompt = [data.draw(st.integers(0, 1)), *range(length - 1)]
            for _ in range(1 if move == "add" else 3):
                options = {
                    "max_tokens": data.draw(st.integers(1, 16)),
                    "priority": data.draw(st.integers(0, 2)),
                    "policy": data.draw(st.sampled_from([DEFAULT_POLICY, OTHER])),
                }
                seqs.append(world.add(f"r{len(seqs)}", prompt, **options))
        elif move == "fork" and seqs:
            parent = data.draw(st.sampled_from(seqs))
            keep = data.draw(st.integers(1, parent.num_tokens))
            tokens = parent.tokens[:keep] + [77] * data.draw(st.integers(0, 3))
            if len(tokens) < 44:
                options = {"policy": data.draw(st.sampled_from([DEFAULT_POLICY, OTHER])), "max_tokens": 4}
                fork = Parent(id=parent.request.id, keep=keep)
                seqs.append(world.add(f"r{len(seqs)}", tokens, parent=fork, **options))
        elif move == "cancel" and world.scheduler.live():
            world.scheduler.cancel(data.draw(st.sampled_from(world.scheduler.live())))
            cancelled += 1
        elif move == "swap":
            rebuild = data.draw(st.booleans())
            policy = data.draw(st.sampled_from([DEFAULT_POLICY, OTHER]))
            world.scheduler.new_version(policy, world.cache.versions[policy] + 1, recompute_kv=rebuild)
        elif world.scheduler.has_work:
            world.step()
    world.drain()
    assert len(world.finished) == len(seqs) - cancelled
    assert all(seq.num_tokens == seq.limit for seq in seqs if seq.request.id in world.finished)
    assert world.free_after_forgetting() == world.num_blocks


def test_nobody_follows_a_leader_whose_prompt_is_half_computed_under_old_weights() -> None:
    world = World()
    world.add("old", list(range(30)))
    world.step()
    world.scheduler.new_version(DEFAULT_POLICY, 1, recompute_kv=False)
    new = world.add("new", list(range(30)))
    world.step()
    world.step()
    assert (new.leader, new.kv_version) == (None, 1)
    assert new.num_computed > 0
    world.drain()
    assert sorted(world.finished) == ["new", "old"]


def test_rebuilding_caches_forgets_finished_requests() -> None:
    world = World(prefix_cache=False)
    parent = world.add("p", list(range(10)), max_tokens=4)
    world.drain()
    world.scheduler.new_version(DEFAULT_POLICY, 1, recompute_kv=False)
    fork = world.add("f", parent.tokens[:12], parent=Parent(id="p", keep=12))
    assert world.step().num_cached == 11
    assert fork.kv_version == 0
    world.drain()
    world.scheduler.new_version(DEFAULT_POLICY, 2, recompute_kv=True)
    world.add("g", parent.tokens[:12], parent=Parent(id="p", keep=12))
    assert world.step().num_cached == 0


def test_equal_prompts_of_two_policies_are_computed_once_each() -> None:
    world = World()
    for name, policy in (("a", DEFAULT_POLICY), ("b", OTHER), ("c", DEFAULT_POLICY), ("d", OTHER)):
        world.add(name, list(range(6)), policy=policy)
    batch = world.step()
    assert [(seq.request.id, first, count) for seq, first, count in batch.spans] == [("a", 0, 6), ("b", 0, 6)]
    assert batch.num_cached == 12
    world.drain()
    assert world.free_after_forgetting() == 32


def test_a_prefix_is_found_by_its_own_policy_only() -> None:
    world = World()
    world.add("a", list(range(10)), max_tokens=2)
    world.drain()
    world.add("b", list(range(10)), policy=OTHER, max_tokens=2)
    assert world.step().num_cached == 0
    world.drain()
    for policy in (DEFAULT_POLICY, OTHER):
        world.add(f"c of {policy}", list(range(10)), policy=policy, max_tokens=2)
        assert world.step().num_cached == 8


@pytest.mark.parametrize("is_running", [False, True])
def test_nobody_forks_from_a_request_of_another_policy(is_running: bool) -> None:
    world = World()
    parent = world.add("p", list(range(10)), max_tokens=20 if is_running else 4)
    for _ in range(5):
        world.step() if world.scheduler.has_work else None
    assert parent.is_running == is_running
    fork = world.add("f", parent.tokens[:12], parent=Parent(id="p", keep=12), policy=OTHER)
    assert world.step().num_cached == 0
    assert fork.num_computed == 12
    own = world.add("g", parent.tokens[:12], parent=Parent(id="p", keep=12))
    world.step()
    assert own.num_output == 1
    assert set(own.blocks) & set(fork.blocks) == set()


def test_finished_requests_of_two_policies_with_one_id_are_kept_apart() -> None:
    world = World(prefix_cache=False)
    tokens = {}
    for policy in (DEFAULT_POLICY, OTHER):
        tokens[policy] = world.add("p", list(range(10)), policy=policy, max_tokens=4).tokens
        world.drain()
    for policy in (DEFAULT_POLICY, OTHER):
        world.add(f"f of {policy}", tokens[policy][:12], parent=Parent(id="p", keep=12), policy=policy)
        assert world.step().num_cached == 11
        world.drain()


def test_new_weights_of_a_policy_leave_the_cache_of_another_alone() -> None:
    world = World()
    seqs = {
        policy: world.add(f"a of {policy}", list(range(10)), policy=policy, max_tokens=9)
        for policy in (DEFAULT_POLICY, OTHER)
    }
    world.step()
    world.scheduler.new_version(OTHER, 1, recompute_kv=True)
    assert [seqs[policy].num_preempted for policy in (DEFAULT_POLICY, OTHER)] == [0, 1]
    world.drain()
    world.scheduler.new_version(OTHER, 2, recompute_kv=True)
    cached = {}
    for policy, seq in seqs.items():
        fork = Parent(id=f"a of {policy}", keep=12)
        world.add(f"f of {policy}", seq.tokens[:12], parent=fork, policy=policy, max_tokens=2)
        cached[policy] = world.step().num_cached
        world.drain()
        world.add(f"b of {policy}", [*range(8), 50], policy=policy, max_tokens=2)
        cached[policy] += 100 * world.step().num_cached
        world.drain()
    assert cached == {DEFAULT_POLICY: 811, OTHER: 800}
    assert world.free_after_forgetting() == 32


def pass_over_prompts(scheduler: Scheduler) -> list[str]:
    """As a device does it: the pass is planned and committed, its draws are pending."""
    batch = scheduler.schedule_prompts(may_preempt=False)
    assert batch is not None
    drawn = [seq for _, seq in scheduler.commit(batch)]
    for seq in drawn:
        seq.num_pending += 1
    return [seq.request.id for seq in drawn]


def test_launched_ahead_prompts_are_planned_apart_from_sequences_that_decode() -> None:
    world = World(max_batch=3, prefill_chunk=8)
    scheduler = world.scheduler
    first = world.add("a", [1, 2, 3], max_tokens=9)
    world.add("long", list(range(20, 31)), max_tokens=2)
    assert scheduler.wants_prompts(join_at=3)
    assert pass_over_prompts(scheduler) == ["a"]  # five of eleven prompt tokens of the other
    assert scheduler.ready() == [first]
    assert scheduler.wants_prompts(join_at=3)
    assert pass_over_prompts(scheduler) == ["long"]
    assert [seq.request.id for seq in scheduler.ready()] == ["a", "long"]
    world.add("late", [7], max_tokens=2)
    assert not scheduler.wants_prompts(join_at=2)
    assert scheduler.wants_prompts(join_at=1)


def test_a_sequence_that_has_all_its_tokens_in_flight_is_not_ready() -> None:
    world = World()
    seq = world.add("a", [1, 2, 3], max_tokens=3)
    pass_over_prompts(world.scheduler)
    assert world.scheduler.reserve([seq], 2, may_preempt=False) == []
    seq.num_pending += 2
    seq.num_computed += 2
    assert world.scheduler.ready() == []


def test_room_that_only_a_preemption_would_give_is_refused_while_work_is_in_flight() -> None:
    world = World(num_blocks=4, block_size=4, prefix_cache=False, keep_finished=0)
    scheduler = world.scheduler
    sequences = [world.add(name, [number] * 4, max_tokens=12) for number, name in enumerate("ab")]
    pass_over_prompts(scheduler)
    free = world.pool.num_free
    assert scheduler.reserve(sequences, 8, may_preempt=False) is None
    assert (world.pool.num_free, [seq.is_running for seq in sequences]) == (free, [True, True])
    for seq in sequences:
        seq.tokens.append(9)
        seq.num_pending = 0
    assert scheduler.reserve(sequences, 8, may_preempt=True) == []
    assert [seq.is_running for seq in sequences] == [True, False]
    assert len(sequences[0].blocks) == 3


def test_only_blocks_full_of_known_tokens_are_shared() -> None:
    world = World(block_size=4)
    seq = world.add("a", [1, 2, 3], max_tokens=12)
    pass_over_prompts(world.scheduler)
    world.scheduler.reserve([seq], 6, may_preempt=False)
    seq.num_pending, seq.num_computed = 7, 9
    world.scheduler.taken(seq)
    assert seq.num_indexed == 0
    seq.tokens.extend([4, 5, 6])
    seq.num_pending = 4
    world.scheduler.taken(seq)
    assert (seq.num_indexed, seq.num_computed) == (1, 9)
    seq.tokens.extend([7, 8, 9, 10])
    seq.num_pending = 0
    world.scheduler.taken(seq)
    assert (seq.num_indexed, seq.num_computed) == (2, 9)
