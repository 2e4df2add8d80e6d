"""Runs of several processes, on one host or on several.

Imported on first use as `megatrain_jax.distributed`.
"""

from megatrain_jax._src.common.suggestions import explain as _explain
from megatrain_jax._src.engine.distributed import (
    gather,
    in_first,
    initialize,
    is_first,
    leave,
    summary,
)
from megatrain_jax._src.engine.state.processes import PeerEndedError

__all__ = ["PeerEndedError", "gather", "in_first", "initialize", "is_first", "leave", "summary"]

_explain(globals())
