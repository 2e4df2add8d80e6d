"""A stage bound to slabs: the places of its leaves, its backward, its residuals and its tiles.

A backward may reuse residuals saved by its forward: the stage is differentiated in two halves.

The forward saves the results of matrix products and attention kernels, which are the most expensive
to recompute per byte. The backward recomputes the elementwise operations between them.

Example: a stage with leaves `up` and `down` and the input `x`::

    h = x @ up       # a residual
    y = sin(h) @ down
    # forward(up, down, x)            -> [y], [h]
    # backward(up, down, x; h; dy)    -> d_up = x.T @ dh, d_down = sin(h).T @ dy, d_x = dh @ up.T
    #                                    with dh = cos(h) * (dy @ down.T): no h = x @ up

The pullback holds `up`, `down`, `x` and `h`. Only `h` is saved, because the backward takes the rest
as arguments. `Residuals.sources` maps each array in the pullback to one of these values.

If a stage's temporaries don't fit in memory, it computes its rows in tiles.

A kernel is traced whole, and equations that treat all rows alike are divided; see
`program/tiling/tiled.py`. Arguments and results don't change.

Example: the backward of a block with an MLP 4 times as wide as the model, in 16 tiles of a batch of
1 x 524,288 tokens. Its key consists of the whole kernel's key and the number of tiles::

    kernel = backward(bound, program, placement, 1)
    divided = in_tiles(kernel, 16)
    divided.key    # (kernel.key, 16)
    # Divisible(kernel).into(16) gives it, too, and Tiling(num_tiles=16, num_rows=32768)

If attention has more elements than cuDNN can index, it is computed for fewer heads at a time; see
`program/rewriting.py`.

Attention is split after tracing, because only then is its gradient an equation. A kernel keeps its
key, because its results stay the same. Example: the forward of a block of 1,048,576 tokens with 28
heads calls cuDNN twice.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.kernels.kernel import Kernel
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.effects import has_side_effects
from megatrain_jax._src.engine.program.flops import FlopsByKind, flops_by_kind, is_attention_forward
from megatrain_jax._src.engine.program.loss.gradients import differentiated
from megatrain_jax._src.engine.program.loss.stages import Stage
from megatrain_jax._src.engine.program.rewriting import in_pieces
from megatrain_jax._src.engine.program.tiling.flow import Flow, flow_of
from megatrain_jax._src.engine.program.tiling.tiled import Tiled, coarsest, tiled
from megatrain_jax._src.engine.state.layout import Layout

Keeps = Callable[..., bool]
"""A policy of `jax.checkpoint`: whether to save the results of a primitive."""

# Primitives that compute the scale of an array's float8 codes from the array.
_OF_SCALES = frozenset(
    """
    abs add and bitcast_convert_type convert_element_type is_finite max reduce_max reduce_min
    reduce_precision reshape select_n sub
    """.split()
)


def is_kept(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Whether a primitive's results are worth saving if there is memory for all of them.

    Products with batch axes are not: their results, such as attention scores, are large for the
    work in them. Complex results are not either, because `jax.checkpoint` applies
    `reduce_precision` to saved values, which does not support complex numbers.
    """
    if any(jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in avals):
        return False
    if primitive.name == "dot_general":
        return not params["dimension_numbers"][1][0]
    if is_attention_forward(primitive, params):
        return True
    return primitive.name in ("ragged_dot_general", "conv_general_dilated")


def _is_one_number(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Whether a result is the largest number of a whole array, as a float8 operand's scale is.

    It has four bytes, and to recompute it the array is read once more.
    """
    return primitive.name in ("reduce_max", "reduce_min") and len(params["axes"]) == avals[0].ndim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residuals:
    """The residuals of a stage: the values its forward saves, and their use in its backward.

    Attributes:
        traced: `(leaves, inputs) -> (outputs, all arrays in the pullback)`.
        num_outputs: Number of `traced`'s first outputs, which are the stage's outputs.
        pullback: Structure of the function that maps the outputs' cotangents to the cotangents of
            trainable leaves and active inputs.
        sources: For each array in the pullback, its position among the traced constants, leaves,
            inputs and residuals, in this order.
        avals: Shapes and dtypes of the residuals of one microbatch.
        saved: Floating-point operations per microbatch that the backward does not repeat.
        selective: Whether only the costliest results are saved.
    """

    traced: jx.Traced
    num_outputs: int
    pullback: Any
    sources: tuple[int, ...]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    saved: FlopsByKind
    selective: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the residuals of one microbatch."""
        return sum(map(jx.num_bytes, self.avals))

    def forward(self, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Computes outputs and residuals of leaves and inputs."""
        out = jx.evaluate(self.traced.jaxpr, [*self.traced.consts, *values])
        outputs, needed = out[: self.num_outputs], out[self.num_outputs :]
        # Smaller numbers are constants, leaves and inputs; the backward gets them anyway.
        first = len(self.traced.jaxpr.invars)
        # Sorted by number, the order in which `find_residuals` found them.
        kept = {s: x for s, x in zip(self.sources, needed, strict=True) if s >= first}
        return outputs, [kept[s] for s in sorted(kept)]

    def backward(
        self, values: Sequence[Any], residuals: Sequence[Any], cotangents: Sequence[Any]
    ) -> Any:
        """Computes the cotangents of trainable leaves and active inputs."""
        known = [*self.traced.consts, *values, *residuals]
        pull = jax.tree.unflatten(self.pullback, [known[s] for s in self.sources])
        return pull(list(cotangents))


def find_residuals(
    stage: Stage, keeps: Keeps = is_kept, selective: bool = False
) -> Residuals | None:
    """Traces a stage's two halves; None if it has no result worth saving, or has effects.

    An effect in both halves would fire twice.

    Args:
        stage: The stage.
        keeps: The policy that selects the results to save.
        selective: Whether the policy selects only the costliest results.
    """
    if has_side_effects(stage.jaxpr):
        return None

    def is_saved(eqn: Any) -> bool:
        return keeps(eqn.primitive, *(a.aval for a in eqn.invars), **eqn.params)

    saved = flops_by_kind(stage.jaxpr, is_saved)
    if not saved.total:
        return None
    first = len(stage.consts)
    shapes = [jx.shape_of(v.aval) for v in stage.jaxpr.invars[first:]]
    leaves, inputs = shapes[: len(stage.leaves)], shapes[len(stage.leaves) :]

    def policy(primitive: Any, *avals: Any, **params: Any) -> bool:
        return _is_one_number(primitive, *avals, **params) or keeps(primitive, *avals, **params)

    # The halves are compiled separately, so the compiler can't undo the recomputation anyway.
    keeping = functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)

    def halves(leaves, inputs):
        return differentiated(stage, stage.has_cotangent, leaves, inputs, wrap=keeping)

    traced = jx.trace(halves, leaves, inputs)
    outputs_tree, pullback = traced.out_tree.children()
    count = outputs_tree.num_leaves
    number: dict[Any, int] = {v: i for i, v in enumerate(traced.jaxpr.invars)}
    sources, avals = [], []
    for atom in map(_alike(traced.jaxpr), traced.jaxpr.outvars[count:]):
        # Arguments of the backward are not saved, and an array that appears twice is saved once.
        known = None if jx.is_literal(atom) else number.get(atom)
        if known is None:
            known = len(traced.jaxpr.invars) + len(avals)
            avals.append(jx.shape_of(atom.aval))
            if not jx.is_literal(atom):
                number[atom] = known
        sources.append(known)
    return Residuals(
        traced=traced,
        num_outputs=count,
        pullback=pullback,
        sources=tuple(sources),
        avals=tuple(avals),
        saved=saved,
        selective=selective,
    )


def _alike(jaxpr: Any) -> Callable[[Any], Any]:
    """A function that replaces the scale of an array by the first equal output.

    Each product with the same operand computes the operand's scale. The compiler only sees that
    these scales are equal if the backward gets one array.
    """
    numbers: dict[Any, Any] = {}
    known: dict[Any, Any] = {}
    first: dict[Any, Any] = {}

    def origin(atom: Any) -> Any:
        return str(atom) if jx.is_literal(atom) else known.get(atom, atom)

    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _OF_SCALES:
            operands = tuple(map(origin, eqn.invars))
            made = eqn.primitive.name, str(eqn.params), operands
            number = operands[0] if _is_saving(eqn) else numbers.setdefault(made, len(numbers))
            known[eqn.outvars[0]] = number

    def alike(atom: Any) -> Any:
        return first.setdefault(origin(atom), atom) if not atom.aval.shape else atom

    return alike


def _is_saving(eqn: Any) -> bool:
    """Whether an equation rounds a value to its own dtype, as `jax.checkpoint` does to save it."""
    if eqn.primitive.name != "reduce_precision":
        return False
    info = jnp.finfo(eqn.invars[0].aval.dtype)
    own = {"exponent_bits": info.nexp, "mantissa_bits": info.nmant}
    return eqn.params == own


# ---- tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """The tiles of a kernel.

    Attributes:
        num_tiles: Number of tiles, computed one after another.
        num_rows: Rows per tile along the divided axis, such as tokens.
    """

    num_tiles: int
    num_rows: int


class Divisible:
    """A kernel, traced once, that can be divided into different numbers of tiles."""

    def __init__(self, kernel: Kernel, traced: jx.Traced | None = None):
        """Takes a kernel, traced on the shapes that it takes; None traces it here."""
        self._kernel = kernel
        takes = kernel.takes or ()
        self._traced = jx.trace(kernel.build(), *takes) if traced is None else traced
        shardings = (x.sharding for x in jax.tree.leaves(takes))
        self._num_devices = max((sharding.num_devices for sharding in shardings), default=1)
        self._expected: dict[int, int] = {}

    @property
    def counts(self) -> Sequence[int]:
        """The numbers of tiles that are worth trying, ascending; empty if it can't be divided."""
        return self._coarsest.counts if self._coarsest else ()

    @functools.cached_property
    def _coarsest(self) -> Tiled | None:
        # A callback would get its values in pieces.
        if has_side_effects(self._traced.jaxpr):
            return None
        return coarsest(self._jaxpr, num_devices=self._num_devices, flow=self._flow)

    def expected_bytes(self, num_tiles: int | None) -> int:
        """Roughly the bytes that it needs in one of `counts`, or whole; found without a trace."""
        assert self._coarsest is not None
        if num_tiles is None:
            return self._flow.whole_bytes
        if num_tiles not in self._expected:
            self._expected[num_tiles] = self._coarsest.expected_bytes(num_tiles)
        return self._expected[num_tiles]

    @functools.cached_property
    def _jaxpr(self) -> Any:
        return jx.closed(self._traced.jaxpr)

    @functools.cached_property
    def _flow(self) -> Flow:
        return flow_of(self._jaxpr)

    def into(self, num_tiles: int) -> tuple[Kernel, Tiling] | None:
        """The kernel in `num_tiles` tiles; None if it can't be divided so."""
        if num_tiles in self.counts:
            assert self._coarsest is not None
            found = self._coarsest.into(num_tiles)
        else:
            found = tiled(self._jaxpr, num_tiles, num_devices=self._num_devices, flow=self._flow)
        if found is None:
            return None
        consts, out_tree = self._traced.consts, self._traced.out_tree

        def divided(*args: Any) -> Any:
            return jax.tree.unflatten(out_tree, found(*consts, *jax.tree.leaves(args)))

        key = self._kernel.key, num_tiles
        whole = self._kernel.key
        kernel = dataclasses.replace(self._kernel, key=key, whole=whole, build=lambda: divided)
        return kernel, Tiling(num_tiles=found.num_tiles, num_rows=found.rows_per_tile)


def in_tiles(kernel: Kernel, num_tiles: int) -> Kernel:
    """A kernel in tiles, or whole if it can't be divided so; it is traced when it is built.

    Kernels of one backward, for different microbatches, have one number of tiles, but perhaps not
    all of them can be divided into it.
    """

    def build() -> Callable[..., Any]:
        found = Divisible(kernel).into(num_tiles)
        return (found[0] if found else kernel).build()

    key = kernel.key, num_tiles
    return dataclasses.replace(kernel, key=key, whole=kernel.key, build=build)


def with_split_attention(kernel: Kernel, num_devices: int) -> Kernel:
    """The kernel with attention computed for as few heads at a time as cuDNN needs.

    Args:
        kernel: A kernel of a stage with wide attention.
        num_devices: Number of devices that divide its rows.
    """

    def build() -> Callable[..., Any]:
        return jx.rewritten(
            kernel.build(), lambda jaxpr, ins: in_pieces(jaxpr, (), ins, num_devices)
        )

    return dataclasses.replace(kernel, build=build)


# ---- bound stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of one leaf of a stage in the stage's slabs.

    Attributes:
        slab: Position of the slab in the stage's arguments.
        leaf: Position of the leaf in that slab's layout.
    """

    slab: int
    leaf: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Binding:
    """The places of a stage's leaves in the slabs of its groups.

    Example: an embedding of 10 x 4 is tied to the head. The head's stage has a norm, and reads the
    embedding after it. The norm's scale and bias are leaves 5 and 6 of the model and form group 3;
    the embedding is leaf 0, alone in group 0. The head's jaxpr reads leaves 5, 6 and 0, in this
    order, and the stage takes the masters of groups 3 and 0::

        layouts = (<shapes (4,), (4,)>, <shape (10, 4)>)
        slots = (Slot(slab=0, leaf=0), Slot(slab=0, leaf=1), Slot(slab=1, leaf=0))

    A binding has no group numbers, so that equal blocks have equal bindings.

    Attributes:
        layouts: Layout of each slab of masters that the stage takes.
        slots: Place of each leaf of the stage, in the jaxpr's order.
    """

    layouts: tuple[Layout, ...]
    slots: tuple[Slot, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardMode:
    """The mode of a stage's backward: its further arguments, and its results.

    Attributes:
        gradients: For each slab, the dtype of its gradient; None if the group is frozen.
        accumulate: For each slab, whether a gradient exists already and is added to.
        arriving: For each output, whether a cotangent arrives.
        existing: For each input, whether another stage has already sent a cotangent to it.
        give_outputs: Whether to return the outputs as well, because the stage has no forward.
        rounding: For each slab, "stochastic" or "nearest" if its gradient is stored in bfloat16,
            and so is an existing gradient; None if it is stored in the dtype in `gradients`.
        is_partial: Whether the results are sums in fp32 over some of a wave's microbatches, kept
            beside the stored gradients. An existing gradient is such a sum, too.
        completes: Whether such sums are added to the stored gradients, by a wave's last microbatch.
    """

    gradients: tuple[str | None, ...]
    accumulate: tuple[bool, ...]
    arriving: tuple[bool, ...]
    existing: tuple[bool, ...]
    give_outputs: bool
    rounding: tuple[str | None, ...]
    is_partial: bool = False
    completes: bool = False

    def of_microbatch(self, *, first: bool, last: bool) -> "BackwardMode":
        """The mode for one of a wave's microbatches, the first or the last of them or neither.

        Gradients that are stored in bfloat16 are read and rounded once per wave: by the last
        microbatch, which adds the gradients in fp32 that the earlier ones have made.
        """
        if not any(self.rounding) or (first and last):
            return self
        # With several microbatches, all gradients are sums.
        assert all(self.rounding[i] for i, dtype in enumerate(self.gradients) if dtype)
        if last:
            return dataclasses.replace(self, completes=True)
        adds = tuple(rounding is not None and not first for rounding in self.rounding)
        stored = (None,) * len(self.rounding)
        return dataclasses.replace(self, accumulate=adds, rounding=stored, is_partial=True)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class BoundStage:
    """A stage bound to the groups it reads.

    Attributes:
        stage: The stage.
        groups: Numbers of the groups that the stage reads.
        binding: Places of the stage's leaves in their slabs.
        mode: Mode of the stage's backward; None without a backward.
        sent: Ids of inputs with a cotangent from another stage already, in input order.
        residuals: Residuals that the forward can save; None if none are worth saving.
        tiles: The tiles of a kernel, by its name; kernels that are missing here are not tiled.
        selective: Only the costliest residuals; None if none stand out.
    """

    stage: Stage
    groups: tuple[int, ...]
    binding: Binding
    mode: BackwardMode | None
    sent: tuple[int, ...]
    residuals: Residuals | None
    tiles: Mapping[str, Tiling] = dataclasses.field(default_factory=dict)
    selective: Residuals | None = None

    def __repr__(self) -> str:
        """Returns the stage's name, groups and size: its jaxpr may be long."""
        stage = self.stage
        return (
            f"BoundStage({stage.name!r}, groups={self.groups}, {len(stage.jaxpr.eqns)} equations)"
        )

    @property
    def key(self) -> Hashable:
        """Key of the stage's forward, equal for bound stages that share a compiled function."""
        return self.stage.key, self.binding

    @functools.cached_property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """The positions of leaves, grouped by slab and dtype; each group is gathered together."""
        # Equations may take leaves of one slab in several dtypes, such as norms in fp32 and
        # matrices in bf16.
        rows: dict[Hashable, list[int]] = {}
        pairs = zip(self.binding.slots, self.stage.leaf_dtypes, strict=True)
        for i, (slot, dtype) in enumerate(pairs):
            rows.setdefault((slot.slab, dtype), []).append(i)
        return tuple(map(tuple, rows.values()))

    def share_bytes(self, positions: Sequence[int]) -> int:
        """Bytes of one device's share of some leaves, in the dtypes of the equations."""
        slots, dtypes = self.binding.slots, self.stage.leaf_dtypes
        return sum(
            self.binding.layouts[slots[i].slab].shares[slots[i].leaf] * dtypes[i].itemsize
            for i in positions
        )

    @property
    def trained(self) -> tuple[int, ...]:
        """Numbers of the groups that get gradients from this stage; none without a backward."""
        return _chosen(self.groups, self.mode and self.mode.gradients)

    @property
    def arriving(self) -> tuple[int, ...]:
        """Ids of the outputs with a cotangent that the backward takes."""
        return _chosen(self.stage.outputs, self.mode and self.mode.arriving)

    @property
    def accumulated(self) -> tuple[int, ...]:
        """Numbers of the groups with a gradient that the backward adds to."""
        return _chosen(self.groups, self.mode and self.mode.accumulate)

    @property
    def rounded(self) -> tuple[int, ...]:
        """Numbers of the groups with a gradient that the backward rounds to bfloat16."""
        return _chosen(self.groups, self.mode and self.mode.rounding)

    def of_microbatch(self, number: int, count: int) -> "BoundStage":
        """The stage with the mode for the backward of microbatch `number` of a wave's `count`."""
        mode = self.mode and self.mode.of_microbatch(first=number == 0, last=number == count - 1)
        return self if mode is self.mode else dataclasses.replace(self, mode=mode)

    @property
    def leaving(self) -> tuple[int, ...]:
        """Ids of the inputs that get a cotangent from the backward."""
        return _chosen(self.stage.inputs, self.stage.active)


def _chosen(numbers: Sequence[int], flags: Sequence[object] | None) -> tuple[int, ...]:
    """The numbers with a flag; none without flags."""
    return () if flags is None else tuple(n for n, f in zip(numbers, flags, strict=True) if f)
