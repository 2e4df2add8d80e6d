"""Builds stages: turns the equations of a loss into pure functions, as jaxprs.

Stages with equal equations get equal jaxprs (same order of leaves, inputs and outputs), so that
they share one compiled template. Values that pass between stages have ids.

Example: `x @ e`, two blocks `x + tanh(x @ w) / n` with n = 1 and 3, `sum(x @ h)`:

    prologue   data -> 1: batch, 3: 1.0, 5: 3.0
    embedding  e, inputs (1,) -> outputs (2,)
    layers.0   w0, inputs (2, 3) -> outputs (4,)    one template; its divisor is an input
    layers.1   w1, inputs (4, 5) -> outputs (6,)
    head       h, inputs (6,) -> outputs (0,)       0: the loss

Stages that compute the same with different numbers are compared, so that they share a template.

The template takes these numbers as inputs. An operand may differ if it is a literal, a constant of
up to 1,024 elements, or a value from outside. It may also be a literal inside a `remat`, which then
becomes an operand of it. Operands that decide which computation takes place stay in the template.

Example: the equations of `x + tanh(x @ w0) / 1` and `x + tanh(x @ w1) / 3` are (row: operands)

    0: dot x w   1: tanh 0   2: div 1 n   3: add x 2

Their skeletons are equal: `x` and `n` appear there as a dtype and a shape. The slots are `(x of
one, x of the second)` at row 0, column 0 and row 3, column 0, and `(1.0, 3.0)` at row 2,
column 1. Each slot becomes one input: `x` is one already, `n` is new, and the prologue makes it.
"""

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from jax.extend import core as jex

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.effects import has_side_effects
from megatrain_jax._src.engine.program.layers.blocks import Leaf
from megatrain_jax._src.engine.program.loss import partition
from megatrain_jax._src.engine.program.loss.gradients import refuse_read_callbacks
from megatrain_jax._src.engine.program.loss.stage_warnings import find_warnings
from megatrain_jax._src.engine.program.loss.stages import (
    Program,
    Stage,
    find_examples,
    find_state_use,
)
from megatrain_jax._src.engine.program.primitives import DECIDING, REMAT
from megatrain_jax._src.engine.program.structural_key import form, structural_key, value_key

Position = tuple[int, int]  # row of an equation in its body, column of an operand


class StageComparer:
    """Compares bodies, the lists of equations of stages, given the values of their constants."""

    def __init__(self, consts: Mapping[Any, Any]):
        """Takes the values of the constants that equations may read."""
        self.consts = consts

    def skeleton(self, eqns: Sequence[Any], is_input: Callable[[Any], bool]) -> Hashable:
        """A key of a body's computation that ignores the operands that may differ.

        Args:
            eqns: A body, in order.
            is_input: Whether a variable comes from outside the body.
        """
        numbers: dict[Any, int] = {}

        def ref(eqn, atom):
            # By dtype and shape only. A weak type is left out, because an input has none.
            if self._may_differ(eqn, atom) or not jx.is_literal(atom) and is_input(atom):
                return str(getattr(atom.aval, "dtype", "")), getattr(atom.aval, "shape", ())
            if jx.is_literal(atom):
                return value_key(atom.val)
            return numbers.setdefault(atom, len(numbers))

        rows = []
        for eqn in eqns:
            refs = tuple(ref(eqn, a) for a in eqn.invars)
            rows.append((form(eqn), refs, tuple(str(v.aval) for v in eqn.outvars)))
            for v in eqn.outvars:
                numbers.setdefault(v, len(numbers))
        return tuple(rows)

    def slots(
        self, rows: Sequence[tuple[Any, ...]], are_inputs: Sequence[Callable[[Any], bool]]
    ) -> list[tuple[tuple[Any, ...], list[Position]]]:
        """Finds the slots: operands from outside, and literals or constants that differ.

        Args:
            rows: The first equation of each body, the second of each, and so on.
            are_inputs: For each body, whether a variable comes from outside it.

        Returns:
            For each slot, its operand in each body and all its positions.
        """
        places: dict[tuple, list[Position]] = defaultdict(list)
        atoms_of: dict[tuple, tuple[Any, ...]] = {}
        for row, eqns in enumerate(rows):
            for column, atoms in enumerate(zip(*(e.invars for e in eqns), strict=True)):
                # Positions with the same operands in every body are one slot, so `x * x` takes one
                # input. If one body has two different operands there, all bodies take two inputs.
                key = tuple(map(self._key, atoms))
                pairs = zip(atoms, are_inputs, strict=True)
                inputs = any(not jx.is_literal(a) and is_input(a) for a, is_input in pairs)
                fixed = all(self._may_differ(eqns[0], a) for a in atoms)
                if inputs or fixed and len(set(key)) > 1:
                    places[key].append((row, column))
                    atoms_of[key] = atoms
        return [(atoms_of[key], positions) for key, positions in places.items()]

    def _may_differ(self, eqn, atom) -> bool:
        """Whether an operand is a literal or small constant that decides no computation."""
        if jx.is_literal(atom):
            return eqn.primitive.name not in DECIDING
        return atom in self.consts and jx.num_elements(atom.aval) <= partition.SMALL

    def _key(self, atom) -> Hashable:
        if jx.is_literal(atom):
            return value_key(atom.val)
        return value_key(self.consts[atom]) if atom in self.consts else id(atom)


def hoist_remat_literals(eqns: tuple[Any, ...]) -> tuple[Any, ...]:
    """Turns literals in which like remats differ into operands of the remats.

    Args:
        eqns: One equation of each body, all in the same row.

    Returns:
        The same equations, or remats with equal bodies; nested remats are treated likewise.
    """
    if eqns[0].primitive.name not in REMAT:
        return eqns
    bodies = [eqn.params["jaxpr"] for eqn in eqns]
    rows = [hoist_remat_literals(row) for row in zip(*(b.eqns for b in bodies), strict=True)]
    slots = StageComparer({}).slots(rows, [lambda v: False] * len(eqns))
    changed = []
    for m, (eqn, body) in enumerate(zip(eqns, bodies, strict=True)):
        inner = [row[m] for row in rows]
        literals = [atoms[m] for atoms, _ in slots]
        new = [jex.Var(a.aval) for a in literals]
        for var, (_, positions) in zip(new, slots, strict=True):
            substitute(inner, positions, var)
        body = body.replace(invars=[*body.invars, *new], eqns=inner)
        # These operands are literals of the stage, and `slots` compares them next, so they become
        # inputs of its template.
        params = {**eqn.params, "jaxpr": body}
        changed.append(eqn.replace(invars=[*eqn.invars, *literals], params=params))
    return tuple(changed)


def substitute(eqns: list[Any], positions: Sequence[Position], var: Any) -> None:
    """Replaces the operands at some positions by a variable, in place."""
    for row, column in positions:
        invars = list(eqns[row].invars)
        invars[column] = var
        eqns[row] = eqns[row].replace(invars=invars)


def cut(
    traced: jx.Traced,
    leaves: Sequence[Leaf],
    num_variables: int,
    *,
    is_loss: bool = True,
    name: str = "loss_fn",
    alike: bool = True,
) -> Program:
    """Cuts a flat traced loss `(leaves, variables, batch, rng) -> (loss, ...)` into stages.

    It has no dead code. A prediction, with arrays in place of the loss, has no backward. Without
    `alike`, stages that compute the same have different keys, which takes less time.

    Raises:
        ValueError: The loss depends on nothing trainable, or a stage reads a callback's result.
    """
    flow = partition.Dataflow(traced, leaves, name)
    loss, *arrays = traced.jaxpr.outvars[: len(traced.jaxpr.outvars) - num_variables]
    read = [loss] if is_loss else [loss, *arrays]
    if all(jx.is_literal(v) or flow.kind[v] in (partition.CONST, partition.DATA) for v in read):
        found = (
            f"the loss that {name} returns does"
            if is_loss
            else f"the arrays that {name} returns do"
        )
        raise ValueError(f"{found} not depend on any parameter")
    if is_loss and loss not in flow.trainable:
        raise ValueError(
            f"the loss that {name} returns does not depend on any parameter that is `trainable`"
        )
    refuse_read_callbacks(flow)
    if shared := partition.find_shared(flow):
        leaves = [
            partition.without_block(leaf) if i in shared else leaf for i, leaf in enumerate(leaves)
        ]
        flow = partition.Dataflow(traced, leaves, name)
    program = _Builder(flow, partition.find_stretches(flow), alike).program(num_variables, is_loss)
    return dataclasses.replace(program, shared=shared)


class _Builder:
    """Collects the equations, inputs and outputs of each stage of one program."""

    def __init__(self, flow: partition.Dataflow, stretches: list[partition.Stretch], alike: bool):
        self.flow, self.consts, self.alike = flow, flow.consts, alike
        self.stretches, self.stage_of = partition.without_empty(
            stretches, partition.assign(flow, stretches)
        )
        self.rows: list[list[int]] = [[] for _ in self.stretches]  # of each stage, ascending
        for i in sorted(self.stage_of):
            self.rows[self.stage_of[i]].append(i)
        self.ids: dict[Any, int] = {}  # variable → id of its value, in order of first request
        self.lifted: dict[Any, Any] = {}  # stand-in → the literal or constant that is its value
        self.fixed: dict[Hashable, Any] = {}  # key of a literal or constant → its stand-in
        self.aliases: dict[Any, Any] = {}  # stand-in → the variable that is its value
        # Like stages share their jaxpr and the values of its constants: by key.
        self.templates: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
        self.home = self._data_homes()

    def id(self, var) -> int:
        """Id of a variable's value; a stand-in has the id of the variable it stands for."""
        return self.ids.setdefault(self.aliases.get(var, var), len(self.ids))

    def _data_homes(self) -> dict[int, int | None]:
        """The one stage that computes each data-only equation, or None for the prologue."""
        flow, jaxpr = self.flow, self.flow.jaxpr
        uses: dict[Any, set] = defaultdict(set)
        for v in jx.variables(jaxpr.outvars):
            uses[v].add(None)
        # Backwards, so that an equation's users are placed before the equation itself.
        home: dict[int, int | None] = {}
        for i in reversed(range(len(jaxpr.eqns))):
            eqn, kind = jaxpr.eqns[i], flow.eqn_kind[i]
            if kind in (partition.MAIN, partition.EFFECT):
                stage = self.stage_of[i]
            elif kind == partition.DATA:
                stages = set().union(*(uses[v] for v in eqn.outvars))
                large = any(jx.num_elements(v.aval) > partition.SMALL for v in eqn.outvars)
                alone = large and len(stages) == 1 and not has_side_effects(eqn)
                stage = home[i] = next(iter(stages)) if alone else None
            else:
                continue
            for v in jx.variables(eqn.invars):
                uses[v].add(stage)
        return home

    def program(self, num_variables: int, is_loss: bool) -> Program:
        bodies = [self._body(s) for s in range(len(self.stretches))]
        if self.alike:
            self._unify_inputs(bodies)
        self._add_outputs(bodies)
        outputs = tuple(self.id(self._output_var(a)) for a in self.flow.jaxpr.outvars)
        stages = self._activate([b.stage() for b in bodies], outputs[: int(is_loss)])
        # Last: by now `ids` has all values that a stage or the caller needs, and the prologue makes
        # the ones that no stage makes.
        prologue, consts, ids = self._prologue()
        data = self.flow.data
        return Program(
            stages=tuple(stages),
            prologue=prologue,
            prologue_consts=consts,
            prologue_values=ids,
            values=tuple(jx.shape_of(v.aval) for v in self.ids),
            outputs=outputs,
            examples=find_examples(self.flow.jaxpr, data[num_variables:-1], self.ids.items()),
            state=find_state_use(self.flow.jaxpr, data, num_variables),
            warnings=find_warnings(self.flow, self.stretches, self.rows),
        )

    def _output_var(self, atom):
        """Variable of an output of the loss; a literal output is made in the prologue."""
        if not jx.is_literal(atom):
            return atom
        var = jex.Var(atom.aval)
        self.lifted[var] = atom
        return var

    def _body(self, s: int) -> "_Body":
        """Equations of stage `s`; the last one also has outputs made from parameters alone."""
        body = _Body(self, s)
        body.pull(self.rows[s])
        if s == len(self.stretches) - 1:
            body.pull(self._producers(jx.variables(self.flow.jaxpr.outvars), partition.PARAM))
        return body

    def _producers(self, variables: Sequence[Any], kind: int) -> list[int]:
        """The equations that make these variables, if they are of a kind."""
        producer = self.flow.producer
        return [producer[v] for v in variables if v in producer and self.flow.kind[v] == kind]

    def is_input(self, var, s: int | None) -> bool:
        """Whether stage `s` takes a variable as an input; the prologue (None): only stand-ins."""
        if var in self.lifted or var in self.aliases:
            return True
        if s is None:
            return False
        kind = self.flow.kind[var]
        if kind == partition.MAIN:
            return self.stage_of[self.flow.producer[var]] != s
        if kind == partition.DATA:
            return var not in self.flow.producer or self.home[self.flow.producer[var]] != s
        return False

    def _unify_inputs(self, bodies: Sequence["_Body"]) -> None:
        """Gives like stages the same inputs if only the sources of their operands differ.

        The first block may take a literal where later blocks take a running sum, or one value twice
        where later blocks take two; each may have its own literal.
        """
        alike = StageComparer(self.consts)
        takes = {body: functools.partial(self.is_input, s=body.index) for body in bodies}
        classes: dict[Hashable, list[_Body]] = defaultdict(list)
        for body in bodies:
            classes[alike.skeleton(body.eqns, takes[body])].append(body)
        for members in classes.values():
            if len(members) == 1:
                continue
            columns = zip(*(body.eqns for body in members), strict=True)
            rows = list(map(hoist_remat_literals, columns))
            slots = alike.slots(rows, [takes[b] for b in members])
            for m, body in enumerate(members):
                body.eqns = [row[m] for row in rows]
                # Operands that are one slot here may be two in another body: a second slot with the
                # same value gets a separate input, so that all bodies have equally many.
                taken: set[Any] = set()
                for atoms, positions in slots:
                    atom = atoms[m]
                    if self._is_fixed(atom) or atom in taken:
                        substitute(body.eqns, positions, self._substitute_for(atom))
                    else:
                        taken.add(atom)

    def _substitute_for(self, atom: Any) -> Any:
        """A new stand-in for an operand: a separate input of the stage, even if values agree."""
        var = jex.Var(jx.strong(atom.aval))
        self.aliases[var] = self._lifted_for(atom) if self._is_fixed(atom) else atom
        return var

    def _is_fixed(self, atom: Any) -> bool:
        return jx.is_literal(atom) or atom in self.consts

    def _lifted_for(self, atom: Any) -> Any:
        """The stand-in for a literal or a constant; equal ones share it."""
        key = value_key(atom.val if jx.is_literal(atom) else self.consts[atom])
        if key not in self.fixed:
            self.fixed[key] = var = jex.Var(jx.strong(atom.aval))
            self.lifted[var] = atom
        return self.fixed[key]

    def _add_outputs(self, bodies: Sequence["_Body"]) -> None:
        """Gives like stages the same outputs: if one has to pass on a value, all do."""
        wanted = {self.aliases.get(v, v) for body in bodies for v in body.operands()[2]}
        wanted.update(jx.variables(self.flow.jaxpr.outvars))

        def is_output(v: Any) -> bool:
            return v in wanted and self.flow.kind[v] in (partition.MAIN, partition.PARAM)

        classes: dict[Hashable, list[_Body]] = defaultdict(list)
        for body in bodies:
            classes[body.key() if self.alike else body].append(body)
        for members in classes.values():
            # Like bodies make the same values in the same order.
            made = [[v for eqn in body.eqns for v in eqn.outvars] for body in members]
            used = [any(map(is_output, row)) for row in zip(*made, strict=True)]
            for body, own in zip(members, made, strict=True):
                body.outputs = list(itertools.compress(own, used))

    def _activate(self, stages: list[Stage], losses: Sequence[int]) -> list[Stage]:
        """Follows the loss's cotangent backwards through the stages to floats that need one."""
        var_of = {n: v for v, n in self.ids.items()}
        # Stages pass values only forwards, so one pass from last to first is enough.
        with_cotangent = set(losses)
        done = []
        for stage in reversed(stages):
            outputs = [(o, var_of[o].aval) for o in stage.outputs]
            arriving = tuple(o in with_cotangent and jx.is_float(aval) for o, aval in outputs)
            inputs = [var_of[i] for i in stage.inputs]
            differentiable = [jx.is_float(v.aval) and v in self.flow.trainable for v in inputs]
            active = tuple(any(arriving) and yes for yes in differentiable)
            with_cotangent.update(i for i, a in zip(stage.inputs, active, strict=True) if a)
            done.append(dataclasses.replace(stage, active=active, has_cotangent=arriving))
        return done[::-1]

    def _prologue(self):
        """The prologue's jaxpr, constants and output ids: data-only values and stand-ins."""
        kind = self.flow.kind
        wanted = [
            v for v in self.ids if v in self.lifted or kind[v] in (partition.DATA, partition.CONST)
        ]
        body = _Body(self, None)
        body.pull([i for i, home in sorted(self.home.items()) if home is None])
        body.pull(self._producers(wanted, partition.CONST))
        outvars = [self.lifted.get(v, v) for v in wanted]
        read = [v for v in jx.variables(outvars) if v in self.consts]
        consts = list(dict.fromkeys([*body.operands()[0], *read]))
        jaxpr = jx.sub_jaxpr(self.flow.jaxpr, body.eqns, [*consts, *self.flow.data], outvars)
        return jaxpr, tuple(self.consts[v] for v in consts), tuple(self.ids[v] for v in wanted)


class _Body:
    """The equations of one stage while it is being built."""

    def __init__(self, builder: _Builder, index: int | None):
        self.builder, self.index = builder, index
        self.eqns: list[Any] = []
        self.outputs: list[Any] = []
        self.present: set[int] = set()

    def pull(self, wanted: Sequence[int]) -> None:
        """Adds equations by number, each after those it needs, unless these are inputs."""
        eqns, producer = self.builder.flow.jaxpr.eqns, self.builder.flow.producer

        def needs(i: int) -> list[int]:
            made = [v for v in jx.variables(eqns[i].invars) if v in producer]
            return [producer[v] for v in made if not self.builder.is_input(v, self.index)]

        self.eqns += [eqns[j] for j in jx.each_after_its_needs(wanted, needs, self.present)]

    def operands(self) -> tuple[list, list, list]:
        """Constants, leaves and inputs, each in the order of their first use."""
        flow = self.builder.flow
        inner: set[Any] = set()
        consts: dict[Any, None] = {}
        leaves: dict[Any, None] = {}
        inputs: dict[Any, None] = {}
        for eqn in self.eqns:
            for v in jx.variables(eqn.invars):
                if v in inner:
                    continue
                if self.builder.is_input(v, self.index):
                    inputs.setdefault(v)
                elif v in self.builder.consts:
                    consts.setdefault(v)
                elif flow.kind[v] == partition.PARAM:
                    leaves.setdefault(v)
            inner.update(eqn.outvars)
        return list(consts), list(leaves), list(inputs)

    def jaxpr(self, outvars: Sequence) -> Any:
        consts, leaves, inputs = self.operands()
        return jx.sub_jaxpr(
            self.builder.flow.jaxpr, self.eqns, [*consts, *leaves, *inputs], outvars
        )

    def key(self) -> Hashable:
        consts = self.operands()[0]
        return structural_key(self.jaxpr(()), [self.builder.consts[v] for v in consts])

    def stage(self) -> Stage:
        builder = self.builder
        assert self.index is not None
        stretch = builder.stretches[self.index]
        consts, leaves, inputs = self.operands()
        number = {v: i for i, v in enumerate(builder.flow.parameters)}
        values = tuple(builder.consts[v] for v in consts)
        jaxpr = self.jaxpr(self.outputs)
        # Whether the loss may be differentiated by each operand.
        stood_for = [builder.aliases.get(v, v) for v in (*leaves, *inputs)]
        perturbed = [v in builder.flow.trainable and jx.is_float(v.aval) for v in stood_for]
        key = structural_key(jaxpr, values, perturbed) if builder.alike else self
        jaxpr, values = builder.templates.setdefault(key, (jaxpr, values))
        return Stage(
            name=stretch.name,
            jaxpr=jaxpr,
            consts=values,
            key=key,
            leaves=tuple(number[v] for v in leaves),
            is_trainable=tuple(builder.flow.leaves[number[v]].is_trainable for v in leaves),
            inputs=tuple(builder.id(v) for v in inputs),
            outputs=tuple(builder.id(v) for v in self.outputs),
            is_block=bool(stretch.keys),
        )
