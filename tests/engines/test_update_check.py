import pytest

from penstock.engines.update_check import check_update
from penstock.errors import BaseMissing, PenstockError
from penstock.types import AdapterSpec
from tests.engines.contract import update_to

ENGINE = {"name": "engine0", "versions": {"policy": 4}, "interrupts": ("inflight",)}


def test_newer_versions_pass_and_parts_on_top_of_their_base() -> None:
    check_update(update_to(9), "inflight", **ENGINE)
    check_update(update_to(9, base=4), "inflight", **ENGINE)


def adapter_to(version, base, **options):
    spec = AdapterSpec(rank=2, alpha=4.0)
    return update_to(version, selection="adapter", base=base, adapter=spec, **options)


def test_adapters_are_on_top_of_the_full_weights_whatever_their_policy_serves() -> None:
    check_update(adapter_to(9, 2), "inflight", **ENGINE, base=2)
    check_update(adapter_to(1, 2, policy="new"), "inflight", **ENGINE, base=2, adds_policies=True)
    with pytest.raises(
        BaseMissing, match="serves version 2, got an update to 9 that holds only an adapter for version 4"
    ):
        check_update(adapter_to(9, 4), "inflight", **ENGINE, base=2)
    with pytest.raises(PenstockError, match="serves policy 'policy', got an update of 'new'"):
        check_update(adapter_to(1, 2, policy="new"), "inflight", **ENGINE, base=2)


@pytest.mark.parametrize(
    ("update", "interrupt", "message"),
    [
        (update_to(5), "drain", "engine0 can't update with interrupt 'drain'; set sync.interrupt=inflight"),
        (update_to(5, policy="b"), "inflight", "engine0 serves policy 'policy', got an update of 'b'"),
        (update_to(4), "inflight", "engine0 serves version 4, got an update to 4"),
        (update_to(6, base=5), "inflight", "serves version 4, got an update to 6 .* since version 5"),
    ],
)
def test_what_an_engine_refuses(update, interrupt, message) -> None:
    with pytest.raises(PenstockError, match=message):
        check_update(update, interrupt, **ENGINE)


def test_after_half_an_update_only_a_full_one_will_do() -> None:
    with pytest.raises(PenstockError, match="has weights of no version, got an update to 6"):
        check_update(update_to(6, base=4), "inflight", **ENGINE, is_intact=False)
    check_update(update_to(6), "inflight", **ENGINE, is_intact=False)


def test_a_part_must_name_its_base() -> None:
    with pytest.raises(ValueError, match="selection 'adapter' must name its base"):
        update_to(6, selection="adapter")


def test_full_weights_of_any_version_end_half_an_update() -> None:
    """Those below an adapter are older than what was served."""
    check_update(update_to(2), "inflight", **ENGINE, is_intact=False)
    with pytest.raises(PenstockError, match="serves version 4, got an update to 2"):
        check_update(update_to(2), "inflight", **ENGINE)
    with pytest.raises(BaseMissing, match="has weights of no version, got an update to 5"):
        check_update(adapter_to(5, 4), "inflight", **ENGINE, is_intact=False)
