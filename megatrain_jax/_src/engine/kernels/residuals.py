"""A stage differentiated in two halves: its backward reuses residuals saved by its forward.

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
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.effects import has_side_effects
from megatrain_jax._src.engine.program.flops import FlopsByKind, flops_by_kind, is_attention_forward
from megatrain_jax._src.engine.program.loss.gradients import differentiated
from megatrain_jax._src.engine.program.loss.stages import Stage

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
