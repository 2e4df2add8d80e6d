"""Slices a traced update into the computations of single groups and of all groups together.

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
import itertools
from collections import ChainMap
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.structural_key import structural_key

MIXED, NEUTRAL = -1, -2  # of several groups; of none (shared state, the loss, constants)
LARGE = 65536  # elements: values up to this size may be shared by all groups
TINY = 16  # elements: values up to this size are sent to a group, not computed in it


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
        uses: dict[Any, set[int]] = {}
        for atom, owner in zip(self.jaxpr.outvars, outputs, strict=True):
            for v in jx.variables([atom]):
                uses.setdefault(v, set()).add(owner)
        private = set()
        # Backwards: a mixed value belongs to a group if all its users do.
        for eqn in reversed(self.jaxpr.eqns):
            home = {self.group[v] for v in eqn.outvars}
            ins = jx.variables(eqn.invars)
            if home == {MIXED}:
                home = set().union(*(uses.get(v, set()) for v in eqn.outvars))
                groups = {self.group[v] for v in ins} - several
                if len(home) != 1 or groups and groups != home:
                    home = several
                elif groups and home.isdisjoint(several):
                    private.update(eqn.outvars)
            for v in ins:
                uses.setdefault(v, set()).update(home)
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
        if v in self.promoted or v in self.junctions:
            return True
        if self.group[v] == MIXED or v in self.varying:
            # Shared state can only be sent: no group computes it.
            return v in self.inputs or jx.num_elements(v.aval) <= TINY
        return False

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

    def fragment(self, eqns: Sequence, arguments: Sequence, outputs: Sequence) -> Fragment:
        """Makes a fragment from equations; all arguments stay, even if nothing reads them."""
        atoms = [a for e in eqns for a in e.invars] + list(outputs)
        used = list(dict.fromkeys(v for v in jx.variables(atoms) if v in self.consts))
        values = tuple(self.consts[v] for v in used)
        jaxpr = jx.sub_jaxpr(self.jaxpr, eqns, [*used, *arguments], outputs)
        return Fragment(jaxpr=jaxpr, consts=values, key=structural_key(jaxpr, values))


def _stacks(eqn: Any) -> bool:
    """Whether an equation stacks slices along a new axis."""
    if eqn.primitive.name == "stack":
        return len(eqn.invars) > 1
    along = eqn.params.get("dimension")
    if eqn.primitive.name != "concatenate" or len(eqn.invars) == 1:
        return False
    return all(a.aval.shape[along] == 1 for a in eqn.invars)


def influences(
    jaxpr: Any, groups: Mapping[Any, int], tokens: Iterable[Any]
) -> dict[Any, tuple[frozenset, frozenset]]:
    """Finds the groups with arrays behind each variable, and the groups that each token meets.

    A token is a piece of state with an unknown owner. It meets a group if an equation combines
    both, or values made from them, not counting paths through a single number: in `0.9 * t + g0`
    the token t meets group 0.

    Args:
        jaxpr: The flat update.
        groups: Group of each gradient and parameter.
        tokens: Variables of the pieces of state.

    Returns:
        For each variable the groups with arrays behind it, and, for tokens, the groups met.
    """
    owners: dict[Any, frozenset] = {v: frozenset((g,)) for v, g in groups.items() if g >= 0}
    carried: dict[Any, frozenset] = {
        v: frozenset((v,)) for v in tokens if jx.num_elements(v.aval) > 1
    }
    met: dict[Any, frozenset] = dict.fromkeys(tokens, frozenset())
    nothing = frozenset()
    for eqn in jaxpr.eqns:
        ins = jx.variables(eqn.invars)
        belongs, brought = jx.union(owners, ins), jx.union(carried, ins)
        if belongs:
            for token in brought:
                met[token] |= belongs
            # The result belongs to these groups, and says nothing more about the token.
            brought = nothing
        for v in eqn.outvars:
            # Through a single number, such as the global norm, everything would meet everything.
            if jx.num_elements(v.aval) > 1:
                if belongs:
                    owners[v] = belongs
                if brought:
                    carried[v] = brought
    return {v: (owners.get(v, nothing), met.get(v, nothing)) for v in {*owners, *met}}


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
    plans = {}
    for eqn in slicer.jaxpr.eqns:
        for v in eqn.outvars:
            if v in slicer.scalar and slicer.is_entangled(v):
                if (plan := _plan(slicer, v)) is not None:
                    plans[v] = plan
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
