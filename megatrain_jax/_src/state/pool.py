"""The pinned-host pool: its limit, and taking it from the system in few pieces.

JAX serves `pinned_host` on GPUs from a pool for each device whose limit must be set before its
backend starts, and which fragments when it grows on demand; a process that takes too much is
killed without a message. So the limit is set on import, and the need is checked before anything is
allocated.
"""

import gc
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.state.host_memory import available_bytes, resident_bytes, total_bytes
from megatrain_jax._src.state.placement import Placement
from megatrain_jax._src.state.pool_sizes import fresh, limit_bytes, region_bytes
from megatrain_jax._src.state.taking import Taking, wait_for

LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"

_GIB = 2**30
# Left free while functions are compiled, for what that may send to a device: constants, at most.
_SPARE_BYTES = 2**26


@dataclass(frozen=True, kw_only=True)
class _Pool:
    """The size of one device's pool, in bytes: what was shown to fit, and what likely fits."""

    proven_bytes: int = 0
    likely_bytes: int = 0


# Pools belong to the process and can't be asked for their sizes, so their sizes are kept here.
_pools: dict[Any, _Pool] = {}
# Threads that have to be waited for before more is taken, and whose pools have grown.
_left: list[Taking] = []
# For each device, the pieces to take and by how many bytes its pool grows.
_Rooms = dict[Any, tuple[list[int], int]]


def free_device_bytes(placement: Placement) -> int | None:
    """Returns the memory of each device that JAX can still get.

    Args:
        placement: The devices; of several, the fullest one counts.

    Returns:
        Bytes; None where JAX doesn't tell, as on a CPU.
    """
    free = []
    for device in placement.local_devices:
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")  # 0 where the allocator takes memory as it needs it
        if not limit:
            return None
        free.append(limit - stats["bytes_in_use"])
    return min(free)


def set_limit() -> None:
    """Lets JAX's pinned-host pool grow to this machine's memory less head room.

    Has an effect only before JAX's backend starts, and leaves a limit the user set alone.
    """
    if (total := total_bytes()) is not None:
        os.environ.setdefault(LIMIT_VARIABLE, str(limit_bytes(total) // _GIB))


class Reservation:
    """Host memory that is being taken for the pools of some devices, in a thread for each.

    It is a context: what was not taken when that ends, as by an error, isn't taken any more.
    """

    def __init__(self) -> None:
        """Makes one that takes nothing yet."""
        self._share, self._growth, self._before = 0, 0, resident_bytes()
        self._takings: list[Taking] = []
        self._in_use: dict[Any, int] = {}

    def __enter__(self) -> "Reservation":
        """Begins the context."""
        return self

    def __exit__(self, *error: object) -> None:
        """Ends it, without waiting for the system."""
        for taking in self._takings:
            taking.end()
        _left.extend(self._takings)
        self._takings = []

    def add(self, share: int, rooms: _Rooms, in_use: Mapping[Any, int], spare: int = 0) -> None:
        """Begins to take pieces.

        Args:
            share: Bytes that each device's pool will have had room for then.
            rooms: For each device the pieces, and by how much its pool grows.
            in_use: For each device the bytes of its pool that are in use.
            spare: See `Taking`.
        """
        self._share, self._in_use = share, dict(in_use)
        self._growth += sum(growth + spare for _, growth in rooms.values())
        for device, (pieces, growth) in rooms.items():
            self._takings.append(Taking(device, pieces, growth, spare))
            self._takings[-1].start()

    def extend(self, placement: Placement, share: int) -> None:
        """Takes more if more is needed than was foreseen, while all of that is held.

        Args:
            placement: The devices.
            share: Bytes that each device needs.

        Raises:
            MemoryError: See `reserve`.
        """
        more, limit = share - self._share, limit_bytes(total_bytes())
        if more <= 0:
            return
        self._wait(lambda: None)
        sizes = {taking.device: taking.taken_bytes for taking in self._takings}
        rooms = {d: ([more], region_bytes(more, size, limit)) for d, size in sizes.items()}
        _check_all(placement, share, rooms)
        self.add(share, rooms, self._in_use)

    def finish(self, shown: Callable[[int, int], object]) -> None:
        """Waits until all is taken, and gives it to the pools.

        Args:
            shown: See `reserve`.

        Raises:
            MemoryError: See `reserve`.
        """

        def show() -> None:
            shown(min(resident_bytes() - self._before, self._growth), self._growth)

        self._wait(show)
        shown(self._growth, self._growth)
        devices = {taking.device for taking in self._takings}
        self.__exit__()
        for device, pool in _known(devices).items():
            proven = self._in_use[device] + self._share
            _pools[device] = replace(pool, proven_bytes=proven)

    def _wait(self, show: Callable[[], object]) -> None:
        try:
            wait_for(self._takings, show)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise MemoryError(
                f"Training needs {sized(self._share)} in host memory, more than JAX's pinned-host "
                "pool may still take. Its limit is fixed when JAX's backend starts, to 64 GiB "
                f"unless {LIMIT_VARIABLE} says otherwise: import megatrain_jax before the first "
                f"JAX computation, or set {LIMIT_VARIABLE} to at least {-(-self._share // _GIB)} "
                "before Python starts, with room for other pinned arrays."
            ) from error


def begin(placement: Placement, num_bytes: int, array_bytes: int = 0) -> Reservation | None:
    """Begins what `reserve` ends, while nothing but small arrays is sent to the devices.

    Args:
        placement: See `reserve`.
        num_bytes: See `reserve`; an estimate, of which little is pinned in vain if it is too large.
        array_bytes: See `reserve`.

    Returns:
        What is being taken; None where that is better left to `reserve`: on a CPU, if there is not
        enough memory, if pools have been taken from before, or if it is soon over.
    """
    if placement.platform == "cpu":
        return None
    share, rooms, in_use = _rooms(placement, num_bytes, array_bytes)
    total = sum(growth + _SPARE_BYTES for _, growth in rooms.values())
    new = not any(in_use.values()) and not any(_pools.get(d) for d in in_use)
    # One region for all may have the size of the limit, and small pieces would fit the spare bytes.
    can = all(
        sum(pieces) == growth and pieces[0] > _SPARE_BYTES for pieces, growth in rooms.values()
    )
    enough = placement.processes.num_here * total <= available_bytes()
    if not all(
        placement.processes.gather("planning host memory", bool(rooms) and new and can and enough)
    ):
        return None
    reservation = Reservation()
    reservation.add(share, rooms, in_use, _SPARE_BYTES)
    return reservation


def reserve(
    placement: Placement,
    num_bytes: int,
    array_bytes: int = 0,
    shown: Callable[[int, int], object] = lambda taken, of: None,
    begun: Reservation | None = None,
) -> None:
    """Makes sure that pinned host memory for `num_bytes` more is there, or says why not.

    On a GPU each device's pool takes its share of the memory from the system here, in few large
    pieces, as one that grows array by array can't be filled; finding the pages takes up to a second
    per GiB, and half of that for two devices at once. Room that earlier arrays have left in a pool
    is used first. On a CPU nothing is taken.

    Args:
        placement: Placement of the slabs that are to rest there.
        num_bytes: Bytes that this process is about to allocate there: its state and the arrays it
            has in flight.
        array_bytes: The largest part that one device has of these arrays: it lies in one piece,
            whose end may stay empty.
        shown: Is told now and then how many bytes were taken from the system, and of how many.
        begun: What `begin` gave, if that was asked.

    Raises:
        MemoryError: If the machine, or the limit of JAX's pools, has less.
    """
    if placement.platform == "cpu":
        _check(num_bytes, num_bytes, num_bytes)
        return
    with begun or Reservation() as reservation:
        if begun is not None:
            begun.extend(placement, -(-num_bytes // len(placement.local_devices)))
        else:
            share, rooms, in_use = _rooms(placement, num_bytes, array_bytes)
            if not any(placement.processes.gather("asking for host memory", bool(rooms))):
                return
            _check_all(placement, share, rooms)
            reservation.add(share, rooms, in_use)
        reservation.finish(shown)


def _rooms(
    placement: Placement, num_bytes: int, array_bytes: int
) -> tuple[int, _Rooms, dict[Any, int]]:
    """Each device's share, what has to be taken for whom, and what is in use of their pools."""
    gc.collect()  # an earlier run's arrays may only be waiting for their cycle to be found
    devices = placement.local_devices
    share = -(-num_bytes // len(devices))
    in_use, pools = _pinned_bytes_in_use(devices), _known(devices)
    wanting = [d for d in devices if share > pools[d].proven_bytes - in_use[d]]
    return share, {d: _room(share, array_bytes, pools[d], in_use[d]) for d in wanting}, in_use


def _check_all(placement: Placement, share: int, rooms: _Rooms) -> None:
    """Refuses what the host has no memory for, in all its processes before any takes some."""
    growth = sum(growth for _, growth in rooms.values())
    # What processes of one host need adds up.
    beside, devices = placement.processes.num_here, len(placement.local_devices)
    _check(beside * devices * share, beside * growth, share)
    placement.processes.gather("taking host memory")


def _known(devices: Iterable[Any]) -> dict[Any, _Pool]:
    """The pools, with what threads took that have been left alone; they are waited for."""
    while _left:
        taking = _left.pop()
        taking.join()
        pool = _pools.get(taking.device, _Pool())
        likely = pool.likely_bytes + taking.grown_bytes
        _pools[taking.device] = replace(pool, likely_bytes=likely)
    return {d: _pools.get(d, _Pool()) for d in devices}


def _room(num_bytes: int, array_bytes: int, pool: _Pool, in_use: int) -> tuple[list[int], int]:
    """Returns the sizes to take from a pool for so many bytes more, and by how much it grows."""
    limit = limit_bytes(total_bytes())
    if num_bytes <= pool.likely_bytes - in_use:
        return [num_bytes], 0
    if pool.likely_bytes:
        return [num_bytes], region_bytes(num_bytes, pool.likely_bytes, limit)
    return fresh(num_bytes, array_bytes, limit)


def _check(num_bytes: int, growth: int, share: int) -> None:
    """Refuses what the machine has no memory for; a `share` of it is each device's."""
    available = available_bytes()
    if growth <= available:
        return
    need = f"Training needs {sized(num_bytes)} in host memory"
    if num_bytes > available:
        raise MemoryError(
            f"{need}, {sized(available)} available. Nothing was allocated. Use a smaller model or "
            "an optimizer with less state (adafactor, lion, mu_dtype=bfloat16), end other "
            "programs, drop earlier trainers, or give this process or container more memory."
        )
    raise MemoryError(
        f"{need}, and JAX's pool would take {sized(growth)} to hold that, as it grows by powers "
        f"of two up to its limit; {sized(available)} available. Nothing was allocated. Set "
        f"{LIMIT_VARIABLE}={-(-share // _GIB)} before Python starts, or end other programs."
    )


def _pinned_bytes_in_use(devices: Sequence[Any]) -> dict[Any, int]:
    found = dict.fromkeys(devices, 0)
    for array in jax.live_arrays():
        if array.sharding.memory_kind == "pinned_host":
            for shard in array.addressable_shards:
                if shard.device in found:
                    found[shard.device] += shard.data.nbytes
    return found
