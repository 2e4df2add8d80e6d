"""`load`: the parameters of a checkpoint, or the model, without a loss, an optimizer or a batch."""

from collections.abc import Mapping
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.traverse_util import unflatten_dict

from megatrain_jax._src.common.object_paths import AnyPath
from megatrain_jax._src.common.trees import described, listed, path_name
from megatrain_jax._src.common.user_warnings import warn_user
from megatrain_jax._src.engine.adapt.adapters import AdaptedModel, adapt, adapt_alone, check_model
from megatrain_jax._src.engine.adapt.initial_values import InitialValues
from megatrain_jax._src.engine.adapt.linen_calls import repeated
from megatrain_jax._src.engine.checkpoint import manifest
from megatrain_jax._src.engine.checkpoint.contents import EMA, PARAMS, VARIABLES, TreePath
from megatrain_jax._src.engine.checkpoint.folder import CheckpointError, checkpoint_at, has_manifest
from megatrain_jax._src.engine.checkpoint.given_parameters import (
    saved_arrays,
    with_given_parameters,
)
from megatrain_jax._src.engine.options.options import WhichParams, check_which


def load(folder: str | PathLike[str], model: Any = None, *, params: WhichParams = "trained") -> Any:
    """Loads the parameters of a checkpoint, or a model with them, for inference.

    Args:
        folder: A checkpoint: the `checkpoint_dir` of `fit` for its newest one, the folder of one
            step, `KeepBest.path`, or a folder of `Trainer.save`.
        model: A model like the trained one, an `nnx.Module`, a function that builds one, a
            `flax.linen.Module` or a pytree of arrays; None for the parameters alone.
        params: "ema" for the averages that `ema_decay` kept, in place of trained parameters.

    Returns:
        Without `model`, the parameters as nested dicts of NumPy arrays. With one, the model with
        the checkpoint's parameters, in the dtypes of the model, and statistics; an NNX module is in
        evaluation mode. For a Linen module, the variables for ``module.apply``. They are compared
        with those that the module creates if it is called as the loss called it in training; not if
        the loss called only parts of it. Random keys are those of `model`. A warning tells
        if the checkpoint has no statistics.

    Raises:
        TypeError: If `model` is of no supported kind.
        ValueError: If the checkpoint doesn't fit `model`; the differences are listed.
        CheckpointError: If there is no whole checkpoint, or it has no averages.

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
    check_which(params)
    path = checkpoint_at(folder, "folder")
    every = saved_arrays(path, "folder")
    if params == "ema":
        averages = {(PARAMS, *n[1:]): array for n, array in every.items() if n[0] == EMA}
        if not averages:
            raise CheckpointError(f"{path} has no averages: its run had no `ema_decay`")
        every |= averages  # frozen parameters stay
    if model is None or isinstance(model, linen.Module):
        names = (PARAMS,) if model is None else (PARAMS, VARIABLES)
        arrays = {n: a for n, a in every.items() if n[0] in names}
        if not arrays:
            raise CheckpointError(f"{path} has no parameters of a run")
        if model is not None:
            _check_linen(path, model, every)
        tree = {n: {} for n in names} | unflatten_dict(
            {n: np.asarray(a) for n, a in arrays.items()}
        )
        return tree[PARAMS] if model is None else {**tree[VARIABLES], "params": tree[PARAMS]}
    check_model(model)
    adapted, initial = adapt_alone(model)
    initial.check()
    initial = _fitted(path, adapted, initial, every)
    # In the host's memory, as in `Trainer.model`; only one passes through a device at a time.
    leaves = [
        np.asarray(initial.leaves([i])[0]).astype(shape.dtype)
        for i, shape in enumerate(adapted.shapes)
    ]
    variables = [
        own if name not in every or _is_key(own) else np.asarray(every[name]).astype(own.dtype)
        for name, own in zip(_variable_names(adapted), initial.variables(), strict=True)
    ]
    found = adapted.rebuild(leaves, variables)
    if isinstance(found, nnx.Module):
        found.eval()
    return found


def _check_linen(path: AnyPath, module: linen.Module, every: Mapping[TreePath, Any]) -> None:
    """Compares a checkpoint with the arrays that a Linen module creates when called as in training.

    Raises:
        ValueError: If they differ.
    """
    calls = manifest.read(path).get("calls") if has_manifest(path) else None
    if not calls:
        return
    try:
        adapted, initial = adapt(module, *repeated(calls), seed=0)
    except Exception as error:
        warn_user(
            f"`model` was not compared with {path}, because {type(module).__name__} can't be "
            f"called as in training ({type(error).__name__}: {error})"
        )
        return
    _fitted(path, adapted, initial, every)


def _fitted(
    path: AnyPath, adapted: AdaptedModel, initial: InitialValues, every: Mapping[TreePath, Any]
) -> InitialValues:
    """A model's initial values with the parameters of a checkpoint, which are not read yet.

    Raises:
        ValueError: If parameters or statistics differ in names or shapes.
    """
    own = dict(zip(_variable_names(adapted), adapted.variable_shapes, strict=True))
    saved = {name: array for name, array in every.items() if name[0] == VARIABLES}
    # Others, such as counts of random keys, may differ between training and inference.
    statistics, there = (
        {n for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating) and all(x.shape)}
        for arrays in (own, saved)
    )
    initial = with_given_parameters(path, initial, adapted, [None] * len(adapted.shapes), every)
    lines = [f"{path_name(n[1:])} is not part of the model" for n in sorted(there - own.keys())]
    if missing := sorted(statistics - saved.keys()):
        names = [path_name(name[1:]) for name in missing]
        if saved:
            lines += [f"{name} is missing" for name in names]
        else:
            warn_user(f"{path} holds parameters only: `model` keeps its own{listed(names)}")
    lines += [
        f"{path_name(n[1:])} is {described(saved[n].shape, saved[n].dtype)} there, but has shape "
        f"{list(x.shape)} here"
        for n, x in own.items()
        if n in saved and not _is_key(x) and tuple(saved[n].shape) != x.shape
    ]
    if lines:
        raise ValueError(f"the checkpoint {path} does not fit the model:{listed(lines)}")
    return initial


def _variable_names(adapted: AdaptedModel) -> list[TreePath]:
    return [(VARIABLES, *map(str, path)) for path in adapted.variable_paths]


def _is_key(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
