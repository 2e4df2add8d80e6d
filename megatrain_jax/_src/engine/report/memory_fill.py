"""The parts of a run that use host and device memory, and the limits of both."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatrain_jax._src.engine.report.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Fill:
    """The use of one memory: the parts in it, and its limit.

    Attributes:
        name: The memory's name.
        parts: The parts by name, in bytes.
        limit: The available bytes; None if unknown.
    """

    name: str
    parts: tuple[tuple[str, int], ...]
    limit: int | None

    @property
    def needed(self) -> int:
        """Bytes of all parts."""
        return sum(size for _, size in self.parts)

    @property
    def fits(self) -> bool:
        """Whether the parts fit, as far as is known."""
        return self.limit is None or self.needed <= self.limit


def fills(plan: "Plan") -> tuple[Fill, Fill]:
    """The memory use of one host and of one device in a plan.

    For example, with 100 GiB at rest on four devices of two hosts, 120 GiB at the peak and 65 GiB
    in each host's process, a host has 50 GiB of state, 10 GiB waiting or in flight, and 5 GiB of
    the rest.
    """
    machine, own, of = plan.hardware, plan.devices_per_host, plan.num_devices
    # A plan's bytes cover all devices; a host has the bytes of its own devices.
    host = [(name, size * own // of) for name, size in plan.host_parts.items() if size]
    device = [
        ("state and activations", plan.device_state_bytes),
        ("other values", plan.device_other_bytes),
    ]
    if plan.device_temporary_bytes is not None:
        device.append(("temporaries", plan.device_temporary_bytes))
    each = "each " if of > 1 else ""
    return (
        Fill(
            name=f"memory of {each if own < of else 'the '}host",
            parts=tuple(host),
            limit=machine and machine.assumed_host_bytes,
        ),
        Fill(
            name=f"memory of {each or 'the '}device",
            parts=tuple(device),
            limit=machine and machine.usable_bytes,
        ),
    )
