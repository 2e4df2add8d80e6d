"""The precision, learning rate and optimizer that the settings of a run ask for."""

import optax

import megatrain_jax as mt
from megatrain_jax._src.lm.cli.optimizers import optimizer_of
from megatrain_jax._src.lm.cli.recipe import precision_of, schedule_of
from megatrain_jax._src.lm.cli.run_settings import RunSettings
from megatrain_jax._src.lm.cli.setting_rules import Frozen


def precision_of_run(
    settings: RunSettings, frozen: Frozen | None, here: mt.Hardware | None
) -> mt.Precision:
    """The precision of a run; without a GPU it computes in fp32 by default.

    Args:
        settings: The settings of the run.
        frozen: Form of frozen parameters.
        here: The machine; None without a GPU.
    """
    return precision_of(
        settings.precision,
        settings.state,
        settings.master,
        frozen,
        settings.compute,
        without="float32" if here is None else None,
        sums=settings.sums,
        products=settings.products,
    )


def schedule_of_run(settings: RunSettings, steps: int) -> optax.Schedule:
    """The learning rate over the steps of a run."""
    assert settings.learning_rate is not None
    return schedule_of(
        settings.learning_rate, steps, settings.warmup, settings.decay, settings.final_rate
    )


def optimizer_of_run(
    settings: RunSettings, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """The optimizer of a run with a learning rate."""
    return optimizer_of(
        settings.optimizer,
        schedule,
        b1=settings.b1,
        b2=settings.b2,
        weight_decay=settings.weight_decay,
        clip=settings.clip,
        options=settings.optimizer_options,
    )
