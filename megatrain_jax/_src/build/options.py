"""The options of a run: what they are, and what each may be.

`fit`, `train`, `Trainer` and `plan` build these records from their arguments first of all, so that
a mistake is named before data is drawn, and before anything is traced, made or saved.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, get_args

from megatrain_jax._src.adapt.adapters import check_model
from megatrain_jax._src.adapt.loss_function import takes_rng
from megatrain_jax._src.adapt.model_kinds import flatten
from megatrain_jax._src.build.precision import Precision
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.checks import refused
from megatrain_jax._src.common.model_path import path_name
from megatrain_jax._src.state import hardware as machines
from megatrain_jax._src.state.hardware import Hardware

DeviceBudget = int | Literal["least"] | None
OnNonfinite = Literal["raise", "skip"]
Trainable = str | Callable[[str], bool] | None
EvalData = Iterable[Any] | Callable[[], Iterable[Any]]

# JAX makes a signed integer of 64 bits of a seed.
_LEAST_SEED, _MOST_SEED = -(2**63), 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What shapes a run and its steps; see `Trainer`. Integers are stored as Python's own.

    Raises:
        TypeError: If an option is of another type.
        ValueError: If an option has a value that it can't have.
    """

    microbatches: int = 1
    precision: Precision = Precision()
    device_budget: DeviceBudget = None
    trainable: Trainable = None
    on_nonfinite: OnNonfinite = "raise"
    max_skipped: int = 10
    seed: int = 0
    hardware: Hardware | None = None

    def __post_init__(self) -> None:
        """Checks every option."""
        _store(
            self,
            microbatches=checks.integer("microbatches", self.microbatches),
            device_budget=_device_budget(self.device_budget),
            max_skipped=checks.integer("max_skipped", self.max_skipped),
            seed=checks.integer("seed", self.seed, least=_LEAST_SEED, most=_MOST_SEED),
        )
        _check_precision(self.precision)
        _check_trainable(self.trainable)
        _check_on_nonfinite(self.on_nonfinite)
        _check_hardware(self.hardware)


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """What the loop does besides steps; see `fit`. Integers are stored as Python's own.

    Raises:
        TypeError: If an option is of another type.
        ValueError: If an option has a value that it can't have, or needs another one.
    """

    steps: int | None = None
    eval_data: EvalData | None = None
    eval_every: int | None = None
    checkpoint_dir: str | PathLike[str] | None = None
    checkpoint_every: int | None = None
    keep: int = 3
    resume: bool = True
    callbacks: Sequence[Callable[..., None]] = ()
    progress: bool = True

    def __post_init__(self) -> None:
        """Checks every option."""
        _store(
            self,
            steps=_integer_or_none("steps", self.steps),
            eval_every=_integer_or_none("eval_every", self.eval_every),
            checkpoint_every=_integer_or_none("checkpoint_every", self.checkpoint_every),
            keep=checks.integer("keep", self.keep),
            resume=checks.boolean("resume", self.resume),
            callbacks=_callbacks(self.callbacks),
            progress=checks.boolean("progress", self.progress),
        )
        if self.eval_data is not None:
            _check_eval_data(self.eval_data)
        elif self.eval_every is not None:
            raise ValueError(f"`eval_every`={self.eval_every} needs `eval_data`")
        if self.checkpoint_dir is not None:
            checks.path("checkpoint_dir", self.checkpoint_dir, ", or None")
        elif self.checkpoint_every is not None:
            raise ValueError(f"`checkpoint_every`={self.checkpoint_every} needs a `checkpoint_dir`")


def check_parts(model: Any, loss_fn: Any, optimizer: Any, params: Any = None) -> None:
    """Checks the kinds of what is trained and how, without looking into it.

    Args:
        model: See `Trainer`.
        loss_fn: See `Trainer`.
        optimizer: See `Trainer`.
        params: See `Trainer`.

    Raises:
        TypeError: If one of them is of no supported kind.
        ValueError: If `params` is neither a path nor a tree of arrays.
    """
    check_model(model)
    check_loss(loss_fn)
    _check_optimizer(optimizer)
    if isinstance(params, str | PathLike):
        checks.path("params", params, ", or a tree of arrays")
    elif params is not None:
        _check_params(params)


def check_loss(loss_fn: Any) -> None:
    """Checks that a loss function can be called as one, and told from others.

    Raises:
        TypeError: If it can't.
    """
    takes_rng(loss_fn)
    try:
        hash(loss_fn)
    except TypeError as error:
        raise TypeError(
            refused("loss_fn", "hashable, since compiled steps are kept by it", loss_fn)
        ) from error


def check_data(name: str, data: Any, one_batch: str) -> None:
    """Checks that something is an iterable of batches, without drawing one.

    Args:
        name: The argument.
        data: What was given.
        one_batch: What to pass to use one batch, for the message.

    Raises:
        TypeError: If it isn't.
    """
    if not _are_batches(data):
        hint = "call it, and pass what it returns" if callable(data) else one_batch
        raise TypeError(
            f"`{name}` must be an iterable of batches, but is of type {type(data).__name__}; {hint}"
        )


def eval_batches(eval_data: EvalData) -> Iterable[Any]:
    """Returns the batches of one evaluation; calls `eval_data` if it is a function.

    Raises:
        TypeError: If the function returned something else than batches.
    """
    if isinstance(eval_data, Iterable):
        return eval_data
    batches = eval_data()
    if not _are_batches(batches):
        raise TypeError(
            f"`eval_data` must return an iterable of batches, but returned {type(batches).__name__}"
        )
    return batches


def check_trainer(trainer: Any) -> None:
    """Checks that something can be trained on with.

    Raises:
        TypeError: If it is no trainer.
    """
    methods = ("step", "read", "evaluate", "flush")
    if isinstance(trainer, type) or not all(callable(getattr(trainer, m, None)) for m in methods):
        found = getattr(trainer, "trainer", None)
        hint = "pass result.trainer" if found is not None else "make one with Trainer(...)"
        raise TypeError(refused("trainer", "a Trainer", trainer, hint))


def _store(record: Any, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(record, name, value)


def _integer_or_none(name: str, value: Any) -> int | None:
    return None if value is None else checks.integer(name, value, other=", or None")


def _device_budget(value: Any) -> DeviceBudget:
    if value is None or (isinstance(value, str) and value == "least"):
        return value
    other = ' (bytes), "least", or None for what the device has left'
    if isinstance(value, str):
        raise ValueError(refused("device_budget", f"an integer{other}", value))
    return checks.integer("device_budget", value, other=other)


def _check_precision(value: Any) -> None:
    if not isinstance(value, Precision):
        hint = "pass for example Precision(compute=jnp.bfloat16)"
        raise TypeError(refused("precision", "a megatrain_jax.Precision", value, hint))


def _check_trainable(value: Any) -> None:
    if isinstance(value, str):
        try:
            re.compile(value)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"`trainable`={value!r} is no regular expression: {error}") from error
    elif value is not None and not (callable(value) and checks.can_be_called(value, 1)):
        raise TypeError(
            refused(
                "trainable",
                "a regular expression or a function of a parameter's path, or None",
                value,
            )
        )


def _check_on_nonfinite(value: Any) -> None:
    allowed = get_args(OnNonfinite)
    if not isinstance(value, str):
        raise TypeError(refused("on_nonfinite", '"raise" or "skip"', value))
    if value not in allowed:
        raise ValueError(refused("on_nonfinite", '"raise" or "skip"', value))


def _check_hardware(value: Any) -> None:
    if value is not None and not isinstance(value, Hardware):
        known = [f"megatrain_jax.{n}" for n, x in vars(machines).items() if isinstance(x, Hardware)]
        hint = f"there are {', '.join(known)} and megatrain_jax.this_machine()"
        raise TypeError(refused("hardware", "a megatrain_jax.Hardware or None", value, hint))


def _check_optimizer(value: Any) -> None:
    has_both = all(callable(getattr(value, name, None)) for name in ("init", "update"))
    if isinstance(value, type) or not has_both:
        hint = "call it: optax.adamw(1e-3), not optax.adamw" if callable(value) else ""
        if hasattr(value, "tx"):  # nnx.Optimizer, flax.training.TrainState
            hint = "pass its `tx`, since state is kept here"
        raise TypeError(refused("optimizer", "an optax.GradientTransformation", value, hint))


def _check_params(params: Any) -> None:
    checks.leaves("params", params)
    paths, arrays, _ = flatten(params)
    for path, leaf in zip(paths, arrays, strict=True):
        if not all(hasattr(leaf, attribute) for attribute in ("shape", "dtype", "__array__")):
            raise ValueError(
                "`params` must be a tree of arrays or the path of a checkpoint, but "
                f"{path_name(path) or 'it'} is of type {type(leaf).__name__}"
            )


def _callbacks(value: Any) -> tuple[Callable[..., None], ...]:
    allowed = "a sequence of functions callback(trainer, record)"
    if isinstance(value, Mapping | str | bytes) or not isinstance(value, Iterable):
        hint = "pass [f], a list, for one function f" if callable(value) else ""
        raise TypeError(refused("callbacks", allowed, value, hint))
    callbacks = tuple(value)
    for i, callback in enumerate(callbacks):
        if not callable(callback) or not checks.can_be_called(callback, 2):
            raise TypeError(refused(f"callbacks[{i}]", "a function (trainer, record)", callback))
    return callbacks


def _are_batches(value: Any) -> bool:
    is_one = isinstance(value, Mapping | str | bytes) or getattr(value, "shape", None) == ()
    return isinstance(value, Iterable) and not is_one


def _check_eval_data(value: Any) -> None:
    if isinstance(value, Iterator):
        raise TypeError(
            "`eval_data` is an iterator, which can be used only once, but each evaluation goes "
            "through it anew: pass a list, or a function that returns a new iterator"
        )
    if isinstance(value, list | tuple) and not value:
        raise ValueError("`eval_data` is empty")
    if _are_batches(value):
        return
    if isinstance(value, Iterable) or not callable(value):
        raise TypeError(
            "`eval_data` must be an iterable of batches or a function that returns one, but is of "
            f"type {type(value).__name__}"
        )
    if not checks.can_be_called(value, 0):
        raise TypeError(refused("eval_data", "a function without arguments", value))
