"""Train any Flax model whose state does not fit the GPU, from pinned host memory."""

from megatrain_jax._src.startup import allocator as _allocator
from megatrain_jax._src.startup import compilation_cache as _compilation_cache
from megatrain_jax._src.state import pool as _pool

# All before anything starts JAX's backend or compiles.
_allocator.choose()
_pool.set_limit()
_compilation_cache.enable()

from megatrain_jax._src.build.precision import Precision  # noqa: E402
from megatrain_jax._src.checkpoint.folder import CheckpointError  # noqa: E402
from megatrain_jax._src.comparing import compare_plans  # noqa: E402
from megatrain_jax._src.fit import fit, train  # noqa: E402
from megatrain_jax._src.history import History  # noqa: E402
from megatrain_jax._src.planning import plan  # noqa: E402
from megatrain_jax._src.report.comparison import PlanComparison, PlanRow  # noqa: E402
from megatrain_jax._src.report.plan import GroupRow, Plan, TileRow  # noqa: E402
from megatrain_jax._src.report.warnings import PlanWarning  # noqa: E402
from megatrain_jax._src.runtime.training import StepMetrics  # noqa: E402
from megatrain_jax._src.state.cards import (  # noqa: E402
    A100_80GB,
    B200,
    GH200,
    H100,
    H200,
    HGX_H100,
    HGX_H200,
    L40S,
    RTX_3080,
    RTX_3090,
    RTX_4090,
    RTX_5090,
    card,
    this_machine,
)
from megatrain_jax._src.state.hardware import Hardware  # noqa: E402
from megatrain_jax._src.train.result import DataRanOutError, FitResult, StopTraining  # noqa: E402
from megatrain_jax._src.trainer import Trainer  # noqa: E402

# Its only place: the package is built with it, and a tree that isn't installed has it, too.
__version__ = "0.1.0"

__all__ = [
    "A100_80GB",
    "B200",
    "GH200",
    "H100",
    "H200",
    "HGX_H100",
    "HGX_H200",
    "L40S",
    "RTX_3080",
    "RTX_3090",
    "RTX_4090",
    "RTX_5090",
    "CheckpointError",
    "DataRanOutError",
    "FitResult",
    "GroupRow",
    "Hardware",
    "History",
    "Plan",
    "PlanComparison",
    "PlanRow",
    "PlanWarning",
    "Precision",
    "StepMetrics",
    "StopTraining",
    "TileRow",
    "Trainer",
    "card",
    "compare_plans",
    "fit",
    "plan",
    "this_machine",
    "train",
]
