"""Stages and programs: the pure functions that a loss, or a prediction, is cut into.

Values have ids, which link stages: the first of two layers may have `inputs=(2,), outputs=(3,)` and
the second `inputs=(3,), outputs=(4,)`, with equal keys.
"""

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import jax

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.loss.examples import Examples
from megatrain_jax._src.engine.program.loss.variable_use import StateUse
from megatrain_jax._src.engine.program.oversized_attention import attention_shapes


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

    @functools.cached_property
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
