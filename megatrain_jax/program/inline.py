"""Rewrites a traced function so that it can be cut: opens nested calls, unrolls scans over layers.

The rewriting evaluates the jaxpr equation by equation under a second trace. A stacked parameter
(one array for all layers, read by a `scan`) is represented as `Pieces`, its slices along axis 0,
and stays so through elementwise operations, reductions and reshapes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from megatrain_jax.program import jaxpr as jx

ELEMENTWISE = frozenset(
    """abs add add_any and atan2 cbrt ceil clamp convert_element_type copy copy_p cos cosh div eq
    erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le log log1p logistic lt
    max min mul ne neg nextafter not or pow real reduce_precision rem round rsqrt select_n sign sin
    sinh sqrt square stop_gradient sub tan tanh xor""".split()
)
FOLDS = {
    "reduce_sum": jax.lax.add,
    "reduce_max": jax.lax.max,
    "reduce_min": jax.lax.min,
    "reduce_prod": jax.lax.mul,
    "reduce_and": jax.lax.bitwise_and,
    "reduce_or": jax.lax.bitwise_or,
}
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
NOTHING: frozenset = frozenset()


@dataclasses.dataclass(frozen=True)
class Value:
    """A traced value and the blocks whose parameters alone it depends on (None: on data as well).

    `row` computes its slice along axis 0, if all slices are alike and it is known how.
    """

    array: Any
    blocks: frozenset | None = NOTHING
    row: Callable[[], Any] | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A stacked value as its slices along axis 0."""

    parts: tuple[Value, ...]

    @property
    def blocks(self) -> frozenset | None:
        """The blocks of all slices together."""
        return _join(self.parts)


def _join(values: Sequence["Value | Pieces"]) -> frozenset | None:
    known = [v.blocks for v in values if v.blocks is not None]
    return NOTHING.union(*known) if len(known) == len(values) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inliner:
    """How to rewrite: `primal` is for functions that are never differentiated (an optimizer).

    There, conditionals become selections and custom derivative rules are opened, too.
    """

    primal: bool = False

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Value | Pieces]) -> list:
        """Evaluates an open jaxpr on values, under the caller's trace."""
        env: dict[Any, Value | Pieces] = {}
        env.update(zip(jaxpr.constvars, map(Value, consts), strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            ins = [Value(a.val) if jx.is_literal(a) else env[a] for a in eqn.invars]
            with eqn.ctx.manager:  # what a mesh is differs from call to call
                env.update(zip(eqn.outvars, self._eqn(eqn, ins), strict=True))
        return [Value(a.val) if jx.is_literal(a) else env[a] for a in jaxpr.outvars]

    def _eqn(self, eqn, ins) -> Sequence[Value | Pieces]:
        name = eqn.primitive.name
        pieces = [v for v in ins if isinstance(v, Pieces)]
        if name in CALLS:
            return self._call(eqn.params[CALLS[name]], ins)
        if name in ("remat2", "checkpoint") and (pieces or len(_join_known(ins)) > 1):
            return self._call(eqn.params["jaxpr"], ins)
        if self.primal and name in jx.CUSTOM_RULES:
            return self._call(eqn.params["call_jaxpr"], ins)
        if self.primal and name == "cond":
            return self._select(eqn, ins)
        if not pieces:
            return self._plain(eqn, ins)
        if name == "scan" and any(isinstance(v, Pieces) for v in ins[sum(jx.scan_parts(eqn)) :]):
            return self._unrolled(eqn, ins)
        out = _piecewise(eqn, ins, len(pieces[0].parts))
        return self._plain(eqn, [stack(v) for v in ins]) if out is None else out

    def _plain(self, eqn, ins):
        blocks = _join(ins)
        if _is_constant_scalar(eqn, ins):
            return [Value(a, blocks) for a in _folded(eqn, ins)]
        row = _row(eqn, ins) if self.primal else None
        return [Value(a, blocks, row) for a in jx.bind(eqn, [v.array for v in ins])]

    def _call(self, jaxpr, ins):
        return self.run(jx.opened(jaxpr), jx.constants(jaxpr), ins)

    def _select(self, eqn, ins):
        """A conditional as a selection between the results of all its branches."""
        index, *operands = ins
        branches = eqn.params["branches"]
        which = jax.lax.clamp(0, index.array, len(branches) - 1)
        results = [self._call(b, operands) for b in branches]
        out = []
        for cases in zip(*results, strict=True):
            blocks = _join([index, *cases])
            lengths = {len(c.parts) for c in cases if isinstance(c, Pieces)}
            if lengths:
                parts = [[piece(c, i) for c in cases] for i in range(lengths.pop())]
                out.append(
                    Pieces(tuple(Value(_choose(which, p), _join([index, *p])) for p in parts))
                )
            else:
                out.append(Value(_choose(which, [stack(c) for c in cases]), blocks))
        return out

    def _unrolled(self, eqn, ins):
        num_consts, num_carry = jx.scan_parts(eqn)
        consts = ins[:num_consts]
        carry = ins[num_consts : num_consts + num_carry]
        xs = ins[num_consts + num_carry :]
        length = eqn.params["length"]
        order = range(length - 1, -1, -1) if eqn.params["reverse"] else range(length)
        rows: dict[int, list] = {}
        for i in order:
            out = self._call(eqn.params["jaxpr"], [*consts, *carry, *(piece(x, i) for x in xs)])
            carry, rows[i] = out[:num_carry], [stack(y) for y in out[num_carry:]]
        ys = [Pieces(column) for column in zip(*(rows[i] for i in range(length)), strict=True)]
        return [*carry, *ys]


def _is_constant_scalar(eqn, ins) -> bool:
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


def _folded(eqn, ins) -> list:
    """A scalar known at trace time becomes a literal, however the model spells it."""
    with jax.ensure_compile_time_eval():
        return [np.asarray(jax.device_get(a))[()] for a in jx.bind(eqn, [v.array for v in ins])]


def _row(eqn, ins) -> Callable[[], Any] | None:
    """How to compute one slice of a result whose slices along axis 0 are all alike."""
    name, params = eqn.primitive.name, eqn.params
    if name == "broadcast_in_dim" and params.get("sharding") is None:
        dims, shape = params["broadcast_dimensions"], params["shape"]
        if shape and 0 not in dims and len(ins) == 1:
            rows = {"shape": tuple(shape[1:]), "broadcast_dimensions": tuple(d - 1 for d in dims)}
            changed = eqn.replace(params={**params, **rows})
            return lambda: jx.bind(changed, [ins[0].array])[0]
    if name in ELEMENTWISE and len(eqn.outvars) == 1 and any(v.row for v in ins):
        if all(v.row or not a.aval.shape for v, a in zip(ins, eqn.invars, strict=True)):
            return lambda: jx.bind(eqn, [v.row() if v.row else v.array for v in ins])[0]
    return None


def _choose(which, cases):
    arrays = [c.array for c in cases]
    if len(arrays) == 1 or all(a is arrays[0] for a in arrays):
        return arrays[0]
    return jax.lax.select_n(which if len(arrays) > 2 else which.astype(bool), *arrays)


def _join_known(values) -> frozenset:
    """The blocks of those operands that depend on parameters only."""
    return NOTHING.union(*(v.blocks for v in values if v.blocks is not None))


def piece(value: Value | Pieces, i: int) -> Value:
    """Slice `i` of a value along axis 0."""
    if isinstance(value, Pieces):
        return value.parts[i]
    if value.row is not None:
        return Value(value.row(), value.blocks)
    return Value(
        jax.lax.index_in_dim(jax.numpy.asarray(value.array), i, keepdims=False), value.blocks
    )


def stack(value: Value | Pieces) -> Value:
    """The whole array of a stacked value."""
    if isinstance(value, Value):
        return value
    rows = [jax.lax.expand_dims(p.array, (0,)) for p in value.parts]
    return Value(jax.lax.concatenate(rows, 0), value.blocks)


def _piecewise(eqn, ins, n) -> list | None:
    """The equation applied slice by slice, or None if it mixes slices."""
    name, params = eqn.primitive.name, eqn.params
    if name in ELEMENTWISE:
        return _map(eqn, ins, n, params)
    operand = ins[0]
    rank = len(eqn.invars[0].aval.shape)
    shape = eqn.outvars[0].aval.shape if eqn.outvars else ()
    if len(ins) != 1 or not isinstance(operand, Pieces):
        return None
    if name in FOLDS or name in ("argmax", "argmin"):
        axes = tuple(params["axes"])
        inner = tuple(a - 1 for a in axes if a)
        if 0 not in axes:
            return _map(eqn, ins, n, {**params, "axes": inner})
        return _fold(eqn, operand, inner) if name in FOLDS else None
    if name == "broadcast_in_dim":
        dims = tuple(params["broadcast_dimensions"])
        if dims[:1] != (0,) or shape[:1] != (n,) or params.get("sharding") is not None:
            return None
        changed = {
            "shape": tuple(shape[1:]),
            "broadcast_dimensions": tuple(d - 1 for d in dims[1:]),
        }
        return _map(eqn, ins, n, {**params, **changed})
    if name == "transpose" and params["permutation"][0] == 0:
        return _map(
            eqn, ins, n, {**params, "permutation": tuple(p - 1 for p in params["permutation"][1:])}
        )
    if name == "reshape" and shape[:1] == (n,) and params.get("dimensions") is None:
        return _map(eqn, ins, n, {**params, "new_sizes": tuple(shape[1:])})
    if name == "squeeze" and 0 not in params["dimensions"]:
        return _map(
            eqn, ins, n, {**params, "dimensions": tuple(d - 1 for d in params["dimensions"])}
        )
    if name in ("cumsum", "cummax", "cummin", "cumprod") and params["axis"] and rank:
        return _map(eqn, ins, n, {**params, "axis": params["axis"] - 1})
    return None


def _map(eqn, ins, n, params) -> list[Pieces]:
    """Binds the equation once per slice; operands that aren't stacked are sliced or shared."""
    changed = eqn.replace(params=params)
    rows = []
    for i in range(n):
        row = [v if _is_shared(v, a) else piece(v, i) for v, a in zip(ins, eqn.invars, strict=True)]
        blocks = _join(row)
        rows.append([Value(a, blocks) for a in jx.bind(changed, [v.array for v in row])])
    return [Pieces(column) for column in zip(*rows, strict=True)]


def _is_shared(value, atom) -> bool:
    return isinstance(value, Value) and not atom.aval.shape


def _fold(eqn, operand, inner):
    if inner:
        (mapped,) = _map(eqn, [operand], len(operand.parts), {**eqn.params, "axes": inner})
    else:
        mapped = operand
    total = mapped.parts[0].array
    for part in mapped.parts[1:]:
        total = FOLDS[eqn.primitive.name](total, part.array)
    return [Value(total, operand.blocks)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScannedLeaves:
    """Parameters that one `scan` reads as its per-iteration inputs."""

    leaves: tuple[int, ...]
    length: int


def find_scanned(traced: jx.Traced, num_leaves: int) -> list[ScannedLeaves]:
    """Lists the scans whose inputs are parameters stacked along axis 0, in order of appearance."""
    found: list[ScannedLeaves] = []
    first = len(traced.consts)
    inputs = range(-first, len(traced.jaxpr.invars) - first)
    sources = [i if 0 <= i < num_leaves else None for i in inputs]
    _find_scanned(traced.jaxpr, sources, found)
    return found


def _find_scanned(jaxpr, sources, found) -> list[int | None]:
    env: dict[Any, int | None] = dict(zip(jaxpr.invars, sources, strict=True))

    def read(atom):
        return None if jx.is_literal(atom) else env.get(atom)

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        ins = [read(a) for a in eqn.invars]
        inner = eqn.params.get(CALLS.get(name, "jaxpr")) if name in (*CALLS, "remat2") else None
        if inner is not None:
            outs = _find_scanned(jx.opened(inner), ins, found)
            env.update(zip(eqn.outvars, outs, strict=True))
        elif name == "scan":
            leaves = [i for i in ins[sum(jx.scan_parts(eqn)) :] if i is not None]
            if leaves:
                found.append(
                    ScannedLeaves(leaves=tuple(dict.fromkeys(leaves)), length=eqn.params["length"])
                )
        elif name in ELEMENTWISE and len({i for i in ins if i is not None}) == 1:
            shape = eqn.outvars[0].aval.shape
            if all(not a.aval.shape or a.aval.shape == shape for a in eqn.invars):
                env[eqn.outvars[0]] = next(i for i in ins if i is not None)
    return [read(a) for a in jaxpr.outvars]
