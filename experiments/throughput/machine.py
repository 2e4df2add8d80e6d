"""The machine that figures depend on: the device, the host, packages, the link."""

import os
import platform
import resource
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megatrain_jax._src.common import host_memory
from megatrain_jax._src.engine.startup import allocator
from megatrain_jax._src.engine.state import pool_limit

GIB = 2**30
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def hardware() -> dict[str, Any]:
    """Returns the device, the device memory JAX may use, host memory in GiB, and cores."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    host = host_memory.total_bytes()
    return {
        "device": device.device_kind,
        "num_devices": len(jax.devices()),
        "device_limit_gib": None if limit is None else limit / GIB,
        # JAX's share of the device; the library sets one of these variables if neither is set.
        "device_fraction": os.environ.get(allocator.FRACTION)
        or os.environ.get(allocator.OLD_FRACTION),
        "device_allocator": os.environ.get(allocator.VARIABLE),
        "pinned_limit_gib": os.environ.get(pool_limit.LIMIT_VARIABLE),
        "host_gib": None if host is None else host / GIB,
        "num_cores": len(os.sched_getaffinity(0)),
        "platform_version": device.client.platform_version,
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that matter."""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
    }


def peak_device_gib() -> float | None:
    """Returns the most memory of one device this process has used; None where JAX can't tell."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [device["peak_bytes_in_use"] for device in stats if "peak_bytes_in_use" in device]
    return max(peaks) / GIB if peaks else None


def peak_host_gib() -> float:
    """Returns the most host memory this process has ever had resident.

    Linux counts in KiB. Whether pinned pages are among it is up to the driver, so compare it
    with the plan's host memory.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def process_seconds() -> float:
    """Returns the seconds since the kernel started this process, to a hundredth."""
    # The second field is the command in parentheses, which may contain spaces.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def link_gib_per_s(gib: float = 1.0) -> dict[str, float] | None:
    """Returns the rates of plain copies of one large array, one direction at a time.

    Returns:
        The best of four copies "in" to the device and "out" to the host; None if there is no
        room for the array, so that a run doesn't lose its remaining figures.
    """
    shardings = [
        jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind=kind)
        for kind in ("pinned_host", "device")
    ]
    try:
        array = jax.device_put(np.zeros(int(gib * GIB), np.uint8), shardings[0])
        rates = {}
        for name, target in (("in", shardings[1]), ("out", shardings[0])):
            times = []
            for _ in range(4):
                start = time.perf_counter()
                copy = jax.block_until_ready(jax.device_put(array, target))
                times.append(time.perf_counter() - start)
            rates[name] = gib / min(times)
            array = copy
    except jax.errors.JaxRuntimeError as error:
        print(f"no plain copy of {gib:g} GiB: {error}", flush=True)
        return None
    return rates
