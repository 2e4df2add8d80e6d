"""Ready-made callbacks for `fit` and `train`, and the protocol for writing your own.

Imported on first use as `megatrain_jax.callbacks`.
"""

from typing import TYPE_CHECKING

from megatrain_jax._src.callbacks.best import EarlyStopping, KeepBest
from megatrain_jax._src.callbacks.callback import Callback
from megatrain_jax._src.callbacks.live import LiveCurve
from megatrain_jax._src.callbacks.logs import CSVLog, JSONLog, MLflow, TensorBoard, Trackio, WandB
from megatrain_jax._src.callbacks.profile import Profile
from megatrain_jax._src.common.suggestions import explain as _explain

if TYPE_CHECKING:
    from megatrain_jax._src.lm.samples import Samples

__all__ = [
    "CSVLog",
    "Callback",
    "EarlyStopping",
    "JSONLog",
    "KeepBest",
    "LiveCurve",
    "MLflow",
    "Profile",
    "Samples",
    "TensorBoard",
    "Trackio",
    "WandB",
]

# With it come the language models.
_explain(globals(), later={"lm.samples": "Samples"})
