"""A port for processes that a test starts."""

import socket


def free_port() -> int:
    """A port of this host that nothing listens on now."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]
