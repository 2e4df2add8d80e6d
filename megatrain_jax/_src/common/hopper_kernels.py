"""Whether a trace may call the kernels of the extra `kernels`, which need a Hopper GPU.

The library `jax-linear-attention` (its package is `jla`) computes the products of a mixture of
experts and the gated delta rule on an H100 or H200, on one device. A plan for such a card that is
made on another machine is traced as if the card and the library were there, and says so.
"""

import importlib.util
from contextlib import AbstractContextManager
from functools import cache
from importlib import metadata

import jax

from megatrain_jax._src.common.capability import capability_here
from megatrain_jax._src.common.sharing import num_loss_devices

# The version that the extra installs: the one that measurements and tests on a GPU used.
TESTED_VERSION = "0.1.0"
_HOPPER = 9.0
_CARDS = ("H100", "H200")  # also parts of a GH200's name

# A context of JAX's own, so it is part of the key of JAX's trace caches.
_planned_card = jax.make_user_context(None)


def planned_card(name: str | None) -> AbstractContextManager[None]:
    """Traces the body for a card by its name, or for this machine's GPU if it is None."""
    return _planned_card(name)


def is_planned() -> bool:
    """Whether the trace is for a card of another machine, so that nothing is computed here."""
    return _planned_card.value is not None


def may_be_called() -> bool:
    """Whether one Hopper GPU computes the trace, with the kernels installed or planned."""
    if num_loss_devices() > 1:
        return False
    if is_planned():
        return any(name in _planned_card.value for name in _CARDS)
    return is_installed() and capability_here() == _HOPPER


@cache
def is_installed() -> bool:
    """Whether this environment has the library of kernels."""
    return importlib.util.find_spec("jla") is not None


def untested_version() -> str | None:
    """The installed version of the library; None if it is the tested one, or none is installed."""
    try:
        found = metadata.version("jax-linear-attention")
    except metadata.PackageNotFoundError:
        return None
    return None if found == TESTED_VERSION else found
