"""Converts NNX, Linen and plain pytree models to one internal form.

The rest of this library sees parameter leaves and a pure loss, whether the model is an NNX module,
a Linen module or a pytree.

Example: the pytree `{"embed": e, "layers": [{"w": w0, "steps": s0}]}` of two fp32 arrays and an
integer::

    paths             ("embed",), ("layers", 0, "w")
    variable_paths    ("layers", 0, "steps")
    params_tree([e, w0])    {"embed": e, "layers": [{"w": w0, "steps": None}]}, which Optax sees
    loss(loss_fn, [e, w0], [s0], batch, rng, True)    (loss, {}, (s0,))

NNX modules, Linen modules and plain pytrees are split into parts, and called.

One function per kind of model splits it into parameters, untrained state and a static part. These
functions also work on tracers, so a model can be split without being allocated.
"""

import dataclasses
import inspect
import itertools
import traceback
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

from megatrain_jax._src.common import checks, trees
from megatrain_jax._src.common.trees import ModelPath, finds, path_name
from megatrain_jax._src.engine.adapt.initial_values import (
    InitialValues,
    initial_values_of,
    initial_values_of_trace,
    strong_array,
)
from megatrain_jax._src.engine.adapt.linen_calls import recording
from megatrain_jax._src.engine.adapt.loss_function import (
    Prediction,
    argument_of,
    checked_result,
    checked_rows,
    explaining_concretization,
    loss_arguments,
    name_of,
    takes_rng,
)
from megatrain_jax._src.engine.program import jaxpr as jx


@dataclass(frozen=True, kw_only=True)
class Shell:
    """A model without its arrays: how to call it with arrays, and how to rebuild it around them.

    Attributes:
        call: (loss_fn, tuple of arguments after the model, params tree, variables tree, rng key,
            whether it trains) → (result of loss_fn, new variables tree).
        rebuild: (params tree, variables tree) → model.
        only_in_training: (loss_fn, batch, params tree, variables tree, all as shapes) → what the
            call does that belongs to training, in words; "" for nothing.
        calls: the loss's calls of a Linen module, as JSON; None if unknown, or of another model.
    """

    call: Callable[..., tuple[Any, Any]]
    rebuild: Callable[[Any, Any], Any]
    only_in_training: Callable[..., str] = lambda *_: ""
    calls: list[Any] | None = None


# What `only_in_training` says.
_DRAWS = "draws random numbers (dropout)"
_UPDATES = "updates the model's state (BatchNorm)"

# A split model: parameters, untrained state, and the shell that rejoins them.
Parts = tuple[Any, Any, Shell]


def parts_of(model: Any, trainable: Any = None) -> Parts:
    """Splits an NNX model or a pytree of arrays.

    Args:
        model: the model.
        trainable: see `trainable_mask`.

    Raises:
        TypeError: an NNX variable's value is not an array.
        ValueError: a pytree holds arrays that are not numeric.
    """
    return _nnx_parts(model, trainable) if _nnx_modules(model) else _pytree_parts(model)


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
        trainable: a pattern that `finds` a parameter's path, a predicate of the path as text, a
            filter of `flax.nnx`, a tuple of these of which any may choose a parameter, or None for
            all. Never chosen are those that the model marks, `nnx.Param(x, trainable=False)`.
        params: the tree of all parameters, with shapes in place of arrays.

    Raises:
        TypeError: the result of a predicate or a filter is no Boolean.
        ValueError: it, or a member of a tuple, selects no parameter.
    """
    names = [path_name(path) for path in flatten(params)[0]]
    # Flax gives filters the path and the variable, which may hold several arrays.
    flat = jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    items = [(_path(keys), value) for keys, value in flat for _ in jax.tree.leaves(value)]
    allowed = [trees.may_train(value) for _, value in items]
    if trainable is None:
        return tuple(allowed)
    several = trainable if isinstance(trainable, tuple) else (trainable,)
    each = [_chosen(one, names, items) for one in several]
    for one, chosen in zip(several, each, strict=True):
        if not any(map(all, zip(allowed, chosen, strict=True))):
            marked = [name for name, is_chosen in zip(names, chosen, strict=True) if is_chosen]
            raise ValueError(
                f"`trainable`={one!r} chooses only parameters that the model excludes by "
                f"`nnx.Param(x, trainable=False)`: {_shown(marked)}"
            )
    pairs = zip(allowed, zip(*each, strict=True), strict=True)
    return tuple(may and any(chosen) for may, chosen in pairs)


def _chosen(trainable: Any, names: Sequence[str], items: Sequence[tuple[ModelPath, Any]]):
    """Whether a pattern, a predicate or a filter chooses each parameter."""
    # A class can be called, too, but names a type of variables.
    is_function = callable(trainable) and not isinstance(trainable, type)
    found: list[Any]
    if isinstance(trainable, str):
        found = [finds(trainable, name) for name in names]
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
        types = {type(v).__name__ for _, v in items if isinstance(v, nnx.Variable)}
        of_types = f", of type {', '.join(sorted(types))}" if types else ""
        if not types and isinstance(trainable, type):
            of_types = (
                ". These have no types of variables, as only modules of flax.nnx do: choose by "
                "path, as in trainable='head'"
            )
        if isinstance(trainable, str) and any(trainable in name for name in names):
            of_types = f". For a part of a name, write '.*{trainable}'"
        raise ValueError(
            f"`trainable`={trainable!r} chooses no parameter; the model has {_shown(names)}"
            f"{of_types}"
        )
    return found


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


def is_frozen(module: Sequence[Any], paths: Sequence[ModelPath], trained: Sequence[bool]) -> bool:
    """Whether a module, or the smallest one around it that has parameters, trains none of them.

    Args:
        module: the module's path.
        paths: the paths of all parameters.
        trained: whether each is trained.
    """
    for n in range(len(module), 0, -1):
        pairs = zip(paths, trained, strict=True)
        if found := [is_trained for path, is_trained in pairs if path[:n] == module[:n]]:
            return not any(found)
    return False


def check_same_paths(name: str, what: str, expected: Sequence[ModelPath], tree: Any) -> None:
    """Checks that a call of the loss function did not change the model's structure.

    Args:
        name: the function's argument, for the message.
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
    verbs = {"added": added, "removed": removed}
    changes = [f"{verb} {', '.join(names)}" for verb, names in verbs.items() if names]
    if changes:
        raise ValueError(
            f"Calling {name} changed which {what} the model holds: {'; '.join(changes)}. Every "
            "step needs the same ones: create them when the model is built, or use "
            "nnx.Intermediate for values that are only passed out."
        )
    assert found == tuple(expected), f"the {what} changed their order"


def _path(keys: Sequence[Any], *, is_nnx: bool = False) -> ModelPath:
    """The path of a leaf, from JAX's keys."""

    # An nnx.State has one more level, for the value inside each variable; it names nothing.
    def names_nothing(key: Any) -> bool:
        return is_nnx and isinstance(key, jax.tree_util.GetAttrKey) and key.name == "value"

    return tuple(_component(key) for key in keys if not names_nothing(key))


def _component(key: Any) -> str | int:
    if isinstance(key, jax.tree_util.SequenceKey):
        return key.idx
    name = key.name if isinstance(key, jax.tree_util.GetAttrKey) else getattr(key, "key", key)
    return name if isinstance(name, int) else str(name)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _is_inexact(leaf: Any) -> bool:
    # NumPy scalars count because Equinox's is_inexact_array counts them.
    return isinstance(leaf, jax.Array | np.ndarray | np.generic) and jx.is_float(leaf)


def _nnx_modules(model: Any) -> list[nnx.Module]:
    leaves = jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, nnx.Module))
    return [leaf for leaf in leaves if isinstance(leaf, nnx.Module)]


def _nnx_parts(model: Any, trainable: Any) -> Parts:
    """Splits an NNX model by the types of its variables."""
    # Values sown by an earlier call are results, not state. They are removed from a copy of the
    # graph that shares its arrays, so the user's own model keeps them.
    model = nnx.merge(*nnx.split(model))
    nnx.pop(model, nnx.Intermediate)
    _mark_traced_arrays(model)
    # A model trains, also if it was left in evaluation mode, or its modes were never set. Single
    # modules in evaluation mode are frozen on purpose, as are modules without trained parameters.
    modes = {path: found for path, node in nnx.iter_graph(model) if (found := _modes(node))}
    every = {mode is True for found in modes.values() for mode in found}
    sets_mode = len(every) == 1
    graphdef, params, variables = nnx.split(model, nnx.Param, ...)
    _check_static(graphdef)
    _check_values(params)
    _check_values(variables)
    param_paths = flatten(params)[0]
    trained = trainable_mask(trainable if True in every else None, params)
    kept = {path for path in modes if True in every and is_frozen(path, param_paths, trained)}

    def call(loss_fn, args, params, variables, rng, train):
        # Without a copy the variables belong to an outer trace and refuse to be changed.
        model = nnx.merge(graphdef, params, variables, copy=True)
        # Dropout and batch norm read this flag of NNX modules.
        if not train or sets_mode:
            for module in _nnx_modules(model):
                module.train() if train else module.eval()
            for path, node in nnx.iter_graph(model):
                if path in kept:
                    node.eval()
        result = loss_fn(model, *args)
        _, after, _, changed = nnx.split(model, nnx.Param, nnx.Intermediate, ...)
        check_same_paths(argument_of(loss_fn), "parameters", param_paths, after)
        return result, changed

    def only_in_training(loss_fn, batch, params, variables):
        held = jax.tree.leaves(variables, is_leaf=lambda x: isinstance(x, nnx.Variable))
        kinds = [type(v) for v in held for _ in jax.tree.leaves(v)]
        is_key, is_stat = ([issubclass(k, of) for k in kinds] for of in (nnx.RngKey, nnx.BatchStat))
        if not any(is_key + is_stat):
            return ""

        def called(variables, params, batch, key):
            args = loss_arguments(loss_fn, batch, key)
            result, changed = call(loss_fn, args, params, variables, key, False)
            return [*itertools.compress(jax.tree.leaves(changed), is_stat)], result

        try:
            traced = jx.trace(called, variables, params, batch, jax.random.key(0))
        except Exception:  # the evaluation reports it
            return ""
        # By what depends on what: loops pass on keys and statistics that they don't use.
        outputs, first = len(traced.jaxpr.outvars), len(traced.consts)
        of_stats = [i < sum(is_stat) for i in range(outputs)]
        of_result = [not is_one for is_one in of_stats]
        by_result, by_stats = (
            jx.used_inputs(jx.without_dead_code(traced, used))[first:]
            for used in (of_result, of_stats)
        )
        draws = any(itertools.compress(by_result, is_key))
        return " and ".join([_DRAWS] * draws + [_UPDATES] * any(by_stats[len(kinds) :]))

    def rebuild(params: Any, variables: Any) -> Any:
        model = nnx.merge(graphdef, params, variables)
        for module in _nnx_modules(model):  # for use; another run sets it to training
            module.eval()
        return model

    shell = Shell(call=call, rebuild=rebuild, only_in_training=only_in_training)
    return params, variables, shell


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
    calls: list[Any] = []
    with recording(calls):
        collections = _plain(initialise(key, *args))
    params = collections.pop("params", {})

    def is_kept(name: str) -> bool:
        """Distinguishes variables that a module keeps from values that it only sows.

        Sown values must not be passed to the next step, where they would accumulate. Flax stores
        both alike, but a module works without a collection that it only sows into.
        """
        without = linen.init(loss_fn, module, mutable=flax.core.DenyList([name]))
        try:
            jax.eval_shape(without, key, *args)
        except flax.errors.FlaxError:
            return True
        except Exception:
            # The module works without the collection; loss_fn itself reads the sown values.
            return False
        return False

    kept = [name for name in collections if name != "intermediates" and is_kept(name)]
    state, names = {name: collections[name] for name in kept}, tuple(kept)

    def call(loss_fn, args, params, variables, rng, train):
        apply = linen.apply(loss_fn, module, mutable=flax.core.DenyList("params"))
        # If the stream that a module names is not given, Linen draws from "params".
        result, changed = apply({"params": params, **variables}, *args, rngs={"params": rng})
        changed = _plain(changed)
        return result, {name: changed.get(name, {}) for name in names}

    def only_in_training(loss_fn, batch, params, variables):
        found = []
        for does, mutable, streams in (
            (_DRAWS, flax.core.DenyList("params"), ()),
            (_UPDATES, False, ("params",)),
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

    shell = Shell(
        call=call,
        rebuild=rebuild,
        only_in_training=only_in_training,
        calls=None if None in calls else calls,
    )
    return params, state, shell


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
    known = (np.number, np.bool_, jax.dtypes.extended)
    wrong = [
        f"{path_name(_path(keys))} ({leaf.dtype})"
        for (keys, leaf), is_kept in zip(flat, kept, strict=True)
        if is_kept and not any(jnp.issubdtype(leaf.dtype, kind) for kind in known)
    ]
    if wrong:
        raise ValueError(
            f"The model has arrays that can't go to a device: {', '.join(wrong)}. Keep values that "
            "aren't numbers in static fields."
        )
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
            that belongs to training, such as "draws random numbers", or "". Numbers drawn from the
            loss's `rng` don't count: a loss may need them in evaluations, too. So it is "" for a
            pytree.
        calls: the calls that the loss makes of a Linen module, for `linen_calls.repeated`; None if
            they can't be repeated, or for another model.
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
    calls: list[Any] | None = dataclasses.field(default=None, compare=False)
    builder: str | None = None


def adapt(
    model: Any, loss_fn: Callable[..., Any], sample_batch: Any, seed: int, trainable: Any = None
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
        trainable: the parameters to train; see `trainable_mask`. A frozen module of an NNX model in
            evaluation mode stays in it.

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
    return adapt_alone(model, trainable)


def adapt_alone(model: Any, trainable: Any = None) -> tuple[AdaptedModel, InitialValues]:
    """Turns a model other than a Linen module, which needs a batch, into the internal form."""
    if is_pytree_model(model):
        return _adapt_values(model, trainable)
    adapted, initial = _adapt_traced(lambda: _built_parts(model, trainable), ())
    return dataclasses.replace(adapted, builder=name_of(model)), initial


def needs_batch(model: Any) -> bool:
    """Whether `adapt` needs a batch: a Linen module creates its variables when it is called.

    For all remaining kinds of models the result does not depend on the batch.
    """
    return isinstance(model, linen.Module)


def unbound(model: Any, params: Any) -> tuple[Any, Any]:
    """A bound Linen module as a module and its variables, unless other `params` are given."""
    if not isinstance(model, linen.Module) or model.scope is None:
        return model, params
    module, variables = model.unbind()
    return module, variables if params is None else params


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


def _built_parts(build: Callable[[], Any], trainable: Any) -> Parts:
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
    return parts_of(model, trainable)


def _adapt_values(model: Any, trainable: Any) -> tuple[AdaptedModel, InitialValues]:
    """Adapts a model that holds arrays; these are its initial values."""
    params, variables, shell = parts_of(model, trainable)
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

    with jx.short_errors():
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
        check_same_paths(argument_of(loss_fn), "variables", variable_paths, changed)
        new = zip(variable_paths, variable_shapes, jax.tree.leaves(changed), strict=True)
        variables = tuple(_as_declared(argument_of(loss_fn), *item) for item in new)
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
        calls=shell.calls,
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
            "calling loss_fn creates (by `model(x)`, not `model.apply`), or (in a pytree) a "
            "floating-point array. In place of shapes, give a function that builds the model; it "
            "is only traced."
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


def _as_declared(name: str, path: ModelPath, shape: jax.ShapeDtypeStruct, value: Any) -> jax.Array:
    """Returns a variable's new value in its declared dtype, for which the step is compiled."""
    found_shape, found_dtype = jnp.shape(value), jnp.result_type(value)
    floats = all(jnp.issubdtype(d, jnp.floating) for d in (found_dtype, shape.dtype))
    if found_shape != shape.shape or not (found_dtype == shape.dtype or floats):
        raise ValueError(
            f"{name} changed the variable {path_name(path)} from {shape.dtype}{shape.shape} to "
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
