"""The bound of a step: what it would wait for if everything that can overlap did."""

from typing import Literal

from megatrain_jax._src.state.hardware import Hardware

Bound = Literal["link", "host", "compute", "collectives", "loops", "dispatch", "neither"]

# Which share of the longest time another one has to take to be as long by all that can be foretold.
_AS_LONG = 0.9


def find_bound(
    *,
    hardware: Hardware,
    num_devices: int,
    bytes_in: int,
    bytes_out: int,
    collective_bytes: int,
    flops: int,
    attention_flops: int = 0,
    dispatch_seconds: float = 0.0,
    loop_seconds: float = 0.0,
) -> Bound:
    """Finds what takes longest in a step: arithmetic, the links, the host's memory, collectives.

    Each device computes and takes part in collectives, one after the other. Its link is full
    duplex, so its slower direction counts; the host's memory serves all links, both ways. Where
    only links connect devices, collectives take their time as well, and the memory's twice. They
    are the bound where they are more than half of what takes longest. Python dispatches a step
    while the one before it runs, which is what steps of toy models wait for.

    A worked example: four devices, each of which receives 20 bytes from the host, sends 16 there,
    receives 12 from the others and does a quarter of 400 operations; a second carries 10 bytes over
    a link, 40 through the host's memory, and takes 100 operations::

        link      max(20, 16) / 10 = 2         and 12 / 10 = 1.2 of collectives     3.2 s
        host      4 * (20 + 16) / 40 = 3.6     and 4 * 2 * 12 / 40 = 2.4            6.0 s
        compute   400 / (4 * 100) = 1          and 12 / min(10, 40 / 8) = 2.4       3.4 s

    The bound is the host's memory. If devices received 10 bytes a second from each other directly,
    link and host would have no collectives, and the device 1.2 s of them.

    Args:
        hardware: The rates.
        num_devices: Number of devices.
        bytes_in: Bytes to each device from the host.
        bytes_out: Bytes from each device to the host.
        collective_bytes: Bytes that each device receives from the others.
        flops: Operations of all devices.
        attention_flops: Those of attention among them, which have a rate of their own.
        dispatch_seconds: Seconds in which Python dispatches the step.
        loop_seconds: Seconds by which loops take each device longer than their operations; the
            bound where they are more than the operations take.

    Returns:
        The bound; "neither" if another one takes 90% as long, or more.
    """
    link, host = hardware.link_bytes_per_s, hardware.host_bytes_per_s
    # With a connection of their own, collectives pass neither the links nor the host.
    over_links = collective_bytes if hardware.peer_bytes_per_s is None else 0
    computing = hardware.compute_seconds(flops, attention_flops) / num_devices
    shares: tuple[tuple[Bound, float, float], ...] = (
        (
            "loops" if loop_seconds > computing else "compute",
            computing + loop_seconds,
            collective_bytes / hardware.collective_bytes_per_s(num_devices),
        ),
        ("link", max(bytes_in, bytes_out) / link, over_links / link),
        ("host", num_devices * (bytes_in + bytes_out) / host, num_devices * 2 * over_links / host),
    )
    longest: dict[Bound, float] = {"dispatch": dispatch_seconds}
    for name, own, collectives in shares:
        # What takes most of it names it.
        bound = "collectives" if collectives > own else name
        longest[bound] = max(longest.get(bound, 0.0), own + collectives)
    bound, most = max(longest.items(), key=lambda item: item[1])
    as_long = [name for name, seconds in longest.items() if seconds >= _AS_LONG * most]
    return bound if as_long == [bound] else "neither"
