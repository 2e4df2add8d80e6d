"""Builds the stages of a cut program: pure functions of parameters and live values, as jaxprs.

Stages with equal equations get equal jaxprs (same order of leaves, inputs and outputs), so that
they share one compiled template.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax.extend import core as jex

from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.blocks import Leaf
from megatrain_jax._src.program.effects import answers, fires
from megatrain_jax._src.program.loss.alike import Alike, substitute, with_literals_outside
from megatrain_jax._src.program.loss.assign import assign
from megatrain_jax._src.program.loss.partition import (
    CONST,
    DATA,
    EFFECT,
    MAIN,
    PARAM,
    SMALL,
    Dataflow,
    Run,
    find_runs,
)
from megatrain_jax._src.program.loss.state import StateUse, find_state_use
from megatrain_jax._src.program.loss.warnings import find_warnings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage: `jaxpr(*consts, *leaves, *inputs) -> outputs`.

    Attributes:
        name: Where in the model it comes from.
        jaxpr: Its equations; its inputs are constants, then leaves, then values.
        consts: Values of the constants.
        key: Equal for stages that compute the same.
        leaves: Leaves it reads, in the jaxpr's order.
        inputs: Ids of the values it takes.
        outputs: Ids of the values it gives.
        is_trainable: For each leaf, whether it gets a gradient.
        active: For each input, whether a cotangent flows back through it.
        has_cotangent: For each output, whether a cotangent arrives at it.
        is_block: Whether it belongs to one of the model's blocks.
    """

    name: str
    jaxpr: Any
    consts: tuple[Any, ...]
    key: Hashable
    leaves: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    is_trainable: tuple[bool, ...] = ()
    active: tuple[bool, ...] = ()
    has_cotangent: tuple[bool, ...] = ()
    is_block: bool = False

    @property
    def has_backward(self) -> bool:
        """Whether the loss depends on it, and on something trainable in it or before it."""
        return any(self.has_cotangent)

    @property
    def trainable_share(self) -> float:
        """Which part of its parameters gets gradients; 1 if it has none."""
        first = len(self.consts)
        leaves = self.jaxpr.invars[first : first + len(self.leaves)]
        sizes = [jx.num_elements(v.aval) for v in leaves]
        trainable = sum(n for n, yes in zip(sizes, self.is_trainable, strict=True) if yes)
        return trainable / sum(sizes) if sizes else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A loss cut into stages.

    Attributes:
        stages: The stages in forward order.
        prologue: `jaxpr(*consts, *data) -> values` that run once, before the stages.
        prologue_consts: Values of the prologue's constants.
        prologue_values: Ids of the prologue's outputs.
        values: Shape and dtype of each value by id.
        outputs: Ids of the traced function's outputs; the first is the loss.
        state: What the model's variables depend on.
        warnings: What could not be cut, in words.
    """

    stages: tuple[Stage, ...]
    prologue: Any
    prologue_consts: tuple[Any, ...]
    prologue_values: tuple[int, ...]
    values: tuple[jax.ShapeDtypeStruct, ...]
    outputs: tuple[int, ...]
    state: StateUse
    warnings: tuple[str, ...]

    def warning(self, text: str) -> "Program":
        """The same program with one more warning."""
        return dataclasses.replace(self, warnings=(*self.warnings, text))


def cut(traced: jx.Traced, leaves: Sequence[Leaf], num_variables: int) -> Program:
    """Cuts a flat traced loss `(leaves, variables, batch, rng) -> (loss, ...)` into stages."""
    traced = jx.without_dead_code(traced)
    flow = Dataflow(traced, leaves)
    loss = traced.jaxpr.outvars[0]
    if jx.is_literal(loss) or flow.kind[loss] in (CONST, DATA):
        raise ValueError("the loss that loss_fn returns does not depend on any parameter")
    if loss not in flow.trainable:
        raise ValueError(
            "the loss that loss_fn returns does not depend on any parameter that is `trainable`"
        )
    _refuse_answers(flow)
    return _Builder(flow, find_runs(flow)).program(num_variables)


def _refuse_answers(flow: Dataflow) -> None:
    """Refuses results of effects that a backward would have to compute again."""
    for eqn, kind in zip(flow.jaxpr.eqns, flow.eqn_kind, strict=True):
        direct = not jx.inner_jaxprs(eqn)
        if kind == MAIN and fires(eqn) and (direct or answers(eqn)):
            raise ValueError(
                "loss_fn reads the result of a callback with side effects (io_callback) on what "
                "depends on parameters: backward, which computes stages again, would call it "
                "again. Use jax.pure_callback if calling it twice does no harm, or call it on "
                "values of the batch alone"
            )


class _Builder:
    """Collects the equations, inputs and outputs of every stage of one program."""

    def __init__(self, flow: Dataflow, runs: list[Run]):
        self.flow, self.consts, self.runs = flow, flow.consts, runs
        self.stage_of = assign(flow, runs)
        self.rows: list[list[int]] = [[] for _ in runs]  # the equations of each stage, ascending
        for i in sorted(self.stage_of):
            self.rows[self.stage_of[i]].append(i)
        self.ids: dict[Any, int] = {}
        self.lifted: dict[Any, Any] = {}  # stand-in → the literal or constant it has as its value
        self.fixed: dict[Hashable, Any] = {}  # what a literal or constant is → its stand-in
        self.aliases: dict[Any, Any] = {}  # stand-in → the variable it has as its value
        self.home = self._data_homes()

    def id(self, var) -> int:
        return self.ids.setdefault(self.aliases.get(var, var), len(self.ids))

    def _data_homes(self) -> dict[int, int | None]:
        """For each data-only equation the one stage that computes it, or None for the prologue."""
        flow, jaxpr = self.flow, self.flow.jaxpr
        uses: dict[Any, set] = defaultdict(set)
        for v in jx.variables(jaxpr.outvars):
            uses[v].add(None)
        home: dict[int, int | None] = {}
        for i in range(len(jaxpr.eqns) - 1, -1, -1):
            eqn, kind = jaxpr.eqns[i], flow.eqn_kind[i]
            if kind in (MAIN, EFFECT):
                stage = self.stage_of[i]
            elif kind == DATA:
                stages = set().union(*(uses[v] for v in eqn.outvars))
                large = any(jx.num_elements(v.aval) > SMALL for v in eqn.outvars)
                alone = large and len(stages) == 1 and not fires(eqn)
                stage = home[i] = next(iter(stages)) if alone else None
            else:
                continue
            for v in jx.variables(eqn.invars):
                uses[v].add(stage)
        return home

    def program(self, num_variables: int) -> Program:
        bodies = [self._body(s) for s in range(len(self.runs))]
        self._unify_inputs(bodies)
        self._add_outputs(bodies)
        outputs = tuple(self.id(self._output_var(a)) for a in self.flow.jaxpr.outvars)
        stages = self._activate([b.stage() for b in bodies], outputs)
        prologue, consts, ids = self._prologue()
        return Program(
            stages=tuple(stages),
            prologue=prologue,
            prologue_consts=consts,
            prologue_values=ids,
            values=tuple(jx.shape_of(v.aval) for v in self.ids),
            outputs=outputs,
            state=find_state_use(self.flow.jaxpr, self.flow.data, num_variables),
            warnings=find_warnings(self.flow, self.runs, self.rows),
        )

    def _output_var(self, atom):
        if not jx.is_literal(atom):
            return atom
        var = jex.Var(atom.aval)
        self.lifted[var] = atom
        return var

    def _body(self, s: int) -> "_Body":
        body = _Body(self, s)
        for i in self.rows[s]:
            body.pull(i)
        if s == len(self.runs) - 1:
            for v in jx.variables(self.flow.jaxpr.outvars):
                if self.flow.kind[v] == PARAM and v in self.flow.producer:
                    body.pull(self.flow.producer[v])
        return body

    def is_input(self, var, s: int | None) -> bool:
        """Whether stage `s` takes a variable from outside (as opposed to computing it)."""
        if var in self.lifted or var in self.aliases:
            return True
        if s is None:
            return False
        kind = self.flow.kind[var]
        if kind == MAIN:
            return self.stage_of[self.flow.producer[var]] != s
        if kind == DATA:
            return var not in self.flow.producer or self.home[self.flow.producer[var]] != s
        return False

    def _unify_inputs(self, bodies: Sequence["_Body"]) -> None:
        """Gives like stages the same inputs where only the sources of their operands differ.

        The first block may take a literal where the others take a running sum, or one value twice
        where the others take two; each may have a literal of its own.
        """
        alike = Alike(self.consts)
        takes = {body: functools.partial(self.is_input, s=body.index) for body in bodies}
        classes: dict[Hashable, list[_Body]] = defaultdict(list)
        for body in bodies:
            classes[alike.skeleton(body.eqns, takes[body])].append(body)
        for members in classes.values():
            if len(members) == 1:
                continue
            rows = [
                with_literals_outside(row) for row in zip(*(b.eqns for b in members), strict=True)
            ]
            slots = alike.slots(rows, [takes[b] for b in members])
            for m, body in enumerate(members):
                body.eqns = [row[m] for row in rows]
                taken: set[Any] = set()
                for atoms, positions in slots:
                    atom = atoms[m]
                    if self._is_fixed(atom) or atom in taken:
                        substitute(body.eqns, positions, self._substitute_for(atom))
                    else:
                        taken.add(atom)

    def _substitute_for(self, atom: Any) -> Any:
        var = jex.Var(jx.strong(atom.aval))
        self.aliases[var] = self._lifted_for(atom) if self._is_fixed(atom) else atom
        return var

    def _is_fixed(self, atom: Any) -> bool:
        return jx.is_literal(atom) or atom in self.consts

    def _lifted_for(self, atom: Any) -> Any:
        """The value of a literal or a constant, one for all that are equal."""
        key = jx.value_key(atom.val if jx.is_literal(atom) else self.consts[atom])
        if key not in self.fixed:
            self.fixed[key] = var = jex.Var(jx.strong(atom.aval))
            self.lifted[var] = atom
        return self.fixed[key]

    def _add_outputs(self, bodies: Sequence["_Body"]) -> None:
        wanted = {self.aliases.get(v, v) for body in bodies for v in body.operands()[2]}
        wanted.update(jx.variables(self.flow.jaxpr.outvars))
        classes: dict[Hashable, list[_Body]] = defaultdict(list)
        for body in bodies:
            classes[body.key()].append(body)
        for members in classes.values():
            numbers = [b.numbers() for b in members]
            used = set()
            for body, number in zip(members, numbers, strict=True):
                own = [v for e in body.eqns for v in e.outvars if v in wanted]
                used.update(number[v] for v in own if self.flow.kind[v] in (MAIN, PARAM))
            for body, number in zip(members, numbers, strict=True):
                by_number = {n: v for v, n in number.items()}
                body.outputs = [by_number[n] for n in sorted(used)]

    def _activate(self, stages: list[Stage], outputs: Sequence[int]) -> list[Stage]:
        var_of = {n: v for v, n in self.ids.items()}
        with_cotangent = {outputs[0]}
        done = []
        for stage in reversed(stages):
            arriving = tuple(
                o in with_cotangent and jx.is_float(var_of[o].aval) for o in stage.outputs
            )
            active = tuple(
                any(arriving) and jx.is_float(var_of[i].aval) and var_of[i] in self.flow.trainable
                for i in stage.inputs
            )
            with_cotangent.update(i for i, a in zip(stage.inputs, active, strict=True) if a)
            done.append(dataclasses.replace(stage, active=active, has_cotangent=arriving))
        return done[::-1]

    def _prologue(self):
        wanted = [
            v for v in self.ids
            if v in self.lifted or self.flow.kind[v] in (DATA, CONST)
        ]  # fmt: skip
        body = _Body(self, None)
        for i, kind in enumerate(self.flow.eqn_kind):
            if kind == DATA and self.home[i] is None:
                body.pull(i)
        for v in wanted:
            if v not in self.lifted and self.flow.kind[v] == CONST:
                if v in self.flow.producer:
                    body.pull(self.flow.producer[v])
        outvars = [self.lifted.get(v, v) for v in wanted]
        consts = list(
            dict.fromkeys(
                [*body.operands()[0], *(v for v in jx.variables(outvars) if v in self.consts)]
            )
        )
        jaxpr = jx.sub_jaxpr(self.flow.jaxpr, body.eqns, [*consts, *self.flow.data], outvars)
        return jaxpr, tuple(self.consts[v] for v in consts), tuple(self.ids[v] for v in wanted)


class _Body:
    """The equations of one stage while it is being built."""

    def __init__(self, builder: _Builder, index: int | None):
        self.builder, self.index = builder, index
        self.eqns: list[Any] = []
        self.outputs: list[Any] = []
        self.present: set[int] = set()

    def pull(self, i: int) -> None:
        """Adds equation `i` after the equations it needs that every stage repeats for itself."""
        flow = self.builder.flow
        stack = [(i, False)]
        while stack:
            i, ready = stack.pop()
            if i in self.present:
                continue
            if ready:
                self.present.add(i)
                self.eqns.append(flow.jaxpr.eqns[i])
                continue
            stack.append((i, True))
            needed = [
                flow.producer[v] for v in jx.variables(flow.jaxpr.eqns[i].invars)
                if v in flow.producer and not self.builder.is_input(v, self.index)
            ]  # fmt: skip
            stack += [(j, False) for j in reversed(needed)]

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
                elif flow.kind[v] == PARAM:
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
        return jx.structural_key(self.jaxpr(()), [self.builder.consts[v] for v in consts])

    def numbers(self) -> dict[Any, int]:
        return jx.variable_numbers(self.jaxpr(()))

    def stage(self) -> Stage:
        builder = self.builder
        assert self.index is not None
        run = builder.runs[self.index]
        consts, leaves, inputs = self.operands()
        number = {v: i for i, v in enumerate(builder.flow.parameters)}
        values = tuple(builder.consts[v] for v in consts)
        jaxpr = self.jaxpr(self.outputs)
        return Stage(
            name=run.name,
            jaxpr=jaxpr,
            consts=values,
            key=jx.structural_key(jaxpr, values),
            leaves=tuple(number[v] for v in leaves),
            is_trainable=tuple(builder.flow.leaves[number[v]].is_trainable for v in leaves),
            inputs=tuple(builder.id(v) for v in inputs),
            outputs=tuple(builder.id(v) for v in self.outputs),
            is_block=bool(run.keys),
        )
