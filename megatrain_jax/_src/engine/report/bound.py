"""Finds the bottleneck of a step: its busiest resource, assuming perfect overlap."""

from collections.abc import Mapping
from typing import Literal

from megatrain_jax._src.engine.state.hardware import Hardware

Bound = Literal[
    "link", "host", "arithmetic", "memory", "collectives", "loops", "dispatch", "neither"
]

# If another resource is busy for at least this fraction of the longest time, neither is named.
_AS_LONG = 0.9

Resource = Literal["device", "link", "host", "dispatch"]
# For each resource, its bottleneck and its busy seconds.
Busy = Mapping[Resource, tuple[Bound, float]]


def busy_resources(
    *,
    hardware: Hardware,
    num_devices: int,
    bytes_in: int,
    bytes_out: int,
    collective_bytes: int,
    flops: int,
    attention_flops: int = 0,
    float8_flops: int = 0,
    float32_flops: int = 0,
    dispatch_seconds: float = 0.0,
    loop_seconds: float = 0.0,
    memory_seconds: float = 0.0,
) -> Busy:
    """The busy seconds of each resource of a step: a device, its link, the host, Python.

    Each device computes and takes part in collectives, one after the other. Its link is full
    duplex, so its slower direction counts. The host's memory serves all links in both directions.
    If devices are connected only by their links, collectives use these too, and the host's memory
    twice. Collectives are a resource's bottleneck if they take more than half of its time. Python
    dispatches a step while the previous one runs; steps of toy models wait for that.

    Example: four devices. Each receives 20 bytes from the host, sends 16 there, receives 12 from
    its peers and does a quarter of 400 operations. Per second, a link carries 10 bytes, the host's
    memory 40, and a device does 100 operations::

        link        max(20, 16) / 10 = 2       and 12 / 10 = 1.2 of collectives     3.2 s
        host        4 * (20 + 16) / 40 = 3.6   and 4 * 2 * 12 / 40 = 2.4            6.0 s
        arithmetic  400 / (4 * 100) = 1        and 12 / min(10, 40 / 8) = 2.4       3.4 s

    The bottleneck is the host's memory. If devices received 10 bytes per second from each other
    directly, link and host would have no collectives, and the device 1.2 s of them.

    Args:
        hardware: The rates.
        num_devices: Number of devices.
        bytes_in: Bytes to each device from the host.
        bytes_out: Bytes from each device to the host.
        collective_bytes: Bytes that each device receives from its peers.
        flops: Operations of all devices.
        attention_flops: Attention's operations among them; they have a rate of their own.
        float8_flops: Operations of float8 products among them; they have a rate of their own, too.
        float32_flops: Operations of float32 products among them, likewise.
        dispatch_seconds: Seconds that Python takes to dispatch the step.
        loop_seconds: Seconds that loops take on each device beyond their operations.
        memory_seconds: Seconds that the remaining kernels take on each device, bound by its memory.
            Of operations, loops and these kernels, the longest names the resource.

    Returns:
        For each resource, the name of its largest part and the seconds of all its parts.
    """
    (inward, outward), host = hardware.link_rates, hardware.host_bytes_per_s
    # Over a direct connection, collectives use neither the links nor the host.
    over_links = collective_bytes if hardware.peer_bytes_per_s is None else 0
    seconds = hardware.compute_seconds(
        flops, attention_flops, hardware.sustained, float8_flops, float32_flops
    )
    computing = seconds / num_devices
    on_device: dict[Bound, float] = {
        "arithmetic": computing,
        "loops": loop_seconds,
        "memory": memory_seconds,
    }
    shares: tuple[tuple[Resource, Bound, float, float], ...] = (
        (
            "device",
            max(on_device, key=lambda name: on_device[name]),
            sum(on_device.values()),
            collective_bytes / hardware.collective_bytes_per_s(num_devices),
        ),
        (
            "link",
            "link",
            max(bytes_in / inward, bytes_out / outward),
            over_links / min(inward, outward),
        ),
        (
            "host",
            "host",
            num_devices * (bytes_in + bytes_out) / host,
            num_devices * 2 * over_links / host,
        ),
    )
    busy: dict[Resource, tuple[Bound, float]] = {"dispatch": ("dispatch", dispatch_seconds)}
    for resource, name, own, collectives in shares:
        # The larger contribution names the bottleneck.
        busy[resource] = "collectives" if collectives > own else name, own + collectives
    return busy


def bound_of(busy: Busy) -> Bound:
    """The bottleneck of a step; "neither" if a second one takes at least 90% as long."""
    longest: dict[Bound, float] = {}
    for name, seconds in busy.values():
        longest[name] = max(longest.get(name, 0.0), seconds)
    bound, most = max(longest.items(), key=lambda item: item[1])
    as_long = [name for name, seconds in longest.items() if seconds >= _AS_LONG * most]
    return bound if as_long == [bound] else "neither"
