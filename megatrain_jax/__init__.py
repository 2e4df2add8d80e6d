"""Train any Flax model whose state does not fit the GPU, from pinned host memory.

Settings that must be made before JAX starts are made at once. Public names and the modules
`callbacks`, `data`, `distributed`, `losses`, `models` and `objectives` are imported on first use,
so that commands that need no JAX don't wait for it.
"""

from typing import TYPE_CHECKING

from megatrain_jax._src.common.suggestions import explain as _explain
from megatrain_jax._src.engine.startup import allocator as _allocator
from megatrain_jax._src.engine.startup import compilation_cache as _compilation_cache
from megatrain_jax._src.engine.state import pool_limit as _pool_limit

if TYPE_CHECKING:
    from megatrain_jax import callbacks as callbacks
    from megatrain_jax import data as data
    from megatrain_jax import distributed as distributed
    from megatrain_jax import losses as losses
    from megatrain_jax import models as models
    from megatrain_jax import objectives as objectives
    from megatrain_jax._src.engine.checkpoint.folder import CheckpointError
    from megatrain_jax._src.engine.fit import fit, train
    from megatrain_jax._src.engine.history import History
    from megatrain_jax._src.engine.load import load
    from megatrain_jax._src.engine.options.precision import Precision
    from megatrain_jax._src.engine.planning import compare_plans, plan
    from megatrain_jax._src.engine.program.trace_target import TraceTarget, trace_target
    from megatrain_jax._src.engine.report.comparison import PlanComparison, PlanRow
    from megatrain_jax._src.engine.report.plan import GroupRow, Plan, TileRow
    from megatrain_jax._src.engine.report.run_warnings import PlanWarning
    from megatrain_jax._src.engine.runtime.training import StepMetrics
    from megatrain_jax._src.engine.state.hardware import Hardware, card, this_machine
    from megatrain_jax._src.engine.train.result import DataRanOutError, FitResult, StopTraining
    from megatrain_jax._src.engine.trainer import Trainer

# All before anything starts JAX's backend or compiles.
_allocator.choose()
_pool_limit.set_limit()
_compilation_cache.enable()

# The only place of the version; the package build reads it, and it works without installing.
__version__ = "0.2.0"

__all__ = [
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
    "TraceTarget",
    "Trainer",
    "card",
    "compare_plans",
    "fit",
    "load",
    "plan",
    "this_machine",
    "trace_target",
    "train",
]

_NAMES = {
    "engine.checkpoint.folder": "CheckpointError",
    "engine.fit": "fit train",
    "engine.history": "History",
    "engine.load": "load",
    "engine.options.precision": "Precision",
    "engine.planning": "compare_plans plan",
    "engine.program.trace_target": "TraceTarget trace_target",
    "engine.report.comparison": "PlanComparison PlanRow",
    "engine.report.plan": "GroupRow Plan TileRow",
    "engine.report.run_warnings": "PlanWarning",
    "engine.runtime.training": "StepMetrics",
    "engine.state.hardware": "Hardware card this_machine",
    "engine.train.result": "DataRanOutError FitResult StopTraining",
    "engine.trainer": "Trainer",
}
# Not in `__all__`, because `data` needs further packages.
_MODULES = ("callbacks", "data", "distributed", "losses", "models", "objectives")
_explain(globals(), later=_NAMES, modules=_MODULES)
