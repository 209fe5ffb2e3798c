"""What is said when there is no cluster to speak to. What Ray does is tested on real nodes (`tests/ray_live`)."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from penstock.errors import ConfigError, MissingExtraError
from penstock.processes.launchers.ray_connection import PlacingActor, _why_not, connect_to_ray


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        MissingExtraError, match=r"launcher\.kind=ray needs ray: pip install 'penstock\[ray\]'"
    ):
        connect_to_ray("auto", {}, print)


def fake_ray(*refusals: Exception) -> ModuleType:
    """A cluster that refuses so many times, and then takes whoever comes."""
    coming = iter(refusals)

    def init(**options: object) -> None:
        if (refusal := next(coming, None)) is not None:
            raise refusal

    ray = ModuleType("ray")
    ray.__dict__.update(
        init=init,
        shutdown=lambda: None,
        cloudpickle=SimpleNamespace(register_pickle_by_value=lambda module: None),
        util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.3"),
    )
    return ray


def test_a_cluster_without_tokens_is_a_loud_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", fake_ray())
    said: list[str] = []
    assert connect_to_ray("auto", {}, said.append) == "10.0.0.3"
    (warning,) = said
    assert warning.startswith(
        "WARNING: this Ray cluster has no token authentication: anyone who reaches its ports"
    )
    assert connect_to_ray("auto", {"RAY_AUTH_MODE": "token"}, said.append) == "10.0.0.3"
    assert said == [warning]


def test_from_outside_workers_come_back_by_the_network_on_which_the_cluster_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", fake_ray())
    assert connect_to_ray("ray://127.0.0.1:10001", {"RAY_AUTH_MODE": "token"}, print) == "127.0.0.1"


OUTSIDE = "ray://127.0.0.1:10001"
DEAD = ConnectionAbortedError(
    "Initialization failure from server:\n…\nStarting Ray client server failed. See x.err"
)
LATE = ConnectionAbortedError(
    "Initialization failure from server:\n…\nProxy failed to Connect to backend! Check x"
)


def test_a_client_server_that_dies_as_it_is_forked_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", fake_ray(DEAD, LATE))
    said: list[str] = []
    assert connect_to_ray(OUTSIDE, {"RAY_AUTH_MODE": "token"}, said.append) == "127.0.0.1"
    assert (
        said
        == [
            "WARNING: the Ray head at launcher.address=ray://127.0.0.1:10001 could not start a client server for this "
            "run; start the head with GRPC_ENABLE_FORK_SUPPORT=0 (docs/cluster.md); trying again"
        ]
        * 2
    )


def test_a_head_that_never_starts_a_client_server_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", fake_ray(DEAD, LATE, DEAD))
    with pytest.raises(
        ConfigError, match=r"could not start a client server .* GRPC_ENABLE_FORK_SUPPORT=0 \("
    ):
        connect_to_ray(OUTSIDE, {}, lambda line: None)


def test_another_refusal_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", fake_ray(ConnectionError("ray client connection timeout")))
    with pytest.raises(ConfigError, match="there is no Ray cluster at .* ray client connection timeout"):
        connect_to_ray(OUTSIDE, {}, print)


def test_from_outside_without_ray_s_client_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", fake_ray(ImportError("Ray Client requires grpcio")))
    with pytest.raises(
        MissingExtraError, match=r"10001 needs Ray's client: pip install 'ray\[client\]', here and"
    ):
        connect_to_ray(OUTSIDE, {}, print)


def test_a_cluster_of_another_version_ends_the_run_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusal = RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.59.0")
    monkeypatch.setitem(sys.modules, "ray", fake_ray(refusal))
    with pytest.raises(ConfigError, match=r"^Ray must have one version everywhere: .* with: Ray: 2\.59\.0$"):
        connect_to_ray("auto", {}, print)


def test_another_version_is_one_sentence() -> None:
    error = RuntimeError(
        "Version mismatch: The cluster was started with:\n    Ray: 2.59.0\n    Python: 3.11.7\n"
        "This process on node 10.0.0.3 was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
    )
    assert _why_not("auto", {}, error) == (
        "Ray must have one version everywhere: Version mismatch: The cluster was started with: Ray: 2.59.0 Python: "
        "3.11.7 This process on node 10.0.0.3 was started with: Ray: 2.60.0 Python: 3.11.7"
    )


def test_a_missing_token_is_a_guess_only_where_none_is_set() -> None:
    error = ConnectionError("Failed to connect\nmore")
    assert _why_not("head:6379", {}, error) == (
        "there is no Ray cluster at launcher.address=head:6379, or it wants a token (RAY_AUTH_MODE=token): Failed "
        "to connect"
    )
    assert "wants a token" not in _why_not("auto", {"RAY_AUTH_MODE": "token"}, error)


AGENT = """
import os, sys
token = sys.stdin.read()
print(token == "the-" + "token", token in str(os.environ), file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.processes
def test_an_agent_gets_the_token_from_its_input_and_its_end_is_told() -> None:
    end = PlacingActor().run(["-c", AGENT], "the-token")
    assert (end.code, end.last_lines.split()) == (3, ["True", "False"])
