"""Everything that depends on the structure of a jaxpr: tracing, walks, rebinding, slicing.

It is kept in one module because jaxprs change between JAX versions (from 0.11 a closed jaxpr is a
jaxpr, and `scan` has different parameters).

While tracing, errors are short: JAX would spend long on messages that nobody reads.
"""

import dataclasses
import functools
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.extend import core as jex
from jax.interpreters import partial_eval
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from megatrain_jax._src.common.kernel_primitives import KernelCosts, kernel_costs
from megatrain_jax._src.engine.program.primitives import CALLS, REMAT


class _ShortErrors:
    """The switch that makes JAX's tracers refuse `.sharding` briefly, in threads that trace here.

    JAX has no option for it, so `Tracer.sharding` is replaced while any such thread traces; all
    remaining threads still call JAX's own.
    """

    def __init__(self) -> None:
        """Makes the switch; it is off."""
        self._lock = threading.Lock()
        # How often each thread has entered: tracing may trace again inside, as a kernel that fires
        # its effects once does.
        self._entered: Counter[int] = Counter()
        self._own: Any = None

    def enter(self) -> None:
        """Switches it on in this thread."""
        with self._lock:
            if not self._entered:
                self._own = core.Tracer.sharding
                setattr(core.Tracer, "sharding", property(self._refuse))  # noqa: B010
            self._entered[threading.get_ident()] += 1

    def leave(self) -> None:
        """Switches it off in this thread, after as many calls as `enter` had."""
        with self._lock:
            self._entered[threading.get_ident()] -= 1
            self._entered = +self._entered  # without threads that have left
            if not self._entered:
                setattr(core.Tracer, "sharding", self._own)  # noqa: B010

    def _refuse(self, tracer: core.Tracer) -> Any:
        if threading.get_ident() in self._entered:
            raise AttributeError("a tracer has no sharding")
        return self._own.fget(tracer)


_SHORT_ERRORS = _ShortErrors()
_JAXPRS = (jex.Jaxpr, jex.ClosedJaxpr)


@contextmanager
def short_errors() -> Iterator[None]:
    """Makes tracing skip JAX's costly search for the origin of an error that nobody sees.

    NNX asks each new variable value for its sharding, which a tracer does not have. Before 0.12,
    JAX then walks all equations so far to word an `AttributeError`, and its own `__getattr__`
    replaces that error at once: tracing time would be quadratic in the model's depth. Only the
    calling thread is affected.
    """
    _SHORT_ERRORS.enter()
    try:
        yield
    finally:
        _SHORT_ERRORS.leave()


Var = jex.Var
Literal = jex.Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced:
    """A traced function.

    Attributes:
        jaxpr: Open jaxpr; its inputs are the constants, then the leaves of the arguments.
        consts: Values of the constants.
        out_tree: Structure of the outputs.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    out_tree: Any

    def outputs(
        self, args: Sequence[Any], evaluate: Callable[[Any, list[Any]], Sequence[Any]]
    ) -> Any:
        """The tree of outputs for arguments.

        Args:
            args: The arguments, trees of arrays as in the trace.
            evaluate: `evaluate(jaxpr, values)` returns the results for the jaxpr's inputs.
        """
        results = evaluate(self.jaxpr, [*self.consts, *jax.tree.leaves(args)])
        return jax.tree.unflatten(self.out_tree, results)


def rewritten(
    function: Callable | Traced, evaluate: Callable[[Any, list[Any]], Sequence[Any]]
) -> Callable:
    """A function of trees that traces another one, and evaluates it as in `Traced.outputs`."""

    def run(*args: Any) -> Any:
        traced = function if isinstance(function, Traced) else trace(function, *args)
        return traced.outputs(args, evaluate)

    return run


def trace(fn: Callable, *args: Any) -> Traced:
    """Traces `fn` on `args` (trees of arrays or ShapeDtypeStructs) without running it."""
    out_tree = None

    def flat(*flat_args):
        nonlocal out_tree
        out, out_tree = jax.tree.flatten(fn(*jax.tree.unflatten(in_tree, flat_args)))
        return out

    leaves, in_tree = jax.tree.flatten(args)
    with short_errors():
        closed = jax.make_jaxpr(flat)(*leaves)
    return _traced(closed, out_tree)


def trace_jitted(function: Any, *args: Any) -> Traced:
    """Traces a function of `jax.jit` as `trace` does; JAX remembers the trace of its last call."""
    traced = function.trace(*args)
    return _traced(traced.jaxpr, jax.tree.structure(traced.out_info))


def _traced(closed: Any, out_tree: Any) -> Traced:
    jaxpr = opened(closed)
    # Constants become the first inputs, so that each piece of the jaxpr can have the constants it
    # reads among its own inputs.
    consts = tuple(map(_host_constant, closed.consts))
    jaxpr = sub_jaxpr(jaxpr, jaxpr.eqns, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars)
    return Traced(jaxpr=jaxpr, consts=consts, out_tree=out_tree)


def _host_constant(value: Any) -> Any:
    """A constant as a NumPy array, so that embedding it in a program transfers nothing."""
    if isinstance(value, jax.Array) and not isinstance(value, core.Tracer):
        # NumPy has no dtype for keys.
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return value
        return np.asarray(jax.device_get(value))
    return value


def leaked_tracer(values: Iterable[Any]) -> str | None:
    """Shape and dtype of the first value that belongs to a finished trace, or None."""
    found = (v for v in values if isinstance(v, core.Tracer))
    return next((v.aval.str_short() for v in found), None)


def opened(jaxpr: Any) -> Any:
    """The open form of a jaxpr that may be closed."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def closed(jaxpr: Any) -> Any:
    """The closed form of an open jaxpr without constants."""
    return jex.ClosedJaxpr(jaxpr, ())


def constants(jaxpr: Any) -> Sequence[Any]:
    """The constants of a jaxpr that may be closed."""
    return tuple(getattr(jaxpr, "consts", ()))


def is_literal(atom: Any) -> bool:
    """Whether an equation's operand is a literal."""
    return isinstance(atom, Literal)


def variables(atoms: Iterable[Any]) -> list[Any]:
    """The operands that are variables, in order, with repetitions."""
    return [a for a in atoms if not isinstance(a, Literal)]


def num_elements(aval: Any) -> int:
    """Number of elements of an abstract value."""
    return math.prod(getattr(aval, "shape", ()))


def num_bytes(aval: Any) -> int:
    """Bytes of an abstract value; typed PRNG keys count as two words."""
    dtype = getattr(aval, "dtype", None)
    return 0 if dtype is None else num_elements(aval) * _itemsize(dtype)


@functools.cache
def _itemsize(dtype: Any) -> int:
    return 8 if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype).itemsize


def is_float(aval: Any) -> bool:
    """Whether an abstract value can have a cotangent."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def strong(aval: Any) -> Any:
    """An abstract value without a weak type, like an argument of a program."""
    return aval.update(weak_type=False) if getattr(aval, "weak_type", False) else aval


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an abstract value."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def is_automatic(value: Any) -> bool:
    """Whether a parameter is a sharding that leaves every axis to the compiler.

    Derivatives on several devices ask for their operands' shardings, and these are automatic unless
    the user's mesh is explicit.
    """
    if not isinstance(value, NamedSharding):
        return False
    automatic = all(kind == AxisType.Auto for kind in value.mesh.axis_types)
    return automatic and all(name is None for name in value.spec)


def bind(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Applies an equation's primitive to new operands, in its own context; returns a list."""
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def scan_parts(eqn: Any) -> tuple[int, int]:
    """Number of constants and of carried values of a `scan` equation."""
    if "num_consts" in eqn.params:
        # Before JAX 0.11; from then on three trees hold the counts.
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def overwritten(eqn: Any, names: Collection[str]) -> dict[Any, Any]:
    """Results that are modified operands, such as a loop's carry, with these operands.

    Args:
        eqn: The equation.
        names: Primitives that overwrite a part of their first operand.
    """
    if eqn.primitive.name in names:
        first, count = 0, 1
    elif eqn.primitive.name == "scan":
        first, count = scan_parts(eqn)
    elif eqn.primitive.name == "while":
        first, count = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"], len(eqn.outvars)
    else:
        return {}
    pairs = zip(eqn.outvars[:count], eqn.invars[first : first + count], strict=True)
    return {v: start for v, start in pairs if not is_literal(start)}


def scan_operands(eqn: Any, ins: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Values of a scan's operands, in three parts: constants, carried values, scanned arrays."""
    consts, carry = scan_parts(eqn)
    return ins[:consts], ins[consts : consts + carry], ins[consts + carry :]


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The jaxprs among an equation's parameters, in open form."""
    found = []
    for value in eqn.params.values():  # most equations have few, and no jaxpr
        if isinstance(value, _JAXPRS):
            found.append(opened(value))
        elif isinstance(value, (tuple, list)):
            found += [opened(item) for item in value if isinstance(item, _JAXPRS)]
    return found


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr, open or closed."""
    return isinstance(value, _JAXPRS)


class Body(NamedTuple):
    """A jaxpr inside an equation.

    Attributes:
        jaxpr: The jaxpr, open.
        consts: Values of its constants.
    """

    jaxpr: Any
    consts: Sequence[Any]

    @classmethod
    def of(cls, jaxpr: Any) -> "Body":
        """The body of a jaxpr that may be closed."""
        return cls(opened(jaxpr), constants(jaxpr))


def called(eqn: Any, names: Collection[str] = CALLS | REMAT) -> Body | None:
    """The body that an equation calls, if it does nothing else; else None.

    Args:
        eqn: The equation.
        names: Primitives to look into, among `CALLS`, `REMAT` and `CUSTOM_RULES`.
    """
    if eqn.primitive.name not in names:
        return None
    return Body.of(eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"])


def loop_body(eqn: Any) -> Body:
    """The body of a `scan` or a `while`."""
    return Body.of(eqn.params["jaxpr" if eqn.primitive.name == "scan" else "body_jaxpr"])


def loop_condition(eqn: Any) -> Body:
    """The condition of a `while`."""
    return Body.of(eqn.params["cond_jaxpr"])


def branches(eqn: Any) -> list[Body]:
    """The branches of a `cond`."""
    return list(map(Body.of, eqn.params["branches"]))


def branch(eqn: Any, index: Any) -> Body:
    """The branch of a `cond` that an index selects; out of bounds, the nearest one, as in JAX."""
    found = branches(eqn)
    return found[int(np.clip(index, 0, len(found) - 1))]


def with_bodies(eqn: Any, change: Callable[[int, Any], Any]) -> Any:
    """A call, a `scan` or a `cond` with changed bodies.

    Args:
        eqn: The equation.
        change: Makes a new open body from the number of a body, by branch, and the body.
    """
    if eqn.primitive.name == "cond":
        found = enumerate(eqn.params["branches"])
        new = {"branches": tuple(with_body(b, change(i, opened(b))) for i, b in found)}
    else:
        name = "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"
        new = {name: with_body(eqn.params[name], change(0, opened(eqn.params[name])))}
    return eqn.replace(params={**eqn.params, **new})


def with_body(jaxpr: Any, body: Any) -> Any:
    """A jaxpr with a new open body, closed if it was closed."""
    return body if opened(jaxpr) is jaxpr else jaxpr.replace(jaxpr=body)


def contains(eqn: Any, is_found: Callable[[Any], bool]) -> bool:
    """Whether a condition holds for an equation, or for one in its inner jaxprs."""
    inner = (e for jaxpr in inner_jaxprs(eqn) for e in equations(jaxpr))
    return is_found(eqn) or any(map(is_found, inner))


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, open or closed, and of the jaxprs inside, each jaxpr once."""
    seen: set[int] = set()  # layers that call one function share its jaxpr
    todo = [opened(jaxpr)]
    while todo:
        for eqn in todo.pop().eqns:
            yield eqn
            inner = [j for j in inner_jaxprs(eqn) if id(j) not in seen]
            seen.update(map(id, inner))
            todo += inner


def kernels_of(jaxpr: Any) -> Iterator[KernelCosts]:
    """The costs of the kernels of libraries that a jaxpr calls, also in its inner jaxprs."""
    return filter(None, map(kernel_costs, equations(jaxpr)))


def num_readers(jaxpr: Any) -> Counter[Any]:
    """The number of times that equations and results of an open jaxpr read each variable."""
    atoms = [*(a for eqn in jaxpr.eqns for a in eqn.invars), *jaxpr.outvars]
    return Counter(variables(atoms))


def largest_mesh(jaxpr: Any) -> Any:
    """The largest mesh that any equation, also an inner one, was traced in, or None."""
    found: dict[Any, None] = {}
    for eqn in equations(jaxpr):
        found.setdefault(eqn.ctx.cur_abstract_mesh)
        found.setdefault(eqn.params.get("mesh"))  # for a shard_map
    entered = (m for m in found if m is not None and not m.empty)
    return max(entered, key=lambda m: m.size, default=None)


def device_sets(jaxpr: Any, *, is_inlined: bool = True) -> set[frozenset[Any]]:
    """The sets of devices on which equations place values, also inner ones.

    Args:
        jaxpr: A jaxpr.
        is_inlined: Whether calls in it are inlined, so that their own shardings have no effect.
    """
    found: set[frozenset[Any]] = set()
    for eqn in jaxpr.eqns:
        is_call = is_inlined and called(eqn, CALLS) is not None
        for value in () if is_call else eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                is_abstract = isinstance(item, NamedSharding) and not isinstance(item.mesh, Mesh)
                if isinstance(item, Sharding) and not is_abstract:
                    found.add(frozenset(item.device_set))
        for inner in inner_jaxprs(eqn):
            found |= device_sets(inner, is_inlined=is_call)
    return found


def without_dead_code(traced: Traced, used: Sequence[bool] | None = None) -> Traced:
    """Drops equations that no output needs; keeps all inputs.

    Args:
        traced: A traced function.
        used: For each output whether it is kept; None keeps all.
    """
    used = [True] * len(traced.jaxpr.outvars) if used is None else list(used)
    jaxpr, _ = partial_eval.dce_jaxpr(traced.jaxpr, used, instantiate=True)
    return dataclasses.replace(traced, jaxpr=jaxpr)


def used_inputs(traced: Traced) -> list[bool]:
    """Whether an output depends on each input, constants first."""
    used = [True] * len(traced.jaxpr.outvars)
    return list(partial_eval.dce_jaxpr(traced.jaxpr, used)[1])


def sub_jaxpr(jaxpr: Any, eqns: Sequence, invars: Sequence, outvars: Sequence) -> Any:
    """A jaxpr of some of another's equations; its constants are among its inputs."""
    # Without this, every piece would claim the effects of the whole.
    effects = frozenset().union(*(e.effects for e in eqns)) if eqns else frozenset()
    return jaxpr.replace(
        constvars=[],
        invars=list(invars),
        outvars=list(outvars),
        eqns=list(eqns),
        effects=effects,
    )


def live_equations(jaxpr: Any) -> list[Any]:
    """The equations that outputs are computed from, without prints and callbacks that give none."""
    needed, found = set(variables(jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(variables(eqn.invars))
            found.append(eqn)
    return found[::-1]


def dependent(jaxpr: Any, sources: Iterable[Any]) -> set[Any]:
    """The variables of a jaxpr that depend on the sources, including the sources."""
    found = set(sources)
    for eqn in jaxpr.eqns:
        # One pass is enough, because an equation comes after the equations that make its operands.
        if not found.isdisjoint(variables(eqn.invars)):
            found.update(eqn.outvars)
    return found


def evaluate(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr without constants, also under a transformation."""
    return core.eval_jaxpr(jaxpr, (), *args)


def evaluate_by(
    jaxpr: Any,
    args: Sequence[Any],
    compute: Callable[[int, Any, Callable[[Any], Any]], Sequence[Any] | None],
) -> list[Any]:
    """Evaluates an open jaxpr with other computations for some equations.

    Args:
        jaxpr: The jaxpr.
        args: Values of its constants and inputs.
        compute: `compute(number, eqn, value)` returns the results of an equation, or None to leave
            it out; `value` gives the value of an operand.
    """
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True))

    def value(atom: Any) -> Any:
        return atom.val if is_literal(atom) else values[atom]

    for number, eqn in enumerate(jaxpr.eqns):
        if (results := compute(number, eqn, value)) is not None:
            values.update(zip(eqn.outvars, results, strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def interpret(
    jaxpr: Any,
    ins: Iterable[Any],
    results_of: Callable[[Any, list[Any]], Iterable[Any]],
    literal: Callable[[Any], Any] = lambda atom: atom.val,
) -> list[Any]:
    """Evaluates an open jaxpr on values of any kind, with other computations for its equations.

    Args:
        jaxpr: The jaxpr.
        ins: Values of its constants and inputs.
        results_of: `results_of(eqn, operands)` gives the values of an equation's results.
        literal: Gives the value of a literal operand; by default, its number.
    """
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), ins, strict=True))

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [literal(atom) if is_literal(atom) else values[atom] for atom in atoms]

    for eqn in jaxpr.eqns:
        values.update(zip(eqn.outvars, results_of(eqn, read(eqn.invars)), strict=True))
    return read(jaxpr.outvars)


def unrolled(
    eqn: Any,
    ins: Sequence[Any],
    trip: Callable[[Body, list[Any]], Sequence[Any]],
    row: Callable[[Any, int], Any],
) -> tuple[Sequence[Any], Iterator[tuple[Any, ...]]]:
    """Evaluates a `scan` on values of any kind, iteration by iteration.

    Args:
        eqn: The equation.
        ins: Values of its operands.
        trip: `trip(body, operands)` gives the results of one iteration.
        row: `row(x, i)` gives slice `i` of an operand along axis 0.

    Returns:
        The carried results, and for each of the remaining ones its slices in order.
    """
    consts, carry, xs = scan_operands(eqn, ins)
    order = range(eqn.params["length"])
    given = {}
    for i in reversed(order) if eqn.params["reverse"] else order:
        out = trip(loop_body(eqn), [*consts, *carry, *(row(x, i) for x in xs)])
        carry, given[i] = out[: len(carry)], out[len(carry) :]
    return carry, zip(*(given[i] for i in order), strict=True)


def union(sets: Mapping[Any, Iterable[Any]], atoms: Iterable[Any]) -> frozenset[Any]:
    """The sets of all operands together; variables that are missing have none."""
    return frozenset().union(*(sets.get(v, ()) for v in variables(atoms)))


def behind(
    eqns: Sequence[Any], producer: Mapping[Any, int], results: Iterable[Any]
) -> tuple[set[int], set[Any]]:
    """Finds what some variables are computed from.

    Args:
        eqns: The equations.
        producer: For each variable that an equation makes, the equation's number.
        results: The variables.

    Returns:
        The numbers of the equations, and the variables that they read and no equation makes.
    """
    numbers: set[int] = set()
    read: set[Any] = set()
    todo = list(results)
    while todo:
        v = todo.pop()
        if v not in producer:
            read.add(v)
        elif producer[v] not in numbers:
            numbers.add(producer[v])
            todo += variables(eqns[producer[v]].invars)
    return numbers, read


def each_after_its_needs(
    wanted: Sequence[int], needs: Callable[[int], Sequence[int]], done: set[int]
) -> Iterator[int]:
    """Numbers with all that they need, each after its needs; their order depends on these alone.

    Args:
        wanted: The numbers.
        needs: Gives the numbers that a number needs itself.
        done: Numbers that are there already; the new ones are added.
    """
    # An explicit stack, because chains of equations are longer than Python's recursion limit.
    todo = [(i, False) for i in reversed(wanted)]
    while todo:
        i, is_ready = todo.pop()
        if i in done:
            continue
        if is_ready:
            done.add(i)
            yield i
        else:
            todo.append((i, True))
            todo += [(j, False) for j in reversed(needs(i))]


def bytes_alive(
    eqns: Sequence[Any], results: Iterable[Any], counts: Callable[[Any], bool]
) -> list[int]:
    """Bytes of values that exist before each equation and are read by it or later, and at the end.

    Args:
        eqns: The equations, in order.
        results: Variables that are read at the end.
        counts: Whether a variable counts.
    """
    last = {v: p for p, eqn in enumerate(eqns) for v in variables(eqn.invars)}
    last |= dict.fromkeys(variables(results), len(eqns))
    born = {v: p + 1 for p, eqn in enumerate(eqns) for v in eqn.outvars}
    change = [0] * (len(eqns) + 2)
    for v in filter(counts, last):
        change[born.get(v, 0)] += num_bytes(v.aval)
        change[last[v] + 1] -= num_bytes(v.aval)
    return list(itertools.accumulate(change))


def peak_bytes(
    steps: Sequence[tuple[Iterable[Any], Iterable[Any], int]], size: Callable[[Any], int]
) -> int:
    """The most bytes of arrays that exist at a time, each from the step that makes it to its last.

    Args:
        steps: For each step the arrays that it makes, the ones that it reads, and the bytes that it
            takes for itself. It reads operands while it writes results, so both count.
        size: Bytes of an array.
    """
    last = {x: n for n, (makes, reads, _) in enumerate(steps) for x in (*makes, *reads)}
    live = most = 0
    ends: Counter[int] = Counter()
    for number, (makes, _, within) in enumerate(steps):
        for x in makes:
            live += size(x)
            ends[last[x]] += size(x)
        most = max(most, live + within)
        live -= ends[number]
    return most


def split(mask: Sequence[bool], values: Sequence) -> tuple[list, list]:
    """Splits values into two lists, by a mask."""
    yes = [v for m, v in zip(mask, values, strict=True) if m]
    return yes, [v for m, v in zip(mask, values, strict=True) if not m]


def merge(mask: Sequence[bool], yes: Sequence, no: Sequence) -> list:
    """Joins the two lists of `split` in their original order."""
    yes_iter, no_iter = iter(yes), iter(no)
    return [next(yes_iter) if m else next(no_iter) for m in mask]


def members(owners: Sequence[int | None], num_owners: int) -> tuple[tuple[int, ...], ...]:
    """Positions by owner, ascending: owners [0, 1, 0] give ((0, 2), (1,))."""
    found: list[list[int]] = [[] for _ in range(num_owners)]
    for position, owner in enumerate(owners):
        if owner is not None:
            found[owner].append(position)
    return tuple(map(tuple, found))
