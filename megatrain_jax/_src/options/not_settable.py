"""The error message for setting an attribute of a trainer, which can't be changed that way."""

from dataclasses import fields

from megatrain_jax._src.common.suggestions import did_you_mean
from megatrain_jax._src.options.options import LoopOptions, Options

_PARAMETERS = "pass `params=` to a new Trainer, or restore a checkpoint"
_RATE = (
    "the optimizer has it: give that a schedule, as in "
    "optax.adamw(optax.cosine_decay_schedule(1e-3, 1000)), or make a new Trainer with another "
    "optimizer and restore a checkpoint"
)
_NEW = (
    "it is fixed when a trainer is made: pass it to a new Trainer, and restore a checkpoint there"
)
_WAYS = {
    "params": _PARAMETERS,
    "model": _PARAMETERS,
    "opt_state": "restore a checkpoint",
    **dict.fromkeys(("learning_rate", "lr"), _RATE),
    **dict.fromkeys(("loss_fn", "optimizer", *(f.name for f in fields(Options))), _NEW),
    **{f.name: f"pass `{f.name}=` to `train`" for f in fields(LoopOptions)},
}


def not_settable(kind: type, name: str) -> str:
    """The message for a public attribute that was set, with a way to reach the same.

    Args:
        kind: The class of the trainer.
        name: The attribute's name.
    """
    way = f": {_WAYS[name]}" if name in _WAYS else ""
    if hasattr(kind, name):
        return f"`{name}` of a {kind.__name__} is read-only{way}"
    if not way:
        public = [known for known in dir(kind) if not known.startswith("_")]
        way = did_you_mean(name, [*public, *_WAYS])
    return f"a {kind.__name__} has no attribute `{name}` that could be set{way}"
