"""Opens nested calls and unrolls loops over layers, so that a traced function can be cut.

The jaxpr is evaluated equation by equation under a second trace. A stacked parameter (one array for
all layers) is represented by `SlicedValue`, its slices, and stays so through every operation that
does not mix them. A loop that takes it layer by layer is unrolled.

Example, with `w` a stack of `w0`, `w1`, `w2` of shape (4, 4)::

    scan(lambda x, layer: (tanh(x @ layer), None), x, w)    # one equation, w of shape (3, 4, 4)

    a = dot x w0;  b = tanh a                               # six equations, no array of w
    c = dot b w1;  d = tanh c
    e = dot d w2;  f = tanh e
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers import known
from megatrain_jax._src.engine.program.layers.loops import reads_by_counter
from megatrain_jax._src.engine.program.layers.sliced_loops import loop_by_slice
from megatrain_jax._src.engine.program.layers.sliced_values import (
    NOTHING,
    SlicedValue,
    Value,
    common_slicing,
    constant,
    first,
    join,
    rows,
    stack,
)
from megatrain_jax._src.engine.program.layers.slicewise import slicewise, uniform_row
from megatrain_jax._src.engine.program.primitives import CALLS, CUSTOM_RULES, REMAT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inliner:
    """Rewrites jaxprs by evaluating them on traced values.

    Attributes:
        primal: Whether the function is never differentiated, like an optimizer's update. Then
            conditionals become selections, and custom derivative rules are opened too.
    """

    primal: bool = False

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Value | SlicedValue]) -> list:
        """Evaluates an open jaxpr on values, under the caller's trace."""
        env: dict[Any, Value | SlicedValue] = {}
        env.update(zip(jaxpr.constvars, map(constant, consts), strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            ins = [constant(a.val) if jx.is_literal(a) else env[a] for a in eqn.invars]
            with eqn.ctx.manager:  # the mesh may differ between equations
                env.update(zip(eqn.outvars, self._eqn(eqn, ins), strict=True))
        return [constant(a.val) if jx.is_literal(a) else env[a] for a in jaxpr.outvars]

    def _eqn(self, eqn, ins) -> Sequence[Value | SlicedValue]:
        """The results of an equation: opened, unrolled, slice by slice, or on whole arrays."""
        name = eqn.primitive.name
        pieces = [v for v in ins if isinstance(v, SlicedValue)]
        # A remat over several blocks would be one equation that reads all of them, so it is opened.
        # A remat within a block stays as the user wrote it.
        if name not in REMAT or pieces or len(_join_known(ins)) > 1:
            rules = CUSTOM_RULES if self.primal else frozenset()
            if inner := jx.called(eqn, CALLS | REMAT | rules):
                return self._call(inner, ins)
        # In an unrolled loop, "every third layer" depends on a counter with a known value.
        if name == "cond" and ins[0].integers is not None:
            return self._call(jx.branch(eqn, ins[0].integers.value), ins[1:])
        if self.primal and name == "cond":
            return self._select(eqn, ins)
        if not pieces:
            return self._plain(eqn, ins)
        if name == "scan" and _is_over_layers(eqn, ins):
            return self._unrolled(eqn, ins)
        if self.primal and name in ("scan", "while"):
            out = loop_by_slice(eqn, ins, self._call)
            return self._plain(eqn, [stack(v) for v in ins]) if out is None else out
        # An equation that mixes slices gets the whole array, so it reads all their blocks.
        out = slicewise(eqn, ins)
        return self._plain(eqn, [stack(v) for v in ins]) if out is None else out

    def _plain(self, eqn, ins):
        """Binds an equation to values that are not stacked."""
        blocks = join(ins)
        integers = known.results(eqn, [v.integers for v in ins])
        if is_constant_scalar(eqn, ins):
            # NumPy scalars become literals of the equations that read them.
            if all(integers):
                return [Value(k.value[()], blocks, integers=k) for k in integers if k]
            return [Value(a, blocks) for a in folded(eqn, ins)]
        row = uniform_row(eqn, ins) if self.primal else None
        pairs = zip(jx.bind(eqn, [v.array for v in ins]), integers, strict=True)
        return [Value(a, blocks, row, k) for a, k in pairs]

    def _call(self, body: jx.Body, ins):
        return self.run(body.jaxpr, body.consts, ins)

    def _select(self, eqn, ins):
        """A conditional, computed as a selection between the results of all its branches.

        It is computed slice by slice, so each group's slices need only that group's operands.
        """
        index, *operands = ins
        branches = jx.branches(eqn)
        # An index out of bounds takes the nearest branch, as `cond` does.
        which = jax.lax.clamp(0, index.array, len(branches) - 1)
        results = [self._call(b, operands) for b in branches]
        out = []
        for cases, var in zip(zip(*results, strict=True), eqn.outvars, strict=True):
            slicing, cells = common_slicing(cases, var.aval.shape), []
            for p in range(slicing.count):
                row = [slicing.cell(case, p) for case in cases]
                cells.append(Value(_choose(which, row), join([index, *row])))
            out.append(slicing.whole(cells))
        return out

    def _unrolled(self, eqn, ins):
        """A scan, computed as its iterations; its stacked results are slices along axis 0."""
        num_consts, num_carry = jx.scan_parts(eqn)
        consts = ins[:num_consts]
        carry = ins[num_consts : num_consts + num_carry]
        xs = ins[num_consts + num_carry :]
        length, body = eqn.params["length"], jx.loop_body(eqn)
        order = range(length - 1, -1, -1) if eqn.params["reverse"] else range(length)
        # A grid's cell is one array, so sliced results of an iteration are joined first, and the
        # scan's results are then sliced by iteration.
        given: dict[int, list] = {}
        for i in order:
            out = self._call(body, [*consts, *carry, *(first(x, i) for x in xs)])
            carry, given[i] = out[:num_carry], [stack(y) for y in out[num_carry:]]
        ys = [rows(column) for column in zip(*(given[i] for i in range(length)), strict=True)]
        return [*carry, *ys]


def _is_over_layers(eqn, ins) -> bool:
    """Whether a scan takes some of its stacked operands layer by layer."""
    num_consts, num_carry = jx.scan_parts(eqn)
    stacked = [isinstance(v, SlicedValue) and not v.run for v in ins]
    xs = zip(ins[num_consts + num_carry :], stacked[num_consts + num_carry :], strict=True)
    if any(v.axes[0] == 0 for v, has_layers in xs if has_layers):
        return True
    integers = [isinstance(v, Value) and v.integers is not None for v in ins]
    return reads_by_counter(eqn, stacked, integers)


def is_constant_scalar(eqn, ins) -> bool:
    """Whether an equation computes scalars from scalars known at trace time."""
    outs = [v.aval for v in eqn.outvars]
    return (
        bool(ins)
        and not eqn.effects
        and (
            all(isinstance(v.array, (bool, int, float, np.generic, np.ndarray)) for v in ins)
            and all(np.ndim(v.array) == 0 for v in ins)
            and all(getattr(a, "shape", None) == () and isinstance(a.dtype, np.dtype) for a in outs)
        )
    )


def folded(eqn, ins) -> list:
    """The results of an equation on known scalars, computed now.

    The scalar then is a literal, however the model spells it, so blocks stay alike.
    """
    with jax.ensure_compile_time_eval():
        return [np.asarray(jax.device_get(a))[()] for a in jx.bind(eqn, [v.array for v in ins])]


def _choose(which, cases):
    """The case with this number, or the only case if all are identical."""
    arrays = [c.array for c in cases]
    if len(arrays) == 1 or all(a is arrays[0] for a in arrays):
        return arrays[0]
    return jax.lax.select_n(which if len(arrays) > 2 else which.astype(bool), *arrays)


def _join_known(values) -> frozenset:
    """The blocks of the operands that depend only on parameters."""
    return NOTHING.union(*(v.blocks for v in values if v.blocks is not None))
