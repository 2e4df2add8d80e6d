"""Hosts on this machine: network namespaces with a cable each, which can be cut."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType

_SUBNET = "10.79.0"


def can_make_hosts() -> bool:
    """Whether this process may make network namespaces."""
    return (
        os.geteuid() == 0
        and all(map(shutil.which, ("ip", "unshare")))
        and not subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode
    )


class Hosts:
    """Hosts with a network of their own, joined by a switch; a context manager makes them.

    Attributes:
        address: The address of the first one.
    """

    address = f"{_SUBNET}.1"

    def __init__(self, count: int):
        """Makes no host yet."""
        self._names = [f"mt{os.getpid()}h{i}" for i in range(count)]
        self._switch = f"mt{os.getpid()}s"

    def __enter__(self) -> "Hosts":
        """Makes the hosts."""
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for i, name in enumerate(self._names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            ends = ("veth0", "netns", name, "type", "veth", "peer", "name", f"p{i}")
            _ip("link", "add", *ends, "netns", self._switch)
            _ip("-n", self._switch, "link", "set", f"p{i}", "master", "br0")
            _ip("-n", self._switch, "link", "set", f"p{i}", "up")
            _ip("-n", name, "addr", "add", f"{_SUBNET}.{i + 1}/24", "dev", "veth0")
            _ip("-n", name, "link", "set", "veth0", "up")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Removes them."""
        for name in (*self._names, self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def on(self, index: int, command: Sequence[str]) -> list[str]:
        """A command on one of the hosts, which has a name and, as a machine does, a boot id."""
        # JAX's CPU devices connect by the host's name.
        script = (
            f"hostname node{index}; lines=$(mktemp); for i in $(seq {len(self._names)}); do "
            f'echo "{_SUBNET}.$i node$((i - 1))"; done > $lines; '
            "mount --bind $lines /etc/hosts; cat /proc/sys/kernel/random/uuid > $lines.boot; "
            "mount --bind $lines.boot /proc/sys/kernel/random/boot_id; rm $lines $lines.boot; "
            'exec "$@"'
        )
        inside = ["unshare", "-m", "-u", "--propagation", "private", "bash", "-c", script, "x"]
        return ["ip", "netns", "exec", self._names[index], *inside, *command]

    def cut(self, index: int) -> None:
        """Cuts the cable of a host."""
        _ip("-n", self._switch, "link", "set", f"p{index}", "down")

    def mend(self, index: int) -> None:
        """Mends the cable of a host."""
        _ip("-n", self._switch, "link", "set", f"p{index}", "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
