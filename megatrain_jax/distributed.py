"""Runs of several processes, on one host or on several.

Imported on first use as `megatrain_jax.distributed`.
"""

from megatrain_jax._src.common.suggestions import explain as _explain
from megatrain_jax._src.engine.distributed import from_first, initialize, is_first

__all__ = ["from_first", "initialize", "is_first"]

_explain(globals())
