"""Rules that settings share: the names to choose from, and options that need another option."""

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any, Literal

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.suggestions import did_you_mean

PrecisionName = Literal["auto", "compact", "two_bytes", "bfloat16", "float16", "float32"]
State = Literal["float32", "bfloat16", "int8", "int4"]
Compute = Literal["bfloat16", "float16", "float32"]
Master = Literal["float32", "bfloat16", "int8"]
Frozen = Literal["float32", "bfloat16", "int8", "nf4"]
Sums = Literal["float32", "bfloat16"]
Products = Literal["float8", "float8-all"]
Microbatches = int | Literal["auto"]
Decay = Literal["cosine", "linear", "constant"]
OPTIMIZERS = ("adamw", "lion", "muon", "adafactor", "sgd")


def check_unused_options(
    settings: Any, names: Sequence[str], *, is_there: bool, needed: str
) -> None:
    """Checks that options without an effect have their default values.

    Args:
        settings: A dataclass of settings.
        names: Options that have an effect only with another one.
        is_there: Whether the settings have that other option.
        needed: The needed option, in words, and how to set it.

    Raises:
        ValueError: If an option was given without the option that it needs.
    """
    if is_there:
        return
    defaults = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(settings)
    }
    for name in names:
        if (value := getattr(settings, name)) != defaults[name]:
            raise ValueError(f"`{name}`={value} counts only with {needed}")


def check_optimizer(name: str) -> None:
    """Checks the name of an optimizer.

    Args:
        name: The setting `optimizer`.

    Raises:
        ValueError: If it is neither a known name nor a function's.
    """
    if name not in OPTIMIZERS and not all(name.partition(":")):
        allowed = f"{', '.join(OPTIMIZERS)} or module:function"
        near = did_you_mean(name, OPTIMIZERS)
        raise ValueError(f"{checks.refused('optimizer', allowed, name)}{near}")
