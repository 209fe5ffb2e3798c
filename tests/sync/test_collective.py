"""The contract with one engine, and several engines in threads. `test_processes.py` has them in processes."""

import contextlib
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from penstock.errors import PenstockError, UpdateAbandoned
from penstock.records import WeightUpdate
from penstock.records.interfaces import Staged, WeightReceiver
from penstock.sync.bucket_layout import Slice
from penstock.sync.collective import CollectivePublisher, CollectiveReceiver
from penstock.sync.joined_update import join_updates
from penstock.sync.meeting import Arrival, Meeting, connect_store
from penstock.sync.slot_publisher import Publishing
from tests.sync.contract import TransportContract, make_tensors, publish


class TestCollective(TransportContract):
    transport = "collective"

    def stage(self, receiver: WeightReceiver, update: WeightUpdate) -> Staged:
        """Both sides act at one moment. The tests stage an update again and again, so each time is a new meeting."""
        places = {name.split("/")[0] for name in update.buckets}
        senders = [each for each in self.opened if getattr(each, "_place", "") in places]
        update = meet_again(senders, update)
        threads = [threading.Thread(target=send, args=[sender, update.version]) for sender in senders]
        for thread in threads:
            thread.start()
        try:
            return receiver.stage(update)
        finally:
            for thread in threads:
                thread.join(timeout=60)
                assert not thread.is_alive()

    def sent(self, name: str) -> torch.Tensor:
        found: torch.Tensor = next(
            each._offered[name] for each in self.opened if name in getattr(each, "_offered", {})
        )
        return found

    @contextlib.contextmanager
    def cut(self, update: WeightUpdate) -> Iterator[WeightUpdate]:
        """At its front: in the place of a last byte the engine has whatever its memory held, perhaps the same."""
        (sender,) = (each for each in self.opened if update.buckets[0] in getattr(each, "_offered", {}))
        whole = sender._offered[update.buckets[0]]
        sender._offered[update.buckets[0]] = whole[1:]
        yield update
        sender._offered[update.buckets[0]] = whole


@pytest.mark.skipif(not torch.cuda.is_available(), reason="weights are on a GPU")
class TestCollectiveOfAGpu(TestCollective):
    device = "cuda"


def meet_again(senders: list[CollectivePublisher], update: WeightUpdate) -> WeightUpdate:
    """The same buckets under the name of another meeting."""
    names, meeting = [], secrets.token_hex(4)
    for old in update.buckets:
        place, _, number = old.split("/")
        names.append(f"{place}/{meeting}/{number}")
        for sender in senders:
            if sender._place == place:
                sender._meetings[update.version] = meeting
                sender._offered[names[-1]] = sender._offered[old]
                sender._offers[update.version].append(names[-1])
    return msgspec.structs.replace(update, buckets=tuple(names))


def send(sender: CollectivePublisher, version: int) -> None:
    with contextlib.suppress(UpdateAbandoned):
        sender.send(version)


def deliver(
    publisher: CollectivePublisher,
    update: WeightUpdate,
    receivers: list[CollectiveReceiver],
    results: list[Any] | None = None,
) -> list[Any]:
    """To several at once; what each staged, or its error."""
    update = msgspec.structs.replace(update, receivers=len(receivers))
    results = [] if results is None else results
    results += [None] * len(receivers)

    def stage(number: int) -> None:
        try:
            results[number] = receivers[number].stage(update)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=stage, args=[number]) for number in range(len(receivers))]
    for thread in threads:
        thread.start()
    try:
        publisher.send(update.version)
    finally:
        for thread in threads:
            thread.join(timeout=60)
    return results


def test_a_group_is_made_anew_when_its_members_change() -> None:
    source, epochs = make_tensors(0), []
    publisher = CollectivePublisher(source)
    one, two = CollectiveReceiver(), CollectiveReceiver()
    again = CollectiveReceiver()  # the same engine after a restart
    for version, receivers in enumerate(([one], [one], [one, two], [one, two], [one, again], [again])):
        staged = deliver(publisher, publish(publisher, version, source), receivers)
        for receiver, each in zip(receivers, staged, strict=True):
            live = make_tensors(1)
            receiver.load(each, live)()
            assert torch.equal(live["embed"], source["embed"])
        publisher.release(version)
        epochs.append(publisher._epoch)
    assert epochs == [0, 0, 1, 1, 2, 3]
    for each in (one, two, again, publisher):
        each.close()


def test_an_engine_may_hear_of_an_empty_update_after_it_was_sent() -> None:
    """The sender has nothing to broadcast, so nothing holds it until the engine has read what it decided."""
    source = make_tensors(0)
    publisher = CollectivePublisher(source, Publishing(selection="delta"))
    receiver = CollectiveReceiver()
    live = make_tensors(1)
    (staged,) = deliver(publisher, publish(publisher, 1, source), [receiver])
    receiver.load(staged, live)()
    publisher.release(1)
    update = publish(publisher, 2, source)
    assert [payload.num_bytes for payload in update.payloads] == [0]
    name = update.buckets[0].split("/")[1]
    before = Meeting(connect_store(publisher._place), name, threading.Event())
    before._store.add(f"{name}/count", 1)  # it has arrived, and is then held up
    arrival = Arrival(id=receiver._id, epoch=publisher._epoch, device="cpu", receivers=1)
    before._store.set(f"{name}/arrival/1", msgspec.json.encode(arrival).decode())
    publisher.send(2)
    before._await_key("go")
    publisher.release(2)
    assert not publisher._store.check([f"{name}/go"])
    receiver.close()
    publisher.close()


def test_an_engine_that_can_not_take_it_stops_the_others() -> None:
    """It fails after the first of many buckets."""
    source = {"w": torch.randn(64, 1 << 14)}
    publisher = CollectivePublisher(source, Publishing(bucket_bytes=1 << 18))
    good, bad = CollectiveReceiver(), CollectiveReceiver()
    fetch = bad._fetch

    def fetch_one(update: WeightUpdate, number: int, cancelled: threading.Event) -> torch.Tensor:
        if number:
            raise PenstockError("no memory left")
        return fetch(update, number, cancelled)

    bad._fetch = fetch_one  # type: ignore[method-assign]
    update = publish(publisher, 1, source)
    results: list[Any] = []
    with pytest.raises(UpdateAbandoned, match="an engine could not take it: no memory left"):
        deliver(publisher, update, [good, bad], results)
    assert [str(error) for error in results[1:]] == ["no memory left"]
    assert isinstance(results[0], UpdateAbandoned)
    bad._fetch = fetch  # type: ignore[method-assign]
    results = deliver(publisher, publisher.describe(1), [good, bad])
    assert all(isinstance(each, Staged) for each in results)
    for each in (good, bad, publisher):
        each.close()


def test_a_sender_that_is_cancelled_tells_those_who_came() -> None:
    """The second engine never comes."""
    source = make_tensors(0)
    publisher, receiver = CollectivePublisher(source), CollectiveReceiver()
    update = msgspec.structs.replace(publish(publisher, 1, source), receivers=2)
    errors: list[Exception] = []

    def stage() -> None:
        try:
            receiver.stage(update)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=stage)
    thread.start()
    sending = threading.Thread(target=send, args=[publisher, 1])
    sending.start()
    connect_store(publisher._place).get(f"{update.buckets[0].split('/')[1]}/arrival/1")  # it has come
    publisher.cancel()
    for each in (thread, sending):
        each.join(timeout=30)
        assert not each.is_alive()
    assert [type(error) for error in errors] == [UpdateAbandoned]
    assert "the trainer could not send it: the update was cancelled" in str(errors[0])
    with pytest.raises(UpdateAbandoned, match="describe it again"):
        publisher.send(1)
    results = deliver(publisher, publisher.describe(1), [receiver])
    assert isinstance(results[0], Staged)
    receiver.close()
    publisher.close()


def slices_of(source: torch.Tensor, parts: int) -> list[tuple[torch.Tensor, Slice]]:
    """By columns, as ranks have them of a matrix that is split by its inputs."""
    width = source.shape[1] // parts
    return [
        (source[:, at : at + width].contiguous(), Slice(tuple(source.shape), (0, at)))
        for at in range(0, source.shape[1], width)
    ]


def test_ranks_send_their_own_slices_to_all_engines() -> None:
    """Two ranks, each with some columns, to two engines, twice: the second time both groups are there."""
    source = torch.randn(64, 1 << 10)
    ranks = [
        CollectivePublisher({"w": own}, Publishing(slices={"w": at}, bucket_bytes=1 << 15))
        for own, at in slices_of(source, 2)
    ]
    engines = [CollectiveReceiver(), CollectiveReceiver()]
    for version in (1, 2):
        parts = [
            publish(rank, version, {"w": own})
            for rank, (own, _) in zip(ranks, slices_of(source, 2), strict=True)
        ]
        update = join_updates(parts)
        assert len(update.buckets) == 8
        second = threading.Thread(target=ranks[1].send, args=[version])
        second.start()
        staged = deliver(ranks[0], update, engines)
        second.join(timeout=60)
        for engine, each in zip(engines, staged, strict=True):
            live = {"w": torch.zeros_like(source)}
            engine.load(each, live)()
            assert torch.equal(live["w"], source)
        for rank in ranks:
            rank.release(version)
    assert [rank._epoch for rank in ranks] == [0, 0]
    for closed in (*engines, *ranks):
        closed.close()


def test_a_failing_engine_stops_every_rank() -> None:
    """It fails at the first bucket of the second rank, when it is in both groups."""
    source = torch.randn(64, 1 << 10)
    ranks = [
        CollectivePublisher({"w": own}, Publishing(slices={"w": at}, bucket_bytes=1 << 15))
        for own, at in slices_of(source, 2)
    ]
    parts = [publish(rank, 1, {"w": own}) for rank, (own, _) in zip(ranks, slices_of(source, 2), strict=True)]
    engine, failures = CollectiveReceiver(), []
    fetch = engine._fetch

    def fail(update: WeightUpdate, number: int, cancelled: threading.Event) -> torch.Tensor:
        if number == 1:
            raise PenstockError("no room")
        return fetch(update, number, cancelled)

    engine._fetch = fail  # type: ignore[method-assign]

    def failing_send(rank: CollectivePublisher) -> None:
        with pytest.raises(UpdateAbandoned, match="no room") as refusal:
            rank.send(1)
        failures.append(str(refusal.value))

    threads = [threading.Thread(target=failing_send, args=[rank]) for rank in ranks]
    for thread in threads:
        thread.start()
    with pytest.raises(PenstockError, match="no room"):
        engine.stage(join_updates(parts))
    for thread in threads:
        thread.join(timeout=60)
    assert failures == ["the update was abandoned: an engine could not take it: no room"] * 2
    for closed in (engine, *ranks):
        closed.close()


def test_a_rank_that_has_nothing_waits_for_nobody() -> None:
    publisher = CollectivePublisher({})
    assert publish(publisher, 7, {}).buckets == ()
    publisher.send(7)
    publisher.close()
