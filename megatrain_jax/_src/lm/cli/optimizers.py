"""Makes optimizers from names and options: five known ones, and any function of the user's."""

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from optax import contrib

from megatrain_jax._src.common.suggestions import did_you_mean

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
        name: "adamw", "lion", "muon", "adafactor" or "sgd"; or "module:function", a function from
            the learning rate and the options to an Optax optimizer. The module may be in the
            current folder.
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
        update = _called(name, _imported(name), schedule, given)
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


def _imported(name: str) -> Callable[..., Any]:
    """The function that "module:function" names, also of a module in the current folder."""
    module, _, function = name.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"`optimizer`={name} can't be imported: {error}") from error
    finally:
        sys.path.remove(here)
    if not callable(found):
        raise ValueError(f"`optimizer`={name} must be a function, not {found!r}")
    return found


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
