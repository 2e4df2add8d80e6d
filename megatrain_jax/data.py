"""Conversations, preferences and plain text as packed batches of NumPy arrays.

Imported on first use as `megatrain_jax.data`, because it needs more packages than the rest of the
library.
"""

try:
    import grain  # noqa: F401
    import pyarrow  # noqa: F401
    import transformers  # noqa: F401
except ImportError as caught:
    raise ImportError(
        f'`megatrain_jax.data` needs {caught.name}: pip install "megatrain-jax[finetune]"'
    ) from caught

from megatrain_jax._src.common.suggestions import explain as _explain
from megatrain_jax._src.lm.data.dataset import Dataset, Mixture, mix
from megatrain_jax._src.lm.data.image_rows import has_images
from megatrain_jax._src.lm.data.load import (
    chat,
    distillation,
    image_chat,
    image_prompts,
    preferences,
    prompts,
    text,
    unpaired,
)
from megatrain_jax._src.lm.data.report import DataError, Summary

__all__ = [
    "DataError",
    "Dataset",
    "Mixture",
    "Summary",
    "chat",
    "distillation",
    "has_images",
    "image_chat",
    "image_prompts",
    "mix",
    "preferences",
    "prompts",
    "text",
    "unpaired",
]

_explain(globals())
