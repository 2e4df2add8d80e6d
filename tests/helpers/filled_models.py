"""Models filled with random numbers, and what reading them takes."""

import tracemalloc
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy as safetensors_numpy
from flax import nnx

from megatrain_jax._src.lm.models.pretrained import parameter_tensors
from megatrain_jax.models import Decoder, Pretrained


def filled(pretrained: Pretrained, dtype: Any = jnp.float32) -> Decoder:
    """Returns the decoder with the checkpoint's numbers in it."""
    model = pretrained.model()
    entries = parameter_tensors(pretrained.config)
    for path in [entry.path for entry in entries if entry.trained]:
        module: Any = model
        for key in path[:-1]:
            module = module[key] if isinstance(key, int) else getattr(module, key)
        value = at(pretrained.params, path)
        setattr(module, str(path[-1]), nnx.Param(jnp.asarray(np.asarray(value), dtype)))
    return model


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    files = sorted(folder.glob("*.safetensors"))
    return {k: v for file in files for k, v in safetensors_numpy.load_file(file).items()}


def traced_peak(function: Any) -> int:
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
