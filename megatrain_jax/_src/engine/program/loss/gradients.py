"""The pullback of a stage, and the check that parameters get gradients at all.

Example: a layer `tanh(x @ w)` with w trained and x active. `differentiated` returns `[y]` and
`pull([dy]) -> ([dw], [dx])`. With w frozen, `pull([dy]) -> ([], [dx])`: unneeded cotangents are not
computed. Behind a `stop_gradient` dw does not depend on dy, so w gets no gradient.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from megatrain_jax._src.common.remembering import remembered
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program import rewriting
from megatrain_jax._src.engine.program.effects import has_read_callback, has_side_effects
from megatrain_jax._src.engine.program.layers.blocks import Leaf
from megatrain_jax._src.engine.program.loss.partition import MAIN, Dataflow
from megatrain_jax._src.engine.program.loss.stages import Program, Stage

_SHOWN = 6
# Number of traces to keep for reuse: a model has some templates, and plans cut them several times.
_MOST_PULLBACKS = 64


def differentiated(
    stage: Stage,
    arriving: Sequence[bool],
    leaves: Sequence[Any],
    inputs: Sequence[Any],
    wrap: Callable[[Callable], Callable] = lambda run: run,
) -> tuple[list[Any], Callable[[list[Any]], tuple[list[Any], list[Any]]]]:
    """Computes a stage, and its pullback from output cotangents to leaf and input cotangents.

    Args:
        stage: Stage to differentiate.
        arriving: For each output, whether a cotangent arrives.
        leaves: Values of its leaves.
        inputs: Values of its inputs.
        wrap: Applied to the function of trainable leaves and active inputs before it is
            differentiated.

    Returns:
        The outputs, and the function from the arriving cotangents to the cotangents of the
        trainable leaves and of the active inputs.
    """
    trainable, frozen = jx.split(stage.is_trainable, leaves)
    active, passive = jx.split(stage.active, inputs)
    invars = stage.jaxpr.invars[len(stage.consts) :]

    def run(trainable, active):
        leaves = jx.merge(stage.is_trainable, trainable, frozen)
        values = [*stage.consts, *leaves, *jx.merge(stage.active, active, passive)]
        leaf_vars, input_vars = invars[: len(leaves)], invars[len(leaves) :]
        own = *jx.split(stage.is_trainable, leaf_vars)[0], *jx.split(stage.active, input_vars)[0]
        outputs = rewriting.evaluate_for_derivatives(stage.jaxpr, values, own)
        # Outputs without a cotangent are returned as auxiliary values, so no zeros are made for
        # them.
        return [o for o, a in zip(outputs, arriving, strict=True) if a], outputs

    # Frozen and passive values are closed over instead of passed: JAX then computes no cotangent
    # for them, and saves nothing for one.
    _, pull, outputs = jax.vjp(wrap(run), trainable, active, has_aux=True)
    return outputs, pull


def refuse_no_gradient(program: Program, leaves: Sequence[Leaf]) -> str | None:
    """Finds trained parameters with gradients that are zero by construction.

    Args:
        program: The cut loss.
        leaves: Leaves of the model.

    Returns:
        A warning that names them; None if there are none.

    Raises:
        ValueError: All trained parameters have zero gradients.
    """
    reached = {leaves[i].parameter for i in _reached_leaves(program)}
    trainable = {leaf.parameter: leaf.path for leaf in leaves if leaf.is_trainable}
    if not reached:
        raise ValueError(
            f"the loss that loss_fn returns has no gradient: it depends on the {len(trainable)} "
            "trained parameters only through operations without a derivative, such as "
            "jax.lax.stop_gradient, integers (a cast, argmax) or comparisons, so that training "
            "would change nothing. Compute it from values that keep their derivative, or train "
            "different ones with `trainable`"
        )
    names = ["/".join(map(str, path)) for p, path in trainable.items() if p not in reached]
    if not names:
        return None
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return (
        f"no gradient reaches {len(names)} of the {len(trainable)} trained parameters, because the "
        "loss does not depend on them, or only through operations without a derivative "
        f"(jax.lax.stop_gradient, integers): {shown}. The optimizer updates them with zeros; "
        "`trainable` can leave them out"
    )


def _reached_leaves(program: Program) -> frozenset[int]:
    """Finds the leaves that a cotangent of the loss reaches, from the last stage back."""
    with_cotangent = {program.outputs[0]}
    found: set[int] = set()
    known: dict[Hashable, tuple[list[bool], list[bool]]] = {}
    for stage in reversed(program.stages):
        pairs = zip(stage.outputs, stage.has_cotangent, strict=True)
        arriving = tuple(o in with_cotangent and yes for o, yes in pairs)
        # No cotangent reaches this stage, so none leaves it.
        if not any(arriving):
            continue
        # Like stages are differentiated once: 36 layers cost one trace if the same cotangents
        # arrive.
        like = stage.key, stage.is_trainable, stage.active, arriving
        if like not in known:
            known[like] = _reached(stage, arriving)
        of_leaves, of_inputs = known[like]
        trainable, _ = jx.split(stage.is_trainable, stage.leaves)
        active, _ = jx.split(stage.active, stage.inputs)
        found.update(i for i, reached in zip(trainable, of_leaves, strict=True) if reached)
        with_cotangent.update(i for i, reached in zip(active, of_inputs, strict=True) if reached)
    return frozenset(found)


def leaves_read(stage: Stage, arriving: Sequence[bool], give_outputs: bool) -> tuple[bool, ...]:
    """Whether a stage's backward needs each leaf's values.

    For example, an embedding's gradient does not depend on the embedding.

    Args:
        stage: The stage.
        arriving: For each output, whether a cotangent arrives.
        give_outputs: Whether the backward computes the outputs too.
    """
    traced = traced_pullback(stage, arriving, give_outputs)
    # Constants and cotangents are the first inputs of the trace; leaves follow.
    used = jx.used_inputs(traced)[len(traced.consts) + sum(arriving) :]
    return tuple(used[: len(stage.leaves)])


def _reached(stage: Stage, arriving: Sequence[bool]) -> tuple[list[bool], list[bool]]:
    """Whether an arriving cotangent reaches the trainable leaves and the active inputs.

    A pullback is linear, so a result that does not depend on its arguments is zero.
    """
    traced = traced_pullback(stage, arriving, give_outputs=False)
    first = len(traced.consts)
    depends = jx.dependent(traced.jaxpr, traced.jaxpr.invars[first : first + sum(arriving)])
    flags = [not jx.is_literal(a) and a in depends for a in traced.jaxpr.outvars]
    return flags[: sum(stage.is_trainable)], flags[sum(stage.is_trainable) :]


def pullback(stage: Stage, arriving: Sequence[bool], give_outputs: bool) -> Callable:
    """A stage's backward, `(cotangents, leaves, inputs) -> (of leaves, of inputs, outputs)`."""

    def pulled(cotangents, leaves, inputs):
        outputs, pull = differentiated(stage, arriving, leaves, inputs)
        return *pull(list(cotangents)), outputs if give_outputs else []

    return pulled


def traced_pullback(stage: Stage, arriving: Sequence[bool], give_outputs: bool) -> jx.Traced:
    """A stage's `pullback`, traced."""
    shapes = [jx.shape_of(v.aval) for v in stage.jaxpr.invars[len(stage.consts) :]]
    leaves, inputs = shapes[: len(stage.leaves)], shapes[len(stage.leaves) :]
    cotangents, _ = jx.split(arriving, [jx.shape_of(a.aval) for a in stage.jaxpr.outvars])
    like = stage.key, stage.is_trainable, stage.active, tuple(arriving), give_outputs
    return remembered(
        "pullbacks",
        lambda: like,
        lambda: jx.trace(pullback(stage, arriving, give_outputs), cotangents, leaves, inputs),
        _MOST_PULLBACKS,
    )


def refuse_read_callbacks(flow: Dataflow) -> None:
    """Refuses callbacks with results that a stage reads: its backward would call them again."""
    for eqn, kind in zip(flow.jaxpr.eqns, flow.eqn_kind, strict=True):
        direct = not jx.inner_jaxprs(eqn)
        if kind == MAIN and has_side_effects(eqn) and (direct or has_read_callback(eqn)):
            raise ValueError(
                f"{flow.name} reads the result of a callback with side effects (io_callback) on "
                "values that depend on parameters: backward recomputes stages and would call it "
                "again. Use jax.pure_callback if calling it twice does no harm, or call it on "
                "values of the batch alone"
            )
