"""Finds this host's address for gloo, the library that connects CPU devices over a network.

By default gloo looks up the host's own name. In /etc/hosts, Debian and Ubuntu give it the address
127.0.1.1, which other hosts can't reach. Such a host then uses its source address on the way to the
first process. The host of the first process uses its source address on the way to another host.
"""

import contextlib
import functools
import ipaddress
import socket
from collections.abc import Callable
from typing import Any

from megatrain_jax._src.engine.state.coordination import Board

_FOLDER = "megatrain/addresses"
_SECONDS = 60.0


def address_towards(host: str) -> str:
    """The address of this host on its way to another one, without sending; "" if there is none."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, to in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as opened:
                opened.connect(to)
                return opened.getsockname()[0]
    return ""


def reached_at(
    board: Board,
    count: int,
    index: int,
    first: str,
    towards: Callable[[str], str] = address_towards,
) -> str | None:
    """The address at which other hosts reach this one; None if there is none or its name has it.

    All processes have to call this, once they are connected.

    Args:
        board: The board of the processes.
        count: Number of processes.
        index: Number of this one.
        first: The first process's host.
        towards: See `address_towards`.
    """
    own = towards(first)
    board.write(f"{_FOLDER}/{index}", own.encode())
    if not _is_within(towards(socket.gethostname())):
        return None
    for i in range(count):
        board.wait(f"{_FOLDER}/{i}", _SECONDS)
    if not _is_within(own):
        return own
    others = (text.decode() for text in board.read(_FOLDER).values())
    return next((towards(other) for other in others if not _is_within(other)), None)


def take(address: str) -> None:
    """Has JAX's gloo use this address; before JAX's devices are there."""
    # JAX passes no host name, and has no option for one.
    from jax._src import lib

    found: Any = getattr(lib, "_jax", None)
    if (make := getattr(found, "make_gloo_tcp_collectives", None)) is not None:
        found.make_gloo_tcp_collectives = functools.partial(make, hostname=address)


def _is_within(address: str) -> bool:
    """Whether only this host itself reaches an address."""
    return not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback
