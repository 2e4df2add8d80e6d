"""The parts of a training recipe: precision, schedule, optimizer, and the job of a command."""

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from optax import contrib

import megatrain_jax as mt
from megatrain_jax import models
from megatrain_jax._src.common.suggestions import did_you_mean
from megatrain_jax._src.lm.cli import run_settings
from megatrain_jax._src.lm.cli.plan_settings import PlanSettings
from megatrain_jax._src.lm.cli.user_functions import imported

if TYPE_CHECKING:  # `data` imports many packages, and no plan needs them
    from megatrain_jax import data


def precision_of(
    settings: PlanSettings | run_settings.RunSettings,
    frozen: run_settings.Frozen | None,
    without: DTypeLike | None = None,
) -> mt.Precision:
    """The precision of a run.

    Args:
        settings: The settings: the name of a precision, and options that override its parts.
        frozen: Form of frozen parameters; None for the masters' form.
        without: dtype that parameters are cast to for the model's computation if the settings have
            none; None for the GPU's own, bfloat16 or float16.

    Examples:
        >>> precision_of(PlanSettings(precision="compact"), None) == mt.Precision.compact()
        True
    """
    named, products = mt.Precision.of(settings.precision), settings.products
    return mt.Precision(
        master=jnp.dtype(settings.master) if settings.master else named.master,
        state=jnp.dtype(settings.state) if settings.state else named.state,
        frozen=frozen,
        compute=settings.compute or named.compute or without,
        sums=settings.sums,
        products={"*": "float8"} if products == "float8-all" else products,
    )


def schedule_of(
    learning_rate: float, steps: int, warmup: float, decay: run_settings.Decay, final: float
) -> optax.Schedule:
    """The learning rate over the steps of a run: linear warm-up, then a decay to the last step.

    With n warm-up steps, the first step has 1 / (n + 1) of the highest rate, because a step with
    rate 0 would learn nothing.

    Args:
        learning_rate: The highest rate.
        steps: Number of steps.
        warmup: Fraction of steps in which the rate rises, rounded up to whole steps.
        decay: How it falls afterwards.
        final: Fraction of the highest rate at the last step; ignored by a constant schedule.

    Raises:
        ValueError: If the first step's rate is 0 in float32.

    Examples:
        >>> rates = schedule_of(1.0, 10, 0.2, "linear", 0.0)
        >>> [round(float(rates(step)), 2) for step in (0, 1, 2, 6, 10)]
        [0.33, 0.67, 1.0, 0.5, 0.0]
    """
    rising = math.ceil(warmup * steps)
    # Optax refuses a decay over no steps, which occurs if a run is all warm-up.
    falling = max(1, steps - rising)
    after = {
        "cosine": optax.cosine_decay_schedule(learning_rate, falling, alpha=final),
        "linear": optax.linear_schedule(learning_rate, final * learning_rate, falling),
        "constant": optax.constant_schedule(learning_rate),
    }[decay]
    schedule = after
    if rising:
        first = learning_rate / (rising + 1)
        warming = optax.linear_schedule(first, learning_rate, rising)
        schedule = optax.join_schedules([warming, after], [rising])
    if not np.asarray(schedule(0), np.float32) > 0:
        raise ValueError(
            f"`learning_rate`={learning_rate} is 0 in float32 at the first step, which would learn "
            "nothing: set a higher one"
        )
    return schedule


def run_options(
    settings: run_settings.RunSettings,
    frozen: run_settings.Frozen | None,
    trainable: list[str] | str | None,
) -> dict[str, Any]:
    """The options of a run on this machine; without a GPU it computes in fp32 by default.

    Args:
        settings: The settings of the run.
        frozen: Form of frozen parameters.
        trainable: Patterns of the trained parameters; None for all.
    """
    here = mt.this_machine()
    names = ("device_budget", "host_budget", "disk_dir", "disk_budget", "state_per_process", "seed")
    return {
        "precision": precision_of(settings, frozen, "float32" if here is None else None),
        "trainable": trainable,
        "hardware": here,
        **{name: getattr(settings, name) for name in names},
    }


def schedule_of_run(settings: run_settings.RunSettings, steps: int) -> optax.Schedule:
    """The learning rate over the steps of a run."""
    assert settings.learning_rate is not None
    return schedule_of(
        settings.learning_rate, steps, settings.warmup, settings.decay, settings.final_rate
    )


def optimizer_of_run(
    settings: run_settings.RunSettings, schedule: optax.Schedule
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


# RMS of Muon's updates: as AdamW's, so that both have one learning rate and one weight decay
# (https://arxiv.org/abs/2502.16982).
_MUON_RMS = 0.2


def optimizer_of(
    name: str,
    schedule: optax.ScalarOrSchedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    weight_decay: float = 0.0,
    clip: float | None = 1.0,
    options: Mapping[str, Any] | None = None,
) -> optax.GradientTransformation:
    """An optimizer by name, after clipping by the global norm.

    Args:
        name: "adamw", "lion", "muon", "adafactor" or "sgd"; or the name of a function (`imported`)
            from the learning rate and the options to an Optax optimizer.
        schedule: Learning rate.
        b1: Decay of the mean of gradients in AdamW and Lion, and in Muon's AdamW for parameters
            that are no matrices of layers.
        b2: Decay of the mean of their squares; for Lion, decay of its stored momentum.
        weight_decay: Weight decay, multiplied by the learning rate; not for functions.
        clip: Maximum global norm of the gradients; None for no clipping.
        options: Further keywords of the optimizer's function in Optax.

    Raises:
        ValueError: If there is no such function, or it doesn't take an option.
    """
    given = dict(options or {})
    if ":" in name:
        update = _called(name, imported("optimizer", name), schedule, given)
    else:
        make, keywords = _known(name, schedule, b1, b2, weight_decay)
        if taken := [key for key in given if key in ("learning_rate", "b1", "b2", "weight_decay")]:
            raise ValueError(f"`optimizer_options` has {taken[0]}: set the option `{taken[0]}`")
        update = _called(name, make, schedule, keywords | given)
        if name == "sgd" and weight_decay:
            # Before the momentum, as in PyTorch.
            update = optax.chain(optax.add_decayed_weights(weight_decay), update)
    return update if clip is None else optax.chain(optax.clip_by_global_norm(clip), update)


def _known(
    name: str, schedule: optax.ScalarOrSchedule, b1: float, b2: float, weight_decay: float
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function of a known optimizer, and its keywords besides the learning rate."""
    match name:
        case "adamw" | "lion":
            make = {"adamw": optax.adamw, "lion": optax.lion}[name]
            return make, {"b1": b1, "b2": b2, "weight_decay": weight_decay}
        case "muon":
            return contrib.muon, {
                "weight_decay": weight_decay,
                "adam_weight_decay": weight_decay,
                "adam_b1": b1,
                "adam_b2": b2,
                "consistent_rms": _MUON_RMS,
                "muon_weight_dimension_numbers": matrices_of_layers,
            }
        case "adafactor":
            # Optax doesn't multiply this decay by the learning rate.
            def decay(step: Any) -> Any:
                return weight_decay * (schedule(step) if callable(schedule) else schedule)

            return optax.adafactor, {
                "multiply_by_parameter_scale": False,
                "weight_decay_rate": decay if weight_decay else None,
            }
    return optax.sgd, {}


def matrices_of_layers(params: Any) -> Any:
    """The parameters that Muon orthogonalises: matrices of a decoder's layers, experts' one by one.

    Embeddings, heads, norms, biases and convolutions are left to AdamW, as Muon's authors do.

    Args:
        params: A tree of parameters.

    Returns:
        The same tree with each matrix's axes, and None for all other parameters.

    Examples:
        >>> import numpy as np
        >>> matrix = np.zeros((4, 2))
        >>> matrices_of_layers({"embed": matrix, "layers": {"0": {"weight": matrix}}})["embed"]
    """
    return jax.tree_util.tree_map_with_path(_axes, params)


def _axes(path: Any, array: Any) -> contrib.MuonDimensionNumbers | None:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if not re.search(r"(^|/)layers/", name) or re.search(r"bias(/|$)", name):
        return None
    if array.ndim != 2 and not (array.ndim == 3 and "/experts/" in name):
        return None
    # Expert matrices that are plain arrays have the input axis first.
    out_first = array.ndim == 2 or re.search(r"(weight|lora_[AB])(/|$)", name)
    out, inside = (array.ndim - 2, array.ndim - 1) if out_first else (2, 1)
    return contrib.MuonDimensionNumbers(reduction_axis=inside, output_axis=out)


def _called(
    name: str, make: Callable[..., Any], schedule: optax.ScalarOrSchedule, options: dict[str, Any]
) -> Any:
    """The optimizer that a function makes.

    Raises:
        ValueError: If the function doesn't take an option, or returns no optimizer.
    """
    parameters = inspect.signature(make).parameters.values()
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key in options:
        if key not in known and not takes_all:
            raise ValueError(
                f"`optimizer_options` has {key!r}, which `optimizer`={name} doesn't take"
                f"{did_you_mean(key, known)}"
            )
    made = make(schedule, **options)
    if not (hasattr(made, "init") and hasattr(made, "update")):
        raise ValueError(f"`optimizer`={name} must return an Optax optimizer, not {made!r}")
    return made


Loss = Callable[[models.Decoder, Mapping[str, Any]], tuple[Any, dict[str, Any]]]


@functools.cache
def counted(loss_fn: Loss, rows: int) -> Loss:
    """A loss with the metric `tokens`: the tokens of a step's rows without padding.

    Equal arguments give the same function, whose traces are shared. A step reports the mean of a
    metric over its parts, so the tokens of a part are multiplied by the number of parts.
    """

    def with_tokens(model: models.Decoder, batch: Mapping[str, Any]) -> Any:
        loss, metrics = loss_fn(model, batch)
        segments = batch["segments"]
        tokens = rows / segments.shape[0] * (segments > 0).sum(dtype=jnp.float32)
        return loss, {**metrics, "tokens": tokens}

    return with_tokens


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model to train, its loss, and functions to read its data and to export it.

    Attributes:
        model: Function that builds the model.
        params: Parameters to start from; None for the initial ones of the built model.
        trainable: Patterns of the trained parameters; None for all.
        frozen: Form of frozen parameters at rest.
        loss: The loss, without the metric of `counted_loss`.
        shapes: Shapes of a batch.
        reference: Folders of the checkpoint, and of its adapters, that serve as reference model
            before training; empty if the loss needs none.
        prompting: Function that returns the tokenizer for samples, and a function that formats a
            prompt.
        dataset: Function from files and the number of epochs to their batches.
        export: Function that writes a trained model, given the trainer, the name of one of the
            settings' `exports`, the folder to write and the chat template of the data.
    """

    model: Callable[[], models.Decoder]
    params: Any = None
    trainable: list[str] | str | None = None
    frozen: run_settings.Frozen | None = None
    loss: Loss
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    reference: tuple[str, ...] = ()
    prompting: Callable[[], tuple[Any, Callable[[str], Any]]]
    dataset: Callable[[Sequence[str] | str, int | None], "data.Dataset"]
    export: "Callable[[mt.Trainer, str, Path, str | None], Path]"

    @property
    def counted_loss(self) -> Loss:
        """The loss with the metric of `counted`."""
        return counted(self.loss, next(iter(self.shapes.values())).shape[0])
