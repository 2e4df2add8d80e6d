"""A machine's ways of pinning host memory: in which pages, and how much of it in all.

`RLIMIT_MEMLOCK` refuses nothing by itself: CUDA's driver on Linux itself is not known to obey it,
and it is small in most containers. Where pinning fails, the error names it as a possible reason.
"""

import resource
from pathlib import Path

from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.state.host_memory import read_text

# A pool is pinned in shared memory, which has a setting of its own.
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_KERNEL = Path("/proc/sys/kernel/osrelease")
_GIB = 2**30
# As users report, whatever the machine's memory.
_PINNED_BY_WSL = _GIB
# 1 to 2 GiB a second were measured, with huge pages two to three times as much or more.
_SMALL_PAGES_PER_SECOND = 1.5 * _GIB
# A shorter wait needs no advice.
_SECONDS_TO_EXPLAIN = 10.0


def pins_small_pages(setting: Path = _HUGE_PAGES) -> bool:
    """Whether the kernel pins memory in its smallest pages though it has huge ones.

    Args:
        setting: The kernel's file of the choices, with the one that is in force in brackets.
    """
    text = read_text(setting) or ""
    # Who takes the memory, the GPU's driver, gives no advice.
    return any(f"[{word}]" in text for word in ("never", "advise", "deny"))


def advice_on_pages(num_bytes: int, setting: Path = _HUGE_PAGES) -> str | None:
    """Returns the sentences that huge pages deserve before so much memory is pinned.

    Args:
        num_bytes: Bytes that are about to be pinned.
        setting: See `pins_small_pages`.

    Returns:
        The sentences; None if the wait is short or the pages are huge already.
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
    """Returns the memory that this system pins in all, as far as it is known to be little.

    Args:
        kernel: The kernel's file with its release, which names Windows' subsystem for Linux.

    Returns:
        Bytes; None if nothing is known to limit it.
    """
    return _PINNED_BY_WSL if "microsoft" in (read_text(kernel) or "").lower() else None


def warning_of_little(num_bytes: int, kernel: Path = _KERNEL) -> str | None:
    """Returns a warning if training has to pin more memory than this system is known to pin."""
    limit = pinnable_bytes(kernel)
    if limit is None or num_bytes <= limit:
        return None
    return (
        f"training pins {sized(num_bytes)} of host memory or more, and Windows' subsystem for "
        f"Linux was seen to pin about {sized(limit)} in all: if the system refuses the rest, the "
        "run ends and says how much was pinned. A Linux system of its own has no such limit"
    )


def refusal(num_pinned: int, num_refused: int, needed: int, kernel: Path = _KERNEL) -> str:
    """Returns the sentences on a system that refuses to pin as much as training needs.

    Args:
        num_pinned: Bytes that it has pinned.
        num_refused: Bytes that it then refused.
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
