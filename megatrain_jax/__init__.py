"""Train any Flax model whose state does not fit the GPU, from pinned host memory.

Settings that must be made before JAX starts are made at once. Public names and the modules
`callbacks`, `data`, `losses` and `models` are imported on first use, so that commands that need no
JAX don't wait for it.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from megatrain_jax._src.common import suggestions as _suggestions
from megatrain_jax._src.startup import allocator as _allocator
from megatrain_jax._src.startup import compilation_cache as _compilation_cache
from megatrain_jax._src.state import pool_limit as _pool_limit

if TYPE_CHECKING:
    from megatrain_jax import callbacks as callbacks
    from megatrain_jax import data as data
    from megatrain_jax import losses as losses
    from megatrain_jax import models as models
    from megatrain_jax._src.checkpoint.folder import CheckpointError
    from megatrain_jax._src.comparing import compare_plans
    from megatrain_jax._src.fit import fit, train
    from megatrain_jax._src.history import History
    from megatrain_jax._src.options.precision import Precision
    from megatrain_jax._src.planning import plan
    from megatrain_jax._src.report.comparison import PlanComparison, PlanRow
    from megatrain_jax._src.report.plan import GroupRow, Plan, TileRow
    from megatrain_jax._src.report.run_warnings import PlanWarning
    from megatrain_jax._src.runtime.training import StepMetrics
    from megatrain_jax._src.state.cards import (
        A10G,
        A100_40GB,
        A100_80GB,
        B200,
        GH200,
        H100,
        H200,
        HGX_H100,
        HGX_H200,
        L4,
        L40S,
        P100,
        RTX_2060,
        RTX_2070,
        RTX_2080,
        RTX_2080_TI,
        RTX_3060,
        RTX_3080,
        RTX_3090,
        RTX_4090,
        RTX_5090,
        RTX_A6000,
        T4,
        V100,
        V100_16GB,
        card,
        this_machine,
    )
    from megatrain_jax._src.state.hardware import Hardware
    from megatrain_jax._src.train.result import DataRanOutError, FitResult, StopTraining
    from megatrain_jax._src.trainer import Trainer

# All before anything starts JAX's backend or compiles.
_allocator.choose()
_pool_limit.set_limit()
_compilation_cache.enable()

# The only place of the version; the package build reads it, and it works without installing.
__version__ = "0.2.0"

__all__ = [
    "A10G",
    "A100_40GB",
    "A100_80GB",
    "B200",
    "GH200",
    "H100",
    "H200",
    "HGX_H100",
    "HGX_H200",
    "L4",
    "L40S",
    "P100",
    "RTX_2060",
    "RTX_2070",
    "RTX_2080",
    "RTX_2080_TI",
    "RTX_3060",
    "RTX_3080",
    "RTX_3090",
    "RTX_4090",
    "RTX_5090",
    "RTX_A6000",
    "T4",
    "V100",
    "V100_16GB",
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

_NAMES = {
    "options.precision": ("Precision",),
    "checkpoint.folder": ("CheckpointError",),
    "comparing": ("compare_plans",),
    "fit": (
        "fit",
        "train",
    ),
    "history": ("History",),
    "planning": ("plan",),
    "report.comparison": (
        "PlanComparison",
        "PlanRow",
    ),
    "report.plan": (
        "GroupRow",
        "Plan",
        "TileRow",
    ),
    "report.run_warnings": ("PlanWarning",),
    "runtime.training": ("StepMetrics",),
    "state.cards": (
        "A10G",
        "A100_40GB",
        "A100_80GB",
        "B200",
        "GH200",
        "H100",
        "H200",
        "HGX_H100",
        "HGX_H200",
        "L4",
        "L40S",
        "P100",
        "RTX_2060",
        "RTX_2070",
        "RTX_2080",
        "RTX_2080_TI",
        "RTX_3060",
        "RTX_3080",
        "RTX_3090",
        "RTX_4090",
        "RTX_5090",
        "RTX_A6000",
        "T4",
        "V100",
        "V100_16GB",
        "card",
        "this_machine",
    ),
    "state.hardware": ("Hardware",),
    "train.result": (
        "DataRanOutError",
        "FitResult",
        "StopTraining",
    ),
    "trainer": ("Trainer",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
# Not in `__all__`, because `data` needs further packages.
_SUBMODULES = ("callbacks", "data", "losses", "models")


def __getattr__(name: str) -> Any:
    """Imports a public name, or one of the modules, on first use."""
    if name in _SUBMODULES:
        return _import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        hint = _suggestions.public_name_hint(name, __name__, (*_MODULES, *_SUBMODULES))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    value = getattr(_import_module(f"megatrain_jax._src.{_MODULES[name]}"), name)
    value = _suggestions.hinting(value, __name__)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names and modules, imported or not."""
    return sorted({*globals(), *__all__, *_SUBMODULES})
