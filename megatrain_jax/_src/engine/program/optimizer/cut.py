"""Cuts an Optax transformation by parameter group, so that it can run while parameters stream.

The whole update is traced once on abstract arrays, so that masks, labels and schedules see the tree
they were written for. Then it is sliced into the computations of single groups and of all groups
together.

Example: SGD with momentum after `optax.clip_by_global_norm(1.0)`, two groups with one (4,) array:

    reduce   (grad, param, momentum, loss) -> (sum of squares,)     of each group
    combine  (loss, sum of group 0, sum of group 1) -> (norm < 1, norm)
    apply    (grad, param, momentum, norm < 1, norm) -> (new param, new momentum)

`deferred` is true, `messages` are ((0, 1), (0, 1)), and `reduce` reads only gradients, so it runs
without masters and momentum. Without clipping, `reduce` and `combine` return nothing, and apply
takes `(grad, param, momentum)`.

`assemble_state` puts Optax's own state together from the pieces that are kept by group.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from megatrain_jax._src.common.keys import Kind
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.blocks import Leaf
from megatrain_jax._src.engine.program.layers.index import Index, joined
from megatrain_jax._src.engine.program.optimizer.slicing import (
    LARGE,
    MIXED,
    NEUTRAL,
    Conflict,
    Fragment,
    Slicer,
    groups_behind,
    influences,
    split_cases,
)
from megatrain_jax._src.engine.program.optimizer.trace_optimizer import (
    LeafMap,
    Shapes,
    StateLeaf,
    flatten_init,
    flatten_update,
    trace_optimizer,
)

_SUGGESTION = (
    "use a transformation that works per parameter (optax.adamw, lion, adafactor, ...) or couples "
    "parameters once and only through scalars, like optax.clip_by_global_norm"
)
_STACKED = (
    "These layers are stacked in one array: tell the optimizer which axes belong to one layer "
    "(muon_weight_dimension_numbers of optax.contrib.muon), use jax.vmap over the layers' axis, or "
    "keep the layers in a list"
)


class CoupledGroupsError(ValueError):
    """Raised for an optimizer that couples groups of parameters by more than a few scalars."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerCut:
    """An Optax transformation cut by group. A group's arrays are in ascending order of its leaves.

    Attributes:
        traced: The update of the whole tree, from which the fragments were cut.
        numbers: Names and values of the numbers that the transformation was made with.
        deferred: Whether updates wait until all gradients are known, because they need a scalar
            over the gradients of several groups, or the run's decision to skip the step.
        guarded: Whether a step with non-finite gradients must be dropped; not if the optimizer
            tests for that itself.
        skips: Whether a dropped step does not end the run.
        is_scaled: Whether gradients belong to a scaled loss, so that updates divide them by the
            scale. The fragments of *reduce* and *combine* then take the scale after the loss.
        state_def: Tree structure of the whole Optax state.
        state_shapes: Shape and dtype of its leaves.
        state: For each group, the pieces of state it owns.
        globals: Small state that belongs to no group: counts, keys, hyperparameters.
        reduce: For each group `(*grads, *params, *state, loss, *globals) -> scalars`.
        reduce_reads: Kinds, of masters and optimizer state, that any `reduce` actually reads.
        combine: `(loss, *globals, *scalars of group 0, *scalars of group 1, ...) -> (*messages,
            *new globals)`.
        apply: For each group `(*grads, *params, *state, *its messages) -> (*new params, *new
            state)`.
        messages: For each group, the indices of the messages that `apply` takes.
        num_messages: Number of messages that `combine` returns.
        initial_state: For each group `(*params) -> state`.
        initial_scalars: For each group `(*params) -> scalars` needed by the initial globals.
        initial_globals: `(*scalars of group 0, *scalars of group 1, ...) -> globals`.
    """

    traced: jx.Traced
    numbers: tuple[tuple[str, float], ...] = ()
    deferred: bool
    guarded: bool
    skips: bool
    is_scaled: bool = False
    state_def: Any
    state_shapes: tuple[jax.ShapeDtypeStruct, ...]
    state: tuple[tuple[StateLeaf, ...], ...]
    globals: tuple[StateLeaf, ...]
    reduce: tuple[Fragment, ...]
    reduce_reads: frozenset[Kind]
    combine: Fragment
    apply: tuple[Fragment, ...]
    messages: tuple[tuple[int, ...], ...]
    num_messages: int
    initial_state: tuple[Fragment, ...]
    initial_scalars: tuple[Fragment, ...]
    initial_globals: Fragment

    @functools.cached_property
    def state_paths(self) -> tuple[tuple[str, ...], ...]:
        """The path of each leaf of the state, as in checkpoints."""
        tree = jax.tree.unflatten(self.state_def, self.state_shapes)
        rows, _ = jax.tree_util.tree_flatten_with_path(tree)
        simple = jax.tree_util.keystr
        return tuple(tuple(simple((key,), simple=True) for key in keys) for keys, _ in rows)


def cut_optimizer(
    optimizer: optax.GradientTransformation,
    params_tree: Callable[[Sequence[Any]], Any],
    shapes: Shapes,
    leaves: Sequence[Leaf],
    group_of: Sequence[int],
    num_groups: int,
    *,
    is_scaled: bool = False,
) -> OptimizerCut:
    """Cuts an Optax transformation by parameter group.

    Args:
        optimizer: Any transformation that works per parameter or couples parameters only through
            scalars, in one round.
        params_tree: Function from one array per parameter to the tree that the optimizer sees.
        shapes: Shape and dtype of each parameter's master copy.
        leaves: Leaves in which the parameters are stored.
        group_of: Group of each leaf.
        num_groups: Number of groups.
        is_scaled: Whether gradients belong to a scaled loss.

    Raises:
        ValueError: It needs more than gradients, parameters, its state and the loss.
        CoupledGroupsError: It couples parameters in a way that can't be cut.
    """
    traced = trace_optimizer(optimizer, params_tree, shapes, is_scaled=is_scaled)
    leaf_map = LeafMap(traced, leaves, group_of, num_groups)
    return _cut(leaf_map, flatten_update(leaf_map), flatten_init(leaf_map))


def _cut(leaf_map: LeafMap, update: jx.Traced, init: jx.Traced) -> OptimizerCut:
    """Cuts a flat update; if that would need reduce twice, cuts it again with cases split."""
    try:
        cutter = _Cutter(leaf_map, update, init)
        try:
            return cutter.cut()
        except Conflict:
            again = split_cases(cutter.slicer)
            if again is None:
                raise
    except Conflict as conflict:
        raise CoupledGroupsError(_message(conflict, leaf_map, update, init)) from None
    # Outside the `try`, so that a conflict names inputs of the update in which it was found. Each
    # turn replaces entangled scalars by selections, which are not entangled, so this ends.
    return _cut(leaf_map, again, init)


def _message(conflict: Conflict, leaf_map: LeafMap, update: jx.Traced, init: jx.Traced) -> str:
    """The error message of a conflict: its reason, up to six inputs by name, and a remedy."""
    leaves = [leaf.name for leaf in leaf_map.leaves]
    tokens = [f"state{token.name}" for token in leaf_map.tokens]
    invars = update.jaxpr.invars[len(update.consts) : -leaf_map.traced.num_numbers]
    name_of = dict(zip(invars, [*leaves, *leaves, *tokens], strict=True))
    name_of.update(zip(init.jaxpr.invars[len(init.consts) :], leaves, strict=True))
    shown = list(dict.fromkeys(name_of[v] for v in conflict.variables if v in name_of))[:6]
    stacked = any(name.endswith("]") for name in shown)
    remedies = [_SUGGESTION, conflict.remedy or (_STACKED if stacked else "")]
    return (
        f"optimizer can't be cut by group: {conflict.reason}, among {', '.join(shown)}; "
        f"{'. '.join(filter(None, remedies))}"
    )


class _Cutter:
    """Finds the owner of each token (a piece of state), and slices the flat update accordingly."""

    def __init__(self, leaf_map: LeafMap, update: jx.Traced, init: jx.Traced):
        self.leaf_map, self.update, self.init = leaf_map, update, init
        n = len(leaf_map.leaves)
        inputs = list(update.jaxpr.invars[len(update.consts) :])
        end = len(inputs) - leaf_map.traced.num_numbers
        self.grads, self.params = inputs[:n], inputs[n : 2 * n]
        self.tokens, self.numbers = inputs[2 * n : end], inputs[end:]
        self.initial_params = list(init.jaxpr.invars[len(init.consts) :])
        self.initial_groups = dict(zip(self.initial_params, leaf_map.group_of, strict=True))
        outputs = list(update.jaxpr.outvars)
        self.new_params, self.new_tokens = outputs[:n], outputs[n:]
        self.owner = self._owners()
        self.owned = jx.members(self.owner, leaf_map.num_groups)
        self.shared = [t for t, o in enumerate(self.owner) if o is None]
        owners = [NEUTRAL if owner is None else owner for owner in self.owner]
        labels = {**self._parameter_groups(), **dict.fromkeys(self.numbers, NEUTRAL)}
        labels.update(zip(self.tokens, owners, strict=True))
        self.initial = Slicer(self.init, self.initial_groups, owners)
        self.slicer = Slicer(self.update, labels, [*leaf_map.group_of, *owners])

    def _parameter_groups(self) -> dict[Any, int]:
        groups = self.leaf_map.group_of
        return dict(zip([*self.grads, *self.params], [*groups, *groups], strict=True))

    def _owners(self) -> list[int | None]:
        """Owner of each token: the only group with arrays that it meets; None if it is shared.

        For a single number, or a token that meets no group's arrays, its path in Optax's state
        decides. A token initialised from several groups' parameters is shared, whatever its path.

        Raises:
            ValueError: A token is shared and large.
        """
        found = influences(self.update.jaxpr, self._parameter_groups(), self.tokens)
        nothing: tuple[frozenset, frozenset] = (frozenset(), frozenset())
        owners: list[int | None] = []
        starts = groups_behind(self.init.jaxpr, self.initial_groups)
        pairs = zip(self.leaf_map.likely, starts, strict=True)
        likely_owners = [owner if start <= {owner} else None for owner, start in pairs]
        for token, likely, old, new in zip(
            self.leaf_map.tokens, likely_owners, self.tokens, self.new_tokens, strict=True
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
        """Slices the update into fragments.

        Raises:
            Conflict: Groups depend on each other in a way that can't be cut.
        """
        leaf_map, owned = self.leaf_map, self.owned
        groups = range(leaf_map.num_groups)
        # All outputs first: they promote scalars, which any group's closures may meet.
        outputs = [self._outputs(g) for g in groups]
        closures = [self.slicer.closure(out, self.slicer.is_message) for out in outputs]
        ids: dict[Any, int] = {}
        for _, messages in closures:
            for v in messages:
                ids.setdefault(v, len(ids))
        combine, reduced = self._combine(list(ids))
        reduce = tuple(self._reduce(g, reduced[g]) for g in groups)
        # Besides gradients, these need to be on the device when reduce runs.
        read = self.slicer.sources([v for row in reduced for v in row])
        kinds = {Kind.MASTERS: self.params, Kind.OPTIMIZER_STATE: self.tokens}
        initial_scalars, initial_globals = self._initial_globals()
        return OptimizerCut(
            traced=leaf_map.traced.update,
            # With nothing to reduce, no update depends on another group's gradient.
            deferred=any(reduced),
            guarded=not any(e.primitive.name == "is_finite" for e in self.update.jaxpr.eqns),
            skips=False,
            is_scaled=leaf_map.traced.is_scaled,
            state_def=leaf_map.traced.state_def,
            state_shapes=leaf_map.traced.state_shapes,
            state=tuple(tuple(leaf_map.tokens[t] for t in owned[g]) for g in groups),
            globals=tuple(leaf_map.tokens[t] for t in self.shared),
            reduce=reduce,
            reduce_reads=frozenset(kind for kind, own in kinds.items() if not read.isdisjoint(own)),
            combine=combine,
            apply=tuple(
                self.slicer.fragment(eqns, [*self._arguments(g), *messages], outputs[g])
                for g, (eqns, messages) in enumerate(closures)
            ),
            messages=tuple(tuple(ids[v] for v in messages) for _, messages in closures),
            num_messages=len(ids),
            initial_state=tuple(map(self._initial_state, groups)),
            initial_scalars=initial_scalars,
            initial_globals=initial_globals,
        )

    def _arguments(self, g: int) -> list[Any]:
        """Gradients, parameters and state of a group: the first arguments of reduce and apply."""
        leaves = self.leaf_map.groups[g]
        return [
            *(self.grads[i] for i in leaves),
            *(self.params[i] for i in leaves),
            *(self.tokens[t] for t in self.owned[g]),
        ]

    def _outputs(self, g: int) -> list[Any]:
        """New parameters and state of a group; a scalar of another group becomes a message."""
        outputs = [self.new_params[i] for i in self.leaf_map.groups[g]]
        outputs += [self.new_tokens[t] for t in self.owned[g]]
        for v in jx.variables(outputs):
            if self.slicer.group[v] not in (g, MIXED, NEUTRAL):
                if v not in self.slicer.scalar:
                    raise Conflict(
                        "a parameter or its state takes over another's array",
                        [*self._arguments(g)[:1], *self.slicer.sources([v])],
                    )
                self.slicer.promoted.add(v)
        return outputs

    def _combine(self, messages: list[Any]) -> tuple[Fragment, list[list[Any]]]:
        """The combine fragment, and for each group the scalars that its reduce must return."""
        outputs = [*messages, *(self.new_tokens[t] for t in self.shared)]
        eqns, scalars = self.slicer.closure(outputs, self.slicer.is_reduced)
        reduced = self._by_group(self.slicer, scalars)
        arguments = [*self.numbers, *(self.tokens[t] for t in self.shared)]
        arguments += [v for row in reduced for v in row]
        return self.slicer.fragment(eqns, arguments, outputs), reduced

    def _by_group(self, slicer: Slicer, scalars: list[Any]) -> list[list[Any]]:
        return [[v for v in scalars if slicer.group[v] == g] for g in range(len(self.owned))]

    def _reduce(self, g: int, scalars: list[Any]) -> Fragment:
        """The fragment that computes scalars of a group from its arrays and shared state."""
        eqns, _ = self.slicer.closure(scalars, lambda _: False)
        shared = [*self.numbers, *(self.tokens[t] for t in self.shared)]
        return self.slicer.fragment(eqns, [*self._arguments(g), *shared], scalars)

    def _initial_state(self, g: int) -> Fragment:
        """The fragment that makes a group's initial state.

        Raises:
            ValueError: It depends on parameters of another group.
        """
        slicer, groups = self.initial, self.initial_groups
        outputs = [self.init.jaxpr.outvars[t] for t in self.owned[g]]
        for t, v in zip(self.owned[g], outputs, strict=True):
            if any(groups[u] != g for u in slicer.sources(jx.variables([v]))):
                raise self._foreign_start(t)
        eqns, _ = slicer.closure(outputs, lambda _: False)
        return slicer.fragment(eqns, self._initial_arguments(g), outputs)

    def _initial_globals(self) -> tuple[tuple[Fragment, ...], Fragment]:
        """The fragments for each group's scalars, and for the initial shared state.

        Raises:
            ValueError: The state depends on parameters through more than scalars.
        """
        slicer, outvars = self.initial, self.init.jaxpr.outvars
        for t in self.shared:
            try:
                slicer.closure([outvars[t]], slicer.is_reduced)
            except Conflict:
                raise self._foreign_start(t) from None
        outputs = [outvars[t] for t in self.shared]
        eqns, scalars = slicer.closure(outputs, slicer.is_reduced)
        rows = self._by_group(slicer, scalars)
        parts = []
        for g, row in enumerate(rows):
            own, _ = slicer.closure(row, lambda _: False)
            parts.append(slicer.fragment(own, self._initial_arguments(g), row))
        return tuple(parts), slicer.fragment(eqns, [v for row in rows for v in row], outputs)

    def _initial_arguments(self, g: int) -> list[Any]:
        return [self.initial_params[i] for i in self.leaf_map.groups[g]]

    def _foreign_start(self, token: int) -> ValueError:
        return ValueError(
            f"optimizer initialises state{self.leaf_map.tokens[token].name} from arrays of "
            f"parameters that it isn't the state of alone; {_SUGGESTION}"
        )


def assemble_state(
    cut: OptimizerCut, per_group: Sequence[Sequence[Any]], global_state: Sequence[Any]
) -> Any:
    """Assembles Optax's own state, as NumPy arrays.

    Args:
        cut: The cut, with the place of each array.
        per_group: Arrays of each group, in the order of `cut.state`.
        global_state: Arrays in the order of `cut.globals`.
    """
    rows: list[list[tuple[Index, Any]]] = [[] for _ in cut.state_shapes]
    described = [*zip(cut.state, per_group, strict=True), (cut.globals, global_state)]
    for owned, arrays in described:
        for leaf, array in zip(owned, arrays, strict=True):
            rows[leaf.leaf].append((leaf.index, array))
    # A random key is never sliced.
    whole = [
        row[0][1]
        if jnp.issubdtype(row[0][1].dtype, jax.dtypes.prng_key)
        else joined(row, shape.shape)
        for row, shape in zip(rows, cut.state_shapes, strict=True)
    ]
    return jax.tree.unflatten(cut.state_def, whole)
