"""Estimates the temporary memory of a function on a GPU, from its equations.

XLA's compiler for GPUs fuses more than its compiler for CPUs, whose figures `liveness.py`
estimates: it computes a cheap value again in each kernel that reads it, instead of writing it to
memory. `experiments/throughput/temporaries.py` compares the estimates with the compiler's figures.

The rules:

- An elementwise value, or a part of an array, gets no array if all its readers are elementwise
  operations or reductions, and if they read its operands in less time than it takes to write and
  to read the value. Matrix products, kernels and loops read arrays.
- A matrix product writes into the sum that it is added to.
- Arrays that depend only on arguments, such as a weight cut out of a slab, are made when they are
  needed. All remaining equations run in order, except that equations without new arrays run as
  early as possible, and products that no other product needs run last.
- A result belongs to the caller. In a loop, a new carry needs memory beside the old one, unless it
  is written in place.

Example, with arrays of 4 bytes::

    a = dot x y      # a: 4
    b = sin a        # computed by the kernels that read it
    c = mul b a      # a product reads c: a and c, 8, the peak
    d = dot c b      # d is the result
"""

from collections.abc import Iterable, Sequence
from typing import Any

from megatrain_jax._src.common.kernel_primitives import kernel_costs
from megatrain_jax._src.engine.kernels.flat_equations import Equation, FlatEquations, Node, in_order
from megatrain_jax._src.engine.kernels.sharding_prediction import (
    ShardedAxes,
    gathered_operands,
    sharded_axes,
    sharded_axes_within,
)
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program import primitives

# Operations that return their operand's bytes, at least for a product that reads them.
_RENAMING = frozenset("copy expand_dims name reshape squeeze stop_gradient transpose".split())
_RENAMING |= {primitives.BARRIER}
# Operations that rename their operand if they keep its dtype and its number of elements.
_SOMETIMES = frozenset(
    "broadcast_in_dim convert_element_type pad reduce_max reduce_sum slice".split()
)
_FUSED = (primitives.ELEMENTWISE | primitives.LAYOUT | {"concatenate", "iota", "pad"}) - _RENAMING
_FUSING = _FUSED | primitives.REDUCTIONS | primitives.ARG_REDUCTIONS
# Operations that overwrite a part of their first operand.
_OVERWRITING = frozenset(("dynamic_update_slice", "scatter", "scatter-add"))
_SUMS = ("add", "add_any")
# Operations that read only as many bytes of an array as they write, and indices.
_PARTS = ("gather", "dynamic_slice", "slice")
# Operations that take as long as reading so many times their result.
_SLOW = {"gather": 3, "tanh": 1, "erf": 1}
# Workspace of a matrix product on an H100, and a piece of an update that is computed in a loop.
_WORKSPACE = 2**26
# A value of this size is fused in any case.
_SMALL = 2**16


def gpu_temporary_bytes(jaxpr: Any, axes: ShardedAxes | None = None, num_devices: int = 1) -> int:
    """Estimates the peak bytes of a jaxpr's intermediate values on a GPU.

    Args:
        jaxpr: A jaxpr, open or closed.
        axes: For each input that devices divide, the divided axis.
        num_devices: Number of devices; the result is per device.
    """
    peak = GpuFunction(jx.opened(jaxpr), axes or {}, num_devices, in_loop=False).peak()
    return peak + min(peak // 2, _WORKSPACE)


class GpuFunction:
    """A function's values: arrays, with the nodes that write them, and fused values.

    Attributes:
        nodes: The equations that write arrays.
        made_by: The equation of each value that is no input.
    """

    def __init__(
        self,
        jaxpr: Any,
        axes: ShardedAxes,
        num_devices: int,
        *,
        in_loop: bool,
        stored: Sequence[Any] = (),
    ):
        """Opens a jaxpr, and decides which of its values are arrays.

        Args:
            jaxpr: A jaxpr, open or closed.
            axes: For each input that devices divide, the divided axis.
            num_devices: Number of devices.
            in_loop: Whether it is the body of a loop, which writes its carry in place.
            stored: See `FlatEquations`.
        """
        flat = FlatEquations(jaxpr, stored)
        pairs = zip(flat.invars, jaxpr.invars, strict=True)
        given = {v: axes[own] for v, own in pairs if own in axes}
        self._axes = sharded_axes(flat, given, num_devices) if given else {}
        self._num_devices = num_devices
        self._eqns = flat.eqns
        self.made_by = {v: eqn for eqn in flat.eqns for v in eqn.outvars}
        self._readers: dict[Any, list[Equation]] = {}
        for eqn in flat.eqns:
            for v in eqn.operands:
                self._readers.setdefault(v, []).append(eqn)
        outputs = set(jx.variables(flat.outvars))
        self._results = _in_place(flat, outputs) if in_loop else set(outputs)
        self._whole = outputs - self._results  # values that have to be arrays
        self._times: dict[Any, float] = {}  # how often kernels read each value
        self._look_back(outputs)
        # A loop's new carry that a product is added to is copied over the old one.
        self._copied: set[Any] = set()
        self._carried = outputs - self._results
        self._summed = self._summed_products()
        self._arrays: dict[Any, frozenset[Any]] = {}  # the arrays that each value is computed from
        self._read_bytes: dict[Any, int] = {}  # bytes that a kernel reads to compute a value
        self.nodes: list[Node] = []
        self._make_nodes()

    def peak(self) -> int:
        """The peak bytes of all arrays, besides arguments and results."""
        nodes = [self.nodes[number] for number in in_order(self.nodes, self._held)]
        steps = [(node.makes, node.reads, self._within(node.eqn)) for node in nodes]
        return jx.peak_bytes(steps, lambda array: self._held([array]))

    def moved(self, node: Node) -> tuple[int, int]:
        """The bytes that a node's kernel reads, also through fused values, and that it writes."""
        eqn = node.eqn
        written = sum(map(self._size, eqn.outvars))
        if eqn.name in _OVERWRITING:  # reads a part of the array, and writes it again
            part = jx.num_bytes(eqn.invars[2 if eqn.name.startswith("scatter") else 1].aval)
            return 2 * part, part
        read = sum(self._read_bytes.get(v, self._size(v)) for v in eqn.operands)
        return (min(read, 2 * written) if eqn.name in _PARTS else read), written

    def _size(self, v: Any) -> int:
        return jx.num_bytes(v.aval) // (self._num_devices if v in self._axes else 1)

    def _held(self, arrays: Iterable[Any]) -> int:
        """Bytes of arrays that don't belong to the caller."""
        return sum(
            self._size(v) * (2 if v in self._copied else 1)
            for v in arrays
            if v not in self._results
        )

    def _within(self, eqn: Equation) -> int:
        """Peak bytes within a loop, a conditional or a kernel, and of operands gathered for it."""
        if not jx.inner_jaxprs(eqn):
            costs = kernel_costs(eqn)  # such kernels run on one device only
            return costs.workspace(eqn) if costs else 0
        in_loop = eqn.name in ("scan", "while")
        most = max(
            GpuFunction(body, axes, self._num_devices, in_loop=in_loop).peak()
            for body, axes in sharded_axes_within(eqn, self._axes, self._num_devices)
        )
        return most + sum(jx.num_bytes(v.aval) for v in gathered_operands(eqn, self._axes))

    def _look_back(self, outputs: set[Any]) -> None:
        """Finds the values that have to be arrays, the results, and how often each is read."""
        for eqn in reversed(self._eqns):
            for v in eqn.outvars:
                readers = self._readers.get(v, [])
                if any(self._reads_array(reader, v) for reader in readers):
                    self._whole.add(v)
                times = sum(map(self._times_through, readers)) + (v in outputs)
                self._times[v] = max(1, times)
                if any(self._passes_on(r, v) and r.outvars[0] in self._results for r in readers):
                    self._results.add(v)

    def _reads_array(self, eqn: Equation, v: Any) -> bool:
        if eqn.name == primitives.BARRIER:
            return True
        if _renames(eqn):
            return eqn.outvars[0] in self._whole
        if eqn.name in _OVERWRITING:
            return v is eqn.invars[0]
        return computed_as(eqn) not in _FUSING

    def _times_through(self, eqn: Equation) -> float:
        """The number of times that an equation has its operand read; a fraction for a part."""
        if _renames(eqn):
            return self._times[eqn.outvars[0]]
        if eqn.name == "slice":
            return self._size(eqn.outvars[0]) / max(1, self._size(eqn.invars[0]))
        return 1

    def _passes_on(self, eqn: Equation, v: Any) -> bool:
        """Whether an equation's result has the memory of its operand `v`."""
        return _renames(eqn) or (
            eqn.name in _OVERWRITING and eqn.invars[0] is v and len(self._readers[v]) == 1
        )

    def _summed_products(self) -> set[Any]:
        """The products that are written into a sum; one product of each sum."""
        found: set[Any] = set()
        taken: set[Any] = set()
        for eqn in self._eqns:
            v = eqn.outvars[0] if computed_as(eqn) == "dot_general" else None
            while v is not None and len(readers := self._readers.get(v, ())) == 1:
                reader, out = readers[0], readers[0].outvars[0]
                if _renames(reader) and reader.name != primitives.BARRIER:
                    v = out
                    continue
                is_array = out in self._whole or out in self._results
                if reader.name in _SUMS and is_array and out not in taken:
                    found.add(eqn.outvars[0])
                    taken.add(out)
                    self._copied.update({out} & self._carried)
                break
        return found

    def _make_nodes(self) -> None:
        """Makes the nodes, and finds the arrays and bytes behind each fused value."""
        nothing: frozenset[Any] = frozenset()
        after: dict[Any, frozenset[int]] = {}  # the nodes that each value has to follow
        products = set(self._summed)  # also under other names
        for eqn in self._eqns:
            behind = nothing.union(*(self._behind(v) for v in eqn.operands))
            waits = jx.union(after, eqn.operands)
            makes, number, is_node = [], len(self.nodes), False
            for v in eqn.outvars:
                read = self._bytes_through(eqn, v)
                if _renames(eqn) and not products.isdisjoint(eqn.operands):
                    products.add(v)
                if _renames(eqn) or self._is_fused(eqn, v, read):
                    self._arrays[v], self._read_bytes[v], after[v] = behind, read, waits
                    continue
                is_node, after[v] = True, frozenset((number,))
                start = jx.overwritten(eqn, _OVERWRITING).get(v)
                if start is not None and len(self._readers.get(start, ())) == 1:
                    self._arrays[v], self._read_bytes[v] = self._behind(start), self._size(v)
                    continue
                makes.append(v)
            if is_node:
                arguments_only = eqn.name in _FUSED and not waits
                is_product = computed_as(eqn) == "dot_general"
                multiplies = is_product or not products.isdisjoint(eqn.operands)
                self.nodes.append(Node(eqn, behind, waits, makes, arguments_only, multiplies))

    def _behind(self, v: Any) -> frozenset[Any]:
        return self._arrays.get(v, frozenset((v,)))

    def _bytes_through(self, eqn: Equation, v: Any) -> int:
        """Bytes that a kernel reads to compute a value where it needs it."""
        read = sum(self._read_bytes.get(o, self._size(o)) for o in eqn.operands)
        if eqn.name in _SLOW:
            return read + _SLOW[eqn.name] * self._size(v)
        takes_part = eqn.name in primitives.LAYOUT and eqn.name != "broadcast_in_dim"
        return min(read, self._size(v)) if takes_part else read

    def _is_fused(self, eqn: Equation, v: Any, read: int) -> bool:
        if v in self._summed:
            return True
        if computed_as(eqn) not in _FUSED or v in self._whole or v in self._results:
            return False
        times, size = self._times[v], self._size(v)
        return size < _SMALL or times == 1 or times * read < read + size * (1 + times)


def computed_as(eqn: Equation) -> str:
    """The name of the operation that XLA computes an equation by.

    A product without a sum is elementwise, and one whose axes are all summed or common to both
    operands is a multiplication with a reduction.
    """
    if eqn.name != "dot_general":
        return eqn.name
    contracted, batch = eqn.params["dimension_numbers"]
    summed, common = len(contracted[0]), len(batch[0])
    ranks = {len(v.aval.shape) for v in eqn.invars[:2]}
    return "mul" if not summed else "reduce_sum" if ranks == {summed + common} else eqn.name


def _in_place(flat: FlatEquations, outputs: set[Any]) -> set[Any]:
    """The results of a loop's body that need no memory beside the loop's own."""
    made = {v: eqn for eqn in flat.eqns for v in eqn.outvars}
    simple: set[Any] = set(flat.invars)  # elementwise in what the loop passes in
    for eqn in flat.eqns:
        if (eqn.name in _FUSED or _renames(eqn)) and simple.issuperset(eqn.operands):
            simple.update(eqn.outvars)

    def is_in_place(v: Any) -> bool:
        if v in simple:
            return True
        eqn = made[v]
        if _renames(eqn):
            return is_in_place(eqn.invars[0])
        # A product is added to the carry itself.
        adds = eqn.name in _SUMS and not set(flat.invars).isdisjoint(eqn.operands)
        return adds or eqn.name in _OVERWRITING

    return {v for v in outputs if is_in_place(v)}


def _renames(eqn: Equation) -> bool:
    """Whether a result has its operand's bytes."""
    if eqn.name in _RENAMING:
        return True
    if eqn.name not in _SOMETIMES or jx.is_literal(eqn.invars[0]):
        return False
    own, made = eqn.invars[0].aval, eqn.outvars[0].aval
    return own.dtype == made.dtype and jx.num_elements(own) == jx.num_elements(made)
