"""Checks of the parts of a run: the model, the loss, the optimizer, data and trainers.

These checks trace nothing and draw no batch, so they report a mistake at once.
"""

from collections import Counter
from collections.abc import Iterable
from os import PathLike
from typing import Any

import jax
import numpy as np
import optax
from flax import linen
from jax.sharding import AbstractMesh, Mesh

from megatrain_jax._src.common import checks, trees
from megatrain_jax._src.common.checks import refused
from megatrain_jax._src.common.trees import path_name
from megatrain_jax._src.engine.adapt.adapters import check_model, flatten, is_pytree_model
from megatrain_jax._src.engine.adapt.loss_function import check_loss, name_of
from megatrain_jax._src.engine.options.machine import mesh_of
from megatrain_jax._src.engine.options.options import EvalData, are_batches


def check_parts(model: Any, loss_fn: Any, optimizer: Any, params: Any = None) -> None:
    """Checks the types of `Trainer`'s model, loss, optimizer and parameters, not their contents.

    Raises:
        TypeError: If one of them is of no supported kind.
        ValueError: If `params` is neither a path nor a tree of arrays.
    """
    if _is_loss(model) and _is_model(loss_fn):
        raise TypeError(
            f"`model` and `loss_fn` are swapped: `model` is the function {name_of(model)}, which "
            "takes a model and a batch; pass the model first"
        )
    check_model(model)
    check_loss(loss_fn)
    _check_optimizer(optimizer)
    if isinstance(params, str | PathLike):
        checks.path("params", params, ", or a tree of arrays")
    elif params is not None:
        _check_params(params)


def check_order(function: str, optimizer: Any, name: str, batches: Any) -> None:
    """Checks that the optimizer and the batches were not swapped.

    Args:
        function: The function called, with its arguments in order.
        optimizer: The argument `optimizer`.
        name: Name of the argument for batches.
        batches: Value of that argument.

    Raises:
        TypeError: If they are swapped.
    """
    if _is_optimizer(batches) and not _is_optimizer(optimizer):
        raise TypeError(f"`optimizer` and `{name}` are swapped: write {function}")


def check_mesh(mesh: Mesh | AbstractMesh | None) -> None:
    """Checks that a run can use a mesh on this machine; plans don't need this.

    Args:
        mesh: The mesh; None for the local devices.

    Raises:
        ValueError: If it has no devices, or different numbers of devices per process.
    """
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            f"`mesh` must have devices to train on; only `plan` takes an AbstractMesh; "
            f"{mesh_of(mesh.size)}"
        )
    if mesh is None:
        return
    owned = Counter(device.process_index for device in mesh.devices.flat)
    # A run of this process alone may ignore the remaining processes.
    if owned[jax.process_index()] == mesh.size:
        return
    # Batches and checkpoints are divided over processes evenly.
    if len(owned) != jax.process_count() or len(set(owned.values())) > 1:
        rows = ", ".join(f"{owned[i]} of process {i}" for i in range(jax.process_count()))
        raise ValueError(
            "`mesh` must have devices of this process alone, or equally many of each process; it "
            f"has {rows}"
        )


def check_data(name: str, data: Any, one_batch: str) -> None:
    """Checks that something is an iterable of batches, without drawing one.

    Args:
        name: Name of the argument.
        data: Value of the argument.
        one_batch: Advice on how to train on one batch, for the message.

    Raises:
        TypeError: If it isn't.
    """
    if not are_batches(data):
        hint = "call it, and pass what it returns" if callable(data) else one_batch
        if isinstance(data, jax.Array | np.ndarray):
            hint += ", or [x[i : i + n] for i in range(0, len(x), n)], or list(x) of batches"
        raise TypeError(
            f"`{name}` must be an iterable of batches, but is of type {type(data).__name__}; {hint}"
        )
    if isinstance(data, tuple) and len({_kind(array) for array in data} - {None}) > 1:
        raise TypeError(
            f"`{name}` is a tuple of arrays of several kinds, which would be {len(data)} batches; "
            "pass an iterable of batches, such as [(x[i : i + n], y[i : i + n]) for i in range(0, "
            "len(x), n)]"
        )


def _kind(value: Any) -> tuple[Any, int] | None:
    """An array's dtype and number of axes, which all batches share; None for other values."""
    is_array = isinstance(value, jax.Array | np.ndarray)
    return (value.dtype, value.ndim) if is_array else None


def eval_batches(eval_data: EvalData) -> Iterable[Any]:
    """Returns the batches of one evaluation; calls `eval_data` if it is a function.

    Raises:
        TypeError: If the function did not return batches.
    """
    if isinstance(eval_data, Iterable):
        return eval_data
    batches = eval_data()
    if not are_batches(batches):
        raise TypeError(
            f"`eval_data` must return an iterable of batches, but returned {type(batches).__name__}"
        )
    return batches


def check_trainer(trainer: Any) -> None:
    """Checks that the argument `trainer` is one.

    Raises:
        TypeError: If it is no trainer.
    """
    # Checked by its methods, because this file can't import its class.
    methods = ("dispatch", "read", "evaluate", "flush")
    if isinstance(trainer, type) or not all(callable(getattr(trainer, m, None)) for m in methods):
        # A `FitResult` has its trainer there.
        found = getattr(trainer, "trainer", None)
        hint = "pass result.trainer" if found is not None else "make one with Trainer(...)"
        raise TypeError(refused("trainer", "a Trainer", trainer, hint))


def _is_loss(value: Any) -> bool:
    """Whether a value is certainly a loss function, neither a model nor a model's builder."""
    if not callable(value) or isinstance(value, type | linen.Module) or is_pytree_model(value):
        return False
    takes = [number for number in (0, 2, 3) if checks.can_be_called(value, number)]
    return bool(takes) and 0 not in takes


def _is_model(value: Any) -> bool:
    """Whether a value can be a model or its builder."""
    try:
        check_model(value)
    except (TypeError, ValueError):
        return False
    return True


def _is_optimizer(value: Any) -> bool:
    has_both = all(callable(getattr(value, name, None)) for name in ("init", "update"))
    return has_both and not isinstance(value, type)


def _check_optimizer(value: Any) -> None:
    if not _is_optimizer(value):
        name = getattr(value, "__name__", "")
        known = name if name.isidentifier() and hasattr(optax, name) else "adamw"
        hint = f"call it: optax.{known}(1e-3), not optax.{known}" if callable(value) else ""
        if value is None:
            hint = "pass an optimizer of Optax, such as optax.adamw(1e-3)"
        elif isinstance(value, str):
            known = value.lower() if hasattr(optax, value.lower()) else "adamw"
            hint = f"pass an optimizer of Optax, such as optax.{known}(1e-3)"
        if hasattr(value, "tx"):  # nnx.Optimizer, flax.training.TrainState
            hint = "pass its `tx`, since state is kept here"
        raise TypeError(refused("optimizer", "an optax.GradientTransformation", value, hint))


def _check_params(params: Any) -> None:
    trees.leaves("params", params)
    paths, arrays, _ = flatten(params)
    for path, leaf in zip(paths, arrays, strict=True):
        if not all(hasattr(leaf, attribute) for attribute in ("shape", "dtype", "__array__")):
            raise ValueError(
                "`params` must be a tree of arrays or the path of a checkpoint, but "
                f"{path_name(path) or 'it'} is of type {type(leaf).__name__}"
            )
