"""Codes of float8 products and the transposed codes, made in one pass over a GPU's memory.

A GPU multiplies float8 matrices only if both have the contracted axis last. So backward needs most
codes twice: as they are, and transposed for the gradient of a weight. XLA writes an operand to
memory, reads it to code it, and reads the codes to transpose them. A pass reads the arrays that the
operand is computed from, computes it tile by tile, and writes its codes in both orders. Operands
that are computed from the same arrays share a pass.

Example: backward of `h = silu(g) * u` in bfloat16, with codes of h, dg and du::

    h = mul (silu g) u          # read for its largest magnitude, and for its codes
    c = float8 (mul h 1/scale)  # the codes, behind a barrier
    dw = dot c t                # contracts the tokens: needs the transposed codes

All three are computed from g, u and dh. The pass reads 6 bytes per number, after 6 were read for
the scales, and writes 5: h is needed transposed only. XLA moves 27 bytes.
"""

import dataclasses
import graphlib
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.kernels.tiles import evaluate_on_tile, fits_tile, pallas
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.float8 import CODE
from megatrain_jax._src.engine.program.primitives import BARRIER, CALLS, CUSTOM_RULES, FUSING, REMAT
from megatrain_jax._src.engine.program.rewriting import is_open

# Rows and columns of a tile, and groups of 32 threads that compute it.
_TILE = 64, 64
_WARPS = 8
# The compiler opens calls, and may fuse their last equations with readers of the results.
_OPENED = CALLS | REMAT | CUSTOM_RULES


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Codes:
    """Codes that a jaxpr computes.

    Attributes:
        made: The variables of the codes: one for each product with the same operand.
        computed: The variable of the codes before the first one's barrier.
        operand: The variable of the numbers that they are the codes of.
        eqns: Numbers of the equations that compute them from arrays in memory.
        arrays: Variables of these arrays, of the codes' shape.
        scalars: Variables without axes that the equations read.
    """

    made: tuple[Any, ...]
    computed: Any
    operand: Any
    eqns: frozenset[int]
    arrays: tuple[Any, ...]
    scalars: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pass:
    """Codes of one shape that are computed from common arrays; a node of a jaxpr.

    Attributes:
        outvars: The variables of the codes.
        invars: The variables of the arrays, then of the scalars.
        num_arrays: The number of arrays.
        eqns: The equations that compute the codes, in order.
        results: The codes to write, each with whether they are transposed.
    """

    outvars: tuple[Any, ...]
    invars: tuple[Any, ...]
    num_arrays: int
    eqns: tuple[Any, ...]
    results: tuple[tuple[_Codes, bool], ...]

    def run(self, args: Sequence[jax.Array], *, interpret: bool) -> list[jax.Array]:
        """Computes the results, transposed ones with the last axis first."""
        pl, triton = pallas()
        *lead, width = self.outvars[0].aval.shape
        height = math.prod(lead)
        straight = pl.BlockSpec(_TILE, lambda i, j: (i, j))
        turned = pl.BlockSpec(_TILE[::-1], lambda i, j: (j, i))
        scalar = pl.BlockSpec((1,), lambda i, j: (0,))
        num_scalars = len(args) - self.num_arrays
        shapes = [(width, height) if turns else (height, width) for _, turns in self.results]
        found = pl.pallas_call(
            self._kernel,
            grid=(height // _TILE[0], width // _TILE[1]),
            in_specs=[straight] * self.num_arrays + [scalar] * num_scalars,
            out_specs=[turned if turns else straight for _, turns in self.results],
            out_shape=[jax.ShapeDtypeStruct(shape, CODE) for shape in shapes],
            compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=1),
            interpret=interpret,
            name="float8_codes",
        )(*(x.reshape(-1, width) if x.ndim else x.reshape(1) for x in args))
        return [
            x.reshape(width, *lead) if turns else x.reshape(*lead, width)
            for x, (_, turns) in zip(found, self.results, strict=True)
        ]

    def _kernel(self, *refs: Any) -> None:
        """Computes one tile of all results."""
        values = {}
        for number, (v, ref) in enumerate(zip(self.invars, refs, strict=False)):
            values[v] = ref[...] if number < self.num_arrays else ref[0]
        evaluate_on_tile(self.eqns, values, _TILE)
        for ref, (codes, turns) in zip(refs[len(self.invars) :], self.results, strict=True):
            found = values[codes.computed]
            ref[...] = found.T if turns else found


def with_code_passes(function: Callable, *, interpret: bool = False) -> Callable:
    """A function with passes for the codes of its float8 products, where they move fewer bytes.

    Args:
        function: The function, of trees of arrays.
        interpret: Whether passes are interpreted, on any platform, instead of compiled for a GPU.
    """

    def run(*args: Any) -> Any:
        traced = _traced(function, args)
        jaxpr, arguments = traced.jaxpr, [*traced.consts, *jax.tree.leaves(args)]
        nodes = _ordered(jaxpr, _PassSearch(jaxpr).found)
        if nodes is None or jaxpr.effects:
            return function(*args)
        values = dict(zip(jaxpr.invars, arguments, strict=True))
        turned: dict[Any, jax.Array] = {}
        for node in nodes:
            ins: list[Any] = [a.val if jx.is_literal(a) else values.get(a) for a in node.invars]
            if isinstance(node, _Pass):
                results = zip(node.results, node.run(ins, interpret=interpret), strict=True)
                for (codes, turns), found in results:
                    (turned if turns else values).update(dict.fromkeys(codes.made, found))
                continue
            for side, v in _by_column(node).items():
                if v in turned:
                    # The product contracts the axes that are last in memory.
                    ins[side] = jnp.moveaxis(turned[v], 0, -1)
            values.update(zip(node.outvars, jx.bind(node, ins), strict=True))
        results = [a.val if jx.is_literal(a) else values[a] for a in jaxpr.outvars]
        return jax.tree.unflatten(traced.out_tree, results)

    return run


def _traced(function: Callable, args: Sequence[Any]) -> jx.Traced:
    """The needed equations of a function, including the equations of its remats."""
    traced = jx.without_dead_code(jx.trace(function, *args))
    if not any(map(_is_remat, traced.jaxpr.eqns)):
        return traced

    def opened(*args: Any) -> Any:
        return traced.outputs(args, _with_open_remats)

    return jx.without_dead_code(jx.trace(opened, *args))


def _is_remat(eqn: Any) -> bool:
    """Whether an equation is a remat that the compiler opens, such as that of saved residuals."""
    return eqn.primitive.name in REMAT and is_open(eqn)


def _with_open_remats(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates an open jaxpr, and the equations of its remats one by one."""

    def results_of(eqn: Any, ins: list[Any]) -> list[Any]:
        if not _is_remat(eqn):
            return jx.bind(eqn, ins)
        inner = jx.called(eqn, REMAT)
        assert inner is not None
        return _with_open_remats(inner.jaxpr, [*inner.consts, *ins])

    return jx.interpret(jaxpr, args, results_of)


class _PassSearch:
    """Searches the equations of a jaxpr for passes.

    Attributes:
        found: The passes.
    """

    def __init__(self, jaxpr: Any):
        self._eqns = jaxpr.eqns
        self._maker = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self._num_readers = jx.num_readers(jaxpr)
        self._turned = Counter(v for eqn in jaxpr.eqns for v in _by_column(eqn).values())
        self._made: dict[Any, list[Any]] = {}  # variables of codes, by their operand
        for v in self._maker:
            if v.aval.dtype == CODE and self._eqn(v).primitive.name == BARRIER:
                self._made.setdefault(self._operand(v), []).append(v)
        every = [self._codes(operand) for operand in self._made]
        groups = _grouped(jaxpr, [codes for codes in every if codes is not None])
        self.found = [self._pass(group) for group in groups if self._pays(group)]

    def _eqn(self, v: Any) -> Any:
        return self._eqns[self._maker[v]] if v in self._maker else None

    def _operand(self, code: Any) -> Any:
        """The operand of codes `barrier (float8 (mul (float32 operand) 1/scale))`."""
        v = code
        for name in (BARRIER, "convert_element_type", "mul", "convert_element_type"):
            eqn = self._eqn(v)
            if eqn is None or eqn.primitive.name != name:
                break
            v = eqn.invars[0]
        return v

    def _codes(self, operand: Any) -> _Codes | None:
        """The equations of an operand's codes; None if a pass can't compute them."""
        made, shape = self._made[operand], operand.aval.shape
        (computed,) = self._eqn(made[0]).invars
        todo = [computed]
        if len(shape) < 2 or math.prod(shape[:-1]) % _TILE[0] or shape[-1] % _TILE[1]:
            return None
        eqns: set[int] = set()
        arrays: dict[Any, None] = {}
        scalars: dict[Any, None] = {}
        while todo:
            v = todo.pop()
            if not v.aval.shape:
                scalars[v] = None
            elif self._is_in_memory(v):
                arrays[v] = None
            elif not self._fits(number := self._maker[v], shape):
                return None
            elif number not in eqns:
                eqns.add(number)
                todo += jx.variables(self._eqns[number].invars)
        read = [v.aval.dtype for v in (*arrays, *scalars)]
        if not all(jnp.issubdtype(d, jnp.floating) and d.itemsize <= 4 for d in read):
            return None
        return _Codes(
            made=tuple(made),
            computed=computed,
            operand=operand,
            eqns=frozenset(eqns),
            arrays=tuple(arrays),
            scalars=tuple(scalars),
        )

    def _fits(self, number: int, shape: tuple[int, ...]) -> bool:
        """Whether a pass can compute an equation."""
        eqn = self._eqns[number]
        return eqn.primitive.name not in _OPENED and fits_tile(eqn, shape)

    def _is_in_memory(self, v: Any) -> bool:
        """Whether an array is written to memory in any case."""
        eqn, made = self._eqn(v), self._made.get(v, ())
        # Besides its largest magnitude and its codes, it is read for something else.
        if made and self._num_readers[v] > 2 * len(made):
            return True
        if eqn is None or eqn.primitive.name not in FUSING | _OPENED:
            return True
        if eqn.primitive.name in ("reshape", "squeeze", "slice"):
            # All numbers of the operand, in the same order.
            (operand,) = eqn.invars
            if jx.num_elements(operand.aval) == jx.num_elements(v.aval):
                return self._is_in_memory(operand)
        return False

    def _pays(self, group: Sequence[_Codes]) -> bool:
        """Whether transposed codes are needed, and the arrays take at most twice the operands."""
        arrays = {v for codes in group for v in codes.arrays}
        most = 2 * sum(jx.num_bytes(codes.operand.aval) for codes in group)
        is_turned = any(self._turned[v] for codes in group for v in codes.made)
        return is_turned and sum(jx.num_bytes(v.aval) for v in arrays) <= most

    def _pass(self, group: Sequence[_Codes]) -> _Pass:
        arrays = dict.fromkeys(v for codes in group for v in codes.arrays)
        scalars = dict.fromkeys(v for codes in group for v in codes.scalars)
        numbers = sorted(frozenset().union(*(codes.eqns for codes in group)))
        turned = [codes for codes in group if any(self._turned[v] for v in codes.made)]
        straight = [
            codes
            for codes in group
            if any(self._num_readers[v] > self._turned[v] for v in codes.made)
        ]
        return _Pass(
            outvars=tuple(v for codes in group for v in codes.made),
            invars=(*arrays, *scalars),
            num_arrays=len(arrays),
            eqns=tuple(self._eqns[number] for number in numbers),
            results=(*((c, False) for c in straight), *((c, True) for c in turned)),
        )


def _grouped(jaxpr: Any, every: Iterable[_Codes]) -> list[list[_Codes]]:
    """Codes of one shape that are computed from common arrays, in groups.

    Args:
        jaxpr: The jaxpr.
        every: The codes, in the order of their equations.
    """
    groups: list[list[_Codes]] = []
    after: dict[int, set[Any]] = {}  # the variables that depend on codes

    for codes in every:
        after[id(codes)] = jx.dependent(jaxpr, codes.made)
        common = [
            group
            for group in groups
            if group[0].operand.aval.shape == codes.operand.aval.shape
            and any(not set(codes.arrays).isdisjoint(other.arrays) for other in group)
            and all(after[id(other)].isdisjoint([*codes.arrays, *codes.scalars]) for other in group)
        ]
        # Two existing groups are not merged, because one may depend on the other.
        groups = [group for group in groups if group not in common[:1]]
        groups.append([*(other for group in common[:1] for other in group), codes])
    return groups


def _by_column(eqn: Any) -> dict[int, Any]:
    """The operands, by their side, that a product contracts along all axes but the last."""
    if not isinstance(eqn, _Pass) and eqn.primitive.name == "dot_general":
        contracted, batch = eqn.params["dimension_numbers"]
        return {
            side: v
            for side, v in enumerate(eqn.invars)
            if not batch[side] and sorted(contracted[side]) == list(range(v.aval.ndim - 1))
        }
    return {}


def _ordered(jaxpr: Any, found: Sequence[_Pass]) -> list[Any] | None:
    """The needed equations and passes, each after its operands; None if there is a cycle."""
    coded = {v for one in found for v in one.outvars}
    nodes = [*found, *(eqn for eqn in jaxpr.eqns if coded.isdisjoint(eqn.outvars))]
    maker = {v: i for i, node in enumerate(nodes) for v in node.outvars}
    todo = [maker[v] for v in jx.variables(jaxpr.outvars) if v in maker]
    todo += [i for i, node in enumerate(nodes) if getattr(node, "effects", None)]
    reads: dict[int, set[int]] = {}
    while todo:
        if (number := todo.pop()) not in reads:
            operands = jx.variables(nodes[number].invars)
            reads[number] = {maker[v] for v in operands if v in maker}
            todo += reads[number]
    sorter, ready, order = graphlib.TopologicalSorter(reads), [], []
    try:
        sorter.prepare()
    except graphlib.CycleError:
        return None
    while sorter.is_active():
        for number in sorter.get_ready():
            heapq.heappush(ready, number)
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
    return [nodes[number] for number in order]
