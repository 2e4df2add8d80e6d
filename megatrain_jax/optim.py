"""Cuts an Optax transformation by parameter group, so that it can run while parameters stream.

The whole update is traced once on abstract arrays, so masks, labels and schedules see the tree
they were written for, and then sliced: what a group can compute alone, and what needs them all.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from megatrain_jax.program import jaxpr as jx
from megatrain_jax.program.blocks import Leaf
from megatrain_jax.program.cases import split_cases
from megatrain_jax.program.inline import Inliner, Pieces, Value, piece, stack
from megatrain_jax.program.slicing import (
    LARGE,
    MIXED,
    NEUTRAL,
    Conflict,
    Part,
    Slicer,
    influences,
)
from megatrain_jax.program.trace import assemble

Shapes = Sequence[jax.ShapeDtypeStruct]
_SUGGESTION = (
    "use a transformation that works per parameter (optax.adamw, lion, adafactor, ...) or couples "
    "parameters only through scalars, like optax.clip_by_global_norm"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateLeaf:
    """One array of optimizer state as it is stored.

    Attributes:
        name: Its path in Optax's state.
        leaf: Its index in the flat state.
        index: Which slice along axis 0 of a state leaf that is stacked, or None for all of it.
        shape: Shape of this array, without the stacked axis.
        dtype: Its dtype.
    """

    name: str
    leaf: int
    index: int | None
    shape: tuple[int, ...]
    dtype: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerCut:
    """An Optax transformation cut by group. A group's arrays are in ascending order of its leaves.

    Attributes:
        deferred: Whether an update needs a scalar that depends on the gradients of several groups.
        guarded: Whether a step with non-finite gradients should be dropped; not if the optimizer
            tests for that itself.
        state_def: Tree structure of the whole Optax state.
        state_shapes: Shape and dtype of its leaves.
        state: For each group the state it owns.
        globals: Small state that belongs to no group: counts, keys, hyperparameters.
        reduce: For each group `(*grads, *params, *state, loss, *globals) -> scalars`.
        reduce_reads: Which of "P" (params) and "O" (state) any of `reduce` really reads.
        combine: `(loss, *globals, *scalars of group 0, *scalars of group 1, ...) ->
            (*messages, *new globals)`.
        apply: For each group `(*grads, *params, *state, *its messages) -> (*new params, *new
            state)`.
        messages: For each group, which of the messages `apply` takes.
        num_messages: How many messages `combine` gives.
        initial_state: For each group `(*params) -> state`.
        initial_globals: `() -> globals`.
    """

    deferred: bool
    guarded: bool
    state_def: Any
    state_shapes: tuple[jax.ShapeDtypeStruct, ...]
    state: tuple[tuple[StateLeaf, ...], ...]
    globals: tuple[StateLeaf, ...]
    reduce: tuple[Part, ...]
    reduce_reads: frozenset[str]
    combine: Part
    apply: tuple[Part, ...]
    messages: tuple[tuple[int, ...], ...]
    num_messages: int
    initial_state: tuple[Part, ...]
    initial_globals: Part


def cut_optimizer(
    optimizer: optax.GradientTransformation,
    params_tree: Callable[[Sequence[Any]], Any],
    shapes: Shapes,
    leaves: Sequence[Leaf],
    group_of: Sequence[int],
    num_groups: int,
) -> OptimizerCut:
    """Cuts an Optax transformation by parameter group.

    Args:
        optimizer: any transformation that works per parameter or couples parameters only through
            scalars, in one round.
        params_tree: builds the tree that the optimizer sees from one array per parameter.
        shapes: shape and dtype of each parameter's master copy.
        leaves: the leaves in which the parameters are stored.
        group_of: the group of each leaf.
        num_groups: how many groups there are.

    Raises:
        TypeError: `optimizer` is no Optax transformation.
        ValueError: it needs more than gradients, parameters, its state and the loss, or it couples
            parameters in a way that can't be cut.
    """
    traced = _trace(optimizer, params_tree, shapes)
    form = _Form(traced, leaves, group_of, num_groups)
    return _Cutter(form, _flatten_update(form), _flatten_init(form)).cut()


def assemble_state(
    cut: OptimizerCut, per_group: Sequence[Sequence[Any]], global_state: Sequence[Any]
) -> Any:
    """Optax's own state from the arrays of all groups and the global ones, as numpy arrays."""
    rows: list[list[tuple[int | None, Any]]] = [[] for _ in cut.state_shapes]
    described = [*zip(cut.state, per_group, strict=True), (cut.globals, global_state)]
    for owned, arrays in described:
        for leaf, array in zip(owned, arrays, strict=True):
            rows[leaf.leaf].append((leaf.index, array))
    return jax.tree.unflatten(cut.state_def, [_whole(row) for row in rows])


def _whole(row: list[tuple[int | None, Any]]) -> Any:
    if len(row) == 1 and row[0][0] is None:
        value = row[0][1]
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        return value if is_key else np.asarray(value)
    return np.stack([np.asarray(x) for _, x in sorted(row, key=lambda r: r[0] or 0)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Traced:
    """The traced update and initialisation, with names for error messages."""

    update: jx.Traced  # (grads, params, state, loss) -> (new params, new state)
    init: jx.Traced  # params -> state
    num_params: int
    state_def: Any
    state_shapes: tuple[jax.ShapeDtypeStruct, ...]
    state_names: tuple[str, ...]
    state_of: tuple[int | None, ...]  # the parameter whose path a state leaf's path ends with


def _trace(optimizer, params_tree, shapes: Shapes) -> _Traced:
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(f"optimizer must be an optax.GradientTransformation, not {optimizer!r}")
    tx = optax.with_extra_args_support(optimizer)
    init = _explained(lambda: jx.trace(lambda p: tx.init(params_tree(p)), list(shapes)))
    state_shapes = tuple(jx.shape_of(v.aval) for v in init.jaxpr.outvars)

    def update(grads, params, state, loss):
        params = params_tree(params)
        state = jax.tree.unflatten(init.out_tree, state)
        updates, state = tx.update(params_tree(grads), state, params, value=loss)
        return optax.apply_updates(params, updates), state

    loss = jax.ShapeDtypeStruct((), jnp.float32)
    args = (list(shapes), list(shapes), list(state_shapes), loss)
    traced = _explained(lambda: jx.trace(update, *args))
    _check_results(traced, shapes, init.out_tree, state_shapes)
    state = jax.tree.unflatten(init.out_tree, range(len(state_shapes)))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    params = jax.tree_util.tree_leaves_with_path(params_tree(range(len(shapes))))
    owners = {tuple(path): i for path, i in params}
    return _Traced(
        update=jx.without_dead_code(traced),
        init=jx.without_dead_code(init),
        num_params=len(shapes),
        state_def=init.out_tree,
        state_shapes=state_shapes,
        state_names=tuple(map(jax.tree_util.keystr, paths)),
        state_of=tuple(_suffix_owner(tuple(path), owners) for path in paths),
    )


def _suffix_owner(path: tuple, owners: dict[tuple, int]) -> int | None:
    """The parameter whose path is the longest suffix of a path."""
    suffixes = (path[i:] for i in range(len(path) + 1))
    return next((owners[s] for s in suffixes if s in owners), None)


def _explained(trace: Callable[[], jx.Traced]) -> jx.Traced:
    try:
        return trace()
    except Exception as error:
        raise ValueError(
            "optimizer could not be traced: a streamed step gives it gradients, parameters, its "
            "state and the loss (`value`), and no function of the parameters to evaluate again "
            f"({type(error).__name__}: {error}). Line searches such as optax.lbfgs need one; use "
            "optax.adamw or another transformation that takes gradients only"
        ) from error


def _check_results(traced: jx.Traced, shapes: Shapes, state_def: Any, state_shapes: Shapes) -> None:
    params_def, new_def = traced.out_tree.children()
    if new_def != state_def:
        raise ValueError(
            f"optimizer changes the structure of its state from {state_def} to {new_def}"
        )
    outs = [jx.shape_of(a.aval) for a in traced.jaxpr.outvars]
    names = [f"a parameter of shape {s.shape}" for s in shapes] + [
        f"its state{jax.tree_util.keystr(path)}" for path, _ in
        jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(state_def, range(len(state_shapes))))
    ]  # fmt: skip
    for name, new, old in zip(names, outs, [*shapes, *state_shapes], strict=True):
        if new.shape != old.shape or new.dtype != old.dtype:
            raise ValueError(
                f"optimizer turns {name} from {old.dtype}{list(old.shape)} into "
                f"{new.dtype}{list(new.shape)}"
            )


class _Form:
    """How parameters and state are represented: whole, or as slices along axis 0."""

    def __init__(self, traced: _Traced, leaves, group_of, num_groups):
        self.traced, self.leaves, self.num_groups = traced, leaves, num_groups
        self.group_of = tuple(group_of)
        self.groups = tuple(
            tuple(i for i, g in enumerate(group_of) if g == group) for group in range(num_groups)
        )
        groups: list[dict[int | None, int]] = [{} for _ in range(traced.num_params)]
        self.slices: list[int | None] = [None] * traced.num_params
        for leaf, group in zip(leaves, group_of, strict=True):
            groups[leaf.parameter][leaf.index] = group
            if leaf.index is not None:
                self.slices[leaf.parameter] = len(groups[leaf.parameter])
        self.tokens: list[StateLeaf] = []
        self.likely: list[int | None] = []  # the group that owns a token, if its path tells
        for j, shape in enumerate(traced.state_shapes):
            p = traced.state_of[j]
            for k in self._indices(p, shape):
                name = traced.state_names[j] + ("" if k is None else f"[{k}]")
                own = shape.shape if k is None else shape.shape[1:]
                self.tokens.append(
                    StateLeaf(name=name, leaf=j, index=k, shape=tuple(own), dtype=shape.dtype)
                )
                self.likely.append(None if p is None else groups[p].get(k, self._only(groups[p])))

    def _indices(self, p: int | None, shape) -> Sequence[int | None]:
        n = None if p is None else self.slices[p]
        return range(n) if n is not None and shape.shape[:1] == (n,) else (None,)

    @staticmethod
    def _only(groups: dict) -> int | None:
        return next(iter(groups.values())) if len(set(groups.values())) == 1 else None

    def leaf_shapes(self) -> list[jax.ShapeDtypeStruct]:
        invars = self.traced.update.jaxpr.invars[len(self.traced.update.consts) :]
        return [
            jax.ShapeDtypeStruct(leaf.shape, invars[leaf.parameter].aval.dtype)
            for leaf in self.leaves
        ]

    def params(self, arrays: Sequence[Any]) -> list[Value | Pieces]:
        """The parameters from one array per leaf."""
        return assemble(self.leaves, list(map(Value, arrays)), self.traced.num_params)

    def leaf_values(self, params: Sequence[Value | Pieces]) -> list[Any]:
        """Undoes `params`."""
        return [_take(params[leaf.parameter], leaf.index) for leaf in self.leaves]

    def state(self, arrays: Sequence[Any]) -> list[Value | Pieces]:
        """The flat state from one array per token."""
        values: list[list[Value]] = [[] for _ in self.traced.state_shapes]
        for token, array in zip(self.tokens, arrays, strict=True):
            values[token.leaf].append(Value(array))
        stacked = {token.leaf for token in self.tokens if token.index is not None}
        return [Pieces(tuple(v)) if j in stacked else v[0] for j, v in enumerate(values)]

    def token_values(self, state: Sequence[Value | Pieces]) -> list[Any]:
        """Undoes `state`."""
        return [_take(state[token.leaf], token.index) for token in self.tokens]


def _take(value: Value | Pieces, index: int | None) -> Any:
    return (stack(value) if index is None else piece(value, index)).array


def _flatten_update(form: _Form) -> jx.Traced:
    """`(grads, params, tokens, loss) -> (new params, new tokens)`, one array per leaf and token."""
    source, n = form.traced.update, form.traced.num_params

    def flat(grads, params, tokens, loss):
        args = [*form.params(grads), *form.params(params), *form.state(tokens), Value(loss)]
        out = Inliner(primal=True).run(source.jaxpr, (), [*map(Value, source.consts), *args])
        return form.leaf_values(out[:n]), form.token_values(out[n:])

    shapes = form.leaf_shapes()
    tokens = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in form.tokens]
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    return jx.without_dead_code(jx.trace(flat, shapes, shapes, tokens, loss))


def _flatten_init(form: _Form) -> jx.Traced:
    """`params -> tokens`."""
    source = form.traced.init

    def flat(params):
        args = [*map(Value, source.consts), *form.params(params)]
        return form.token_values(Inliner(primal=True).run(source.jaxpr, (), args))

    return jx.without_dead_code(jx.trace(flat, form.leaf_shapes()))


class _Cutter:
    """Finds who owns which state and slices the flat update."""

    def __init__(self, form: _Form, update: jx.Traced, init: jx.Traced):
        self.form, self.update, self.init = form, update, init
        n = len(form.leaves)
        inputs = list(update.jaxpr.invars[len(update.consts) :])
        self.grads, self.params = inputs[:n], inputs[n : 2 * n]
        self.tokens, self.loss = inputs[2 * n : -1], inputs[-1]
        self.initial_params = list(init.jaxpr.invars[len(init.consts) :])
        self.initial_groups = dict(zip(self.initial_params, form.group_of, strict=True))
        outputs = list(update.jaxpr.outvars)
        self.new_params, self.new_tokens = outputs[:n], outputs[n:]
        self.owner = self._owners()
        self.owned = [
            [t for t, o in enumerate(self.owner) if o == g] for g in range(form.num_groups)
        ]
        self.shared = [t for t, o in enumerate(self.owner) if o is None]

    def _parameter_groups(self) -> dict[Any, int]:
        groups = self.form.group_of
        return {**dict(zip(self.grads, groups, strict=True)),
                **dict(zip(self.params, groups, strict=True))}  # fmt: skip

    def _owners(self) -> list[int | None]:
        found = influences(self.update.jaxpr, self._parameter_groups(), self.tokens)
        nothing: tuple[frozenset, frozenset] = (frozenset(), frozenset())
        owners: list[int | None] = []
        for token, likely, old, new in zip(
            self.form.tokens, self.form.likely, self.tokens, self.new_tokens, strict=True
        ):
            size = jx.num_elements(token)
            groups = found[old][1] | (nothing if jx.is_literal(new) else found.get(new, nothing))[0]
            owner = likely if size == 1 or not groups else None
            if size > 1 and len(groups) == 1:
                owner = next(iter(groups))
            if owner is None and size > LARGE:
                raise ValueError(
                    f"optimizer keeps state{token.name} {token.dtype}{list(token.shape)}, which "
                    "belongs to no single group of parameters and is too large to be shared by "
                    f"all ({size} elements; at most {LARGE}); {_SUGGESTION}"
                )
            owners.append(owner)
        return owners

    def cut(self) -> OptimizerCut:
        """Slices everything."""
        try:
            return self._cut()
        except Conflict as conflict:
            again = split_cases(self.slicer) if hasattr(self, "slicer") else None
            if again is None:
                raise ValueError(self._message(conflict)) from None
        return _Cutter(self.form, again, self.init).cut()

    def _cut(self) -> OptimizerCut:
        form, owned = self.form, self.owned
        labels = {**self._parameter_groups(), self.loss: NEUTRAL}
        for var, owner in zip(self.tokens, self.owner, strict=True):
            labels[var] = NEUTRAL if owner is None else owner
        self.slicer = Slicer(self.update, labels)
        self.initial = Slicer(self.init, self.initial_groups)
        groups = range(form.num_groups)
        outputs = [self._outputs(g) for g in groups]
        closures = [self.slicer.closure(out, self.slicer.is_message) for out in outputs]
        ids: dict[Any, int] = {}
        for _, messages in closures:
            for v in messages:
                ids.setdefault(v, len(ids))
        combine, reduced = self._combine(list(ids))
        reduce = tuple(self._reduce(g, reduced[g]) for g in groups)
        return OptimizerCut(
            deferred=any(reduced),
            guarded=not any(e.primitive.name == "is_finite" for e in self.update.jaxpr.eqns),
            state_def=form.traced.state_def,
            state_shapes=form.traced.state_shapes,
            state=tuple(tuple(form.tokens[t] for t in owned[g]) for g in groups),
            globals=tuple(form.tokens[t] for t in self.shared),
            reduce=reduce,
            reduce_reads=self._reads(reduced),
            combine=combine,
            apply=tuple(
                self.slicer.part(eqns, [*self._arguments(g), *messages], outputs[g])
                for g, (eqns, messages) in enumerate(closures)
            ),
            messages=tuple(tuple(ids[v] for v in messages) for _, messages in closures),
            num_messages=len(ids),
            initial_state=tuple(self._initial(g, owned[g]) for g in groups),
            initial_globals=self._initial(None, self.shared),
        )

    def _arguments(self, g: int) -> list[Any]:
        leaves = self.form.groups[g]
        return [
            *(self.grads[i] for i in leaves),
            *(self.params[i] for i in leaves),
            *(self.tokens[t] for t in self.owned[g]),
        ]

    def _outputs(self, g: int) -> list[Any]:
        """New parameters and state of a group; what is another group's scalar becomes a message."""
        outputs = [self.new_params[i] for i in self.form.groups[g]]
        outputs += [self.new_tokens[t] for t in self.owned[g]]
        for v in jx.variables(outputs):
            if self.slicer.group[v] not in (g, MIXED, NEUTRAL):
                if v not in self.slicer.scalar:
                    raise Conflict("a parameter or its state takes another's value", [v])
                self.slicer.promoted.add(v)
        return outputs

    def _combine(self, messages: list[Any]) -> tuple[Part, list[list[Any]]]:
        outputs = [*messages, *(self.new_tokens[t] for t in self.shared)]
        eqns, scalars = self.slicer.closure(outputs, self.slicer.is_reduced)
        reduced: list[list[Any]] = [[] for _ in range(self.form.num_groups)]
        for v in scalars:
            reduced[self.slicer.group[v]].append(v)
        arguments = [self.loss, *(self.tokens[t] for t in self.shared)]
        arguments += [v for row in reduced for v in row]
        return self.slicer.part(eqns, arguments, outputs), reduced

    def _reduce(self, g: int, scalars: list[Any]) -> Part:
        eqns, _ = self.slicer.closure(scalars, lambda _: False)
        shared = [self.loss, *(self.tokens[t] for t in self.shared)]
        return self.slicer.part(eqns, [*self._arguments(g), *shared], scalars)

    def _reads(self, reduced: list[list[Any]]) -> frozenset[str]:
        read = self.slicer.sources([v for row in reduced for v in row])
        kinds = {"P": self.params, "O": self.tokens}
        return frozenset(k for k, variables in kinds.items() if not read.isdisjoint(variables))

    def _initial(self, g: int | None, tokens: list[int]) -> Part:
        slicer, groups = self.initial, self.initial_groups
        outputs = [self.init.jaxpr.outvars[t] for t in tokens]
        for t, v in zip(tokens, outputs, strict=True):
            if any(groups[u] != g for u in slicer.sources(jx.variables([v]))):
                raise ValueError(
                    f"optimizer initialises state{self.form.tokens[t].name} from parameters of "
                    f"several groups; {_SUGGESTION}"
                )
        eqns, _ = slicer.closure(outputs, lambda _: False)
        own = [v for v, group in groups.items() if group == g]
        return slicer.part(eqns, own, outputs)

    def _message(self, conflict: Conflict) -> str:
        params = (self.grads, self.params, self.initial_params)
        leaf_of = {v: i for variables in params for i, v in enumerate(variables)}
        names = {
            self.form.leaves[leaf_of[v]].name: None for v in conflict.variables if v in leaf_of
        }
        tokens = dict(zip(self.tokens, self.form.tokens, strict=True))
        names.update({f"state{tokens[v].name}": None for v in conflict.variables if v in tokens})
        shown = list(names)[:6]
        return (
            f"optimizer can't be cut by group: {conflict.reason}, among {', '.join(shown)}; "
            f"{_SUGGESTION}"
        )
