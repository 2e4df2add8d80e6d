"""Cases of the zoo, traced and cut."""

from megatrain_jax._src.engine.adapt.adapters import adapt
from megatrain_jax._src.engine.program.loss.stages import Program
from megatrain_jax._src.engine.program.loss.trace import TracedLoss, cut_loss, leaves_of, trace_loss
from zoo import Case


def trace_case(case: Case):
    batch = case.batch(0)
    adapted, initial = adapt(case.build(), case.loss_fn, batch, 0)

    def loss(parameters, variables, batch, rng):
        return adapted.loss(case.loss_fn, parameters, variables, batch, rng, True)

    traced = trace_loss(loss, adapted.shapes, adapted.variable_shapes, batch)
    return adapted, initial, traced, batch


def cut_case(case: Case) -> tuple[TracedLoss, Program]:
    adapted, _, traced, _ = trace_case(case)
    return traced, cut_loss(
        traced, leaves_of(traced, adapted.paths, adapted.shapes, [True] * len(adapted.paths))
    )
