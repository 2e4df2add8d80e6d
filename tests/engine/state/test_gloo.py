"""The address at which gloo is reached, on hosts whose own names lead nowhere."""

import socket
from typing import Any

import pytest
from jax._src import lib

from boards import FakeBoard
from megatrain_jax._src.engine.state import gloo

# Of each host, its address on the way to each name; node0 is the first one.
WAYS: dict[str, dict[str, str]] = {
    "node0": {"node0": "127.0.1.1", "10.77.0.2": "10.77.0.1"},
    "node1": {"node0": "10.77.0.2", "node1": "127.0.1.1"},
    "node2": {"node0": "10.77.0.3", "node2": "10.77.0.3"},  # with an address of its own
}


def found(hosts: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What the processes on these hosts find."""
    answers = []
    for i, host in enumerate(hosts):
        board, ways = FakeBoard(), WAYS[host]
        board.notes = {
            f"{gloo._FOLDER}/{k}": WAYS[h]["node0"].encode() for k, h in enumerate(hosts)
        }
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        answers.append(gloo.reached_at(board, len(hosts), i, "node0", ways.__getitem__))
    return answers


def test_hosts_find_the_address_at_which_others_reach_them(monkeypatch):
    hosts = ["node0", "node0", "node1", "node2"]
    assert found(hosts, monkeypatch) == ["10.77.0.1", "10.77.0.1", "10.77.0.2", None]
    assert found(["node0", "node0"], monkeypatch) == [None, None], "one host alone"


def test_an_address_on_the_way_to_a_host():
    assert gloo.address_towards("127.0.0.1") == "127.0.0.1"
    assert gloo.address_towards("no-such-host.invalid") == ""


def test_jax_gets_the_address(monkeypatch):
    given: list[Any] = []
    own: Any = getattr(lib, "_jax")  # noqa: B009
    monkeypatch.setattr(own, "make_gloo_tcp_collectives", lambda **x: given.append(x))
    gloo.take("10.77.0.1")
    own.make_gloo_tcp_collectives(distributed_client=5)
    assert given == [{"distributed_client": 5, "hostname": "10.77.0.1"}]
