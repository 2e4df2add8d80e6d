"""Stages with products in float8: chooses the products of a stage, and replaces them.

A product is chosen if one of its operands is laid out from parameters alone (a weight: cast,
transposed, sliced, joined, multiplied by a constant) and the second one depends on the batch. All
calls and loops in the stage are searched, except loops of unknown length and functions with
derivative rules of their own.

Example: a block `y = softmax(q k) v` with `q = x @ w.T`; x arrives from the block before::

    a = transpose w         laid out from w
    q = dot x a             float8: x varies, a is laid out from w
    s = dot q k             as it is: no weight
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.common.model_path import path_name
from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.axis_rules import is_placed
from megatrain_jax._src.program.float8 import Form, product
from megatrain_jax._src.program.layers.blocks import Leaf
from megatrain_jax._src.program.loss.stages import Program, Stage
from megatrain_jax._src.program.primitives import BARRIER, ELEMENTWISE, LAYOUT
from megatrain_jax._src.program.structural_key import structural_key

# Below this width of a weight on either side, float8 saves less time than its codes take. Routers,
# adapters' factors and small heads are narrower.
_LEAST_WIDTH = 1024
_LAID_OUT = ELEMENTWISE | LAYOUT | {"concatenate", "expand_dims", BARRIER}
_NOT_ASKED = (None, jax.lax.Precision.DEFAULT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperandTraits:
    """The traits of a value in a stage.

    Attributes:
        laid_from: The leaves that it is laid out from, none for a constant; None for a value
            that is computed otherwise.
        varies: Whether it depends on a parameter.
        is_perturbed: Whether it depends on a trained parameter.
    """

    laid_from: frozenset[int] | None
    varies: bool
    is_perturbed: bool


_CONSTANT = OperandTraits(laid_from=frozenset(), varies=False, is_perturbed=False)

# The products to replace in a jaxpr, by the number of their equation; for an equation with inner
# jaxprs, the products of each.
Chosen = Mapping[int, "Form | tuple[Chosen, ...]"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductChoice:
    """The rule that chooses products.

    Attributes:
        itemsize: Bytes of the compute dtype. Wider operands show that the model asks for more.
        named: Whether a weight is named by the user, given its path. None if the library chooses:
            then narrow weights, the first product with the batch itself and the last product stay.
    """

    itemsize: int
    named: Callable[[str], bool] | None


def with_float8_products(
    program: Program, leaves: Sequence[Leaf], choice: ProductChoice
) -> Program:
    """The same program with products of its stages in float8.

    Args:
        program: The program.
        leaves: Leaves of the model.
        choice: The rule that chooses products.
    """
    is_named = [choice.named is None or choice.named(path_name(leaf.path)) for leaf in leaves]
    of_batch = frozenset(program.prologue_values)
    known: dict[Any, tuple[Any, Any]] = {}
    stages = []
    for number, stage in enumerate(program.stages):
        is_last = number == len(program.stages) - 1
        named = tuple(is_named[i] for i in stage.leaves)
        varies = tuple(i not in of_batch for i in stage.inputs)
        like = stage.key, named, stage.is_trainable, stage.active, varies, is_last
        if like not in known:
            known[like] = _replaced(stage, named, varies, is_last, choice)
        jaxpr, key = known[like]
        stages.append(dataclasses.replace(stage, jaxpr=jaxpr, key=key))
    return dataclasses.replace(program, stages=tuple(stages))


def _replaced(
    stage: Stage,
    named: Sequence[bool],
    varies: Sequence[bool],
    is_last: bool,
    choice: ProductChoice,
) -> tuple[Any, Any]:
    """The jaxpr and the key of a stage with float8 products."""
    inputs = [
        *[_CONSTANT] * len(stage.consts),
        *(
            OperandTraits(laid_from=frozenset((i,)), varies=True, is_perturbed=trains)
            for i, trains in enumerate(stage.is_trainable)
        ),
        *(
            OperandTraits(laid_from=None, varies=v, is_perturbed=active)
            for v, active in zip(varies, stage.active, strict=True)
        ),
    ]
    search = _ProductSearch(choice, named)
    chosen, _ = search.choose(stage.jaxpr, inputs, is_last and choice.named is None)
    if not chosen:
        return stage.jaxpr, stage.key
    jaxpr = replaced(stage.jaxpr, chosen)
    perturbed = [t.is_perturbed for t in inputs[len(stage.consts) :]]
    return jaxpr, structural_key(jaxpr, stage.consts, perturbed)


class _ProductSearch:
    """Searches jaxprs for products to replace."""

    def __init__(self, choice: ProductChoice, named: Sequence[bool]):
        self._choice, self._named = choice, named

    def choose(
        self, jaxpr: Any, inputs: Sequence[OperandTraits], is_last: bool
    ) -> tuple[Chosen, list[OperandTraits]]:
        """The chosen products of a jaxpr, and the traits of its results.

        Args:
            jaxpr: An open jaxpr.
            inputs: Traits of its constants and inputs.
            is_last: Whether no product follows the jaxpr. Its own last products then are a head
                and stay.
        """
        found, inner = {}, {}
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
        for number, eqn in enumerate(jaxpr.eqns):
            ins = [_CONSTANT if jx.is_literal(a) else env[a] for a in eqn.invars]
            outs = [_of_result(eqn, ins)] * len(eqn.outvars)
            if (form := self._form(eqn, ins)) is not None:
                found[number] = form
            elif bodies := _bodies(eqn, ins):
                searched = [self.choose(*body, is_last=False) for body in bodies]
                if any(parts := tuple(own for own, _ in searched)):
                    found[number], inner[number] = parts, bodies
                if jx.called(eqn) is not None:
                    outs = searched[0][1]
            env.update(zip(eqn.outvars, outs, strict=True))
        if is_last:
            for number in _ends(jaxpr, found):
                del found[number]
                # After a loop's last product come the products of its next turn.
                if number in inner and jaxpr.eqns[number].primitive.name != "scan":
                    parts = tuple(self.choose(*body, is_last=True)[0] for body in inner[number])
                    found.update({number: parts} if any(parts) else {})
        return found, [_CONSTANT if jx.is_literal(a) else env[a] for a in jaxpr.outvars]

    def _form(self, eqn: Any, ins: Sequence[OperandTraits]) -> Form | None:
        """The form of an equation that is a product to replace."""
        if eqn.primitive.name != "dot_general" or not self._is_narrow(eqn):
            return None
        weights = [side for side in (0, 1) if ins[side].laid_from]
        if len(weights) != 1 or ins[1 - weights[0]].laid_from is not None:
            return None
        (side,) = weights
        if not all(self._named[i] for i in ins[side].laid_from or ()):
            return None
        if self._choice.named is None:
            if min(_widths(eqn, side)) < _LEAST_WIDTH or not ins[1 - side].varies:
                return None
        return Form.of(eqn, (ins[0].is_perturbed, ins[1].is_perturbed))

    def _is_narrow(self, eqn: Any) -> bool:
        """Whether a product has operands of the compute dtype or narrower, and real numbers."""
        asked = eqn.params["precision"]
        asked = asked if isinstance(asked, tuple) else (asked,)
        avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
        return (
            all(any(one is other for other in _NOT_ASKED) for one in asked)
            and not is_placed(eqn, "out_sharding")
            and all(jnp.issubdtype(aval.dtype, jnp.floating) and aval.size for aval in avals)
            and all(aval.dtype.itemsize <= 4 for aval in avals)
            and all(aval.dtype.itemsize <= self._choice.itemsize for aval in avals[:2])
        )


def _widths(eqn: Any, side: int) -> tuple[int, int]:
    """The two sides of a weight as a matrix: its contracted sizes, and its free ones."""
    contracted, batch = eqn.params["dimension_numbers"]
    shape = eqn.invars[side].aval.shape
    inner = math.prod(shape[axis] for axis in contracted[side])
    free = (n for axis, n in enumerate(shape) if axis not in (*contracted[side], *batch[side]))
    return inner, math.prod(free)


def _of_result(eqn: Any, ins: Sequence[OperandTraits]) -> OperandTraits:
    """The traits of an equation's results."""
    origins = [t.laid_from for t in ins]
    laid_from = None
    if ins and eqn.primitive.name in _LAID_OUT and None not in origins:
        laid_from = frozenset().union(*(o for o in origins if o is not None))
    elif not ins:
        laid_from = frozenset()  # a counter
    return OperandTraits(
        laid_from=laid_from,
        varies=any(t.varies for t in ins),
        is_perturbed=any(t.is_perturbed for t in ins),
    )


def _bodies(eqn: Any, ins: Sequence[OperandTraits]) -> list[tuple[Any, Sequence[OperandTraits]]]:
    """The inner jaxprs of an equation that are searched, with the traits of their inputs."""
    name = eqn.primitive.name

    def with_consts(body: jx.Body, ins: Sequence[OperandTraits]) -> tuple[Any, list[OperandTraits]]:
        return body.jaxpr, [*[_CONSTANT] * len(body.consts), *ins]

    if (body := jx.called(eqn)) is not None:
        return [with_consts(body, ins)]
    if name == "cond":
        return [with_consts(body, ins[1:]) for body in jx.branches(eqn)]
    if name == "scan":
        consts, carry = jx.scan_parts(eqn)
        # Carried values may depend on all of the loop's inputs.
        carried = OperandTraits(
            laid_from=None,
            varies=any(t.varies for t in ins),
            is_perturbed=any(t.is_perturbed for t in ins),
        )
        own = [*ins[:consts], *[carried] * carry, *ins[consts + carry :]]
        return [with_consts(jx.loop_body(eqn), own)]
    return []


def _ends(jaxpr: Any, found: Chosen) -> list[int]:
    """The equations with chosen products that no later equation with one depends on."""
    ends = []
    for number in found:
        after = jx.dependent(jaxpr, jaxpr.eqns[number].outvars)
        later = (jaxpr.eqns[n] for n in found if n > number)
        if all(after.isdisjoint(jx.variables(eqn.invars)) for eqn in later):
            ends.append(number)
    return ends


def replaced(jaxpr: Any, chosen: Chosen) -> Any:
    """An open jaxpr with the chosen products in float8."""
    eqns = [
        _replaced_eqn(eqn, chosen[number]) if number in chosen else eqn
        for number, eqn in enumerate(jaxpr.eqns)
    ]
    return jaxpr.replace(eqns=eqns)


def _replaced_eqn(eqn: Any, chosen: Form | tuple[Chosen, ...]) -> Any:
    if isinstance(chosen, Form):
        shapes = [jx.shape_of(a.aval) for a in eqn.invars]
        with eqn.ctx.manager:
            traced = jx.trace(lambda left, right: product(chosen, left, right), *shapes)
        (call,) = traced.jaxpr.eqns
        return call.replace(invars=eqn.invars, outvars=eqn.outvars)
    bodies = chosen
    return jx.with_bodies(eqn, lambda number, body: replaced(body, bodies[number]))
