"""The memory of this machine's GPUs, from NVIDIA's driver, before JAX or CUDA start.

NVML, the library of `nvidia-smi`, neither makes a CUDA context nor hinders a later fork.
"""

import contextlib
import ctypes
import os
from typing import Any, NamedTuple

_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0


class GpuMemory(NamedTuple):
    """The memory of one GPU in bytes: in all, and unused."""

    total: int
    free: int


class _Memory(ctypes.Structure):
    """NVML's `nvmlMemory_t`; used memory includes the driver's own."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def gpu_memories() -> list[GpuMemory]:
    """The memory of each visible GPU; empty if the driver is missing or refuses."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        if library.nvmlInit_v2() != _SUCCESS:
            return []
    except (OSError, AttributeError):  # no driver, or an old one
        return []
    with contextlib.suppress(AttributeError):
        try:
            return _visible(_memories(library))
        finally:
            library.nvmlShutdown()
    return []


def _memories(library: Any) -> list[GpuMemory]:
    """The memory of each GPU; empty if the driver refuses, or if a GPU is divided."""
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _SUCCESS:
        return []
    found = []
    for index in range(count.value):
        device, memory = ctypes.c_void_p(), _Memory()
        mode, pending = ctypes.c_uint(), ctypes.c_uint()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != _SUCCESS:
            return []
        if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) != _SUCCESS:
            return []
        # CUDA shows only a part of a divided GPU (MIG). An old GPU returns an error here.
        both = ctypes.byref(mode), ctypes.byref(pending)
        if library.nvmlDeviceGetMigMode(device, *both) == _SUCCESS and mode.value:
            return []
        found.append(GpuMemory(memory.total, memory.free))
    return found


def _visible(every: list[GpuMemory]) -> list[GpuMemory]:
    """The GPUs in `CUDA_VISIBLE_DEVICES`; all GPUs if unset or not by numbers."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return every
    numbers = [int(name) for name in names.split(",") if name.strip().isdecimal()]
    # CUDA numbers different GPUs by speed, NVML by their place.
    alike = len({gpu.total for gpu in every}) == 1 and max(numbers, default=-1) < len(every)
    return [every[number] for number in numbers] if alike and numbers else every
