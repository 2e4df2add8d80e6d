"""Stages and programs: the pure functions that a loss, or a prediction, is cut into.

Values have ids, which link stages: the first of two layers may have `inputs=(2,), outputs=(3,)` and
the second `inputs=(3,), outputs=(4,)`, with equal keys.

`Examples` are the values that have rows for each example of the batch; devices can divide these.

`StateUse` is the use of a model's untrained variables, such as batch statistics or random keys.

For state, a step with several microbatches is still one call: a moving average or a power iteration
advances once. Only keys and counters for random numbers advance with each microbatch.
"""

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.primitives import draws
from megatrain_jax._src.engine.program.rewriting import attention_shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examples:
    """The values along the batch: they depend on it, and their first axis spans examples.

    A first axis spans examples if its length is a multiple of their number: for 8 examples with 16
    tokens, shapes (8, 16, 64) and (128, 64) qualify, and so does a mask (16, 16) that depends on
    the batch. The division over devices affects only their communication, never results.

    Attributes:
        number: Number of examples in a microbatch.
        values: Ids of the values.
    """

    number: int
    values: frozenset[int]

    def along(self, aval: Any) -> bool:
        """Whether an array with this shape that depends on the batch has rows for examples."""
        # Decided by the shape alone. A mistake costs communication between devices, never a result.
        return bool(aval.shape) and not aval.shape[0] % self.number

    def num_bytes(self, avals: Iterable[Any], num_devices: int) -> int:
        """Bytes per device of arrays that depend on the batch."""
        return sum(jx.num_bytes(x) // (num_devices if self.along(x) else 1) for x in avals)

    def undivided(self) -> "Examples":
        """The same batch with nothing divided."""
        return dataclasses.replace(self, values=frozenset())


def find_examples(jaxpr: Any, batch: Sequence[Any], ids: Iterable[tuple[Any, int]]) -> Examples:
    """Finds the values along the batch of a flat traced loss.

    Args:
        jaxpr: The loss.
        batch: Its inputs that are arrays of the batch.
        ids: Variables of the jaxpr with the ids of their values.
    """
    of_batch = jx.dependent(jaxpr, batch)
    # All arrays of a batch have the same leading axis; this was checked before.
    number = max(batch[0].aval.shape[0], 1)  # 0 if a graph has no edges
    found = Examples(number=number, values=frozenset())
    values = frozenset(i for v, i in ids if v in of_batch and found.along(v.aval))
    return dataclasses.replace(found, values=values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateUse:
    """The use of a model's variables, with a flag for each variable, in order.

    A batch norm's running mean is only `of_batch`, a dropout's key counter only `drawn`.

    Attributes:
        of_batch: Whether the variable's new value depends on the batch.
        drawn: Whether random numbers are drawn from the variable: a key, or a counter of keys.
    """

    of_batch: tuple[bool, ...]
    drawn: tuple[bool, ...]


def find_state_use(jaxpr: Any, data: list[Any], num_variables: int) -> StateUse:
    """Finds out how a flat traced loss uses the model's variables.

    Args:
        jaxpr: The loss; its last outputs are the new variables.
        data: Inputs of the loss other than parameters: variables, then the batch, then a key.
        num_variables: Number of variables.
    """
    of_batch = jx.dependent(jaxpr, data[num_variables:-1])
    # Backwards from draws to their sources; forwards, a key's use would not be known yet.
    sources: set[Any] = set()  # integers and keys behind random numbers
    for eqn in reversed(jaxpr.eqns):
        is_draw = jx.contains(eqn, lambda e: draws(e.primitive.name))
        if is_draw or not sources.isdisjoint(eqn.outvars):
            # Keys are made from integers; a floating operand here is a probability or an
            # activation.
            sources.update(v for v in jx.variables(eqn.invars) if not jx.is_float(v.aval))
    new = jaxpr.outvars[len(jaxpr.outvars) - num_variables :]
    return StateUse(
        of_batch=tuple(not jx.is_literal(a) and a in of_batch for a in new),
        drawn=tuple(v in sources for v in data[:num_variables]),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage: `jaxpr(*consts, *leaves, *inputs) -> outputs`.

    Attributes:
        name: The stage's name: a block's path, "embedding", "head", "between k" or "model".
        jaxpr: The equations, as a function of constants, then leaves, then values.
        consts: Values of the constants.
        key: Template of the stage: equal for stages that compute the same.
        leaves: Indices of the leaves it reads, in the jaxpr's order.
        inputs: Ids of the values it takes, in the jaxpr's order.
        outputs: Ids of the values it returns, in the jaxpr's order.
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
    def attention_shapes(self) -> frozenset[tuple[int, ...]]:
        """The shapes of its queries, keys and values, if fused kernels compute its attention."""
        return attention_shapes(self.jaxpr)

    @property
    def leaf_dtypes(self) -> tuple[Any, ...]:
        """The dtype of each leaf, as the equations read it."""
        first = len(self.consts)
        return tuple(v.aval.dtype for v in self.jaxpr.invars[first : first + len(self.leaves)])

    @property
    def trainable_share(self) -> float:
        """The fraction of the stage's parameters that get gradients; 1 if it has no parameters."""
        first = len(self.consts)
        leaves = self.jaxpr.invars[first : first + len(self.leaves)]
        sizes = [jx.num_elements(v.aval) for v in leaves]
        # Elements stand for the operations of the products that use a leaf; most are proportional.
        trainable = sum(n for n, yes in zip(sizes, self.is_trainable, strict=True) if yes)
        return trainable / sum(sizes) if any(sizes) else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A loss cut into stages.

    Attributes:
        stages: The stages in forward order.
        prologue: `jaxpr(*consts, *data) -> values`, run once before the stages.
        prologue_consts: Values of the prologue's constants.
        prologue_values: Ids of the prologue's outputs.
        values: Shape and dtype of each value by id.
        outputs: Ids of the traced function's outputs: the loss and its metrics, or the arrays of a
            prediction, and then the variables' new values.
        examples: The values with rows for the batch's examples.
        state: How the model's variables are used.
        metrics: Names of the metrics, which follow the loss in `outputs`.
        rows: Structure of the arrays that a prediction returns; None for a loss.
        warnings: The parts that could not be cut, in words.
        shared: Leaves that belong to no block, though their path is in one, because further blocks
            read them.
        in_float8: Leaves with a product in float8.
    """

    stages: tuple[Stage, ...]
    prologue: Any
    prologue_consts: tuple[Any, ...]
    prologue_values: tuple[int, ...]
    values: tuple[jax.ShapeDtypeStruct, ...]
    outputs: tuple[int, ...]
    examples: Examples
    state: StateUse
    metrics: tuple[str, ...] = ()
    rows: Any = None
    warnings: tuple[str, ...]
    shared: frozenset[int] = frozenset()
    in_float8: frozenset[int] = frozenset()

    @property
    def results(self) -> tuple[int, ...]:
        """Ids of the outputs for the caller: all but the variables' new values."""
        return self.outputs[: len(self.outputs) - len(self.state.drawn)]

    @property
    def new_variables(self) -> tuple[int, ...]:
        """Ids of the variables' new values."""
        return self.outputs[len(self.results) :]

    def num_bytes(self, i: int, num_devices: int) -> int:
        """Bytes of a value on each device."""
        num_bytes = jx.num_bytes(self.values[i])
        return num_bytes // num_devices if i in self.examples.values else num_bytes

    def warning(self, text: str) -> "Program":
        """The same program with one more warning."""
        return dataclasses.replace(self, warnings=(*self.warnings, text))
