"""Splits NNX modules, Linen modules and plain pytrees into parts, and calls them.

One function per kind of model splits it into parameters, untrained state and a static part. These
functions also work on tracers, so a model can be split without being allocated.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import flax.core
import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.core import Tracer

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.trees import ModelPath, path_name
from megatrain_jax._src.engine.adapt.loss_function import loss_arguments


@dataclass(frozen=True, kw_only=True)
class Shell:
    """A model without its arrays: how to call it with arrays, and how to rebuild it around them.

    Attributes:
        call: (loss_fn, tuple of arguments after the model, params tree, variables tree, rng key,
            whether it trains) → (result of loss_fn, new variables tree).
        rebuild: (params tree, variables tree) → model.
        only_in_training: (loss_fn, batch, params tree, variables tree, all as shapes) → what the
            call does that belongs to training, in words; "" for nothing.
    """

    call: Callable[..., tuple[Any, Any]]
    rebuild: Callable[[Any, Any], Any]
    only_in_training: Callable[..., str] = lambda *_: ""


# A split model: parameters, untrained state, and the shell that rejoins them.
Parts = tuple[Any, Any, Shell]


def parts_of(model: Any) -> Parts:
    """Splits an NNX model or a pytree of arrays.

    Raises:
        TypeError: an NNX variable's value is not an array.
        ValueError: a pytree holds arrays that are not numeric.
    """
    return _nnx_parts(model) if _nnx_modules(model) else _pytree_parts(model)


def is_pytree_model(model: Any) -> bool:
    """Whether an object is a model that holds arrays, not a function or an unsupported object."""
    treedef = jax.tree.structure(model)
    return not jax.tree_util.treedef_is_leaf(treedef) or _is_array(model)


def flatten(tree: Any) -> tuple[tuple[ModelPath, ...], list[Any], Any]:
    """Returns the paths, the leaves and the structure of a tree of parameters or variables."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    is_nnx = isinstance(tree, nnx.State)
    paths = tuple(_path(keys, is_nnx=is_nnx) for keys, _ in flat)
    assert len(set(paths)) == len(paths), "two leaves have one path"
    return paths, [leaf for _, leaf in flat], treedef


def trainable_mask(trainable: Any, params: Any) -> tuple[bool, ...]:
    """Selects the parameters to train.

    Args:
        trainable: a regular expression to search for in a parameter's path, a predicate of the
            path as text, a filter of `flax.nnx`, a tuple of these of which any may choose a
            parameter, or None for all.
        params: the tree of all parameters, with shapes in place of arrays.

    Raises:
        TypeError: the result of a predicate or a filter is no Boolean.
        ValueError: it, or a member of a tuple, selects no parameter.
    """
    names = [path_name(path) for path in flatten(params)[0]]
    if trainable is None:
        return (True,) * len(names)
    # Flax gives filters the path and the variable, which may hold several arrays.
    flat, _ = jax.tree_util.tree_flatten_with_path(
        params, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    items = [(_path(keys), value) for keys, value in flat for _ in jax.tree.leaves(value)]
    each = [
        _chosen(one, names, items)
        for one in (trainable if isinstance(trainable, tuple) else (trainable,))
    ]
    return tuple(map(any, zip(*each, strict=True)))


def _chosen(trainable: Any, names: Sequence[str], items: Sequence[tuple[ModelPath, Any]]):
    """Whether a pattern, a predicate or a filter chooses each parameter."""
    # A class can be called, too, but names a type of variables.
    is_function = callable(trainable) and not isinstance(trainable, type)
    found: list[Any]
    if isinstance(trainable, str):
        found = [re.search(trainable, name) is not None for name in names]
    elif is_function and checks.can_be_called(trainable, 1):
        found = [trainable(name) for name in names]
    else:
        given: Any = trainable
        choose = nnx.filterlib.to_predicate(given)
        found = []
        for path, value in items:
            try:
                found.append(choose(path, value))
            except Exception as error:
                raise TypeError(
                    f"`trainable`={trainable!r} failed for {path_name(path)}: {error}. It gets "
                    "shapes and dtypes (`value.shape`, `value.dtype`), as parameters are chosen "
                    "before they have values"
                ) from error
    for name, is_chosen in zip(names, found, strict=True):
        if not isinstance(is_chosen, bool | np.bool_):
            raise TypeError(
                f"`trainable`={trainable!r} must return True or False for every parameter, but for "
                f"{name} it returns {is_chosen!r} ({type(is_chosen).__name__}); for a match, "
                "return `match is not None`"
            )
    if not any(found):
        shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        types = {type(v).__name__ for _, v in items if isinstance(v, nnx.Variable)}
        of_types = f", of type {', '.join(sorted(types))}" if types else ""
        if not types and isinstance(trainable, type):
            of_types = (
                ". These have no types of variables, as only modules of flax.nnx do: choose by "
                "path, as in trainable='head'"
            )
        raise ValueError(
            f"`trainable`={trainable!r} chooses no parameter; the model has {shown}{of_types}"
        )
    return found


def check_same_paths(what: str, expected: Sequence[ModelPath], tree: Any) -> None:
    """Checks that a call of the loss function did not change the model's structure.

    Args:
        what: "parameters" or "variables", for the message.
        expected: paths before the call.
        tree: parameters or variables after it.

    Raises:
        ValueError: some were added or removed.
    """
    found = flatten(tree)[0]
    before, after = set(expected), set(found)
    added = [path_name(path) for path in found if path not in before]
    removed = [path_name(path) for path in expected if path not in after]
    changes = [
        f"{verb} {', '.join(names)}"
        for verb, names in (("added", added), ("removed", removed))
        if names
    ]
    if changes:
        raise ValueError(
            f"Calling loss_fn changed which {what} the model holds: {'; '.join(changes)}. Every "
            "step needs the same ones: create them when the model is built, or use "
            "nnx.Intermediate for values that are only passed out."
        )
    assert found == tuple(expected), f"the {what} changed their order"


def _path(keys: Sequence[Any], *, is_nnx: bool = False) -> ModelPath:
    """The path of a leaf, from JAX's keys."""
    # An nnx.State has one more level, for the value inside each variable; it names nothing.
    return tuple(
        _component(key)
        for key in keys
        if not (is_nnx and isinstance(key, jax.tree_util.GetAttrKey) and key.name == "value")
    )


def _component(key: Any) -> str | int:
    if isinstance(key, jax.tree_util.SequenceKey):
        return key.idx
    name = key.name if isinstance(key, jax.tree_util.GetAttrKey) else getattr(key, "key", key)
    return name if isinstance(name, int) else str(name)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _is_inexact(leaf: Any) -> bool:
    # NumPy scalars count because Equinox's is_inexact_array counts them.
    return isinstance(leaf, jax.Array | np.ndarray | np.generic) and jnp.issubdtype(
        leaf.dtype, jnp.inexact
    )


def _nnx_modules(model: Any) -> list[nnx.Module]:
    leaves = jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, nnx.Module))
    return [leaf for leaf in leaves if isinstance(leaf, nnx.Module)]


def _nnx_parts(model: Any) -> Parts:
    """Splits an NNX model by the types of its variables."""
    # Values sown by an earlier call are results, not state. They are removed from a copy of the
    # graph that shares its arrays, so the user's own model keeps them.
    model = nnx.merge(*nnx.split(model))
    nnx.pop(model, nnx.Intermediate)
    _mark_traced_arrays(model)
    # A model left in evaluation mode trains; single modules in it are frozen on purpose.
    modes = [mode for _, node in nnx.iter_graph(model) for mode in _modes(node)]
    is_left = bool(modes) and all(mode is True for mode in modes)
    graphdef, params, variables = nnx.split(model, nnx.Param, ...)
    _check_static(graphdef)
    _check_values(params)
    _check_values(variables)
    param_paths = flatten(params)[0]

    def call(loss_fn, args, params, variables, rng, train):
        # Without a copy the variables belong to an outer trace and refuse to be changed.
        model = nnx.merge(graphdef, params, variables, copy=True)
        # Dropout and batch norm read this flag of NNX modules.
        if not train or is_left:
            for module in _nnx_modules(model):
                module.train() if train else module.eval()
        result = loss_fn(model, *args)
        _, after, _, changed = nnx.split(model, nnx.Param, nnx.Intermediate, ...)
        check_same_paths("parameters", param_paths, after)
        return result, changed

    def rebuild(params: Any, variables: Any) -> Any:
        return nnx.merge(graphdef, params, variables)

    return params, variables, Shell(call=call, rebuild=rebuild)


def _modes(node: Any) -> list[Any]:
    """The flags of an NNX module that `.train()` and `.eval()` set."""
    names = ("deterministic", "use_running_average")
    return [vars(node)[n] for n in names if isinstance(node, nnx.Module) and n in vars(node)]


def _mark_traced_arrays(model: Any) -> None:
    """Marks arrays in plain attributes as state, as NNX does in a model built eagerly.

    NNX recognises arrays by type, so it would treat a tracer as a static attribute.
    """
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Pytree):
            for name, value in list(vars(node).items()):
                if isinstance(value, Tracer):
                    setattr(node, name, nnx.data(value))


def _check_static(graphdef: nnx.GraphDef) -> None:
    # Flax refuses this when a model is built eagerly, but not while it is traced.
    for name, attribute in graphdef.attributes:
        held = jax.tree.leaves(getattr(attribute, "value", None))
        if any(isinstance(leaf, Tracer) for leaf in held):
            raise ValueError(
                f"The model's attribute {name!r} is a plain container that holds arrays, which "
                "NNX takes for static; make it an nnx.List or nnx.Dict, or wrap it in nnx.data."
            )


def _check_values(state: nnx.State) -> None:
    paths, leaves, _ = flatten(state)
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            raise TypeError(
                f"The model's variable {path_name(path)} holds a {type(leaf).__qualname__}, "
                "which is no array; keep it as a plain attribute."
            )


def linen_parts(
    module: linen.Module,
    loss_fn: Callable[..., Any],
    key: jax.Array,
    args: tuple[Any, ...],
    seed: int,
) -> Parts:
    """Initialises a Linen module by calling the loss function with it, and splits it.

    Args:
        module: the module, without arrays.
        loss_fn: called with the module, bound to the variables it creates.
        key: the key of `module.init(key, ...)`, so the values are the same.
        args: arguments of loss_fn after the model.
        seed: seed of the random numbers that a rebuilt module draws.
    """
    # The loss initialises the module, because it knows how to call the module on a batch.
    initialise = linen.init(loss_fn, module, mutable=True)
    # Without metadata boxes (sharding, names), which are the user's own and hold no numbers.
    collections = _plain(initialise(key, *args))
    params = collections.pop("params", {})
    state = {
        name: tree
        for name, tree in collections.items()
        if name != "intermediates" and _is_linen_state(module, loss_fn, name, key, args)
    }
    names = tuple(state)

    def call(loss_fn, args, params, variables, rng, train):
        apply = linen.apply(loss_fn, module, mutable=flax.core.DenyList("params"))
        # If the stream that a module names is not given, Linen draws from "params".
        result, changed = apply({"params": params, **variables}, *args, rngs={"params": rng})
        changed = _plain(changed)
        return result, {name: changed.get(name, {}) for name in names}

    def only_in_training(loss_fn, batch, params, variables):
        found = []
        for does, mutable, streams in (
            ("draws random numbers (dropout)", flax.core.DenyList("params"), ()),
            ("updates the module's state (BatchNorm)", False, ("params",)),
        ):
            apply = linen.apply(loss_fn, module, mutable=mutable)

            def called(params, variables, key, batch, apply=apply, streams=streams):
                args = loss_arguments(loss_fn, batch, key)
                return apply(
                    {"params": params, **variables}, *args, rngs=dict.fromkeys(streams, key)
                )

            try:
                jax.eval_shape(called, params, variables, key, batch)
            except (flax.errors.InvalidRngError, flax.errors.ModifyScopeVariableError):
                found.append(does)
            except Exception:  # for want of what was left out; the evaluation reports the rest
                continue
        return " and ".join(found)

    def rebuild(params: Any, variables: Any) -> Any:
        # Bound as in training, so that the loss can be called with it: with random numbers, and
        # with state that it may change.
        rngs = {"params": jax.random.key(seed)}
        return module.bind({"params": params, **variables}, rngs=rngs, mutable=names)

    return params, state, Shell(call=call, rebuild=rebuild, only_in_training=only_in_training)


def _is_linen_state(
    module: linen.Module,
    loss_fn: Callable[..., Any],
    collection: str,
    key: jax.Array,
    args: tuple[Any, ...],
) -> bool:
    """Distinguishes variables that a module keeps from values that it only sows.

    Sown values must not be passed to the next step, where they would accumulate. Flax stores both
    alike, but a module works without a collection that it only sows into.
    """
    without = linen.init(loss_fn, module, mutable=flax.core.DenyList([collection]))
    try:
        jax.eval_shape(without, key, *args)
    except flax.errors.FlaxError:
        return True
    except Exception:
        # The module works without the collection; loss_fn itself reads the sown values.
        return False
    return False


def _plain(variables: Any) -> dict[str, Any]:
    return flax.core.unfreeze(linen.meta.unbox(variables))


def _pytree_parts(model: Any) -> Parts:
    """Splits a pytree: floating-point arrays are parameters, all other arrays are state.

    Everything else is static. A loss returns no model, so the state never changes.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(model)
    leaves = [leaf for _, leaf in flat]
    trained = [_is_inexact(leaf) for leaf in leaves]
    kept = [_is_array(leaf) and not t for leaf, t in zip(leaves, trained, strict=True)]
    _check_kept([item for item, is_kept in zip(flat, kept, strict=True) if is_kept])
    arrays = [t or k for t, k in zip(trained, kept, strict=True)]
    # Functions and numbers of the tree stay in the shell, as in Equinox modules.
    static = [None if is_array else leaf for leaf, is_array in zip(leaves, arrays, strict=True)]

    def only(chosen: Sequence[bool]) -> Any:
        pairs = zip(leaves, chosen, strict=True)
        return jax.tree.unflatten(treedef, [leaf if c else None for leaf, c in pairs])

    def rebuild(params: Any, variables: Any) -> Any:
        values, states = iter(jax.tree.leaves(params)), iter(jax.tree.leaves(variables))
        rows = zip(trained, kept, static, strict=True)
        whole = [next(values) if t else next(states) if k else s for t, k, s in rows]
        return jax.tree.unflatten(treedef, whole)

    def call(loss_fn, args, params, variables, rng, train):
        return loss_fn(rebuild(params, variables), *args), variables

    return only(trained), only(kept), Shell(call=call, rebuild=rebuild)


def _check_kept(flat: Sequence[tuple[Any, Any]]) -> None:
    """Checks that the untrained arrays of a pytree can be put on a device."""
    known = (np.number, np.bool_, jax.dtypes.extended)
    wrong = [
        f"{path_name(_path(keys))} ({leaf.dtype})"
        for keys, leaf in flat
        if not any(jnp.issubdtype(leaf.dtype, kind) for kind in known)
    ]
    if wrong:
        raise ValueError(
            f"The model has arrays that can't go to a device: {', '.join(wrong)}. Keep values that "
            "aren't numbers in static fields."
        )
