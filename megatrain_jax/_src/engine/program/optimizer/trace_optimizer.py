"""Traces an Optax transformation, and maps its arrays to leaves and pieces of state.

Optax sees the whole tree, with stacked parameters whole. The slices used afterwards have each layer
of a stacked parameter, and of the state that mirrors it, as a separate array: a token.

Example: Adam on `e (4, 8)` and a stack `w (2, 8, 8)` with the leaves `w[0]` and `w[1]`:

    state in Optax            tokens
    count ()                  count ()
    mu, nu of e (4, 8)        mu, nu of e (4, 8)
    mu, nu of w (2, 8, 8)     mu, nu of w, [0] and [1] of each, (8, 8): the groups of w[0], w[1]

`trace_optimizer` traces the left side; `flatten_update` makes the right one, on leaves and tokens.

The flat update has one array per leaf and per piece of state.

If layers are stacked, the update is traced again, slice by slice. Otherwise Optax's trace, with its
calls opened, is the flat update. Tiny values that it repeats are computed once.
"""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from megatrain_jax._src.common.checks import refused
from megatrain_jax._src.common.needed_values import NEEDS_VALUE, value_needed
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.effects import has_side_effects
from megatrain_jax._src.engine.program.layers.blocks import Leaf, assemble
from megatrain_jax._src.engine.program.layers.inline import Inliner, with_open_calls
from megatrain_jax._src.engine.program.layers.sliced_values import (
    Index,
    SlicedValue,
    Value,
    index_of,
    numbers,
    part_at,
    range_of,
    remaining,
    shown,
    sliced_axes,
)

Shapes = Sequence[jax.ShapeDtypeStruct]
Decay = float | Callable[[jax.Array], Any]

TINY = 16  # elements: values up to this size are sent to a group, not computed in it


class AveragedState(NamedTuple):
    """An optimizer's state with averages of the parameters.

    The averages come first, so that a group's state begins with those of its parameters, and they
    are laid out like its masters.

    Attributes:
        ema: The averages, as a tree like the parameters.
        ema_count: Number of updates.
        inner: The optimizer's own state.
    """

    ema: Any
    ema_count: Any
    inner: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateLeaf:
    """One array of optimizer state as it is stored.

    Attributes:
        name: Path in Optax's state, as users write it.
        leaf: Index of the state leaf in the flat state.
        index: Index of this slice in the state leaf; `()` for all of it.
        shape: Shape of this array, without the sliced axes.
        dtype: Dtype of this array.
        mirrors: Number of its parameter, if both have the same shape; else None.
    """

    name: str
    leaf: int
    index: Index
    shape: tuple[int, ...]
    dtype: Any
    mirrors: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedOptimizer:
    """The traced update and initialisation of a whole tree.

    Attributes:
        update: `(grads, params, state, loss) -> (new params, new state)`; if gradients are scaled,
            with the loss's scale as one more argument.
        init: `params -> state`.
        param_shapes: Shape of each parameter.
        state_def: Tree structure of the state.
        state_shapes: Shape and dtype of each leaf of the state.
        state_names: Path of each leaf of the state.
        state_of: For each leaf of the state, the parameter with a path that is a suffix of the
            leaf's path, or None.
        is_scaled: Whether gradients belong to a scaled loss.
        num_averages: Number of averages of parameters, which are the first leaves of the state.
    """

    update: jx.Traced
    init: jx.Traced
    param_shapes: tuple[tuple[int, ...], ...]
    state_def: Any
    state_shapes: tuple[jax.ShapeDtypeStruct, ...]
    state_names: tuple[str, ...]
    state_of: tuple[int | None, ...]
    is_scaled: bool = False
    num_averages: int = 0

    @property
    def num_numbers(self) -> int:
        """Number of single numbers after the update's arrays: the loss, and its scale if any."""
        return 2 if self.is_scaled else 1


def trace_optimizer(
    optimizer: Any,
    params_tree: Callable[[Sequence[Any]], Any],
    shapes: Shapes,
    *,
    is_scaled: bool,
    ema_decay: Decay | None,
) -> TracedOptimizer:
    """Traces the update of a whole tree, and its initialisation, on abstract arrays.

    Args:
        optimizer: The Optax transformation.
        params_tree: Function from one array per parameter to the tree that the optimizer sees.
        shapes: Shape and dtype of each parameter's master copy.
        is_scaled: Whether gradients belong to a scaled loss. The update then divides them by the
            scale first.
        ema_decay: Decay of averages of the parameters, or a schedule of it; None for none. The
            state is then an `AveragedState`.

    Raises:
        TypeError: `ema_decay` returns no number.
        ValueError: It can't be traced, it changes the form of its state or of a parameter, or it
            has effects.
    """
    tx = optax.with_extra_args_support(optimizer)
    if callable(ema_decay):
        _check_schedule(ema_decay)

    def initial(params):
        params = params_tree(params)
        own = tx.init(params)
        return own if ema_decay is None else AveragedState(params, jnp.zeros([], jnp.int32), own)

    init = _explained(lambda: jx.trace(initial, list(shapes)))
    state_shapes = tuple(jx.shape_of(v.aval) for v in init.jaxpr.outvars)

    def update(grads, params, state, loss, *scale):
        if scale:
            # A power of two, so multiplication by its inverse is exact, like a division.
            inverse = 1 / scale[0]
            grads = [g * inverse.astype(g.dtype) for g in grads]
        params, grads = params_tree(params), params_tree(grads)
        state = jax.tree.unflatten(init.out_tree, state)
        own = state if ema_decay is None else state.inner
        try:
            updates, own = tx.update(grads, own, params, value=loss)
        except TypeError as error:
            # Some, such as contrib.sam, accept only their own arguments.
            if "unexpected keyword argument 'value'" not in str(error):
                raise
            updates, own = tx.update(grads, own, params)
        params = optax.apply_updates(params, updates)
        return params, own if ema_decay is None else _averaged(state, params, own, ema_decay)

    number = jax.ShapeDtypeStruct((), jnp.float32)
    numbers = [number, number] if is_scaled else [number]
    args = (list(shapes), list(shapes), list(state_shapes), *numbers)
    # Traced as one function of the whole tree, with gradients in the masters' dtype, as kernels
    # cast them.
    traced = _explained(lambda: jx.trace(update, *args))
    state = jax.tree.unflatten(init.out_tree, range(len(state_shapes)))
    # Numbers stand in for arrays, because only paths are needed.
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    if ema_decay is not None:  # named as without averages
        paths = [path[1:] if path[0].name == "inner" else path for path in paths]
    state_names = tuple(map(jax.tree_util.keystr, paths))
    _check_results(traced, shapes, init.out_tree, state_shapes, state_names)
    if has_side_effects(traced.jaxpr) or has_side_effects(init.jaxpr):
        raise ValueError(
            "optimizer has a print or a callback (jax.debug.print, io_callback), which can't be "
            "kept where its update is cut by group: take it out, or print from loss_fn"
        )
    params = jax.tree_util.tree_leaves_with_path(params_tree(range(len(shapes))))
    # Optax keeps state in trees like the parameters', so a path's suffix identifies its parameter.
    owners = {tuple(path): i for path, i in params}

    def owner(path: Sequence[Any]) -> int | None:
        """The parameter with the longest suffix of a path: `.mu['e']` ends with `['e']`."""
        suffixes = (tuple(path[i:]) for i in range(len(path) + 1))
        return next((owners[s] for s in suffixes if s in owners), None)

    return TracedOptimizer(
        update=jx.without_dead_code(traced),
        init=jx.without_dead_code(init),
        param_shapes=tuple(tuple(shape.shape) for shape in shapes),
        state_def=init.out_tree,
        state_shapes=state_shapes,
        state_names=state_names,
        state_of=tuple(map(owner, paths)),
        is_scaled=is_scaled,
        num_averages=0 if ema_decay is None else len(shapes),
    )


def _averaged(state: AveragedState, params: Any, own: Any, decay: Decay) -> AveragedState:
    """The state after an update, from the new parameters and the optimizer's own new state."""
    now: Any = decay(state.ema_count) if callable(decay) else decay
    average = optax.incremental_update(params, state.ema, 1 - now)
    return AveragedState(average, state.ema_count + 1, own)


def _check_schedule(schedule: Callable[[Any], Any]) -> None:
    """Checks what a schedule of `ema_decay` returns, which a step would only trace.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is no decay, or the schedule can't be traced.
    """
    found = []
    try:
        jax.eval_shape(lambda n: found.append(schedule(n)), jax.ShapeDtypeStruct((), jnp.int32))
    except Exception as error:
        raise ValueError(
            f"`ema_decay` can't be traced with a step count ({type(error).__name__}: {error})"
        ) from error
    (now,), allowed = found, "a schedule that returns a number from 0 to less than 1"
    if not isinstance(now, jax.Array | np.ndarray | np.number | float | int) or np.shape(now):
        raise TypeError(refused("ema_decay", allowed, schedule, f"it returns {now!r}"))
    # Others depend on the step.
    if jx.leaked_tracer(found) is None and not 0 <= now < 1:
        raise ValueError(refused("ema_decay", allowed, schedule, f"it returns {now}"))


# Messages with which Optax asks for a function of the parameters.
_ASKING = ("required keyword-only", "grad_fn must be provided", "obj_fn must be provided")
_ASKS_FOR_MORE = (
    "A streamed step gives it gradients, parameters, its state and the loss (`value`), and no "
    "function of the parameters to evaluate again. Line searches such as optax.lbfgs need one, and "
    "so do contrib.sophia and contrib.sam(opaque_mode=True); use optax.adamw or another "
    "transformation that takes gradients only, as contrib.sam(opaque_mode=False) does"
)
_AS_OPTAX_CALLS_IT = (
    "It is called as `optimizer.init(params)` and `optimizer.update(grads, state, params, "
    "value=loss)`, with traced arrays of the parameters' own shapes: try these calls under "
    "`jax.eval_shape`"
)


def _explained(trace: Callable[[], jx.Traced]) -> jx.Traced:
    """Traces, and rewords any error, which may come from the user's code and keeps its frames."""
    try:
        return trace()
    except NEEDS_VALUE as error:
        raise value_needed("`optimizer`", error) from None
    except Exception as error:
        asks = any(words in str(error) for words in _ASKING)
        raise ValueError(
            f"optimizer could not be traced ({type(error).__name__}: {error}). "
            + (_ASKS_FOR_MORE if asks else _AS_OPTAX_CALLS_IT)
        ).with_traceback(error.__traceback__) from None


def _check_results(
    traced: jx.Traced, shapes: Shapes, state_def: Any, state_shapes: Shapes, state_names: Any
) -> None:
    # State returns to its slab, so its shape and dtype must not change.
    _, new_def = traced.out_tree.children()
    if new_def != state_def:
        raise ValueError(
            f"optimizer changes the structure of its state from {state_def} to {new_def}"
        )
    outs = [jx.shape_of(a.aval) for a in traced.jaxpr.outvars]
    names = [f"a parameter of shape {s.shape}" for s in shapes]
    names += [f"its state{name}" for name in state_names]
    for name, new, old in zip(names, outs, [*shapes, *state_shapes], strict=True):
        if new.shape != old.shape or new.dtype != old.dtype:
            raise ValueError(
                f"optimizer turns {name} from {old.dtype}{list(old.shape)} into "
                f"{new.dtype}{list(new.shape)}"
            )


class LeafMap:
    """Maps between Optax's whole arrays and the stored arrays: leaves, and tokens of state.

    Attributes:
        traced: The traced optimizer.
        leaves: Leaves of the parameters.
        group_of: Group of each leaf.
        groups: Leaves of each group, ascending.
        num_groups: Number of groups.
        tokens: Pieces of state, each a whole state leaf or a slice of one.
        likely: Group that owns each token, as far as its path tells; None if it doesn't.
    """

    def __init__(
        self,
        traced: TracedOptimizer,
        leaves: Sequence[Leaf],
        group_of: Sequence[int],
        num_groups: int,
    ):
        """Splits each state leaf like the parameter whose path is a suffix of its path."""
        self.traced, self.leaves, self.num_groups = traced, leaves, num_groups
        self.group_of = tuple(group_of)
        self.groups = jx.members(group_of, num_groups)
        groups: list[dict[tuple[int, ...], int]] = [{} for _ in traced.param_shapes]
        indices: list[list[Index]] = [[] for _ in traced.param_shapes]
        for leaf, group in zip(leaves, group_of, strict=True):
            groups[leaf.parameter][numbers(leaf.index)] = group
            indices[leaf.parameter].append(leaf.index)
        self.tokens: list[StateLeaf] = []
        self.likely: list[int | None] = []
        for j, shape in enumerate(traced.state_shapes):
            p = traced.state_of[j]
            cuts, mirrors, only, own = [()], None, None, {}
            if p is not None:
                whole, own = traced.param_shapes[p], groups[p]
                cuts = _cuts_of_state(whole, indices[p], shape.shape)
                mirrors = p if whole == shape.shape else None
                # The group of all slices of a parameter, if they have one.
                only = next(iter(own.values())) if len(set(own.values())) == 1 else None
            for index in cuts:
                name = traced.state_names[j] + shown(index)
                self.tokens.append(
                    StateLeaf(name=name, leaf=j, index=index, shape=_part(shape.shape, index),
                              dtype=shape.dtype, mirrors=mirrors)
                )  # fmt: skip
                self.likely.append(own.get(numbers(index), only))

    def leaf_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of each leaf's master copy."""
        # The first inputs are gradients, in the parameters' order, with their shapes and dtypes.
        invars = self.traced.update.jaxpr.invars[len(self.traced.update.consts) :]
        dtypes = [invars[leaf.parameter].aval.dtype for leaf in self.leaves]
        return list(map(jax.ShapeDtypeStruct, (leaf.shape for leaf in self.leaves), dtypes))

    def params(self, arrays: Sequence[Any]) -> list[Value | SlicedValue]:
        """Whole parameters, from one array per leaf."""
        places = [(leaf.parameter, leaf.index) for leaf in self.leaves]
        return assemble(places, map(Value, arrays), len(self.traced.param_shapes))

    def leaf_values(self, params: Sequence[Value | SlicedValue]) -> list[Any]:
        """One array per leaf, from whole parameters: the inverse of `params`."""
        return [part_at(params[leaf.parameter], leaf.index) for leaf in self.leaves]

    def state(self, arrays: Sequence[Any]) -> list[Value | SlicedValue]:
        """Whole flat state, from one array per token."""
        places = [(token.leaf, token.index) for token in self.tokens]
        return assemble(places, map(Value, arrays), len(self.traced.state_shapes))

    def token_values(self, state: Sequence[Value | SlicedValue]) -> list[Any]:
        """One array per token, from whole flat state: the inverse of `state`."""
        return [part_at(state[token.leaf], token.index) for token in self.tokens]


def _cuts_of_state(
    whole: tuple[int, ...], indices: Sequence[Index], shape: tuple[int, ...]
) -> list[Index]:
    """The indices of the arrays in which a parameter's state is stored; `()` if it is whole.

    Args:
        whole: Shape of the parameter.
        indices: The indices of its leaves.
        shape: Shape of its state.
    """
    if range_of(indices[0]) is not None:
        return list(indices) if _axes_within(whole, (0,), shape) == (0,) else [()]
    axes = sliced_axes(indices[0])
    own = axes and _axes_within(whole, axes, shape) or ()
    return [index_of(own, at) for at in np.ndindex(*(shape[a] for a in own))]


def _part(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    """The shape of the part of an array at an index."""
    if (part := range_of(index)) is not None:
        return (part.stop - part.start, *shape[1:])
    return remaining(shape, sliced_axes(index))


def _axes_within(
    whole: tuple[int, ...], axes: tuple[int, ...], part: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Finds axes of a parameter in its state, which may lack some of the parameter's axes.

    For (8, 3, 5) with axis 1, factored statistics of shape (8, 3) have it as axis 1, of shape (3,
    5) as axis 0.

    Returns:
        The axes of the state; None if it lacks one of them, or has axes that the parameter lacks.
    """
    for kept in itertools.combinations(range(len(whole)), len(part)):
        if set(axes) <= set(kept) and tuple(whole[d] for d in kept) == part:
            return tuple(kept.index(a) for a in axes)
    return None


def flatten_update(leaf_map: LeafMap) -> jx.Traced:
    """The update `(grads, params, tokens, *numbers) -> (new params, new tokens)`, on leaves.

    The numbers are the loss and, if gradients are scaled, the scale.

    Args:
        leaf_map: The traced optimizer, and the arrays as stored.
    """
    order = [leaf.parameter for leaf in leaf_map.leaves]
    # Whether leaves are the parameters, in order, and tokens the leaves of the state.
    any_slices = any(stored.index for stored in [*leaf_map.leaves, *leaf_map.tokens])
    is_flat = order == sorted(order) and not any_slices
    flat = with_open_calls(leaf_map.traced.update) if is_flat else None
    return _without_repeats(jx.without_dead_code(flat or _traced_again(leaf_map)))


def _traced_again(leaf_map: LeafMap) -> jx.Traced:
    """The update on leaves and tokens, some of which are slices."""
    source, n = leaf_map.traced.update, len(leaf_map.traced.param_shapes)

    def flat(grads, params, tokens, *numbers):
        arrays = *leaf_map.params(grads), *leaf_map.params(params), *leaf_map.state(tokens)
        args = [*arrays, *map(Value, numbers)]
        out = Inliner(primal=True).run(source.jaxpr, source.consts, args)
        return leaf_map.leaf_values(out[:n]), leaf_map.token_values(out[n:])

    shapes = leaf_map.leaf_shapes()
    tokens = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in leaf_map.tokens]
    numbers = [jax.ShapeDtypeStruct((), jnp.float32)] * leaf_map.traced.num_numbers
    return jx.trace(flat, shapes, shapes, tokens, *numbers)


def flatten_init(leaf_map: LeafMap) -> jx.Traced:
    """Traces `params -> tokens`, the initial state, on leaves and tokens."""
    source = leaf_map.traced.init

    def flat(params):
        args = leaf_map.params(params)
        return leaf_map.token_values(Inliner(primal=True).run(source.jaxpr, source.consts, args))

    return jx.without_dead_code(jx.trace(flat, leaf_map.leaf_shapes()))


def _without_repeats(traced: jx.Traced) -> jx.Traced:
    """Removes repeated computations of tiny values.

    Optax computes the learning rate for every parameter. Each of these values would be a separate
    message to its parameter's group, or a separate equation in *combine*.

    Example, for two parameters and a count::

        before   a = 0.1 / count;  p0 - a * g0;  b = 0.1 / count;  p1 - b * g1
        after    a = 0.1 / count;  p0 - a * g0;                    p1 - a * g1
    """
    same: dict[Any, Any] = {}
    known: dict[Hashable, Sequence[Any]] = {}
    eqns = []
    for eqn in traced.jaxpr.eqns:
        ins = [a if jx.is_literal(a) else same.get(a, a) for a in eqn.invars]
        if any(a is not b for a, b in zip(ins, eqn.invars, strict=True)):
            eqn = eqn.replace(invars=ins)
        key = _repeat_key(eqn)
        first = eqn.outvars if key is None else known.setdefault(key, eqn.outvars)
        if first is eqn.outvars:
            eqns.append(eqn)
        else:
            same.update(zip(eqn.outvars, first, strict=True))
    outs = [a if jx.is_literal(a) else same.get(a, a) for a in traced.jaxpr.outvars]
    jaxpr = jx.sub_jaxpr(traced.jaxpr, eqns, traced.jaxpr.invars, outs)
    return dataclasses.replace(traced, jaxpr=jaxpr)


def _repeat_key(eqn) -> Hashable | None:
    small = all(jx.num_elements(v.aval) <= TINY for v in [*eqn.outvars, *jx.variables(eqn.invars)])
    if not small or eqn.effects:
        return None
    ins = tuple((str(a.val), str(a.aval)) if jx.is_literal(a) else a for a in eqn.invars)
    key = (eqn.primitive, ins, tuple(sorted(eqn.params.items())))
    try:
        hash(key)
    except TypeError:
        return None
    return key
