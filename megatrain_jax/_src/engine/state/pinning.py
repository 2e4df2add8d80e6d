"""The system's page size for pinned host memory, and its limits on pinning.

A low `RLIMIT_MEMLOCK` is no reason to refuse a run: it is small in most containers, and CUDA's
driver on native Linux is not known to obey it. If pinning fails, the error names it as a possible
reason.
"""

import resource
from pathlib import Path

from megatrain_jax._src.common.host_memory import read_text
from megatrain_jax._src.common.sizes import sized

# Pools are pinned in shared memory, which has its own setting.
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_KERNEL = Path("/proc/sys/kernel/osrelease")
_GIB = 2**30
# Reported by users, regardless of the machine's memory.
_PINNED_BY_WSL = _GIB
# Measured: 1 to 2 GiB per second; with huge pages two to three times as much or more.
_SMALL_PAGES_PER_SECOND = 1.5 * _GIB
# A shorter wait needs no advice.
_SECONDS_TO_EXPLAIN = 10.0


def pins_small_pages(setting: Path = _HUGE_PAGES) -> bool:
    """Whether the kernel pins memory in small pages although it supports huge ones.

    Args:
        setting: The kernel's file of choices, with the current choice in brackets.
    """
    text = read_text(setting) or ""
    # With "advise" the allocating code, the GPU's driver, would have to ask for huge pages.
    return any(f"[{word}]" in text for word in ("never", "advise", "deny"))


def advice_on_pages(num_bytes: int, setting: Path = _HUGE_PAGES) -> str | None:
    """Returns advice to enable huge pages before a large amount of memory is pinned.

    Args:
        num_bytes: Bytes that are about to be pinned.
        setting: See `pins_small_pages`.

    Returns:
        The advice; None if the wait is short or huge pages are enabled.
    """
    seconds = num_bytes / _SMALL_PAGES_PER_SECOND
    if seconds < _SECONDS_TO_EXPLAIN or not pins_small_pages(setting):
        return None
    return (
        f"pinning {sized(num_bytes)} of host memory: the kernel finds the pages 4 KiB at a time, "
        f"for about {seconds:.0f} s. With huge pages it takes half of that or much less: before "
        f"the next run, `echo always | sudo tee {setting}`"
    )


def pinnable_bytes(kernel: Path = _KERNEL) -> int | None:
    """Returns the known limit of memory that this system can pin in total.

    Args:
        kernel: The kernel's file with its release, which names Windows' subsystem for Linux.

    Returns:
        Bytes; None if no limit is known.
    """
    return _PINNED_BY_WSL if "microsoft" in (read_text(kernel) or "").lower() else None


def warning_of_little(num_bytes: int, kernel: Path = _KERNEL) -> str | None:
    """Returns a warning if training pins more than `pinnable_bytes`; None otherwise."""
    limit = pinnable_bytes(kernel)
    if limit is None or num_bytes <= limit:
        return None
    return (
        f"training pins {sized(num_bytes)} of host memory or more, and Windows' subsystem for "
        f"Linux was seen to pin about {sized(limit)} in all: if the system refuses the rest, the "
        "run ends and says how much was pinned. A Linux system of its own has no such limit"
    )


def refusal(num_pinned: int, num_refused: int, needed: int, kernel: Path = _KERNEL) -> str:
    """Returns an error message for a system that refuses to pin all the memory training needs.

    Args:
        num_pinned: Bytes that the system has pinned.
        num_refused: Bytes that the system then refused to pin.
        needed: Bytes that training needs.
        kernel: See `pinnable_bytes`.
    """
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if pinnable_bytes(kernel) is not None:
        why = "Windows' subsystem for Linux pins little, a Linux system of its own more."
    elif locked != resource.RLIM_INFINITY:
        why = (
            f"This process may lock {sized(locked)} (`ulimit -l`): if the driver obeys that, give "
            "the container more, as with `--ulimit memlock=-1`."
        )
    else:
        why = "A limit of the container, or what other programs have pinned, may be the reason."
    return (
        f"The system pinned {sized(num_pinned)} of host memory and refused {sized(num_refused)} "
        f"more; training needs {sized(needed)} pinned. {why} Or train what pins less: give a "
        f"smaller `host_budget`, with which less waits in the host, or store fewer bytes a "
        "parameter (Precision.compact(), an optimizer with less state such as adafactor or lion)."
    )
