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

A `Slicer` divides an update into the computations of single groups and of all groups together.

Groups may depend on each other only through small values made from scalars. This file knows jaxprs;
`trace_optimizer.py` knows Optax.

Example: SGD with momentum after `optax.clip_by_global_norm(1.0)`, two groups with one parameter p,
gradient g and momentum t each, all of shape (4,). Equations, labels, and destinations:

    s0 = sum(square(g0))            0      scalar           reduce of group 0
    s1 = sum(square(g1))            1      scalar           reduce of group 1
    s0 + s1                         MIXED  junction         combine
    n = sqrt(s0 + s1), c = n < 1    MIXED  scalar           combine; c and n are its messages
    u0 = select(c, g0, g0 / n)      0      late             apply of group 0
    m0 = u0 + 0.9 * t0              0      late             apply of group 0, the new momentum
    p0 - 0.1 * m0                   0      late             apply of group 0, the new parameter

Without clipping nothing is MIXED: reduce and combine are empty, and no message is sent.

Scalars that depend on a Boolean over all groups are computed for both cases.

Optax guards its norms with `norm(where(total == 0, 1, x))`. If `x` is one layer of a stacked
parameter, this would need all groups twice: for the condition, and for the norm.

Example, for group 0 with its array x0 and a total over all groups:

    before  total -> c = (total == 0) -> s = norm(where(c, 1, x0))        reduce after combine
    after   s_false = norm(where(False, 1, x0)), s_true = norm(where(True, 1, x0))      reduce
            s = select(c, s_false, s_true)                                             combine

Two conditions make four cases. The selected one equals the original result.
"""

import dataclasses
import functools
import itertools
from collections import ChainMap, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from megatrain_jax._src.common.keys import Kind
from megatrain_jax._src.common.remembering import IdentityKey, remembered
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.blocks import Leaf
from megatrain_jax._src.engine.program.layers.sliced_values import Index, joined, numbers
from megatrain_jax._src.engine.program.optimizer.trace_optimizer import (
    TINY,
    Decay,
    LeafMap,
    Shapes,
    StateLeaf,
    flatten_init,
    flatten_update,
    trace_optimizer,
)
from megatrain_jax._src.engine.program.structural_key import structural_key

MIXED, NEUTRAL = -1, -2  # of several groups; of none (shared state, the loss, constants)
LARGE = 65536  # elements: values up to this size may be shared by all groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fragment:
    """A fragment of an update: a pure function for one group, or for all together, as a jaxpr.

    Attributes:
        jaxpr: The equations, as a function of the constants, then of the arguments.
        consts: Values of the constants.
        key: Structural key: equal for fragments that compute the same.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    key: Hashable


_FLATTENED = (
    "optax.flatten puts all parameters into one array: pass the transformation inside of it "
    "instead, which gives the same results if it is elementwise, as optax.adam"
)
_TWICE = (
    "One such number in a step is possible, two that depend on each other are not: of two global "
    "norms keep one, and use contrib.prodigy or contrib.dog instead of contrib.mechanize"
)


class Conflict(Exception):
    """Raised if groups depend on each other in a way that can't be cut.

    Attributes:
        reason: The cause, in words.
        variables: Inputs of the update that are combined.
        remedy: A workaround, in sentences, if one is known for this cause.
    """

    def __init__(self, reason: str, variables: Sequence[Any], remedy: str = ""):
        """Makes the error for combined inputs."""
        super().__init__(reason)
        self.reason, self.variables, self.remedy = reason, tuple(variables), remedy


class Slicer:
    """Labels all values of a flat traced update, and makes fragments from the labels.

    Attributes:
        group: Group of each variable, or MIXED, or NEUTRAL.
        scalar: Labelled variables with one element, or at most LARGE if made only from such:
            further groups may see them.
        late: Variables of one group that depend on values of further groups.
        varying: Neutral variables that depend on shared state or on the loss.
        junctions: Mixed variables made from a group's own scalars and another group's.
        private: Variables that look like junctions but stay with the one group that needs them.
        promoted: Scalars of one group that further groups need.
    """

    def __init__(self, traced: jx.Traced, inputs: Mapping[Any, int], outputs: Sequence[int]):
        """Labels all variables.

        Args:
            traced: The flat update.
            inputs: Group of each input, or NEUTRAL.
            outputs: Group of each output, or NEUTRAL.

        Raises:
            Conflict: Arrays of two groups meet.
        """
        self.jaxpr = traced.jaxpr
        # Constants are the first inputs; the arguments follow.
        self.consts = dict(zip(traced.jaxpr.invars, traced.consts, strict=False))
        self.producer = {v: i for i, e in enumerate(self.jaxpr.eqns) for v in e.outvars}
        self.inputs = frozenset(inputs)
        # A combination of one group's scalars with scalars of all groups may serve only that group,
        # or more. In the first case it is the group's own; the first labels can tell.
        self.private: set[Any] = set()
        self._label_all(inputs)
        self.private = self._find_private(outputs)
        if self.private:
            self._label_all(inputs)

    def _find_private(self, outputs: Sequence[int]) -> set:
        """Combinations of one group's scalars with scalars of all that only this group needs.

        Example: a factor `norm(p0) / global_norm` of group 0, computed in its *apply*.
        """
        several = {MIXED, NEUTRAL}
        uses: dict[Any, set[int]] = defaultdict(set)
        for atom, owner in zip(self.jaxpr.outvars, outputs, strict=True):
            if not jx.is_literal(atom):
                uses[atom].add(owner)
        private = set()
        # Backwards: a mixed value belongs to a group if all its users do.
        for eqn in reversed(self.jaxpr.eqns):
            home = {self.group[v] for v in eqn.outvars}
            ins = jx.variables(eqn.invars)
            if home == {MIXED}:
                home = set().union(*(uses[v] for v in eqn.outvars))
                groups = {self.group[v] for v in ins} - several
                if len(home) != 1 or groups and groups != home:
                    home = several
                elif groups and home.isdisjoint(several):
                    private.update(eqn.outvars)
            for v in ins:
                uses[v] |= home
        return private

    def _label_all(self, inputs: Mapping[Any, int]) -> None:
        self.group: dict[Any, int] = dict.fromkeys(self.consts, NEUTRAL)
        self.group.update(inputs)
        self.scalar = {v for v in inputs if jx.num_elements(v.aval) == 1}
        self.late: set[Any] = set()
        self.varying = {v for v, g in inputs.items() if g == NEUTRAL}
        self.junctions: set[Any] = set()
        self.promoted: set[Any] = set()
        for eqn in self.jaxpr.eqns:
            self._label(eqn)

    def _label(self, eqn) -> None:
        """Labels the results of an equation from the labels of its operands.

        Arrays decide: with one group's arrays the result is this group's. Scalars of one group stay
        its own, scalars of several are MIXED.
        """
        ins = jx.variables(eqn.invars)
        labelled = [v for v in ins if self.group[v] != NEUTRAL]
        large = {self.group[v] for v in labelled if v not in self.scalar} - {MIXED}
        groups = {self.group[v] for v in labelled} - {MIXED}
        mixed = any(self.group[v] == MIXED for v in labelled)
        from_scalars = all(v in self.scalar for v in labelled)
        if len(large) > 1:
            raise self._meet(eqn)
        if large:
            group = next(iter(large))
            # Another group's scalar, used unchanged, becomes a message as if it were mixed.
            self.promoted.update(v for v in labelled if self.group[v] not in (group, MIXED))
        # Only scalars. If all belong to one group, the result does, too. A combination with scalars
        # of further groups is mixed, unless only this group needs the result.
        elif len(groups) == 1 and (not mixed or eqn.outvars[0] in self.private):
            group = next(iter(groups))
        else:
            group = MIXED if labelled else NEUTRAL
        # Late values can't be in *reduce*: it runs before anything of further groups is known.
        late = group >= 0 and (mixed or len(groups) > 1 or any(v in self.late for v in labelled))
        junction = group == MIXED and bool(groups)
        for v in eqn.outvars:
            size = jx.num_elements(v.aval)
            self.group[v] = group
            if labelled and (size == 1 or from_scalars and size <= LARGE):
                self.scalar.add(v)
            if late:
                self.late.add(v)
            # A junction is sent as a message, and messages are small.
            if junction:
                self.junctions.add(v)
                if v not in self.scalar:
                    raise self._meet(eqn)
            if group == NEUTRAL and any(u in self.varying for u in ins):
                self.varying.add(v)

    def _meet(self, eqn) -> Conflict:
        """The error for an equation that combines arrays of several groups."""
        found = self._meeting(jx.variables(eqn.invars))
        # If layers were only stacked again, the operation on the stacked array is more informative.
        while _stacks(eqn):
            readers = [e for e in self.jaxpr.eqns if eqn.outvars[0] in jx.variables(e.invars)]
            if not readers:
                break
            eqn = readers[0]
        name = eqn.primitive.name
        remedy = _FLATTENED if name == "concatenate" else ""
        return Conflict(f"arrays of several groups meet in one operation ({name})", found, remedy)

    def _meeting(self, operands) -> list:
        """Inputs of different groups behind an equation's operands, up to three per operand."""
        found = []
        for v in operands:
            if self.group[v] != NEUTRAL:
                found += sorted(self.sources([v]), key=self.jaxpr.invars.index)[:3]
        return list(dict.fromkeys(found))

    def sources(self, variables: Iterable[Any]) -> set:
        """Inputs that some variables depend on, without the neutral ones."""
        _, read = jx.behind(self.jaxpr.eqns, self.producer, variables)
        return {v for v in read if v in self.inputs and self.group[v] != NEUTRAL}

    def is_message(self, v: Any) -> bool:
        """Whether a group's apply receives a variable as a message instead of computing it.

        Mixed and varying values beyond a few elements are recomputed in each group that needs them,
        from messages that are small.
        """
        # Shared state can only be sent: no group computes it.
        is_sent = v in self.inputs or jx.num_elements(v.aval) <= TINY
        may_be_sent = self.group[v] == MIXED or v in self.varying
        return v in self.promoted or v in self.junctions or may_be_sent and is_sent

    def is_reduced(self, v: Any) -> bool:
        """Whether combine takes a variable from its group's reduce instead of computing it.

        Raises:
            Conflict: It is an array, or made from arrays and from results of combine: reduce would
                have to run twice.
        """
        if self.group[v] < 0:
            return False
        if v not in self.scalar:
            raise Conflict("shared state depends on arrays of one group", self._meeting([v]))
        if v not in self.late:
            return True
        if self.is_entangled(v):
            raise Conflict(
                "scalars of all groups are needed to compute scalars of all groups again",
                sorted(self.sources([v]), key=self.jaxpr.invars.index),
                _TWICE,
            )
        return False

    def is_entangled(self, v: Any) -> bool:
        """Whether a late variable is computed from an array of its own group."""
        if v not in self.late:
            return False
        operands = jx.variables(self.jaxpr.eqns[self.producer[v]].invars)
        return any(self.group[u] >= 0 and u not in self.scalar for u in operands)

    def closure(
        self, outputs: Sequence[Any], stop: Callable[[Any], bool]
    ) -> tuple[list[Any], list[Any]]:
        """Collects the equations behind some outputs, back to variables where `stop` holds.

        Returns the equations and these variables. Their order depends only on the outputs, so that
        like groups get like fragments.
        """
        eqns, stopped, present = self.jaxpr.eqns, {}, set()

        def needed(atoms: Sequence[Any]) -> list[int]:
            rows = []
            for v in jx.variables(atoms):
                if v in self.consts:
                    continue
                if stop(v):
                    stopped.setdefault(v)
                elif v in self.producer and self.producer[v] not in present:
                    rows.append(self.producer[v])
            return rows

        order = jx.each_after_its_needs(needed(outputs), lambda i: needed(eqns[i].invars), present)
        return [eqns[i] for i in order], list(stopped)

    def all_behind(self, outputs: Sequence[Any], arguments: Sequence[Any]) -> Fragment:
        """The fragment that computes some outputs from the arguments."""
        return self.fragment(self.closure(outputs, lambda _: False)[0], arguments, outputs)

    def fragment(self, eqns: Sequence, arguments: Sequence, outputs: Sequence) -> Fragment:
        """Makes a fragment from equations; all arguments stay, even if nothing reads them."""
        atoms = [a for e in eqns for a in e.invars] + list(outputs)
        used = list(dict.fromkeys(v for v in jx.variables(atoms) if v in self.consts))
        values = tuple(self.consts[v] for v in used)
        jaxpr = jx.sub_jaxpr(self.jaxpr, eqns, [*used, *arguments], outputs)
        return Fragment(jaxpr=jaxpr, consts=values, key=structural_key(jaxpr, values))


def _stacks(eqn: Any) -> bool:
    """Whether an equation stacks slices along a new axis."""
    name, along = eqn.primitive.name, eqn.params.get("dimension")
    joins = name == "concatenate" and all(a.aval.shape[along] == 1 for a in eqn.invars)
    return len(eqn.invars) > 1 and (name == "stack" or joins)


def influences(
    jaxpr: Any, groups: Mapping[Any, int], tokens: Iterable[Any]
) -> tuple[dict[Any, frozenset], dict[Any, frozenset]]:
    """Finds the groups with arrays behind each variable, and the groups that each token meets.

    A token is a piece of state with an unknown owner. It meets a group if an equation combines
    both, or values made from them, not counting paths through a single number: in `0.9 * t + g0`
    the token t meets group 0.

    Args:
        jaxpr: The flat update.
        groups: Group of each gradient and parameter.
        tokens: Variables of the pieces of state.

    Returns:
        For each variable the groups with arrays behind it, if any, and for each token those met.
    """
    owners: dict[Any, frozenset] = {v: frozenset((g,)) for v, g in groups.items() if g >= 0}
    large = [v for v in tokens if jx.num_elements(v.aval) > 1]
    carried: dict[Any, frozenset] = {v: frozenset((v,)) for v in large}
    met: dict[Any, frozenset] = dict.fromkeys(tokens, frozenset())
    for eqn in jaxpr.eqns:
        ins = jx.variables(eqn.invars)
        belongs, brought = jx.union(owners, ins), jx.union(carried, ins)
        if belongs:
            for token in brought:
                met[token] |= belongs
            # The result belongs to these groups, and says nothing more about the token.
            brought = frozenset()
        # Through a single number, such as the global norm, everything would meet everything.
        for v in (v for v in eqn.outvars if jx.num_elements(v.aval) > 1):
            owners[v], carried[v] = belongs, brought
    return owners, met


def groups_behind(jaxpr: Any, groups: Mapping[Any, int]) -> list[frozenset[int]]:
    """Finds the groups with arrays behind each output of a jaxpr, from its inputs' groups."""
    behind = {v: frozenset((g,)) for v, g in groups.items()}
    for eqn in jaxpr.eqns:
        behind.update(dict.fromkeys(eqn.outvars, jx.union(behind, eqn.invars)))
    return [jx.union(behind, [v]) for v in jaxpr.outvars]


# Each condition doubles the number of cases, and all are computed.
_MOST_CONDITIONS = 2


def split_cases(slicer: Slicer) -> jx.Traced | None:
    """Rewrites an update so that entangled scalars are computed for each case and selected.

    Returns:
        The flat update, to be cut again; None if no scalar can be rewritten.
    """
    made = [v for eqn in slicer.jaxpr.eqns for v in eqn.outvars if v in slicer.scalar]
    found = {v: _plan(slicer, v) for v in made if slicer.is_entangled(v)}
    plans = {v: plan for v, plan in found.items() if plan is not None}
    return _rewritten(slicer, plans) if plans else None


def _plan(slicer: Slicer, v: Any) -> tuple[list[Any], list[int]] | None:
    """Finds the conditions that a scalar depends on, and the equations in between.

    Returns:
        The conditions and the equations' numbers, ascending; None if it depends on any further
        value from all groups, or on too many conditions.
    """
    conditions: dict[Any, None] = {}
    between: set[int] = set()
    todo = [v]
    while todo:
        u = todo.pop()
        # A value computed by its group alone is the same in each case.
        if u not in slicer.late and slicer.group[u] != MIXED:
            continue
        # The walk ends at a Boolean, because both its values will be substituted.
        if u.aval.dtype == np.bool_ and jx.num_elements(u.aval) == 1:
            conditions[u] = None
        # Any other value over all groups could take more than two values.
        elif u in slicer.junctions or u not in slicer.producer:
            return None
        elif slicer.producer[u] not in between:
            between.add(slicer.producer[u])
            todo += jx.variables(slicer.jaxpr.eqns[slicer.producer[u]].invars)
    known = 0 < len(conditions) <= _MOST_CONDITIONS
    return (list(conditions), sorted(between)) if known else None


def _rewritten(slicer: Slicer, plans: dict[Any, tuple[list[Any], list[int]]]) -> jx.Traced:
    """Traces the update again, with planned scalars selected from their cases."""
    jaxpr, num_consts = slicer.jaxpr, len(slicer.consts)

    def flat(*args):
        env = dict(zip(jaxpr.invars, [*slicer.consts.values(), *args], strict=True))
        for eqn in jaxpr.eqns:
            _bind(eqn, env)
            for v in eqn.outvars:
                # Bound first, because it may have further readers; without any, it is dead code.
                if v in plans:
                    env[v] = _selected(jaxpr, env, v, *plans[v])
        return [_read(a, env) for a in jaxpr.outvars]

    avals = [jx.shape_of(v.aval) for v in jaxpr.invars[num_consts:]]
    return jx.without_dead_code(jx.trace(flat, *avals))


def _selected(jaxpr, env, v, conditions, between):
    """The value of a scalar: its equations for each case, then a tree of selections."""
    cases = []
    for values in itertools.product((False, True), repeat=len(conditions)):
        local = ChainMap({}, env)
        local.update((c, np.full(c.aval.shape, x)) for c, x in zip(conditions, values, strict=True))
        for i in between:
            _bind(jaxpr.eqns[i], local)
        cases.append(local[v])
    # In `product` the last condition changes fastest, so it selects between neighbours first.
    for condition in reversed(conditions):
        which = jax.lax.reshape(env[condition], ())
        cases = [jax.lax.select_n(which, *cases[i : i + 2]) for i in range(0, len(cases), 2)]
    return cases[0]


def _bind(eqn, env) -> None:
    outs = jx.bind(eqn, [_read(a, env) for a in eqn.invars])
    env.update(zip(eqn.outvars, outs, strict=True))


def _read(atom, env):
    return atom.val if jx.is_literal(atom) else env[atom]


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
        state_def: Tree structure of the whole Optax state; an `AveragedState` with averages.
        state_shapes: Shape and dtype of its leaves.
        num_averages: Number of averages of parameters, which are the first of these leaves.
        state: For each group, the pieces of state it owns; its averages first, as its leaves.
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
    num_averages: int = 0
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
        paths = (tuple(simple((key,), simple=True) for key in keys) for keys, _ in rows)
        averaged = self.num_averages > 0
        return tuple(keys[1:] if averaged and keys[0] == "inner" else keys for keys in paths)


def cut_optimizer(
    optimizer: optax.GradientTransformation,
    params_tree: Callable[[Sequence[Any]], Any],
    shapes: Shapes,
    leaves: Sequence[Leaf],
    group_of: Sequence[int],
    num_groups: int,
    *,
    is_scaled: bool = False,
    ema_decay: Decay | None = None,
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
        ema_decay: Decay of averages of the parameters, or a schedule of it; None for none.

    Raises:
        ValueError: It needs more than gradients, parameters, its state and the loss.
        CoupledGroupsError: It couples parameters in a way that can't be cut.
    """

    def key() -> Hashable:
        tree = jax.tree.structure(params_tree(range(len(shapes))))
        sizes = tuple((x.shape, x.dtype) for x in shapes)
        return IdentityKey(optimizer), tree, sizes, is_scaled, ema_decay

    # Only the cut depends on the groups, so blocks in any number of parts share the traces.
    traced = remembered(
        "traced optimizer",
        key,
        lambda: trace_optimizer(
            optimizer, params_tree, shapes, is_scaled=is_scaled, ema_decay=ema_decay
        ),
    )
    leaf_map = LeafMap(traced, leaves, group_of, num_groups)
    places = tuple((leaf.parameter, leaf.index) for leaf in leaves)
    flat = remembered(
        "flat optimizer",
        lambda: (IdentityKey(traced), places),
        lambda: (flatten_update(leaf_map), flatten_init(leaf_map)),
    )
    return _cut(leaf_map, *flat)


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
        rows = jx.members(self.owner, leaf_map.num_groups)
        self.owned = [self._in_order(g, row) for g, row in enumerate(rows)]
        self.shared = [t for t, o in enumerate(self.owner) if o is None]
        owners = [NEUTRAL if owner is None else owner for owner in self.owner]
        labels = {**self._parameter_groups(), **dict.fromkeys(self.numbers, NEUTRAL)}
        labels.update(zip(self.tokens, owners, strict=True))
        self.initial = Slicer(self.init, self.initial_groups, owners)
        self.slicer = Slicer(self.update, labels, [*leaf_map.group_of, *owners])

    def _parameter_groups(self) -> dict[Any, int]:
        groups = self.leaf_map.group_of
        return dict(zip([*self.grads, *self.params], [*groups, *groups], strict=True))

    def _in_order(self, g: int, owned: Sequence[int]) -> list[int]:
        """A group's tokens, with averages first, in the order of its leaves, as masters are."""
        leaves, tokens = self.leaf_map.leaves, self.leaf_map.tokens
        order = self.leaf_map.groups[g]
        places = {(leaves[i].parameter, numbers(leaves[i].index)): i for i in order}

        def place(t: int) -> int:
            token = tokens[t]
            is_average = token.leaf < self.leaf_map.traced.num_averages
            return places[token.leaf, numbers(token.index)] if is_average else len(leaves)

        return sorted(owned, key=place)

    def _owners(self) -> list[int | None]:
        """Owner of each token: the only group with arrays that it meets; None if it is shared.

        For a single number, or a token that meets no group's arrays, its path in Optax's state
        decides. A token initialised from several groups' parameters is shared, whatever its path.

        Raises:
            ValueError: A token is shared and large.
        """
        behind, met = influences(self.update.jaxpr, self._parameter_groups(), self.tokens)
        starts = groups_behind(self.init.jaxpr, self.initial_groups)
        owners: list[int | None] = []
        for t, token in enumerate(self.leaf_map.tokens):
            size, likely = jx.num_elements(token), self.leaf_map.likely[t]
            groups = met[self.tokens[t]] | jx.union(behind, [self.new_tokens[t]])
            owner = likely if starts[t] <= {likely} and (size == 1 or not groups) else None
            if size > 1 and len(groups) == 1:
                (owner,) = groups
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
        sent = dict.fromkeys(v for _, messages in closures for v in messages)
        ids = {v: number for number, v in enumerate(sent)}
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
            num_averages=leaf_map.traced.num_averages,
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
        leaves, tokens = self.leaf_map.groups[g], [self.tokens[t] for t in self.owned[g]]
        return [*(self.grads[i] for i in leaves), *(self.params[i] for i in leaves), *tokens]

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
        rows = jx.members([slicer.group[v] for v in scalars], len(self.owned))
        return [[scalars[at] for at in row] for row in rows]

    def _reduce(self, g: int, scalars: list[Any]) -> Fragment:
        """The fragment that computes scalars of a group from its arrays and shared state."""
        shared = [*self.numbers, *(self.tokens[t] for t in self.shared)]
        return self.slicer.all_behind(scalars, [*self._arguments(g), *shared])

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
        return slicer.all_behind(outputs, self._initial_arguments(g))

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
        arguments = map(self._initial_arguments, range(len(rows)))
        parts = tuple(map(slicer.all_behind, rows, arguments))
        return parts, slicer.fragment(eqns, [v for row in rows for v in row], outputs)

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
    whole = []
    for row, shape in zip(rows, cut.state_shapes, strict=True):
        is_key = jnp.issubdtype(row[0][1].dtype, jax.dtypes.prng_key)
        whole.append(row[0][1] if is_key else joined(row, shape.shape))
    return jax.tree.unflatten(cut.state_def, whole)
