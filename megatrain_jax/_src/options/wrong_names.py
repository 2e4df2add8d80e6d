"""Errors for names that a function or a trainer doesn't have, with the name that was meant."""

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from jax.sharding import AbstractMesh, Mesh

from megatrain_jax._src.common.suggestions import did_you_mean, refuse_keywords
from megatrain_jax._src.options.options import LoopOptions, MachineOptions, Options
from megatrain_jax._src.options.precision import Precision
from megatrain_jax._src.state.hardware import Hardware

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Names in Keras, Lightning, Transformers and Flax's examples for options of this library.
_ELSEWHERE = {
    "steps": "max_steps num_steps total_steps train_steps num_train_steps max_iters iterations",
    "epochs": "num_epochs max_epochs n_epochs num_train_epochs nb_epoch",
    "microbatches": "gradient_accumulation_steps accumulate_grad_batches grad_accum_steps "
    "gradient_accumulation accumulation_steps num_microbatches",
    "eval_data": "val_data validation_data eval_dataset val_dataset eval_dataloader "
    "val_dataloader val_dataloaders",
    "eval_every": "eval_steps eval_interval",
    "checkpoint_dir": "output_dir save_dir ckpt_dir default_root_dir checkpoint_path",
    "checkpoint_every": "save_steps save_every save_interval checkpoint_interval",
    "keep": "save_total_limit max_to_keep",
    "resume": "resume_from_checkpoint",
    "progress": "verbose progress_bar enable_progress_bar show_progress",
    "precision": "dtype mixed_precision compute_dtype bf16",
    "seed": "random_seed rng rngs key",
    "hardware": "gpu card",
    "device_budget": "device_memory gpu_memory gpu_budget vram",
    "host_budget": "host_memory cpu_memory host_gib ram",
    "num_gpus": "gpus n_gpus num_devices devices",
    "mesh": "gpus n_gpus num_gpus num_devices devices",
}
_MEANT: dict[str, list[str]] = {}
for _option, _names in _ELSEWHERE.items():
    for _name in _names.split():
        _MEANT.setdefault(_name, []).append(_option)

_OPTIMIZER = "the optimizer has it, as in optax.adamw(1e-3, weight_decay=0.1)"
_CLIPPING = "the optimizer clips: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))"
_MESH = 'write mesh=jax.make_mesh((n,), ("data",)) for n GPUs'
_BUDGETS = (
    "did you mean `device_budget`, for the GPU's memory, or `host_budget`, for the host's memory?"
)
_NO_OPTION = {
    **dict.fromkeys(("budget", "memory", "max_memory", "memory_budget", "mem"), _BUDGETS),
    **dict.fromkeys(("lr", "learning_rate", "weight_decay", "momentum"), _OPTIMIZER),
    **dict.fromkeys(("max_grad_norm", "gradient_clip_val", "clip"), _CLIPPING),
    "metrics": 'loss_fn returns them, as in (loss, {"accuracy": accuracy})',
}


_TAKERS = {"params": "`Trainer` and `fit` take"} | {
    field.name: words
    for record, words in (
        (Options, "`Trainer` and `fit` take"),
        (LoopOptions, "`fit` and `train` take"),
        (MachineOptions, "`plan` takes"),
    )
    for field in fields(record)
}

_PARAMETERS = "pass `params=` to a new Trainer, or restore a checkpoint"
_RATE = (
    "the optimizer has it: give that a schedule, as in "
    "optax.adamw(optax.cosine_decay_schedule(1e-3, 1000)), or make a new Trainer with another "
    "optimizer and restore a checkpoint"
)
_NEW = (
    "it is fixed when a trainer is made: pass it to a new Trainer, and restore a checkpoint there"
)
_HOW_TO_SET = {
    "params": _PARAMETERS,
    "model": _PARAMETERS,
    "opt_state": "restore a checkpoint",
    **dict.fromkeys(("learning_rate", "lr"), _RATE),
    **dict.fromkeys(("loss_fn", "optimizer", *(f.name for f in fields(Options))), _NEW),
    **{f.name: f"pass `{f.name}=` to `train`" for f in fields(LoopOptions)},
}


# The option that a value of a type is meant for, if it is passed without a name.
_BY_TYPE = {Hardware: "hardware", Precision: "precision", Mesh: "mesh", AbstractMesh: "mesh"}


# Attributes that trainers and results have elsewhere.
_ATTRIBUTE_HINTS = {
    **dict.fromkeys(("train", "fit"), "call megatrain_jax.train(trainer, data)"),
    **dict.fromkeys(
        ("predict", "forward", "apply", "eval"),
        "call the trained model, `model`, or `evaluate` of a trainer for losses",
    ),
    "generate": "call megatrain_jax.models.generate(trainer, prompts)",
    **dict.fromkeys(
        ("loss", "losses", "metrics", "log_history"),
        'read the records of `history`, as in history["loss"]',
    ),
    **dict.fromkeys(("load", "load_checkpoint", "resume"), "a trainer has `restore`"),
    **dict.fromkeys(("state_dict", "parameters", "weights"), "its parameters are `params`"),
    **dict.fromkeys(("evaluate", "step", "restore", "opt_state"), "`trainer` of a result has it"),
}


def naming_options(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A decorator that explains the error of an option that is passed without its name.

    The error is Python's own, followed by the name that the value's type suggests.
    """
    parameters = inspect.signature(function).parameters
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]

    @functools.wraps(function)
    def called(*args: _P.args, **given: _P.kwargs) -> _T:
        if len(args) > len(positional):
            value = args[len(positional)]
            options = [name for kind, name in _BY_TYPE.items() if isinstance(value, kind)]
            known = next((name for name in options if name in parameters), None)
            hint = f", as in {known}=..." if known else ""
            raise TypeError(
                f"{function.__qualname__}() takes {len(positional)} positional arguments but "
                f"{len(args)} were given; options after `{positional[-1]}` need their names{hint}"
            )
        return function(*args, **given)

    return called


def refuse_unknown(function: Callable[..., object], unknown: Iterable[str]) -> None:
    """Refuses keywords that a function doesn't have, and names the option that was meant.

    Args:
        function: The function that was called.
        unknown: The keywords that are none of its parameters.

    Raises:
        TypeError: If there is one. The message is Python's own, followed by a suggestion.
    """
    refuse_keywords(function, unknown, _hint)


class ExplainedAttributes:
    """A base of classes for users: an attribute that is missing or read-only gets an explanation.

    For names in Keras, Lightning, PyTorch and scikit-learn, it says how this library does the same.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a private attribute.

        Raises:
            AttributeError: If its name is public, because setting it would have no effect.
        """
        if not name.startswith("_"):
            raise AttributeError(_not_settable(type(self), name))
        super().__setattr__(name, value)

    # Type checkers would take every name for an attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            kind = type(self)
            if hasattr(kind, name):  # raised within a property: shown as it is
                object.__getattribute__(self, name)
            said = f"{kind.__name__!r} object has no attribute {name!r}"
            way = "" if name.startswith("_") else _way_to(name, dir(kind))
            raise AttributeError(f"{said}{way}")


def _way_to(name: str, known: Iterable[str]) -> str:
    """The end of a message about a missing attribute."""
    if name in _ATTRIBUTE_HINTS:
        return f": {_ATTRIBUTE_HINTS[name]}"
    return did_you_mean(name, [one for one in known if not one.startswith("_")])


def _not_settable(kind: type, name: str) -> str:
    """The message for a public attribute that was set, with a way to reach the same."""
    way = f": {_HOW_TO_SET[name]}" if name in _HOW_TO_SET else ""
    if hasattr(kind, name):
        return f"`{name}` of a {kind.__name__} is read-only{way}"
    if not way:
        public = [known for known in dir(kind) if not known.startswith("_")]
        way = did_you_mean(name, [*public, *_HOW_TO_SET])
    return f"a {kind.__name__} has no attribute `{name}` that could be set{way}"


def _hint(name: str, allowed: list[str]) -> str:
    if name in _NO_OPTION:
        return f"; {_NO_OPTION[name]}"
    if name in ("batch_size", "per_device_train_batch_size"):
        batches = "batches come from `data`" if "data" in allowed else "`sample_batch` has it"
        return f"; {batches}: its arrays' first axis is the number of examples"
    meant = _MEANT.get(name, [])
    for option in meant:
        if option in allowed:
            more = f" ({_MESH})" if option == "mesh" else ""
            return f"; did you mean `{option}`{more}?"
    for option in (name, *meant):
        if option in _TAKERS:
            return f"; {_TAKERS[option]} `{option}`"
    return did_you_mean(name, allowed)
