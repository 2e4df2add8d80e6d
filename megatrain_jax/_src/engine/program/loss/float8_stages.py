"""Stages with products in float8: chooses the products of a stage, and replaces them.

A product is chosen if one of its operands is laid out from parameters alone (a weight: cast,
transposed, sliced, joined, multiplied by a constant) and the second one depends on the batch. All
calls and loops in the stage are searched, except loops of unknown length and functions with
derivative rules of their own. The products of adapters (LoRA) stay as they are.

If the user names no parameters, the purpose of a product's result counts too, so equations are
searched from the loss backwards. A head is a product that no later product with a parameter depends
on. A router is a product with a result that a choice, such as a `top_k`, depends on before any
further product.

Example: a block `y = softmax(q k) v` with `q = x @ w.T`; x arrives from the block before::

    a = transpose w         laid out from w
    q = dot x a             float8: x varies, a is laid out from w, and the head depends on q
    s = dot q k             as it is: no weight

The traits of the values in a stage tell whether they are made of parameters alone, or of the batch.

Example: a stage reads the leaf `w`, and x from the stage before::

    a = transpose w     laid out from w
    b = rsqrt(sum a)    computed from parameters, not laid out
    q = dot x a         of the batch

The products of adapters in a stage (LoRA) are found by their equations and not by names.

An adapter adds a product with two trained factors to the product with a frozen matrix. The size
between the factors, the rank, is smaller than both of the outer sizes.

Example: a frozen matrix w of 4096 x 4096, and factors of rank 16::

    y = dot x w
    a = dot x A             # A is trained, 4096 x 16
    b = dot a B             # B is trained, 16 x 4096
    z = add y (mul b 2.0)   # so a and b are products of an adapter
"""

import dataclasses
import enum
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.common.trees import path_name
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.axes import has_explicit_sharding
from megatrain_jax._src.engine.program.float8 import ProductSpec, product
from megatrain_jax._src.engine.program.flops import is_product
from megatrain_jax._src.engine.program.layers.blocks import Leaf
from megatrain_jax._src.engine.program.loss.stages import Program, Stage
from megatrain_jax._src.engine.program.primitives import (
    BARRIER,
    CUSTOM_RULES,
    ELEMENTWISE,
    JOINING,
    LAYOUT,
)
from megatrain_jax._src.engine.program.structural_key import structural_key

_LAID_OUT = ELEMENTWISE | JOINING | LAYOUT | {"expand_dims", BARRIER}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperandTraits:
    """The traits of a value in a stage.

    Attributes:
        rearranged_from: The leaves that it is a rearrangement of, none for a constant; None for a
            value that is computed in any other way.
        of_batch: Whether it depends on the batch.
        varies: Whether it depends on a parameter.
        is_perturbed: Whether it depends on a trained parameter.
    """

    rearranged_from: frozenset[int] | None
    of_batch: bool
    varies: bool
    is_perturbed: bool

    @property
    def is_weight(self) -> bool:
        """Whether it is computed from parameters alone."""
        return self.varies and not self.of_batch


CONSTANT = OperandTraits(
    rearranged_from=frozenset(), of_batch=False, varies=False, is_perturbed=False
)


def leaf_traits(leaf: int, is_trainable: bool) -> OperandTraits:
    """The traits of a parameter.

    Args:
        leaf: Its number.
        is_trainable: Whether it gets a gradient.
    """
    return OperandTraits(
        rearranged_from=frozenset((leaf,)), of_batch=False, varies=True, is_perturbed=is_trainable
    )


def input_traits(varies: bool, is_perturbed: bool) -> OperandTraits:
    """The traits of a value that arrives at a stage; see `OperandTraits`."""
    return OperandTraits(
        rearranged_from=None, of_batch=True, varies=varies, is_perturbed=is_perturbed
    )


def traits_of(env: Mapping[Any, OperandTraits], atoms: Sequence[Any]) -> list[OperandTraits]:
    """The traits of operands."""
    return [CONSTANT if jx.is_literal(a) else env[a] for a in atoms]


def weight_sizes(eqn: Any, side: int) -> tuple[int, int]:
    """The two sides of a weight as a matrix: its contracted sizes, and its free ones."""
    contracted, batch = eqn.params["dimension_numbers"]
    shape = eqn.invars[side].aval.shape
    inner = math.prod(shape[axis] for axis in contracted[side])
    free = (n for axis, n in enumerate(shape) if axis not in (*contracted[side], *batch[side]))
    return inner, math.prod(free)


def traits_in(jaxpr: Any, inputs: Sequence[OperandTraits]) -> dict[Any, OperandTraits]:
    """The traits of all variables of an open jaxpr.

    Args:
        jaxpr: The jaxpr.
        inputs: Traits of its constants and inputs.
    """
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
    for eqn in jaxpr.eqns:
        ins = traits_of(env, eqn.invars)
        if jx.called(eqn) is not None:
            ((body, own),) = searched_bodies(eqn, ins)
            outs = traits_of(traits_in(body, own), body.outvars)
        else:
            origins = [t.rearranged_from for t in ins]
            rearranged_from = None
            # Without operands, it is a counter.
            if not ins or eqn.primitive.name in _LAID_OUT and None not in origins:
                rearranged_from = frozenset().union(*(o for o in origins if o is not None))
            outs = [_joined(ins, rearranged_from)] * len(eqn.outvars)
        env.update(zip(eqn.outvars, outs, strict=True))
    return env


def _joined(ins: Sequence[OperandTraits], rearranged_from: frozenset[int] | None) -> OperandTraits:
    """The traits of a value computed from values with these traits."""
    return OperandTraits(
        rearranged_from=rearranged_from,
        of_batch=any(t.of_batch for t in ins),
        varies=any(t.varies for t in ins),
        is_perturbed=any(t.is_perturbed for t in ins),
    )


Searched = tuple[Any, list[OperandTraits]]
"""An inner jaxpr, and the traits of its constants and inputs."""


def searched_bodies(eqn: Any, ins: Sequence[OperandTraits]) -> list[Searched]:
    """The inner jaxprs of an equation in which products may be replaced.

    Args:
        eqn: The equation.
        ins: Traits of its operands.
    """
    if (body := jx.called(eqn)) is not None:
        return [_with_consts(body, ins)]
    if eqn.primitive.name == "cond":
        return [_with_consts(body, ins[1:]) for body in jx.branches(eqn)]
    if eqn.primitive.name == "scan":
        consts, carry, xs = jx.scan_operands(eqn, ins)
        # Carried values may depend on all of the loop's inputs.
        carried = [_joined(ins, None)] * len(carry)
        return [_with_consts(jx.loop_body(eqn), [*consts, *carried, *xs])]
    return []


def ruled_bodies(eqn: Any, ins: Sequence[OperandTraits]) -> list[Searched]:
    """The inner jaxpr of a function with a derivative rule of its own; see `searched_bodies`."""
    body = jx.called(eqn, CUSTOM_RULES)
    return [] if body is None else [_with_consts(body, ins)]


def _with_consts(body: jx.Body, ins: Sequence[OperandTraits]) -> Searched:
    return body.jaxpr, [*[CONSTANT] * len(body.consts), *ins]


Numbers = frozenset[int]
"""Numbers of equations."""

_ADDING = frozenset(("add", "add_any", "sub"))
_SCALING = frozenset(("mul", "div"))
_KEEPING = LAYOUT | {"convert_element_type", "neg"}


def adapter_products(jaxpr: Any, env: Mapping[Any, OperandTraits]) -> Numbers:
    """The numbers of the equations of an open jaxpr that are products with an adapter's factors.

    Args:
        jaxpr: The jaxpr.
        env: Traits of its variables.
    """
    found, frozen = frozenset(), set()
    sizes: dict[int, tuple[int, int]] = {}  # of the matrices of trained products
    firsts: dict[int, Numbers] = {}  # by product: possible first products of its adapter
    terms: dict[Any, Numbers] = {}  # by variable: the products in its sum
    sources: dict[Any, Numbers] = {}  # by variable: the trained products before it
    for number, eqn in enumerate(jaxpr.eqns):
        ins, name = traits_of(env, eqn.invars), eqn.primitive.name
        summed = source = frozenset()
        if (side := _weight_side(eqn, ins)) is not None:
            summed = frozenset((number,))
            if ins[side].is_perturbed:
                rank, outputs = sizes[number] = weight_sizes(eqn, side)
                before = jx.union(sources, eqn.invars)
                firsts[number] = frozenset(n for n in before if sizes[n][0] > rank < outputs)
                source = summed
            else:
                frozen.add(number)
        elif name in ELEMENTWISE | LAYOUT:
            source = jx.union(sources, eqn.invars)
            is_scaled = name in _SCALING and sum(t.of_batch for t in ins) == 1
            if name in _ADDING | _KEEPING or is_scaled:
                summed = jx.union(terms, eqn.invars)
            if name in _ADDING and not frozen.isdisjoint(summed):
                seconds = [n for n in summed if firsts.get(n)]
                found = found.union(seconds, *(firsts[n] for n in seconds))
        for v in eqn.outvars:
            terms[v], sources[v] = summed, source
    return found


def _weight_side(eqn: Any, ins: list[OperandTraits]) -> int | None:
    """The side of a product with its parameter; None for equations without a parameter."""
    if eqn.primitive.name != "dot_general":
        return None
    sides = [side for side, t in enumerate(ins) if t.is_weight]
    return sides[0] if len(sides) == 1 and ins[1 - sides[0]].of_batch else None


# Narrower weights have few operations: routers, small heads.
_LEAST_WIDTH = 1024
# The same for the outputs of a weight beside a wide one with the same data, which is coded anyway:
# keys and values of few heads beside queries.
_LEAST_WIDTH_BESIDE = 512
# Least `1 / (1 / inputs + 1 / outputs)` of a weight with many rows of data. Operations per number
# to code are proportional to it, and below it coding takes the time that float8 saves: on an H100,
# two products with weights of 2,048 x 2,560 (1,138) took as long as in bfloat16, and longer with
# scales of rows. Outputs of all products with the same data count together: it is coded once.
_LEAST_SIZE = 1150
_CHOICES = {"argmax": 0, "argmin": 0, "top_k": 1, "approx_top_k": 1}
_NOT_ASKED = (None, jax.lax.Precision.DEFAULT)

# The products to replace in a jaxpr, by the number of their equation; for an equation with inner
# jaxprs, the products of each.
Chosen = Mapping[int, "ProductSpec | tuple[Chosen, ...]"]


class LaterUse(enum.Flag):
    """The later equations that depend on a value.

    Attributes:
        NONE: None of these.
        PRODUCT: A product with a parameter.
        CHOICE: A choice of positions, such as a `top_k`, with no product before it.
    """

    NONE = 0
    PRODUCT = enum.auto()
    CHOICE = enum.auto()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductChoice:
    """The rule that chooses products.

    Attributes:
        itemsize: Bytes of the compute dtype. Wider operands show that the model asks for more.
        named: Whether a weight is named by the user, given its path. None if the library chooses:
            then small weights, the first product with the batch itself, heads and routers stay.
    """

    itemsize: int
    named: Callable[[str], bool] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundProducts:
    """The result of a search.

    Attributes:
        chosen: The products to replace.
        uses: The uses of the jaxpr's constants and inputs.
        leaves: Numbers of the stage's leaves in chosen products.
    """

    chosen: Chosen
    uses: tuple[LaterUse, ...]
    leaves: frozenset[int]


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
    known: dict[Any, tuple[Any, Any, FoundProducts]] = {}
    uses: dict[int, LaterUse] = defaultdict(lambda: LaterUse.NONE)
    stages, reached = [], set()
    for stage in reversed(program.stages):
        named = tuple(is_named[i] for i in stage.leaves)
        varies = tuple(i not in of_batch for i in stage.inputs)
        after = tuple(uses[i] for i in stage.outputs)
        like = stage.key, named, stage.is_trainable, stage.active, varies, after
        if like not in known:
            known[like] = _replaced(stage, named, varies, after, choice)
        jaxpr, key, found = known[like]
        stages.append(dataclasses.replace(stage, jaxpr=jaxpr, key=key))
        reached.update(stage.leaves[i] for i in found.leaves)
        of_inputs = found.uses[len(found.uses) - len(stage.inputs) :]
        for i, use in zip(stage.inputs, of_inputs, strict=True):
            uses[i] |= use
    return dataclasses.replace(program, stages=tuple(stages[::-1]), in_float8=frozenset(reached))


def _replaced(
    stage: Stage,
    named: Sequence[bool],
    varies: Sequence[bool],
    after: Sequence[LaterUse],
    choice: ProductChoice,
) -> tuple[Any, Any, FoundProducts]:
    """The jaxpr and the key of a stage with float8 products, and the search's result."""
    inputs = [
        *[CONSTANT] * len(stage.consts),
        *(leaf_traits(i, trains) for i, trains in enumerate(stage.is_trainable)),
        *map(input_traits, varies, stage.active),
    ]
    found = ProductSearch(choice, named).search(stage.jaxpr, inputs, after)
    if not found.chosen:
        return stage.jaxpr, stage.key, found
    jaxpr = replaced(stage.jaxpr, found.chosen)
    perturbed = [t.is_perturbed for t in inputs[len(stage.consts) :]]
    return jaxpr, structural_key(jaxpr, stage.consts, perturbed), found


class ProductSearch:
    """Searches jaxprs for products to replace."""

    def __init__(self, choice: ProductChoice, named: Sequence[bool]):
        self._choice, self._named = choice, named

    def search(
        self, jaxpr: Any, inputs: Sequence[OperandTraits], after: Sequence[LaterUse]
    ) -> FoundProducts:
        """The products of a jaxpr to replace.

        Args:
            jaxpr: An open jaxpr.
            inputs: Traits of its constants and inputs.
            after: Uses of its results.
        """
        env = traits_in(jaxpr, inputs)
        forms = self._forms(jaxpr, env)
        uses: dict[Any, LaterUse] = defaultdict(lambda: LaterUse.NONE)
        read = jx.num_readers(jaxpr)

        def note(atoms: Sequence[Any], found: Sequence[LaterUse]) -> None:
            for atom, use in zip(atoms, found, strict=True):
                if not jx.is_literal(atom):
                    uses[atom] |= use

        note(jaxpr.outvars, after)
        chosen: dict[int, Any] = {}
        leaves: frozenset[int] = frozenset()
        for number, eqn in reversed(list(enumerate(jaxpr.eqns))):
            ins = traits_of(env, eqn.invars)
            results = [uses[v] for v in eqn.outvars]
            inner = self._inner(eqn, ins, results)
            may_be_coded = self._choice.named is not None or results[0] == LaterUse.PRODUCT
            if number in forms and may_be_coded:
                chosen[number] = forms[number]
                leaves |= ins[0].rearranged_from or ins[1].rearranged_from or frozenset()
            elif any(found.chosen for found in inner):
                chosen[number] = tuple(found.chosen for found in inner)
                leaves = leaves.union(*(found.leaves for found in inner))
            note(eqn.invars, _uses_of_operands(eqn, ins, results, inner, read))
        own = tuple(uses[v] for v in (*jaxpr.constvars, *jaxpr.invars))
        return FoundProducts(chosen=chosen, uses=own, leaves=leaves)

    def _inner(
        self, eqn: Any, ins: Sequence[OperandTraits], results: Sequence[LaterUse]
    ) -> list[FoundProducts]:
        """The products of an equation's inner jaxprs that are searched."""
        found: list[FoundProducts] = []
        for body, own in ruled_bodies(eqn, ins):
            # Its rule says how its products are computed, so only the uses matter.
            searched = self.search(body, own, results)
            found.append(dataclasses.replace(searched, chosen={}, leaves=frozenset()))
        for body, own in searched_bodies(eqn, ins):
            if eqn.primitive.name != "scan":
                found.append(self.search(body, own, results))
                continue
            # A carried value is also used in the next turn.
            consts, carry = jx.scan_parts(eqn)
            first = len(own) - len(ins) + consts
            after, turn = list(results), None
            while turn is None or after != turn:
                turn = list(after)
                searched = self.search(body, own, turn)
                carried = searched.uses[first : first + carry]
                after = [*map(LaterUse.__or__, turn[:carry], carried), *turn[carry:]]
                found = [searched]
        return found

    def _forms(self, jaxpr: Any, env: Mapping[Any, OperandTraits]) -> dict[int, ProductSpec]:
        """The forms of a jaxpr's products that could be in float8, but for their results' uses."""
        forms, groups, of_adapters = {}, {}, adapter_products(jaxpr, env)
        origin: dict[Any, Any] = {}  # the same numbers in other shapes and dtypes
        for number, eqn in enumerate(jaxpr.eqns):
            if eqn.primitive.name in LAYOUT | {"convert_element_type"} and len(eqn.invars) == 1:
                (operand,) = eqn.invars
                if not jx.is_literal(operand):
                    origin[eqn.outvars[0]] = origin.get(operand, operand)
            ins = traits_of(env, eqn.invars)
            side = self._weight_side(eqn, ins)
            if side is not None and number not in of_adapters:
                forms[number] = ProductSpec.of(eqn, (ins[0].is_perturbed, ins[1].is_perturbed))
                data = eqn.invars[1 - side]
                groups.setdefault(origin.get(data, data), {})[number] = weight_sizes(eqn, side)
        if self._choice.named is None:
            for widths in groups.values():
                outputs = [outputs for _, outputs in widths.values()]
                total = sum(outputs) if max(outputs) >= _LEAST_WIDTH else 0
                for number, (inputs, _) in widths.items():
                    if inputs * total < _LEAST_SIZE * (inputs + total):
                        del forms[number]
        return forms

    def _weight_side(self, eqn: Any, ins: Sequence[OperandTraits]) -> int | None:
        """The weight's side of a product that could be in float8; None for other equations."""
        if eqn.primitive.name != "dot_general" or not self._is_narrow(eqn):
            return None
        side = next((side for side in (0, 1) if ins[side].rearranged_from), None)
        # The second operand is no rearrangement, not even of a constant.
        if side is None or ins[1 - side].rearranged_from is not None:
            return None
        if not all(self._named[i] for i in ins[side].rearranged_from or ()):
            return None
        if self._choice.named is None:
            inputs, outputs = weight_sizes(eqn, side)
            is_wide = inputs >= _LEAST_WIDTH and outputs >= _LEAST_WIDTH_BESIDE
            if not is_wide or not ins[1 - side].varies:
                return None
        return side

    def _is_narrow(self, eqn: Any) -> bool:
        """Whether a product has operands of the compute dtype or narrower, and real numbers."""
        asked = eqn.params["precision"]
        asked = asked if isinstance(asked, tuple) else (asked,)
        avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
        return (
            all(any(one is other for other in _NOT_ASKED) for one in asked)
            and not has_explicit_sharding(eqn, "out_sharding")
            and all(jnp.issubdtype(aval.dtype, jnp.floating) and aval.size for aval in avals)
            and all(aval.dtype.itemsize <= 4 for aval in avals)
            and all(aval.dtype.itemsize <= self._choice.itemsize for aval in avals[:2])
        )


def _uses_of_operands(
    eqn: Any,
    ins: Sequence[OperandTraits],
    results: Sequence[LaterUse],
    inner: Sequence[FoundProducts],
    read: Collection[Any],
) -> list[LaterUse]:
    """The uses of an equation's operands.

    Args:
        eqn: The equation.
        ins: Traits of its operands.
        results: Uses of its results.
        inner: Its inner jaxprs, searched.
        read: The variables that are read later.
    """
    name = eqn.primitive.name
    if inner:
        # From the uses of the inner jaxprs' inputs; a `cond`'s first operand is not among them.
        count = len(eqn.invars) - (name == "cond")
        rows = [found.uses[len(found.uses) - count :] for found in inner]
        uses = [functools.reduce(LaterUse.__or__, row) for row in zip(*rows, strict=True)]
        return uses if count == len(eqn.invars) else [LaterUse.NONE, *uses]
    use = functools.reduce(LaterUse.__or__, results, LaterUse.NONE)
    if is_product(eqn):
        with_weight = any(t.is_weight for t in ins) and any(t.of_batch for t in ins)
        use = LaterUse.PRODUCT if with_weight else use & LaterUse.PRODUCT
    elif name in _CHOICES or name == "sort":
        # The sorted numbers alone are no choice, only their positions.
        positions = eqn.outvars[_CHOICES.get(name, 1) :]
        use |= LaterUse.CHOICE if any(v in read for v in positions) else LaterUse.NONE
    elif any(t.is_weight for t in ins) and jx.contains(eqn, is_product):
        use |= LaterUse.PRODUCT
    return [use] * len(ins)


def replaced(jaxpr: Any, chosen: Chosen) -> Any:
    """An open jaxpr with the chosen products in float8."""
    eqns = list(jaxpr.eqns)
    for number, found in chosen.items():
        eqn = eqns[number]
        if isinstance(found, ProductSpec):
            shapes = [jx.shape_of(a.aval) for a in eqn.invars]
            with eqn.ctx.manager:
                (call,) = jx.trace(functools.partial(product, found), *shapes).jaxpr.eqns
            eqns[number] = call.replace(invars=eqn.invars, outvars=eqn.outvars)
        else:
            eqns[number] = jx.with_bodies(eqn, lambda n, body, own=found: replaced(body, own[n]))
    return jaxpr.replace(eqns=eqns)
