"""Train any Flax model whose state does not fit the GPU, from pinned host memory."""

from megatrain_jax import compilation_cache
from megatrain_jax.memory import allocator, pool

# All before anything starts JAX's backend or compiles.
allocator.choose()
pool.set_limit()
compilation_cache.enable()

from megatrain_jax.checkpoint.folder import CheckpointError  # noqa: E402
from megatrain_jax.fit import fit, train  # noqa: E402
from megatrain_jax.history import History  # noqa: E402
from megatrain_jax.memory.hardware import (  # noqa: E402
    A100_80GB,
    H200,
    RTX_3080,
    RTX_4090,
    Hardware,
    this_machine,
)
from megatrain_jax.memory.plan import Plan  # noqa: E402
from megatrain_jax.plan_warning import PlanWarning  # noqa: E402
from megatrain_jax.planning import plan  # noqa: E402
from megatrain_jax.precision import Precision  # noqa: E402
from megatrain_jax.result import DataRanOutError, FitResult  # noqa: E402
from megatrain_jax.trainer import Trainer  # noqa: E402

__all__ = [
    "A100_80GB",
    "H200",
    "RTX_3080",
    "RTX_4090",
    "CheckpointError",
    "DataRanOutError",
    "FitResult",
    "Hardware",
    "History",
    "Plan",
    "PlanWarning",
    "Precision",
    "Trainer",
    "fit",
    "plan",
    "this_machine",
    "train",
]
