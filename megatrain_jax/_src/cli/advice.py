"""Advice for a plan that doesn't fit: the missing memory, and options that would make it fit."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import megatrain_jax as mt
from megatrain_jax._src.cli.largest import fits
from megatrain_jax._src.cli.plan_settings import PlanSettings
from megatrain_jax._src.common import checks

# Rank of the suggested adapters.
_RANK = 16


def advice(
    plan: mt.Plan, settings: PlanSettings, plan_with: Callable[[PlanSettings], mt.Plan]
) -> str:
    """The missing memory, and the options with which the run fits.

    Each option is planned before it is suggested; if no single one is enough, options are added one
    by one until the plan fits.

    Args:
        plan: A plan that doesn't fit the host, the device or both.
        settings: Its settings; options that they already have are not suggested.
        plan_with: Function that plans the same run with changed settings.
    """
    lacking = ["host memory"] if plan.fits_host is False else []
    lacking += [] if plan.fits_device else ["GPU memory"]
    options = list(_options(settings, *lacking))
    enough = [name for name, changes in options if fits(plan_with(replace(settings, **changes)))]
    text = f"not enough {' and '.join(lacking)}."
    if enough:
        return f"{text} It fits with {' or '.join(enough)}. docs/fitting.md has more."
    together = settings
    for number, (_, changes) in enumerate(options, 1):
        together = replace(together, **changes)
        # Single options have already been tried.
        if number > 1 and fits(plan_with(together)):
            # A later option may replace an earlier one: two_bytes stores less than compact.
            names = [name for name, changes in options[:number] if _has(together, changes)]
            return f"{text} It fits with {', '.join(names)} together. docs/fitting.md has more."
    larger = {"host memory": "a larger --host", "GPU memory": "a --gpu with more memory"}
    needed = " and ".join(larger[memory] for memory in lacking)
    return f"{text} No option of this command is enough: it needs {needed}, or a smaller model."


def _has(settings: PlanSettings, changes: dict[str, Any]) -> bool:
    return all(getattr(settings, name) == value for name, value in changes.items())


def _options(settings: PlanSettings, *lacking: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The options that need less of the missing memory, with the settings they change."""
    if "GPU memory" in lacking and checks.device_budget(settings.device_budget) != "minimum":
        yield "--device-budget minimum", {"device_budget": "minimum"}
    # Smaller functions on the GPU, and in waves less that waits in the host.
    if settings.tokens is not None and settings.microbatches != "auto":
        rows = settings.tokens // settings.length
        if rows // settings.gpus > settings.microbatches:
            yield "--microbatches auto", {"microbatches": "auto"}
    if "GPU memory" in lacking:
        if settings.length % 2 == 0 and settings.length >= 1024:
            yield f"--length {settings.length // 2}", {"length": settings.length // 2}
    if "host memory" in lacking:
        if settings.state not in ("compact", "two_bytes"):
            yield "--state compact", {"state": "compact"}
        # Of the known optimizers, only AdamW has more state than Lion.
        if settings.optimizer == "adamw" and settings.optimizer_options is None:
            yield "--optimizer lion", {"optimizer": "lion"}
        if settings.clip is not None:
            yield "--clip null", {"clip": None}
        if settings.state != "two_bytes":
            yield "--state two_bytes", {"state": "two_bytes"}
        if settings.lora_rank is None and settings.trainable is None:
            yield f"--lora-rank {_RANK}", {"lora_rank": _RANK}
