"""Converts NNX, Linen and plain pytree models to one internal form.

The rest of this library sees parameter leaves and a pure loss, whether the model is an NNX module,
a Linen module or a pytree.

Example: the pytree `{"embed": e, "layers": [{"w": w0, "steps": s0}]}` of two fp32 arrays and an
integer::

    paths             ("embed",), ("layers", 0, "w")
    variable_paths    ("layers", 0, "steps")
    params_tree([e, w0])    {"embed": e, "layers": [{"w": w0, "steps": None}]}, which Optax sees
    loss(loss_fn, [e, w0], [s0], batch, rng, True)    (loss, {}, (s0,))
"""

import dataclasses
import inspect
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from megatrain_jax._src.common import checks, trees
from megatrain_jax._src.common.trees import ModelPath, path_name
from megatrain_jax._src.engine.adapt.initial_values import (
    InitialValues,
    initial_values_of,
    initial_values_of_trace,
    strong_array,
)
from megatrain_jax._src.engine.adapt.loss_function import (
    Prediction,
    checked_result,
    checked_rows,
    explaining_concretization,
    loss_arguments,
    name_of,
    takes_rng,
)
from megatrain_jax._src.engine.adapt.model_kinds import (
    Parts,
    Shell,
    check_same_paths,
    flatten,
    is_pytree_model,
    linen_parts,
    parts_of,
)
from megatrain_jax._src.engine.program.jaxpr import short_errors


@dataclass(frozen=True, kw_only=True)
class AdaptedModel:
    """A model without its arrays: shapes, and functions that put arrays back in.

    Attributes:
        paths: path of each parameter leaf in the user's model.
        shapes: shape and dtype of each parameter leaf, as the model declares them.
        variable_paths: path of each leaf of the untrained state (statistics, random keys).
        variable_shapes: shape and dtype of each leaf of that state.
        loss: `loss(loss_fn, leaves, variables, batch, rng, train)` calls the user's function and
            returns (loss, metrics, new variables). Pure, so it can be traced and differentiated. A
            leaf may have a dtype other than declared; variables always come back as declared. For
            a `Prediction` in place of `loss_fn`, it returns (None, arrays, new variables).
        params_tree: `params_tree(leaves)` is the tree that Optax and users see, with its leaves in
            the order of `paths`.
        rebuild: `rebuild(leaves, variables)` is a model of the user's own type with these arrays.
        check_batch: `check_batch(batch)` calls the model's own method of this name, if it has one
            and all arrays of the batch are NumPy's: nothing is copied back from the device.
        only_in_training: `only_in_training(loss_fn, batch)` says what calling the function does
            that belongs to training, such as "draws random numbers", or "". It is "" for an NNX
            module, which is evaluated in another mode, and for a pytree, which has no state.
        builder: name of the function that builds the model; None for a model given as it is.
    """

    paths: tuple[ModelPath, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    variable_paths: tuple[ModelPath, ...]
    variable_shapes: tuple[jax.ShapeDtypeStruct, ...]
    loss: Callable[..., tuple[Any, Any, tuple[jax.Array, ...]]]
    params_tree: Callable[[Sequence[Any]], Any]
    rebuild: Callable[[Sequence[Any], Sequence[Any]], Any]
    check_batch: Callable[[Any], None]
    only_in_training: Callable[[Callable[..., Any], Any], str]
    builder: str | None = None


def adapt(
    model: Any, loss_fn: Callable[..., Any], sample_batch: Any, seed: int
) -> tuple[AdaptedModel, InitialValues]:
    """Turns a model of any supported kind into the internal form.

    Args:
        model: an `nnx.Module`, a `flax.linen.Module`, a pytree with arrays (an Equinox module is
            one), or a function without arguments that builds an `nnx.Module` or such a pytree. Such
            a function and a Linen module are only traced: nothing is allocated.
        loss_fn: `loss_fn(model, batch)` or `loss_fn(model, batch, rng)`; an optional third argument
            receives the key if its name is `rng` or `key`. It returns a scalar loss or (loss, dict
            of scalar metrics).
        sample_batch: a pytree of arrays or `jax.ShapeDtypeStruct`.
        seed: a Linen module is initialised with `jax.random.key(seed)`.

    Returns:
        The model without its arrays, and its initial values.

    Raises:
        TypeError: the model's kind is not supported, or `loss_fn` has a different signature.
        ValueError: the model has no parameters, or some are not real floating-point arrays.
    """
    check_model(model)
    takes_rng(loss_fn)
    if needs_batch(model):
        key = jax.random.key(seed)

        def split_linen(key: jax.Array, batch: Any) -> Parts:
            return linen_parts(model, loss_fn, key, loss_arguments(loss_fn, batch, key), seed)

        return _adapt_traced(split_linen, (key, sample_batch))
    return adapt_alone(model)


def adapt_alone(model: Any) -> tuple[AdaptedModel, InitialValues]:
    """Turns a model other than a Linen module, which needs a batch, into the internal form."""
    if is_pytree_model(model):
        return _adapt_values(model)
    adapted, initial = _adapt_traced(lambda: _built_parts(model), ())
    return dataclasses.replace(adapted, builder=name_of(model)), initial


def needs_batch(model: Any) -> bool:
    """Whether `adapt` needs a batch: a Linen module creates its variables when it is called.

    For all remaining kinds of models the result does not depend on the batch.
    """
    return isinstance(model, linen.Module)


def check_model(model: Any) -> None:
    """Checks that a model's kind is supported, as far as is known before it is built.

    Raises:
        TypeError: its kind is not supported, or it is a function that needs arguments.
    """
    if isinstance(model, linen.Module):
        return
    bases = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    if kinds := _FOREIGN & bases:
        raise TypeError(
            f"model is a {type(model).__qualname__} of {min(kinds)}; {_SUPPORTED} "
            "megatrain_jax.models.load_pretrained reads a decoder from its Hugging Face folder."
        )
    if isinstance(model, type):
        raise TypeError(
            f"model is the class {model.__qualname__}; pass an instance of it, or a function of "
            "no arguments that builds one."
        )
    trees.leaves("model", model)
    if is_pytree_model(model):
        return
    if not callable(model):
        raise TypeError(f"model is a {type(model).__qualname__}; {_SUPPORTED}")
    if not checks.can_be_called(model, 0):
        raise TypeError(
            f"model is the function {name_of(model)}, which can't be called without arguments; "
            "pass a function of no arguments that builds the model."
        )


# Libraries of modules that can be called but hold no arrays of JAX.
_FOREIGN = frozenset(("torch", "keras", "tensorflow"))
_SUPPORTED = (
    "a model is an nnx.Module, a flax.linen.Module, a pytree of arrays (such as an Equinox "
    "module), or a function of no arguments that builds an nnx.Module or such a pytree."
)


def _built_parts(build: Callable[[], Any]) -> Parts:
    """Calls a function that builds a model, and takes the model apart."""
    model = _call_builder(build)
    if isinstance(model, linen.Module):
        raise TypeError(
            f"{name_of(build)} builds a {type(model).__qualname__}, a Linen module, which holds no "
            "arrays: pass the module itself as the model."
        )
    if isinstance(model, type):
        raise TypeError(
            f"{name_of(build)} returns the class {model.__qualname__}, not an instance."
        )
    if not is_pytree_model(model):
        raise TypeError(f"{name_of(build)} builds a {type(model).__qualname__}; {_SUPPORTED}")
    return parts_of(model)


def _adapt_values(model: Any) -> tuple[AdaptedModel, InitialValues]:
    """Adapts a model that holds arrays; these are its initial values."""
    params, variables, shell = parts_of(model)
    shapes = jax.eval_shape(lambda *trees: trees, params, variables)
    adapted = _assemble(shapes[0], shapes[1], shell)
    initial = initial_values_of(
        jax.tree.leaves(params),
        jax.tree.leaves(variables),
        adapted.shapes + adapted.variable_shapes,
    )
    return adapted, initial


def _adapt_traced(
    split_model: Callable[..., Parts], args: tuple[Any, ...]
) -> tuple[AdaptedModel, InitialValues]:
    # The shell holds no arrays, so it may be used after the trace, which returns arrays as shapes.
    shells = []

    def arrays(*args: Any) -> tuple[Any, Any]:
        params, variables, shell = split_model(*args)
        shells.append(shell)
        return params, variables

    with short_errors():
        traced, shapes = jax.make_jaxpr(arrays, return_shape=True)(*args)
    # The trace's equations are kept: initial values are computed from them, leaf by leaf.
    adapted = _assemble(shapes[0], shapes[1], shells[0])
    every_shape = adapted.shapes + adapted.variable_shapes
    return adapted, initial_values_of_trace(traced, args, len(adapted.shapes), every_shape)


def _assemble(params: Any, variables: Any, shell: Shell) -> AdaptedModel:
    """Makes the internal form from trees of shapes and a shell."""
    paths, shapes, params_treedef = _flatten_shapes(params)
    variable_paths, variable_shapes, variables_treedef = _flatten_shapes(variables)
    _check_parameters(paths, shapes)

    def params_tree(leaves: Sequence[Any]) -> Any:
        assert len(leaves) == len(paths), f"{len(leaves)} leaves for {len(paths)} parameters"
        return jax.tree.unflatten(params_treedef, leaves)

    def variables_tree(leaves: Sequence[Any]) -> Any:
        assert len(leaves) == len(variable_paths)
        return jax.tree.unflatten(variables_treedef, leaves)

    def loss(
        loss_fn: Callable[..., Any],
        leaves: Sequence[Any],
        variables: Sequence[Any],
        batch: Any,
        rng: jax.Array,
        train: bool,
    ) -> tuple[jax.Array | None, Any, tuple[jax.Array, ...]]:
        args = loss_arguments(loss_fn, batch, rng)
        trees = params_tree(leaves), variables_tree(variables)
        # A loss that takes a key receives it, and so does a module that draws random numbers.
        with explaining_concretization(loss_fn):
            result, changed = shell.call(loss_fn, args, *trees, rng, train)
        check_same_paths("variables", variable_paths, changed)
        new = zip(variable_paths, variable_shapes, jax.tree.leaves(changed), strict=True)
        variables = tuple(_as_declared(*item) for item in new)
        if isinstance(loss_fn, Prediction):
            return None, checked_rows(loss_fn.fn, result, batch), variables
        return *checked_result(loss_fn, result), variables

    def only_in_training(loss_fn: Callable[..., Any], batch: Any) -> str:
        trees = params_tree(shapes), variables_tree(variable_shapes)
        return shell.only_in_training(loss_fn, batch, *trees)

    def rebuild(leaves: Sequence[Any], variables: Sequence[Any]) -> Any:
        return shell.rebuild(params_tree(leaves), variables_tree(variables))

    # The optimizer pairs this tree's leaves with `paths`, so their order must agree.
    in_order = jax.tree.leaves(params_tree(shapes))
    assert all(a is b for a, b in zip(in_order, shapes, strict=True)), "leaves change their order"
    return AdaptedModel(
        paths=paths,
        shapes=shapes,
        variable_paths=variable_paths,
        variable_shapes=variable_shapes,
        loss=loss,
        params_tree=params_tree,
        rebuild=rebuild,
        check_batch=_batch_check(rebuild(shapes, variable_shapes)),
        only_in_training=only_in_training,
    )


def _batch_check(model: Any) -> Callable[[Any], None]:
    """The function that checks batches: the model's own method if it has one."""
    # Looked up on the class, because an instance may compute its attributes.
    if not callable(getattr(type(model), "check_batch", None)):
        return lambda batch: None

    def check_batch(batch: Any) -> None:
        if all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(batch)):
            model.check_batch(batch)

    return check_batch


def _flatten_shapes(
    tree: Any,
) -> tuple[tuple[ModelPath, ...], tuple[jax.ShapeDtypeStruct, ...], Any]:
    # Rebuilt from shape and dtype alone, because a weak type would make a second trace differ.
    paths, leaves, treedef = flatten(tree)
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    return paths, shapes, treedef


def _check_parameters(paths: Sequence[ModelPath], shapes: Sequence[jax.ShapeDtypeStruct]) -> None:
    if not paths:
        raise ValueError(
            "The model has no parameters: nothing in it is an nnx.Param, a Linen parameter that "
            "calling loss_fn creates, or (in a pytree) a floating-point array. In place of shapes, "
            "give a function that builds the model; it is only traced."
        )
    wrong = [
        f"{path_name(path)} ({shape.dtype})"
        for path, shape in zip(paths, shapes, strict=True)
        if not jnp.issubdtype(shape.dtype, jnp.floating)
    ]
    if wrong:
        raise ValueError(
            "Parameters must be real floating-point arrays, and these are not: "
            f"{', '.join(wrong)}. Keep arrays that aren't trained in another nnx.Variable or in "
            "another Linen collection, and complex numbers as two real parameters."
        )


def _as_declared(path: ModelPath, shape: jax.ShapeDtypeStruct, value: Any) -> jax.Array:
    """Returns a variable's new value in its declared dtype, for which the step is compiled."""
    found_shape, found_dtype = jnp.shape(value), jnp.result_type(value)
    floats = all(jnp.issubdtype(d, jnp.floating) for d in (found_dtype, shape.dtype))
    if found_shape != shape.shape or not (found_dtype == shape.dtype or floats):
        raise ValueError(
            f"loss_fn changed the variable {path_name(path)} from {shape.dtype}{shape.shape} to "
            f"{found_dtype}{found_shape}; shape and dtype must stay the same from step to step."
        )
    return strong_array(value, shape.dtype)


def _call_builder(build: Callable[[], Any]) -> Any:
    try:
        return build()
    except jax.errors.JAXTypeError as error:
        raise ValueError(
            f"{name_of(build)} can't be traced, because it needs the values of arrays while it "
            "builds the model; pass the model that it builds instead."
        ) from error
    except flax.errors.TraceContextError as error:
        raise ValueError(
            f"{name_of(build)} can't be traced, because {_kept_outside(error)}: pass nnx.Rngs that "
            "are made inside of the function, or pass the model that it builds instead."
        ) from error
    except Exception as error:
        error.add_note(f"This was raised by {name_of(build)}, called to build the `model`.")
        raise


def _kept_outside(error: Exception) -> str:
    """The reason why a builder can't change NNX state created outside it, in words."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # The innermost `__init__` is Flax's own; an outer one is the user's, with the default argument.
    for frame in reversed(frames):
        module = type(frame.f_locals.get("self"))
        if frame.f_code.co_name != "__init__" or not issubclass(module, nnx.Module):
            continue
        for name, parameter in inspect.signature(module.__init__).parameters.items():
            if isinstance(parameter.default, nnx.Rngs):
                return (
                    f"{module.__qualname__} is built with the default of its argument `{name}`, an "
                    "nnx.Rngs that exists since the class was defined and can't be changed there"
                )
    return f"it changes NNX state, such as an nnx.Rngs, that was made outside of it ({error})"
