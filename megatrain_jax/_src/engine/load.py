"""`load`: the parameters of a checkpoint, or the model, without a loss, an optimizer or a batch."""

from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.traverse_util import unflatten_dict

from megatrain_jax._src.engine.adapt.adapters import adapt_alone, check_model
from megatrain_jax._src.engine.checkpoint.folder import CheckpointError, local_path, steps
from megatrain_jax._src.engine.checkpoint.given_parameters import (
    saved_arrays,
    with_given_parameters,
)


def load(folder: str | PathLike[str], model: Any = None) -> Any:
    """Loads the parameters of a checkpoint, or a model with them, for inference.

    Args:
        folder: A checkpoint: the `checkpoint_dir` of `fit` for its newest one, the folder of one
            step, `KeepBest.path`, or a folder of `Trainer.save`.
        model: A model like the trained one, an `nnx.Module`, a function that builds one, a
            `flax.linen.Module` or a pytree of arrays; None for the parameters alone.

    Returns:
        Without `model`, the parameters as nested dicts of NumPy arrays. With one, the model with
        the checkpoint's parameters, in the dtypes of the model, and statistics; an NNX module is in
        evaluation mode. For a Linen module, the variables for ``module.apply``, which are not
        compared with it. Random keys are those of `model`.

    Raises:
        TypeError: If `model` is of no supported kind.
        ValueError: If the checkpoint doesn't fit `model`.
        CheckpointError: If there is no whole checkpoint.

    Examples:
        >>> import jax, optax, tempfile
        >>> from flax import nnx
        >>> data = [jax.numpy.ones((4, 3))] * 2
        >>> def loss_fn(model, batch):
        ...     return (model(batch) ** 2).mean()
        >>> def build():
        ...     return nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        >>> folder = tempfile.mkdtemp()
        >>> from megatrain_jax import fit
        >>> options = {"checkpoint_dir": folder, "progress": False}
        >>> result = fit(build, loss_fn, data, optax.sgd(0.1), **options)
        >>> load(folder, build)(data[0]).shape
        (4, 2)
    """
    path = local_path(folder, "folder")
    if found := steps(path):
        path /= str(found[-1])
    every = saved_arrays(path, "folder")
    if model is None or isinstance(model, linen.Module):
        names = ("params",) if model is None else ("params", "variables")
        arrays = {n: np.asarray(a) for n, a in every.items() if n[0] in names}
        if not arrays:
            raise CheckpointError(f"{path} has no parameters of a run")
        tree = {name: {} for name in names} | unflatten_dict(arrays)
        return tree["params"] if model is None else {**tree["variables"], "params": tree["params"]}
    check_model(model)
    adapted, initial = adapt_alone(model)
    initial.check()
    initial = with_given_parameters(path, initial, adapted, [None] * len(adapted.shapes))
    # In the host's memory, as in `Trainer.model`; only one passes through a device at a time.
    leaves = [
        np.asarray(initial.leaves([i])[0]).astype(shape.dtype)
        for i, shape in enumerate(adapted.shapes)
    ]
    saved = {n[1:]: a for n, a in every.items() if n[0] == "variables"}
    variables = [
        own
        if jnp.issubdtype(own.dtype, jax.dtypes.prng_key) or name not in saved
        else np.asarray(saved[name]).astype(own.dtype)
        for name, own in zip(
            (tuple(map(str, path)) for path in adapted.variable_paths),
            initial.variables(),
            strict=True,
        )
    ]
    found = adapted.rebuild(leaves, variables)
    if isinstance(found, nnx.Module):
        found.eval()
    return found
